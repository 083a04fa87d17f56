"""The store: the bytes of one or more TokenArrays, and who may let go of them.

A Memory never changes. While files are read into RAM, a store has the Memory of the mapped files; after
that it has another, in RAM. Whoever took the first keeps it for as long as it is needed.

Every TokenArray, and every view of one, refers to its store until it is closed. The memory, and a fill
that still reads, end with the last reference. A fill does not refer to the store.
"""

import errno
import weakref
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.storage.kernel_advice import KERNEL, PAGE, FaultError, KernelAdvice, Ranges, page_ranges
from tokenloader.storage.ram import RamFill
from tokenloader.tokens.gather import Axis, Located, slices_between
from tokenloader.tokens.part import Part

_STRIDE_TOKENS = 4 << 20  # of a long copy: the disk reads one while another is copied


class Memory:
    """Parts of one axis, in order, and the advice of a kernel on those that are mapped.

    Whatever is mapped is made readable before it is touched: where a file was truncated, or its disk
    fails, that is an OSError here, and touching it would kill the process.
    """

    def __init__(self, parts: Sequence[Part], kernel: KernelAdvice = KERNEL) -> None:
        self.parts, self.kernel = parts, kernel
        self.axis = Axis([part.array for part in parts])
        self.is_mapped = any(part.held != "ram" for part in parts)  # any of it
        self._ends = list(accumulate(len(part.array) for part in parts))

    def parts_between(self, begin: int, end: int) -> list[Part]:
        """Returns the parts of tokens [begin, end), end > begin, the first and the last cut to them."""
        return [self.parts[number].cut(within) for number, within in slices_between(self._ends, begin, end)]

    def pages(self, located: Located) -> Ranges:
        """Returns the pages that hold windows; those of the first window come first."""
        return page_ranges(*self.axis.byte_ranges(located))

    def make_readable(self, pages: Ranges) -> None:
        """Reads mapped pages from disk, and waits. OSError if a file was truncated, or its disk fails."""
        try:
            if self.kernel.fault_in(pages):
                return
        except FaultError as error:
            part = self._parts_in(np.array([[error.address, PAGE]]))[0]
            if part.extent is None:
                raise OSError(
                    errno.EIO,
                    f"an array that was given as tokens cannot be read ({error}); is it mapped from a file "
                    f"that was truncated?",
                ) from error
            at = part.first * part.array.itemsize + max(0, error.address - part.array.ctypes.data)
            raise _lost(part.extent, part.extent.offset_bytes + at, error) from error
        # The system cannot tell: see whether the files still have their size. What they lose between
        # this and the copying still kills the process there.
        for part in self._parts_in(pages):
            if (extent := part.extent) is not None and part.held != "ram":
                size_bytes = extent.path.stat().st_size
                if size_bytes < extent.offset_bytes + extent.nbytes:
                    raise _lost(extent, size_bytes)

    def file_at(self, address: int) -> tuple[Path, int] | None:
        """Returns the file that a page's tokens are mapped from, and the byte of the first of them."""
        for part in self._parts_in(np.array([[address, PAGE]])):
            if part.extent is not None:
                begin = part.extent.offset_bytes + part.first * part.array.itemsize
                return part.extent.path, begin + max(0, address - part.array.ctypes.data)
        return None

    def copy(self, start: int, out: NDArray[Any], stride_tokens: int = _STRIDE_TOKENS) -> None:
        """Fills out, [n], with tokens [start, start + n), read from disk a stride ahead of the copying."""
        for at in range(0, len(out), stride_tokens):
            stride = out[at : at + stride_tokens]
            if self.is_mapped:
                first = np.array([start + at])
                ahead = self.axis.locate(first, min(2 * stride_tokens, len(out) - at))
                self.kernel.start_reading(self.pages(ahead))
                self.make_readable(self.pages(self.axis.locate(first, len(stride))))
            self.axis.copy(start + at, stride)

    def _parts_in(self, pages: Ranges) -> list[Part]:
        begins, ends = self.axis.addresses
        touched = (pages[:, :1] < ends) & (pages.sum(axis=1, keepdims=True) > begins)  # [pages, parts]
        return [self.parts[number] for number in touched.any(axis=0).nonzero()[0].tolist()]


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
        self.name = name  # what the tokens are called in messages
        self.fill = fill  # reads the parts that are "filling"; None once they are in RAM
        self.current = Memory(parts, kernel)  # as held now, also when the fill has failed
        if fill is not None:
            weakref.finalize(self, fill.stop)

    def memory(self) -> Memory:
        """Returns the memory, for as long as the caller keeps it. OSError if a file could not be read."""
        fill = self.fill
        if fill is not None and fill.error is not None:
            raise fill.error
        if fill is not None and fill.arrays is not None:
            # Two threads may come here at once; both make the same of it.
            filled = iter(fill.arrays)
            parts = [
                part._replace(array=next(filled), held="ram") if part.held == "filling" else part
                for part in self.current.parts
            ]
            self.current, self.fill = Memory(parts, self.current.kernel), None
        return self.current


def _lost(extent: Extent, offset_bytes: int, error: OSError | None = None) -> OSError:
    size_bytes = extent.path.stat().st_size if extent.path.exists() else 0
    return OSError(
        errno.EIO,
        f"cannot be read at byte {offset_bytes:,}: it has {size_bytes:,} bytes now and had "
        f"{extent.offset_bytes + extent.nbytes:,} when it was opened; was it truncated or overwritten, "
        f"or does its disk fail{f' ({error})' if error else ''}?",
        str(extent.path),
    )
