"""Headerless files, as nanoGPT and OLMo-core write: nothing but little-endian tokens, of a dtype given."""

import struct
from typing import Any

import numpy as np

from tokenloader.formats.extent import Extent
from tokenloader.formats.format import Candidate, Format, NotThisFormatError, Writer

_BIG_ENDIAN_LLM_C = "llm.c .bin in big-endian byte order; write it on a little-endian one"
# What people have in hand when it is no token file, by its first bytes.
_OTHER_FILES = {
    b"version https://git-lfs": "a Git LFS pointer, so fetch the file itself: git lfs pull",
    b"PAR1": "a Parquet file, of text or of columns; write its tokens to a token file",
    b"PK\x03\x04": "a zip archive (.npz, or PyTorch's); load it, and write its array with np.save",
    b"\x1f\x8b": "gzip; decompress it first",
    b"\x28\xb5\x2f\xfd": "zstd; decompress it first",
    struct.pack("<i", 20240522): "llm.c's evaluation file, multiple-choice examples and no token axis",
    struct.pack(">i", 20240520): _BIG_ENDIAN_LLM_C,
    struct.pack(">i", 20240801): _BIG_ENDIAN_LLM_C,
}


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


def other_file(candidate: Candidate) -> str | None:
    """Says what a file is that is known by its first bytes to hold no token axis, and what to do."""
    return next((what for magic, what in _OTHER_FILES.items() if candidate.head.startswith(magic)), None)


WRITER = Writer("raw", None, lambda dtype, num_tokens: b"")
FORMAT = Format("headerless", find, (".bin", ".npy"), tells_dtype=False, writer=WRITER)
