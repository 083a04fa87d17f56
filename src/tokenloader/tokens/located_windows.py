"""Located windows: windows whose place in memory is computed once, to be read ahead and copied later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.storage.kernel_advice import PAGE
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
        self._pages = memory.pages(self._located) if memory.is_mapped else None

    def __len__(self) -> int:
        return len(self._located.offsets)

    def prefetch(self) -> None:
        """Starts reading the windows from disk, and does not wait. Does nothing for tokens in RAM."""
        if self._pages is not None:
            self._memory.kernel.start_reading(self._pages)

    def is_cached(self) -> bool:
        """Whether the first page of the first window is in RAM or in the page cache. A hint, in 2 us."""
        pages = self._pages
        return pages is None or not len(pages) or self._memory.kernel.is_cached(int(pages[0, 0]))

    def first_not_cached(self) -> tuple[Path, int] | None:
        """Finds the first page of the windows that is not in memory: its file, and a byte there. A hint."""
        for address, length in () if self._pages is None else self._pages.tolist():
            for page in range(address, address + length, PAGE):
                if not self._memory.kernel.is_cached(page):
                    return self._memory.file_at(page)
        return None

    def copy(self) -> NDArray[np.integer[Any]]:
        """Copies the windows, as `TokenArray.gather` does: [n, length] of the tokens' dtype."""
        self._check_open()
        if self._pages is not None:
            self._memory.make_readable(self._pages)
        return self._memory.axis.gather(self._located)
