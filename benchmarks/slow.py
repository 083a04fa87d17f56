"""slow: on a slow disk, how near does a near-random order come to reads in file order?

Each turn runs in a process of its own, in a control group that holds its reads of the disk to a number and
to bytes a second (see disk_limits), with the page cache dropped before it (needs root). Batches of 32x1024
are waited for on the device. The beginning is timed by itself: the first batch, and the windows during
which ShuffledBlocks opens all its blocks. Counting starts when half as many more have come and 5 seconds
are over. A turn ends with its epoch at the latest, so that each window comes from the disk. The file should
be much larger than the open blocks; one of less than a few GiB is in memory before counting starts.

fio reads the file in order, 1 MiB at a time: 8 at once past the page cache, and one by one through it. Its
bytes are told as windows of 2,048, as many as each window adds. The group counts requests and bytes.

ShuffledBlocks has one more turn, in a group that is also held to 1.5 GiB of memory beyond what the process
has when it joins; the page cache counts. Counting starts when that is full. Where blocks are then evicted
before their windows were used, more bytes are read than used.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tokenloader as tl
from benchmarks import measure, token_file
from benchmarks.disk_limits import ControlGroup, DiskLimits, Reads, limited, why_not
from tokenloader.check.info import cached_share

SHAPE = (32, 1024)
PREFETCH = 8
BLOCKS, EPOCHS, IN_ORDER = "ShuffledBlocks", "ShuffledEpochs", "SequentialWindows"
FIO = "fio, 1 MiB, depth 8"

_LIMITS = {
    "3,000 reads/s and 125 MB/s": DiskLimits(3000, 125_000_000),  # the default of common cloud volumes
    "500 reads/s and 200 MB/s": DiskLimits(500, 200_000_000),  # a spinning disk
    "unlimited": DiskLimits(),
}
_WINDOW_BYTES = 2 * SHAPE[1]  # that are new in each window
_OPENING_STEPS = tl.ShuffledBlocks(0).open_blocks // SHAPE[0]
_SETTLE_SECONDS, _FIO_SECONDS = 5.0, 3.0
_MEMORY_BYTES = 3 << 29
_FILL_SECONDS = 15.0  # 1.5 GiB at 125 MB/s take 13

Turn = Callable[[ControlGroup], dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    token_file.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of what counts of each turn")


def run(options: argparse.Namespace) -> None:
    reason = why_not(options.file or Path(tempfile.gettempdir()))
    if reason or not measure.can_drop_page_cache():
        measure.say(f"skipped: slow ({reason or 'dropping the page cache needs root'})")
        return
    with token_file.made(options) as path:
        rows = [_measure(path, name, limits, options) for name, limits in _LIMITS.items()]
        in_memory = _in_little_memory(path, options.seconds)
    measure.write_result(
        "slow",
        {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "dropped before every turn",
            "reads": "counted by the control group",
            "gib": round(token_file.size_of(options) / 2**30, 2),
            "shape": SHAPE,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "rows": rows,
            "in_little_memory": in_memory,
        },
    )


def _measure(path: Path, name: str, limits: DiskLimits, options: argparse.Namespace) -> dict[str, Any]:
    turns = _turns(path, options.seconds)
    found: dict[str, list[dict[str, float]]] = {contestant: [] for contestant in turns}
    order = list(turns)
    for i in range(options.rounds):
        for contestant in order[i % len(order) :] + order[: i % len(order)]:
            found[contestant].append(_in_a_process(turns[contestant], path, limits))
            measure.say(f"{name}, round {i}, {contestant}: {_told(found[contestant][-1])}")
    rates = {name: [turn["windows_per_second"] for turn in turns] for name, turns in found.items()}
    return {
        "limits": name,
        "reads_per_second": limits.reads_per_second,
        "bytes_per_second": limits.bytes_per_second,
        "contestants": {
            name: {
                **{key: statistics.median(turn[key] for turn in turns) for key in turns[0]},
                "lowest_and_highest": [min(rates[name]), max(rates[name])],
                "is_times": {
                    other: round(measure.median_ratio(rates[name], rates[other]), 4)
                    for other in (EPOCHS, IN_ORDER, FIO)
                    if other in rates
                },
            }
            for name, turns in found.items()
        },
    }


def _in_little_memory(path: Path, seconds: float) -> dict[str, Any]:
    name, disk = next(iter(_LIMITS.items()))
    limits = DiskLimits(disk.reads_per_second, disk.bytes_per_second, _MEMORY_BYTES)
    plan = tl.ShuffledBlocks(0, num_epochs=1)
    found = _in_a_process(partial(_feed, path, plan, PREFETCH, _FILL_SECONDS, seconds), path, limits)
    measure.say(f"{name}, 1.5 GiB of memory, {BLOCKS}: {_told(found)}")
    return {"limits": name, "memory_mib": _MEMORY_BYTES >> 20, **found}


def _turns(path: Path, seconds: float) -> dict[str, Turn]:
    """Each contestant's turn, to be run in a process of its own."""
    plans: dict[str, tuple[tl.Plan, int]] = {
        EPOCHS: (tl.ShuffledEpochs(0, num_epochs=1), PREFETCH),
        BLOCKS: (tl.ShuffledBlocks(0, num_epochs=1), PREFETCH),
        f"{BLOCKS}, prefetch 2": (tl.ShuffledBlocks(0, num_epochs=1), 2),
        IN_ORDER: (tl.SequentialWindows(), PREFETCH),
    }
    turns: dict[str, Turn] = {
        name: partial(_feed, path, plan, prefetch, _SETTLE_SECONDS, seconds)
        for name, (plan, prefetch) in plans.items()
    }
    if shutil.which("fio"):
        runtime = min(seconds, _FIO_SECONDS)
        turns[FIO] = partial(_fio, path, runtime, ("--direct=1", "--ioengine=libaio", "--iodepth=8"))
        turns["fio, 1 MiB, page cache"] = partial(_fio, path, runtime, ("--direct=0", "--ioengine=psync"))
    else:
        measure.say("skipped: fio is not installed")
    return turns


def _in_a_process(turn: Turn, path: Path, limits: DiskLimits) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    with limited(path, limits) as group, ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(turn, group).result()


def _feed(
    path: Path, plan: tl.Plan, prefetch: int, settle_seconds: float, seconds: float, group: ControlGroup
) -> dict[str, float]:
    """Takes a plan's batches; returns what came when, and what that took from the disk."""
    small = tl.open_tokens(np.zeros(1 << 20, np.uint16))
    with tl.TokenLoader(small, *SHAPE, plan=plan, prefetch=prefetch) as loader:
        jax.block_until_ready(next(loader))  # starts jax, and compiles
    group.join()
    measure.drop_page_cache()
    began = time.perf_counter()
    tokens = tl.open_tokens(path)
    with tl.TokenLoader(tokens, *SHAPE, plan=plan, prefetch=prefetch) as loader:
        quarter = len(tokens) // SHAPE[1] // SHAPE[0] // 4  # of an epoch's steps, for small files
        opening = min(_OPENING_STEPS, quarter)

        def seconds_until(is_over: Callable[[float], bool]) -> float:
            while not is_over(elapsed := time.perf_counter() - began) and _take_one(loader):
                pass
            return elapsed

        first = seconds_until(lambda _: loader.step >= 1)
        opened = seconds_until(lambda _: loader.step >= opening)
        settled = seconds_until(
            lambda elapsed: (
                loader.step >= quarter or (loader.step >= opening * 3 // 2 and elapsed >= settle_seconds)
            )
        )
        step, before = loader.step, group.reads()
        ended = seconds_until(lambda elapsed: elapsed >= settled + seconds and loader.step > step)
        counted = _figures((loader.step - step) * SHAPE[0], ended - settled, before, group.reads())
    share, _ = cached_share(tokens.extents, num_probes=len(tokens))  # asks about every page
    return {
        **counted,
        "seconds_to_first_batch": round(first, 3),
        f"seconds_to_{_OPENING_STEPS * SHAPE[0]}_windows": round(opened, 3),
        "cached_mib": round((share or 0) * tokens.nbytes / 2**20),
    }


def _take_one(loader: Iterator[tl.Batch]) -> bool:
    """Takes a batch and waits for it; False at the end of the plan."""
    batch = next(loader, None)
    jax.block_until_ready(batch)
    return batch is not None


def _fio(path: Path, seconds: float, how: tuple[str, ...], group: ControlGroup) -> dict[str, float]:
    group.join()
    measure.drop_page_cache()
    command = ["fio", "--name=in-order", f"--filename={path}", "--readonly", "--rw=read", "--bs=1M", *how]
    command += ["--time_based", f"--runtime={seconds}", "--output-format=json"]
    subprocess.run(["fio", "--version"], capture_output=True, check=True)  # reads fio itself
    before = group.reads()
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(finished.stdout)["jobs"][0]["read"]
    return _figures(read["io_bytes"] / _WINDOW_BYTES, read["runtime"] / 1e3, before, group.reads())


def _figures(num_windows: float, seconds: float, before: Reads, after: Reads) -> dict[str, float]:
    requests, num_bytes = (b - a for a, b in zip(before, after, strict=True))
    return {
        "windows_per_second": round(num_windows / seconds, 1),
        "bytes_read_per_byte_used": round(num_bytes / (num_windows * _WINDOW_BYTES), 4),
        "reads_per_second": round(requests / seconds, 1),
        "kib_per_read": round(num_bytes / max(1, requests) / 1024, 1),
    }


def _told(figures: dict[str, float]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in figures.items())
