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
from contextlib import nullcontext, suppress
from typing import NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from numpy.typing import NDArray

from tokenloader.loader.sharding import Placement
from tokenloader.loader.stats import Counters
from tokenloader.loader.transfer import put
from tokenloader.plans.plan import Plan
from tokenloader.tokens.token_array import TokenArray

# A sample's plan arithmetic in blocks of 32 costs some fifty times what it does in blocks of 4,096.
_PLAN_SAMPLES = 4096
# How far ahead windows are announced to the disk: so many that its queue stays full, and at least two
# batches. Cold, 32x1024 on a virtual NVMe disk: 16 batches reach what 32 do, 8 come 6% short, 2 a quarter.
_AHEAD_WINDOWS = 512
_AHEAD_BYTES = 32 << 20
# After so many groups without a miss, the data counts as cached, and is no longer announced.
_GROUPS_WITHOUT_MISS = 64


# Batches that are sent as one: a batch of 32x1024 costs two thirds of what it does alone with two, under
# half with four. Past this size the bytes themselves are what costs.
_GROUP_BYTES = 256 << 10


class Steps(NamedTuple):
    """Consecutive steps, which share one gather, one transfer and one launch of the transform.

    There are always as many: where fewer are left, the last is repeated, so that no shape changes. n is
    the number of rows that this process's devices hold.
    """

    sample: int  # the first of the first step
    num_steps: int  # that count
    starts: NDArray[np.int64]  # [group, n]
    new_targets: NDArray[np.int32] | None  # [group, n, 1]


class Block(NamedTuple):
    sample: int  # the first of the first step
    num_steps: int  # that count
    tokens: jax.Array  # [B, columns], or [group, B, columns]
    new_targets: jax.Array | None  # [B, 1], or [group, B, 1]


def group_size(batch_bytes: int, prefetch: int) -> int:
    """How many steps are sent as one.

    While one group is handed out others wait, together prefetch + 2 batches at most.
    """
    return max(1, min(1 + prefetch // 2, _GROUP_BYTES // batch_bytes))


def plan_steps(
    plan: Plan, num_tokens: int, placement: Placement, group: int, sample: int, end: int | None
) -> Iterator[Steps]:
    """The plan's steps from a sample on, `group` at a time, computed for many at once.

    No step begins at sample `end` or later.
    """
    batch_size, seq_len, rows = placement.batch_size, placement.seq_len, placement.rows
    while end is None or sample < end:
        num_steps = group * max(1, _PLAN_SAMPLES // (group * len(rows)))
        if end is not None:
            num_steps = min(num_steps, -(-(end - sample) // batch_size))
        first = np.arange(sample, sample + num_steps * batch_size, batch_size, dtype=np.int64)
        samples = (first[:, None] + rows).reshape(-1)
        with TraceAnnotation("tokenloader.plan"):
            starts = np.asarray(plan.starts(samples, num_tokens=num_tokens, seq_len=seq_len))
            if starts.shape != samples.shape or starts.dtype.kind not in "iu":
                raise ValueError(
                    f"{plan!r}: starts gave {starts.dtype}{list(starts.shape)} for {len(samples)} "
                    f"samples; needed is an integer for each"
                )
            starts = starts.astype(np.int64, copy=False).reshape(num_steps, len(rows))
            new = None
            if hasattr(plan, "new_targets"):
                new = plan.new_targets(samples, num_tokens=num_tokens, seq_len=seq_len)
                new = new.astype(np.int32).reshape(num_steps, len(rows), 1)
        for i in range(0, num_steps, group):
            yield _filled(
                int(first[i]),
                starts[i : i + group],
                None if new is None else new[i : i + group],
                group,
            )
        sample += num_steps * batch_size


def _filled(
    sample: int, starts: NDArray[np.int64], new: NDArray[np.int32] | None, group: int
) -> Steps:
    """Up to `group` steps as a group."""
    num_steps = len(starts)
    if num_steps < group:
        which = np.minimum(np.arange(group), num_steps - 1)
        starts, new = starts[which], None if new is None else new[which]
    return Steps(sample, num_steps, starts, new)


def _one_by_one(steps: Steps, batch_size: int) -> Iterator[Steps]:
    """The same steps, each in a group of its own."""
    for i in range(steps.num_steps):
        this = slice(i, i + 1)
        new = None if steps.new_targets is None else steps.new_targets[this]
        yield _filled(steps.sample + i * batch_size, steps.starts[this], new, len(steps.starts))


class LookAhead:
    """Announces steps to the disk before they are gathered, while that gains something.

    One window of each group is probed (2 us) some groups before its turn, when nobody has asked for it
    yet: the windows are spread over the data, so the probes tell how much of it is cached. They go on
    when announcing has stopped, and so it begins again when the cache is lost.

    Args:
        groups: of steps, in order.
        depth: groups to announce ahead, 1 or more.
    """

    def __init__(
        self, tokens: TokenArray, groups: Iterator[Steps], placement: Placement, depth: int
    ) -> None:
        self._tokens, self._groups, self._placement = tokens, groups, placement
        self._depth = depth
        self._ahead: deque[Steps] = deque()
        self._announcing = _GROUPS_WITHOUT_MISS  # so many more

    def next_steps(self) -> Steps | None:
        """The next steps to gather; None after the last."""
        for steps in itertools.islice(self._groups, 1 + self._depth - len(self._ahead)):
            if not self._tokens.is_cached(int(steps.starts[0, 0])):
                self.missed()
            if self._announcing:
                self._announcing -= 1
                self._tokens.prefetch(self._placement.windows(steps.starts), self._placement.window)
            self._ahead.append(steps)
        return self._ahead.popleft() if self._ahead else None

    def missed(self) -> None:
        """Something was not in memory."""
        self._announcing = _GROUPS_WITHOUT_MISS


def look_ahead_depth(rows: int, window_bytes: int) -> int:
    """Groups to announce ahead.

    Args:
        rows: windows in a group.
    """
    windows = min(_AHEAD_WINDOWS, _AHEAD_BYTES // window_bytes)
    return max(2, -(-windows // rows))


def produce(
    tokens: TokenArray,
    groups: Iterator[Steps],
    placement: Placement,
    group: int,
    counters: Counters,
) -> Iterator[Block]:
    """Runs on the background thread: announces, gathers and transfers one group after the other."""
    _let_malloc_keep_blocks()
    window_bytes = (placement.seq_len + 1) * tokens.dtype.itemsize
    depth = look_ahead_depth(group * len(placement.rows), window_bytes)
    look_ahead = LookAhead(tokens, groups, placement, depth)
    while True:
        with TraceAnnotation("tokenloader.look_ahead"):
            steps = look_ahead.next_steps()
        if steps is None:
            return
        # Over several processes all launch the same: one must not do alone what follows here.
        may_split = steps.num_steps > 1 and placement.sharding.is_fully_addressable
        with suppress(Exception) if may_split else nullcontext():
            yield _send(tokens, steps, placement, counters, look_ahead)
            continue
        # What can be read of them is handed out before the error is raised.
        for one in _one_by_one(steps, placement.batch_size):
            yield _send(tokens, one, placement, counters, look_ahead)


def _send(
    tokens: TokenArray,
    steps: Steps,
    placement: Placement,
    counters: Counters,
    look_ahead: LookAhead,
) -> Block:
    """Gathers and transfers. When it returns the host's block is jax's, and nobody else's."""
    with TraceAnnotation("tokenloader.gather"):
        began, faults_before = time.perf_counter(), _major_page_faults()
        windows = tokens.gather(placement.windows(steps.starts), placement.window)
        if faults := _major_page_faults() - faults_before:
            counters.major_page_faults += faults
            look_ahead.missed()
        counters.gather_seconds += time.perf_counter() - began
    with TraceAnnotation("tokenloader.transfer"):
        began = time.perf_counter()
        on_device = put(windows, steps.new_targets, placement, len(steps.starts))
        counters.transfer_seconds += time.perf_counter() - began
    return Block(steps.sample, steps.num_steps, *on_device)


def _let_malloc_keep_blocks() -> None:
    """Keeps glibc from giving the memory of every batch back, to be faulted in anew for the next.

    It keeps freed blocks up to the size of the largest it has seen freed, to a limit of 32 MiB (mallopt(3),
    M_MMAP_THRESHOLD). Nothing is written to this one, so it takes no memory. On CPUs, whose arrays come
    from malloc as well, batches of 256x1024 take 0.6 of the time; elsewhere it does nothing.
    """
    np.empty(24 << 20, np.uint8)


def _major_page_faults() -> int:
    """Of the calling thread; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
