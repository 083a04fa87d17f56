"""The pipeline of the background thread: plan, announce, gather, transfer, one step after the other.

It is a generator and knows nothing of threads: whoever iterates over it runs it. What it yields is
on its way to the device.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import Sharding
from numpy.typing import NDArray

from tokenloader._plans import Plan
from tokenloader._tokens import TokenArray
from tokenloader._transfer import put

# Plan arithmetic costs 0.1 us a sample in blocks of 4,096 and 10 us in blocks of 32.
_PLAN_SAMPLES = 4096
# Batches announced to the disk before they are gathered.
_LOOK_AHEAD = 8


class Step(NamedTuple):
    sample: int  # the first of its samples
    starts: NDArray[np.int64]  # [B]
    new_targets: NDArray[np.int32] | None  # [B, 1]


class Block(NamedTuple):
    sample: int
    tokens: jax.Array  # [B, T + 1]
    new_targets: jax.Array | None  # [B, 1]


@dataclass
class Counters:
    """Written by one thread each: the first two by the caller's, the others by the background's."""

    batches: int = 0
    wait_seconds: float = 0.0
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    major_page_faults: int = 0


def plan_steps(
    plan: Plan, num_tokens: int, seq_len: int, batch_size: int, sample: int, end: int | None
) -> Iterator[Step]:
    """The plan's steps from a sample on, computed for many steps at once."""
    while end is None or sample < end:
        num_steps = max(1, _PLAN_SAMPLES // batch_size)
        if end is not None:
            num_steps = min(num_steps, -(-(end - sample) // batch_size))
        samples = np.arange(sample, sample + num_steps * batch_size, dtype=np.int64)
        with TraceAnnotation("tokenloader.plan"):
            starts = plan.starts(samples, num_tokens=num_tokens, seq_len=seq_len)
            starts = starts.reshape(num_steps, batch_size)
            new = None
            if hasattr(plan, "new_targets"):
                new = plan.new_targets(samples, num_tokens=num_tokens, seq_len=seq_len)
                new = new.astype(np.int32).reshape(num_steps, batch_size, 1)
        for i in range(num_steps):
            yield Step(sample + i * batch_size, starts[i], None if new is None else new[i])
        sample += num_steps * batch_size


def produce(
    tokens: TokenArray,
    steps: Iterator[Step],
    window: int,
    sharding: Sharding,
    counters: Counters,
) -> Iterator[Block]:
    """Runs on the background thread: announces, gathers and transfers one step after the other."""
    announced: deque[Step] = deque()
    while True:
        with TraceAnnotation("tokenloader.look_ahead"):
            for step in itertools.islice(steps, 1 + _LOOK_AHEAD - len(announced)):
                tokens.will_need(step.starts, window)
                announced.append(step)
        if not announced:
            return
        step = announced.popleft()
        with TraceAnnotation("tokenloader.gather"):
            began, faults = time.perf_counter(), _major_page_faults()
            block = tokens.gather(step.starts, window)
            counters.major_page_faults += _major_page_faults() - faults
            counters.gather_seconds += time.perf_counter() - began
        with TraceAnnotation("tokenloader.transfer"):
            began = time.perf_counter()
            on_device = put(block, step.new_targets, sharding)
            counters.transfer_seconds += time.perf_counter() - began
        del block  # jax's from here on
        yield Block(step.sample, *on_device)


def _major_page_faults() -> int:
    """Of the calling thread; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
