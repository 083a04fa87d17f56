"""BlockReader: has what a plan reads as a whole in the page cache by the time of its step.

Blocks are announced to the kernel in the order of the steps that need them first, on threads of their own,
because an announcement may wait. On a disk whose queue is full it waits for a place. On FUSE it waits
where 12 requests are under way (max_background), and where the file system does not read asynchronously
(gcsfuse), for its answer: 64 blocks of 512 KiB at 10 ms a request took one thread 4 s, 16 threads 0.2 s.
Whoever gathers a step waits until its blocks are announced, and by touching their pages for those.

The threads hold the queue and not the BlockReader: an abandoned one is collected, and ends them.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import NamedTuple

from tokenloader.loader.prefetch import start_thread
from tokenloader.loader.steps import Read, StepReads
from tokenloader.tokens.located_windows import LocatedWindows
from tokenloader.tokens.token_array import TokenArray

# Blocks are read as many steps ahead as have so many windows, or bytes of them. Blocks open at an even
# rate, so that is also what is read ahead; more where an epoch begins, and all of its blocks open.
_AHEAD_WINDOWS, _AHEAD_BYTES = 1 << 15, 64 << 20
_MOST_AHEAD_BYTES = 512 << 20  # of blocks, whatever their steps
_NUM_THREADS, _NUM_THREADS_OVER_A_NETWORK = 1, 16


class _Block(NamedTuple):
    step: int  # the first that needs it
    num_tokens: int
    is_read: threading.Event


class BlockReader:
    """Reads blocks of tokens, ahead of the steps that need them.

    Args:
        plan: the blocks, in the order of their steps.
        step_windows: windows of a step, of step_bytes together.
    """

    def __init__(
        self,
        tokens: TokenArray,
        plan: Iterator[StepReads],
        step_windows: int,
        step_bytes: int,
        *,
        ahead_bytes: int = _AHEAD_BYTES,
        most_ahead_bytes: int = _MOST_AHEAD_BYTES,
    ) -> None:
        self._tokens, self._plan = tokens, plan
        self._ahead_steps = max(1, min(_AHEAD_WINDOWS // step_windows, ahead_bytes // step_bytes))
        self._most_ahead_tokens = most_ahead_bytes // tokens.dtype.itemsize
        self._reads: deque[Read] = deque()  # planned, and not submitted yet
        self._blocks: deque[_Block] = deque()  # submitted, and not waited for yet
        self._ahead_tokens = 0  # in those
        self._stop_step: int | None = 0  # the first that is not planned; None: none is
        self._plan_more()
        self.has_blocks = self._stop_step is not None
        self._queue: _Queue | None = None

    def wait_for(self, step: int) -> None:
        """Waits for the blocks of all steps up to this one, and has those of later steps read meanwhile."""
        while self._stop_step is not None and self._stop_step <= step:
            self._plan_more()
        if self._stop_step is not None and self._stop_step <= step + self._ahead_steps:
            self._plan_more()  # one more a call, so that no batch waits for all the planning
        while self._reads and (
            self._reads[0].step <= step
            or (
                self._reads[0].step <= step + self._ahead_steps
                and self._ahead_tokens < self._most_ahead_tokens
            )
        ):
            self._submit(self._reads.popleft())
        while self._blocks and self._blocks[0].step <= step:
            block = self._blocks.popleft()
            self._ahead_tokens -= block.num_tokens
            block.is_read.wait()

    def _plan_more(self) -> None:
        planned = next(self._plan, None)
        self._stop_step = None if planned is None else planned.stop_step
        self._reads.extend(() if planned is None else planned.reads)

    def _submit(self, read: Read) -> None:
        num_tokens = read.stop - read.start
        windows = self._tokens.locate([read.start], num_tokens)
        if not windows.is_mapped:  # in RAM by now, for good
            self._stop_step = None
            self._reads.clear()
            return
        if self._queue is None:
            self._queue = self._start_threads(windows.is_over_a_network)
        block = _Block(read.step, num_tokens, threading.Event())
        self._queue.items.put((windows, block.is_read))
        self._blocks.append(block)
        self._ahead_tokens += num_tokens

    def _start_threads(self, is_over_a_network: bool) -> "_Queue":
        queue = _Queue()
        num_threads = _NUM_THREADS_OVER_A_NETWORK if is_over_a_network else _NUM_THREADS
        weakref.finalize(self, queue.stop, num_threads).atexit = False
        for _ in range(num_threads):
            start_thread(threading.Thread(target=_run, args=(queue,), name="tokenloader-read", daemon=True))
        return queue


class _Queue:
    """What the threads wait for: tokens to read, and an event to set when that is done."""

    def __init__(self) -> None:
        self.items: SimpleQueue[tuple[LocatedWindows, threading.Event] | None] = SimpleQueue()
        self.is_stopped = False

    def stop(self, num_threads: int) -> None:
        """Ends the threads after the block that each is reading."""
        self.is_stopped = True
        for _ in range(num_threads):
            self.items.put(None)


def _run(queue: _Queue) -> None:
    while (item := queue.items.get()) is not None and not queue.is_stopped:
        windows, is_read = item
        try:
            windows.load()
        finally:
            is_read.set()
