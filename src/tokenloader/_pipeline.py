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

# A sample's plan arithmetic in blocks of 32 costs some fifty times what it does in blocks of 4,096.
_PLAN_SAMPLES = 4096
# How far ahead windows are announced to the disk: so many that its queue stays full, and at least two
# batches. Cold, 32x1024 on a virtual NVMe disk: 16 batches reach what 32 do, 8 come 6% short, 2 a quarter.
_AHEAD_WINDOWS = 512
_AHEAD_BYTES = 32 << 20
# After so many batches without a miss, the data counts as cached, and is no longer announced.
_BATCHES_WITHOUT_MISS = 64


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
            starts = np.asarray(plan.starts(samples, num_tokens=num_tokens, seq_len=seq_len))
            if starts.shape != samples.shape or starts.dtype.kind not in "iu":
                raise ValueError(
                    f"{plan!r}: starts gave {starts.dtype}{list(starts.shape)} for {len(samples)} "
                    f"samples; needed is an integer for each"
                )
            starts = starts.astype(np.int64, copy=False).reshape(num_steps, batch_size)
            new = None
            if hasattr(plan, "new_targets"):
                new = plan.new_targets(samples, num_tokens=num_tokens, seq_len=seq_len)
                new = new.astype(np.int32).reshape(num_steps, batch_size, 1)
        for i in range(num_steps):
            yield Step(sample + i * batch_size, starts[i], None if new is None else new[i])
        sample += num_steps * batch_size


class LookAhead:
    """Announces steps to the disk before they are gathered, while that gains something.

    One window of each step is probed (2 us) some steps before its turn, when nobody has asked for it
    yet: the windows are spread over the data, so the probes tell how much of it is cached. They go on
    when announcing has stopped, and so it begins again when the cache is lost.

    Args:
        steps: in order.
        depth: steps to announce ahead, 1 or more.
    """

    def __init__(self, tokens: TokenArray, steps: Iterator[Step], window: int, depth: int) -> None:
        self._tokens, self._steps, self._window, self._depth = tokens, steps, window, depth
        self._ahead: deque[Step] = deque()
        self._announcing = _BATCHES_WITHOUT_MISS  # so many batches more

    def next_step(self) -> Step | None:
        """The next step to gather; None after the last."""
        for step in itertools.islice(self._steps, 1 + self._depth - len(self._ahead)):
            if not self._tokens.is_cached(int(step.starts[0])):
                self.missed()
            if self._announcing:
                self._announcing -= 1
                self._tokens.will_need(step.starts, self._window)
            self._ahead.append(step)
        return self._ahead.popleft() if self._ahead else None

    def missed(self) -> None:
        """Something was not in memory."""
        self._announcing = _BATCHES_WITHOUT_MISS


def look_ahead_depth(batch_size: int, window_bytes: int) -> int:
    """Steps to announce ahead."""
    windows = min(_AHEAD_WINDOWS, _AHEAD_BYTES // window_bytes)
    return max(2, -(-windows // batch_size))


def produce(
    tokens: TokenArray,
    steps: Iterator[Step],
    batch_size: int,
    window: int,
    sharding: Sharding,
    counters: Counters,
) -> Iterator[Block]:
    """Runs on the background thread: announces, gathers and transfers one step after the other."""
    depth = look_ahead_depth(batch_size, window * tokens.dtype.itemsize)
    look_ahead = LookAhead(tokens, steps, window, depth)
    while True:
        with TraceAnnotation("tokenloader.look_ahead"):
            step = look_ahead.next_step()
        if step is None:
            return
        with TraceAnnotation("tokenloader.gather"):
            began, faults_before = time.perf_counter(), _major_page_faults()
            block = tokens.gather(step.starts, window)
            if faults := _major_page_faults() - faults_before:
                counters.major_page_faults += faults
                look_ahead.missed()
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
