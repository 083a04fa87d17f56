"""Headerless files with a JSON file beside them that names their dtype.

NAME.bin or NAME.npy is nothing but tokens, little-endian. NAME.bin.json, or else NAME.json, is a JSON
object whose "dtype" is the name of one of TOKEN_DTYPES. "num_tokens" (or "n_tokens", "token_count"), if it
is there, is checked against the size; other keys are ignored. Scripts that write tokens with numpy's
tofile keep such files; there is no specification.
"""

import json
import os.path
import reprlib
from pathlib import Path
from typing import Any

import numpy as np

from tokenloader.formats.extent import DTYPE_NAMES, TOKEN_DTYPES, Extent
from tokenloader.formats.format import Candidate, Format, NotThisFormatError, read_bytes

_COUNTS = "num_tokens", "n_tokens", "token_count"
_MOST_BYTES = 1 << 20  # a larger file is data of its own, and not read


def find(candidate: Candidate, key: str, dtype: np.dtype[Any] | None) -> Extent:
    """Finds the tokens of a headerless file by the JSON file beside it.

    A file opened with dtype= is headerless; the JSON file may then only contradict.
    """
    path, size_bytes = candidate.path, candidate.size_bytes
    if path.suffix not in FORMAT.suffixes:
        raise NotThisFormatError(f"is not named {' or '.join(FORMAT.suffixes)}")
    side_path, fields = _read_side_file(path)
    found = next((known for known in TOKEN_DTYPES if known.name == fields["dtype"]), None)
    if found is None:
        if dtype is not None:  # the JSON file is about something else, such as a model
            raise NotThisFormatError(f"{side_path.name} beside it names no dtype of tokens")
        raise ValueError(
            f'{side_path}: its "dtype" is {reprlib.repr(fields["dtype"])}; expected one of {DTYPE_NAMES}. '
            f"Correct it, or if it does not describe {path.name} pass dtype="
        )
    if dtype is not None and dtype != found:
        raise ValueError(
            f"{path}: dtype={dtype} was given, and {side_path.name} beside it says {found}; leave dtype= "
            f"out, or correct {side_path.name}"
        )
    num_tokens, rest = divmod(size_bytes, found.itemsize)
    counts = {name: fields[name] for name in _COUNTS if name in fields}
    if rest or any(count != num_tokens for count in counts.values()):
        promised = "".join(f", {name} {reprlib.repr(count)}" for name, count in counts.items())
        raise ValueError(
            f"{path}: has {size_bytes:,} bytes, and {side_path.name} beside it says dtype {found} "
            f"({found.itemsize} bytes a token){promised}; is one of the two truncated, or of another "
            f"data set? To open it as it is, move {side_path.name} away and pass dtype="
        )
    if not size_bytes and not counts:
        raise NotThisFormatError(f"{side_path.name} beside it does not say that it has no tokens")
    if dtype is not None and size_bytes:
        raise NotThisFormatError(f"dtype= was given, and {side_path.name} agrees")
    return Extent(path, 0, found, num_tokens, FORMAT)


def _read_side_file(path: Path) -> tuple[Path, dict[str, Any]]:
    """Reads the first JSON object beside a file that has a "dtype"."""
    for side_path in (path.with_name(path.name + ".json"), path.with_suffix(".json")):
        # os.path.isfile, which is also False for a name longer than names may be.
        if os.path.isfile(side_path) and side_path.stat().st_size <= _MOST_BYTES:
            try:
                fields = json.loads(read_bytes(side_path))
            except (ValueError, RecursionError):
                continue
            if isinstance(fields, dict) and "dtype" in fields:
                return side_path, fields
    raise NotThisFormatError(f"no {path.name}.json or {path.stem}.json beside it names a dtype")


FORMAT = Format("headerless with JSON", find, (".bin", ".npy"), side_suffixes=(".json",), tells_dtype=False)
