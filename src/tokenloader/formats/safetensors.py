"""Safetensors files: their tensors, and the files that an index names.

A file is a u64 little-endian header length N, a JSON header, and data from byte 8 + N. It is validated
by the safetensors library; the header is then read once more for the offsets, which the library does
not tell. An index file, NAME.safetensors.index.json, is {"weight_map": {tensor: file}}.

Sources: https://github.com/safetensors/safetensors#format; huggingface_hub's
serialization module, which writes the index.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
)

_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("uint8"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_NAMES = {dtype.name: name for name, dtype in _DTYPES.items()}
_HEADER_BYTES = 256  # as written, its length included: room for any count, and data begins aligned
_MAX_INDEX_BYTES = 16 << 20
_MAX_NAMED = 10


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file.

    Args:
        name: its key.
        dtype: its dtype as the format writes it, such as "U16".
        shape: its shape, with any number of axes.
        offset_bytes: bytes of the file before its data.
        nbytes: bytes of its data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


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
    tensors = {tensor.name: tensor for tensor in read_tensors(path)}
    if key not in tensors:
        there = [f"{t.name} ({t.dtype}{list(t.shape)})" for t in tensors.values()]
        raise ValueError(f"{path}: no tensor {key!r}; there are: {listed(there)}. Pass key=")
    tensor = tensors[key]
    found = _DTYPES.get(tensor.dtype)
    if found is None:
        raise ValueError(
            f"{path}: tensor {key!r} is of dtype {tensor.dtype}, which cannot hold token ids here; "
            f"expected one of {', '.join(_DTYPES)}. Is key= right?"
        )
    return flat_extent(
        path, f"tensor {key!r}", found, tensor.shape, tensor.offset_bytes, tensor.nbytes, FORMAT
    )


def read_tensors(path: Path) -> list[Tensor]:
    """Lists the tensors of a file, in the order of its header.

    Raises:
        DoubtfulFormatError: the file is no valid safetensors file.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass  # opening validates: header, offsets without holes or overlaps, exact file size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes), object_pairs_hook=_unique)
    except (SafetensorError, ValueError) as error:
        raise DoubtfulFormatError(
            f"{path}: not a valid safetensors file of {path.stat().st_size:,} bytes ({error}); "
            f"is the download complete? Fetch or write it again"
        ) from error
    header.pop("__metadata__", None)
    return [
        Tensor(name, entry["dtype"], tuple(entry["shape"]), 8 + header_bytes + begin, end - begin)
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    ]


def read_index(candidate: Candidate) -> dict[str, str] | None:
    """Reads the weight_map of an index file, {tensor: name of a file}; None if it is no such file."""
    if not candidate.head.lstrip().startswith(b"{") or candidate.size_bytes > _MAX_INDEX_BYTES:
        return None
    try:
        weight_map = json.loads(candidate.path.read_bytes()).get("weight_map")
    except (ValueError, RecursionError):
        return None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        return None
    return weight_map


def header(dtype: np.dtype[Any], num_tokens: int) -> bytes:
    """Makes the header of a file with the one tensor "tokens", padded with spaces."""
    tensor = {
        "dtype": _NAMES[dtype.name],
        "shape": [num_tokens],
        "data_offsets": [0, num_tokens * dtype.itemsize],
    }
    text = json.dumps({"tokens": tensor}, separators=(",", ":")).encode()
    length = _HEADER_BYTES - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def listed(names: Sequence[str]) -> str:
    """Lists names for a message: the first ten, and how many more there are."""
    more = len(names) - _MAX_NAMED
    return (", ".join(names[:_MAX_NAMED]) or "none") + (f" and {more} more" if more > 0 else "")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):  # the library keeps one of them and does not say which
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the header has {', '.join(map(repr, twice))} more than once")
    return result


WRITER = Writer("safetensors", ".safetensors", header)
FORMAT = Format("safetensors", find, (".safetensors",), side_suffixes=(".json",), writer=WRITER)
