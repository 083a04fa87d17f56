"""Opening: makes one TokenArray of whatever a person has token ids in."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenloader.formats.extent import CONVERT_IT, Extent, token_dtype
from tokenloader.formats.quoting import printable, printable_messages
from tokenloader.formats.shards import locate_shards
from tokenloader.storage.coordination import telling_of_errors
from tokenloader.storage.hub import download, is_hub_address
from tokenloader.storage.kernel_advice import KERNEL, KernelAdvice
from tokenloader.storage.mapped import HeldFile, hold_file_under, is_mapped, map_read_only
from tokenloader.storage.ram import RamFill
from tokenloader.tokens.part import Part
from tokenloader.tokens.store import Store
from tokenloader.tokens.token_array import Residency, TokenArray

# A path, pattern or address of token files, an array, or open tokens.
OneSource = str | os.PathLike[str] | NDArray[Any] | TokenArray
# What open_tokens takes: one source, or a sequence of them, which become one axis.
Source = OneSource | Sequence[OneSource]

_KINDS = str, os.PathLike, np.ndarray, TokenArray
_EXPECTED = (
    "expected a path, a pattern, an hf:// address, a 1-D integer numpy array, an open TokenArray, or a "
    "sequence of these"
)
_Found = Extent | NDArray[Any] | TokenArray  # a source, its files found and read


@telling_of_errors("open_tokens()")
def open_tokens(
    source: Source, *, key: str = "tokens", dtype: DTypeLike | None = None, residency: Residency = "mmap"
) -> TokenArray:
    """Opens token ids that lie on disk or in memory, without moving them to any device.

    A file is recognised by its bytes: safetensors, NumPy .npy, llm.c's and modded-nanogpt's .bin,
    Megatron-LM's .bin with its .idx beside it, datatrove's .ds with its .ds.index beside it, or
    headerless, with a JSON file beside it or dtype= given. docs/formats.md describes each.

    Args:
        source: any of these, or a sequence of them, which become one token axis in the order given,
            shards in natural order, shard_2 before shard_10, files that say they have no tokens skipped:

            - a token file; of Megatron-LM tokens either of the two files;
            - a directory of shards: all files in it named .safetensors, .npy, .bin or .ds;
            - a pattern such as "fineweb_train_*.bin", `**` for directories of any depth included;
            - an index NAME.safetensors.index.json: the files in its set that have the tensor;
            - `hf://datasets/OWNER/NAME[@REVISION]/FILE`, fetched into the Hugging Face cache first;
            - a 1-D integer numpy array, which is copied only if it is not contiguous; np.memmap and other
              arrays that are mapped from files are read as mapped files are;
            - an open TokenArray, whose memory the result shares; neither's close() takes bytes from the
              other. One that is being read into RAM is waited for.
        key: the tensor's name, in safetensors files.
        dtype: numpy dtype of one token in headerless files, and only there: "uint8", "uint16", "uint32",
            "int32" or "int64", little-endian.
        residency: how files are held. "mmap" maps them: open at once, no RAM but the page cache. "ram"
            also opens at once, and reads them into RAM in the background, with a progress bar when that
            takes more than a few seconds; until then, and should it fail, windows come from the mapped
            files. Each process has its own copy. Arrays and open TokenArrays stay held as they are.

    Raises:
        OSError: a file is missing or unreadable, or changes while it is opened, nothing matches a
            pattern, or the Hub cannot be reached and the file is not in the local cache.
        MemoryError: residency is "ram" and the files are larger than the memory available, less what
            other processes of this host are about to read into RAM.
        RuntimeError: residency is "ram" and the system gives no thread to read on.
        ValueError: the contents are not tokens as described, or not of one dtype (each error says what
            was found, what was expected and what to do), or the arguments do not go together.
        TypeError: source is of another type.

    Example:
        >>> tokens = open_tokens(np.arange(1000, dtype=np.uint16))
        >>> tokens[10:13]
        array([10, 11, 12], dtype=uint16)
        >>> len(open_tokens([tokens, np.zeros(5, np.uint16)]))
        1005
    """
    if residency not in get_args(Residency):
        raise ValueError(f'residency={residency!r}; expected "mmap" or "ram"')
    with printable_messages():
        found = _find(_as_sequence(source), key=key, dtype=dtype)
    for one in found[1:]:
        if one.dtype != found[0].dtype:
            both = f"{_name(one)} holds {one.dtype} tokens and {_name(found[0])} {found[0].dtype}"
            raise ValueError(f"{both}; expected one dtype for all parts of an axis, so convert one of them")
    return join(found, residency)


open_tokens.__module__ = "tokenloader"  # where users find it


def join(
    sources: Sequence[_Found],
    residency: Residency,
    *,
    start_fill: Callable[[Sequence[Extent], Sequence[HeldFile]], RamFill] = RamFill,
    kernel: KernelAdvice = KERNEL,
) -> TokenArray:
    """Makes one axis of files, contiguous arrays and open tokens, all of one dtype.

    start_fill begins to read extents into RAM, given their open files; kernel advises on what is mapped.
    """
    parts: list[Part] = []
    extents: list[Extent] = []
    files: list[HeldFile] = []
    for source in sources:
        if isinstance(source, Extent):
            array, file = map_read_only(source)
            parts.append(Part(array, "filling" if residency == "ram" else "mapped", source, file))
            extents.append(source)
            files.append(file)
        elif isinstance(source, TokenArray):
            with suppress(OSError):  # what cannot be read into RAM stays mapped
                source.wait_until_loaded()
            parts += source._parts()
        elif is_mapped(source):
            parts.append(Part(source, "mapped", file=hold_file_under(source)))
        else:
            parts.append(Part(source))
    fill = start_fill(extents, files) if files and residency == "ram" else None
    name = _name(sources[0]) + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
    return TokenArray(Store(parts, name=name, fill=fill, kernel=kernel))


def _as_sequence(source: Source) -> Sequence[OneSource]:
    if isinstance(source, _KINDS):
        return [source]
    if isinstance(source, (bytes, bytearray)) or not isinstance(source, Iterable):
        raise _wrong_type("source", source)
    if not isinstance(source, Sequence):
        remedy = ", in the order wanted: pass sorted(source) or list(source)"
        raise _wrong_type("source", source, remedy)
    if not source:
        raise ValueError(f"source is an empty sequence; {_EXPECTED}")
    for i, one in enumerate(source):
        if not isinstance(one, _KINDS):
            raise _wrong_type(f"source[{i}]", one)
    return source


def _wrong_type(name: str, found: object, remedy: str = "") -> TypeError:
    if hasattr(found, "__array__"):
        remedy = f": pass np.asarray({name})"
    return TypeError(f"{name} is of type {type(found).__name__}; {_EXPECTED}{remedy}")


def _find(sources: Sequence[OneSource], *, key: str, dtype: DTypeLike | None) -> list[_Found]:
    """Finds the files of sources and reads their headers; checks arrays."""
    found: list[_Found] = []
    empty: list[Extent] = []
    paths: set[Path] = set()
    for one in sources:
        if isinstance(one, TokenArray):
            found.append(one)
        elif isinstance(one, np.ndarray):
            found.append(_checked_array(one))
        else:
            path = _local_path(one)
            paths.add(path)
            for extent in locate_shards(path, key=key, dtype=dtype):
                (found if extent.num_tokens else empty).append(extent)
    for path in paths:
        # Both are in sorted(glob("*")) of a directory.
        if path.suffix == ".bin" and (index_path := path.with_suffix(".idx")) in paths:
            raise ValueError(f"source has both {path} and {index_path}, which are one data set; name one")
    if not found:
        others = f", nor have {len(empty) - 1} more files" if empty[1:] else ""
        raise ValueError(
            f"{empty[0].path}: has no tokens, as the file or its index says "
            f"({empty[0].format.name}){others}; was the conversion completed?"
        )
    if dtype is not None and not paths:
        given = f"dtype={dtype!r} was given with an array of {found[0].dtype}"
        raise ValueError(f"{given}; dtype= is for headerless files only, leave it out")
    return found


def _checked_array(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim != 1:
        raise ValueError(f"the array has shape {array.shape}; tokens must be one flat axis: .reshape(-1)")
    token_dtype(array.dtype, "the array is of dtype ", CONVERT_IT)
    if not array.size:
        raise ValueError("the array is empty; expected 1 token or more")
    # As a plain ndarray, because indexing an np.memmap is several times slower.
    return np.ascontiguousarray(array).view(np.ndarray)


def _local_path(source: str | os.PathLike[str]) -> Path:
    address = os.fspath(source)
    if not address:  # which a Path takes for the current directory
        raise ValueError("source is an empty path; name the token file")
    if is_hub_address(address):
        return download(address)
    if (scheme := re.match("hf:/|[a-z][a-z0-9+.-]*://", address, re.I)) and not os.path.exists(address):
        if not scheme[0].endswith("//"):
            raise ValueError(f"{address}: expected hf://; a Path drops a slash, so pass the text itself")
        raise ValueError(
            f"{address}: {scheme[0]} addresses are not read; download the file and name that, or "
            f"one on the Hugging Face Hub: hf://datasets/OWNER/NAME/FILE"
        )
    return Path(address)


def _name(found: _Found) -> str:
    if isinstance(found, Extent):
        return printable(str(found.path))
    return found._name if isinstance(found, TokenArray) else "array"
