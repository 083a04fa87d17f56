"""Token files: which bytes of a file are its tokens.

`locate` reads a file's header, checks it against the file's size, and returns an Extent; the tokens
themselves are not read. Formats:

- safetensors: u64 little-endian header length N, JSON header, data from byte 8 + N. Validated by
  the safetensors library; the header is then read once more for the offset, which the library
  does not tell. https://github.com/safetensors/safetensors#format
- NumPy .npy, versions 1 to 3. https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
- headerless: nothing but tokens, little-endian; the caller tells the dtype.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open

TOKEN_DTYPES = tuple(np.dtype(name) for name in ("uint8", "uint16", "uint32", "int32", "int64"))

_NPY_MAGIC = b"\x93NUMPY"
_SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("uint8"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


class _NotSafetensorsError(ValueError):
    """The bytes are not what the header format demands."""


@dataclass(frozen=True)
class Extent:
    """Tokens that lie end to end in one file.

    Args:
        path: the file.
        offset_bytes: of the first token; need not be aligned (safetensors data may start anywhere).
        dtype: of a token, one of TOKEN_DTYPES.
        num_tokens: 1 or more.
    """

    path: Path
    offset_bytes: int
    dtype: np.dtype[Any]
    num_tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of tokens, without the header."""
        return self.num_tokens * self.dtype.itemsize


def locate(path: Path, *, key: str, dtype: DTypeLike | None) -> Extent:
    """Finds the tokens of one file.

    Args:
        path: a safetensors, .npy or headerless file.
        key: the tensor, in a safetensors file.
        dtype: of a headerless file; must be None for the others, whose header tells.

    Raises:
        OSError: the file is missing, a directory, or cannot be read.
        ValueError: it is empty, corrupt, of the wrong size, has no such key, or holds no 1-D array of
            one of TOKEN_DTYPES; or dtype is missing, or given for a file that has a header.
    """
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a directory; pass the token file in it, or a list of its files in order"
        )
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: no such file (looked in {path.parent.absolute()})"
        ) from None
    with file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise ValueError(
                f"{path}: the file is empty; was the download or conversion completed?"
            )
        head = file.read(9)
        header_dtype = None if dtype is None else token_dtype(dtype, f"{path}: dtype=")
        if head.startswith(_NPY_MAGIC):
            extent = _locate_npy(path, file, size_bytes)
        elif _looks_like_safetensors(path, head, size_bytes):
            try:
                extent = _locate_safetensors(path, file, size_bytes, key)
            except _NotSafetensorsError:
                if header_dtype is None or path.suffix == ".safetensors":
                    raise
                return _locate_headerless(path, size_bytes, header_dtype)
        elif header_dtype is None:
            _unknown_format(path, head)
        else:
            return _locate_headerless(path, size_bytes, header_dtype)
    if header_dtype is not None:
        raise ValueError(
            f"{path}: dtype={header_dtype} was given, but the file has a header, which says "
            f"{extent.dtype}; dtype= is for headerless files only, leave it out"
        )
    return extent


def token_dtype(dtype: DTypeLike, where: str) -> np.dtype[Any]:
    """The dtype, in native byte order, if tokens may have it; else ValueError, beginning with where."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{where}{dtype!r} is not a dtype; use one of {_dtype_names()}") from None
    if found not in TOKEN_DTYPES:
        order = " in big-endian byte order" if found.newbyteorder("=") in TOKEN_DTYPES else ""
        raise ValueError(
            f"{where}{found.name}{order} cannot hold token ids here; needed is one of "
            f"{_dtype_names()}, so convert with .astype(...) first"
        )
    return found


def _dtype_names() -> str:
    return ", ".join(dtype.name for dtype in TOKEN_DTYPES)


def _unknown_format(path: Path, head: bytes) -> NoReturn:
    if path.suffix == ".npy":
        raise ValueError(
            f"{path}: begins with {head[:6]!r} and not with {_NPY_MAGIC!r}, so it is no NumPy file; "
            f"it is corrupt, or it is headerless (some tools name raw tokens .npy): then pass dtype="
        )
    raise ValueError(
        f"{path}: begins with {head.hex(' ')}, which is neither a safetensors nor an .npy header; if it "
        f'is headerless (nothing but tokens), say what a token is: open_tokens(..., dtype="uint16")'
    )


def _locate_headerless(path: Path, size_bytes: int, dtype: np.dtype[Any]) -> Extent:
    if size_bytes % dtype.itemsize:
        raise ValueError(
            f"{path}: {size_bytes} bytes is not a whole number of {dtype} tokens "
            f"({dtype.itemsize} bytes each); is it truncated, or is dtype= wrong?"
        )
    return Extent(path, 0, dtype, size_bytes // dtype.itemsize)


def _locate_npy(path: Path, file: BinaryIO, size_bytes: int) -> Extent:
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version in (
            (2, 0),
            (3, 0),
        ):  # 3.0 is 2.0 with UTF-8 field names; tokens have no fields
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"format version {version}; known are 1.0, 2.0 and 3.0")
    except Exception as error:
        raise ValueError(
            f"{path}: corrupt .npy header ({error}); fetch or write it again"
        ) from error
    return _checked(path, "the array", dtype, shape, file.tell(), size_bytes - file.tell())


def _looks_like_safetensors(path: Path, head: bytes, size_bytes: int) -> bool:
    """By its bytes; by its name only to say of a damaged one that it is damaged."""
    header_bytes = int.from_bytes(head[:8], "little")
    return path.suffix == ".safetensors" or (
        len(head) == 9 and head[8:] == b"{" and 2 <= header_bytes <= size_bytes - 8
    )


def _locate_safetensors(path: Path, file: BinaryIO, size_bytes: int, key: str) -> Extent:
    try:
        with safe_open(path, framework="numpy"):
            pass  # opening validates: header, offsets without holes or overlaps, exact file size
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes), object_pairs_hook=_dict_of_unique_keys)
    except (SafetensorError, ValueError) as error:
        raise _NotSafetensorsError(
            f"{path}: not a valid safetensors file of {size_bytes:,} bytes ({error}); "
            f"is the download complete? Fetch or write it again"
        ) from error
    header.pop("__metadata__", None)
    if key not in header:
        there = ", ".join(f"{name} ({t['dtype']}{t['shape']})" for name, t in header.items())
        raise ValueError(f"{path}: no tensor {key!r}; there are: {there or 'none'}. Pass key=")
    tensor = header[key]
    begin, end = tensor["data_offsets"]
    dtype = _SAFETENSORS_DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise ValueError(
            f"{path}: tensor {key!r} is of dtype {tensor['dtype']}, which cannot hold token ids here; "
            f"needed is one of {', '.join(_SAFETENSORS_DTYPES)}. Is key= right?"
        )
    return _checked(
        path,
        f"tensor {key!r}",
        dtype,
        tuple(tensor["shape"]),
        8 + header_bytes + begin,
        end - begin,
    )


def _dict_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):  # the library keeps one of them and does not say which
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the header has {', '.join(map(repr, twice))} more than once")
    return result


def _checked(
    path: Path,
    what: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offset_bytes: int,
    data_bytes: int,
) -> Extent:
    if len(shape) != 1:
        raise ValueError(
            f"{path}: {what} has shape {shape}; tokens must be one flat axis. "
            f"Write it flat: array.reshape(-1)"
        )
    dtype = token_dtype(dtype, f"{path}: {what} is of dtype ")
    extent = Extent(path, offset_bytes, dtype, shape[0])
    if extent.num_tokens == 0:
        raise ValueError(f"{path}: {what} has no tokens")
    if extent.nbytes != data_bytes:
        raise ValueError(
            f"{path}: the header promises {extent.nbytes:,} bytes of tokens, the file has {data_bytes:,}; "
            f"is the download or conversion complete? Fetch or write it again"
        )
    return extent
