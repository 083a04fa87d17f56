"""Kernel advice: what the kernel is told and asked about ranges of mapped memory, many at a time.

- `start_reading`: read these ranges into the page cache, do not wait (MADV_WILLNEED).
- `fault_in`: make these ranges readable now. Where the file was truncated or its disk fails, that is
  an error here; touching the memory would kill the process with SIGBUS (MADV_POPULATE_READ).
- `is_cached`, `num_cached`: whether a page is in the page cache, and how many of many are (mincore).

One call of process_madvise serves up to 1,024 ranges. On itself a process may give any advice with it
from Linux 6.13 on; before, madvise is called range by range, 1 us each. MADV_POPULATE_READ needs
Linux 5.14. On other systems than Linux `start_reading` does nothing; there, and on Linux before 5.14,
`fault_in` returns False: the caller must then look after truncation itself.

Sources: madvise(2), process_madvise(2), mincore(2).
"""

from __future__ import annotations

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
    """Memory could not be made readable.

    Attributes:
        address: first page of the range that failed.
    """

    def __init__(self, code: int, address: int) -> None:
        super().__init__(code, os.strerror(code))
        self.address = address


def page_ranges(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Ranges:
    """The ranges of whole pages that hold bytes [begins[i], ends[i]), ends > begins."""
    ranges = np.empty((len(begins), 2), np.int64)
    ranges[:, 0] = begins & -PAGE
    ranges[:, 1] = (ends + (PAGE - 1) & -PAGE) - ranges[:, 0]
    return ranges


class KernelAdvice:
    """The advice that one system's kernel takes; `KERNEL` is for this system. Tests imitate others.

    Args:
        linux: whether the system is Linux.
        in_bulk: whether one call may advise on many ranges; None tries, once for each advice.
        populate_read: number of the advice MADV_POPULATE_READ, which an older kernel does not know.
        libc: the C library, with madvise, mincore and syscall; None loads it.
    """

    def __init__(
        self,
        *,
        linux: bool = sys.platform == "linux",
        in_bulk: bool | None = None,
        populate_read: int = _MADV_POPULATE_READ,
        libc: Any = None,
    ) -> None:
        self._linux = linux
        self._populate_read = populate_read
        self._libc = _load_libc() if linux and libc is None else libc
        self._bulk_works: dict[int, bool] = {}  # by advice
        if in_bulk is not None:
            self._bulk_works = {_MADV_WILLNEED: in_bulk, populate_read: in_bulk}
        self._pidfds: dict[int, int] = {}  # by process: after a fork the parent's advises on the parent

    def start_reading(self, ranges: Ranges) -> None:
        """Asks for ranges to be read into the page cache, and does not wait. A hint: it cannot fail."""
        if self._linux:
            self._advise(_split(_merge(ranges), _READ_AHEAD_BYTES), _MADV_WILLNEED)

    def fault_in(self, ranges: Ranges) -> bool:
        """Reads ranges and maps their pages; waits. False if the system cannot say whether that worked.

        Raises:
            FaultError: a range cannot be read.
        """
        if not self._linux:
            return False
        failed = self._advise(ranges, self._populate_read)
        if failed is None:
            return True
        if failed.errno == errno.EINVAL:  # the advice is unknown: Linux before 5.14
            return False
        raise failed

    def is_cached(self, address: int) -> bool:
        """Whether the page at an address is in the page cache. True where the system does not tell."""
        if not self._linux:
            return True
        found = ctypes.c_ubyte(1)
        self._libc.mincore(address & -PAGE, PAGE, ctypes.byref(found))
        return bool(found.value & 1)

    def advises_in_bulk(self, advice: int) -> bool:
        """Whether process_madvise takes this advice: tried once, on a page of our own."""
        if advice not in self._bulk_works:
            page = mmap.mmap(-1, PAGE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(page))
            try:
                done = self._advise_in_bulk(np.array([[address, PAGE]]), advice)
            except (
                AttributeError,
                OSError,
            ):  # no pidfd_open in this Python, or the kernel forbids it
                done = 0
            self._bulk_works[advice] = done == 1
        return self._bulk_works[advice]

    def _advise(self, ranges: Ranges, advice: int) -> FaultError | None:
        """Gives the advice on all ranges, in order, up to the first that fails."""
        done = self._advise_in_bulk(ranges, advice) if self.advises_in_bulk(advice) else 0
        for address, length in ranges[done:].tolist():
            if self._libc.madvise(address, length, advice):
                code = ctypes.get_errno()
                if code not in (errno.EAGAIN, errno.EINTR):
                    return FaultError(code, address)
        return None

    def _advise_in_bulk(self, ranges: Ranges, advice: int) -> int:
        """How many ranges, from the first on, were advised on."""
        done = 0
        while done < len(ranges):
            some = np.ascontiguousarray(ranges[done : done + _MAX_RANGES])
            advised = self._libc.syscall(
                _SYS_PROCESS_MADVISE, self._pidfd(), some.ctypes.data, len(some), advice, 0
            )
            if advised != int(some[:, 1].sum()):
                if advised > 0:
                    done += int(np.searchsorted(some[:, 1].cumsum(), advised, side="right"))
                break
            done += len(some)
        return done

    def _pidfd(self) -> int:
        pid = os.getpid()
        if pid not in self._pidfds:
            self._pidfds[pid] = os.pidfd_open(pid)
        return self._pidfds[pid]


def num_cached(address: int, num_pages: int) -> int:
    """How many of the mapped pages from an address on are in the page cache, where CACHE_IS_TOLD."""
    found = np.empty(num_pages, np.uint8)
    if _load_libc().mincore(address, num_pages * PAGE, found.ctypes.data):
        code = ctypes.get_errno()
        raise OSError(code, f"mincore: {os.strerror(code)}")
    return int(np.count_nonzero(found & 1))


def _merge(ranges: Ranges) -> Ranges:
    """The same pages in as few ranges as can be, in order: windows that touch become one read."""
    ordered = ranges[ranges[:, 0].argsort()]
    begins, ends = ordered[:, 0], np.maximum.accumulate(ordered.sum(axis=1))
    first = np.flatnonzero(np.append(True, begins[1:] > ends[:-1]))[: len(ranges)]
    last = np.append(first[1:], len(ranges))[: len(first)] - 1
    return np.stack([begins[first], ends[last] - begins[first]], axis=1)


def _split(ranges: Ranges, limit: int) -> Ranges:
    """The same bytes in ranges of at most limit bytes."""
    if not len(ranges) or int(ranges[:, 1].max()) <= limit:
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
    count = advice = flags = ctypes.c_ulong
    libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, count, advice, flags]
    libc.syscall.restype = ctypes.c_long
    return libc


KERNEL = KernelAdvice()
