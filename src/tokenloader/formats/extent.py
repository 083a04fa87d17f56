"""Extents: where in a file tokens lie end to end, and which dtypes tokens may have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

if TYPE_CHECKING:
    from tokenloader.formats.format import Format

TOKEN_DTYPES = tuple(np.dtype(name) for name in ("uint8", "uint16", "uint32", "int32", "int64"))
DTYPE_NAMES = ", ".join(dtype.name for dtype in TOKEN_DTYPES)

CONVERT_IT = ", so convert with .astype(...) first"  # a remedy for data of another dtype


@dataclass(frozen=True)
class Extent:
    """Tokens that lie end to end in one file.

    Args:
        path: the file.
        offset_bytes: bytes before the first token; any number (safetensors data may start anywhere).
        dtype: numpy dtype of one token, one of TOKEN_DTYPES.
        num_tokens: number of tokens, 1 or more.
        format: the format of the file.
        index_path: the file beside it that says where documents end, if there is one.
    """

    path: Path
    offset_bytes: int
    dtype: np.dtype[Any]
    num_tokens: int
    format: Format
    index_path: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tokens, without the header."""
        return self.num_tokens * self.dtype.itemsize


def token_dtype(dtype: DTypeLike, where: str, remedy: str = "") -> np.dtype[Any]:
    """Returns the dtype, in native byte order, if tokens may have it.

    Raises:
        ValueError: tokens may not; the message begins with `where` and ends with `remedy`.
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{where}{dtype!r} is not a dtype; use one of {DTYPE_NAMES}") from None
    if found not in TOKEN_DTYPES:
        order = " in big-endian byte order" if found.newbyteorder("=") in TOKEN_DTYPES else ""
        raise ValueError(
            f"{where}{found.name}{order}, which cannot hold token ids here; expected one of "
            f"{DTYPE_NAMES}{remedy}"
        )
    return found


def flat_extent(
    path: Path,
    what: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offset_bytes: int,
    data_bytes: int,
    format: Format,
) -> Extent:
    """Checks what a header promises: one flat axis, a token dtype, and as many bytes as there are."""
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
