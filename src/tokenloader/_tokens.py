"""TokenArray: one axis of token ids on the host, whatever holds the bytes.

It knows bytes and positions, not batches. How the bytes are held (mapped, in RAM, in how many files)
never changes what is returned. Every result is a fresh array that the caller owns. All methods may
be called from several threads at once, close() included.
"""

from __future__ import annotations

import errno
import hashlib
import operator
import os
import weakref
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from tokenloader._advice import (
    PAGE,
    FaultError,
    Ranges,
    fault_in,
    is_cached,
    page_ranges,
    start_reading,
)
from tokenloader._formats import Extent, locate, token_dtype
from tokenloader._gather import Pieces
from tokenloader._hub import download, is_hub_address
from tokenloader._storage import RamFill, check_it_fits, map_read_only, open_file

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
            the Hugging Face cache first; or a 1-D integer numpy array, which is copied only if it is not
            contiguous, and whose residency is "ram" whatever is asked for.
        key: the tensor's name, in safetensors files.
        dtype: of the tokens in headerless files, and only there: "uint8", "uint16", "uint32", "int32"
            or "int64", little-endian.
        residency: "mmap" maps the files: open at once, no RAM but the page cache. "ram" also opens at
            once, and reads the files into RAM in the background, with a progress bar when that takes
            more than a few seconds; until all is there, windows come from the mapped files.

    Raises:
        OSError: a file is missing, a directory or unreadable; or the Hub cannot be reached and the
            file is not in its cache.
        MemoryError: residency is "ram" and the data is larger than the memory available.
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
    if residency == "ram":
        check_it_fits(extents)
    # One opening serves the mapping and the reading into RAM: meanwhile a path may name another file.
    files = (
        [open_file(extent) for extent in extents] if residency == "ram" else [None] * len(extents)
    )
    arrays = [map_read_only(extent, file) for extent, file in zip(extents, files, strict=True)]
    name = str(extents[0].path) + (f" and {len(extents) - 1} more" if len(extents) > 1 else "")
    tokens = TokenArray(arrays, name=name, residency=residency, extents=extents)
    if residency == "ram":
        tokens._fill_ram([file for file in files if file])
    return tokens


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
        extents: Sequence[Extent] = (),  # that the arrays are mapped from, if they are
    ) -> None:
        pieces = Pieces(arrays)
        self.dtype: np.dtype[Any] = pieces.dtype
        self.residency: Residency = residency
        self._num_tokens = pieces.ends[-1]
        self.nbytes: int = self._num_tokens * self.dtype.itemsize
        self._name = name
        self._extents = extents
        self._held: _Held | None = _Held(pieces, mapped=bool(extents))
        self._closed = False
        self._fingerprint: str | None = None
        self._fill: RamFill | None = None

    def __len__(self) -> int:
        return self._num_tokens

    def __repr__(self) -> str:
        size = (
            f"{self.nbytes / 2**30:.2f} GiB" if self.nbytes >= 2**30 else f"{self.nbytes:,} bytes"
        )
        state = "closed" if self._closed else self.residency
        return f"TokenArray({self._name}: {len(self):,} {self.dtype} tokens, {size}, {state})"

    def __getitem__(self, index: int | slice) -> Any:
        """`tokens[i]` is a numpy scalar, `tokens[a:b]` a numpy copy."""
        held = self._hold()
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.gather(np.arange(start, stop, step), 1).reshape(-1)
            return self._copy(held, start, max(start, stop))
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
            OSError: a file was truncated, or its disk fails.
        """
        held, length = self._hold(), operator.index(length)
        starts = self._checked_windows(starts, length)
        if held.mapped:
            self._fault_in(held.pieces, starts, length)
        if out is None:
            return held.pieces.gather(starts, length)
        if out.shape != (len(starts), length) or out.dtype != self.dtype:
            raise ValueError(
                f"out is {out.dtype}{list(out.shape)}; needed is {self.dtype}{[len(starts), length]}"
            )
        out[...] = held.pieces.gather(starts, length)
        return out

    def will_need(self, starts: ArrayLike, length: int) -> None:
        """Starts reading windows from disk, and does not wait.

        A hint: a gather of them a little later finds them in the page cache. Does nothing for tokens
        in RAM.

        Args:
            starts: int [n], the first token of each window.
            length: tokens in a window, 1 or more.
        """
        held, length = self._hold(), operator.index(length)
        if held.mapped:
            starts = self._checked_windows(starts, length)
            start_reading(_pages(held.pieces, starts, length))

    def is_cached(self, start: int) -> bool:
        """Whether a token is in memory: in RAM, or in the page cache. A hint, in 2 us."""
        held = self._hold()
        if not held.mapped:
            return True
        begins, _ = held.pieces.addresses(self._checked_windows([start], 1), 1)
        return is_cached(int(begins[0]))

    def wait_until_loaded(self) -> None:
        """Waits until all tokens are in RAM, for residency "ram"; else returns at once.

        Raises:
            OSError: a file cannot be read, or ends before its tokens do.
        """
        if self._fill is not None:
            self._fill.wait()
        self._hold()

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
        self._closed = True
        self._held = None
        if self._fill is not None:
            self._fill.stop()

    def __enter__(self) -> Self:
        self._hold()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied or pickled; open the tokens again where needed")

    def _fill_ram(self, files: Sequence[FileIO]) -> None:
        # The fill's threads must not keep tokens that everybody else has let go of.
        self_if_alive = weakref.ref(self)
        self._fill = RamFill(
            self._extents, files, lambda tokens: _hold_in_ram(self_if_alive, tokens)
        )
        weakref.finalize(self, self._fill.stop)

    def _copy(self, held: _Held, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), read from disk one stride ahead of the copying."""
        out = np.empty(stop - start, self.dtype)
        for at in range(start, stop, _COPY_TOKENS):
            part = out[at - start : at - start + _COPY_TOKENS]
            if held.mapped:
                start_reading(_pages(held.pieces, [at], min(2 * _COPY_TOKENS, stop - at)))
                self._fault_in(held.pieces, [at], len(part))
            held.pieces.copy(at, part)
        return out

    def _hold(self) -> _Held:
        """The bytes, for as long as the caller keeps what this returns."""
        held = self._held
        if held is None:
            raise ValueError(f"{self!r}: it was closed; open the tokens again")
        if self._fill is not None and self._fill.error is not None:
            raise self._fill.error
        return held

    def _fault_in(self, pieces: Pieces, starts: ArrayLike, length: int) -> None:
        """Makes windows readable: where a file has lost them, touching them would kill the process."""
        try:
            if fault_in(_pages(pieces, starts, length)):
                return
        except FaultError as error:
            piece, first = pieces.piece_at(error.address, PAGE)
            extent = self._extents[piece]
            offset = max(extent.offset_bytes, extent.offset_bytes + error.address - first)
            raise _lost(extent, offset, error) from error
        # The system cannot tell: see whether the files still have their size. What they lose between
        # this and the copying still kills the process there.
        for extent in {
            self._extents[piece]
            for start in np.asarray(starts).tolist()
            for piece, _, _ in pieces.parts(start, length)
        }:
            if extent.path.stat().st_size < extent.offset_bytes + extent.nbytes:
                raise _lost(extent, extent.path.stat().st_size)

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


def _pages(pieces: Pieces, starts: ArrayLike, length: int) -> Ranges:
    return page_ranges(*pieces.addresses(np.asarray(starts, np.int64), length))


class _Held(NamedTuple):
    """The bytes, whose exchange for others (mapped for RAM) is one assignment."""

    pieces: Pieces
    mapped: bool


def _hold_in_ram(tokens: weakref.ref[TokenArray], array: NDArray[Any]) -> None:
    alive = tokens()
    if alive is not None and alive._held is not None:
        alive._held = _Held(Pieces([array]), mapped=False)
        if alive._closed:  # meanwhile
            alive._held = None


def _lost(extent: Extent, offset_bytes: int, error: OSError | None = None) -> OSError:
    size_bytes = extent.path.stat().st_size if extent.path.exists() else 0
    return OSError(
        errno.EIO,
        f"cannot be read at byte {offset_bytes:,}: it has {size_bytes:,} bytes now and had "
        f"{extent.offset_bytes + extent.nbytes:,} when it was opened; was it truncated or overwritten, "
        f"or does its disk fail{f' ({error})' if error else ''}?",
        str(extent.path),
    )


def _from_array(array: NDArray[Any]) -> TokenArray:
    if array.ndim != 1:
        raise ValueError(
            f"the array has shape {array.shape}; tokens must be one flat axis: .reshape(-1)"
        )
    token_dtype(array.dtype, "the array is of dtype ")
    if not array.size:
        raise ValueError("the array is empty; tokens are needed")
    # As a plain ndarray, because indexing an np.memmap is several times slower.
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
