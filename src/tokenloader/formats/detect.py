"""Token files: which format a file is of, and which of its bytes are its tokens.

`locate` recognises a file by its bytes, checks its header against its size, and returns an Extent; the
tokens themselves are not read. Formats, besides those of _safetensors and _indexed:

- NumPy .npy, versions 1 to 3. https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
- llm.c .bin, also modded-nanogpt's: 256 little-endian int32, of which the first three are magic number,
  version and token count, then the tokens.
  https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
- headerless: nothing but tokens, little-endian, as nanoGPT writes; the caller tells the dtype.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tokenloader.formats.extent import (
    Candidate,
    DoubtfulFormatError,
    Extent,
    NotThisFormatError,
    flat_extent,
    look_at,
    token_dtype,
)
from tokenloader.formats.indexed import DATATROVE, MEGATRON, find_datatrove, find_megatron
from tokenloader.formats.safetensors import FORMAT as SAFETENSORS
from tokenloader.formats.safetensors import find_safetensors

NPY = "NumPy .npy"
LLM_C = "llm.c .bin"
HEADERLESS = "headerless"

_NPY_MAGIC = b"\x93NUMPY"
LLM_C_HEADER_BYTES = 1024
LLM_C_VERSIONS: dict[int, tuple[int, np.dtype[Any]]] = {  # magic: version, dtype
    20240520: (1, np.dtype("uint16")),  # gpt-2
    20240801: (7, np.dtype("uint32")),  # llama-3
}
_SHOWN_BYTES = 16
# What people have in hand when it is no token file. By their first bytes.
_OTHER_FILES = {
    b"version https://git-lfs": "a Git LFS pointer, so fetch the file itself: git lfs pull",
    b"PAR1": "a Parquet file, of text or of columns; write its tokens to a token file",
    b"PK\x03\x04": "a zip archive (.npz, or PyTorch's); load it, and write its array with np.save",
    b"\x1f\x8b": "gzip; decompress it first",
    b"\x28\xb5\x2f\xfd": "zstd; decompress it first",
    struct.pack(
        "<i", 20240522
    ): "llm.c's evaluation file, multiple-choice examples and no token axis",
    struct.pack(
        ">i", 20240520
    ): "llm.c .bin in big-endian byte order; write it on a little-endian one",
    struct.pack(
        ">i", 20240801
    ): "llm.c .bin in big-endian byte order; write it on a little-endian one",
}


class UnknownFormatError(ValueError):
    """The file is of no known format, and no dtype= was given."""


def locate(path: Path, *, key: str, dtype: DTypeLike | None) -> Extent:
    """Finds the tokens of one file.

    Args:
        path: a file of any of the formats.
        key: the tensor, in a safetensors file.
        dtype: of a headerless file; must be None for the others, which tell it themselves.

    Raises:
        OSError: the file is missing, a directory, or cannot be read.
        ValueError: it is empty, corrupt, of the wrong size, has no such key, or holds no 1-D array of
            one of TOKEN_DTYPES; or dtype is missing, or given for a file that tells it.
    """
    candidate = look_at(path)
    given = None if dtype is None else token_dtype(dtype, f"{path}: dtype=")
    reasons: list[str] = []
    doubt: DoubtfulFormatError | None = None
    for format, find in _FINDERS.items():
        try:
            extent = find(candidate, key)
        except NotThisFormatError as error:
            reasons.append(f"{format} ({error})")
        except DoubtfulFormatError as error:
            doubt = doubt or error
        else:
            return extent if given is None else _with_dtype(extent, given)
    if doubt and (given is None or path.suffix in (".safetensors", ".ds")):
        raise doubt
    if given is None:
        raise UnknownFormatError(_what_was_seen(candidate, reasons))
    return _headerless(candidate, given)


def _with_dtype(extent: Extent, given: np.dtype[Any]) -> Extent:
    # A .ds tells only how wide its tokens are; one without an index beside it needs dtype=.
    if extent.format == DATATROVE and given.itemsize == extent.dtype.itemsize:
        return replace(extent, dtype=given)
    raise ValueError(
        f"{extent.path}: dtype={given} was given, but the file is {extent.format} and tells it: "
        f"{extent.dtype}; dtype= is for headerless files only, leave it out"
    )


def _what_was_seen(candidate: Candidate, reasons: list[str]) -> str:
    path, head = candidate.path, candidate.head
    for magic, what in _OTHER_FILES.items():
        if head.startswith(magic):
            return f"{path}: is {what}"
    return (
        f"{path}: of no known format; it has {candidate.size_bytes:,} bytes and begins with "
        f"{head[:_SHOWN_BYTES].hex(' ')}. Tried: {'; '.join(reasons)}. If it is headerless (nothing but "
        f"tokens, as nanoGPT and OLMo-core write), say what a token is: "
        f'open_tokens("{path}", dtype="uint16"), or on the command line --dtype uint16 (convert: '
        f"--source-dtype uint16)"
    )


def _headerless(candidate: Candidate, dtype: np.dtype[Any]) -> Extent:
    path, size_bytes = candidate.path, candidate.size_bytes
    if size_bytes % dtype.itemsize:
        raise ValueError(
            f"{path}: {size_bytes} bytes is not a whole number of {dtype} tokens "
            f"({dtype.itemsize} bytes each); is it truncated, or is dtype= wrong?"
        )
    return Extent(path, 0, dtype, size_bytes // dtype.itemsize, HEADERLESS)


def _find_npy(candidate: Candidate, key: str) -> Extent:
    path = candidate.path
    if not candidate.head.startswith(_NPY_MAGIC):
        raise NotThisFormatError(f"does not begin with {_NPY_MAGIC.hex(' ')}")
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            elif version in (
                (2, 0),
                (3, 0),
            ):  # 3.0 is 2.0 with UTF-8 field names; tokens have no fields
                shape, _, dtype = np.lib.format.read_array_header_2_0(file)
            else:
                raise ValueError(f"format version {version}; known are 1.0, 2.0 and 3.0")
        except Exception as error:
            raise ValueError(
                f"{path}: corrupt .npy header ({error}); fetch or write it again"
            ) from error
        offset_bytes = file.tell()
    data_bytes = candidate.size_bytes - offset_bytes
    return flat_extent(path, "the array", dtype, shape, offset_bytes, data_bytes, NPY)


def _find_llm_c(candidate: Candidate, key: str) -> Extent:
    path, head, size_bytes = candidate.path, candidate.head, candidate.size_bytes
    magic = int.from_bytes(head[:4], "little")
    if magic not in LLM_C_VERSIONS:
        raise NotThisFormatError(f"begins with neither {' nor '.join(map(str, LLM_C_VERSIONS))}")
    if size_bytes < LLM_C_HEADER_BYTES:
        raise ValueError(
            f"{path}: is cut off in its llm.c header, after {size_bytes} of {LLM_C_HEADER_BYTES} bytes; "
            f"fetch or write it again"
        )
    known, dtype = LLM_C_VERSIONS[magic]
    _, version, num_tokens = struct.unpack_from("<iii", head)
    if version != known:
        raise ValueError(
            f"{path}: is an llm.c file of magic {magic} and version {version}; known is version {known}"
        )
    if num_tokens < 0:
        raise ValueError(
            f"{path}: its llm.c header counts {num_tokens:,} tokens; the format counts up to 2**31 - 1, "
            f"so write more of them as several files"
        )
    data_bytes = size_bytes - LLM_C_HEADER_BYTES
    return flat_extent(
        path, "the data", dtype, (num_tokens,), LLM_C_HEADER_BYTES, data_bytes, LLM_C
    )


# In this order: an index that fits says more than bytes that headerless tokens may begin with.
_FINDERS = {
    NPY: _find_npy,
    LLM_C: _find_llm_c,
    MEGATRON: find_megatron,
    DATATROVE: find_datatrove,
    SAFETENSORS: find_safetensors,
}
