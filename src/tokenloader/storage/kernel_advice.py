"""What the kernel is told and asked about ranges of mapped memory, many at a time.

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

_MADV_WILLNEED, _MADV_POPULATE_READ = 3, 22
_SYS_PROCESS_MADVISE = 440  # on every Linux architecture but alpha
_MAX_RANGES = 1024  # IOV_MAX
_READ_AHEAD_BYTES = 128 << 10  # Linux reads at most one read-ahead window a range; the common size
_LINUX = sys.platform == "linux"
CACHE_IS_TOLD = _LINUX

Ranges = NDArray[np.uint64]  # [n, 2]: address of a page, length in bytes


class FaultError(OSError):
    """Memory could not be made readable.

    Attributes:
        address: of the first page of the range that failed.
    """

    def __init__(self, code: int, address: int) -> None:
        super().__init__(code, os.strerror(code))
        self.address = address


def page_ranges(begins: NDArray[np.uint64], ends: NDArray[np.uint64]) -> Ranges:
    """The ranges of whole pages that hold bytes [begins[i], ends[i]), ends > begins."""
    ranges = np.empty((len(begins), 2), np.uint64)
    mask = np.uint64(PAGE - 1)
    ranges[:, 0] = begins & ~mask
    ranges[:, 1] = ((ends + mask) & ~mask) - ranges[:, 0]
    return ranges


def start_reading(ranges: Ranges) -> None:
    """Asks for ranges to be read into the page cache, and does not wait. A hint: it cannot fail."""
    if _LINUX:
        _advise(_split(_merge(ranges), _READ_AHEAD_BYTES), _MADV_WILLNEED)


def fault_in(ranges: Ranges) -> bool:
    """Reads ranges and maps their pages; waits. False if the system cannot say whether that worked.

    Raises:
        FaultError: a range cannot be read.
    """
    if not _LINUX:
        return False
    failed = _advise(ranges, _MADV_POPULATE_READ)
    if failed is None:
        return True
    if failed.errno == errno.EINVAL:  # the advice is unknown: Linux before 5.14
        return False
    raise failed


def is_cached(address: int) -> bool:
    """Whether the page at an address is in the page cache. True where the system does not tell."""
    if not _LINUX:
        return True
    found = ctypes.c_ubyte(1)
    _libc().mincore(address & ~(PAGE - 1), PAGE, ctypes.byref(found))
    return bool(found.value & 1)


def num_cached(address: int, num_pages: int) -> int:
    """How many of the mapped pages from an address on are in the page cache, where CACHE_IS_TOLD."""
    found = np.empty(num_pages, np.uint8)
    if _libc().mincore(address, num_pages * PAGE, found.ctypes.data):
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
    pieces = [
        (address + at, min(limit, length - at))
        for address, length in ranges.tolist()
        for at in range(0, length, limit)
    ]
    return np.array(pieces, np.uint64)


def _advise(ranges: Ranges, advice: int) -> FaultError | None:
    """Gives the advice on all ranges, in order, up to the first that fails."""
    done = _advise_in_bulk(ranges, advice) if _bulk_works(advice) else 0
    libc = _libc()
    for address, length in ranges[done:].tolist():
        if libc.madvise(address, length, advice):
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR):
                return FaultError(code, address)
    return None


def _advise_in_bulk(ranges: Ranges, advice: int) -> int:
    """How many ranges, from the first on, were advised on."""
    libc, done = _libc(), 0
    while done < len(ranges):
        some = np.ascontiguousarray(ranges[done : done + _MAX_RANGES])
        advised = libc.syscall(
            _SYS_PROCESS_MADVISE, _own_pidfd(os.getpid()), some.ctypes.data, len(some), advice, 0
        )
        if advised != int(some[:, 1].sum()):
            if advised > 0:
                done += int(np.searchsorted(some[:, 1].cumsum(), advised, side="right"))
            break
        done += len(some)
    return done


@cache
def _bulk_works(advice: int) -> bool:
    """Whether process_madvise takes this advice: tried once, on a page of our own."""
    page = mmap.mmap(-1, PAGE)
    try:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return _advise_in_bulk(np.array([[address, PAGE]], np.uint64), advice) == 1
    except (AttributeError, OSError):  # pidfd_open: not in this Python, or the kernel forbids it
        return False


@cache
def _own_pidfd(pid: int) -> int:  # by pid: after a fork the parent's would advise on the parent
    return os.pidfd_open(pid)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    count = advice = flags = ctypes.c_ulong
    libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, count, advice, flags]
    libc.syscall.restype = ctypes.c_long
    return libc
