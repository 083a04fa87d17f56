"""Located windows: windows whose place in memory is computed once, to be read ahead and copied later."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.storage.kernel_advice import PAGE, page_ranges
from tokenloader.tokens.gather import ByteRanges, Located
from tokenloader.tokens.store import Memory, letting_go, no_memory


class LocatedWindows:
    """Windows of equal length, found in memory. Made by `TokenArray.locate`.

    They do not keep that memory alive: when tokens are closed it is freed, whoever has windows. Where files
    have been read into RAM meanwhile, windows are found again there.
    """

    def __init__(
        self,
        memory: Memory,
        starts: NDArray[np.int64],
        length: int,
        memory_now: Callable[[], Memory],
    ) -> None:
        """Finds [starts[i], starts[i] + length). memory_now raises if the tokens can no longer be read."""
        self._starts, self._length, self._memory_now = starts.copy(), length, memory_now
        self._memory = weakref.ref(memory)
        self._located, self._where = self._find(memory)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def is_mapped(self) -> bool:
        """Whether any of the tokens were mapped when the windows were found."""
        return self._where is not None

    @property
    def is_over_a_network(self) -> bool:
        """Whether any of the tokens are in files that a server or a program serves."""
        memory = self._memory()
        return memory is not None and memory.is_over_a_network

    def prefetch(self) -> None:
        """Starts reading the windows from disk, and does not wait. Does nothing for tokens in RAM."""
        memory = self._memory()
        if memory is not None and self._where is not None:
            memory.kernel.start_reading(page_ranges(self._where.ranges))

    def load(self) -> None:
        """Asks for the windows, long ones, to be read into the page cache in large requests.

        Returns when that is asked. A hint, as `prefetch` is: what cannot be read is an error of who copies.
        """
        memory = self._memory()
        if memory is not None and self._where is not None:
            memory.load(self._where)

    def is_cached(self) -> bool:
        """Whether the first page of the first window is in RAM or in the page cache. A hint, in 2 us."""
        memory = self._memory()
        if memory is None or self._where is None or not len(self):
            return True
        return memory.kernel.is_cached(int(self._where.ranges[0, 0]))

    def first_not_cached(self) -> tuple[Path, int] | None:
        """Finds the first page of the windows that is not in memory: its file, and a byte there. A hint."""
        memory = self._memory()
        if memory is None or self._where is None:
            return None
        ranges, parts = self._where.ranges.tolist(), memory.parts
        for (address, length), number in zip(ranges, self._where.stretches.tolist(), strict=True):
            part = parts[number]
            for page in range(address & -PAGE, address + length, PAGE):
                if part.extent is not None and not memory.kernel.is_cached(page):
                    begin = max(0, page - part.array.ctypes.data)
                    return part.extent.path, part.offset_bytes + begin
        return None

    def copy(self) -> NDArray[np.integer[Any]]:
        """Copies the windows, as `TokenArray.gather` does: [n, length] of the tokens' dtype."""
        with letting_go():
            return self._copy()

    def _copy(self) -> NDArray[np.integer[Any]]:
        memory, located, where = self._memory_now(), self._located, self._where
        if memory is not self._memory():
            located, where = self._find(memory)
        try:
            if where is None:
                return memory.axis.gather(located)
            block = np.empty((len(self), self._length), memory.axis.dtype)
        except MemoryError as error:
            raise no_memory(memory.name, len(self) * self._length, memory.axis.dtype) from error
        memory.read(where, block)
        return block

    def _find(self, memory: Memory) -> tuple[Located, ByteRanges | None]:
        located = memory.axis.locate(self._starts, self._length)
        return located, memory.axis.byte_ranges(located) if memory.is_mapped else None
