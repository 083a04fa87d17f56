"""Parts: consecutive tokens of an axis that lie in one piece of memory."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.formats.format import read_document_boundaries
from tokenloader.storage.mapped import HeldFile
from tokenloader.storage.ram import read_exactly


class Part(NamedTuple):
    """Consecutive tokens of an axis."""

    array: NDArray[Any]  # the memory, [num_tokens], contiguous; not to be touched unless held in RAM
    held: Literal["mapped", "filling", "ram"] = "ram"  # filling: mapped, until a RamFill has read the file
    extent: Extent | None = None  # all tokens of the file; None for an array that was given
    file: HeldFile | None = None  # the file that is mapped; None for RAM, and where it is not known
    first: int = 0  # number of the extent's token that is array[0]

    def cut(self, within: slice) -> Part:
        """Returns the tokens within a slice of the part."""
        return self._replace(array=self.array[within], first=self.first + within.start)

    def filled_by(self, array: NDArray[Any] | None) -> Part:
        """Returns the part as held when a RamFill has ended, which made an array of it, or failed."""
        if array is None:
            return self._replace(held="mapped")
        return self._replace(array=array, held="ram", file=None)

    @property
    def file_extent(self) -> Extent | None:
        """Where in the file exactly these tokens lie; None for an array that was given."""
        extent, num_tokens = self.extent, len(self.array)
        if extent is None or num_tokens == extent.num_tokens:
            return extent
        # The index beside the file is about all of its tokens.
        return replace(extent, offset_bytes=self.offset_bytes, num_tokens=num_tokens, index_path=None)

    @property
    def offset_bytes(self) -> int:
        """Bytes of the file before the first of these tokens; 0 for an array that was given."""
        return self.extent.offset_bytes + self.first * self.array.itemsize if self.extent else 0

    def read(self, out: NDArray[Any], at_bytes: int = 0, stopped_by: int = 0) -> None:
        """Fills out with what the part has from a byte on: from its file, or else from memory.

        Raises OSError if that cannot be read; stopped_by is the error that the kernel met in copying it.
        """
        if self.file is not None and self.extent is not None:
            try:
                read_exactly(self.file, self.offset_bytes + at_bytes, out, dontcache_flag=0)
            except OSError:
                self.check_unchanged(at_bytes)  # which says more of a file that was truncated
                raise
            return
        self.check_unchanged(at_bytes)
        if stopped_by == errno.EFAULT:  # touching the memory would kill the process
            message = (
                f"byte {at_bytes:,} of an array that was given as tokens cannot be read; is the array "
                f"mapped from a file that was truncated, or does its disk fail?"
            )
            raise OSError(errno.EIO, message, self.file.name if self.file else None)
        out[...] = self.array.view(np.uint8)[at_bytes : at_bytes + len(out)]

    def check_unchanged(self, at_bytes: int) -> None:
        """Raises OSError, which names a byte to be read, if the file has changed since it was opened."""
        if self.file is not None:
            try:
                self.file.check_unchanged()
            except OSError as error:
                message = f"cannot be read at byte {self.offset_bytes + at_bytes:,}: it {error.strerror}"
                raise OSError(errno.EIO, message, self.file.name) from error

    def documents(self) -> NDArray[np.int64]:
        """Reads document boundaries, int64 [num_documents + 1] in tokens of the part: 0, ..., num_tokens.

        A document that the part cuts ends with the part. An empty one at the end of the part belongs to
        the part that begins there.
        """
        assert self.extent is not None
        try:
            boundaries = read_document_boundaries(self.extent)
        except MemoryError as error:
            message = f"{self.extent.index_path}: where documents end does not fit into memory: {error}"
            raise MemoryError(message) from error
        begin, end = self.first, self.first + len(self.array)
        low = min(boundaries.searchsorted(begin), boundaries.searchsorted(begin, "right") - 1)
        high = boundaries.searchsorted(end) + 1 if end < self.extent.num_tokens else len(boundaries)
        return boundaries[low:high].clip(begin, end) - begin
