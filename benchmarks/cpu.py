"""cpu: how many processor seconds does a billion tokens take, with tokenloader and with each peer?

Each contestant runs in a process of its own. Its user and system time, worker processes included, is
counted from after its first batches. The data is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import contestants, measure, token_file

SHAPE = (32, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    token_file.add_arguments(parser, gib=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=3000)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.contestant:
        print(json.dumps(_seconds(options)))
        return
    with token_file.made(options) as path:
        path.read_bytes()  # into the page cache
        names = list(contestants.all_for(path, *SHAPE))
        rows: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                rows[name].append(_in_a_process(path, name, options.batches))
                measure.say(f"{name:32} {rows[name][-1]:7.2f} processor seconds a billion tokens")
    measure.write_result(
        "cpu",
        {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "warm",
            "shape": SHAPE,
            "batches": options.batches,
            "processor_seconds_per_billion_tokens": {
                name: round(statistics.median(row), 2) for name, row in rows.items()
            },
        },
    )


def _in_a_process(path: Path, name: str, batches: int) -> float:
    command = [sys.executable, "-m", "benchmarks", "cpu", "--file", str(path)]
    command += ["--contestant", name, "--batches", str(batches)]
    finished = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    return float(json.loads(finished.stdout.splitlines()[-1]))


def _seconds(options: argparse.Namespace) -> float:
    import jax

    stream = contestants.all_for(options.file, *SHAPE)[options.contestant]()
    for _ in range(100):
        jax.block_until_ready(next(stream))
    before = _used()
    for _ in range(options.batches):
        jax.block_until_ready(next(stream))
    return (_used() - before) / (options.batches * SHAPE[0] * SHAPE[1]) * 1e9


def _used() -> float:
    """Processor seconds of this process, its threads, and its living children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime + sum(map(_child_seconds, _children()))


def _children() -> list[Path]:
    tasks = Path("/proc/self/task")
    listed = [(task / "children").read_text().split() for task in tasks.iterdir()]
    found = [Path("/proc") / pid for pids in listed for pid in pids]
    # The workers of PyTorch's fork server are its children, our grandchildren.
    grand = [(child / "task" / child.name / "children").read_text().split() for child in found]
    return found + [Path("/proc") / pid for pids in grand for pid in pids]


def _child_seconds(process: Path) -> float:
    fields: list[Any] = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
