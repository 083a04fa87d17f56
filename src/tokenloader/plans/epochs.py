"""Epochs: the windows of an epoch, end to end from a phase, which plans put in an order."""

import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.philox import random_bits
from tokenloader.plans.plan import checked_samples, checked_window


@dataclass(frozen=True)
class Epochs:
    """The windows of every epoch, numbered from 0 in file order. Made by `Epochs.over`.

    Each window starts on the last token of the one before it, so no target is seen twice. Fewer than
    `2 * seq_len` tokens are in no window; how many of those lie before the first is the epoch's phase.
    """

    num_tokens: int
    seq_len: int
    num_windows: int  # in every epoch, so that a sample's epoch is a division
    num_epochs: int | None  # None: without end

    @classmethod
    def over(cls, num_tokens: int, seq_len: int, num_epochs: int | None) -> "Epochs":
        """Returns the epochs of a token axis; ValueError if no window fits."""
        num_tokens, seq_len = checked_window(num_tokens, seq_len)
        return cls(num_tokens, seq_len, max(1, num_tokens // seq_len - 1), num_epochs)

    @property
    def num_samples(self) -> int | None:
        """Samples of all epochs; None: without end."""
        return None if self.num_epochs is None else self.num_epochs * self.num_windows

    def locate(self, samples: ArrayLike) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Returns the epoch of each sample, and its number within that; ValueError past the end."""
        index = checked_samples(samples)
        if self.num_samples is not None and index.size and int(index.max()) >= self.num_samples:
            raise ValueError(
                f"sample {int(index.max())} is past the end: {self.num_epochs} epochs of "
                f"{self.num_windows} windows"
            )
        epoch = index // np.uint64(self.num_windows)
        return epoch, index - epoch * np.uint64(self.num_windows)

    def starts(
        self, window: NDArray[np.uint64], phase_bits: NDArray[np.uint64] | np.uint64
    ) -> NDArray[np.int64]:
        """Returns where windows start, the phase being drawn from 64 random bits of their epoch."""
        phase = phase_bits % np.uint64(self.num_tokens - self.num_windows * self.seq_len)
        starts: NDArray[np.int64] = (window * np.uint64(self.seq_len) + phase).astype(np.int64)
        return starts


def epoch_words(seed: int, purpose: int, epoch: NDArray[np.uint64], num_words: int) -> NDArray[np.uint64]:
    """Returns random words of each sample's epoch: uint64 [num_words, n], or [num_words] for one epoch."""
    # The common case, one epoch, without sorting, and without a gather of words for each sample.
    is_one = epoch.size > 0 and epoch.min() == epoch.max()
    epochs, which = (epoch.reshape(-1)[:1], None) if is_one else np.unique(epoch, return_inverse=True)
    blocks = np.arange(-(-num_words // 2), dtype=np.uint64)[:, None]  # of random bits, two words each
    words = np.stack(random_bits(seed, purpose, epochs, blocks), axis=1).reshape(
        2 * len(blocks), epochs.size
    )
    return words[:num_words, 0] if which is None else words[:num_words, which]


def checked_num_epochs(owner: str, num_epochs: int | None) -> int | None:
    """Returns the number of epochs as a Python integer, or None; TypeError, ValueError if it is none."""
    if num_epochs is None:
        return None
    try:
        number = operator.index(num_epochs)
    except TypeError:
        raise TypeError(f"{owner}: num_epochs={num_epochs!r}; expected an integer, or None") from None
    if number < 1:
        raise ValueError(f"{owner}: num_epochs={number}; expected 1 or more, or None for no end")
    return number
