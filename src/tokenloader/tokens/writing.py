"""Writing: any number of integer arrays, one after the other, into one token file.

A file is written under a hidden temporary name beside it, flushed to the disk, and named when it is
complete: a failure on the way, Ctrl-C included, leaves nothing behind, and a file that was there before
untouched. The temporary file of a process that was killed stays, and its lock is free: the next writer of
the same file removes it.

A header tells the number of tokens, which is known last. So room for it is left free and filled at the end:
the formats allow a header to be padded (safetensors with spaces, .npy likewise) or fix its length (llm.c).
"""

import fcntl
import hashlib
import io
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
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
            as it was if anything fails. What a killed writer of the same file left is removed.
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
    dtype = token_dtype(dtype, "dtype=")
    return write_file(Path(path), blocks(arrays), dtype, safetensors.WRITER, replace=True)


write_tokens.__module__ = "tokenloader"  # where users find it


def write_file(
    path: Path, arrays: Iterable[NDArray[Any]], dtype: np.dtype[Any], writer: Writer, *, replace: bool
) -> int:
    """Writes 1-D arrays of integers to a file of the writer's format; returns the number of tokens.

    Raises: as `write_tokens`; ValueError if the format cannot hold the dtype or so many tokens; and
        FileExistsError if replace is False and the file exists, or another process is writing it.
    """
    num_tokens = 0
    with atomic_file(path, replace=replace) as write:
        for array in arrays:
            ids = _fitted(array, dtype, num_tokens)
            at = len(writer.header(dtype, 0)) + num_tokens * dtype.itemsize
            num_tokens += len(ids)
            writer.header(dtype, num_tokens)  # raises if a file cannot hold so many
            write(memoryview(ids.view(np.uint8)), at)  # type: ignore[arg-type] # it is a buffer
        if not num_tokens:
            raise ValueError(f"{path}: there are no tokens to write; expected 1 or more")
        write(writer.header(dtype, num_tokens), 0)
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
def atomic_file(path: Path, *, replace: bool) -> Iterator[Callable[[bytes | memoryview, int], None]]:
    """Opens a file to write, which is named `path` once the with block ends, and is removed if it fails.

    Yields a function that writes all of its data at an offset in bytes. Raises FileExistsError if replace
    is False and a file is there by then, or one is being written.
    """
    check_place(path)
    target = Path(os.path.realpath(path))  # through links: a link's target is replaced, not the link
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: its directory {target.parent} does not exist; make it first")
    prefix = f".tokenloader-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"
    _remove_abandoned(path, target.parent.glob(f"{prefix}*.tmp"), replace=replace)
    temporary = target.with_name(f"{prefix}{secrets.token_hex(8)}.tmp")
    try:
        with _errors_naming(path):
            file = _open_locked(temporary)
        with file:
            yield partial(write_all, file.fileno(), path)
            with _errors_naming(path):
                os.fsync(file.fileno())
                _publish(temporary, target, path, replace=replace)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # so that the new name outlasts a power failure, where the file system can
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _remove_abandoned(path: Path, temporaries: Iterable[Path], *, replace: bool) -> None:
    """Removes temporary files of writers of path that are gone; a lock says which are still at work."""
    for temporary in temporaries:
        try:
            with temporary.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()
        except BlockingIOError:
            if not replace:
                raise FileExistsError(
                    f"{path} is being written by another process (into {temporary}); wait for it, or "
                    f"--force writes it too, and the file is that of the last to finish"
                ) from None
        except OSError:  # gone meanwhile, another user's, or on a file system without locks
            continue


def _open_locked(temporary: Path) -> io.FileIO:
    """Makes a file that another process does not take for abandoned, where the file system has locks."""
    while True:
        file = io.FileIO(temporary, "x")
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():
            return file
        file.close()  # another process removed it before it was locked


def _publish(temporary: Path, target: Path, path: Path, *, replace: bool) -> None:
    """Names a complete file; one that has the name is replaced, or FileExistsError says it of path."""
    if replace:
        os.replace(temporary, target)
        return
    try:
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: an empty file holds the name for a moment
            target.open("xb").close()
        else:
            temporary.unlink()
            return
    except FileExistsError:
        raise FileExistsError(
            f"{path} exists by now, and stays as it is; write to another file, or --force replaces it"
        ) from None
    try:
        os.replace(temporary, target)
    except BaseException:
        target.unlink()
        raise


@contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Has errors of the system name the file being written, not the temporary one, and not none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # no error of the system
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_all(descriptor: int, path: Path, data: bytes | memoryview, at: int) -> None:
    """Writes all of the data, from an offset on, to the file that is to be named path."""
    left = memoryview(data)
    with _errors_naming(path):
        while left:  # one call may take fewer bytes than it is given
            left = left[os.pwrite(descriptor, left, at + len(data) - len(left)) :]
