"""Shards: the token files that a directory, a pattern or a safetensors index stands for, in order.

The order is natural: numbers in names count as numbers, so shard_2 comes before shard_10. What would
silently make another data set is refused: several formats, training files with held-out ones, a set
NAME-00001-of-00004 with files missing.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from numpy.typing import DTypeLike

from tokenloader.formats.detect import FORMATS, UnknownFormatError, locate
from tokenloader.formats.extent import Extent, token_dtype
from tokenloader.formats.format import look_at
from tokenloader.formats.safetensors import listed, read_index, read_tensors

_TOKEN_SUFFIXES = list(dict.fromkeys(suffix for format in FORMATS for suffix in format.suffixes))
_SIDE_SUFFIXES = {".md", ".txt"}.union(*(format.side_suffixes for format in FORMATS))
_SIDE_NAMES = "README", "LICENSE"
_HELD_OUT = {"val", "valid", "validation", "test", "eval", "dev", "heldout"}


def locate_shards(path: Path, *, key: str, dtype: DTypeLike | None) -> list[Extent]:
    """Finds the tokens of a file, or of all files that a path stands for, in natural order.

    Args:
        path: a token file; NAME.safetensors.index.json; a directory, of which the files named
            .safetensors, .npy, .bin or .ds are taken, hidden ones and directories in it are not; or a
            pattern of `*`, `?`, `[...]` and `**`, if there is no file of that very name.
        key: name of the tensor in safetensors files.
        dtype: numpy dtype of one token in headerless files.

    Raises:
        OSError: a file is missing or cannot be read, or nothing matches.
        ValueError: a file is not as `locate` expects it; or the files do not make one data set.
    """
    if path.is_dir():
        files = _files_in(path)
        _refuse_missing(path, files)
    elif path.exists() or not glob.has_magic(str(path)):
        weight_map = read_index(look_at(path))
        shards = [path] if weight_map is None else _shards_of_index(path, weight_map, key)
        return [locate(shard, key=key, dtype=dtype) for shard in shards]
    else:
        files = _files_matching(str(path))
    _refuse_held_out_with_others(path, files, dtype)
    return _locate_one_format(path, files, key, dtype)


def _files_in(folder: Path) -> list[Path]:
    there = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    files = [entry for entry in there if entry.suffix in _TOKEN_SUFFIXES and not entry.is_dir()]
    if not files:
        folders = any(entry.is_dir() for entry in there)
        remedy = "**/*" if folders else "*"
        raise FileNotFoundError(
            f"{folder}: no file in this directory is named {', '.join(_TOKEN_SUFFIXES[:-1])} or "
            f"{_TOKEN_SUFFIXES[-1]}; there are: {listed(sorted(entry.name for entry in there))}. Name the "
            f'files with a pattern: open_tokens("{folder / remedy}")'
        )
    return sorted(files, key=_natural)


def _files_matching(pattern: str) -> list[Path]:
    matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
    files = [match for match in matches if not match.is_dir()]
    if not files:
        found = (
            f"matches no file but {len(matches)} directories, such as {matches[0]}; to open what is in "
            f"them, let it end in /*"
            if matches
            else f"matches no file (looked from {Path.cwd()})"
        )
        raise FileNotFoundError(f"{pattern}: {found}")
    # An index is matched along with its data by most patterns; alone, it stands for the data.
    data = [file for file in files if file.suffix not in _SIDE_SUFFIXES and file.name not in _SIDE_NAMES]
    return sorted(data or files, key=_natural)


def _shards_of_index(path: Path, weight_map: dict[str, str], key: str) -> list[Path]:
    """Finds the files that hold the tensor `key`.

    An index names one file for a tensor. Where every shard has a tensor of the same name it can name only
    the last; so all files of the set NAME-00001-of-00004.safetensors are searched.
    """
    if key not in weight_map:
        raise ValueError(
            f"{path}: the index has no tensor {key!r}; there are: {listed(list(weight_map))}. Pass key="
        )
    named = path.parent / weight_map[key]
    if not named.exists():
        raise FileNotFoundError(
            f"{named}: no such file, and {path.name} says that the tensor {key!r} is in it; is the "
            f"download complete?"
        )
    one_set = _numbered_set(named)
    if one_set is None:
        return [named]
    files = [file for file in named.parent.iterdir() if _numbered_set(file) == one_set]
    _refuse_missing(path, files)
    shards = [file for file in files if any(tensor.name == key for tensor in read_tensors(file))]
    return sorted(shards or [named], key=_natural)


def _locate_one_format(
    source: Path, files: Sequence[Path], key: str, dtype: DTypeLike | None
) -> list[Extent]:
    extents: list[Extent] = []
    unknown: list[tuple[Path, UnknownFormatError]] = []
    for file in files:
        try:
            extents.append(locate(file, key=key, dtype=dtype))
        except UnknownFormatError as error:
            unknown.append((file, error))
    if unknown and not extents:
        raise unknown[0][1]
    by_format: dict[str, list[Path]] = {}
    for extent in extents:
        by_format.setdefault(extent.format.name, []).append(extent.path)
    if unknown:
        by_format["unknown or headerless"] = [file for file, _ in unknown]
    if len(by_format) > 1:
        seen = "; ".join(f"{format}: {_sample(files)}" for format, files in by_format.items())
        raise ValueError(
            f"{source}: has files of several formats ({seen}); open those that belong together: "
            f"{_calls(by_format.values(), dtype)}"
        )
    return extents


def _refuse_held_out_with_others(source: Path, files: Sequence[Path], dtype: DTypeLike | None) -> None:
    common = os.path.commonpath([file.parent for file in files])
    held_out: list[Path] = []
    others: list[Path] = []
    for file in files:
        words = re.split("[^a-z]+", os.path.relpath(file, common).lower())
        (others if _HELD_OUT.isdisjoint(words) else held_out).append(file)
    if held_out and others:
        calls = _calls([others, held_out], dtype)
        raise ValueError(
            f"{source}: has files that by their names are held out for evaluation ({_sample(held_out)}) "
            f"and others ({_sample(others)}); open the one or the other: {calls}"
        )


def _refuse_missing(source: Path, files: Iterable[Path]) -> None:
    counts: dict[tuple[Path, str, int, str], int] = {}
    for file in files:
        if one := _numbered_set(file):
            counts[one] = counts.get(one, 0) + 1
    for (_, before, count, after), found in counts.items():
        if found < count:
            raise FileNotFoundError(
                f"{source}: has {found} of the {count} files {before}*-of-*{after}; is the download "
                f"complete? A pattern opens what there is"
            )


def _numbered_set(file: Path) -> tuple[Path, str, int, str] | None:
    """Parses NAME-00002-of-00004.SUFFIX into what the files of one set have in common."""
    found = re.fullmatch(r"(.*-)[0-9]+-of-([0-9]+)(\..*|)", file.name)
    return (file.parent, found[1], int(found[2]), found[3]) if found else None


def _natural(path: Path) -> tuple[list[list[str | int]], str]:
    """Makes a sort key: each part of the path as text, number, text, ...; equal ones by their names."""
    # The stem, so that train.bin comes before train2.bin.
    split = [re.split("([0-9]+)", part) for part in (*path.parent.parts, path.stem)]
    return [[int(s) if i % 2 else s for i, s in enumerate(part)] for part in split], str(path)


def _sample(files: Sequence[Path]) -> str:
    return files[0].name + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def _calls(groups: Iterable[Sequence[Path]], dtype: DTypeLike | None) -> str:
    """Writes a call for each group of files: the pattern of their names, or several."""
    calls = []
    last = "" if dtype is None else f", dtype={token_dtype(dtype, 'dtype=').name!r}"
    for files in groups:
        patterns = list(dict.fromkeys(_pattern(file) for file in files))
        calls.append(f"open_tokens({(patterns[0] if len(patterns) == 1 else patterns[:3])!r}{last})")
    return " or ".join(calls)


def _pattern(file: Path) -> str:
    name = re.sub("[0-9]+", "*", file.name)
    return str(file if name == file.name else Path(glob.escape(str(file.parent))) / name)
