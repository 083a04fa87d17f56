"""Kernel advice: what the kernel is told, asked, and set to do with ranges of mapped memory, many at once.

- `start_reading`: read these ranges into the page cache, do not wait (MADV_WILLNEED).
- `copy`: copy these ranges, end to end (process_vm_writev, of the process to itself). Where the file was
  truncated or its disk fails, the call ends there; touching the memory would kill the process with SIGBUS.
- `is_cached`, `num_cached`: whether a page is in the page cache, and how many of many are (mincore).

One call of process_madvise serves up to 1,024 ranges. On itself a process may give any advice with it
from Linux 6.13 on; before, it fails, and madvise is called range by range, 1 us each.

process_vm_writev takes up to 1,024 ranges a call too, and reads from disk what is not in memory yet. It
pins the pages of the one block that it writes to; process_vm_readv would pin those of each range. Warm, 32,
64, 256 windows of 1,025, 4,097, 1,025 uint16: 29, 160, 250 us; with process_vm_readv 41, 240, 420, with a
pread for each 44, 275, 515, and with MADV_POPULATE_READ and numpy's copy after it 34, 270, 310. Linux has
it from 3.2 on. A system-call filter may forbid it; there, and on other systems, nothing is copied, and the
caller must read the files instead. `start_reading` does nothing on other systems than Linux.

Sources: madvise(2), process_madvise(2), process_vm_readv(2), mincore(2).
"""

import ctypes
import errno
import mmap
import os
import sys
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
CACHE_IS_TOLD = sys.platform == "linux"  # whether the system says what is in the page cache

_MADV_WILLNEED = 3
_SYS_PROCESS_MADVISE = 440  # on every Linux architecture but alpha
_MAX_RANGES = 1024  # IOV_MAX
# Linux reads at most one read-ahead window a range, or the disk's largest request; the common window.
COMMON_READ_AHEAD_BYTES = 128 << 10

Ranges = NDArray[np.int64]  # [n, 2]: address, length in bytes, 1 or more; as in struct iovec


def page_ranges(ranges: Ranges) -> Ranges:
    """Finds the whole pages that hold ranges of bytes."""
    pages = ranges & -PAGE
    pages[:, 1] = (ranges.sum(axis=1) + (PAGE - 1) & -PAGE) - pages[:, 0]
    return pages


class KernelAdvice:
    """The advice that one system's kernel takes; `KERNEL` is for this system. Tests imitate others."""

    def __init__(
        self,
        *,
        linux: bool = sys.platform == "linux",
        in_bulk: bool = True,  # tries to advise on many ranges with one call
        libc: Any = None,  # with madvise, mincore, process_vm_writev and syscall; None loads it
    ) -> None:
        self._linux, self._in_bulk = linux, in_bulk
        self._libc = _load_libc() if linux and libc is None else libc
        self._copies = linux and hasattr(self._libc, "process_vm_writev")
        self._pidfds: dict[int, int] = {}  # by process: after a fork the parent's advises on the parent

    def start_reading(self, ranges: Ranges, most_bytes: int = COMMON_READ_AHEAD_BYTES) -> None:
        """Asks for pages to be read into the page cache. A hint: it cannot fail.

        Does not wait for the pages, but for a place in the queue of a disk, or of FUSE, that is full. Of a
        range longer than most_bytes each part is asked for by itself.
        """
        if self._linux:
            with suppress(MemoryError):
                self._advise(_split(_merge(ranges), most_bytes), _MADV_WILLNEED)

    def copy(self, ranges: Ranges, out: NDArray[np.uint8]) -> tuple[int, int]:
        """Fills out with ranges, end to end; waits for what must be read from disk.

        Returns the bytes that were copied, and what ended that: 0 at the end of out, EFAULT where memory
        cannot be read, another error number where the kernel does not copy.
        """
        if not self._copies:
            return 0, errno.ENOSYS
        address, some, copied = out.ctypes.data, ranges[:_MAX_RANGES], 0
        while copied < len(out):  # a call takes 1,024 ranges and copies 2 GiB at most
            if copied:
                ends = ranges[:, 1].cumsum()
                first = int(ends.searchsorted(copied, side="right"))
                some = ranges[first : first + _MAX_RANGES].copy()
                some[0] = some[0].sum() - (ends[first] - copied), ends[first] - copied  # what is left of it
            block = (ctypes.c_size_t * 2)(address + copied, len(out) - copied)
            now = self._libc.process_vm_writev(os.getpid(), some.ctypes.data, len(some), block, 1, 0)
            if now <= 0:
                code = ctypes.get_errno() if now else errno.EFAULT
                self._copies = code not in (errno.ENOSYS, errno.EPERM)  # forbidden: not asked for again
                return copied, code
            copied += now
        return copied, 0

    def is_cached(self, address: int) -> bool:
        """Whether the page at an address is in the page cache. True where the system does not tell."""
        if not self._linux:
            return True
        found = ctypes.c_ubyte(1)
        self._libc.mincore(address & -PAGE, PAGE, ctypes.byref(found))
        return bool(found.value & 1)

    def _advise(self, ranges: Ranges, advice: int) -> None:
        """Gives the advice on all ranges, in order; some may not take it, as memory without a file."""
        done = self._advise_in_bulk(ranges, advice) if self._in_bulk else 0
        for address, length in ranges[done:].tolist():
            self._libc.madvise(address, length, advice)

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
    if len(ranges) == 1:  # a block, say
        return ranges
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
    if hasattr(libc, "process_vm_writev"):
        vector = ctypes.c_void_p, ctypes.c_ulong
        libc.process_vm_writev.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
        libc.process_vm_writev.restype = ctypes.c_ssize_t
    return libc


KERNEL = KernelAdvice()
