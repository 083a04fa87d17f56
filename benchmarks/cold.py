"""cold: how many windows a second come off the disk, against what the disk itself can do?

The page cache is dropped before every turn (/proc/sys/vm/drop_caches; needs root). fio reads 4 KiB at
random places of the same file, 64 reads at a time. A window of 2,050 bytes lies in one page of 4 KiB or
in two adjacent ones, so a window is one read, and every other read is of 8 KiB; fio also measures that
mix. All of it runs at the kernel's read-ahead as it is, and at 128 KiB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tokenloader as tl
from benchmarks import contestants, measure, token_file

SHAPE = (32, 1024)
PAGE = 4096  # bytes of a page, the least that is read from the disk
FIO_WINDOWS = "fio, the windows' pages, depth 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    token_file.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each turn")


def run(options: argparse.Namespace) -> None:
    if not measure.can_drop_page_cache():
        measure.say("skipped: cold (dropping the page cache needs root)")
        return
    with token_file.made(options) as path:
        rows = []
        for read_ahead_kib in (None, 128):
            with _read_ahead(path, read_ahead_kib) as kib:
                rows.append({"read_ahead_kib": kib, **_measure(path, options)})
    measure.write_result(
        "cold",
        {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "dropped before every turn",
            "gib": round(token_file.size_of(options) / 2**30, 2),
            "shape": SHAPE,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "rows": rows,
        },
    )


def _measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    turns: dict[str, Callable[[int], float]] = {
        "tokenloader": lambda turn: _windows_per_second(partial(_ours, path, turn), options.seconds),
        "np.memmap in a loop": lambda turn: _windows_per_second(
            partial(contestants.nanogpt, path, *SHAPE, seed=turn), options.seconds
        ),
    }
    if shutil.which("fio"):
        turns["fio, 4 KiB, depth 64"] = lambda turn: _fio(path, options.seconds, "--bs=4k")
        turns[FIO_WINDOWS] = lambda turn: _fio(path, options.seconds, _pages_of_windows())
    else:
        measure.say("skipped: fio is not installed")
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(options.rounds):
        for name, take_turn in turns.items():
            measure.drop_page_cache()
            rates[name].append(take_turn(turn))
            measure.say(f"round {turn}: {name:22} {rates[name][-1]:12,.0f} windows or reads/s")
    ours = rates["tokenloader"]
    return {
        name: {
            "windows_per_second": round(statistics.median(rate)),
            "tokenloader_is_times_this": round(measure.median_ratio(ours, rate), 3),
        }
        for name, rate in rates.items()
    }


def _ours(path: Path, seed: int) -> Iterator[Any]:
    return tl.TokenLoader(tl.open_tokens(path), *SHAPE, plan=tl.ShuffledEpochs(seed))


def _windows_per_second(make: Callable[[], Iterator[Any]], seconds: float) -> float:
    stream, batches = make(), 0
    jax.block_until_ready(next(stream))  # compiles
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not batches:
        jax.block_until_ready(next(stream))
        batches += 1
    return batches * SHAPE[0] / elapsed


def _pages_of_windows() -> str:
    """The option of fio for reads of the pages that windows lie in: one page, or two at a crossing."""
    # Percent of the windows that cross into the next page: their first byte lies anywhere in a page.
    crossing = round(100 * 2 * SHAPE[1] / PAGE)
    return f"--bssplit=4k/{100 - crossing}:8k/{crossing}"


def _fio(path: Path, seconds: float, sizes: str) -> float:
    command = ["fio", "--name=random", f"--filename={path}", "--readonly", "--rw=randread"]
    command += [sizes, "--iodepth=64", "--ioengine=libaio", "--direct=1", "--time_based"]
    command += [f"--runtime={seconds}", f"--randseed={np.random.default_rng().integers(2**31)}"]
    finished = subprocess.run(
        [*command, "--output-format=json"], capture_output=True, text=True, check=True
    )
    return float(json.loads(finished.stdout)["jobs"][0]["read"]["iops"])


@contextmanager
def _read_ahead(path: Path, kib: int | None) -> Iterator[int | None]:
    """Set the read-ahead of the file's disk, unless kib is None; yields the KiB in effect."""
    device = path.stat().st_dev
    setting = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb")
    if not setting.exists():
        yield None
        return
    before = setting.read_text()
    if kib is not None:
        setting.write_text(str(kib))
    try:
        yield int(setting.read_text())
    finally:
        setting.write_text(before)
