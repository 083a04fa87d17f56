"""Statistics: what a loader counts while it runs, and the snapshot that a user gets."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LoaderStats:
    """A snapshot of what a loader has done since it was made.

    Attributes:
        batches: batches handed out.
        tokens: inputs in them, batch_size * seq_len each.
        wait_seconds: how long `next()` waited for blocks; the share of the loop's time that the
            data cost.
        gather_seconds: the background thread's time for copying windows (and waiting for the disk).
        transfer_seconds: the background thread's time in device_put. On accelerators the copy itself
            goes on after that.
        major_page_faults: pages that were not in memory when the background thread gathered them.
            0 where the system does not tell it for a thread.
    """

    __module__ = "tokenloader"
    batches: int
    tokens: int
    wait_seconds: float
    gather_seconds: float
    transfer_seconds: float
    major_page_faults: int


def count_page_faults() -> int:
    """Returns the major page faults of the calling thread so far; 0 where the system does not tell."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt if sys.platform == "linux" else 0


@dataclass
class Counters:
    """Running counts. The caller's thread writes the first two, the background thread the others."""

    batches: int = 0
    wait_seconds: float = 0.0
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    major_page_faults: int = 0
    clock: Callable[[], float] = time.perf_counter  # seconds
    count_faults: Callable[[], int] = count_page_faults  # of the calling thread

    def snapshot(self, batch_tokens: int) -> LoaderStats:
        """Returns the counts now, for batches of so many inputs."""
        waited, gathered, sent = self.wait_seconds, self.gather_seconds, self.transfer_seconds
        tokens, faults = self.batches * batch_tokens, self.major_page_faults
        return LoaderStats(self.batches, tokens, waited, gathered, sent, faults)
