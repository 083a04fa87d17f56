"""Mapped files: the tokens of a file as a read-only array that the page cache backs.

The memory of a mapping ends with the last reference to its array.
"""

import errno
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.formats.identity import check_unchanged


def map_read_only(extent: Extent, file: FileIO | None = None) -> NDArray[Any]:
    """Maps the tokens of an extent, [num_tokens]. Takes no RAM of the process, and reads nothing yet.

    Opens the path if no open handle is given, and raises what `open_file` does.
    """
    with nullcontext(file) if file else open_file(extent) as opened, _too_many_files_explained(extent):
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    # Windows are far apart: without this a fault reads a whole read-ahead window (128 KiB to 8 MiB)
    # to use 2 KiB of it. What is worth reading ahead is named to the kernel with start_reading.
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, extent.dtype, extent.num_tokens, extent.offset_bytes)


def open_file(extent: Extent) -> FileIO:
    """Opens the file of an extent for reading.

    OSError if it is missing, is not what it was when its header was read, or too many files are open.
    """
    with _too_many_files_explained(extent), ExitStack() as stack:
        file = stack.enter_context(open(extent.path, "rb", buffering=0))
        if extent.identity is not None:
            check_unchanged(file.fileno(), extent.path, extent.identity)
        stack.pop_all()
        return file


@contextmanager
def _too_many_files_explained(extent: Extent) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        remedy = "each mapped file counts as one: raise the limit (ulimit -n), or join the files into fewer"
        raise OSError(errno.EMFILE, f"too many open files, and {remedy}", str(extent.path)) from None
