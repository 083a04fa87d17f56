"""Recognition: which format a file is of, and which of its bytes are its tokens.

A file is recognised by its bytes, its header is checked against its size, and its tokens are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tokenloader.formats import (
    datatrove,
    headerless,
    json_side_file,
    llm_c,
    megatron,
    npy,
    safetensors,
)
from tokenloader.formats.extent import Extent, token_dtype
from tokenloader.formats.format import Candidate, DoubtfulFormatError, NotThisFormatError, look_at

FORMATS = (
    safetensors.FORMAT,
    npy.FORMAT,
    llm_c.FORMAT,
    megatron.FORMAT,
    datatrove.FORMAT,
    json_side_file.FORMAT,
    headerless.FORMAT,  # last: any file may be headerless
)
WRITERS = tuple(format.writer for format in FORMATS if format.writer)

_SHOWN_BYTES = 16


class UnknownFormatError(ValueError):
    """The file is of no known format, and no dtype= was given."""


def locate(path: Path, *, key: str, dtype: DTypeLike | None) -> Extent:
    """Finds the tokens of one file.

    Args:
        path: a file of any of the formats.
        key: name of the tensor in a safetensors file.
        dtype: numpy dtype of one token in a headerless file; None for a file that tells it.

    Raises:
        OSError: the file is missing, a directory, or cannot be read.
        ValueError: it is empty, corrupt, of the wrong size, has no such key, or holds no 1-D array of
            one of TOKEN_DTYPES; or dtype is missing, or given for a file that tells it.
    """
    candidate = look_at(path)
    given = None if dtype is None else token_dtype(dtype, f"{path}: dtype=")
    reasons: list[str] = []
    doubt: DoubtfulFormatError | None = None
    for format in FORMATS[:-1]:
        try:
            extent = format.find(candidate, key, given)
        except NotThisFormatError as error:
            reasons.append(f"{format.name} ({error})")
        except DoubtfulFormatError as error:
            if given is None or path.suffix in format.suffixes:
                doubt = doubt or error
        else:
            _check_given(extent, given)
            return extent
    if doubt:
        raise doubt
    try:
        return headerless.find(candidate, key, given)
    except NotThisFormatError:
        raise UnknownFormatError(_what_was_seen(candidate, reasons)) from None


def _check_given(extent: Extent, given: np.dtype[Any] | None) -> None:
    if given is not None and (extent.format.tells_dtype or extent.dtype != given):
        raise ValueError(
            f"{extent.path}: dtype={given} was given, but the file is {extent.format.name} and tells it: "
            f"{extent.dtype}; dtype= is for headerless files only, leave it out"
        )


def _what_was_seen(candidate: Candidate, reasons: list[str]) -> str:
    path = candidate.path
    if what := headerless.other_file(candidate):
        return f"{path}: is {what}"
    return (
        f"{path}: is of no known format; it has {candidate.size_bytes:,} bytes and begins with "
        f"{candidate.head[:_SHOWN_BYTES].hex(' ')}. Tried: {'; '.join(reasons)}. If it is headerless "
        f"(nothing but tokens, as nanoGPT and OLMo-core write), say what a token is: "
        f'open_tokens("{path}", dtype="uint16"), or on the command line --dtype uint16 (convert: '
        f"--source-dtype uint16)"
    )
