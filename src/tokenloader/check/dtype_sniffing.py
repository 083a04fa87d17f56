"""Dtype sniffing: whether tokens look as if they were read in the wrong byte order or width.

Ids of text are Zipf-distributed, and tokenizers number frequent tokens low (bytes first, then merges by
frequency). So the bytes of an id say the less the higher their place: in Python source in the 16,000 ids of
a tokenizer trained on it, the low byte has 7.3 bits of entropy and the high byte 3.7. Read in the wrong
byte order, or from an odd offset, it is the other way round. The tests, on samples of at least
MIN_TOKENS tokens together:

- byte order: a byte of the id has over half a bit more entropy than the byte below it, and the bytes
  turned round do not.
- several tokens read as one (uint16 as uint32): the lower and the upper half of the ids have the same
  distribution: their histograms overlap in over nine tenths.
- one token read as several (uint32 as uint16, int64 as int32): nine tenths of the ids are below 4 at the
  positions of the token's upper half (as those of ids below 2^18 are), and not at the others.

Uniformly random ids, which have no order of frequency, raise none of these.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.check.samples import NUM_SAMPLES, file_bounds, take_sample
from tokenloader.tokens.token_array import TokenArray

MIN_TOKENS = 4096
_MARGIN_BITS = 0.5


def sniff_files(tokens: TokenArray, sample: NDArray[Any]) -> str | None:
    """Says what `sniff_dtype` says of each file, whose names it tells, or else of a sample of all."""
    bounds = file_bounds(tokens)
    if (num_files := len(bounds) - 1) == 1:
        return sniff_dtype(sample)
    num_samples, suspected = max(2, NUM_SAMPLES // num_files), []
    for begin, end, extent in zip(bounds[:-1].tolist(), bounds[1:].tolist(), tokens.extents, strict=True):
        if found := sniff_dtype(take_sample(tokens.view(begin, end), num_samples)):
            suspected.append(f"{extent.path}: {found}")
    if not suspected:
        return sniff_dtype(sample)
    return f"{suspected[0]} ({len(suspected):,} of {num_files:,} files look wrong)"


def sniff_dtype(ids: NDArray[Any]) -> str | None:
    """Says which dtype or byte order the ids of a sample seem to have instead; None: nothing is odd."""
    if len(ids) < MIN_TOKENS:
        return None
    width = ids.dtype.itemsize
    planes = [np.bincount(plane, minlength=256) / len(ids) for plane in _bytes(ids)]
    if written := _wider(ids):
        seen = "every second token is below 4: these look like"
        if (together := np.dtype(written).itemsize // width) > 2:
            seen = f"of every {together} tokens {together // 2} are below 4: these look like"
    elif written := _narrower(planes):
        seen = "the upper half of each id is distributed like the lower one: these look like"
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


def _narrower(planes: list[NDArray[np.float64]]) -> str | None:
    """The dtype of tokens of which an id, whose bytes are distributed as the planes, is made of several."""
    width = len(planes)
    while width > 1 and _halves_alike(planes[:width]):
        width //= 2
    return f"uint{8 * width}" if width < len(planes) else None


def _wider(ids: NDArray[Any]) -> str | None:
    """The dtype of tokens of which several ids in a row, the upper ones nearly all below 4, make one."""
    for written in ("int64", "uint32"):
        together = np.dtype(written).itemsize // ids.itemsize
        if together > 1:
            groups = ids[: len(ids) // together * together].reshape(-1, 2, together // 2)
            upper, lower = sorted((groups < 4).mean(axis=0), key=min, reverse=True)
            if min(upper) > 0.9 and min(lower) < 0.5:
                return written
    return None
