"""Plans: which window of the token axis each sample of a run is.

A plan is a value. `plan.starts(samples, num_tokens=..., seq_len=...)` depends on the plan and the
sample numbers and on nothing else: no file, no state, no jax. So any process can compute any part
of a run, in any order, and a resumed run goes on with the very samples it would have had.

A window is `seq_len + 1` consecutive tokens and makes `seq_len` inputs and `seq_len` targets.
Sample `i` of a run is row `i % batch_size` of step `i // batch_size`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.permutation import NUM_ROUNDS, permute
from tokenloader.plans.philox import random_bits

# Purposes of random_bits: streams that must not share a counter.
_WINDOWS, _EPOCHS = 0, 1


class Plan(Protocol):
    """What TokenLoader needs of a plan; your own class may be one.

    Two methods may be added. `num_samples(*, num_tokens, seq_len) -> int | None` says after how many
    samples the plan ends; without it, or with None, it never does. `new_targets(samples, *,
    num_tokens, seq_len) -> int64 [n]` says how many targets at the end of each window no earlier
    window had, for a plan whose windows overlap: the loader hides the others in `Batch.loss_mask`
    and pads the last batch with samples that have no new target.

    `repr(plan)` names the plan in a saved state, so it must tell apart plans that differ.
    """

    def starts(self, samples: ArrayLike, *, num_tokens: int, seq_len: int) -> NDArray[np.int64]:
        """The first token of each sample's window: int64 [n], 0 <= start <= num_tokens - seq_len - 1.

        Args:
            samples: int64 [n], global sample numbers, in any order.
            num_tokens: length of the token axis.
            seq_len: inputs in a window; the window has one token more.
        """
        ...


@dataclass(frozen=True)
class RandomWindows:
    """Windows drawn uniformly with replacement, without end.

    Every start from 0 to num_tokens - seq_len - 1 is equally likely (to within num_tokens / 2**64).

    Args:
        seed: 0 <= seed < 2**64.

    Example:
        >>> RandomWindows(seed=0).starts([0, 1, 10**12], num_tokens=10**10, seq_len=1024)
        array([...])
    """

    seed: int

    def __post_init__(self) -> None:
        _check_seed(self)

    def starts(self, samples: ArrayLike, *, num_tokens: int, seq_len: int) -> NDArray[np.int64]:
        """See `Plan.starts`."""
        num_tokens, seq_len = check_one_window_fits(num_tokens, seq_len)
        index = checked_samples(samples)
        bits, _ = random_bits(self.seed, _WINDOWS, index)
        return (bits % np.uint64(num_tokens - seq_len)).astype(np.int64)


@dataclass(frozen=True)
class ShuffledEpochs:
    """Every window of an epoch exactly once, in an order of the epoch's own.

    The windows of an epoch lie end to end: each starts on the last token of the one before it, so no
    target is seen twice. An epoch has `max(1, num_tokens // seq_len - 1)` windows. That leaves out
    fewer than `2 * seq_len` tokens, some before the first window and some after the last; how many
    before (the phase) is drawn anew for each epoch. So from epoch to epoch every document is cut
    elsewhere and other tokens are left out. Epochs follow each other without a gap, also inside a batch.

    Args:
        seed: 0 <= seed < 2**64. Order and phase are hashes of (seed, epoch).
        num_epochs: where the plan ends; None: never. It takes no part in the order, so a run may be
            resumed with more. The last batch is left out where it would not be full.

    Example:
        >>> plan = ShuffledEpochs(seed=0)
        >>> sorted(plan.starts(range(9), num_tokens=100, seq_len=10).tolist())
        [0, 10, 20, 30, 40, 50, 60, 70, 80]
    """

    seed: int
    num_epochs: int | None = None

    def __post_init__(self) -> None:
        _check_seed(self)
        if self.num_epochs is None:
            return
        try:
            num_epochs = operator.index(self.num_epochs)
        except TypeError:
            raise TypeError(
                f"ShuffledEpochs: num_epochs={self.num_epochs!r}; it must be an integer, or None"
            ) from None
        if num_epochs < 1:
            raise ValueError(
                f"ShuffledEpochs: num_epochs={num_epochs}; it must be 1 or more, or None for no end"
            )
        object.__setattr__(self, "num_epochs", num_epochs)

    def num_samples(self, *, num_tokens: int, seq_len: int) -> int | None:
        """Windows in all epochs together, or None without num_epochs."""
        if self.num_epochs is None:
            return None
        return self.num_epochs * self.windows_per_epoch(num_tokens=num_tokens, seq_len=seq_len)

    def windows_per_epoch(self, *, num_tokens: int, seq_len: int) -> int:
        """The same for every epoch, so that sample i is of epoch i // windows_per_epoch."""
        num_tokens, seq_len = check_one_window_fits(num_tokens, seq_len)
        return max(1, num_tokens // seq_len - 1)

    def starts(self, samples: ArrayLike, *, num_tokens: int, seq_len: int) -> NDArray[np.int64]:
        """See `Plan.starts`."""
        num_tokens, seq_len = check_one_window_fits(num_tokens, seq_len)
        index = checked_samples(samples)
        n = self.windows_per_epoch(num_tokens=num_tokens, seq_len=seq_len)
        epoch = index // np.uint64(n)
        epochs, which = np.unique(epoch, return_inverse=True)
        if self.num_epochs is not None and (epochs >= self.num_epochs).any():
            raise ValueError(
                f"sample {int(index.max())} is past the end: {self.num_epochs} epochs of {n} windows"
            )
        if not epochs.size:
            return np.empty(0, np.int64)
        # NUM_ROUNDS words of key and one for the phase, two to a block.
        blocks = np.arange(NUM_ROUNDS // 2 + 1, dtype=np.uint64)[:, None]
        words = np.stack(random_bits(self.seed, _EPOCHS, epochs, blocks), axis=1)
        words = words.reshape(-1, epochs.size)  # uint64 [NUM_ROUNDS + 2, epochs]
        # The common case, one epoch, without a gather of keys for each sample.
        words = words[:, 0] if epochs.size == 1 else words[:, which]
        window = permute(index - epoch * np.uint64(n), n, words[:NUM_ROUNDS])
        num_phases = num_tokens - n * seq_len
        phase = words[NUM_ROUNDS] % np.uint64(num_phases)
        starts: NDArray[np.int64] = (window * np.uint64(seq_len) + phase).astype(np.int64)
        return starts

    def sequence_name(self) -> str:
        """The plan's name in a saved state: num_epochs may change during a run."""
        if type(self) is ShuffledEpochs:
            return f"ShuffledEpochs(seed={self.seed})"
        return repr(replace(self, num_epochs=None))  # a subclass may order otherwise


@dataclass(frozen=True)
class SequentialWindows:
    """One pass in file order: every token but the first is a target exactly once.

    For evaluation: a mean over `Batch.loss_mask` is the exact mean over the data, and no batch has
    another shape than the rest. The last window is moved back to end with the data; the targets
    that this repeats, and the rows that fill the last batch, are hidden by `Batch.loss_mask`.

    Example:
        >>> SequentialWindows().starts(range(3), num_tokens=25, seq_len=10)
        array([ 0, 10, 14])
        >>> SequentialWindows().new_targets(range(3), num_tokens=25, seq_len=10)
        array([10, 10,  4])
    """

    def num_samples(self, *, num_tokens: int, seq_len: int) -> int:
        """Windows in the pass."""
        num_tokens, seq_len = check_one_window_fits(num_tokens, seq_len)
        return -(-(num_tokens - 1) // seq_len)

    def starts(self, samples: ArrayLike, *, num_tokens: int, seq_len: int) -> NDArray[np.int64]:
        """See `Plan.starts`. Samples past the end repeat the last window."""
        num_tokens, seq_len = check_one_window_fits(num_tokens, seq_len)
        index = checked_samples(samples).astype(np.int64)
        last = self.num_samples(num_tokens=num_tokens, seq_len=seq_len) - 1
        starts: NDArray[np.int64] = np.minimum(index, last) * seq_len
        return np.minimum(starts, num_tokens - 1 - seq_len)

    def new_targets(
        self, samples: ArrayLike, *, num_tokens: int, seq_len: int
    ) -> NDArray[np.int64]:
        """How many targets at the end of each window count: int64 [n], 0 for samples past the end."""
        num_tokens, seq_len = check_one_window_fits(num_tokens, seq_len)
        index = checked_samples(samples).astype(np.int64)
        last = self.num_samples(num_tokens=num_tokens, seq_len=seq_len)
        left: NDArray[np.int64] = num_tokens - 1 - np.minimum(index, last) * seq_len
        return left.clip(0, seq_len)


def check_is_plan(plan: object) -> None:
    """TypeError unless it has a plan's method; the class of a plan is none."""
    if isinstance(plan, type) or not callable(getattr(plan, "starts", None)):
        raise TypeError(
            f"plan is {plan!r}; needed is an instance of a plan, with a starts method, for "
            f"example ShuffledEpochs(seed=0)"
        )


def end_sample(plan: Plan, num_tokens: int, seq_len: int, batch_size: int) -> int | None:
    """No batch begins with this sample or a later one; None for a plan without end.

    Raises:
        ValueError: the plan ends before its first full batch.
    """
    if not hasattr(plan, "num_samples"):
        return None
    count: int | None = plan.num_samples(num_tokens=num_tokens, seq_len=seq_len)
    if count is None or hasattr(plan, "new_targets"):
        return count
    if count < batch_size:
        raise ValueError(
            f"{plan} ends after {count} windows of these {num_tokens:,} tokens, before "
            f"the first batch of batch_size={batch_size} is full; use a smaller batch_size"
        )
    return count - batch_size + 1


def plan_name(plan: Plan) -> str:
    """What names a plan in a saved state: all that decides the order of its samples.

    Raises:
        TypeError: the plan's repr is Python's own, which does not tell it from others.
    """
    if hasattr(plan, "sequence_name"):
        name: str = plan.sequence_name()
        return name
    if type(plan).__repr__ is object.__repr__:
        raise TypeError(
            f"plan {type(plan).__name__} has no __repr__ of its own, by which a saved state could "
            f"tell it from others; give it one, or make it a dataclass"
        )
    return repr(plan)


def check_one_window_fits(num_tokens: int, seq_len: int) -> tuple[int, int]:
    """The two as plain integers (numpy's wrap around); ValueError unless the tokens hold a window."""
    num_tokens, seq_len = operator.index(num_tokens), operator.index(seq_len)
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}; needed is 1 or more")
    if num_tokens < seq_len + 1:
        raise ValueError(
            f"{num_tokens:,} tokens are fewer than one window of seq_len + 1 = {seq_len + 1:,}; "
            f"use a seq_len of at most {num_tokens - 1:,}, or more data"
        )
    return num_tokens, seq_len


def _check_seed(plan: RandomWindows | ShuffledEpochs) -> None:
    name = type(plan).__name__
    try:
        seed = operator.index(plan.seed)
    except TypeError:
        raise TypeError(
            f"{name}: seed={plan.seed!r} is of type {type(plan.seed).__name__}; it must be an integer"
        ) from None
    if not 0 <= seed < 2**64:
        raise ValueError(f"{name}: seed={seed} is not in [0, 2**64)")
    object.__setattr__(plan, "seed", seed)  # a plain int, so that the repr is the same for numpy's


def checked_samples(samples: ArrayLike) -> NDArray[np.uint64]:
    """Sample numbers as uint64 [n]; TypeError or ValueError unless they are integers of 0 or more."""
    index = np.asarray(samples)
    if not index.size:
        return np.empty(0, np.uint64)
    if index.dtype.kind not in "iu":
        raise TypeError(f"samples are of dtype {index.dtype}; needed are integers")
    if index.min() < 0:
        raise ValueError(f"sample {index.min()} is negative; samples are counted from 0")
    return index.astype(np.uint64)
