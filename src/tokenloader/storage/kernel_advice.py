"""Kernel advice: what the kernel is told and asked about ranges of mapped memory, many at a time.

- `start_reading`: read these ranges into the page cache, do not wait (MADV_WILLNEED).
- `fault_in`: make these ranges readable now. Where the file was truncated or its disk fails, that is
  an error here; touching the memory would kill the process with SIGBUS (MADV_POPULATE_READ).
- `is_cached`, `num_cached`: whether a page is in the page cache, and how many of many are (mincore).

One call of process_madvise serves up to 1,024 ranges. On itself a process may give any advice with it
from Linux 6.13 on; before, it fails, and madvise is called range by range, 1 us each. MADV_POPULATE_READ
needs Linux 5.14. On other systems than Linux `start_reading` does nothing; there, and on Linux before
5.14, `fault_in` returns False: the caller must then look after truncation itself.

Sources: madvise(2), process_madvise(2), mincore(2).
"""

import ctypes
import errno
import mmap
import os
import sys
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
CACHE_IS_TOLD = sys.platform == "linux"  # whether the system says what is in the page cache

_MADV_WILLNEED, _MADV_POPULATE_READ = 3, 22
_SYS_PROCESS_MADVISE = 440  # on every Linux architecture but alpha
_MAX_RANGES = 1024  # IOV_MAX
_READ_AHEAD_BYTES = 128 << 10  # Linux reads at most one read-ahead window a range; the common size

Ranges = NDArray[np.int64]  # [n, 2]: address of a page, length in bytes


class FaultError(OSError):
    """Memory could not be made readable."""

    def __init__(self, code: int, address: int) -> None:
        super().__init__(code, os.strerror(code))
        self.address = address  # first page of the range that failed


def page_ranges(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Ranges:
    """Finds the whole pages that hold bytes [begins[i], ends[i]), ends > begins."""
    ranges = np.empty((len(begins), 2), np.int64)
    ranges[:, 0] = begins & -PAGE
    ranges[:, 1] = (ends + (PAGE - 1) & -PAGE) - ranges[:, 0]
    return ranges


class KernelAdvice:
    """The advice that one system's kernel takes; `KERNEL` is for this system. Tests imitate others."""

    def __init__(
        self,
        *,
        linux: bool = sys.platform == "linux",
        in_bulk: bool = True,  # tries to advise on many ranges with one call
        populate_read: int = _MADV_POPULATE_READ,  # the number of an advice that older kernels do not know
        libc: Any = None,  # with madvise, mincore and syscall; None loads it
    ) -> None:
        self._linux, self._in_bulk, self._populate_read = linux, in_bulk, populate_read
        self._libc = _load_libc() if linux and libc is None else libc
        self._pidfds: dict[int, int] = {}  # by process: after a fork the parent's advises on the parent

    def start_reading(self, ranges: Ranges) -> None:
        """Asks for ranges to be read into the page cache, and does not wait. A hint: it cannot fail."""
        if self._linux:
            self._advise(_split(_merge(ranges), _READ_AHEAD_BYTES), _MADV_WILLNEED)

    def fault_in(self, ranges: Ranges) -> bool:
        """Reads ranges and maps their pages, or raises FaultError. False if the system cannot tell."""
        if not self._linux:
            return False
        failed = self._advise(ranges, self._populate_read)
        if failed is not None and failed.errno != errno.EINVAL:  # the advice is unknown: Linux before 5.14
            raise failed
        return failed is None

    def is_cached(self, address: int) -> bool:
        """Whether the page at an address is in the page cache. True where the system does not tell."""
        if not self._linux:
            return True
        found = ctypes.c_ubyte(1)
        self._libc.mincore(address & -PAGE, PAGE, ctypes.byref(found))
        return bool(found.value & 1)

    def _advise(self, ranges: Ranges, advice: int) -> FaultError | None:
        """Gives the advice on all ranges, in order, up to the first that fails."""
        done = self._advise_in_bulk(ranges, advice) if self._in_bulk else 0
        for address, length in ranges[done:].tolist():
            if self._libc.madvise(address, length, advice):
                code = ctypes.get_errno()
                if code not in (errno.EAGAIN, errno.EINTR):
                    return FaultError(code, address)
        return None

    def _advise_in_bulk(self, ranges: Ranges, advice: int) -> int:
        """Returns how many ranges, from the first on, the kernel took the advice on."""
        pid = os.getpid()
        try:
            if pid not in self._pidfds:
                self._pidfds[pid] = os.pidfd_open(pid)
        except (AttributeError, OSError):  # no pidfd_open in this Python, or the kernel forbids it
            return 0
        for done in range(0, len(ranges), _MAX_RANGES):
            some = np.ascontiguousarray(ranges[done : done + _MAX_RANGES])
            arguments = self._pidfds[pid], some.ctypes.data, len(some), advice, 0
            advised = self._libc.syscall(_SYS_PROCESS_MADVISE, *arguments)
            if advised != int(some[:, 1].sum()):
                return done + int(some[:, 1].cumsum().searchsorted(max(0, advised), side="right"))
        return len(ranges)


def num_cached(address: int, num_pages: int) -> int:
    """Counts the mapped pages from an address on that are in the page cache, where CACHE_IS_TOLD."""
    found = np.empty(num_pages, np.uint8)
    if _load_libc().mincore(address, num_pages * PAGE, found.ctypes.data):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int(np.count_nonzero(found & 1))


def _merge(ranges: Ranges) -> Ranges:
    """Joins ranges to as few as can be, in order: windows that touch become one read."""
    ordered = ranges[ranges[:, 0].argsort()]
    begins, ends = ordered[:, 0], np.maximum.accumulate(ordered.sum(axis=1))
    first = np.flatnonzero(np.append(True, begins[1:] > ends[:-1]))[: len(ranges)]
    last = np.append(first[1:], len(ranges))[: len(first)] - 1
    return np.stack([begins[first], ends[last] - begins[first]], axis=1)


def _split(ranges: Ranges, limit: int) -> Ranges:
    """Cuts ranges to at most limit bytes each."""
    if not (ranges[:, 1] > limit).any():
        return ranges
    shorter = [
        (address + at, min(limit, length - at))
        for address, length in ranges.tolist()
        for at in range(0, length, limit)
    ]
    return np.array(shorter)


@cache
def _load_libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_ulong] * 3]
    libc.syscall.restype = ctypes.c_long
    return libc


KERNEL = KernelAdvice()
