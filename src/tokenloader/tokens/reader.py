"""Reading in order: tokens read from files into buffers, which is faster than to fault in mapped pages."""

import os
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, Self

from numpy.typing import NDArray

from tokenloader.storage.mapped import open_file
from tokenloader.storage.ram import read_exactly
from tokenloader.tokens.gather import slices_between
from tokenloader.tokens.token_array import TokenArray


class Reader:
    """Reads tokens into given arrays: from their files, or from memory if they are in RAM.

    A context manager. Inside it, `read` may be called from several threads at once.
    """

    def __init__(self, tokens: TokenArray) -> None:
        self.dtype = tokens.dtype
        self._parts = tokens._parts()
        self._ends = list(accumulate(len(part.array) for part in self._parts))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._files = [
                stack.enter_context(open_file(part.extent)) if part.extent and part.held != "ram" else None
                for part in self._parts
            ]
            for file in filter(None, self._files):
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._close = stack.pop_all().close
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fills out, [n], with tokens [start, start + n). Bounds are the caller's to check."""
        for number, within in slices_between(self._ends, start, start + len(out)):
            part, file = self._parts[number].cut(within), self._files[number]
            now, out = out[: len(part.array)], out[len(part.array) :]
            if file is None or part.file_extent is None:
                now[...] = part.array
            else:
                read_exactly(file, part.file_extent.offset_bytes, now, dontcache_flag=0)
