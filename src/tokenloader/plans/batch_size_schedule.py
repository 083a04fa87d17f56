"""The history of a run's batch sizes: which samples each of its steps is made of, past or to come.

Samples are handed out in order, so that is arithmetic: the steps of a run are cut at the changes of
its batch size, and between two changes step and sample number go up together.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class History:
    """The batch sizes of a run, each from a step on.

    Args:
        changes: (first step, batch_size) in the order of the steps, from step 0. The last holds for
            all steps to come.

    Example:
        >>> history = History(((0, 32),)).changed(step=1000, batch_size=64)
        >>> history.samples_of(999), history.samples_of(1000), history.samples_of(10**6)
        (range(31968, 32000), range(32000, 32064), range(63968000, 63968064))
    """

    changes: tuple[tuple[int, int], ...]

    @property
    def batch_size(self) -> int:
        """Of the steps to come."""
        return self.changes[-1][1]

    @property
    def last_change(self) -> int:
        """The first step of that batch_size."""
        return self.changes[-1][0]

    def samples_of(self, step: int) -> range:
        """The sample numbers of a step, 0 or later."""
        first = 0
        for (since, size), (until, _) in pairwise(self.changes):
            if step < until:
                begin = first + (step - since) * size
                return range(begin, begin + size)
            first += (until - since) * size
        begin = first + (step - self.last_change) * self.batch_size
        return range(begin, begin + self.batch_size)

    def changed(self, step: int, batch_size: int) -> History:
        """What it becomes when `batch_size` holds from `step` on.

        Steps from there on were never handed out: a change among them leaves no trace.
        """
        past = tuple(change for change in self.changes if change[0] < step)
        if past and past[-1][1] == batch_size:
            return History(past)
        return History((*past, (step, batch_size)))


def samples_at(step: int, history: History, *, plan: object, end: int | None) -> NDArray[np.int64]:
    """The sample numbers of any step of a run: int64 [batch_size of that step].

    Args:
        step: 0 or later.
        history: of the run.
        plan: what the run draws from, for the error's text.
        end: no batch of the present batch_size begins with this sample or a later one (a smaller batch,
            before a change, may have); None for a plan without end.

    Raises:
        ValueError: step is negative, or past the plan's end.
        TypeError: step is no integer.
    """
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"step {step} is negative; steps are counted from 0")
    samples = history.samples_of(step)
    if samples.stop > 2**63:
        raise ValueError(f"step {step} begins with sample {samples.start}; samples end at 2**63")
    if end is not None and step >= history.last_change and samples.start >= end:
        raise ValueError(f"step {step} is past the end of {plan}")
    return np.arange(samples.start, samples.stop, dtype=np.int64)
