"""Philox4x32-10: random bits as a pure function of a key and a counter.

Nothing is drawn in sequence, so the bits of sample 10**12 cost what those of sample 0 cost, and any
process can compute them alone.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). The
known-answer tests are those of the authors' Random123 library.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

# Purposes of random_bits: streams that must not share a counter.
RANDOM_WINDOWS, SHUFFLED_EPOCHS, SHUFFLED_BLOCKS = 0, 1, 2


def philox4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns the four output words of Philox4x32-10, each a 32-bit value held in uint64.

    Args:
        counter: four words below 2**32, arrays or scalars that broadcast against each other.
        key: two words below 2**32.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _32) ^ c1 ^ np.uint64(k0), product1 & _LOW
        c2, c3 = (product0 >> _32) ^ c3 ^ np.uint64(k1), product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(
    seed: int, purpose: int, index: NDArray[np.uint64], block: ArrayLike = 0
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns two independent 64-bit words for each index.

    Args:
        seed: the key, 0 <= seed < 2**64.
        purpose: below 2**32. Streams of different purposes never share a counter.
        index: uint64, any shape: the sample or the epoch.
        block: below 2**32, broadcasts against index: more words for the same index.
    """
    counter = (index & _LOW, index >> _32, block, purpose)
    w0, w1, w2, w3 = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return w0 | (w1 << _32), w2 | (w3 << _32)
