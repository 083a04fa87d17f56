"""Documents: stretches of tokens that are one text each, with keys that are equal for equal documents.

A key hashes a document's length, 32 of its tokens, evenly spread from the first to the last, and the
exclusive or of all of them, which numpy takes at the speed of memory; of a document longer than KEY_TOKENS,
the first KEY_TOKENS tokens stand for all. Documents whose keys agree are compared in full (`repeats`). To
hash all tokens well in the first place would take several times as long as the rest of a check.

A document takes 32 bytes of memory, and some 60 while documents are sorted: 0.6 GB for ten million. Past
MOST_DOCUMENTS, only documents whose key divides by 2, then 4, ... are kept. Equal documents are kept or
dropped together, so what is found among the kept is a fair sample of what there is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.tokens.reader import Reader

MOST_DOCUMENTS = 1 << 25  # 2 GB while they are sorted
KEY_TOKENS = 1 << 16
_PROBES = 32  # tokens in the hash
_RNG = np.random.Generator(np.random.Philox(50256))
_MULTIPLIERS = _RNG.integers(0, 2**64, _PROBES + 2, np.uint64) | np.uint64(1)


class Documents(NamedTuple):
    """Documents that are not empty, without end-of-text ids; entry i of each array is one document."""

    keys: NDArray[np.uint64]  # [n], from `document_keys`
    starts: NDArray[np.int64]  # [n], positions of first tokens
    lengths: NDArray[np.int64]  # [n], tokens
    copy_of: NDArray[np.int64]  # [n], start of an equal document that is no known copy; -1: none yet

    def take(self, which: NDArray[Any]) -> Documents:
        """The documents at some indices, or where a mask is true."""
        return Documents(*(column[which] for column in self))

    def sample(self, one_in: int) -> Documents:
        """The documents whose key divides by one_in, a power of two."""
        return self if one_in == 1 else self.take(self.keys & np.uint64(one_in - 1) == 0)


def join(parts: list[Documents]) -> Documents:
    """Joins documents end to end."""
    if not parts:
        none = np.empty(0, np.int64)
        return Documents(none.astype(np.uint64), none, none, none)
    return Documents(*map(np.concatenate, zip(*parts, strict=True)))


def document_keys(
    ids: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Hashes documents to their keys, uint64 [n].

    A multilinear hash modulo 2^64, finished by the mixer of MurmurHash3 so that all bits are good. The ids
    hold at least the first KEY_TOKENS of each document; the documents begin at `starts`, indices into ids,
    ascending, have 1 token or more, and do not overlap.
    """
    if not len(starts):
        return np.empty(0, np.uint64)
    hashed = np.minimum(lengths, KEY_TOKENS)
    probes = starts[:, None] + (hashed[:, None] - 1) * np.arange(_PROBES) // (_PROBES - 1)
    bounds = np.stack([starts, starts + hashed], axis=1).reshape(-1)
    xors = np.bitwise_xor.reduceat(ids[: bounds[-1]], bounds[:-1])[::2]  # [1::2]: between documents
    with np.errstate(over="ignore"):
        keys: NDArray[np.uint64] = ids[probes].astype(np.uint64) @ _MULTIPLIERS[2:]
        keys += lengths.astype(np.uint64) * _MULTIPLIERS[0]
        keys += xors.astype(np.uint64) * _MULTIPLIERS[1]
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            keys ^= keys >> np.uint64(33)
            keys *= np.uint64(multiplier)
        keys ^= keys >> np.uint64(33)
    return keys


class KeptDocuments:
    """Documents appended in order, `most` at most; a sample of them once they are too many."""

    def __init__(self, most: int = MOST_DOCUMENTS) -> None:
        self.one_in = 1  # one document in so many is kept, a power of two; 1: all are
        self._num_kept, self._most = 0, most
        self._parts: list[Documents] = []

    def append(self, documents: Documents) -> None:
        """Keeps documents that lie after those appended before."""
        self._parts.append(documents.sample(self.one_in))
        self._num_kept += len(self._parts[-1].keys)
        while self._num_kept > self._most:
            self.one_in *= 2
            self._parts = [part.sample(self.one_in) for part in self._parts]
            self._num_kept = sum(len(part.keys) for part in self._parts)

    def documents(self) -> Documents:
        """The documents that are kept, in order."""
        if len(self._parts) != 1:
            self._parts = [join(self._parts)]
        return self._parts[0]


class DocumentCounter:
    """Counts the documents of one pass, given what is found in each chunk, in order.

        | chunk        | chunk        | chunk        |    E: end-of-text id
        |...E======E---|--------------|----E=====E...|    =: documents inside a chunk, -: one that straddles

    Documents inside a chunk come with their keys, made by the thread that looks at the chunk. Of the few
    that straddle chunks only the begin is carried from chunk to chunk; where one ends, its first tokens
    are read once more to make its key. Between two documents lie `gap_tokens` tokens: 1, the end-of-text
    id, or 0.
    """

    def __init__(self, reader: Reader, gap_tokens: int, most_documents: int = MOST_DOCUMENTS) -> None:
        self.num_stops = 0  # document ends met; the others as in Counts
        self.num_documents = self.num_empty = self.longest_length = 0
        self.kept = KeptDocuments(most_documents)
        self._reader, self._gap_tokens = reader, gap_tokens
        self._begun = 0  # where the document begins that stops next
        self._by_bits = np.zeros(64, np.int64)

    def append(self, stops: NDArray[np.int64], inside: Documents) -> None:
        """Counts the documents that end in the next chunk, at `stops`; `inside` lie between two stops."""
        if not len(stops):
            return
        first = int(stops[0])
        self.num_stops += len(stops)
        self.num_empty += len(stops) - 1 - len(inside.keys)
        # An end-of-text id before the first document (llm.c writes it so) ends no empty document.
        if first == self._begun > 0:
            self.num_empty += 1
        self._count(join([self._straddling(first), inside]))
        self._begun = int(stops[-1]) + self._gap_tokens

    def finish(self, num_tokens: int) -> None:
        """Counts what follows the last end, if any was met, as a document too."""
        if self.num_stops:
            self._count(self._straddling(num_tokens))

    @property
    def lengths(self) -> list[int]:
        """Number of documents of length [2**i, 2**(i + 1)), for each i from 0 to that of the longest."""
        return [int(count) for count in self._by_bits[: self.longest_length.bit_length()]]

    @property
    def median_length(self) -> int:
        """Median length in tokens of the documents that are kept; 0 without any."""
        lengths = self.kept.documents().lengths
        return int(np.median(lengths)) if len(lengths) else 0

    def _straddling(self, stop: int) -> Documents:
        """The document that has begun before the chunk and ends at `stop`, if it has tokens."""
        length = stop - self._begun
        if length <= 0:
            return join([])
        ids = np.empty(min(length, KEY_TOKENS), self._reader.dtype)
        self._reader.read(self._begun, ids)
        starts, lengths = np.array([self._begun]), np.array([length])
        return Documents(document_keys(ids, starts * 0, lengths), starts, lengths, np.array([-1]))

    def _count(self, documents: Documents) -> None:
        lengths = documents.lengths
        self.num_documents += len(lengths)
        self.longest_length = int(lengths.max(initial=self.longest_length))
        bits = np.frexp(lengths.astype(np.float64))[1] - 1  # exact: the exponent of an integer
        self._by_bits += np.bincount(bits, minlength=64)
        self.kept.append(documents)
