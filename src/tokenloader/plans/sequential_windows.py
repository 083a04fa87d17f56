"""SequentialWindows: one pass in file order, every target once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.plan import BoundPlan, Plan, checked_samples, checked_window

_READ_TOKENS = 2**18  # that are read at a time: 512 KiB of uint16


@dataclass(frozen=True)
class SequentialWindows(Plan):
    """One pass in file order: every token but the first is a target exactly once.

    For evaluation: a mean over `Batch.loss_mask` is the exact mean over the data, and all batches have
    one shape. The last window is moved back to end with the data; `Batch.loss_mask` hides the targets
    that this repeats, and the rows that fill the last batch.

    Example:
        >>> plan = SequentialWindows().bind(num_tokens=25, seq_len=10)
        >>> plan.window_starts(range(3)), plan.valid_targets(range(3))
        (array([ 0, 10, 14]), array([10, 10,  4]))
    """

    __module__ = "tokenloader"

    def bind(self, num_tokens: int, seq_len: int) -> BoundPlan:
        """See `Plan.bind`."""
        return _BoundSequentialWindows(*checked_window(num_tokens, seq_len))


@dataclass(frozen=True)
class _BoundSequentialWindows(BoundPlan):
    num_tokens: int
    seq_len: int

    @property
    def num_samples(self) -> int:
        return -(-(self.num_tokens - 1) // self.seq_len)

    def window_starts(self, samples: ArrayLike) -> NDArray[np.int64]:
        # Samples past the end repeat the last window.
        index = checked_samples(samples).astype(np.int64)
        starts: NDArray[np.int64] = np.minimum(index, self.num_samples - 1) * self.seq_len
        return np.minimum(starts, self.num_tokens - 1 - self.seq_len)

    def valid_targets(self, samples: ArrayLike) -> NDArray[np.int64]:
        index = checked_samples(samples).astype(np.int64)
        left: NDArray[np.int64] = self.num_tokens - 1 - np.minimum(index, self.num_samples) * self.seq_len
        return left.clip(0, self.seq_len)

    def reads(self, samples: ArrayLike) -> NDArray[np.int64]:
        starts = self.window_starts(samples)
        size = max(1, _READ_TOKENS // self.seq_len) * self.seq_len
        begin = starts // size * size
        stop = np.maximum(begin + size, starts + self.seq_len) + 1  # the last window may end in the next
        return np.stack([begin, np.minimum(stop, self.num_tokens)], axis=1)

    def key(self, until_sample: int) -> str:
        return "SequentialWindows()"
