"""Safetensors files: their tensors, and the files that an index names.

A file is a u64 little-endian header length N, a JSON header, and data from byte 8 + N. It is validated by
the safetensors library; the header is then read once more for the offsets, which the library does not tell.
An index file, NAME.safetensors.index.json, is {"weight_map": {tensor: file}}.

Sources: https://github.com/safetensors/safetensors#format; huggingface_hub's serialization module, which
writes the index.
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tokenloader.formats.extent import Extent, flat_extent
from tokenloader.formats.format import (
    Candidate,
    DoubtfulFormatError,
    Format,
    NotThisFormatError,
    Writer,
    read_bytes,
)
from tokenloader.formats.quoting import listed, shown

_DTYPES = {"U8": "uint8", "U16": "uint16", "U32": "uint32", "I32": "int32", "I64": "int64"}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_BYTES = 248  # as written: room for any count, and after the 8 bytes of its length data is aligned
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_MAX_INDEX_BYTES = 16 << 20


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file."""

    name: str
    dtype: str  # as the format writes it, such as "U16"
    shape: tuple[int, ...]
    data: range  # the bytes of the file that hold it


def find(candidate: Candidate, key: str, dtype: np.dtype[Any] | None) -> Extent:
    """Finds the tensor `key` of a safetensors file."""
    path, head, size_bytes = candidate.path, candidate.head, candidate.size_bytes
    header_bytes = int.from_bytes(head[:8], "little")
    # The name counts only to say that a damaged file is damaged.
    if path.suffix != ".safetensors":
        if len(head) < 9 or header_bytes > size_bytes - 8:
            raise NotThisFormatError(f"a header of {header_bytes:,} bytes does not fit into the file")
        if head[8:9] != b"{":
            raise NotThisFormatError(f"byte 8 is {head[8]:02x}, not 7b")
    tensors = {tensor.name: tensor for tensor in read_tensors(candidate)}
    if key not in tensors:
        there = [f"{t.name} ({t.dtype}{list(t.shape)})" for t in tensors.values()]
        raise ValueError(f"{path}: no tensor {key!r}; there are: {listed(there)}. Pass key=")
    tensor = tensors[key]
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"{path}: tensor {key!r} is of dtype {tensor.dtype}, which cannot hold token ids here; "
            f"expected one of {', '.join(_DTYPES)}. Is key= right?"
        )
    return flat_extent(path, f"tensor {key!r}", _DTYPES[tensor.dtype], tensor.shape, tensor.data, FORMAT)


def read_tensors(candidate: Candidate) -> list[Tensor]:
    """Lists the tensors of a file in the order of its header; DoubtfulFormatError if that is not valid."""
    path = candidate.path
    header_bytes = int.from_bytes(candidate.head[:8], "little")
    # Read before the library maps the file: where its disk fails, touching that would kill the process.
    can_be = header_bytes <= min(candidate.size_bytes - 8, _MAX_HEADER_BYTES)
    text = read_bytes(path, 8 + header_bytes)[8:] if can_be else b""
    try:
        with safe_open(path, framework="numpy"):
            pass  # opening validates: header, offsets without holes or overlaps, exact file size
        header = json.loads(text, object_pairs_hook=_unique)
    except (SafetensorError, ValueError) as error:
        raise DoubtfulFormatError(
            f"{path}: not a valid safetensors file of {candidate.size_bytes:,} bytes ({shown(error)}); "
            f"is the download complete? Fetch or write it again"
        ) from None  # whose text is above, cut and escaped
    header.pop("__metadata__", None)
    data = range(8 + header_bytes, candidate.size_bytes)
    return [
        Tensor(name, entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    ]


def read_index(candidate: Candidate) -> dict[str, str] | None:
    """Reads the weight_map of an index file, {tensor: name of a file}; None if it is no such file."""
    if not candidate.head.lstrip().startswith(b"{") or candidate.size_bytes > _MAX_INDEX_BYTES:
        return None
    try:
        weight_map = json.loads(read_bytes(candidate.path)).get("weight_map")
    except (ValueError, RecursionError):
        return None
    is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    return weight_map if is_map else None


def header(dtype: np.dtype[Any], num_tokens: int) -> bytes:
    """Makes the header of a file with the one tensor "tokens", padded with spaces."""
    offsets = [0, num_tokens * dtype.itemsize]
    tensor = {"dtype": _NAMES[dtype.name], "shape": [num_tokens], "data_offsets": offsets}
    text = json.dumps({"tokens": tensor}, separators=(",", ":")).encode()
    return _HEADER_BYTES.to_bytes(8, "little") + text.ljust(_HEADER_BYTES)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:  # the library keeps one of them and does not say which
        raise ValueError(f"the header has {listed([*map(repr, twice)])} more than once")
    return dict(pairs)


WRITER = Writer("safetensors", ".safetensors", header)
FORMAT = Format("safetensors", find, (".safetensors",), side_suffixes=(".json",), writer=WRITER)
