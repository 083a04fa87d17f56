"""The store: the bytes of one or more TokenArrays, and who may let go of them.

A Memory never changes. While files are read into RAM, a store has the Memory of the mapped files; after
that it has another, in RAM. Whoever took the first keeps it for as long as it is needed.

Every TokenArray, and every view of one, refers to its store until it is closed. The memory, and a fill
that still reads, end with the last reference. A fill does not refer to the store.
"""

import errno
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from traceback import clear_frames
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.storage.kernel_advice import (
    COMMON_READ_AHEAD_BYTES,
    KERNEL,
    KernelAdvice,
    page_ranges,
)
from tokenloader.storage.ram import RamFill
from tokenloader.tokens.gather import Axis, ByteRanges, slices_between
from tokenloader.tokens.part import Part

_STRIDE_TOKENS = 4 << 20  # of a long copy: the disk reads one while another is copied


class Memory:
    """Parts of one axis, in order, and the advice of a kernel on those that are mapped.

    What is mapped is copied by the kernel, or read from its file, and never touched: where a file was
    truncated, or its disk fails, touching it would kill the process. A file that was written to since it
    was opened is an OSError: what was copied of it may be neither its old contents nor its new.
    """

    def __init__(self, parts: Sequence[Part], kernel: KernelAdvice = KERNEL, name: str = "array") -> None:
        self.parts, self.kernel = parts, kernel
        self.name = name  # what the tokens are called in messages
        self.is_mapped = any(part.held != "ram" for part in parts)  # any of it
        # If any is, each part is a stretch of the axis, so that the parts of ranges are known.
        self.axis = Axis([part.array for part in parts], joins=not self.is_mapped)
        self._ends = list(accumulate(len(part.array) for part in parts))

    @property
    def is_over_a_network(self) -> bool:
        """Whether any of it is mapped from a file that a server or a program serves."""
        # Asking for a file takes 50 us, and there may be thousands on one file system.
        files = {part.file.device: part.file for part in self.parts if part.file is not None}
        return any(file.is_over_a_network for file in files.values())

    def parts_between(self, begin: int, end: int) -> list[Part]:
        """Returns the parts of tokens [begin, end), end > begin, the first and the last cut to them."""
        return [self.parts[number].cut(within) for number, within in slices_between(self._ends, begin, end)]

    def read(self, where: ByteRanges, out: NDArray[Any]) -> None:
        """Fills out with ranges of the axis' memory, end to end: the one way out of what is mapped.

        Raises:
            OSError: a file was written to or truncated since it was opened, or cannot be read.
        """
        data = out.reshape(-1).view(np.uint8)
        copied, stopped_by = self.kernel.copy(where.ranges, data)
        if copied < len(data):
            self._read_one_by_one(where, data, copied, stopped_by)
        # After the copying: a write is seen in the file's time before it is seen in its contents.
        for number in set(where.stretches.tolist()):
            if (file := self.parts[number].file) is not None:
                file.check_unchanged()

    def load(self, where: ByteRanges) -> None:
        """Asks for ranges to be read into the page cache, in requests as large as the disk takes. A hint.

        Returns when that is asked: on a disk whose queue is full, and on some file systems, that takes as
        long as the reading.
        """
        pages = page_ranges(where.ranges)
        for number in set(where.stretches.tolist()):
            file = self.parts[number].file
            most_bytes = COMMON_READ_AHEAD_BYTES if file is None else file.announced_bytes
            self.kernel.start_reading(pages[where.stretches == number], most_bytes)

    def copy(self, start: int, out: NDArray[Any], stride_tokens: int = _STRIDE_TOKENS) -> None:
        """Fills out, [n], with tokens [start, start + n), read from disk a stride ahead of the copying."""
        for at in range(0, len(out), stride_tokens):
            stride = out[at : at + stride_tokens]
            if self.is_mapped:
                first = np.array([start + at])
                ahead = self.axis.locate(first, min(2 * stride_tokens, len(out) - at))
                self.kernel.start_reading(page_ranges(self.axis.byte_ranges(ahead).ranges))
                self.read(self.axis.byte_ranges(self.axis.locate(first, len(stride))), stride)
            else:
                self.axis.copy(start + at, stride)

    def _read_one_by_one(
        self, where: ByteRanges, data: NDArray[np.uint8], copied: int, stopped_by: int
    ) -> None:
        """Fills data from byte `copied` on, where the kernel stopped. Reading tells what is wrong there."""
        ends = where.ranges[:, 1].cumsum().tolist()
        ranges = zip(where.ranges.tolist(), where.stretches.tolist(), ends, strict=True)
        for row, ((address, length), number, end) in enumerate(ranges):
            if copied < end:
                at_bytes = address + length - (end - copied) - self.parts[number].array.ctypes.data
                self.parts[number].read(data[copied:end], at_bytes, stopped_by)
                copied = end
                if stopped_by == errno.EFAULT:  # in that range; the kernel may copy what comes after it
                    more, stopped_by = self.kernel.copy(where.ranges[row + 1 :], data[end:])
                    copied += more


class Store:
    """The memory of one axis, which TokenArrays share."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        name: str = "array",
        fill: RamFill | None = None,
        kernel: KernelAdvice = KERNEL,
    ) -> None:
        self.fill = fill  # reads the parts that are "filling"; None once it has ended
        self.fill_failure: tuple[int, str, str] | None = None  # as in RamFill
        self.current = Memory(parts, kernel, name)  # as held now
        if fill is not None:
            weakref.finalize(self, fill.stop)

    def memory(self) -> Memory:
        """Returns the memory as held now, for as long as the caller keeps it."""
        fill = self.fill
        if fill is not None and (fill.arrays is not None or fill.failure is not None):
            # Two threads may come here at once; both make the same of it. What could not be read into
            # RAM stays mapped.
            filled = iter(fill.arrays or [])
            parts = [
                part.filled_by(next(filled, None)) if part.held == "filling" else part
                for part in self.current.parts
            ]
            self.fill_failure = fill.failure
            self.current, self.fill = Memory(parts, self.current.kernel, self.current.name), None
        return self.current


@contextmanager
def letting_go() -> Iterator[None]:
    """Clears the frames that an error came through, so that who keeps it keeps no tokens with it."""
    handled = sys.exception()  # by the caller; errors chain to it
    try:
        yield
    except BaseException as error:
        chained: BaseException | None = error
        while chained is not None and chained is not handled:
            clear_frames(chained.__traceback__)
            chained = chained.__context__
        raise


def no_memory(name: str, num_tokens: int, dtype: np.dtype[Any]) -> MemoryError:
    """The error for a copy of tokens that does not fit into memory; name: where they come from."""
    return MemoryError(
        f"{name}: a copy of {num_tokens:,} {dtype} tokens needs {num_tokens * dtype.itemsize / 2**30:.2f} "
        f"GiB of memory, which the system does not give; take fewer at once"
    )
