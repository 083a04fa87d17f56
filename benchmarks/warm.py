"""warm: how many tokens a second come out, finished on the device, when the data is in memory?

The file is written by the program and read once before, so that it is in the page cache ("mmap" and
nanoGPT's way) or in RAM ("ram" and the bare parts).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import contestants, measure, token_file

SHAPES = [(8, 1024), (32, 1024), (256, 1024), (64, 4096), (8, 32768)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=1.0, help="size of the token file (default 1)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of each contestant in each round"
    )


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "train.safetensors"
        token_file.write(path, token_file.size_option(options.gib))
        path.read_bytes()  # into the page cache
        rows = [_measure(path, B, T, options) for B, T in SHAPES]
    measure.write_result(
        "warm",
        {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "warm: the file read once before; ram: all tokens in an array",
            "gib": options.gib,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "rows": rows,
        },
    )


def _measure(path: Path, B: int, T: int, options: argparse.Namespace) -> dict[str, object]:
    rates = measure.alternate(
        {
            "tokenloader, mmap": partial(contestants.ours, path, B, T, "mmap"),
            "tokenloader, ram": partial(contestants.ours, path, B, T, "ram"),
            "nanoGPT's way": partial(contestants.nanogpt, path, B, T),
            "bare parts": partial(contestants.bare_parts, path, B, T),
        },
        rounds=options.rounds,
        seconds=options.seconds,
    )
    result = {
        name: {
            "microseconds_per_batch": round(1e6 / statistics.median(rate), 1),
            "million_tokens_per_second": round(statistics.median(rate) * B * T / 1e6, 1),
            "ram_is_times_this": round(measure.median_ratio(rates["tokenloader, ram"], rate), 3),
        }
        for name, rate in rates.items()
    }
    for name, row in result.items():
        measure.say(
            f"{B}x{T} {name:18} {row['microseconds_per_batch']:9} us/batch, "
            f"tokenloader (ram) is {row['ram_is_times_this']} times as fast"
        )
    return {"batch_size": B, "seq_len": T, "contestants": result}
