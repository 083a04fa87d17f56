"""Extents: where in a file tokens lie end to end.

A format's room has a function that takes a Candidate and returns its Extent. It raises
NotThisFormatError when the bytes are not the format's, ValueError when they are and the file is
damaged, and DoubtfulFormatError when headerless tokens might look like this by chance.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

TOKEN_DTYPES = tuple(np.dtype(name) for name in ("uint8", "uint16", "uint32", "int32", "int64"))

CONVERT_IT = ", so convert with .astype(...) first"  # a remedy for data of another dtype

_HEAD_BYTES = 1024


class NotThisFormatError(ValueError):
    """The file is not of the format that was tried; the message says why."""


class DoubtfulFormatError(ValueError):
    """The file is of the format that was tried and damaged, unless it is headerless."""


@dataclass(frozen=True)
class Extent:
    """Tokens that lie end to end in one file.

    Args:
        path: the file.
        offset_bytes: of the first token; need not be aligned (safetensors data may start anywhere).
        dtype: of a token, one of TOKEN_DTYPES.
        num_tokens: 1 or more.
        format: in words: "safetensors", "NumPy .npy", "llm.c .bin", "Megatron-LM .bin", "datatrove .ds"
            or "headerless".
        index_path: of the file beside it that says where its documents end, if there is one.
    """

    path: Path
    offset_bytes: int
    dtype: np.dtype[Any]
    num_tokens: int
    format: str
    index_path: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tokens, without the header."""
        return self.num_tokens * self.dtype.itemsize


@dataclass(frozen=True)
class Candidate:
    """A file whose format is to be found.

    Args:
        path: the file.
        size_bytes: of all of it, 1 or more.
        head: its first 1,024 bytes, or all if it has fewer.
    """

    path: Path
    size_bytes: int
    head: bytes


def look_at(path: Path) -> Candidate:
    """What all formats need to see of a file.

    Raises:
        OSError: the file is missing, a directory, or cannot be read.
        ValueError: it is empty, or a pipe or device.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: no such file (looked in {path.parent.absolute()})"
        ) from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{path}: is a pipe or a device; write its tokens to a file and open that")
    with path.open("rb") as file:
        size_bytes, head = os.fstat(file.fileno()).st_size, file.read(_HEAD_BYTES)
    if size_bytes == 0:
        raise ValueError(f"{path}: the file is empty; was the download or conversion completed?")
    return Candidate(path, size_bytes, head)


def token_dtype(dtype: DTypeLike, where: str, remedy: str = "") -> np.dtype[Any]:
    """The dtype, in native byte order, if tokens may have it.

    Raises:
        ValueError: it begins with `where` and ends with `remedy`.
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{where}{dtype!r} is not a dtype; use one of {_dtype_names()}") from None
    if found not in TOKEN_DTYPES:
        order = " in big-endian byte order" if found.newbyteorder("=") in TOKEN_DTYPES else ""
        raise ValueError(
            f"{where}{found.name}{order}, which cannot hold token ids here; needed is one of "
            f"{_dtype_names()}{remedy}"
        )
    return found


def flat_extent(
    path: Path,
    what: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offset_bytes: int,
    data_bytes: int,
    format: str,
) -> Extent:
    """The extent that a header promises, checked: flat, of a token's dtype, of the size that is there."""
    if len(shape) != 1:
        raise ValueError(
            f"{path}: {what} has shape {shape}; tokens must be one flat axis. "
            f"Write it flat: array.reshape(-1)"
        )
    dtype = token_dtype(dtype, f"{path}: {what} is of dtype ", CONVERT_IT)
    extent = Extent(path, offset_bytes, dtype, shape[0], format)
    if extent.num_tokens == 0:
        raise ValueError(f"{path}: {what} has no tokens")
    if extent.nbytes != data_bytes:
        raise ValueError(
            f"{path}: the header promises {extent.nbytes:,} bytes of tokens, the file has {data_bytes:,}; "
            f"is the download or conversion complete? Fetch or write it again"
        )
    return extent


def _dtype_names() -> str:
    return ", ".join(dtype.name for dtype in TOKEN_DTYPES)
