"""Writing: any number of integer arrays, one after the other, into one token file.

A file is written under a temporary name beside it, flushed to the disk, and renamed when it is complete: a
failure on the way, Ctrl-C included, leaves nothing behind, and a file that was there before untouched.

A header tells the number of tokens, which is known last. So room for it is left free and filled at the end:
the formats allow a header to be padded (safetensors with spaces, .npy likewise) or fix its length (llm.c).
"""

import io
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenloader.formats import safetensors
from tokenloader.formats.extent import token_dtype
from tokenloader.formats.format import Writer
from tokenloader.tokens.token_array import TokenArray

WRITE_CHUNK_TOKENS = 1 << 20  # converted and written at a time


def write_tokens(
    path: str | os.PathLike[str],
    arrays: Iterable[NDArray[Any]] | NDArray[Any] | TokenArray,
    dtype: DTypeLike = "uint16",
) -> int:
    """Writes token ids to a safetensors file, as its 1-D tensor "tokens", and returns how many.

    Takes constant memory.

    Args:
        path: the file, which appears when it is complete. One that exists is replaced then, and stays
            as it was if anything fails.
        arrays: 1-D arrays of integers of any dtype, one after the other: any iterable of them, also a
            generator that makes them on the way. Or one such array, or an open TokenArray.
        dtype: numpy dtype of one token in the file: "uint8", "uint16", "uint32", "int32" or "int64".

    Raises:
        ValueError: an id does not fit the dtype (the message says which, and where), something is no
            1-D array of integers, or there are no tokens at all.
        TypeError: arrays is not iterable.
        OSError: the file cannot be written, or path is no place for a file.

    Example:
        >>> documents = (np.array(ids) for ids in ([464, 2068, 50256], [7586, 50256]))
        >>> write_tokens("fox.safetensors", documents)  # doctest: +SKIP
        5
    """
    return write_file(Path(path), blocks(arrays), token_dtype(dtype, "dtype="), safetensors.WRITER)


write_tokens.__module__ = "tokenloader"  # where users find it


def write_file(path: Path, arrays: Iterable[NDArray[Any]], dtype: np.dtype[Any], writer: Writer) -> int:
    """Writes 1-D arrays of integers to a file of the writer's format; returns the number of tokens.

    Raises: as `write_tokens`; and ValueError if the format cannot hold the dtype or so many tokens.
    """
    num_tokens = 0
    with atomic_file(path) as file:
        file.write(bytes(len(writer.header(dtype, 0))))
        for array in arrays:
            ids = _fitted(array, dtype, num_tokens)
            num_tokens += len(ids)
            writer.header(dtype, num_tokens)  # raises if a file cannot hold so many
            write_all(file, ids)
        if not num_tokens:
            raise ValueError(f"{path}: there are no tokens to write; expected 1 or more")
        file.seek(0)
        file.write(writer.header(dtype, num_tokens))
    return num_tokens


def blocks(arrays: Iterable[Any] | NDArray[Any] | TokenArray) -> Iterator[NDArray[Any]]:
    """Yields the tokens of `arrays`, as `write_tokens` takes them, WRITE_CHUNK_TOKENS at most at a time."""
    if isinstance(arrays, (np.ndarray, TokenArray)):
        arrays = [arrays]
    elif isinstance(arrays, (str, bytes, dict, set, frozenset)) or not isinstance(arrays, Iterable):
        kind = type(arrays).__name__
        raise TypeError(f"arrays is of type {kind}; expected 1-D arrays of integers: an iterable, or one")
    for i, array in enumerate(arrays):
        whole = array if isinstance(array, TokenArray) else _as_integers(array, i)
        for at in range(0, len(whole), WRITE_CHUNK_TOKENS):
            yield whole[at : at + WRITE_CHUNK_TOKENS]


def _as_integers(array: Any, i: int) -> NDArray[Any]:
    try:
        found = np.asarray(array)
    except ValueError as error:  # nested lists of several lengths
        raise ValueError(f"arrays[{i}] is no array ({error}); expected a 1-D array of integers") from None
    what, remedy = f"{found.dtype}{list(found.shape)}", ""
    if found.ndim == 0 and found.dtype.kind in "iu":
        what = f"the single id {found}"
        remedy = ": if arrays are the ids themselves, pass np.array(ids)"
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        raise ValueError(f"arrays[{i}] is {what}; expected a 1-D array of integers{remedy}")
    return found if found.size else np.empty(0, np.uint16)  # an empty list is of floats for numpy


def _fitted(ids: NDArray[Any], dtype: np.dtype[Any], position: int) -> NDArray[Any]:
    """Converts ids to a dtype. ValueError where one does not fit; position is that of the first id."""
    if ids.dtype == dtype:
        return np.ascontiguousarray(ids)
    limits = np.iinfo(dtype)
    if ids.size and (int(ids.min()) < limits.min or int(ids.max()) > limits.max):
        # Compared as Python's integers would be: numpy compares any two integer dtypes exactly.
        first = int(((ids < limits.min) | (ids > limits.max)).argmax())
        raise ValueError(
            f"token {position + first:,} is {int(ids[first])}, which {dtype} cannot hold (it holds "
            f"{limits.min} to {limits.max}); use a wider dtype, or see where the id comes from"
        )
    return ids.astype(dtype)


def check_place(path: Path) -> None:
    """Raises OSError if a directory, a pipe or a device is at path."""
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise OSError(f"{path} is {kind}; tokens are written to a file, whose header comes last")


@contextmanager
def atomic_file(path: Path) -> Iterator[io.FileIO]:
    """Opens a file to write, which is named `path` once the with block ends, and is removed if it fails."""
    check_place(path)
    path = Path(os.path.realpath(path))  # through links: a link's target is replaced, not the link
    temporary = path.parent / f".tokenloader-{secrets.token_hex(8)}.tmp"
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: its directory {path.parent} does not exist; make it first")
    try:
        with open(temporary, "xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # so that the new name outlasts a power failure, where the file system can
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_all(file: io.FileIO, ids: NDArray[Any]) -> None:
    """Writes all ids; one call of write may take fewer bytes than it is given."""
    left = memoryview(ids.view(np.uint8))  # type: ignore[arg-type] # it is a buffer
    while left:
        left = left[file.write(left) :]
