"""Prefetcher: items made ahead on a background thread and handed over in order.

Two C queues do the hand-over: `ready` holds what is made, `permits` bounds how much may be. The
thread takes a permit before it makes an item; taking an item gives the permit back. So at most
`depth` items wait, none is held besides, and neither side polls.

The thread holds the queues and the iterator and no reference to whoever takes the items, so that
an abandoned taker can be collected; it must then call stop().
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

# A disk that hangs must not keep close() or the interpreter's exit; the thread is a daemon.
_JOIN_SECONDS = 10.0


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
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(items, self._ready, self._permits, self._stopping),
            name="tokenloader",
            daemon=True,
        )
        self._thread.start()
        # Before jax closes its backends at exit (last registered, first run), lest the thread use them.
        atexit.register(self.stop)

    def take(self) -> T:
        """The next item; waits for it. Ctrl-C interrupts the wait.

        Raises:
            StopIteration: there are no more.
            BaseException: what making the item raised, with its traceback.
        """
        item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)  # for the next call
            raise item.error
        self._permits.put(None)
        return item

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread after the item it is making; what was not taken is dropped."""
        atexit.unregister(self.stop)
        self._stopping.set()
        self._permits.put(None)
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
