"""Text: documents as strings, one after the other, from the files that people have them in."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

_READ_BYTES = 1 << 20
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst")


def read_documents(path: Path, *, column: str, separator: str) -> Iterator[str]:
    """The documents of a file that are not empty, in order; one (of Parquet, a batch) is in memory.

    - JSON lines (.jsonl, .ndjson, .json): the field `column` of each line's object.
    - Parquet (.parquet): the column of each row.
    - anything else is plain text in UTF-8: one document, or several with `separator` between them, as
      TinyStories has them; a line end on either side of the separator belongs to it.

    Null and "" are left out.

    Each but Parquet may be packed: .gz, and .zst (which pyarrow unpacks).

    Raises:
        OSError: the file is missing or unreadable.
        ValueError: it is not of the format, or has no such column.
        ImportError: the format needs pyarrow, which is missing.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _PACKED]
    kind = suffixes[-1] if suffixes else ""
    if kind == ".parquet":
        yield from _parquet(path, column)
        return
    with _opened(path) as file:
        if kind in _JSON_LINES:
            yield from _json_lines(path, file, column)
        else:
            yield from _plain(path, file, separator)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked."""
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path) as file:
                yield cast(BinaryIO, file)
        elif path.suffix.lower() == ".zst":
            arrow = import_extra("pyarrow", f"{path}: unpacking zstd")
            with arrow.input_stream(str(path), compression="zstd") as file:
                yield io.BufferedReader(file)  # which adds lines
        else:
            with path.open("rb") as file:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's, and not of what is in the file
        raise ValueError(f"{path}: cannot be unpacked ({error}); is it complete?") from error


def import_extra(name: str, what: str) -> Any:
    """A module of the optional extra, or an error that says how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {name}, which is not installed: pip install 'tokenloader[tokenize]'"
        ) from error


def _parquet(path: Path, column: str) -> Iterator[str]:
    parquet = import_extra("pyarrow.parquet", f"{path}: reading Parquet")
    with path.open("rb"):
        pass  # what is missing is an OSError of Python's own
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own
        raise ValueError(f"{path}: no Parquet file ({error}); is it complete?") from error
    with file:
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(
                f"{path}: no column {column!r}; there are: {', '.join(names)}. --column"
            )
        for row, value in enumerate(
            value
            for batch in file.iter_batches(batch_size=1024, columns=[column])
            for value in batch.column(0).to_pylist()
        ):
            if value and isinstance(value, str):
                yield value
            elif value not in (None, ""):
                raise ValueError(
                    f"{path}: row {row:,} of column {column!r} is {value!r:.60}, not a string"
                )


def _json_lines(path: Path, file: BinaryIO, column: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        where = f"{path}, line {number:,}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{where}: not JSON ({error}); needed is one object a line, with the field {column!r}"
            ) from None
        text = value.get(column, 0) if isinstance(value, dict) else 0
        if text is not None and not isinstance(text, str):
            found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{where}: no string in a field {column!r}; found: {found}. --column")
        if text:
            yield text


def _plain(path: Path, file: BinaryIO, separator: str) -> Iterator[str]:
    """Split as it is read, so that one document is in memory and not the file."""
    mark = separator.encode()
    left = bytearray()
    searched = 0
    while data := file.read(_READ_BYTES):
        left += data
        while (at := left.find(mark, searched)) >= 0:
            if text := _decoded(path, bytes(left[:at])):
                yield text
            del left[: at + len(mark)]
            searched = 0
        searched = max(0, len(left) - len(mark))
    if text := _decoded(path, bytes(left)):
        yield text


def _decoded(path: Path, document: bytes) -> str:
    try:
        return document.decode().strip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 ({error}); convert it first") from None
