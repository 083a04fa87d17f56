"""ShuffledEpochs: every window of an epoch exactly once, in an order of the epoch's own."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.epochs import Epochs, checked_num_epochs, epoch_words
from tokenloader.plans.permutation import NUM_ROUNDS, permute
from tokenloader.plans.philox import SHUFFLED_EPOCHS
from tokenloader.plans.plan import BoundPlan, Plan, checked_seed


@dataclass(frozen=True)
class ShuffledEpochs(Plan):
    """Every window of an epoch exactly once, in an order of the epoch's own.

    The windows of an epoch lie end to end: each starts on the last token of the one before it, so no
    target is seen twice. An epoch has `max(1, num_tokens // seq_len - 1)` windows. That leaves out
    fewer than `2 * seq_len` tokens, some before the first window and some after the last; how many
    before (the phase) is drawn anew for each epoch. So from epoch to epoch every document is cut
    elsewhere and other tokens are left out. Epochs follow each other without a gap, also inside a batch.
    Each window is a read of its own; on a disk with few reads a second, see `ShuffledBlocks`.

    Args:
        seed: 0 <= seed < 2**64. Order and phase are hashes of (seed, epoch).
        num_epochs: epochs after which the plan ends; None: it never does. The order does not depend on
            it, so a run may be resumed with more. A last batch that would not be full is left out.

    Example:
        >>> plan = ShuffledEpochs(seed=0).bind(num_tokens=100, seq_len=10)
        >>> sorted(plan.window_starts(range(9)).tolist())
        [0, 10, 20, 30, 40, 50, 60, 70, 80]
    """

    __module__ = "tokenloader"
    seed: int
    num_epochs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_seed("ShuffledEpochs", self.seed))
        object.__setattr__(self, "num_epochs", checked_num_epochs("ShuffledEpochs", self.num_epochs))

    def bind(self, num_tokens: int, seq_len: int) -> BoundPlan:
        """See `Plan.bind`."""
        return _BoundShuffledEpochs(self, Epochs.over(num_tokens, seq_len, self.num_epochs))


@dataclass(frozen=True)
class _BoundShuffledEpochs(BoundPlan):
    plan: ShuffledEpochs
    epochs: Epochs

    @property
    def num_samples(self) -> int | None:
        return self.epochs.num_samples

    def window_starts(self, samples: ArrayLike) -> NDArray[np.int64]:
        epoch, index = self.epochs.locate(samples)
        words = epoch_words(self.plan.seed, SHUFFLED_EPOCHS, epoch, NUM_ROUNDS + 1)
        window = permute(index, self.epochs.num_windows, words[:NUM_ROUNDS])
        return self.epochs.starts(window, words[NUM_ROUNDS])

    def key(self, until_sample: int) -> str:
        return f"ShuffledEpochs(seed={self.plan.seed})"
