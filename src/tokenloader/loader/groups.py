"""Groups: consecutive small steps that share one gather, one transfer and one launch of the transform.

In a group of two a batch of 32x1024 takes two thirds of the time that it takes alone, in a group of four
under half. Past 256 KiB the bytes themselves are what costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.loader.steps import Step

_GROUP_BYTES = 256 << 10


class Group(NamedTuple):
    """Consecutive steps in one array, as many in each group of a run: the last repeats its last step."""

    step: int  # number of the first step
    num_steps: int  # steps without the repeated ones
    window_starts: NDArray[np.int64]  # [group size, n]
    valid_targets: NDArray[np.int32] | None  # [group size, n, 1]

    @property
    def last_step(self) -> int:
        """Number of the last step that is not repeated."""
        return self.step + self.num_steps - 1

    def split(self) -> Iterator[Group]:
        """Yields each step as a group of its own."""
        for i in range(self.num_steps):
            valid = None if self.valid_targets is None else self.valid_targets[i, :, 0]
            step = Step(self.step + i, self.window_starts[i], valid)
            yield _as_group([step], len(self.window_starts))


def group_size(batch_bytes: int, prefetch: int) -> int:
    """Returns how many steps to group, of batch_bytes in this process.

    While one group is handed out others wait, together prefetch + 2 batches at most.
    """
    return max(1, min(1 + prefetch // 2, _GROUP_BYTES // batch_bytes))


def group_steps(steps: Iterator[Step], size: int) -> Iterator[Group]:
    """Yields the steps in groups of `size`."""
    while some := list(islice(steps, size)):
        yield _as_group(some, size)


def _as_group(steps: Sequence[Step], size: int) -> Group:
    filled = [*steps, *[steps[-1]] * (size - len(steps))]
    starts = np.concatenate([step.window_starts for step in filled]).reshape(size, -1)
    counts = [step.valid_targets for step in filled if step.valid_targets is not None]
    valid = np.concatenate(counts).reshape(size, -1, 1) if counts else None
    return Group(steps[0].number, len(steps), starts, valid)
