"""Suspicion: whether tokens look as if they were read in the wrong byte order or width.

Ids of text are Zipf-distributed, and tokenizers number frequent tokens low (bytes first, then merges by
frequency). So the bytes of an id say the less the higher their place: in Python source in the 16,000 ids of
a tokenizer trained on it, the low byte has 7.3 bits of entropy and the high byte 3.7. Read in the wrong
byte order, or from an odd offset, it is the other way round. The tests, on a sample of at least
MIN_TOKENS tokens:

- byte order: a byte of the id has over half a bit more entropy than the byte below it, and the bytes
  turned round do not.
- two tokens read as one (uint16 as uint32): the lower and the upper half of the ids have the same
  distribution: their histograms overlap in over nine tenths.
- one token read as two (uint32 as uint16): at every second position nine tenths of the ids are below 4 (the
  upper halves of ids below 2^18), at the others they are not.

Uniformly random ids, which have no order of frequency, raise none of these.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_TOKENS = 4096
_MARGIN_BITS = 0.5


def suspicion(ids: NDArray[Any]) -> str | None:
    """What is suspected of a sample of tokens, in a sentence, or None.

    Args:
        ids: [n], pieces of an even number of neighbouring tokens, each from an even position.
    """
    if len(ids) < MIN_TOKENS:
        return None
    width = ids.dtype.itemsize
    planes = [np.bincount(plane, minlength=256) / len(ids) for plane in _bytes(ids)]
    narrow, wide = f"uint{4 * width}", "int64" if width == 4 else f"uint{16 * width}"
    if width <= 4 and _every_second_is_small(ids):
        return (
            f"every second token is below 4: these look like {wide} tokens read as {ids.dtype}; "
            f"open them with the width they were written in"
        )
    if width > 1 and _halves_alike(planes):
        return (
            f"the upper half of each id is distributed like the lower one: these look like pairs of "
            f"{narrow} tokens read as {ids.dtype}; open them with the width they were written in"
        )
    bits = [_entropy_bits(plane) for plane in planes]
    if _rises(bits) and not _rises(bits[::-1]):
        return (
            f"the bytes of an id, from the lowest, have {', '.join(f'{b:.1f}' for b in bits)} bits of "
            f"entropy, where those of text fall: the byte order looks wrong, or the offset is odd; "
            f"write the tokens little-endian (numpy: array.byteswap())"
        )
    return None


def _bytes(ids: NDArray[Any]) -> NDArray[np.uint8]:
    """[itemsize, n], the lowest byte first."""
    little = np.ascontiguousarray(ids, ids.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(len(ids), -1).T


def _entropy_bits(shares: NDArray[np.float64]) -> float:
    there = shares[shares > 0]
    return abs(float((there * np.log2(there)).sum()))


def _rises(bits: list[float]) -> bool:
    return any(above > below + _MARGIN_BITS for below, above in pairwise(bits))


def _halves_alike(planes: list[NDArray[np.float64]]) -> bool:
    half = len(planes) // 2
    overlaps = [
        np.minimum(low, high).sum() for low, high in zip(planes[:half], planes[half:], strict=True)
    ]
    bits = sum(map(_entropy_bits, planes[:half]))
    return min(overlaps) > 0.9 and 1 < bits < 8 * half - _MARGIN_BITS  # neither constant nor random


def _every_second_is_small(ids: NDArray[Any]) -> bool:
    even, odd = (ids[0::2] < 4).mean(), (ids[1::2] < 4).mean()
    return bool(max(even, odd) > 0.9 and min(even, odd) < 0.5)
