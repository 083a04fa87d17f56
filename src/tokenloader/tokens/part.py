"""Parts: consecutive tokens of an axis that lie in one piece of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.formats.format import read_document_boundaries


class Part(NamedTuple):
    """Consecutive tokens of an axis."""

    array: NDArray[Any]  # the memory, [num_tokens], contiguous
    held: Literal["mapped", "filling", "ram"] = "ram"  # filling: mapped, until a RamFill has read the file
    extent: Extent | None = None  # all tokens of the file; None for an array that was given
    first: int = 0  # number of the extent's token that is array[0]

    def cut(self, within: slice) -> Part:
        """Returns the tokens within a slice of the part."""
        return self._replace(array=self.array[within], first=self.first + within.start)

    @property
    def file_extent(self) -> Extent | None:
        """Where in the file exactly these tokens lie; None for an array that was given."""
        extent, num_tokens = self.extent, len(self.array)
        if extent is None or num_tokens == extent.num_tokens:
            return extent
        offset_bytes = extent.offset_bytes + self.first * extent.dtype.itemsize
        # The index beside the file is about all of its tokens.
        return replace(extent, offset_bytes=offset_bytes, num_tokens=num_tokens, index_path=None)

    def documents(self) -> NDArray[np.int64]:
        """Reads document boundaries, int64 [num_documents + 1] in tokens of the part: 0, ..., num_tokens.

        A document that the part cuts ends with the part. An empty one at the end of the part belongs to
        the part that begins there.
        """
        assert self.extent is not None
        boundaries = read_document_boundaries(self.extent)
        begin, end = self.first, self.first + len(self.array)
        low = min(boundaries.searchsorted(begin), boundaries.searchsorted(begin, "right") - 1)
        high = boundaries.searchsorted(end) + 1 if end < self.extent.num_tokens else len(boundaries)
        return boundaries[low:high].clip(begin, end) - begin
