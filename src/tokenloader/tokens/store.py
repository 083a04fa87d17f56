"""The store: the bytes of one or more TokenArrays, and who may let go of them.

A Memory never changes. While files are read into RAM, a store has the Memory of the mapped files; after
that it has another, in RAM. Whoever took the first keeps it for as long as it is needed.

Every TokenArray, and every view of one, refers to its store until it is closed. The memory, and a fill
that still reads, end with the last reference. A fill does not refer to the store.
"""

from __future__ import annotations

import errno
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.storage.kernel_advice import (
    KERNEL,
    PAGE,
    FaultError,
    KernelAdvice,
    Ranges,
    page_ranges,
)
from tokenloader.tokens.gather import Axis, Located
from tokenloader.tokens.part import Part

_STRIDE_TOKENS = 4 << 20  # of a long copy: the disk reads one while another is copied


class Fill(Protocol):
    """What a store needs of a RamFill.

    Attributes:
        tokens: [num_tokens] of all parts that are "filling", in order; None until all are read.
        error: what ended the reading; None if nothing did.
    """

    tokens: NDArray[Any] | None
    error: Exception | None

    def wait(self) -> None: ...
    def stop(self) -> None: ...


class Memory:
    """Parts of one axis, and the one door through which they are read.

    Whatever is mapped is made readable before it is touched: where a file was truncated, or its disk
    fails, that is an OSError here, and touching it would kill the process.

    Attributes:
        parts: in order.
        mapped: whether any part is a mapped file.
        kernel: for advice on what is mapped.
    """

    def __init__(self, parts: Sequence[Part], kernel: KernelAdvice = KERNEL) -> None:
        self.parts, self.kernel = tuple(parts), kernel
        self.mapped = any(part.held != "ram" for part in parts)
        self._axis = Axis([part.array for part in parts])
        self._ends = list(accumulate(len(part.array) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def parts_between(self, begin: int, end: int) -> list[Part]:
        """The parts of tokens [begin, end), end > begin, the first and the last cut to them."""
        cut, number = [], bisect_right(self._ends, begin)
        while begin < end:
            part = self.parts[number]
            first = self._ends[number] - len(part.array)
            stop = min(end, self._ends[number])
            cut.append(part.cut(begin - first, stop - first))
            begin, number = stop, number + 1
        return cut

    def locate(self, starts: NDArray[np.int64], length: int) -> Located:
        """Finds the windows [starts[i], starts[i] + length) in memory. Starts are not copied."""
        return self._axis.locate(starts, length)

    def pages(self, located: Located) -> Ranges:
        """The pages that hold windows; those of the first window come first."""
        return page_ranges(*self._axis.byte_ranges(located))

    def gather(self, located: Located, pages: Ranges | None) -> NDArray[Any]:
        """Copies windows into a fresh block [n, length].

        Args:
            pages: of the windows; None if nothing is mapped.

        Raises:
            OSError: a file was truncated, or its disk fails.
        """
        if pages is not None:
            self._fault_in(located, pages)
        return self._axis.gather(located)

    def copy(self, start: int, out: NDArray[Any], stride_tokens: int = _STRIDE_TOKENS) -> None:
        """Fills out, [n], with tokens [start, start + n), read from disk a stride ahead of the copying.

        Raises:
            OSError: a file was truncated, or its disk fails.
        """
        for at in range(0, len(out), stride_tokens):
            stride = out[at : at + stride_tokens]
            if self.mapped:
                first = np.array([start + at])
                now = self.locate(first, len(stride))
                ahead = self.locate(first, min(2 * stride_tokens, len(out) - at))
                self.kernel.start_reading(self.pages(ahead))
                self._fault_in(now, self.pages(now))
            self._axis.copy(start + at, stride)

    def _fault_in(self, located: Located, pages: Ranges) -> None:
        try:
            if self.kernel.fault_in(pages):
                return
        except FaultError as error:
            raise self._unreadable(error) from error
        # The system cannot tell: see whether the files still have their size. What they lose between
        # this and the copying still kills the process there.
        numbers = {
            number
            for start in located.starts.tolist()
            for number in range(
                bisect_right(self._ends, start),
                bisect_right(self._ends, start + located.length - 1) + 1,
            )
        }
        for number in sorted(numbers):
            extent = self.parts[number].extent
            if extent is not None and self.parts[number].held != "ram":
                size_bytes = extent.path.stat().st_size
                if size_bytes < extent.offset_bytes + extent.nbytes:
                    raise _lost(extent, size_bytes)

    def _unreadable(self, error: FaultError) -> OSError:
        """The error to raise for a page that cannot be read."""
        part, first = next(
            (part, first)
            for part in self.parts
            if (first := part.array.ctypes.data) < error.address + PAGE
            and error.address < first + part.array.nbytes
        )
        if part.extent is None:
            return OSError(
                errno.EIO,
                f"an array that was given as tokens cannot be read ({error}); is it mapped from a file "
                f"that was truncated?",
            )
        offset_bytes = part.extent.offset_bytes + part.first * part.array.itemsize
        return _lost(part.extent, offset_bytes + max(0, error.address - first), error)


class Store:
    """The bytes of an axis.

    Args:
        parts: in order, of one dtype.
        name: what the tokens are called in messages.
        fill: the reading of the parts that are "filling".
        kernel: for advice on what is mapped.

    Attributes:
        name: as given.
        fill: as given; None once what it has read is held.
        current: the bytes as they are held now, also when the fill has failed.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        name: str = "array",
        fill: Fill | None = None,
        kernel: KernelAdvice = KERNEL,
    ) -> None:
        self.name = name
        self.fill = fill
        self.current = Memory(parts, kernel)
        if fill is not None:
            weakref.finalize(self, fill.stop)

    def memory(self) -> Memory:
        """The bytes, for as long as the caller keeps what this returns.

        Raises:
            OSError: a file could not be read into RAM.
        """
        fill = self.fill
        if fill is not None:
            if fill.error is not None:
                raise fill.error
            if fill.tokens is not None:
                # Two threads may come here at once; both make the same of it.
                self.current, self.fill = self._filled(fill.tokens), None
        return self.current

    def _filled(self, tokens: NDArray[Any]) -> Memory:
        parts, at = [], 0
        for part in self.current.parts:
            if part.held == "filling":
                array = tokens[at : at + len(part.array)]
                parts.append(part._replace(array=array, held="ram"))
                at += len(array)
            else:
                parts.append(part)
        return Memory(parts, self.current.kernel)


def _lost(extent: Extent, offset_bytes: int, error: OSError | None = None) -> OSError:
    size_bytes = extent.path.stat().st_size if extent.path.exists() else 0
    return OSError(
        errno.EIO,
        f"cannot be read at byte {offset_bytes:,}: it has {size_bytes:,} bytes now and had "
        f"{extent.offset_bytes + extent.nbytes:,} when it was opened; was it truncated or overwritten, "
        f"or does its disk fail{f' ({error})' if error else ''}?",
        str(extent.path),
    )
