"""ShuffledEpochs: every window of an epoch exactly once, in an order of the epoch's own."""

import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.permutation import NUM_ROUNDS, permute
from tokenloader.plans.philox import SHUFFLED_EPOCHS, random_bits
from tokenloader.plans.plan import BoundPlan, Plan, checked_samples, checked_seed, checked_window


@dataclass(frozen=True)
class ShuffledEpochs(Plan):
    """Every window of an epoch exactly once, in an order of the epoch's own.

    The windows of an epoch lie end to end: each starts on the last token of the one before it, so no
    target is seen twice. An epoch has `max(1, num_tokens // seq_len - 1)` windows. That leaves out
    fewer than `2 * seq_len` tokens, some before the first window and some after the last; how many
    before (the phase) is drawn anew for each epoch. So from epoch to epoch every document is cut
    elsewhere and other tokens are left out. Epochs follow each other without a gap, also inside a batch.

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
        if self.num_epochs is None:
            return
        try:
            num_epochs = operator.index(self.num_epochs)
        except TypeError:
            raise TypeError(
                f"ShuffledEpochs: num_epochs={self.num_epochs!r}; expected an integer, or None"
            ) from None
        if num_epochs < 1:
            raise ValueError(
                f"ShuffledEpochs: num_epochs={num_epochs}; expected 1 or more, or None for no end"
            )
        object.__setattr__(self, "num_epochs", num_epochs)

    def bind(self, num_tokens: int, seq_len: int) -> BoundPlan:
        """See `Plan.bind`."""
        num_tokens, seq_len = checked_window(num_tokens, seq_len)
        return _BoundShuffledEpochs(self, num_tokens, seq_len, max(1, num_tokens // seq_len - 1))


@dataclass(frozen=True)
class _BoundShuffledEpochs(BoundPlan):
    plan: ShuffledEpochs
    num_tokens: int
    seq_len: int
    num_windows: int  # in every epoch, so that a sample's epoch is a division

    @property
    def num_samples(self) -> int | None:
        return None if self.plan.num_epochs is None else self.plan.num_epochs * self.num_windows

    def window_starts(self, samples: ArrayLike) -> NDArray[np.int64]:
        index, n = checked_samples(samples), self.num_windows
        if not index.size:
            return np.empty(0, np.int64)
        if self.num_samples is not None and int(index.max()) >= self.num_samples:
            raise ValueError(
                f"sample {int(index.max())} is past the end: {self.plan.num_epochs} epochs of {n} windows"
            )
        epoch = index // np.uint64(n)
        epochs, which = np.unique(epoch, return_inverse=True)
        # NUM_ROUNDS words of key and one for the phase, two to a block of random bits.
        blocks = np.arange(NUM_ROUNDS // 2 + 1, dtype=np.uint64)[:, None]
        words = np.stack(random_bits(self.plan.seed, SHUFFLED_EPOCHS, epochs, blocks), axis=1)
        words = words.reshape(-1, epochs.size)  # uint64 [NUM_ROUNDS + 2, epochs]
        # The common case, one epoch, without a gather of keys for each sample.
        words = words[:, 0] if epochs.size == 1 else words[:, which]
        window = permute(index - epoch * np.uint64(n), n, words[:NUM_ROUNDS])
        phase = words[NUM_ROUNDS] % np.uint64(self.num_tokens - n * self.seq_len)
        starts: NDArray[np.int64] = (window * np.uint64(self.seq_len) + phase).astype(np.int64)
        return starts

    def key(self, until_sample: int) -> str:
        return f"ShuffledEpochs(seed={self.plan.seed})"
