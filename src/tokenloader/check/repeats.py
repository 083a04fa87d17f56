"""Repeats: which documents are exactly the same, in one array of tokens and across two.

Only documents whose keys agree can be (`_documents`), and they are compared in one of two ways:

- in the pass over all tokens, byte for byte: a document is in the processor's cache then, and the first
  copy of what is there often is in the page cache. So a file that is copies for the most part takes
  hardly longer than one that has none. `Firsts` knows the first copies, as many as it has room for.
- after it, by a 128-bit BLAKE2b digest of all their tokens: those of which no copy was known in the pass,
  because they straddle two blocks, were looked at by two threads at once, or found no room.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenloader.check.documents import Documents
from tokenloader.check.scan import num_threads
from tokenloader.tokens.reader import Reader
from tokenloader.tokens.token_array import TokenArray

_ROOM = 1 << 22  # first copies known in the pass; 96 MiB
_COMPARED_TOKENS = 1 << 17  # at a time, which stay in the processor's cache
_HASHED_TOKENS = 1 << 20  # at a time
_CHUNK = 1 << 20  # documents looked up at a time


class Firsts:
    """The first copy of each document met, for the threads of one pass over tokens.

    A table with one place for all keys of the same low bits: the document that comes first takes it, and
    another finds no room. That loses some comparisons to the second look, and no exactness.

    Args:
        reader: of the tokens.
        room: places, a power of two.
    """

    def __init__(self, reader: Reader, room: int = _ROOM) -> None:
        self._reader = reader
        self._mask = np.uint64(room - 1)
        self._lock = threading.Lock()  # of the three below
        self._keys = np.zeros(room, np.uint64)
        self._starts = np.zeros(room, np.int64)
        self._lengths = np.zeros(room, np.int64)  # 0: the place is free

    def copied(
        self, ids: NDArray[np.generic], start: int, documents: Documents
    ) -> NDArray[np.int64]:
        """For each document the start of an equal one, -1 where none is known; int64 [n].

        Args:
            ids: the block of tokens that the documents lie in.
            start: of the block.
        """
        places = documents.keys & self._mask
        with self._lock:
            there = (self._keys[places] == documents.keys) & (
                self._lengths[places] == documents.lengths
            )
            firsts = np.where(there, self._starts[places], -1)
            free = self._lengths[places] == 0
            places = places[free]
            self._keys[places] = documents.keys[free]
            self._starts[places] = documents.starts[free]
            self._lengths[places] = documents.lengths[free]
        begins = documents.starts - start
        ends = begins + documents.lengths
        copied = np.full(len(firsts), -1, np.int64)
        known = np.flatnonzero(firsts >= 0)
        # Neighbours whose first copies are neighbours too are compared as one: where much is
        # repeated, whole stretches are.
        shifts = documents.starts[known] - firsts[known]
        breaks = np.flatnonzero((np.diff(shifts) != 0) | (np.diff(known) != 1)) + 1
        for some in np.split(known, breaks):
            if len(some) > 1 and self._equal(
                ids[begins[some[0]] : ends[some[-1]]], firsts[some[0]]
            ):
                copied[some] = firsts[some]
                continue
            for one in some.tolist():
                if self._equal(ids[begins[one] : ends[one]], firsts[one]):
                    copied[one] = firsts[one]
        return copied

    def _equal(self, ids: NDArray[np.generic], first: int) -> bool:
        """Whether the tokens from `first` on are these."""
        there = np.empty(min(len(ids), _COMPARED_TOKENS), ids.dtype)
        for at in range(0, len(ids), _COMPARED_TOKENS):
            part = ids[at : at + _COMPARED_TOKENS]
            self._reader.read(first + at, there[: len(part)])
            if not np.array_equal(part, there[: len(part)]):
                return False
        return True


@dataclass(frozen=True)
class Example:
    """A document that is there more than once.

    Attributes:
        count: how often, in the tokens looked at.
        start: of its first copy, a token position.
        length: tokens.
        other_start: of the first copy in the other tokens, when two were compared.
    """

    count: int
    start: int
    length: int
    other_start: int | None = None


@dataclass(frozen=True)
class Repeats:
    """How much of some tokens is there already.

    Attributes:
        documents: that repeat an earlier one (or one of the other tokens).
        tokens: in them.
        examples: those repeated most often, then the longest; at most 3.
    """

    documents: int
    tokens: int
    examples: tuple[Example, ...]


def duplicates(tokens: TokenArray, documents: Documents) -> Repeats:
    """Documents that are exactly equal to an earlier one.

    Raises:
        OSError: a file cannot be read.
    """
    ours = _without_copies(documents)
    again = _among(ours.documents.keys, _repeated(ours.documents.keys))
    order, begins = _groups(_digests(tokens, ours.documents[again], tokens.dtype))
    order = again[order]
    alone = np.setdiff1d(np.flatnonzero(ours.counts > 1), again)
    counts = np.append(ours.counts[alone], np.add.reduceat(ours.counts[order], begins))
    return _repeats(
        repeats=counts - 1,
        counts=counts,
        starts=np.append(ours.firsts[alone], np.minimum.reduceat(ours.firsts[order], begins)),
        lengths=ours.documents.lengths[np.append(alone, order[begins])],
    )


def shared(
    tokens: TokenArray, documents: Documents, others: TokenArray, other: Documents
) -> Repeats:
    """Documents that are exactly equal to one of other tokens, which may be of another dtype.

    Raises:
        OSError: a file cannot be read.
    """
    ours, theirs = _without_copies(documents), _without_copies(other)
    both = np.intersect1d(ours.documents.keys, theirs.documents.keys)
    ours = ours[_among(ours.documents.keys, both)]
    theirs = theirs[_among(theirs.documents.keys, both)]
    # Wider than stored only where they differ: hashing takes its time by the byte.
    dtype = tokens.dtype if tokens.dtype == others.dtype else np.dtype(np.int64)
    order, begins = _groups(
        np.concatenate(
            [
                _digests(tokens, ours.documents, dtype),
                _digests(others, theirs.documents, dtype),
            ]
        )
    )
    not_there = np.iinfo(np.int64).max
    counts = np.append(ours.counts, np.zeros_like(theirs.counts))
    starts = np.append(ours.firsts, np.full_like(theirs.firsts, not_there))
    other_starts = np.append(np.full_like(ours.firsts, not_there), theirs.firsts)
    counts = np.add.reduceat(counts[order], begins)
    other_starts = np.minimum.reduceat(other_starts[order], begins)
    lengths = np.append(ours.documents.lengths, theirs.documents.lengths)
    return _repeats(
        repeats=np.where(other_starts < not_there, counts, 0),
        counts=counts,
        starts=np.minimum.reduceat(starts[order], begins),
        lengths=lengths[order[begins]],
        other_starts=other_starts,
    )


@dataclass(frozen=True, eq=False)
class _Distinct:
    """Documents of which no copy is known, and what is known of their copies.

    Attributes:
        counts: int64 [n], of copies, itself among them.
        firsts: int64 [n], where the first copy starts.
    """

    documents: Documents
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]

    def __getitem__(self, which: NDArray[np.int64]) -> _Distinct:
        return _Distinct(self.documents[which], self.counts[which], self.firsts[which])


def _without_copies(documents: Documents) -> _Distinct:
    known = documents.copied >= 0
    distinct, copies = documents[np.flatnonzero(~known)], documents[np.flatnonzero(known)]
    of = np.searchsorted(distinct.starts, copies.copied)  # exactly: what is copied is there
    counts = 1 + np.bincount(of, minlength=len(distinct.starts))
    firsts = distinct.starts.copy()
    np.minimum.at(firsts, of, copies.starts)  # a thread may meet a later copy first
    return _Distinct(distinct, counts, firsts)


def _repeats(
    *,
    repeats: NDArray[np.int64],
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    other_starts: NDArray[np.int64] | None = None,
) -> Repeats:
    """Of groups of equal documents [groups], those of which documents are repeats."""
    keep = np.flatnonzero(repeats)
    top = keep[np.lexsort((starts[keep], -lengths[keep], -counts[keep]))[:3]]
    return Repeats(
        int(repeats.sum()),
        int((repeats * lengths).sum()),
        tuple(
            Example(
                int(counts[i]),
                int(starts[i]),
                int(lengths[i]),
                None if other_starts is None else int(other_starts[i]),
            )
            for i in top
        ),
    )


def _repeated(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The keys that are there more than once, sorted, each once."""
    ordered = np.sort(keys)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _among(keys: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Which keys are among the wanted ones, which are sorted."""
    parts = [np.empty(0, np.int64)]
    for at in range(0, len(keys) if len(wanted) else 0, _CHUNK):  # np.isin would sort all once more
        some = keys[at : at + _CHUNK]
        place = np.searchsorted(wanted, some).clip(max=len(wanted) - 1)
        parts.append(np.flatnonzero(wanted[place] == some) + at)
    return np.concatenate(parts)


def _digests(tokens: TokenArray, documents: Documents, dtype: DTypeLike) -> NDArray[np.uint64]:
    """128 bits of each document's tokens, as tokens of the dtype: uint64 [n, 2]."""
    digests = np.empty((len(documents.starts), 2), np.uint64)

    def fill(which: NDArray[np.int64]) -> None:
        buffer = np.empty(_HASHED_TOKENS, tokens.dtype)
        for i in which.tolist():
            digest = hashlib.blake2b(digest_size=16)
            start, stop = int(documents.starts[i]), int(documents.starts[i] + documents.lengths[i])
            for at in range(start, stop, _HASHED_TOKENS):
                content = buffer[: min(_HASHED_TOKENS, stop - at)]
                reader.read(at, content)
                digest.update(np.ascontiguousarray(content, dtype).data)
            digests[i] = np.frombuffer(digest.digest(), np.uint64)

    workers = num_threads()
    with Reader(tokens) as reader, ThreadPoolExecutor(workers, "tokenloader-digest") as pool:
        parts = np.array_split(
            np.arange(len(digests)), 8 * workers
        )  # of neighbours: reads in order
        for done in [pool.submit(fill, part) for part in parts if len(part)]:
            done.result()
    return digests


def _groups(digests: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The order that brings equal digests together, int64 [n], and where in it each group begins."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))[: len(digests)]
    return order, np.flatnonzero(new)
