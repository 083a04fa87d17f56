"""Reservations: memory that a process is about to take, so that no other counts it as free.

The kernel counts memory as taken when it is first written to. Until then a reservation says how much is
still to come: by a read lock, as many bytes long, on each file that states a limit on memory, /proc/meminfo
and those of control groups. All processes under a limit have its file in common, whoever their users are;
nothing is written; and the kernel ends the locks of a process that ends, however it ends. Processes with a
/proc of their own, as in containers, do not see each other's reservations.

Where there are no such locks (in some sandboxes) nothing is reserved, and other systems than Linux do not
tell their limits.

Source: fcntl_locking(2), on open file description locks.
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from tokenloader.storage.memory_limits import MemoryLimit

_FLOCK = "hhqqi0q"  # struct flock: type, whence, start, length (0: without end), process
_TURN_SECONDS = 5.0  # a turn takes a millisecond; who is stopped in it keeps the next no longer than this


class Reservation:
    """Memory that is reserved under all limits of this process, until it is taken or this is closed.

    Args:
        what: the beginning of the error: what the memory is for.
        num_bytes: to reserve, 1 or more.
        limits: returns the limits as they are now.

    Raises:
        MemoryError: a limit leaves fewer bytes than that, the reservations of others taken off.
    """

    def __init__(self, what: str, num_bytes: int, limits: Callable[[], Sequence[MemoryLimit]]) -> None:
        self._files: dict[str, int] = {}  # the path of each limit, and its descriptor
        self._begins: dict[int, int] = {}  # by descriptor: the first byte that is still locked
        try:
            for limit in limits():
                with suppress(OSError):
                    self._files[str(limit.path)] = os.open(limit.path, os.O_RDONLY)
            with _turn(self._files.values()):
                self._reserve(what, num_bytes, limits)
        except BaseException:
            self.close()
            raise

    def _reserve(self, what: str, num_bytes: int, limits: Callable[[], Sequence[MemoryLimit]]) -> None:
        others = {path: _reserved(file) for path, file in self._files.items()}
        # Asked for after the locks: what is taken in between counts twice then, and not never.
        found = [(limit.left_bytes, others.get(str(limit.path), (0, 0))[0]) for limit in limits()]
        available, reserved = min(found, key=lambda one: one[0] - one[1], default=(num_bytes, 0))
        if num_bytes > available - reserved:
            already = (
                f", of which fills under way on this host reserve {_gib(reserved)}" if reserved else ""
            )
            raise MemoryError(
                f"{what} needs {_gib(num_bytes)} and {_gib(available)} of memory are available (control "
                f'group limits included){already}; use residency="mmap", which needs none, and whose '
                f"page cache all processes of a host share"
            )
        for path, file in self._files.items():
            with suppress(OSError):
                begin = others[path][1]
                _lock(file, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, begin, num_bytes)
                self._begins[file] = begin

    def taken(self, num_bytes: int) -> None:
        """Ends the reservation of so many bytes more, which the kernel counts: they were written to."""
        for file, begin in self._begins.items():
            with suppress(OSError):
                _lock(file, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, begin, num_bytes)
            self._begins[file] = begin + num_bytes

    def close(self) -> None:
        """Ends the reservation."""
        for file in self._files.values():
            with suppress(OSError):  # said, because a child after a fork has the same locks
                _lock(file, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, 0)
            os.close(file)
        self._files, self._begins = {}, {}


@contextmanager
def _turn(files: Iterable[int]) -> Iterator[None]:
    """Keeps other processes from reserving meanwhile, where the first of the files can be locked."""
    file, deadline = next(iter(files), None), time.monotonic() + _TURN_SECONDS
    with suppress(OSError):
        while file is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.001)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _reserved(file: int) -> tuple[int, int]:
    """Returns how many bytes others have locked in a file, and where the last of their locks ends."""
    total = last = 0
    stretches = [(0, 0)]  # start and length of what may have locks in it
    with suppress(OSError):
        while stretches:
            start, length = stretches.pop()
            kind, _, begin, size, _ = _lock(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, length)
            if kind == fcntl.F_UNLCK or not size:  # a lock without end is somebody else's
                continue
            end = begin + size
            total, last = total + size, max(last, end)
            if begin > start:
                stretches.append((start, begin - start))
            if not length or end < start + length:
                stretches.append((end, length and start + length - end))
    return total, last


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _lock(file: int, command: int, kind: int, start: int, length: int) -> tuple[int, ...]:
    return struct.unpack(_FLOCK, fcntl.fcntl(file, command, struct.pack(_FLOCK, kind, 0, start, length, 0)))
