"""Converting: token files of any format that can be read, to one of any format that can be written."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenloader.formats.detect import WRITERS
from tokenloader.formats.format import Writer
from tokenloader.storage.progress import progress_bar
from tokenloader.tokens.token_array import TokenArray
from tokenloader.tokens.writing import blocks, check_place, write_file


def target_format(path: Path, chosen: str | None) -> Writer:
    """Returns the writer of the format chosen by name, or else of the one that the suffix of the path says.

    Raises ValueError where the suffix says nothing (.bin is several formats).
    """
    for writer in WRITERS:
        if writer.name == chosen or (chosen is None and writer.suffix == path.suffix):
            return writer
    what = f"the suffix {path.suffix} may be several formats" if path.suffix else "no suffix"
    names = ", ".join(writer.name for writer in WRITERS)
    raise ValueError(f"{path}: {what}; say which to write: --to {names}")


def convert(
    tokens: TokenArray,
    path: Path,
    *,
    writer: Writer,
    dtype: DTypeLike | None = None,  # of one token in the file; None: that of the tokens
    force: bool = False,
    progress: bool = False,
) -> int:
    """Writes tokens to a file of another format or dtype; returns the size of the file in bytes.

    Raises FileExistsError where the file exists, also by the time it is complete, and force is False,
    OSError where the disk has too little space or fails, and ValueError where path is one of the files
    that are read, the format cannot hold the tokens, or an id does not fit the dtype.
    """
    dtype = tokens.dtype if dtype is None else np.dtype(dtype)
    check_target(path, force=force, read=[extent.path for extent in tokens.extents])
    num_bytes = len(writer.header(dtype, len(tokens))) + len(tokens) * dtype.itemsize
    check_space(path, num_bytes)

    def counted_blocks() -> Iterator[NDArray[Any]]:
        for block in blocks(tokens):
            yield block
            bar.done_bytes += len(block) * dtype.itemsize

    with progress_bar("writing", len(tokens) * dtype.itemsize, shown=progress) as bar:
        write_file(path, counted_blocks(), dtype, writer, replace=force)
    return num_bytes


def check_target(path: Path, *, force: bool, read: Iterable[Path]) -> None:
    """Raises OSError or ValueError if path must not be written, because of what exists or is read."""
    check_place(path)
    if path.exists():
        for source in read:
            if source.exists() and os.path.samefile(source, path):
                raise ValueError(f"{path} is the file that is read ({source}); write another")
        if not force:
            raise FileExistsError(f"{path} exists ({path.stat().st_size:,} bytes); --force replaces it")


def check_space(path: Path, num_bytes: int) -> None:
    """Raises OSError if the disk has no room for a file of num_bytes beside what is there."""
    directory = Path(os.path.realpath(path)).parent
    if directory.is_dir() and (free := shutil.disk_usage(directory).free) < num_bytes:
        raise OSError(
            f"{path} takes {num_bytes:,} bytes, and {free:,} are free on this disk; free some, or write to "
            f"another (a file that is replaced keeps its room until the new one is complete)"
        )
