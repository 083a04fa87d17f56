"""Located windows: windows whose place in memory is computed once, to be read ahead and copied later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.tokens.store import Memory


class LocatedWindows:
    """Windows of equal length, found in memory. Made by `TokenArray.locate`.

    They keep the memory alive in which they were found, also when the tokens are read into RAM or closed
    meanwhile.

    Args:
        memory: the bytes of the tokens.
        starts: int64 [n], first token of each window on the memory's axis. Checked, and not changed later.
        length: tokens in a window.
        check_open: raises if the tokens were closed or could not be read.

    Example:
        >>> tokens = open_tokens(np.arange(100, dtype=np.uint16))
        >>> windows = tokens.locate([0, 50], 3)
        >>> windows.prefetch()  # and some time later
        >>> windows.copy()
        array([[ 0,  1,  2],
               [50, 51, 52]], dtype=uint16)
    """

    __slots__ = "_check_open", "_located", "_memory", "_pages"

    def __init__(
        self,
        memory: Memory,
        starts: NDArray[np.int64],
        length: int,
        check_open: Callable[[], object],
    ) -> None:
        self._memory, self._check_open = memory, check_open
        self._located = memory.locate(starts, length)
        self._pages = memory.pages(self._located) if memory.mapped else None

    def __len__(self) -> int:
        return len(self._located.starts)

    def prefetch(self) -> None:
        """Starts reading the windows from disk, and does not wait. Does nothing for tokens in RAM."""
        if self._pages is not None:
            self._memory.kernel.start_reading(self._pages)

    def is_cached(self) -> bool:
        """Whether the first page of the first window is in RAM or in the page cache. A hint, in 2 us."""
        if self._pages is None or not len(self._pages):
            return True
        return self._memory.kernel.is_cached(int(self._pages[0, 0]))

    def copy(self) -> NDArray[np.integer[Any]]:
        """Copies the windows.

        Returns:
            [n, length] of the tokens' dtype, a fresh array.

        Raises:
            OSError: a file was truncated, or its disk fails.
            ValueError: the tokens were closed.
        """
        self._check_open()
        return self._memory.gather(self._located, self._pages)
