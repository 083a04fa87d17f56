"""First occurrences: where each document of a pass was met first, so that copies are found as they pass by.

A document is in the processor's cache while its chunk is looked at, and the first occurrence of what recurs
is often in the page cache. So a file that is copies for the most part takes hardly longer to check than
one without any.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from tokenloader.check.documents import Documents
from tokenloader.tokens.reader import Reader

NUM_SLOTS = 1 << 22  # 96 MiB
_COMPARED_TOKENS = 1 << 17  # at a time, which stay in the processor's cache


class FirstOccurrences:
    """A hash table of the documents met first, shared by the threads of one pass.

    It has num_slots, a power of two, one for all keys of the same low bits: the document that comes first
    takes the slot. One with another key is not remembered; its copies are found after the pass (`repeats`).
    """

    def __init__(self, reader: Reader, num_slots: int = NUM_SLOTS) -> None:
        self._reader = reader  # of the tokens of the pass
        self._mask = np.uint64(num_slots - 1)
        self._lock = threading.Lock()  # guards the fields below
        self._keys = np.zeros(num_slots, np.uint64)
        self._starts = np.zeros(num_slots, np.int64)
        self._lengths = np.zeros(num_slots, np.int64)  # 0: the slot is free

    def find(self, ids: NDArray[np.generic], start: int, documents: Documents) -> NDArray[np.int64]:
        """Finds first occurrences of the documents in a chunk, and remembers documents that have none.

        Returns int64 [n], the start of an equal document that came before; -1 where none is known.
        """
        slots = documents.keys & self._mask
        with self._lock:
            agree = (self._keys[slots] == documents.keys) & (self._lengths[slots] == documents.lengths)
            candidates = np.where(agree, self._starts[slots], -1)
            free = self._lengths[slots] == 0
            slots = slots[free]
            self._keys[slots] = documents.keys[free]
            self._starts[slots] = documents.starts[free]
            self._lengths[slots] = documents.lengths[free]
        begins = documents.starts - start
        ends = begins + documents.lengths
        found = np.full(len(candidates), -1, np.int64)
        known = np.flatnonzero(candidates >= 0)
        # Neighbours whose first occurrences are neighbours too are compared as one: where much is
        # repeated, whole stretches are.
        shifts = documents.starts[known] - candidates[known]
        breaks = np.flatnonzero((np.diff(shifts) != 0) | (np.diff(known) != 1)) + 1
        for group in np.split(known, breaks):
            if len(group) > 1 and self._equal(
                ids[begins[group[0]] : ends[group[-1]]], candidates[group[0]]
            ):
                found[group] = candidates[group]
                continue
            for i in group.tolist():
                if self._equal(ids[begins[i] : ends[i]], candidates[i]):
                    found[i] = candidates[i]
        return found

    def _equal(self, ids: NDArray[np.generic], first: int) -> bool:
        """Whether the tokens from position `first` on are ids."""
        buffer = np.empty(min(len(ids), _COMPARED_TOKENS), ids.dtype)
        for at in range(0, len(ids), _COMPARED_TOKENS):
            part = ids[at : at + _COMPARED_TOKENS]
            self._reader.read(first + at, buffer[: len(part)])
            if not np.array_equal(part, buffer[: len(part)]):
                return False
        return True
