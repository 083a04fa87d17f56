"""The document counter: how many documents a pass meets, and how long they are, across chunk borders.

    | chunk        | chunk        | chunk        |    E: end-of-text id
    |...E======E---|--------------|----E=====E...|    =: documents inside a chunk, -: one that straddles

Documents inside a chunk come with their keys, made by the thread that looks at the chunk. Of the few that
straddle chunks only the begin is carried from chunk to chunk; where one ends, its first tokens are read
once more to make its key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenloader.check.documents import (
    KEY_TOKENS,
    MOST_DOCUMENTS,
    Documents,
    KeptDocuments,
    document_keys,
    join,
)
from tokenloader.tokens.reader import Reader


class DocumentCounter:
    """Counts the documents of one pass, given what is found in each chunk, in order.

    Attributes:
        num_stops: number of document ends met.
        num_documents: number of documents that are not empty.
        num_empty: number of documents without tokens.
        longest_length: tokens in the longest document.
        kept: the documents, or a sample of them.

    Args:
        reader: reads the tokens of the pass.
        gap_tokens: tokens between two documents: 1, the end-of-text id, or 0.
        most_documents: documents kept, at most.
    """

    def __init__(self, reader: Reader, gap_tokens: int, most_documents: int = MOST_DOCUMENTS) -> None:
        self.num_stops = self.num_documents = self.num_empty = self.longest_length = 0
        self.kept = KeptDocuments(most_documents)
        self._reader, self._gap_tokens = reader, gap_tokens
        self._begun = 0  # where the document begins that stops next
        self._by_bits = np.zeros(64, np.int64)

    def append(self, stops: NDArray[np.int64], inside: Documents) -> None:
        """Counts the documents that end in the next chunk.

        Args:
            stops: int64 [n], positions where documents end.
            inside: the documents between two stops of the chunk that are not empty.
        """
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
        by_bits: list[int] = self._by_bits.tolist()
        return by_bits[: self.longest_length.bit_length()]

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
        if not len(lengths):
            return
        self.num_documents += len(lengths)
        self.longest_length = max(self.longest_length, int(lengths.max()))
        bits = np.frexp(lengths.astype(np.float64))[1] - 1  # exact: the exponent of an integer
        self._by_bits += np.bincount(bits, minlength=64)
        self.kept.append(documents)
