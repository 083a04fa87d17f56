"""BlockReader: reads a plan's blocks into the page cache, ahead of the steps that need them.

Blocks are announced to the kernel in the order of the steps that need them first, on threads of their own,
because an announcement may wait. On a disk whose queue is full it waits for a place. On FUSE it waits
where 12 requests are under way (max_background), and where the file system does not read asynchronously
(gcsfuse), for its answer: 64 blocks of 512 KiB at 10 ms a request took one thread 4 s, 16 threads 0.2 s.
Whoever gathers a step waits until its blocks are announced, and then for those of its pages that have not
come yet, by copying them.

The threads hold the queue and not the BlockReader: an abandoned BlockReader is collected, and that ends
them.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

from tokenloader.loader.prefetch import start_thread
from tokenloader.loader.steps import Read, StepReads
from tokenloader.tokens.located_windows import LocatedWindows
from tokenloader.tokens.token_array import TokenArray

# Blocks are read as many steps ahead as have so many windows, or so many bytes of windows. Blocks open at
# an even rate, so as many bytes of blocks are read ahead; more where an epoch begins by opening all lanes.
_AHEAD_WINDOWS, _AHEAD_BYTES = 1 << 15, 64 << 20
_MOST_AHEAD_BYTES = 512 << 20  # of blocks of later steps, however near
_NUM_THREADS, _NUM_THREADS_OVER_A_NETWORK = 1, 16

# Items for the threads: tokens to read, and a future that is set when they are; None ends a thread.
_Queue: TypeAlias = SimpleQueue[tuple[LocatedWindows, Future[None]] | None]


class BlockReader:
    """Reads blocks of tokens, ahead of the steps that need them.

    Args:
        plan: the blocks, in the order of their steps.
        ahead_steps: how many steps ahead, 1 or more.
        most_ahead_bytes: most bytes of blocks of later steps; the last block may go beyond.

    Attributes:
        has_blocks: whether the plan reads any.
    """

    def __init__(
        self,
        tokens: TokenArray,
        plan: Iterator[StepReads],
        ahead_steps: int,
        *,
        most_ahead_bytes: int = _MOST_AHEAD_BYTES,
    ) -> None:
        self._tokens, self._plan, self._ahead_steps = tokens, plan, ahead_steps
        self._most_ahead_tokens = most_ahead_bytes // tokens.dtype.itemsize
        self._planned: deque[Read] = deque()  # and not submitted yet
        self._submitted: deque[tuple[Read, Future[None]]] = deque()  # and not waited for yet
        self._submitted_tokens = 0
        self._stop_step: int | None = 0  # the first that is not planned; None: all are
        self._plan_more()
        self.has_blocks = self._stop_step is not None
        self._queue: _Queue | None = None

    def submit(self, step: int) -> None:
        """Queues the blocks of all steps up to this one, and of ahead_steps more; does not wait.

        Raises what the plan does; ValueError if the tokens are closed.
        """
        while self._stop_step is not None and self._stop_step <= step:
            self._plan_more()
        if self._stop_step is not None and self._stop_step <= step + self._ahead_steps:
            self._plan_more()  # one more a call, so that no batch waits for all the planning
        while self._planned and self._planned[0].step <= step + self._ahead_steps:
            if self._planned[0].step > step and self._submitted_tokens >= self._most_ahead_tokens:
                break
            self._submit(self._planned.popleft())

    def wait_for(self, step: int) -> None:
        """Waits until the blocks of all steps up to this one are announced to the kernel."""
        while self._submitted and self._submitted[0][0].step <= step:
            read, done = self._submitted.popleft()
            self._submitted_tokens -= read.num_tokens
            done.result()

    def _plan_more(self) -> None:
        planned = next(self._plan, None)
        self._stop_step = None if planned is None else planned.stop_step
        self._planned.extend(() if planned is None else planned.reads)

    def _submit(self, read: Read) -> None:
        windows = self._tokens.locate([read.start], read.num_tokens)
        if not windows.is_mapped:  # in RAM by now, for good
            self._stop_step = None
            self._planned.clear()
            return
        if self._queue is None:
            self._queue = self._start_threads(windows.is_over_a_network)
        done: Future[None] = Future()
        self._queue.put((windows, done))
        self._submitted.append((read, done))
        self._submitted_tokens += read.num_tokens

    def _start_threads(self, is_over_a_network: bool) -> _Queue:
        queue: _Queue = SimpleQueue()
        num_threads = _NUM_THREADS_OVER_A_NETWORK if is_over_a_network else _NUM_THREADS
        weakref.finalize(self, _stop, queue, num_threads).atexit = False
        for _ in range(num_threads):
            start_thread(threading.Thread(target=_run, args=(queue,), name="tokenloader-read", daemon=True))
        return queue


def ahead_steps(num_windows: int, window_bytes: int) -> int:
    """Returns how many steps ahead to read blocks, for steps of so many windows."""
    return max(1, min(_AHEAD_WINDOWS, _AHEAD_BYTES // window_bytes) // num_windows)


def _run(queue: _Queue) -> None:
    while (item := queue.get()) is not None:
        windows, done = item
        try:
            windows.load()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)


def _stop(queue: _Queue, num_threads: int) -> None:
    """Ends the threads after the block that each is reading."""
    with suppress(Empty):
        while True:
            queue.get_nowait()
    for _ in range(num_threads):
        queue.put(None)
