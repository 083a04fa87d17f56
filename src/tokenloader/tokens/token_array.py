"""TokenArray: one axis of token ids on the host.

How the bytes are held (mapped, in RAM, in how many files) never changes what is returned. Each result is
a fresh array that the caller owns. Methods may be called from several threads at once, close() included.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Self, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.formats.extent import Extent
from tokenloader.tokens.located_windows import LocatedWindows
from tokenloader.tokens.part import Part
from tokenloader.tokens.store import Memory, Store, letting_go, no_memory

# How the tokens of files are held: "mmap", read from mapped files; "ram", read into RAM.
Residency = Literal["mmap", "ram"]

_FINGERPRINT_BLOCKS, _FINGERPRINT_TOKENS = 64, 512  # 64 blocks of 512 cold from an SSD are about 10 ms


class TokenArray:
    """One axis of token ids on the host. Made by `open_tokens`, and by `view` and `split`.

    Attributes:
        dtype: numpy dtype of one token.
        nbytes: bytes of all tokens.

    Example:
        >>> with tl.open_tokens(np.arange(100, dtype=np.uint16)) as tokens:
        ...     tokens.gather([0, 50], 3)
        array([[ 0,  1,  2],
               [50, 51, 52]], dtype=uint16)
    """

    __module__ = "tokenloader"  # where users find it: in repr, help and pickles

    def __init__(self, store: Store, begin: int = 0, end: int | None = None) -> None:
        """Tokens [begin, end) of a store's axis; end None: to its end."""
        axis = store.current.axis
        self._begin, self._end = begin, len(axis) if end is None else end
        self._name = store.current.name
        if len(self) < len(axis):
            self._name += f"[{self._begin:_}:{self._end:_}]"
        self._store: Store | None = store
        self.dtype: np.dtype[Any] = axis.dtype
        self.nbytes: int = len(self) * self.dtype.itemsize
        self._residency = _residency(store.current.parts_between(self._begin, self._end))
        self._fingerprint: str | None = None
        self._documents: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self._end - self._begin

    def __repr__(self) -> str:
        size = f"{self.nbytes / 2**30:.2f} GiB" if self.nbytes >= 2**30 else f"{self.nbytes:,} bytes"
        state = "closed" if self._store is None else self.residency
        return f"TokenArray({self._name}: {len(self):,} {self.dtype} tokens, {size}, {state})"

    @property
    def residency(self) -> Residency:
        """How the tokens are held: "mmap" if any of them are read from mapped files, else "ram".

        Those that are still being read into RAM count as there. Where that fails, they stay mapped.
        """
        store = self._store
        if store is not None:  # closed, they are what they were
            self._residency = _residency(store.memory().parts_between(self._begin, self._end))
        return self._residency

    @overload
    def __getitem__(self, index: SupportsIndex) -> np.integer[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> NDArray[np.integer[Any]]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> np.integer[Any] | NDArray[np.integer[Any]]:
        """`tokens[i]` is a numpy scalar, `tokens[a:b]` a numpy copy."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.gather(np.arange(start, stop, step), 1).reshape(-1)
            with letting_go():
                return self._copy(start, max(0, stop - start))
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"token {position} of {self!r}; there are tokens 0 to {len(self) - 1}")
        token: np.integer[Any] = self.gather([position % len(self)], 1)[0, 0]
        return token

    @property
    def documents(self) -> NDArray[np.int64] | None:
        """Where documents begin and end, by the document index of the files.

        int64 [num_documents + 1], in tokens: 0, ..., len(self); read-only. Document i is
        tokens[documents[i] : documents[i + 1]], the end-of-text token included if there is one; it may be
        empty. Where files are joined a document ends, and so it does where a view begins or ends. None if
        a part of the tokens has no index: of Megatron-LM and datatrove files, most have. Read when first
        asked for, 8 bytes a document, and kept.

        Raises:
            OSError: an index cannot be read, or has changed since the tokens were opened.
            ValueError: an index does not fit its tokens; or the array is closed.
        """
        parts = self._parts()
        if self._documents is None and all(part.extent and part.extent.index_path for part in parts):
            boundaries = [np.zeros(1, np.int64)]
            for part in parts:
                boundaries.append(boundaries[-1][-1] + part.documents()[1:])
            documents = np.concatenate(boundaries)
            documents.flags.writeable = False
            self._documents = documents
        return self._documents

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The files, and where in them the tokens lie, in order; () for arrays."""
        return tuple(extent for part in self._parts() if (extent := part.file_extent) is not None)

    def view(self, start: int, stop: int) -> TokenArray:
        """Returns tokens [start, stop) as a TokenArray that shares the bytes; negative: from the end.

        Copies nothing. Either stays open when the other is closed; the bytes go with the last.

        Raises:
            ValueError: the view would be empty or go beyond the tokens; or the array is closed.

        Example:
            >>> tokens = open_tokens(np.arange(1000, dtype=np.uint16))
            >>> tokens.view(100, 200)[:3]
            array([100, 101, 102], dtype=uint16)
        """
        store, num_tokens = self._open_store(), len(self)
        begin, end = (i + num_tokens if i < 0 else i for i in map(operator.index, (start, stop)))
        if not 0 <= begin < end <= num_tokens:
            raise ValueError(
                f"view({start}, {stop}) is empty or not within {self!r}; expected "
                f"0 <= start < stop <= {num_tokens:,}, where negative ones count from the end"
            )
        return TokenArray(store, self._begin + begin, self._begin + end)

    def split(self, n: int) -> tuple[TokenArray, TokenArray]:
        """Returns the tokens before position n, and those from it on, as two views; negative: from the end.

        Raises:
            ValueError: a part would be empty; or the array is closed.

        Example:
            >>> tokens = open_tokens(np.arange(1000, dtype=np.uint16))
            >>> train, validation = tokens.split(-100)
            >>> len(train), len(validation), validation[0]
            (900, 100, np.uint16(900))
        """
        at = operator.index(n)
        if not 0 < abs(at) < len(self):
            raise ValueError(
                f"split({n}) leaves one of two parts of {self!r} empty; expected 1 to {len(self) - 1:,} "
                f"tokens for the first part, or the negative of those for the second"
            )
        at %= len(self)
        return self.view(0, at), self.view(at, len(self))

    def locate(self, starts: ArrayLike, length: SupportsIndex) -> LocatedWindows:
        """Finds windows, to be read ahead and copied later. Takes and raises what `gather` does."""
        array, length = np.asarray(starts), operator.index(length)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            found = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"starts is {found}; expected a 1-D array of integers")
        if length < 1:
            raise ValueError(f"length={length}; expected 1 token or more")
        array = array.astype(np.int64, copy=False)
        if array.size:
            # As unsigned integers, negative starts lie past every end: one look at the array finds both.
            start = int(array[array.view(np.uint64).argmax()])
            if not 0 <= start <= len(self) - length:
                raise IndexError(f"window [{start:,}, {start + length:,}) does not lie within {self!r}")
        if self._begin:
            array = array + self._begin
        return LocatedWindows(self._memory(), array, length, self._memory)

    def gather(self, starts: ArrayLike, length: SupportsIndex) -> NDArray[np.integer[Any]]:
        """Copies windows: [n, length] of the tokens' dtype, row i tokens[starts[i] : starts[i] + length].

        Args:
            starts: int [n], the first token of each window.
            length: tokens in a window, 1 or more.

        Raises:
            IndexError: a window does not lie within the tokens.
            ValueError: starts or length is of the wrong shape or dtype; or the array is closed.
            OSError: a file was truncated or written to since it was opened, or its disk fails.
        """
        return self.locate(starts, length).copy()

    def prefetch(self, starts: ArrayLike, length: SupportsIndex) -> None:
        """Starts reading windows from disk, and does not wait. Takes and raises what `gather` does.

        A hint: a gather of them a little later finds them in the page cache. Reads nothing for tokens
        in RAM.
        """
        self.locate(starts, length).prefetch()

    def wait_until_loaded(self) -> None:
        """Waits until all tokens are in RAM, for residency "ram"; else returns at once.

        Raises:
            OSError: a file could not be read into RAM: it cannot be read, ends before its tokens do, or was
                written to meanwhile. Whatever of it can be read goes on being read as a mapped file.
            ValueError: the array is closed.
        """
        fill = self._open_store().fill  # and not the store: while this waits, close() may end it
        if fill is not None:
            fill.wait()
        self._memory()
        if (failure := self._open_store().fill_failure) is not None:
            raise OSError(*failure)

    def fingerprint(self) -> str:
        """A name for a sample of the contents: "DTYPE:NUM_TOKENS:HASH", equal for equal tokens.

        It does not depend on residency or on how the tokens are split into files. The hash (BLAKE2b,
        64 bits) covers 64 blocks of 512 tokens spread evenly over the axis, the first and the last
        among them: milliseconds at any size, and a change between two blocks escapes it, such as zeros
        in a part of one host's copy. `tokenloader check --fingerprint` hashes every token.
        """
        if self._fingerprint is None:
            length = min(_FINGERPRINT_TOKENS, len(self))
            starts = np.linspace(0, len(self) - length, _FINGERPRINT_BLOCKS).astype(np.int64)
            windows = self.locate(starts, length)
            windows.prefetch()
            digest = hashlib.blake2b(windows.copy().tobytes(), digest_size=8)
            self._fingerprint = f"{self.dtype}:{len(self)}:{digest.hexdigest()}"
        return self._fingerprint

    def close(self) -> None:
        """Lets go of the bytes. What another thread is copying meanwhile still completes."""
        self._store = None

    def __enter__(self) -> Self:
        self._open_store()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied or pickled; open the tokens again where needed")

    def _copy(self, start: int, num_tokens: int) -> NDArray[np.integer[Any]]:
        try:
            out = np.empty(num_tokens, self.dtype)
        except MemoryError as error:
            raise no_memory(self._name, num_tokens, self.dtype) from error
        self._memory().copy(self._begin + start, out)
        return out

    def _open_store(self) -> Store:
        store = self._store  # read once: another thread may close
        if store is None:
            raise ValueError(f"{self!r}: it was closed; open the tokens again")
        return store

    def _memory(self) -> Memory:
        return self._open_store().memory()

    def _parts(self) -> list[Part]:
        return self._memory().parts_between(self._begin, self._end)


def _residency(parts: Sequence[Part]) -> Residency:
    return "mmap" if any(part.held == "mapped" for part in parts) else "ram"
