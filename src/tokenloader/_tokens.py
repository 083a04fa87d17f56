"""TokenArray: one axis of token ids on the host, whatever holds the bytes.

It knows bytes and positions, not batches. How the bytes are held (mapped, in RAM, in how many files)
never changes what is returned. Every result is a fresh array that the caller owns. All methods may
be called from several threads at once, close() included.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from tokenloader._advice import page_ranges, start_reading
from tokenloader._formats import locate, token_dtype
from tokenloader._gather import Pieces
from tokenloader._hub import download, is_hub_address
from tokenloader._storage import map_read_only, read_into_ram

Residency = Literal["mmap", "ram"]
Source = str | os.PathLike[str]

_COPY_TOKENS = 4 << 20
_FINGERPRINT_BLOCKS = 64
_FINGERPRINT_TOKENS = 512  # a block; 64 blocks cold from an SSD are about 10 ms


def open_tokens(
    source: Source | Sequence[Source] | NDArray[Any],
    *,
    key: str = "tokens",
    dtype: DTypeLike | None = None,
    residency: Residency = "mmap",
) -> TokenArray:
    """Opens token ids that lie on disk or in memory, without moving them to any device.

    Args:
        source: a safetensors, .npy or headerless file; a sequence of files, which become one token
            axis in the order given; `hf://datasets/OWNER/NAME[@REVISION]/FILE`, which is fetched into
            the Hugging Face cache first; or a 1-D integer numpy array, which is not copied.
        key: the tensor's name, in safetensors files.
        dtype: of the tokens in headerless files, and only there: "uint8", "uint16", "uint32", "int32"
            or "int64", little-endian.
        residency: "mmap" maps the files: open at once, no RAM but the page cache. "ram" reads them
            into RAM first, with a progress bar when it takes more than a few seconds.

    Raises:
        OSError: a file is missing, a directory or unreadable; or the Hub cannot be reached and the
            file is not in its cache.
        ValueError: the contents are not tokens as described (each error says what was found, what
            was needed and what to do), or the arguments do not go together.
        TypeError: source is of another type.

    Example:
        >>> tokens = open_tokens(np.arange(1000, dtype=np.uint16))
        >>> tokens[10:13]
        array([10, 11, 12], dtype=uint16)
    """
    if residency not in get_args(Residency):
        raise ValueError(f'residency={residency!r}; it must be "mmap" or "ram"')
    if isinstance(source, np.ndarray):
        if dtype is not None:
            raise ValueError(
                f"dtype={dtype!r} was given with an array of {source.dtype}; dtype= is for headerless "
                f"files only, leave it out"
            )
        return _from_array(source)
    extents = [
        locate(_local_path(one), key=key, dtype=dtype) for one in _as_sequence_of_files(source)
    ]
    for extent in extents[1:]:
        if extent.dtype != extents[0].dtype:
            raise ValueError(
                f"{extent.path} holds {extent.dtype} tokens and {extents[0].path} {extents[0].dtype}; "
                f"the files of one token axis must have one dtype, so convert one of them"
            )
    name = str(extents[0].path) + (f" and {len(extents) - 1} more" if len(extents) > 1 else "")
    if residency == "ram":
        return TokenArray([read_into_ram(extents)], name=name, residency="ram")
    return TokenArray([map_read_only(extent) for extent in extents], name=name, residency="mmap")


class TokenArray:
    """One axis of token ids on the host. Made by `open_tokens`.

    Attributes:
        dtype: numpy dtype of a token.
        nbytes: bytes of all tokens.
        residency: "mmap" or "ram".
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],  # each [num_tokens of the piece], contiguous, of one dtype
        *,
        name: str,
        residency: Residency,
    ) -> None:
        pieces = Pieces(arrays)
        self.dtype: np.dtype[Any] = pieces.dtype
        self.residency: Residency = residency
        self._num_tokens = pieces.ends[-1]
        self.nbytes: int = self._num_tokens * self.dtype.itemsize
        self._name = name
        self._pieces: Pieces | None = pieces
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return self._num_tokens

    def __repr__(self) -> str:
        size = (
            f"{self.nbytes / 2**30:.2f} GiB" if self.nbytes >= 2**30 else f"{self.nbytes:,} bytes"
        )
        state = "closed" if self._pieces is None else self.residency
        return f"TokenArray({self._name}: {len(self):,} {self.dtype} tokens, {size}, {state})"

    def __getitem__(self, index: int | slice) -> Any:
        """`tokens[i]` is a numpy scalar, `tokens[a:b]` a numpy copy."""
        pieces = self._open_pieces()
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.gather(np.arange(start, stop, step), 1).reshape(-1)
            return self._copy(pieces, start, max(start, stop))
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"token {position} of {self!r}; there are tokens 0 to {len(self) - 1}")
        return self.gather([position % len(self)], 1)[0, 0]

    def gather(
        self, starts: ArrayLike, length: int, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Copies windows of equal length.

        Args:
            starts: int [n], the first token of each window.
            length: tokens in a window, 1 or more.
            out: [n, length] of the tokens' dtype, to write to; None makes a fresh array.

        Returns:
            [n, length], row i being tokens[starts[i] : starts[i] + length].

        Raises:
            IndexError: a window does not lie within the tokens.
            ValueError: starts, length or out is of the wrong shape or dtype; or the array is closed.
        """
        pieces = self._open_pieces()
        starts = self._checked_windows(starts, length)
        if out is None:
            return pieces.gather(starts, length)
        if out.shape != (len(starts), length) or out.dtype != self.dtype:
            raise ValueError(
                f"out is {out.dtype}{list(out.shape)}; needed is {self.dtype}{[len(starts), length]}"
            )
        out[...] = pieces.gather(starts, length)
        return out

    def will_need(self, starts: ArrayLike, length: int) -> None:
        """Starts reading windows from disk, and does not wait.

        A hint: a gather of them a little later finds them in the page cache. Does nothing for tokens
        in RAM.

        Args:
            starts: int [n], the first token of each window.
            length: tokens in a window, 1 or more.
        """
        pieces = self._open_pieces()
        if self.residency == "mmap":
            starts = self._checked_windows(starts, length)
            start_reading(page_ranges(*pieces.addresses(starts, length)))

    def fingerprint(self) -> str:
        """A name for the contents: "DTYPE:NUM_TOKENS:HASH", equal for equal tokens.

        It does not depend on residency or on how the tokens are split into files. The hash (BLAKE2b,
        64 bits) covers 64 blocks of 512 tokens spread evenly over the axis, the first and the last
        among them: milliseconds at any size, and a change between two blocks escapes it.
        """
        if self._fingerprint is None:
            length = min(_FINGERPRINT_TOKENS, len(self))
            starts = np.linspace(0, len(self) - length, _FINGERPRINT_BLOCKS).astype(np.int64)
            self.will_need(starts, length)
            digest = hashlib.blake2b(self.gather(starts, length).tobytes(), digest_size=8)
            self._fingerprint = f"{self.dtype}:{len(self)}:{digest.hexdigest()}"
        return self._fingerprint

    def close(self) -> None:
        """Lets go of the bytes. What another thread is gathering meanwhile still completes."""
        self._pieces = None

    def __enter__(self) -> Self:
        self._open_pieces()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _copy(self, pieces: Pieces, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), read from disk one stride ahead of the copying."""
        out = np.empty(stop - start, self.dtype)
        ahead = start
        for at in range(start, stop, _COPY_TOKENS):
            while ahead < min(at + 2 * _COPY_TOKENS, stop):
                if self.residency == "mmap":
                    one, length = np.array([ahead]), min(_COPY_TOKENS, stop - ahead)
                    start_reading(page_ranges(*pieces.addresses(one, length)))
                ahead += _COPY_TOKENS
            pieces.copy(at, out[at - start : at - start + _COPY_TOKENS])
        return out

    def _open_pieces(self) -> Pieces:
        if self._pieces is None:
            raise ValueError(f"{self!r}: it was closed; open the tokens again")
        return self._pieces

    def _checked_windows(self, starts: ArrayLike, length: int) -> NDArray[np.int64]:
        array = np.asarray(starts)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise ValueError(
                f"starts is {array.dtype}{list(array.shape)}; needed is a 1-D array of integers"
            )
        array = array.astype(np.int64, copy=False)
        if length < 1:
            raise ValueError(f"length={length}; a window has 1 token or more")
        if array.size:
            lowest, highest = int(array.min()), int(array.max())
            if lowest < 0 or highest + length > len(self):
                start = lowest if lowest < 0 else highest
                raise IndexError(
                    f"window [{start:,}, {start + length:,}) does not lie within {self!r}"
                )
        return array


def _from_array(array: NDArray[Any]) -> TokenArray:
    if array.ndim != 1:
        raise ValueError(
            f"the array has shape {array.shape}; tokens must be one flat axis: .reshape(-1)"
        )
    token_dtype(array.dtype, "the array is of dtype ")
    if not array.size:
        raise ValueError("the array is empty; tokens are needed")
    # As a plain ndarray, for indexing np.memmap is several times slower; contiguous, by a copy if need be.
    plain = np.ascontiguousarray(array).view(np.ndarray)
    return TokenArray([plain], name="array", residency="ram")


def _as_sequence_of_files(source: Source | Sequence[Source]) -> list[Source]:
    if isinstance(source, (str, os.PathLike)):
        return [source]
    needed = "needed is a path, a sequence of paths, an hf:// address, or a 1-D integer numpy array"
    if not isinstance(source, Sequence) or isinstance(source, (bytes, bytearray)):
        remedy = ": pass np.asarray(source)" if hasattr(source, "__array__") else ""
        raise TypeError(f"source is of type {type(source).__name__}; {needed}{remedy}")
    if not source:
        raise ValueError(f"source is an empty sequence; {needed}")
    for i, file in enumerate(source):
        if not isinstance(file, (str, os.PathLike)):
            raise TypeError(f"source[{i}] is of type {type(file).__name__}; {needed}")
    return list(source)


def _local_path(source: Source) -> Path:
    address = os.fspath(source)
    return download(address) if is_hub_address(address) else Path(address)
