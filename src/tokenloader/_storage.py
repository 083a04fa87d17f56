"""One file's tokens in host memory: mapped from the file, or read into RAM.

Whoever holds the array keeps the mapping alive; it ends with the last reference. Nothing here ever
writes to the bytes.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tokenloader._formats import Extent

_READ_BYTES = 64 << 20  # a call; larger ones gain nothing and delay Ctrl-C
_ADVICE_BYTES = (
    128 << 10
)  # Linux serves at most one read-ahead window a call; this is the common size
_PROGRESS_AFTER_SECONDS = 3.0


def map_read_only(extent: Extent) -> NDArray[Any]:
    """The tokens of an extent, [num_tokens], backed by the page cache.

    Takes no RAM of the process's own, and reads nothing yet.
    """
    try:
        with open(extent.path, "rb", buffering=0) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            errno.EMFILE,
            "too many open files, and each mapped file counts as one: raise the limit (ulimit -n), or "
            "join the files into fewer",
            str(extent.path),
        ) from None
    # Windows are far apart: without this a fault reads a whole read-ahead window (128 KiB to 8 MiB)
    # to use 2 KiB of it. What is worth reading ahead is named to the kernel with start_reading.
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, extent.dtype, extent.num_tokens, extent.offset_bytes)


def read_into_ram(extents: Sequence[Extent]) -> NDArray[Any]:
    """The tokens of all extents, in order, in one allocation: [num_tokens], their common dtype.

    Read with large calls and not through a mapping, so that nothing is held twice. Shows a progress
    bar when it takes longer than a few seconds.

    Raises:
        OSError: a file cannot be read, or ends before its extent does.
    """
    tokens = np.empty(sum(extent.num_tokens for extent in extents), extents[0].dtype)
    buffer = memoryview(tokens.view(np.uint8))  # type: ignore[arg-type] # an array is a buffer
    at = 0
    with tqdm(
        total=tokens.nbytes,
        desc="reading tokens into RAM",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=_PROGRESS_AFTER_SECONDS,
    ) as progress:
        for extent in extents:
            end = at + extent.nbytes
            with open(extent.path, "rb", buffering=0) as file:
                file.seek(extent.offset_bytes)
                while at < end:
                    count = file.readinto(buffer[at : min(at + _READ_BYTES, end)])
                    if not count:
                        raise OSError(
                            f"{extent.path}: ended at byte {file.tell():,} while being read, "
                            f"{end - at:,} bytes of tokens early; has it been truncated?"
                        )
                    at += count
                    progress.update(count)
    return tokens
