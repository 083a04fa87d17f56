"""Repeats: which documents are exactly equal, in one array of tokens and across two.

Only documents whose keys agree can be equal. Most copies are known from the pass over all tokens
(`first_occurrences`). It misses documents that straddle two chunks, are looked at by two threads at once,
or get no slot: where keys of these agree, they are compared here by a 128-bit BLAKE2b digest of all tokens.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenloader.check.documents import Documents
from tokenloader.check.scan import num_threads
from tokenloader.tokens.reader import Reader
from tokenloader.tokens.token_array import TokenArray

_MOST_EXAMPLES = 3
_HASHED_TOKENS = 1 << 20  # at a time
_LOOKED_UP_KEYS = 1 << 20  # at a time
_NOWHERE = np.iinfo(np.int64).max  # later than any position


@dataclass(frozen=True)
class Example:
    """A document that occurs more than once."""

    count: int  # occurrences in the tokens that are checked
    start: int  # position of the first of them
    length: int  # tokens of the document
    other_start: int | None = None  # position of the first in the other tokens, where two are compared


@dataclass(frozen=True)
class Repeats:
    """How much of the tokens occurs elsewhere."""

    documents: int  # number of documents that repeat an earlier one (or one of the other tokens)
    tokens: int  # in these documents
    examples: tuple[Example, ...]  # the documents repeated most often, then the longest; at most 3


def duplicates(tokens: TokenArray, documents: Documents) -> Repeats:
    """Finds documents that are exactly equal to an earlier one."""
    groups = _group_known_copies(documents)
    keys = np.sort(groups.keys)
    met_again = np.unique(keys[1:][keys[1:] == keys[:-1]])
    doubtful = _find_keys(groups.keys, met_again)
    done = np.setdiff1d(np.flatnonzero(groups.counts > 1), doubtful)
    rest = groups.take(doubtful)
    groups = groups.take(done).join(rest.merge(_digests(tokens, rest, tokens.dtype)))
    return _summarize(groups, groups.counts - 1)


def shared(
    tokens: TokenArray, documents: Documents, others: TokenArray, other_documents: Documents
) -> Repeats:
    """Finds documents that are exactly equal to one of other tokens, which may be of another dtype."""
    ours, theirs = _group_known_copies(documents), _group_known_copies(other_documents)
    both = np.intersect1d(ours.keys, theirs.keys)
    ours = ours.take(_find_keys(ours.keys, both))
    theirs = theirs.take(_find_keys(theirs.keys, both))
    # Wider than stored only where they differ: hashing takes its time by the byte.
    dtype = tokens.dtype if tokens.dtype == others.dtype else np.dtype(np.int64)
    digests = [_digests(tokens, ours, dtype), _digests(others, theirs, dtype)]
    no_counts = np.zeros_like(theirs.counts)
    theirs = theirs._replace(counts=no_counts, starts=theirs.other_starts, other_starts=theirs.starts)
    groups = ours.join(theirs).merge(np.concatenate(digests))
    return _summarize(groups, np.where(groups.other_starts < _NOWHERE, groups.counts, 0))


class _Groups(NamedTuple):
    """Groups of equal documents; entry i of each array is one group."""

    keys: NDArray[np.uint64]  # [g], of each document of the group
    lengths: NDArray[np.int64]  # [g], tokens of each document of the group
    counts: NDArray[np.int64]  # [g], documents of the group in the tokens that are checked
    starts: NDArray[np.int64]  # [g], first occurrence in these; _NOWHERE: none
    other_starts: NDArray[np.int64]  # [g], first occurrence in the other tokens; _NOWHERE: none

    def take(self, which: NDArray[Any]) -> _Groups:
        return _Groups(*(column[which] for column in self))

    def join(self, others: _Groups) -> _Groups:
        return _Groups(*(np.append(a, b) for a, b in zip(self, others, strict=True)))

    def merge(self, digests: NDArray[np.uint64]) -> _Groups:
        """Makes one group of those whose digests [g, 2] are equal."""
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        ordered = digests[order]
        new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))[: len(digests)]
        begins = np.flatnonzero(new)
        first = self.take(order[begins])
        return first._replace(
            counts=np.add.reduceat(self.counts[order], begins),
            starts=np.minimum.reduceat(self.starts[order], begins),
            other_starts=np.minimum.reduceat(self.other_starts[order], begins),
        )


def _group_known_copies(documents: Documents) -> _Groups:
    """Groups documents by the copies that are known from the pass."""
    known = documents.copy_of >= 0
    distinct = documents.take(~known)
    group = np.searchsorted(distinct.starts, documents.copy_of[known])  # each is among the starts
    starts = distinct.starts.copy()
    np.minimum.at(starts, group, documents.starts[known])  # a thread may meet a later copy first
    counts, nowhere = 1 + np.bincount(group, minlength=len(starts)), np.full_like(starts, _NOWHERE)
    return _Groups(distinct.keys, distinct.lengths, counts, starts, nowhere)


def _summarize(groups: _Groups, repeats: NDArray[np.int64]) -> Repeats:
    """Sums up groups, `repeats` [g] documents of each being repeats."""
    found = np.flatnonzero(repeats)
    order = np.lexsort((groups.starts[found], -groups.lengths[found], -groups.counts[found]))
    top = groups.take(found[order[:_MOST_EXAMPLES]])
    columns = np.stack([top.counts, top.starts, top.lengths, top.other_starts], axis=1)
    examples = (
        Example(count, start, length, None if other == _NOWHERE else other)
        for count, start, length, other in columns.tolist()
    )
    return Repeats(int(repeats.sum()), int((repeats * groups.lengths).sum()), tuple(examples))


def _find_keys(keys: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The indices of the keys that are among the wanted ones, which are sorted."""
    parts = [np.empty(0, np.int64)]
    # np.isin would sort all keys once more.
    for at in range(0, len(keys) if len(wanted) else 0, _LOOKED_UP_KEYS):
        some = keys[at : at + _LOOKED_UP_KEYS]
        place = np.searchsorted(wanted, some).clip(max=len(wanted) - 1)
        parts.append(np.flatnonzero(wanted[place] == some) + at)
    return np.concatenate(parts)


def _digests(tokens: TokenArray, groups: _Groups, dtype: DTypeLike) -> NDArray[np.uint64]:
    """Hashes one document of each group, its tokens taken as of the dtype: uint64 [g, 2], 128 bits each."""
    digests = np.empty((len(groups.starts), 2), np.uint64)

    def fill(which: NDArray[np.int64]) -> None:
        buffer = np.empty(_HASHED_TOKENS, tokens.dtype)
        for i in which.tolist():
            digest = hashlib.blake2b(digest_size=16)
            start, stop = int(groups.starts[i]), int(groups.starts[i] + groups.lengths[i])
            for at in range(start, stop, _HASHED_TOKENS):
                content = buffer[: min(_HASHED_TOKENS, stop - at)]
                reader.read(at, content)
                digest.update(np.ascontiguousarray(content, dtype).data)
            digests[i] = np.frombuffer(digest.digest(), np.uint64)

    workers = num_threads()
    with Reader(tokens) as reader, ThreadPoolExecutor(workers, "tokenloader-digest") as pool:
        neighbours = np.array_split(np.arange(len(digests)), 8 * workers)  # so that reads are in order
        list(pool.map(fill, neighbours))  # raises what a thread has raised
    return digests
