"""scale: does opening, a batch, or a resume cost more when the data or the step number is larger?

The files are sparse: their size is real to every offset and every page table, and they take no disk.
Sizes take turns within each round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import tokenloader as tl
from benchmarks import measure, token_file

SIZES = {"1 GiB": 2**29, "19.09 GiB": token_file.FULL_NUM_TOKENS, "8 TiB": 2**42}
STEPS = {"sample 0": 0, "sample 10^12": 10**12 // 32}
SHAPE = (32, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=101)


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        paths = {name: _sparse(Path(directory) / name, size) for name, size in SIZES.items()}
        seconds: dict[str, dict[str, list[float]]] = {}
        works = {name: _works(path) for name, path in paths.items()}
        for _ in range(options.rounds):
            for size, work in works.items():
                for what, do in work.items():
                    began = time.perf_counter()
                    do()
                    took = time.perf_counter() - began
                    seconds.setdefault(what, {}).setdefault(size, []).append(took)
    table = {
        what: {size: round(1e6 * statistics.median(times), 1) for size, times in by_size.items()}
        for what, by_size in seconds.items()
    }
    for what, row in table.items():
        measure.say(
            f"{what:28} {row}  largest / smallest: {max(row.values()) / min(row.values()):.2f}"
        )
    measure.write_result(
        "scale",
        {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "sparse files: nothing is read from the disk",
            "shape": SHAPE,
            "rounds": options.rounds,
            "microseconds": table,
            "largest_over_smallest": {
                what: round(max(row.values()) / min(row.values()), 3) for what, row in table.items()
            },
        },
    )


def _works(path: Path) -> dict[str, Callable[[], Any]]:
    tokens = tl.open_tokens(path)
    loader = tl.TokenLoader(tokens, *SHAPE)
    resumed = tl.TokenLoader(tokens, *SHAPE)
    works: dict[str, Callable[[], Any]] = {"open": lambda: tl.open_tokens(path)}
    for name, step in STEPS.items():
        state = {**loader.get_state(), "step": step, "sample": step * SHAPE[0]}

        def resume(state: dict[str, Any] = state) -> None:
            resumed.set_state(state)
            jax.block_until_ready(next(resumed))

        works[f"starts at {name}"] = lambda step=step: loader.starts_at(step)
        works[f"batch at {name}"] = lambda step=step: loader.batch_at(step)
        works[f"resume at {name}"] = resume
    return works


def _sparse(path: Path, num_tokens: int) -> Path:
    with path.open("wb") as file:
        head = token_file.header(num_tokens)
        file.write(head)
        file.truncate(len(head) + 2 * num_tokens)
    return path
