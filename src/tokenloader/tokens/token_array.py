"""TokenArray: one axis of token ids on the host, whatever holds the bytes.

It knows bytes and positions, not batches. How the bytes are held (mapped, in RAM, in how many files)
never changes what is returned. Every result is a fresh array that the caller owns. All methods may
be called from several threads at once, close() included.
"""

from __future__ import annotations

import errno
import hashlib
import operator
import weakref
from collections.abc import Sequence
from io import FileIO
from typing import Any, Literal, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.formats.extent import Extent
from tokenloader.formats.format import read_document_boundaries
from tokenloader.storage.kernel_advice import (
    PAGE,
    FaultError,
    Ranges,
    fault_in,
    is_cached,
    page_ranges,
    start_reading,
)
from tokenloader.storage.ram import RamFill
from tokenloader.tokens.gather import Pieces

Residency = Literal["mmap", "ram"]

_COPY_TOKENS = 4 << 20
_FINGERPRINT_BLOCKS = 64
_FINGERPRINT_TOKENS = 512  # a block; 64 blocks cold from an SSD are about 10 ms


class TokenArray:
    """One axis of token ids on the host. Made by `open_tokens`.

    Attributes:
        dtype: numpy dtype of a token.
        nbytes: bytes of all tokens.
        residency: "mmap" if any of the tokens are read from mapped files, else "ram".

    Example:
        >>> with tl.open_tokens(np.arange(100, dtype=np.uint16)) as tokens:
        ...     tokens.gather([0, 50], 3)
        array([[ 0,  1,  2],
               [50, 51, 52]], dtype=uint16)
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],  # each [num_tokens of the piece], contiguous, of one dtype
        *,
        name: str,
        residency: Residency,
        extents: Sequence[Extent | None] = (),  # of each array, None if it is in RAM; () if all are
        indexed: Sequence[Extent] = (),  # with a document index each, over the whole axis
    ) -> None:
        pieces = Pieces(arrays)
        self.dtype: np.dtype[Any] = pieces.dtype
        self.residency: Residency = residency
        self._num_tokens = pieces.ends[-1]
        self.nbytes: int = self._num_tokens * self.dtype.itemsize
        self._name = name
        self._indexed = indexed
        self._held: _Held | None = _Held(pieces, extents or [None] * len(arrays), any(extents))
        self._closed = False
        self._fingerprint: str | None = None
        self._documents: NDArray[np.int64] | None = None
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

    @property
    def documents(self) -> NDArray[np.int64] | None:
        """Where documents begin and end, by the document index of the files.

        int64 [num_documents + 1], in tokens: 0, ..., len(self). Document i is
        tokens[documents[i] : documents[i + 1]], the end-of-text token included if there is one; it may be
        empty. Where files are joined a document ends. None if a part of the tokens has no index: of
        Megatron-LM and datatrove files, most have.

        Read when first asked for, 8 bytes a document, and kept; it may not be written to.

        Raises:
            OSError: an index cannot be read.
            ValueError: an index does not fit its tokens; or the array is closed.
        """
        self._hold()
        if self._documents is None and self._indexed:
            boundaries = [np.zeros(1, np.int64)]
            for extent in self._indexed:
                boundaries.append(boundaries[-1][-1] + read_document_boundaries(extent)[1:])
            documents = np.concatenate(boundaries)
            documents.flags.writeable = False
            self._documents = documents
        return self._documents

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
            _fault_in(held, starts, length)
        if out is None:
            return held.pieces.gather(starts, length)
        if out.shape != (len(starts), length) or out.dtype != self.dtype:
            raise ValueError(
                f"out is {out.dtype}{list(out.shape)}; needed is {self.dtype}{[len(starts), length]}"
            )
        out[...] = held.pieces.gather(starts, length)
        return out

    def prefetch(self, starts: ArrayLike, length: int) -> None:
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

    def locate(self, starts, length):  # type: ignore
        """Shim for the tokens branch."""
        from tokenloader.tokens.located_windows import LocatedWindows

        return LocatedWindows(self, starts, length)

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
            self.prefetch(starts, length)
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

    def _fill_ram(self, at: Sequence[int], files: Sequence[FileIO]) -> None:
        """Exchanges the pieces numbered `at`, mapped from files, for RAM in the background."""
        assert self._held is not None
        extents = [extent for i in at if (extent := self._held.extents[i])]
        # The fill's threads must not keep tokens that everybody else has let go of.
        self_if_alive = weakref.ref(self)
        self._fill = RamFill(extents, files, lambda tokens: _hold_in_ram(self_if_alive, at, tokens))
        weakref.finalize(self, self._fill.stop)

    def _copy(self, held: _Held, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), read from disk one stride ahead of the copying."""
        out = np.empty(stop - start, self.dtype)
        for at in range(start, stop, _COPY_TOKENS):
            part = out[at - start : at - start + _COPY_TOKENS]
            if held.mapped:
                start_reading(_pages(held.pieces, [at], min(2 * _COPY_TOKENS, stop - at)))
                _fault_in(held, [at], len(part))
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
    extents: Sequence[Extent | None]  # of each piece: where it is mapped from; None if it is in RAM
    mapped: bool  # any of them


def _hold_in_ram(tokens: weakref.ref[TokenArray], at: Sequence[int], array: NDArray[Any]) -> None:
    alive = tokens()
    held = alive._held if alive is not None else None
    if alive is None or held is None:
        return
    arrays, extents = list(held.pieces.arrays), list(held.extents)
    if len(at) == len(arrays):
        arrays, extents = [array], [None]
    else:
        ends = np.cumsum([len(arrays[i]) for i in at])
        for i, part in zip(at, np.split(array, ends[:-1]), strict=True):
            arrays[i], extents[i] = part, None
    alive._held = _Held(Pieces(arrays), extents, any(extents))
    if alive._closed:  # meanwhile
        alive._held = None


def _fault_in(held: _Held, starts: ArrayLike, length: int) -> None:
    """Makes windows readable: where a file has lost them, touching them would kill the process."""
    try:
        if fault_in(_pages(held.pieces, starts, length)):
            return
    except FaultError as error:
        piece, first = held.pieces.piece_at(error.address, PAGE)
        extent = held.extents[piece]
        if extent is None:
            raise OSError(
                errno.EIO,
                f"an array that was given as tokens cannot be read ({error}); is it mapped from a file "
                f"that was truncated?",
            ) from error
        offset = max(extent.offset_bytes, extent.offset_bytes + error.address - first)
        raise _lost(extent, offset, error) from error
    # The system cannot tell: see whether the files still have their size. What they lose between
    # this and the copying still kills the process there.
    pieces = {
        piece
        for start in np.asarray(starts).tolist()
        for piece, _, _ in held.pieces.parts(start, length)
    }
    for extent in filter(None, (held.extents[piece] for piece in sorted(pieces))):
        if extent.path.stat().st_size < extent.offset_bytes + extent.nbytes:
            raise _lost(extent, extent.path.stat().st_size)


def _lost(extent: Extent, offset_bytes: int, error: OSError | None = None) -> OSError:
    size_bytes = extent.path.stat().st_size if extent.path.exists() else 0
    return OSError(
        errno.EIO,
        f"cannot be read at byte {offset_bytes:,}: it has {size_bytes:,} bytes now and had "
        f"{extent.offset_bytes + extent.nbytes:,} when it was opened; was it truncated or overwritten, "
        f"or does its disk fail{f' ({error})' if error else ''}?",
        str(extent.path),
    )
