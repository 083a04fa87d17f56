"""The pipeline of the background thread: plan, group, announce, gather, transfer.

Each stage is a generator over the one before it and knows nothing of threads: iterating over the last
runs them all. The blocks that come out are on their way to the device.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from tokenloader.formats.quoting import printable
from tokenloader.loader.block_reader import BlockReader, ahead_steps
from tokenloader.loader.groups import Group, group_steps
from tokenloader.loader.read_ahead import AHEAD_WINDOWS, Located, ReadAhead, read_ahead_depth
from tokenloader.loader.sharding import Placement
from tokenloader.loader.stats import Counters
from tokenloader.loader.steps import plan_reads, plan_steps
from tokenloader.loader.transfer import gather_starts, transfer
from tokenloader.plans.cursor import Cursor
from tokenloader.tokens.token_array import TokenArray


class Block(NamedTuple):
    """A group of steps on the device, before the transform; a group of one has no first axis."""

    step: int  # number of the first step
    num_steps: int  # steps without the repeated ones
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

    A step that cannot be read or sent raises after the blocks of all steps before it. In one process, a
    group that fails is tried again step by step; several processes must launch the same programs, so
    there its error is raised as it is.
    """
    _let_malloc_keep_blocks()
    groups = group_steps(plan_steps(cursor, placement.rows), group_size)
    window_bytes = placement.window_len * tokens.dtype.itemsize
    depth = read_ahead_depth(group_size * len(placement.rows), window_bytes, ahead_windows)
    locate = partial(_locate, tokens, placement)
    reads = plan_reads(cursor, placement.rows, len(tokens))
    row_bytes = (placement.seq_len + 1) * tokens.dtype.itemsize
    blocks = BlockReader(tokens, reads, ahead_steps(len(placement.rows), row_bytes))
    ahead = ReadAhead(map(locate, groups), depth, reads_blocks=blocks.has_blocks)
    send = partial(_send, placement, counters, blocks, ahead)
    while True:
        block = None  # the last one is its taker's alone while the next is made
        counters.task = "planning", None
        with TraceAnnotation("tokenloader.read_ahead"):
            located = ahead.next()
            if located is None:
                return
            blocks.submit(located.group.last_step)
        try:
            block = send(located)
        except Exception:
            if located.group.num_steps == 1 or not placement.is_local:
                raise
        if block is None:  # outside the handler, so that no error is chained to the first
            yield from map(send, map(locate, located.group.split()))
        else:
            yield block


def _locate(tokens: TokenArray, placement: Placement, group: Group) -> Located:
    starts = gather_starts(group.window_starts, placement)
    return Located(group, tokens.locate(starts, placement.window_len))


def _send(
    placement: Placement, counters: Counters, blocks: BlockReader, ahead: ReadAhead, located: Located
) -> Block:
    """Gathers and transfers a group. The host's block is jax's from here on, and nobody else's."""
    group, windows = located
    counters.task = "reading", located
    with TraceAnnotation("tokenloader.gather"), counters.gathering:
        blocks.wait_for(group.last_step)
        faults, reads = counters.count_faults(), counters.count_reads()
        block = windows.copy()
        counters.major_page_faults += counters.count_faults() - faults
        if counters.count_reads() > reads:  # of pages that nobody had announced, or that were evicted
            ahead.missed()
    counters.task = "sending", located
    with TraceAnnotation("tokenloader.transfer"), counters.transferring:
        on_device = transfer(block, group.valid_targets, placement, len(group.window_starts))
    return Block(group.step, group.num_steps, *on_device)


def task_in_words(task: tuple[str, Located | None]) -> str:
    """Returns what the background thread is doing, and which byte of which file it waits for."""
    doing, located = task
    if located is None:
        return "is asking the plan for the next windows, and announcing them to the disk"
    first, last = located.group.step, located.group.last_step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    if doing == "sending":
        return f"is sending {steps} to the devices"
    if (place := located.windows.first_not_cached()) is None:
        return f"is reading {steps}, whose tokens are in memory"
    path, offset_bytes = place
    file = printable(str(path))
    return f"is reading {steps}, and waits for byte {offset_bytes:,} of {file}; is its disk slow, or stuck?"


def _let_malloc_keep_blocks() -> None:
    """Keeps glibc from giving the memory of every batch back, to be faulted in anew for the next.

    glibc keeps freed blocks up to the size of the largest it has seen freed, to a limit of 32 MiB
    (mallopt(3), M_MMAP_THRESHOLD). Nothing is written to this array, so it takes no memory. On CPUs, whose
    arrays come from malloc as well, batches of 256x1024 take 0.6 of the time; elsewhere it does nothing.
    """
    with suppress(MemoryError):  # under a tight limit of the process
        np.empty(24 << 20, np.uint8)
