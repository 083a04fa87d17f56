"""Runs: stretches of one id repeated, as padding and holes in a file are."""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RUN_TOKENS = 64  # a run is this long or longer
_LONGEST = 3


@dataclass(frozen=True)
class Run:
    """One id repeated over token positions [start, stop)."""

    token: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens in the run."""
        return self.stop - self.start


def runs_in(ids: NDArray[Any], start: int) -> list[Run]:
    """Finds the runs of a chunk at position `start`: all of RUN_TOKENS or more, and any at its two ends.

    Most chunks have none, and for those it takes one comparison of whole 8-byte words: a run has two
    equal words in a row, each of one token only.
    """
    per_word = 8 // ids.itemsize
    words = ids[: len(ids) // per_word * per_word].view(np.uint64)
    same = np.flatnonzero(words[1:] == words[:-1])  # word i begins a pair
    tokens = words[same].view(ids.dtype).reshape(-1, per_word)
    same = same[(tokens == tokens[:, :1]).all(axis=1)]
    first = np.append(True, np.diff(same) > 1)[: len(same)]
    begins = same[first] * per_word
    ends = (same[np.roll(first, -1)] + 2) * per_word
    for _ in range(per_word):  # a run may begin and end inside a word
        begins -= (begins > 0) & (ids[begins - 1] == ids[begins])
        ends += (ends < len(ids)) & (ids[ends % len(ids)] == ids[begins])
    long = (ends - begins >= RUN_TOKENS) | (begins == 0) | (ends == len(ids))
    found = [
        Run(int(ids[begin]), start + begin, start + end)
        for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True)
    ]
    if not found or found[0].start > start:
        found.insert(0, Run(int(ids[0]), start, start + _equal_at_front(ids)))
    stop = start + len(ids)
    if found[-1].stop < stop:
        found.append(Run(int(ids[-1]), stop - _equal_at_front(ids[::-1]), stop))
    return found


def _equal_at_front(ids: NDArray[Any]) -> int:
    """Counts equal tokens at the front of ids, whose first two words are not equal."""
    front = ids[: 4 * 8]
    different = front != front[0]
    return int(different.argmax()) if different.any() else len(front)


class Runs:
    """Counts all runs of RUN_TOKENS or more, given those of each chunk, in order."""

    def __init__(self) -> None:
        self.count = self.tokens = 0  # runs, and tokens in them
        self.longest: list[Run] = []  # at most 3
        self._open: Run | None = None  # ends where the next chunk begins

    def append(self, found: list[Run]) -> None:
        """Counts the runs of the next chunk, from `runs_in`; joins one that goes on in it."""
        for run in found:
            last = self._open
            if last is not None and last.stop == run.start and last.token == run.token:
                self._open = Run(run.token, last.start, run.stop)
            else:
                self.finish()
                self._open = run

    def finish(self) -> None:
        """Counts the run that the last chunk ends with."""
        run, self._open = self._open, None
        if run is not None and run.length >= RUN_TOKENS:
            self.count += 1
            self.tokens += run.length
            self.longest = heapq.nlargest(_LONGEST, [*self.longest, run], key=lambda r: r.length)
