"""Documents: the stretches of tokens that are one text each, and keys that agree for equal ones.

A document's key is a hash of its length, of 32 of its tokens, evenly spread from the first to the
last, and of the exclusive or of all of them, which numpy takes at the speed of memory. Equal
documents have equal keys, so only documents whose keys agree need be compared (`_repeats`). A hash
of all tokens in the first place would take several times as long as all the rest; near-copies, which
agree in most tokens, are still told apart. A document takes 32 bytes of memory, and some 60 while
they are sorted: 0.6 GB for ten million.

Past MOST_DOCUMENTS, only those whose key divides by 2, then 4, ... are kept. Equal documents are
kept or dropped together, so that what is found among the kept is a fair sample of what there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_DOCUMENTS = 1 << 25  # 2 GB while they are sorted
_PROBES = 32  # tokens of a document that its key is made of


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
        lengths: int64 [n], tokens.
        copied: int64 [n], the start of a document of the same tokens, one that is itself no known copy;
            -1 where none is known yet.
    """

    keys: NDArray[np.uint64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    copied: NDArray[np.int64]

    def __getitem__(self, which: NDArray[Any]) -> Documents:
        return Documents(
            self.keys[which], self.starts[which], self.lengths[which], self.copied[which]
        )

    def sample(self, one_in: int) -> Documents:
        """Those whose key divides by a power of two."""
        return self if one_in == 1 else self[self.keys & np.uint64(one_in - 1) == 0]


def join(parts: list[Documents]) -> Documents:
    """One after the other."""
    if not parts:
        none = np.empty(0, np.int64)
        return Documents(none.astype(np.uint64), none, none, none)
    return Documents(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.copied for part in parts]),
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
