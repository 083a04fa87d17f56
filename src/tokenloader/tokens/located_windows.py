"""Located windows: windows whose place in memory is computed once, to be read ahead and copied later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.storage.kernel_advice import PAGE, page_ranges
from tokenloader.tokens.store import Memory


class LocatedWindows:
    """Windows of equal length, found in memory. Made by `TokenArray.locate`.

    They keep the memory alive in which they were found, also when the tokens are read into RAM or closed
    meanwhile.
    """

    def __init__(
        self, memory: Memory, starts: NDArray[np.int64], length: int, check_open: Callable[[], object]
    ) -> None:
        """Finds [starts[i], starts[i] + length); check_open raises if the tokens can no longer be read."""
        self._memory, self._check_open = memory, check_open
        self._located = memory.axis.locate(starts, length)
        self._where = memory.axis.byte_ranges(self._located) if memory.is_mapped else None

    def __len__(self) -> int:
        return len(self._located.offsets)

    def prefetch(self) -> None:
        """Starts reading the windows from disk, and does not wait. Does nothing for tokens in RAM."""
        if self._where is not None:
            self._memory.kernel.start_reading(page_ranges(self._where.ranges))

    def is_cached(self) -> bool:
        """Whether the first page of the first window is in RAM or in the page cache. A hint, in 2 us."""
        if self._where is None or not len(self):
            return True
        return self._memory.kernel.is_cached(int(self._where.ranges[0, 0]))

    def first_not_cached(self) -> tuple[Path, int] | None:
        """Finds the first page of the windows that is not in memory: its file, and a byte there. A hint."""
        if self._where is None:
            return None
        ranges, parts = self._where.ranges.tolist(), self._memory.parts
        for (address, length), number in zip(ranges, self._where.stretches.tolist(), strict=True):
            part = parts[number]
            for page in range(address & -PAGE, address + length, PAGE):
                if part.extent is not None and not self._memory.kernel.is_cached(page):
                    begin = max(0, page - part.array.ctypes.data)
                    return part.extent.path, part.offset_bytes + begin
        return None

    def copy(self) -> NDArray[np.integer[Any]]:
        """Copies the windows, as `TokenArray.gather` does: [n, length] of the tokens' dtype."""
        self._check_open()
        if self._where is None:
            return self._memory.axis.gather(self._located)
        block = np.empty((len(self), self._located.length), self._memory.axis.dtype)
        self._memory.read(self._where, block)
        return block
