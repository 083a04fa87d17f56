"""Shards: the token files that a directory, a pattern or a safetensors index stands for, in order.

The order is natural: numbers in names count as numbers, so shard_2 comes before shard_10. What would
silently make another data set is refused: several formats, training files with held-out ones, a set
NAME-00001-of-00004 with files missing. A file is taken once, whatever links lead to it.
"""

import glob
import os
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from numpy.typing import DTypeLike

from tokenloader.formats.detect import FORMATS, UnknownFormatError, locate
from tokenloader.formats.extent import Extent, token_dtype
from tokenloader.formats.foreign import ForeignFileError
from tokenloader.formats.format import look_at
from tokenloader.formats.numbered_sets import find_wrong_sets, set_name
from tokenloader.formats.patterns import each_once, matches
from tokenloader.formats.quoting import listed, shown
from tokenloader.formats.safetensors import read_index, read_tensors

_TOKEN_SUFFIXES = list(dict.fromkeys(suffix for format in FORMATS for suffix in format.suffixes))
_SIDE_SUFFIXES = {".md", ".txt"}.union(*(format.side_suffixes for format in FORMATS))
_SIDE_NAMES = "README", "LICENSE"
_HELD_OUT = {"val", "valid", "validation", "test", "eval", "dev", "heldout"}


def locate_shards(path: Path, *, key: str, dtype: DTypeLike | None) -> list[Extent]:
    """Finds the tokens of a file, or of all files that a path stands for, in natural order.

    Files without tokens, by their own header or index, are among them.

    Args:
        path: a token file; NAME.safetensors.index.json; a directory, of which the files named
            .safetensors, .npy, .bin or .ds are taken, hidden ones and directories in it are not; or a
            pattern of `*`, `?`, `[...]` and `**`, if there is no file of that very name.
        key: name of the tensor in safetensors files.
        dtype: numpy dtype of one token in headerless files; None for files that tell it.

    Raises:
        OSError: a file is missing or cannot be read, or nothing matches.
        ValueError: a file is of no known format, damaged, or not as key and dtype say; or the files do not
            make one data set.
    """
    if path.is_dir():
        files = _files_in(path)
        _refuse_incomplete(path, files)
    elif path.exists() or not glob.has_magic(str(path)):
        weight_map = read_index(look_at(path))
        shards = [path] if weight_map is None else _shards_of_index(path, weight_map, key)
        return [locate(shard, key=key, dtype=dtype) for shard in shards]
    else:
        files = _files_matching(str(path))
        _refuse_incomplete(path, files)
    _refuse_mixed(path, "held-out files among others, by their names", _by_purpose(files), dtype)
    return _locate_one_format(path, files, key, dtype)


def _files_in(folder: Path) -> list[Path]:
    there = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    files = [entry for entry in there if entry.suffix in _TOKEN_SUFFIXES and not entry.is_dir()]
    if not files:
        below = "**/*" if any(entry.is_dir() for entry in there) else "*"
        pattern = os.path.join(glob.escape(str(folder)), below)
        raise FileNotFoundError(
            f"{folder}: no file in this directory is named {', '.join(_TOKEN_SUFFIXES[:-1])} or "
            f"{_TOKEN_SUFFIXES[-1]}; there are: {listed(sorted(entry.name for entry in there))}. Name the "
            f"files with a pattern: open_tokens({pattern!r})"
        )
    return sorted(each_once(files), key=_natural)


def _files_matching(pattern: str) -> list[Path]:
    found = matches(pattern)
    files = [match for match in found if not match.is_dir()]
    if not found:
        raise FileNotFoundError(f"{pattern}: matches no file (looked from {Path.cwd()})")
    if not files:
        raise FileNotFoundError(
            f"{pattern}: matches no file but {len(found)} directories, such as {found[0]}; to open what is "
            f"in them, let it end in /*"
        )
    # An index is matched along with its data by most patterns; alone, it stands for the data.
    data = [file for file in files if file.suffix not in _SIDE_SUFFIXES and file.name not in _SIDE_NAMES]
    return sorted(each_once(data or files), key=_natural)


def _shards_of_index(path: Path, weight_map: dict[str, str], key: str) -> list[Path]:
    """Finds the files that hold the tensor `key`.

    An index names one file for a tensor. Where every shard has a tensor of the same name it can name only
    the last; so all files of the set NAME-00001-of-00004.safetensors are searched.
    """
    if key not in weight_map:
        there = listed(list(weight_map))
        raise ValueError(f"{path}: the index has no tensor {key!r}; there are: {there}. Pass key=")
    named = path.parent / weight_map[key]
    _refuse_outside(path, named)
    if not os.path.exists(named):  # which is also False for what can be no name
        raise FileNotFoundError(
            f"{shown(named)}: no such file, and {path.name} says that the tensor {key!r} is in it; is the "
            f"download complete?"
        )
    if (one_set := set_name(named)) is None:
        return [named]
    files = [file for file in named.parent.iterdir() if set_name(file) == one_set]
    for file in files:
        _refuse_outside(path, file)
    _refuse_incomplete(path, files)
    shards = [file for file in files if any(tensor.name == key for tensor in read_tensors(look_at(file)))]
    return sorted(shards or [named], key=_natural)


def _locate_one_format(source: Path, files: list[Path], key: str, dtype: DTypeLike | None) -> list[Extent]:
    extents: list[Extent] = []
    by_format: dict[str, list[Path]] = {}
    unknown: UnknownFormatError | None = None
    foreign: dict[str, ForeignFileError] = {}
    for file in files:
        try:
            extent = locate(file, key=key, dtype=dtype)
        except UnknownFormatError as error:
            unknown, format = unknown or error, "unknown or headerless"
        except ForeignFileError as error:
            format = f"no token files but {error.what}"
            foreign.setdefault(format, error)
        else:
            extents.append(extent)
            if not extent.num_tokens:
                continue
            format = extent.format.name
        by_format.setdefault(format, []).append(file)
    if not extents and (unknown or foreign):
        raise unknown or next(iter(foreign.values()))
    _refuse_mixed(source, "files of several formats", by_format, dtype, not_to_open=foreign)
    return extents


def _by_purpose(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Groups files by whether a word of their names says that they are held out for evaluation."""
    common = os.path.commonpath([file.parent for file in files])
    groups: dict[str, list[Path]] = {"others": [], "held out for evaluation": []}
    for file in files:
        words = re.split("[^a-z]+", os.path.relpath(file, common).lower())
        groups["others" if _HELD_OUT.isdisjoint(words) else "held out for evaluation"].append(file)
    return groups


def _refuse_mixed(
    source: Path,
    what: str,
    groups: dict[str, list[Path]],
    dtype: DTypeLike | None,
    not_to_open: Collection[str] = (),
) -> None:
    """Raises ValueError if several groups have files; it shows a call that opens each of them."""
    groups = {name: files for name, files in groups.items() if files}
    if len(groups) < 2:
        return
    given = "" if dtype is None else f", dtype={token_dtype(dtype, 'dtype=').name!r}"
    seen, calls = [], []
    for name, files in groups.items():
        seen.append(f"{name}: {files[0].name}" + (f" and {len(files) - 1} more" if len(files) > 1 else ""))
        if name not in not_to_open:
            others = [file for other in groups.values() if other is not files for file in other]
            calls.append(f"open_tokens({_patterns(files, others)}{given})")
    raise ValueError(
        f"{source}: has {what} ({'; '.join(seen)}); open those that belong together: {' or '.join(calls)}"
    )


def _patterns(files: Sequence[Path], others: Sequence[Path]) -> str:
    """Writes what open_tokens takes for these files and no others: up to three patterns, or names."""
    for general in (_any_number, _any_name):
        patterns = dict.fromkeys((file.parent, general(file.name)) for file in files)
        if len(patterns) <= 3 and not any(
            other.parent == folder and fnmatchcase(other.name, name)
            for other in others
            for folder, name in patterns
        ):
            written = [str(Path(glob.escape(str(folder))) / name) for folder, name in patterns]
            return repr(written[0] if len(written) == 1 else written)
    names = ", ".join(repr(str(file)) for file in files[:3])
    return f"[{names}{', ...' if len(files) > 3 else ''}]"


def _refuse_incomplete(source: Path, files: Sequence[Path]) -> None:
    """Raises if files are missing from a set that these are of; not if they are there and left out."""
    for name in find_wrong_sets(files):
        folder = name[0]
        there = [file for file in folder.iterdir() if set_name(file) == name and not file.is_dir()]
        if wrong := find_wrong_sets(there).get(name):
            where = f"{source}:" if source == folder else f"{source}: {folder}"
            raise type(wrong)(f"{where} {wrong}. To open what there is, name each of its files")


def _refuse_outside(index: Path, file: Path) -> None:
    """Raises ValueError if a file that an index leads to is neither below it nor in the Hub's cache."""
    folder = Path(os.path.realpath(index.parent))
    try:
        real = Path(os.path.realpath(file))
    except ValueError:
        return  # no file can have this name
    # The cache of the Hub has a repository's files in blobs, and links to them in snapshots/REVISION.
    blobs = [above.parent / "blobs" for above in folder.parents if above.name == "snapshots"]
    if not real.is_relative_to(folder) and real.parent not in blobs[:1]:
        raise ValueError(
            f"{index}: leads to {shown(file)}, which is {shown(real)}, outside of its directory; expected "
            f"files beside the index, so bring it there, or open it by its own name"
        )


def _natural(path: Path) -> tuple[list[list[str | int]], str]:
    """Makes a sort key: each part of the path as text, number, text, ...; equal ones by their names."""
    # The stem, so that train.bin comes before train2.bin.
    split = [re.split("([0-9]+)", part) for part in (*path.parent.parts, path.stem)]
    return [[int(s) if i % 2 else s for i, s in enumerate(part)] for part in split], str(path)


def _any_number(name: str) -> str:
    return re.sub("[0-9]+", "*", glob.escape(name))


def _any_name(name: str) -> str:
    return f"*{glob.escape(Path(name).suffix)}"
