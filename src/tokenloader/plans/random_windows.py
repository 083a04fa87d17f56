"""RandomWindows: windows drawn uniformly, with replacement, without end."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.philox import RANDOM_WINDOWS, random_bits
from tokenloader.plans.plan import BoundPlan, Plan, checked_samples, checked_seed, checked_window


@dataclass(frozen=True)
class RandomWindows(Plan):
    """Windows drawn uniformly with replacement, without end.

    Every start from 0 to num_tokens - seq_len - 1 is equally likely (to within num_tokens / 2**64), for a
    seed of 0 <= seed < 2**64.

    Example:
        >>> plan = RandomWindows(seed=0).bind(num_tokens=10**10, seq_len=1024)
        >>> plan.window_starts([0, 1, 10**12])
        array([...])
    """

    __module__ = "tokenloader"
    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_seed("RandomWindows", self.seed))

    def bind(self, num_tokens: int, seq_len: int) -> BoundPlan:
        """See `Plan.bind`."""
        num_tokens, seq_len = checked_window(num_tokens, seq_len)
        return _BoundRandomWindows(self, num_tokens - seq_len)


@dataclass(frozen=True)
class _BoundRandomWindows(BoundPlan):
    plan: RandomWindows
    num_starts: int
    num_samples = None

    def window_starts(self, samples: ArrayLike) -> NDArray[np.int64]:
        bits, _ = random_bits(self.plan.seed, RANDOM_WINDOWS, checked_samples(samples))
        return (bits % np.uint64(self.num_starts)).astype(np.int64)

    def key(self, until_sample: int) -> str:
        return repr(self.plan)
