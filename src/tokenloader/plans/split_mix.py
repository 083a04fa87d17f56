"""SplitMix64: random words as a pure function of a seed and an index, a fifth of the cost of Philox.

Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014); the
multipliers are variant 13 of Stafford, "Better Bit Mixing" (2011).
"""

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


def split_mix(seed: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the word that SplitMix64 with a seed gives at an index, from 0 on: uint64, broadcast."""
    z = seed + (index + np.uint64(1)) * _STEP
    z ^= z >> _30
    z *= _MULTIPLIERS[0]
    z ^= z >> _27
    z *= _MULTIPLIERS[1]
    z ^= z >> _31
    return z
