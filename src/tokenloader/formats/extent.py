"""Extents: where in a file tokens lie end to end, and which dtypes tokens may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from tokenloader.formats.identity import FileIdentity
from tokenloader.formats.quoting import shown

if TYPE_CHECKING:
    from tokenloader.formats.format import Format

TOKEN_DTYPES = tuple(np.dtype(name) for name in ("uint8", "uint16", "uint32", "int32", "int64"))
DTYPE_NAMES = ", ".join(dtype.name for dtype in TOKEN_DTYPES)
CONVERT_IT = ", so convert with .astype(...) first"  # a remedy for data of another dtype


@dataclass(frozen=True)
class Extent:
    """Tokens that lie end to end in one file."""

    path: Path
    offset_bytes: int  # before the first token; any number (safetensors data may start anywhere)
    dtype: np.dtype[Any]  # numpy dtype of one token, one of TOKEN_DTYPES
    num_tokens: int  # 0 if the format itself says so, of a file that has none
    format: Format
    index_path: Path | None = None  # the file beside it that says where documents end, if there is one
    # The identity of the file when its header was read; None: not known. Equal extents may differ in it.
    identity: FileIdentity | None = field(default=None, compare=False)
    index_identity: FileIdentity | None = field(default=None, compare=False)  # of the file at index_path

    @property
    def nbytes(self) -> int:
        """Bytes of tokens, without the header."""
        return self.num_tokens * self.dtype.itemsize


def token_dtype(dtype: DTypeLike, where: str, remedy: str = "") -> np.dtype[Any]:
    """Returns a dtype of tokens in native byte order; else ValueError, which begins with `where`."""
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
    path: Path, what: str, dtype: DTypeLike, shape: tuple[int, ...], data: range, format: Format
) -> Extent:
    """Checks what a header promises: one flat axis of a token dtype that takes all bytes of `data`."""
    if len(shape) != 1:
        raise ValueError(
            f"{path}: {what} has shape {shown(shape)}; expected one flat axis: array.reshape(-1)"
        )
    found = token_dtype(dtype, f"{path}: {what} is of dtype ", CONVERT_IT)
    extent = Extent(path, data.start, found, shape[0], format)
    if extent.nbytes != len(data):
        promised = f"{extent.nbytes:,}" if extent.nbytes < 2**64 else "2**64 or more"
        raise ValueError(
            f"{path}: the header promises {promised} bytes of tokens, the file has {len(data):,}; "
            f"is the download or conversion complete? Fetch or write it again"
        )
    return extent
