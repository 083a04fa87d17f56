"""Reading in order: tokens read from files into buffers, which is faster than to fault in mapped pages."""

import os
from contextlib import suppress
from itertools import accumulate
from typing import Any, Self

from numpy.typing import NDArray

from tokenloader.tokens.gather import slices_between
from tokenloader.tokens.token_array import TokenArray


class Reader:
    """Reads tokens into given arrays: from their files, or from memory if they are in RAM.

    A context manager. Inside it, `read` may be called from several threads at once.
    """

    def __init__(self, tokens: TokenArray) -> None:
        self.dtype = tokens.dtype
        self._memory, self._begin, self._parts = tokens._memory(), tokens._begin, tokens._parts()
        self._ends = list(accumulate(len(part.array) for part in self._parts))

    def __enter__(self) -> Self:
        self._advise("POSIX_FADV_SEQUENTIAL")
        return self

    def __exit__(self, *error: object) -> None:
        self._advise("POSIX_FADV_NORMAL")

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fills out, [n], with tokens [start, start + n). Bounds are the caller's to check.

        OSError if a file cannot be read, or was written to since it was opened.
        """
        for number, within in slices_between(self._ends, start, start + len(out)):
            part = self._parts[number].cut(within)
            now, out = out[: len(part.array)], out[len(part.array) :]
            if part.extent is None or part.file is None:
                self._memory.copy(self._begin + start, now)
            else:
                part.read(now)
                part.check_unchanged(0)
            start += len(now)

    def _advise(self, advice: str) -> None:
        for part in self._parts:
            if part.file is not None and hasattr(os, "posix_fadvise"):
                with suppress(OSError):  # it is only faster
                    os.posix_fadvise(part.file.fileno(), 0, 0, getattr(os, advice))
