"""Prefetcher: items made ahead on a background thread and handed over in order.

Two C queues do the hand-over: `ready` holds what is made, `permits` bounds how much may be. The
thread takes a permit before it makes an item; popping an item gives the permit back. So at most
`depth` items wait, none is held besides, and neither side polls.

The taker peeks at the first item, uses it, and pops it. An interrupt in between loses nothing: the item
is still the first.

The thread holds the queues and the iterator and no reference to the Prefetcher, so that an abandoned
one is collected, and ends its thread.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

# A disk that hangs must not keep close() or the interpreter's exit; the threads are daemons.
JOIN_SECONDS = 10.0


class PrefetcherStoppedError(RuntimeError):
    """The prefetcher was stopped while, or before, its next item was waited for."""


@dataclass(frozen=True)
class _End:
    """The last thing in the queue: why the thread stopped."""

    error: BaseException


@dataclass(frozen=True)
class _Hands:
    """What the two sides share."""

    ready: SimpleQueue[object]  # items, and an _End after the last
    permits: SimpleQueue[None]
    stopping: threading.Event

    def stop(self) -> None:
        """Tells the thread to end, and a waiting taker; from any thread and in any finalizer."""
        self.stopping.set()
        self.permits.put(None)
        self.ready.put(_End(PrefetcherStoppedError("the prefetcher was stopped")))


# The threads that are alive (Python keeps those), and how to end each.
_running: weakref.WeakKeyDictionary[threading.Thread, _Hands] = weakref.WeakKeyDictionary()


class Prefetcher(Generic[T]):
    """Runs `items` on a thread of its own, up to `depth` items ahead.

    Args:
        items: run on the background thread only.
        depth: 1 or more.
        join_seconds: how long stop() waits for the thread.
    """

    def __init__(self, items: Iterator[T], depth: int, *, join_seconds: float = JOIN_SECONDS) -> None:
        self._hands = _Hands(SimpleQueue(), SimpleQueue(), threading.Event())
        for _ in range(depth):
            self._hands.permits.put(None)
        self._first: deque[object] = deque()  # the item that was peeked at, if any
        self._join_seconds = join_seconds
        self.thread = threading.Thread(
            target=_run, args=(items, self._hands), name="tokenloader", daemon=True
        )
        # Last registered is first run: before jax closes its backends, lest a thread be inside them.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        _running[self.thread] = self._hands
        finalizer = weakref.finalize(self, self._hands.stop)
        finalizer.atexit = False  # _end_all sees to that, and waits
        self.thread.start()

    def peek(self) -> T:
        """Returns the next item and leaves it there; waits for it. Ctrl-C interrupts the wait.

        Raises:
            StopIteration: there are no more.
            PrefetcherStoppedError: stop() was called.
            BaseException: what making the item raised, with its traceback.
        """
        if not self._first:
            # One call into C, so that Ctrl-C comes before the item has left the queue or after it is here.
            self._first.extend(starmap(self._hands.ready.get, [()]))
        item = self._first[0]
        if isinstance(item, _End):
            try:
                raise item.error
            finally:
                del item  # the error holds this frame; without the cycle both are freed at once
        return item  # type: ignore[return-value] # the queue has items and an _End

    def pop(self) -> None:
        """Removes the item that was peeked at; another may be made in its place."""
        self._first.popleft()
        self._hands.permits.put(None)

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread after the item it is making; what was not popped is dropped."""
        self._hands.stop()
        if wait and self.thread is not threading.current_thread():
            self.thread.join(self._join_seconds)


def _run(items: Iterator[T], hands: _Hands) -> None:
    try:
        while True:
            hands.permits.get()
            if hands.stopping.is_set():
                return
            hands.ready.put(next(items))
    except BaseException as error:  # StopIteration among them: it is the taker's to see
        hands.ready.put(_End(error))
    finally:
        # An error's traceback holds this frame: it must not hold the queue with the error in it.
        del items, hands


def _end_all() -> None:
    """Ends all threads at exit, also of takers long gone: a thread inside jax then would crash it."""
    threads = list(_running.items())
    for _, hands in threads:
        hands.stop()
    deadline = time.monotonic() + JOIN_SECONDS
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
