"""Prefetcher: items made ahead on a background thread and handed over in order.

Two C queues do the hand-over: `ready` holds what is made, `permits` bounds how much may be. The
thread takes a permit before it makes an item; popping an item gives the permit back. So at most
`depth` items wait, none is held besides, and neither side polls.

The taker peeks at the first item, uses it, and pops it. An interrupt in between loses nothing: the item
is still the first. Python interrupts between calls, and never inside one into C, so what must happen
together is one such call.

The thread holds the queues and the iterator and no reference to the Prefetcher, so that an abandoned
one is collected, and ends its thread.
"""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from operator import call
from queue import Empty, SimpleQueue
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
class _Control:
    """What the thread waits for. Not the items: whoever can end the thread must not keep them."""

    permits: SimpleQueue[None]
    stopping: threading.Event

    def stop(self) -> None:
        """Tells the thread to end; from any thread and in any finalizer."""
        self.stopping.set()
        self.permits.put(None)


# The threads that are alive (Python keeps those), and how to end each.
_running: weakref.WeakKeyDictionary[threading.Thread, _Control] = weakref.WeakKeyDictionary()


class Prefetcher(Generic[T]):
    """Runs `items` on a thread of its own, up to `depth` items ahead.

    Args:
        items: run on the background thread only.
        depth: 1 or more.
        join_seconds: how long stop() waits for the thread.
    """

    def __init__(self, items: Iterator[T], depth: int, *, join_seconds: float = JOIN_SECONDS) -> None:
        self._ready: SimpleQueue[object] = SimpleQueue()  # items, and an _End after the last
        self._first: deque[object] = deque()  # the item that was peeked at, if any
        self._control = control = _Control(SimpleQueue(), threading.Event())
        self._permit = partial(control.permits.put, None)
        for _ in range(depth):
            self._permit()
        self._join_seconds = join_seconds
        self.thread = threading.Thread(
            target=_run, args=(items, self._ready, control), name="tokenloader", daemon=True
        )
        # Last registered is first run: before jax closes its backends, lest a thread be inside them.
        atexit.unregister(end_all)
        atexit.register(end_all)
        _running[self.thread] = control
        finalizer = weakref.finalize(self, control.stop)
        finalizer.atexit = False  # end_all sees to that, and waits
        start_thread(self.thread)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits, for so long at most, until `peek` need not wait. Ctrl-C interrupts it.

        RuntimeError in a process that was forked off: its thread has stayed behind.
        """
        first = self._first
        if not first and not self._control.stopping.is_set():
            try:
                first.extend(starmap(self._ready.get, [(True, seconds)]))  # one call into C
            except Empty:
                is_left = self._ready.empty() and not self.thread.is_alive()
                if is_left and not self._control.stopping.is_set():
                    raise RuntimeError(
                        "the background thread is in another process, off which this one was forked; make "
                        "the loader in the process that uses it, and start processes by spawn"
                    ) from None
                return False
        return True

    def peek(self) -> T:
        """Returns the next item and leaves it there; waits for it. Ctrl-C interrupts the wait.

        Raises:
            StopIteration: there are no more.
            PrefetcherStoppedError: stop() was called.
            BaseException: what making the item raised, with its traceback.
        """
        first = self._first
        self.wait()
        if self._control.stopping.is_set():
            raise _stopped()
        item = first[0]
        if isinstance(item, _End):
            try:
                raise item.error
            finally:  # the error holds this frame; without the cycle both are freed at once
                del item, first
        return item  # type: ignore[return-value] # the queue has items and an _End

    def peek_if_there(self) -> T | None:
        """Returns the next item, if it is made already; None if not, at the end or an error."""
        first = self._first
        self.wait(0)
        return None if not first or isinstance(first[0], _End) else first[0]  # type: ignore[return-value]

    def pop(self) -> None:
        """Removes the item that was peeked at; another may be made in its place."""
        calls: list[Callable[[], None]] = [self._first.clear, self._permit]
        deque(map(call, calls), maxlen=0)  # one call into C

    @property
    def ended(self) -> bool:
        """Whether peek() came to the end, or to an error of the thread's: it raises the same again."""
        return bool(self._first) and isinstance(self._first[0], _End)

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread after the item it is making; what was not popped is dropped."""
        self._control.stop()
        self._ready.put(_End(_stopped()))
        self._first = deque()  # a taker that is waiting has the old one
        if wait and self.thread is not threading.current_thread():
            self.thread.join(self._join_seconds)


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread that batches are made on; RuntimeError if the system gives none."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(
            f"batches are made on background threads, and the system gives none ({error}); raise the "
            f"limit on processes (ulimit -u, or the container's on pids), or end some"
        ) from error


def _stopped() -> PrefetcherStoppedError:
    return PrefetcherStoppedError("the prefetcher was stopped")


def _run(items: Iterator[T], ready: SimpleQueue[object], control: _Control) -> None:
    try:
        while True:
            control.permits.get()
            if control.stopping.is_set():
                return
            ready.put(next(items))
    except BaseException as error:  # StopIteration among them: it is the taker's to see
        ready.put(_End(error))
    finally:
        # An error's traceback holds this frame: it must not hold the queue with the error in it. And
        # what was made is freed while the thread still counts as running: that may go through jax.
        del items, ready, control


def end_all() -> None:
    """Ends all threads at exit, also of takers long gone: a thread inside jax then would crash it."""
    threads = list(_running.items())
    for _, control in threads:
        control.stop()
    deadline = time.monotonic() + JOIN_SECONDS
    for thread, _ in threads:
        if thread.is_alive():  # an interrupt may have kept it from starting
            thread.join(max(0.0, deadline - time.monotonic()))
