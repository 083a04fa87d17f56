"""Recognition: which format a file is of, and which of its bytes are its tokens.

A file is recognised by its bytes, its header is checked against its size, and its tokens are not read.
"""

from dataclasses import replace
from pathlib import Path

from numpy.typing import DTypeLike

from tokenloader.formats import (
    datatrove,
    foreign,
    headerless,
    json_side_file,
    llm_c,
    megatron,
    npy,
    safetensors,
)
from tokenloader.formats.extent import Extent, token_dtype
from tokenloader.formats.foreign import ForeignFileError
from tokenloader.formats.format import Candidate, DoubtfulFormatError, NotThisFormatError, look_at
from tokenloader.formats.identity import FileIdentity

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


class UnknownFormatError(ValueError):
    """The file is of no known format, and no dtype= was given."""


def locate(path: Path, *, key: str, dtype: DTypeLike | None) -> Extent:
    """Finds the tokens of one file; arguments and errors are those of `locate_shards`."""
    candidate = look_at(path)
    given = None if dtype is None else token_dtype(dtype, f"{path}: dtype=")
    if other := foreign.by_bytes(candidate):
        raise ForeignFileError(candidate, other, given)
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
            if given is not None and (format.tells_dtype or extent.dtype != given):
                raise ValueError(
                    f"{path}: dtype={given} was given, but the file is {format.name} and tells it: "
                    f"{extent.dtype}; dtype= is for headerless files only, leave it out"
                )
            return _identified(extent, candidate)
    if not candidate.size_bytes:
        raise ValueError(f"{path}: the file is empty; was the download or conversion completed?")
    if doubt:
        raise doubt
    if other := foreign.by_name_or_text(candidate, given):
        raise ForeignFileError(candidate, other, given)
    if given is not None:
        return _identified(headerless.find(candidate, key, given), candidate)
    raise UnknownFormatError(
        f"{path}: is of no known format. If it is headerless (nothing but tokens, as nanoGPT and OLMo-core "
        f'write), pass dtype=, as in dtype="uint16". It has {candidate.size_bytes:,} bytes and begins with '
        f"{candidate.head[:16].hex(' ')}. Tried: {'; '.join(reasons)}"
    )


def _identified(extent: Extent, candidate: Candidate) -> Extent:
    """Adds the identity of the file that holds the tokens; named was it, or the index beside it."""
    tokens = candidate if extent.path == candidate.path else look_at(extent.path)
    index = None if extent.index_path is None else FileIdentity.of(extent.index_path)
    return replace(extent, identity=tokens.identity, index_identity=index)
