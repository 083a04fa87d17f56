"""Numbered sets: the files NAME-00001-of-00004.SUFFIX that were written as one data set.

Complete are 1 to N, 0 to N - 1, and 0 to N: Pythia has twelve files, 00000-of-00011 to 00011-of-00011.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenloader.formats.quoting import listed, shown

_NAME = re.compile(r"(.*?)([0-9]+)([-_.]of[-_.])([0-9]+)(\..*|)")
_Members = dict[int, list[Path]]  # by their numbers

# What the names of the files of a set have in common: folder, text before the number, N, and text after it.
SetName = tuple[Path, str, int, str]


def set_name(file: Path) -> SetName | None:
    """Names the set that a file is one of, if its own name says that it is."""
    parsed = _parse(file)
    return parsed[0] if parsed else None


def find_wrong_sets(files: Iterable[Path]) -> dict[SetName, OSError | ValueError]:
    """Finds the sets that are not complete; an error for each says what is missing, twice or too much."""
    sets: dict[SetName, _Members] = defaultdict(lambda: defaultdict(list))
    for file in files:
        if parsed := _parse(file):
            name, number = parsed
            sets[name][number].append(file)
    return {name: wrong for name, members in sets.items() if (wrong := _find_wrong(name[2], members))}


def _parse(file: Path) -> tuple[SetName, int] | None:
    """Returns a file's set, and its number there."""
    found = _NAME.fullmatch(file.name)
    return ((file.parent, found[1], int(found[4]), found[5]), int(found[2])) if found else None


def _find_wrong(count: int, members: _Members) -> OSError | ValueError | None:
    found = _NAME.fullmatch(next(iter(members.values()))[0].name)
    assert found is not None
    before, width, after = found[1], len(found[2]), found.string[found.end(2) :]
    pattern = f"{before}*{found[3]}*{found[5]}"
    if twice := next((files for files in members.values() if len(files) > 1), None):
        return ValueError(f"has a file of {pattern} twice: {listed([file.name for file in twice])}")
    if beyond := [files[0].name for number, files in members.items() if number > count]:
        return ValueError(f"has files of {pattern} with numbers past {count:,}: {listed(beyond)}")
    first = 0 if 0 in members else 1
    last = count - 1 if first == 0 and count not in members else count
    num_expected = last + 1 - first
    # Not all that are missing: a name can promise any number of files.
    numbers = islice((number for number in range(first, last + 1) if number not in members), 10)
    missing = [f"{before}{number:0{width}}{after}" for number in numbers]
    if not missing:
        return None
    if more := num_expected - len(members) - len(missing):
        missing.append(f"and {more:,} more")
    return FileNotFoundError(
        f"has {len(members)} of the {num_expected:,} files {pattern}; is the download complete? Missing: "
        f"{', '.join(map(shown, missing))}"
    )
