"""Formats: what the module of a format provides, and what it is given to look at.

To add a format, write a module with a function `find` and a constant FORMAT, and list that in
`detect.FORMATS`. A format that can be written has a Writer too.
"""

import errno
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.formats.identity import FileIdentity, check_unchanged, naming
from tokenloader.formats.quoting import printable_messages


class NotThisFormatError(ValueError):
    """The file is not of the format that was tried; the message says why."""


class DoubtfulFormatError(ValueError):
    """The file is of the format that was tried and damaged, unless it is headerless."""


@dataclass(frozen=True)
class Candidate:
    """A file whose format is to be found."""

    path: Path
    size_bytes: int
    head: bytes  # the first 1,024 bytes, or all if there are fewer
    identity: FileIdentity  # as it was before anything else of the file was read


@dataclass(frozen=True)
class Writer:
    """How files of a format are written: a header, then the tokens.

    `header` makes the bytes before the tokens, of one length for all counts. It raises ValueError if a file
    cannot hold so many tokens of this dtype.
    """

    name: str  # what `--to` calls the format
    suffix: str | None  # the suffix of a path that implies the format, if one does
    header: Callable[[np.dtype[Any], int], bytes]


@dataclass(frozen=True)
class Format:
    """A format of token files.

    `find` finds the tokens of a candidate, given key= and dtype=. It raises NotThisFormatError when the
    file is not of the format, ValueError when it is and is damaged, and DoubtfulFormatError when headerless
    tokens might look like this by chance.
    """

    name: str
    find: Callable[[Candidate, str, np.dtype[Any] | None], Extent]
    suffixes: tuple[str, ...]  # of token files, by which a directory's shards are known
    side_suffixes: tuple[str, ...] = ()  # of files beside the tokens, which patterns leave out
    tells_dtype: bool = True  # in full, so that dtype= is refused
    # Reads document boundaries, int64 [num_documents + 1] in tokens, from an index file.
    read_boundaries: Callable[[Path], NDArray[np.int64]] | None = None
    writer: Writer | None = None


def look_at(path: Path) -> Candidate:
    """Reads what all formats look at; refuses what is missing, a directory, a pipe or a device."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file (looked in {path.parent.absolute()})") from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory; expected a token file", str(path))
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: is a pipe or a device; write its tokens to a file and open that")
    with naming(path), path.open("rb") as file:
        identity, head = FileIdentity.of(file.fileno()), file.read(1024)
    return Candidate(path, identity.size_bytes, head, identity)


def read_bytes(path: Path, most_bytes: int = -1, offset_bytes: int = 0) -> bytes:
    """Reads a part of a header or index, by default all of it. OSError, which names the file."""
    with naming(path), path.open("rb") as file:
        file.seek(offset_bytes)
        return file.read(most_bytes)


def read_array(path: Path, dtype: str, count: int, offset_bytes: int = 0) -> NDArray[Any]:
    """Reads numbers of an index, [count]; OSError, which names the file, also if it ends before."""
    numbers = np.empty(count, dtype)
    with naming(path), path.open("rb") as file:
        file.seek(offset_bytes)
        num_bytes = file.readinto(numbers.view(np.uint8))  # type: ignore[arg-type] # it is a buffer
    if num_bytes < numbers.nbytes:
        end, expected = offset_bytes + num_bytes, offset_bytes + numbers.nbytes
        message = f"ended at byte {end:,}, expected {expected:,}; is it being written to?"
        raise OSError(errno.EIO, message, str(path))
    return numbers


@printable_messages()
def read_document_boundaries(extent: Extent) -> NDArray[np.int64]:
    """Reads where documents begin and end, int64 [num_documents + 1] in tokens: 0, ..., num_tokens.

    Raises ValueError if the index does not fit the tokens, and OSError if it cannot be read, or is not the
    file that it was when the tokens were opened.
    """
    index_path, read, identity = extent.index_path, extent.format.read_boundaries, extent.index_identity
    assert index_path is not None
    assert read is not None
    if identity is not None:
        check_unchanged(index_path, index_path, identity)
    boundaries = read(index_path)
    if identity is not None:
        check_unchanged(index_path, index_path, identity)
    if boundaries[0] != 0 or boundaries[-1] != extent.num_tokens:
        raise ValueError(
            f"{index_path}: its documents are tokens {boundaries[0]:,} to {boundaries[-1]:,}, and "
            f"{extent.path.name} has tokens 0 to {extent.num_tokens:,}; fetch or write the two again"
        )
    backwards = np.flatnonzero(boundaries[1:] < boundaries[:-1])
    if backwards.size:
        document = int(backwards[0])
        raise ValueError(
            f"{index_path}: document {document:,} begins at token {boundaries[document]:,} and ends "
            f"before it, at {boundaries[document + 1]:,}; fetch or write the index again"
        )
    return boundaries
