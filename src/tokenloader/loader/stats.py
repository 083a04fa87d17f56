"""Statistics: what a loader counts while it runs, and the snapshot that a user gets."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenloader.loader.read_ahead import Located


@dataclass(frozen=True)
class LoaderStats:
    """A snapshot of what a loader has done since it was made.

    Attributes:
        batches: batches handed out.
        tokens: inputs in them, batch_size * seq_len each.
        wait_seconds: how long `next()` waited for blocks; the share of the loop's time that the
            data cost. This and the next two count what lasts now, too.
        gather_seconds: the background thread's time for copying windows (and waiting for the disk).
        transfer_seconds: the background thread's time in device_put. On accelerators the copy itself
            goes on after that.
        major_page_faults: pages that the background thread had to wait for when it gathered them. 0 where
            the system does not tell it for a thread.
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


def count_disk_reads() -> int:
    """Returns the disk blocks that the calling thread had read so far; 0 where the system does not tell.

    Not those that it waited for, and another thread had announced; page faults count these too.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock if sys.platform == "linux" else 0


class Stopwatch:
    """Adds up the seconds inside `with` blocks of one thread; any thread may read them, also meanwhile."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state: tuple[float, float | None] = (0.0, None)  # seconds, and since when there are more

    def __enter__(self) -> None:
        self._state = self._state[0], self._clock()

    def __exit__(self, *error: object) -> None:
        self._state = self.seconds, None

    @property
    def seconds(self) -> float:
        """The sum, with the block that lasts now."""
        total, began = self._state  # at once: the thread replaces both together
        return total if began is None else total + self._clock() - began


@dataclass
class Counters:
    """Running counts. The caller's thread writes the first two, the background thread the others."""

    batches: int = 0
    waiting: Stopwatch = field(init=False)
    gathering: Stopwatch = field(init=False)
    transferring: Stopwatch = field(init=False)
    major_page_faults: int = 0
    task: tuple[str, Located | None] = ("planning", None)  # of the background thread; see `task_in_words`
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)  # seconds
    count_faults: Callable[[], int] = count_page_faults  # of the calling thread
    count_reads: Callable[[], int] = count_disk_reads  # likewise

    def __post_init__(self) -> None:
        self.waiting, self.gathering, self.transferring = (Stopwatch(self.clock) for _ in range(3))

    def snapshot(self, batch_tokens: int) -> LoaderStats:
        """Returns the counts now, for batches of so many inputs."""
        return LoaderStats(
            batches=self.batches,
            tokens=self.batches * batch_tokens,
            wait_seconds=self.waiting.seconds,
            gather_seconds=self.gathering.seconds,
            transfer_seconds=self.transferring.seconds,
            major_page_faults=self.major_page_faults,
        )
