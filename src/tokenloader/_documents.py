"""Documents: the stretches between end-of-text tokens, and which of them are the same.

A document's key is a hash of its length, of 32 of its tokens, evenly spread from the first to the
last, and of the exclusive or of all of them, which numpy takes at the speed of memory. Equal
documents have equal keys, so only documents whose keys agree need be read a second time, and are
then compared by a 128-bit BLAKE2b digest of all their tokens. A hash of all tokens in the first
place would take several times as long as all the rest; near-copies, which agree in most tokens, are
still told apart. A document takes 20 bytes of memory, and some 45 while they are sorted: half a
gigabyte for ten million.

Past MOST_DOCUMENTS, only those whose key divides by 2, then 4, ... are kept. Equal documents are
kept or dropped together, so that what is found among the kept is a fair sample of what there is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader._scan import Reader
from tokenloader._tokens import TokenArray

MOST_DOCUMENTS = 1 << 25  # 1.5 GB while they are sorted
_PROBES = 32  # tokens of a document that its key is made of
_CHUNK = 1 << 20  # documents looked up at a time


class Keys:
    """Where documents lie, and their keys. Appended to in order; sampled when there are too many.

    Attributes:
        num_seen: documents appended, kept or not.
        one_in: the part of them that is kept, a power of two: 1 is all.
    """

    def __init__(self, most: int = MOST_DOCUMENTS) -> None:
        self.num_seen, self.one_in, self._num_kept, self._most = 0, 1, 0, most
        self._parts: list[Documents] = []

    def append(self, documents: Documents) -> None:
        self.num_seen += len(documents.keys)
        self._keep(documents)
        while self._num_kept > self._most:
            self.one_in *= 2
            parts, self._parts, self._num_kept = self._parts, [], 0
            for part in parts:
                self._keep(part)

    def _keep(self, documents: Documents) -> None:
        kept = documents.sample(self.one_in)
        if len(kept.keys):
            self._parts.append(kept)
            self._num_kept += len(kept.keys)

    def documents(self) -> Documents:
        """All that are kept, in order."""
        if len(self._parts) != 1:
            self._parts = [join(self._parts)]
        return self._parts[0]


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents that are not empty, without their end-of-text.

    Attributes:
        keys: uint64 [n].
        starts: int64 [n], of the first token.
        lengths: uint32 [n], tokens.
    """

    keys: NDArray[np.uint64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.uint32]

    def __getitem__(self, which: NDArray[Any]) -> Documents:
        return Documents(self.keys[which], self.starts[which], self.lengths[which])

    def sample(self, one_in: int) -> Documents:
        """Those whose key divides by a power of two."""
        return self if one_in == 1 else self[self.keys & np.uint64(one_in - 1) == 0]


def join(parts: list[Documents]) -> Documents:
    """One after the other."""
    if not parts:
        return Documents(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint32))
    return Documents(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


def probes(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions of the tokens that keys are made of: [n, 32]."""
    steps = np.arange(_PROBES)
    positions: NDArray[np.int64] = starts[:, None] + (lengths[:, None] - 1) * steps // (_PROBES - 1)
    return positions


def keys_of(
    probed: NDArray[Any], lengths: NDArray[np.int64], xors: NDArray[Any]
) -> NDArray[np.uint64]:
    """Keys of documents: of the tokens at their probes [n, 32], their lengths [n] and xors [n].

    A multilinear hash modulo 2^64, finished by the mixer of MurmurHash3 so that all bits are good.
    """
    with np.errstate(over="ignore"):
        keys = probed.astype(np.uint64) @ _MULTIPLIERS[2:]
        keys += (
            lengths.astype(np.uint64) * _MULTIPLIERS[0] + xors.astype(np.uint64) * _MULTIPLIERS[1]
        )
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            keys ^= keys >> np.uint64(33)
            keys *= np.uint64(multiplier)
        keys ^= keys >> np.uint64(33)
    return keys


_MULTIPLIERS = np.random.Generator(np.random.Philox(50256)).integers(
    0, 2**64, _PROBES + 2, np.uint64
) | np.uint64(1)


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
    """Documents that are exactly equal to an earlier one."""
    candidates = documents[_among(documents.keys, _repeated(documents.keys))]
    firsts, counts = _groups(_digests(tokens, candidates))
    return _repeats(candidates, firsts, counts, counts - 1, None)


def shared(
    tokens: TokenArray, documents: Documents, others: TokenArray, other: Documents
) -> Repeats:
    """Documents that are exactly equal to one of other tokens."""
    both = np.intersect1d(documents.keys, other.keys)
    candidates = documents[_among(documents.keys, both)]
    other = other[_among(other.keys, both)]
    there: dict[bytes, int] = {}
    for digest, start in zip(_digests(others, other), other.starts.tolist(), strict=True):
        there.setdefault(digest.tobytes(), start)
    digests = _digests(tokens, candidates)
    firsts, counts = _groups(digests)
    starts = np.array([there.get(digests[first].tobytes(), -1) for first in firsts], np.int64)
    found = starts >= 0
    return _repeats(candidates, firsts[found], counts[found], counts[found], starts[found])


def _repeats(
    candidates: Documents,
    firsts: NDArray[np.int64],
    counts: NDArray[np.int64],
    repeats: NDArray[np.int64],
    other_starts: NDArray[np.int64] | None,
) -> Repeats:
    keep = np.flatnonzero(repeats)
    lengths = candidates.lengths[firsts].astype(np.int64)
    top = sorted(keep.tolist(), key=lambda i: (-counts[i], -lengths[i], firsts[i]))[:3]
    return Repeats(
        int(repeats.sum()),
        int((repeats * lengths).sum()),
        tuple(
            Example(
                int(counts[i]),
                int(candidates.starts[firsts[i]]),
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
    if not len(wanted):
        return np.empty(0, np.int64)
    parts = []
    for at in range(0, len(keys), _CHUNK):  # np.isin would sort all keys once more
        some = keys[at : at + _CHUNK]
        place = np.searchsorted(wanted, some).clip(max=len(wanted) - 1)
        parts.append(np.flatnonzero(wanted[place] == some) + at)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _digests(tokens: TokenArray, documents: Documents) -> NDArray[np.uint64]:
    """128 bits of each document's tokens, as int64: uint64 [n, 2]."""
    digests = np.empty((len(documents.keys), 2), np.uint64)
    for i, content in enumerate(_contents(tokens, documents)):
        hashed = hashlib.blake2b(content.astype("<i8").tobytes(), digest_size=16)
        digests[i] = np.frombuffer(hashed.digest(), np.uint64)
    return digests


def _contents(tokens: TokenArray, documents: Documents) -> Iterator[NDArray[Any]]:
    with Reader(tokens) as reader:
        for start, length in zip(
            documents.starts.tolist(), documents.lengths.tolist(), strict=True
        ):
            content = np.empty(length, tokens.dtype)
            reader.read(start, content)
            yield content


def _groups(digests: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each digest its first document, and how many documents have it: both int64 [groups]."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: the first copy stays first
    ordered = digests[order]
    new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))[: len(digests)]
    begins = np.flatnonzero(new)
    return order[begins], np.diff(np.append(begins, len(digests)))
