"""scale: does opening, a batch, or a resume cost more when the data or the step number is larger?

The files are sparse: offsets and page tables see their full size, and they take no disk. Sizes take
turns within each round. A second table tells whether a host has more to do when there are more hosts:
they are simulated by the loader's own placement, plan and windows, for a mesh of which this process has
the devices of the last host.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import tokenloader as tl
from benchmarks import measure, token_file
from tokenloader.loader.sharding import Placement
from tokenloader.loader.steps import Step, plan_steps
from tokenloader.loader.transfer import gather_starts
from tokenloader.plans.cursor import BatchSizeSchedule, Cursor
from tokenloader.plans.state import RunState

SIZES = {"1 GiB": 2**29, "19.09 GiB": token_file.FULL_NUM_TOKENS, "8 TiB": 2**42}
HOSTS = [1, 8, 64, 512, 4096]
DEVICES_PER_HOST = 8
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
                    made = do()
                    took = time.perf_counter() - began
                    if isinstance(made, tl.TokenLoader):
                        made.close()  # or its prefetching would slow down what is timed next
                    seconds.setdefault(what, {}).setdefault(size, []).append(took)
    table = {
        what: {size: round(1e6 * statistics.median(times), 1) for size, times in by_size.items()}
        for what, by_size in seconds.items()
    }
    for what, row in table.items():
        measure.say(f"{what:28} {row}  largest / smallest: {max(row.values()) / min(row.values()):.2f}")
    hosts = _hosts(options.rounds)
    measure.write_result(
        "scale",
        {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "sparse files: nothing is read from the disk",
            "shape": SHAPE,
            "rounds": options.rounds,
            "hosts": hosts,
            "microseconds": table,
            "largest_over_smallest": {
                what: round(max(row.values()) / min(row.values()), 3) for what, row in table.items()
            },
        },
    )


def _hosts(rounds: int) -> list[dict[str, float]]:
    """Time the planning of one host of many; each has SHAPE[0] rows of the global batch."""
    plan = tl.ShuffledEpochs(0).bind(token_file.FULL_NUM_TOKENS, SHAPE[1])
    plans: dict[int, Iterator[Step]] = {}
    placements, seconds = {}, {}
    for hosts in HOSTS:
        placements[hosts] = placement = Placement(_LastHost(hosts), hosts * SHAPE[0], SHAPE[1], 1)
        plans[hosts] = plan_steps(Cursor.begin(plan, placement.batch_size), placement.rows)
        seconds[hosts] = []
    num_steps = 128  # the steps that plan_steps computes at once
    for _ in range(rounds):
        for hosts, steps in plans.items():
            began = time.perf_counter()
            for step in itertools.islice(steps, num_steps):
                windows = gather_starts(step.window_starts[None], placements[hosts])
            seconds[hosts].append((time.perf_counter() - began) / num_steps)
            assert len(set(windows.tolist())) == len(windows) == SHAPE[0]
    rows = []
    for hosts, times in seconds.items():
        row = {
            "hosts": hosts,
            "batch_size": hosts * SHAPE[0],
            "rows_gathered": len(placements[hosts].rows),
            "plan_microseconds_per_step": round(1e6 * statistics.median(times), 2),
        }
        measure.say(f"{row}")
        rows.append(row)
    return rows


class _LastHost(jax.sharding.Sharding):
    """Rows split evenly over the devices of many hosts, as the last host sees them."""

    is_fully_addressable = False

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts

    def addressable_devices_indices_map(self, global_shape: tuple[int, ...]) -> dict[Any, Any]:
        rows = global_shape[0] // (self._hosts * DEVICES_PER_HOST)
        first = global_shape[0] - rows * DEVICES_PER_HOST
        begins = range(first, global_shape[0], rows)
        return {i: (slice(begin, begin + rows), slice(None)) for i, begin in enumerate(begins)}


def _works(path: Path) -> dict[str, Callable[[], Any]]:
    tokens = tl.open_tokens(path)
    loader = tl.TokenLoader(tokens, *SHAPE)
    works: dict[str, Callable[[], Any]] = {"open": lambda: tl.open_tokens(path)}
    for name, step in STEPS.items():
        bound = loader.plan.bind(len(tokens), SHAPE[1])
        cursor = Cursor.at(bound, BatchSizeSchedule.constant(SHAPE[0]), step)
        run = RunState.of_run(cursor, seq_len=SHAPE[1], data=tokens.fingerprint())
        state = run.to_dict()

        def resume(state: dict[str, Any] = state) -> tl.TokenLoader:
            resumed = tl.TokenLoader(tokens, *SHAPE)
            resumed.set_state(state)
            jax.block_until_ready(next(resumed))
            return resumed

        works[f"starts at {name}"] = lambda step=step: loader.window_starts(step)
        works[f"batch at {name}"] = lambda step=step: loader.window_tokens(step)
        works[f"resume at {name}"] = resume
    return works


def _sparse(path: Path, num_tokens: int) -> Path:
    with path.open("wb") as file:
        head = token_file.header(num_tokens)
        file.write(head)
        file.truncate(len(head) + 2 * num_tokens)
    return path
