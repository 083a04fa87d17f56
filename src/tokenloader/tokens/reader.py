"""Reading in order: tokens read from their files into buffers, past the mapping.

A pass over all tokens is faster with reads into a buffer that stays in the processor's cache than over
mapped pages, each of which is faulted in.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from contextlib import ExitStack
from io import FileIO
from itertools import accumulate
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.storage.mapped import open_file
from tokenloader.tokens.token_array import TokenArray


class Reader:
    """Reads tokens into given arrays: from their files, or from memory if they are in RAM.

    A context manager. Inside it, `read` may be called from several threads at once.

    Attributes:
        dtype: numpy dtype of one token.

    Example:
        >>> out = np.empty(3, np.uint16)
        >>> with Reader(open_tokens(np.arange(100, dtype=np.uint16))) as reader:
        ...     reader.read(50, out)
        >>> out
        array([50, 51, 52], dtype=uint16)
    """

    def __init__(self, tokens: TokenArray) -> None:
        self.dtype = tokens.dtype
        self._parts = tokens._parts()
        self._ends = list(accumulate(len(part.array) for part in self._parts))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._files = [
                None
                if part.held == "ram" or part.file_extent is None
                else (part.file_extent, stack.enter_context(_open_in_order(part.file_extent)))
                for part in self._parts
            ]
            self._close = stack.pop_all().close
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fills out, [n], with tokens [start, start + n). Bounds are the caller's to check.

        Raises:
            OSError: a file cannot be read, or ends before its tokens do.
        """
        number = bisect_right(self._ends, start)
        while len(out):
            array, file = self._parts[number].array, self._files[number]
            at = start - (self._ends[number] - len(array))
            now = out[: len(array) - at]
            if file is None:
                now[...] = array[at : at + len(now)]
            else:
                _read(*file, at, now)
            start, out, number = start + len(now), out[len(now) :], number + 1


def _open_in_order(extent: Extent) -> FileIO:
    file = open_file(extent)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file


def _read(extent: Extent, file: FileIO, at: int, out: NDArray[Any]) -> None:
    left = memoryview(out.view(np.uint8))  # type: ignore[arg-type] # it is a buffer
    offset_bytes = extent.offset_bytes + at * extent.dtype.itemsize
    while left:
        if hasattr(os, "preadv"):
            count = os.preadv(file.fileno(), [left], offset_bytes)
        else:
            data = os.pread(file.fileno(), len(left), offset_bytes)
            count = len(data)
            left[:count] = data
        if not count:
            raise OSError(
                errno.EIO,
                f"ended at byte {offset_bytes:,}, before its tokens did; has it been truncated?",
                str(extent.path),
            )
        left, offset_bytes = left[count:], offset_bytes + count
