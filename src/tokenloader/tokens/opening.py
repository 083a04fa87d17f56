"""Opening: from whatever a person has token ids in to one TokenArray."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenloader.formats.extent import CONVERT_IT, Extent, token_dtype
from tokenloader.formats.shards import locate_shards
from tokenloader.storage.hub import download, is_hub_address
from tokenloader.storage.ram import check_it_fits, map_read_only, open_file
from tokenloader.tokens.token_array import Residency, TokenArray

OneSource = str | os.PathLike[str] | NDArray[Any] | TokenArray
Source = OneSource | Sequence[OneSource]

_SCHEME = re.compile("[a-z][a-z0-9+.-]*://")
_KINDS = str, os.PathLike, np.ndarray, TokenArray
_Part = Extent | NDArray[Any] | TokenArray  # of the axis


def open_tokens(
    source: Source,
    *,
    key: str = "tokens",
    dtype: DTypeLike | None = None,
    residency: Residency = "mmap",
) -> TokenArray:
    """Opens token ids that lie on disk or in memory, without moving them to any device.

    A file is recognised by its bytes: safetensors, NumPy .npy, llm.c's and modded-nanogpt's .bin,
    Megatron-LM's .bin with its .idx beside it, datatrove's .ds with its .ds.index beside it, or
    headerless, with a JSON file beside it or dtype= given. docs/formats.md describes each.

    Args:
        source: any of these, or a sequence of them, which become one token axis in the order given:

            - a token file; of Megatron-LM tokens either of the two files;
            - a directory of shards: all files in it named .safetensors, .npy, .bin or .ds;
            - a pattern such as "fineweb_train_*.bin", `**` for directories of any depth included;
            - an index NAME.safetensors.index.json: the files in its set that have the tensor;
            - `hf://datasets/OWNER/NAME[@REVISION]/FILE`, fetched into the Hugging Face cache first;
            - a 1-D integer numpy array, which is copied only if it is not contiguous;
            - an open TokenArray, whose memory the result shares. Neither's close() takes bytes from the
              other. One that is being read into RAM is waited for.

            Shards of a directory, pattern or index are in natural order, shard_2 before shard_10.
        key: the tensor's name, in safetensors files.
        dtype: of the tokens in headerless files, and only there: "uint8", "uint16", "uint32", "int32"
            or "int64", little-endian.
        residency: of files. "mmap" maps them: open at once, no RAM but the page cache. "ram" also opens
            at once, and reads them into RAM in the background, with a progress bar when that takes
            more than a few seconds; until all is there, windows come from the mapped files. Arrays are
            in RAM, and a TokenArray stays held as it is, whatever is asked for.

    Raises:
        OSError: a file is missing or unreadable, nothing matches a pattern, or the Hub cannot be
            reached and the file is not in its cache.
        MemoryError: residency is "ram" and the files are larger than the memory available.
        ValueError: the contents are not tokens as described, or not of one dtype (each error says what
            was found, what was needed and what to do), or the arguments do not go together.
        TypeError: source is of another type.

    Example:
        >>> tokens = open_tokens(np.arange(1000, dtype=np.uint16))
        >>> tokens[10:13]
        array([10, 11, 12], dtype=uint16)
        >>> len(open_tokens([tokens, np.zeros(5, np.uint16)]))
        1005
    """
    if residency not in get_args(Residency):
        raise ValueError(f'residency={residency!r}; it must be "mmap" or "ram"')
    parts = _parts(_as_sequence(source), key=key, dtype=dtype)
    for part in parts[1:]:
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"{_name(part)} holds {part.dtype} tokens and {_name(parts[0])} {parts[0].dtype}; the "
                f"parts of one token axis must have one dtype, so convert one of them"
            )
    return _joined(parts, residency)


def _joined(parts: Sequence[_Part], residency: Residency) -> TokenArray:
    """One axis of all parts."""
    on_disk = [part for part in parts if isinstance(part, Extent)]
    # One opening serves the mapping and the reading into RAM: meanwhile a path may name another file.
    files: list[FileIO] = []
    if on_disk and residency == "ram":
        check_it_fits(on_disk)
        files = [open_file(part) for part in on_disk]
    opened = iter(files)
    arrays: list[NDArray[Any]] = []
    extents: list[Extent | None] = []
    into_ram: list[int] = []  # numbers of arrays
    indexed: list[Sequence[Extent]] = []
    mapped = bool(on_disk) and not files
    for part in parts:
        if isinstance(part, Extent):
            if files:
                into_ram.append(len(arrays))
            arrays.append(map_read_only(part, next(opened, None)))
            extents.append(part)
            indexed.append([part] if part.index_path else [])
        elif isinstance(part, TokenArray):
            part.wait_until_loaded()
            held = part._hold()
            arrays += held.pieces.arrays
            extents += held.extents
            indexed.append(part._indexed)
            mapped |= held.mapped
        else:
            arrays.append(part)
            extents.append(None)
            indexed.append([])
    name = _name(parts[0]) + (f" and {len(parts) - 1} more" if len(parts) > 1 else "")
    tokens = TokenArray(
        arrays,
        name=name,
        residency="mmap" if mapped else "ram",
        extents=extents,
        indexed=[extent for of in indexed for extent in of] if all(indexed) else [],
    )
    if files:
        tokens._fill_ram(into_ram, files)
    return tokens


def _as_sequence(source: Source) -> Sequence[OneSource]:
    if isinstance(source, _KINDS):
        return [source]
    needed = (
        "needed is a path, a pattern, an hf:// address, a 1-D integer numpy array, an open TokenArray, or "
        "a sequence of these"
    )
    if not isinstance(source, Sequence) or isinstance(source, (bytes, bytearray)):
        remedy = (
            ": pass np.asarray(source)"
            if hasattr(source, "__array__")
            else ", in the order wanted: pass sorted(source) or list(source)"
            if isinstance(source, Iterable) and not isinstance(source, (bytes, bytearray))
            else ""
        )
        raise TypeError(f"source is of type {type(source).__name__}; {needed}{remedy}")
    if not source:
        raise ValueError(f"source is an empty sequence; {needed}")
    for i, one in enumerate(source):
        if not isinstance(one, _KINDS):
            remedy = f": pass np.asarray(source[{i}])" if hasattr(one, "__array__") else ""
            raise TypeError(f"source[{i}] is of type {type(one).__name__}; {needed}{remedy}")
    return source


def _parts(sources: Sequence[OneSource], *, key: str, dtype: DTypeLike | None) -> list[_Part]:
    parts: list[_Part] = []
    paths: set[Path] = set()
    for one in sources:
        if isinstance(one, TokenArray):
            parts.append(one)
        elif isinstance(one, np.ndarray):
            parts.append(_checked_array(one))
        else:
            path = _local_path(one)
            paths.add(path)
            parts += locate_shards(path, key=key, dtype=dtype)
    for path in paths:
        # As sorted(glob("*")) of a directory gives them.
        index_path = path.with_suffix(".idx") if path.suffix == ".bin" else None
        if index_path in paths:
            raise ValueError(
                f"source has both {path} and {index_path}, which are one data set; name one"
            )
    if dtype is not None and not paths:
        raise ValueError(
            f"dtype={dtype!r} was given with an array of {parts[0].dtype}; dtype= is for headerless "
            f"files only, leave it out"
        )
    return parts


def _checked_array(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim != 1:
        raise ValueError(
            f"the array has shape {array.shape}; tokens must be one flat axis: .reshape(-1)"
        )
    token_dtype(array.dtype, "the array is of dtype ", CONVERT_IT)
    if not array.size:
        raise ValueError("the array is empty; tokens are needed")
    # As a plain ndarray, because indexing an np.memmap is several times slower.
    return np.ascontiguousarray(array).view(np.ndarray)


def _name(part: _Part) -> str:
    if isinstance(part, Extent):
        return str(part.path)
    return part._name if isinstance(part, TokenArray) else "array"


def _local_path(source: str | os.PathLike[str]) -> Path:
    address = os.fspath(source)
    if not address:  # which a Path takes for the current directory
        raise ValueError("source is an empty path; name the token file")
    if is_hub_address(address):
        return download(address)
    if (scheme := _SCHEME.match(address)) and not os.path.exists(address):
        raise ValueError(
            f"{address}: {scheme[0]} addresses are not read; download the file and name that, or "
            f"one on the Hugging Face Hub: hf://datasets/OWNER/NAME/FILE"
        )
    return Path(address)
