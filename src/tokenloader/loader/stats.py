"""Statistics: what a loader counts while it runs, and the snapshot of it that a user gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has done since it was made.

    Attributes:
        batches: handed out.
        tokens: inputs in them, batch_size * seq_len each.
        wait_seconds: how long `next()` waited for a block; the share of the loop's time that the
            data cost.
        gather_seconds: the background thread's, copying windows (and waiting for the disk).
        transfer_seconds: the background thread's, in device_put. On accelerators the copy itself
            goes on after that.
        major_page_faults: of the background thread while gathering: pages that were not in memory.
            0 where the system does not tell it for a thread.
    """

    batches: int
    tokens: int
    wait_seconds: float
    gather_seconds: float
    transfer_seconds: float
    major_page_faults: int


@dataclass
class Counters:
    """Written by one thread each: the first two by the caller's, the others by the background's."""

    batches: int = 0
    wait_seconds: float = 0.0
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    major_page_faults: int = 0
