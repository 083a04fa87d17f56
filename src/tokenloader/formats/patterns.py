"""Patterns: what `*`, `?`, `[...]` and `**` match, and which of a file's names is taken.

`**` is any number of directories, none included and hidden ones excluded. It enters each directory once,
also where links lead to it, and none through a link that lies in it: with a link to its own directory each
file would be there 41 times, and with two of them for ever.
"""

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path


def matches(pattern: str) -> list[Path]:
    """Lists the files and directories that a pattern matches, in no order, and some perhaps twice."""
    parts = pattern.split("/")
    if "**" not in parts:
        return [Path(match) for match in glob.glob(pattern)]
    at = parts.index("**")
    before, after = "/".join(parts[:at]) or ("/" if at else "."), parts[at + 1 :]
    while after[:1] == ["**"]:
        del after[0]
    rest = "/".join(after) or "*"
    tops = glob.glob(before) if glob.has_magic(before) else [before]
    folders = (folder for top in tops for folder in _folders_in(top))
    return [match for folder in folders for match in matches(os.path.join(glob.escape(folder), rest))]


def each_once(files: Iterable[Path]) -> list[Path]:
    """Leaves out files that are there under another name: a link to them, or a link to their directory.

    The name with the fewest links is kept. Only links that lie side by side in one directory, and lead to
    one file elsewhere, are all kept: so the Hub's cache stores shards that have equal contents.
    """
    kept: dict[str, Path] = {}  # by directory without links, and own name
    ways: dict[str, str] = {}  # to each file without links: itself, or the directory of a link to it
    folders: dict[Path, str] = {}

    def without_links(file: Path) -> str:
        if file.parent not in folders:
            folders[file.parent] = os.path.realpath(file.parent)
        return os.path.join(folders[file.parent], file.name)

    def rank(file: Path) -> tuple[bool, bool, str]:
        return file.is_symlink(), os.path.abspath(file) != without_links(file), str(file)

    for file in sorted(files, key=rank):
        place = real = way = without_links(file)
        if file.is_symlink():
            real, way = os.path.realpath(file), os.path.dirname(place)
        if place not in kept and ways.setdefault(real, way) == way:
            kept[place] = file
    return list(kept.values())


def _folders_in(top: str) -> Iterator[str]:
    """Lists a directory and all below it, each once: first those that no link leads to."""
    if not os.path.isdir(top):
        return
    entered = {*Path(os.path.realpath(top)).parents}  # without links, as all that are added
    own, linked = deque([top]), deque[str]()
    while own or linked:
        folder = (own or linked).popleft()
        real = Path(os.path.realpath(folder))
        if real in entered:
            continue
        entered.add(real)
        yield folder
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            # os.path.isdir, which is also False for a link to itself.
            if entry.name.startswith(".") or not os.path.isdir(entry.path):
                continue
            if not entry.is_symlink():
                own.append(entry.path)
            elif Path(os.path.realpath(entry.path)) not in real.parents:
                linked.append(entry.path)
