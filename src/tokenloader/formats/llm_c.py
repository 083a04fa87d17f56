"""llm.c's .bin files, also modded-nanogpt's.

256 little-endian int32, the first three magic number, version and token count; then the tokens.

Source: https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
"""

import struct
from typing import Any

import numpy as np

from tokenloader.formats.extent import Extent, flat_extent
from tokenloader.formats.format import Candidate, Format, NotThisFormatError, Writer

_HEADER_BYTES = 1024
_VERSIONS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # version and dtype by magic: gpt-2, llama-3
_MAGIC = {dtype: (magic, version) for magic, (version, dtype) in _VERSIONS.items()}
_MAX_TOKENS = 2**31 - 1


def find(candidate: Candidate, key: str, dtype: np.dtype[Any] | None) -> Extent:
    """Finds the tokens of an llm.c file."""
    path, head, size_bytes = candidate.path, candidate.head, candidate.size_bytes
    magic = int.from_bytes(head[:4], "little")
    if magic not in _VERSIONS:
        raise NotThisFormatError(f"begins with neither {' nor '.join(map(str, _VERSIONS))}")
    if size_bytes < _HEADER_BYTES:
        raise ValueError(
            f"{path}: is cut off in its llm.c header, after {size_bytes} of {_HEADER_BYTES} bytes; "
            f"fetch or write it again"
        )
    known, found = _VERSIONS[magic]
    _, version, num_tokens = struct.unpack_from("<iii", head)
    if version != known:
        raise ValueError(
            f"{path}: is an llm.c file of magic {magic} and version {version}; expected version {known}, "
            f"so fetch or write it again"
        )
    if num_tokens < 0:
        raise ValueError(
            f"{path}: its llm.c header counts {num_tokens:,} tokens; the format counts up to 2**31 - 1, "
            f"so write more of them as several files"
        )
    return flat_extent(path, "the data", found, (num_tokens,), range(_HEADER_BYTES, size_bytes), FORMAT)


def header(dtype: np.dtype[Any], num_tokens: int) -> bytes:
    """Makes the 256 integers before the tokens."""
    if dtype.name not in _MAGIC:
        raise ValueError(
            f"an llm.c .bin file holds {' or '.join(_MAGIC)} tokens, not {dtype}; say which: "
            f"--dtype {' or --dtype '.join(_MAGIC)}"
        )
    if num_tokens > _MAX_TOKENS:
        raise ValueError(
            f"an llm.c .bin file counts its tokens in an int32, so it holds at most {_MAX_TOKENS:,}, and "
            f"these are {num_tokens:,} or more; write another format, or write parts"
        )
    return struct.pack("<3i", *_MAGIC[dtype.name], num_tokens).ljust(_HEADER_BYTES, b"\0")


WRITER = Writer("llm.c", None, header)
FORMAT = Format("llm.c .bin", find, (".bin",), writer=WRITER)
