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

MOST_DOCUMENTS = 1 << 25  # 2 GB while they are sorted
KEY_TOKENS = 1 << 16
_PROBES = 32  # tokens in the hash
_MULTIPLIERS = np.random.Generator(np.random.Philox(50256)).integers(
    0, 2**64, _PROBES + 2, np.uint64
) | np.uint64(1)


class Documents(NamedTuple):
    """Documents that are not empty, without their end-of-text ids; entry i of each array is one document.

    Attributes:
        keys: uint64 [n], from `document_keys`.
        starts: int64 [n], positions of first tokens.
        lengths: int64 [n], tokens.
        copy_of: int64 [n], start of an equal document, one that is itself no known copy; -1 where none is
            known yet.
    """

    keys: NDArray[np.uint64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    copy_of: NDArray[np.int64]

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


class KeptDocuments:
    """Documents appended in order; a sample of them once they are too many.

    Attributes:
        one_in: a power of two: one document in so many is kept; 1: all are.

    Args:
        most: documents kept, at most.
    """

    def __init__(self, most: int = MOST_DOCUMENTS) -> None:
        self.one_in, self._num_kept, self._most = 1, 0, most
        self._parts: list[Documents] = []

    def append(self, documents: Documents) -> None:
        """Keeps documents that lie after those appended before."""
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
        """The documents that are kept, in order."""
        if len(self._parts) != 1:
            self._parts = [join(self._parts)]
        return self._parts[0]


def document_keys(
    ids: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Hashes documents to their keys, uint64 [n].

    A multilinear hash modulo 2^64, finished by the mixer of MurmurHash3 so that all bits are good.

    Args:
        ids: tokens, at least the first KEY_TOKENS of each document among them.
        starts: int64 [n], indices into ids, ascending; documents do not overlap.
        lengths: int64 [n], tokens of each document, 1 or more.
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
