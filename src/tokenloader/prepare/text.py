"""Text: documents as strings, one after the other, from JSON lines, Parquet and plain files."""

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

READ_BYTES = 1 << 20
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst")


def read_texts(path: Path, *, column: str, separator: str, read_bytes: int = READ_BYTES) -> Iterator[str]:
    """Yields the documents of a file in order, one (of Parquet, a batch) in memory at a time.

    - JSON lines (.jsonl, .ndjson, .json): the field `column` of each line's object.
    - Parquet (.parquet): the column `column` of each row.
    - any other file is plain text in UTF-8: one document, or several with `separator` between them, as
      TinyStories has them; a line end on either side of the separator belongs to it.

    Null and "" are left out. All but Parquet may be packed as .gz, or as .zst (which pyarrow unpacks).

    Raises OSError where the file is missing or unreadable, ValueError where it is not of its format or has
    no such column, and ImportError where the format needs pyarrow, which is missing.
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
            yield from _plain(path, file, separator, read_bytes)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for its bytes, unpacked."""
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path) as file:
                yield cast(BinaryIO, file)
        elif path.suffix.lower() == ".zst":
            arrow = import_extra("pyarrow", f"{path}: unpacking zstd")
            with arrow.input_stream(str(path), compression="zstd") as file:
                yield io.BufferedReader(file)  # arrow's stream cannot be read by lines
        else:
            with path.open("rb") as file:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's error, and not about what is in the file
        raise ValueError(f"{path}: cannot be unpacked ({error}); is it complete?") from error


def import_extra(name: str, what: str) -> Any:
    """Imports a module of the optional extra, or raises an ImportError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"{what} needs {name}, which is not installed: pip install 'tokenloader[tokenize]'"
        raise ImportError(message) from error


def _parquet(path: Path, column: str) -> Iterator[str]:
    parquet = import_extra("pyarrow.parquet", f"{path}: reading Parquet")
    with path.open("rb"):
        pass  # a missing file is an OSError of Python's own
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own
        raise ValueError(f"{path}: not a Parquet file ({error}); is it complete?") from error
    with file:
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(f"{path}: no column {column!r}; pass --column with one of: {', '.join(names)}")
        batches = file.iter_batches(batch_size=1024, columns=[column])
        for row, value in enumerate(chain.from_iterable(batch.column(0).to_pylist() for batch in batches)):
            if value and isinstance(value, str):
                yield value
            elif value not in (None, ""):
                raise ValueError(
                    f"{path}: row {row:,} of column {column!r} is {value!r:.60}; expected a string"
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
                f"{where}: not JSON ({error}); expected one object a line, with the field {column!r}"
            ) from None
        if not isinstance(value, dict):
            found = type(value).__name__
            raise ValueError(f"{where}: found a {found}; expected an object with the field {column!r}")
        if column not in value:
            names = ", ".join(value)
            raise ValueError(f"{where}: no field {column!r}; pass --column with one of: {names}")
        text = value[column]
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}: field {column!r} is {text!r:.60}; expected a string")
        if text:
            yield text


def _plain(path: Path, file: BinaryIO, separator: str, read_bytes: int) -> Iterator[str]:
    """Splits a file while it is read, so that one document is in memory and not the file."""
    mark = separator.encode()
    left = bytearray()
    searched = 0
    while data := file.read(read_bytes):
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
