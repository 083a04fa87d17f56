"""File identities: which file was opened, and since when its contents have been what they are.

A path may name another file later, and a file may be written again. What is read off a file is good only
while its identity is the one that it had when its header was read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np


class FileIdentity(NamedTuple):
    """What the system tells of a file that changes with its contents."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int  # when it was last written to, since 1970

    @classmethod
    def of(cls, file: int | Path) -> FileIdentity:
        """Returns the identity of an open file, by its descriptor, or of the one at a path."""
        status = os.fstat(file) if isinstance(file, int) else os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def check_unchanged(file: int | Path, path: Path | str, expected: FileIdentity) -> None:
    """Raises OSError, which names the path, unless a file, open or at a path, is what it was."""
    try:  # and not naming(), which takes longer than the asking
        found = FileIdentity.of(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    if found == expected:
        return
    if found[:2] != expected[:2]:
        changes = [f"it is another file (inode {found.inode}, was {expected.inode})"]
    else:
        changes = []
        if found.size_bytes != expected.size_bytes:
            changes += [f"it has {found.size_bytes:,} bytes and had {expected.size_bytes:,}"]
        if found.mtime_ns != expected.mtime_ns:
            now, before = _in_words(found.mtime_ns), _in_words(expected.mtime_ns)
            changes += [f"it was modified at {now} and before at {before} (UTC)"]
    raise OSError(
        errno.EIO,
        f"has changed since it was opened: {', '.join(changes)}; was it truncated or written to? Open "
        f"the tokens again, and write new data under a new name",
        str(path),
    )


def _in_words(time_ns: int) -> str:
    """Returns a time since 1970 as a date; file systems hold years that are past numpy's nanoseconds."""
    seconds, rest_ns = divmod(time_ns, 10**9)
    return f"{np.datetime64(seconds, 's')}.{rest_ns:09}"


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Gives an OSError the name of the file that was being read, where it has none, as reads do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
