"""The pipeline of the background thread: plan, group, announce, gather, transfer.

Each stage is a generator over the one before it and knows nothing of threads: whoever iterates over the
last one runs them all. What comes out is on its way to the device.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from tokenloader.loader.groups import Group, group_steps
from tokenloader.loader.read_ahead import AHEAD_WINDOWS, Located, ReadAhead, read_ahead_depth
from tokenloader.loader.sharding import Placement
from tokenloader.loader.stats import Counters
from tokenloader.loader.steps import plan_steps
from tokenloader.loader.transfer import gather_starts, transfer
from tokenloader.plans.cursor import Cursor
from tokenloader.tokens.token_array import TokenArray


class Block(NamedTuple):
    """Steps on the device, before the transform. The first axis is there in groups of two or more."""

    step: int  # the number of the first
    num_steps: int  # without those that fill the group
    tokens: jax.Array  # [group size, B, columns]
    valid_targets: jax.Array | None  # [group size, B, 1]


def produce(
    tokens: TokenArray,
    cursor: Cursor,
    placement: Placement,
    group_size: int,
    counters: Counters,
    *,
    ahead_windows: int = AHEAD_WINDOWS,
) -> Iterator[Block]:
    """Yields the blocks of a run from a cursor on.

    An error comes after all blocks that can be had before it.
    """
    _let_malloc_keep_blocks()
    groups = group_steps(plan_steps(cursor, placement.rows), group_size)
    window_bytes = placement.window_len * tokens.dtype.itemsize
    depth = read_ahead_depth(group_size * len(placement.rows), window_bytes, ahead_windows)
    ahead = ReadAhead((_locate(tokens, group, placement) for group in groups), depth)
    while True:
        with TraceAnnotation("tokenloader.read_ahead"):
            located = ahead.next()
        if located is None:
            return
        try:
            block = _send(located, placement, counters, ahead)
        except Exception:
            # Over several processes all launch the same: one must not do alone what follows here.
            if located.group.num_steps == 1 or not placement.is_local:
                raise
            for group in located.group.split():  # its first steps may be readable
                yield _send(_locate(tokens, group, placement), placement, counters, ahead)
        else:
            yield block


def _locate(tokens: TokenArray, group: Group, placement: Placement) -> Located:
    starts = gather_starts(group.window_starts, placement)
    return Located(group, tokens.locate(starts, placement.window_len))


def _send(located: Located, placement: Placement, counters: Counters, ahead: ReadAhead) -> Block:
    """Gathers and transfers. When it returns the host's block is jax's, and nobody else's."""
    group, windows = located
    with TraceAnnotation("tokenloader.gather"):
        began, faults_before = time.perf_counter(), _major_page_faults()
        block = windows.copy()
        if faults := _major_page_faults() - faults_before:
            counters.major_page_faults += faults
            ahead.missed()
        counters.gather_seconds += time.perf_counter() - began
    with TraceAnnotation("tokenloader.transfer"):
        began = time.perf_counter()
        on_device = transfer(block, group.valid_targets, placement, len(group.window_starts))
        counters.transfer_seconds += time.perf_counter() - began
    return Block(group.step, group.num_steps, *on_device)


def _let_malloc_keep_blocks() -> None:
    """Keeps glibc from giving the memory of every batch back, to be faulted in anew for the next.

    glibc keeps freed blocks up to the size of the largest it has seen freed, to a limit of 32 MiB
    (mallopt(3), M_MMAP_THRESHOLD). Nothing is written to this one, so it takes no memory. On CPUs, whose
    arrays come from malloc as well, batches of 256x1024 take 0.6 of the time; elsewhere it does nothing.
    """
    np.empty(24 << 20, np.uint8)


def _major_page_faults() -> int:
    """Returns those of the calling thread; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
