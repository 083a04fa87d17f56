"""Dtype sniffing: whether tokens look as if they were read in the wrong byte order or width.

Ids of text are Zipf-distributed, and tokenizers number frequent tokens low (bytes first, then merges by
frequency). So the bytes of an id say the less the higher their place: in Python source in the 16,000 ids of
a tokenizer trained on it, the low byte has 7.3 bits of entropy and the high byte 3.7. Read in the wrong
byte order, or from an odd offset, it is the other way round. The tests, on samples of at least
MIN_TOKENS tokens together:

- byte order: a byte of the id has over half a bit more entropy than the byte below it, and the bytes
  turned round do not.
- two tokens read as one (uint16 as uint32): the lower and the upper half of the ids have the same
  distribution: their histograms overlap in over nine tenths.
- one token read as two (uint32 as uint16): at every second position nine tenths of the ids are below 4 (the
  upper halves of ids below 2^18), at the others they are not.

Uniformly random ids, which have no order of frequency, raise none of these.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.tokens.token_array import TokenArray

MIN_TOKENS = 4096
_NUM_SAMPLES, _SAMPLE_TOKENS = 64, 1 << 14
_MARGIN_BITS = 0.5


def take_sample(tokens: TokenArray) -> NDArray[Any]:
    """Copies evenly spread samples, each an even number of tokens from an even position, end to end."""
    if len(tokens) <= _NUM_SAMPLES * _SAMPLE_TOKENS:
        return np.asarray(tokens[: max(1, len(tokens) // 2 * 2)])
    starts = np.linspace(0, len(tokens) - _SAMPLE_TOKENS, _NUM_SAMPLES).astype(np.int64) // 2 * 2
    tokens.prefetch(starts, _SAMPLE_TOKENS)
    return tokens.gather(starts, _SAMPLE_TOKENS).reshape(-1)


def sniff_dtype(ids: NDArray[Any]) -> str | None:
    """Says which dtype or byte order the ids of a sample seem to have instead; None: nothing is odd."""
    if len(ids) < MIN_TOKENS:
        return None
    width = ids.dtype.itemsize
    planes = [np.bincount(plane, minlength=256) / len(ids) for plane in _bytes(ids)]
    narrow, wide = f"uint{4 * width}", "int64" if width == 4 else f"uint{16 * width}"
    written = None
    if width <= 4 and _every_second_is_small(ids):
        seen, written = "every second token is below 4: these look like", wide
    elif width > 1 and _halves_alike(planes):
        seen = "the upper half of each id is distributed like the lower one: these look like pairs of"
        written = narrow
    if written:
        remedy = f"if the file is headerless, pass --dtype {written}; else write it again"
        return f"{seen} {written} tokens read as {ids.dtype}; {remedy}"
    bits = [_entropy_bits(plane) for plane in planes]
    if _rises(bits) and not _rises(bits[::-1]):
        return (
            f"the bytes of an id, from the lowest, have {', '.join(f'{b:.1f}' for b in bits)} bits of "
            f"entropy, where those of text fall: the byte order looks wrong, or the offset is odd; "
            f"write the tokens little-endian (numpy: array.byteswap())"
        )
    return None


def _bytes(ids: NDArray[Any]) -> NDArray[np.uint8]:
    """Splits ids into their bytes: [itemsize, n], the lowest byte first."""
    little = np.ascontiguousarray(ids, ids.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(len(ids), -1).T


def _entropy_bits(shares: NDArray[np.float64]) -> float:
    there = shares[shares > 0]
    return abs(float((there * np.log2(there)).sum()))


def _rises(bits: list[float]) -> bool:
    return any(above > below + _MARGIN_BITS for below, above in pairwise(bits))


def _halves_alike(planes: list[NDArray[np.float64]]) -> bool:
    half = len(planes) // 2
    overlaps = [np.minimum(low, high).sum() for low, high in zip(planes[:half], planes[half:], strict=True)]
    bits = sum(map(_entropy_bits, planes[:half]))
    return min(overlaps) > 0.9 and 1 < bits < 8 * half - _MARGIN_BITS  # neither constant nor random


def _every_second_is_small(ids: NDArray[Any]) -> bool:
    even, odd = (ids[0::2] < 4).mean(), (ids[1::2] < 4).mean()
    return bool(max(even, odd) > 0.9 and min(even, odd) < 0.5)
