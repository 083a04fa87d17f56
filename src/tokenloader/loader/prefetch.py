"""Prefetcher: items made ahead on a background thread and handed over in order.

Two C queues do the hand-over: `ready` holds what is made, `permits` bounds how much may be. The
thread takes a permit before it makes an item; taking an item gives the permit back. So at most
`depth` items wait, none is held besides, and neither side polls.

The thread holds the queues and the iterator and no reference to whoever takes the items, so that
an abandoned taker can be collected; its finalizer calls stop(wait=False).
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

# A disk that hangs must not keep close() or the interpreter's exit; the threads are daemons.
_JOIN_SECONDS = 10.0


@dataclass(frozen=True)
class _Stop:
    """Tells a thread to end, from any thread and any time, garbage collection included."""

    stopping: threading.Event
    permits: SimpleQueue[None]

    def __call__(self) -> None:
        self.stopping.set()
        self.permits.put(None)


# The threads that are alive (Python keeps those), and how to end each.
_running: weakref.WeakKeyDictionary[threading.Thread, _Stop] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _End:
    """The last thing in the queue: why the thread stopped."""

    error: BaseException


class Prefetcher(Generic[T]):
    """Runs `items` on a thread of its own, up to `depth` items ahead.

    Args:
        items: run on the background thread only.
        depth: 1 or more.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: SimpleQueue[T | _End] = SimpleQueue()
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._permits.put(None)
        self._ended = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(items, self._ready, self._permits, self._stopping),
            name="tokenloader",
            daemon=True,
        )
        # Last registered is first run: before jax closes its backends, lest a thread be inside them.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        _running[self._thread] = self._stop = _Stop(self._stopping, self._permits)
        self._thread.start()

    def take(self) -> T:
        """The next item; waits for it. Ctrl-C interrupts the wait.

        Raises:
            StopIteration: there are no more, or an error was raised before.
            BaseException: what making the item raised, with its traceback.
        """
        if self._ended:
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, _End):
            self._ended = True
            try:
                raise item.error
            finally:
                del item  # the error holds this frame; without the cycle both are freed at once
        self._permits.put(None)
        return item

    def take_if_there(self) -> T | None:
        """The next item if it is made already; None if not, also at the end and at an error.

        It goes on counting as waiting until release().
        """
        try:
            item = self._ready.get_nowait()
        except Empty:
            return None
        if isinstance(item, _End):  # the last there is: put back, it is the only one
            self._ready.put(item)
            return None
        return item

    def release(self) -> None:
        """What take_if_there() gave waits no longer: another item may be made."""
        self._permits.put(None)

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread after the item it is making; what was not taken is dropped."""
        self._stop()
        if wait and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _run(
    items: Iterator[T],
    ready: SimpleQueue[T | _End],
    permits: SimpleQueue[None],
    stopping: threading.Event,
) -> None:
    try:
        while True:
            permits.get()
            if stopping.is_set():
                return
            ready.put(next(items))
    except BaseException as error:  # StopIteration among them: it is the taker's to see
        ready.put(_End(error))
    finally:
        # An error's traceback holds this frame: it must not hold the queue with the error in it.
        del items, ready, permits, stopping


def _end_all() -> None:
    """At exit, also for the threads of takers long gone: a thread inside jax then would crash it."""
    threads = list(_running.items())
    for _, stop in threads:
        stop()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
