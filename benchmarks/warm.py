"""warm: how many tokens a second come out, finished on the device, when the data is in memory?

The program writes a token file and reads it once, so that it is in the page cache; "ram", the bare parts
and the CPU jax.Array hold the tokens in memory of their own.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks import contestants, measure, token_file

SHAPES = [(8, 1024), (32, 1024), (256, 1024), (64, 4096), (8, 32768)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    token_file.add_arguments(parser, gib=1.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="time of each contestant in each round")


def run(options: argparse.Namespace) -> None:
    with token_file.made(options) as path:
        path.read_bytes()  # into the page cache
        rows = [_measure(path, B, T, options) for B, T in SHAPES]
    measure.write_result(
        "warm",
        {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "warm: the file read once before; ram: all tokens in an array",
            "gib": round(token_file.size_of(options) / 2**30, 2),
            "rounds": options.rounds,
            "seconds": options.seconds,
            "rows": rows,
        },
    )


def _measure(path: Path, B: int, T: int, options: argparse.Namespace) -> dict[str, object]:
    everyone = contestants.all_for(path, B, T)
    rates = measure.alternate(everyone, rounds=options.rounds, seconds=options.seconds)
    ours = rates["tokenloader, ram"]
    result = {
        name: {
            "microseconds_per_batch": round(1e6 / statistics.median(rate), 1),
            "million_tokens_per_second": round(statistics.median(rate) * B * T / 1e6, 1),
            "ram_is_times_this": round(measure.median_ratio(ours, rate), 3),
        }
        for name, rate in rates.items()
    }
    for name, row in result.items():
        measure.say(
            f"{B:>4}x{T:<6} {name:30} {row['microseconds_per_batch']:9} us/batch; "
            f"tokenloader (ram) is {row['ram_is_times_this']:6} times as fast"
        )
    return {"batch_size": B, "seq_len": T, "contestants": result}
