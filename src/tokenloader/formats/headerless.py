"""Headerless files, as nanoGPT and OLMo-core write: nothing but little-endian tokens, of a dtype given."""

from typing import Any

import numpy as np

from tokenloader.formats.extent import Extent
from tokenloader.formats.format import Candidate, Format, NotThisFormatError, Writer


def find(candidate: Candidate, key: str, dtype: np.dtype[Any] | None) -> Extent:
    """Takes the whole file as tokens of the dtype given."""
    path, size_bytes = candidate.path, candidate.size_bytes
    if dtype is None:
        raise NotThisFormatError("dtype= was not given")
    if size_bytes % dtype.itemsize:
        raise ValueError(
            f"{path}: {size_bytes} bytes is not a whole number of {dtype} tokens "
            f"({dtype.itemsize} bytes each); is it truncated, or is dtype= wrong?"
        )
    return Extent(path, 0, dtype, size_bytes // dtype.itemsize, FORMAT)


WRITER = Writer("raw", None, lambda dtype, num_tokens: b"")
FORMAT = Format("headerless", find, (".bin", ".npy"), tells_dtype=False, writer=WRITER)
