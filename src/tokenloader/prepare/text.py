"""Text: documents as strings, one after the other, from JSON lines, Parquet and plain files."""

import gzip
import importlib
import io
import json
import re
import reprlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from tokenloader.formats.quoting import listed, shown

READ_BYTES = 1 << 20
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst")
_CONVERT_OR_REPLACE = "convert it first, or --replace-invalid puts U+FFFD in the place of other bytes"
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_texts(
    path: Path,
    *,
    column: str,
    separator: str,
    replace_invalid: bool = False,
    read_bytes: int = READ_BYTES,
) -> Iterator[str]:
    """Yields the documents of a file in order, one (of Parquet, a batch) in memory at a time.

    - JSON lines (.jsonl, .ndjson, .json): the field `column` of each line's object.
    - Parquet (.parquet): the column `column` of each row.
    - any other file is plain text in UTF-8: one document, or several with `separator` between them, as
      TinyStories has them; a line end on either side of the separator belongs to it.

    Null and "" are left out. All but Parquet may be packed as .gz, or as .zst (which pyarrow unpacks). A
    byte order mark at the beginning is no text. With replace_invalid, U+FFFD takes the place of what is
    not UTF-8 (in JSON, also half of a surrogate pair); else, and in Parquet, that is an error.

    Raises OSError where the file is missing or unreadable, ValueError where it is not of its format or has
    no such column or two, and ImportError where the format needs pyarrow, which is missing.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _PACKED]
    kind = suffixes[-1] if suffixes else ""
    if kind == ".parquet":
        yield from _parquet(path, column)
        return
    with _opened(path) as file:
        if kind in _JSON_LINES:
            yield from _json_lines(path, file, column, replace_invalid=replace_invalid)
        else:
            yield from _plain(path, file, separator, read_bytes, replace_invalid=replace_invalid)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for its bytes, unpacked."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            if suffix in _PACKED and not file.peek(1):
                raise EOFError("the file is empty")
            if suffix == ".gz":
                with gzip.open(file) as unpacked:
                    yield cast(BinaryIO, unpacked)
            elif suffix == ".zst":
                arrow = import_extra("pyarrow", f"{path}: unpacking zstd")
                with arrow.CompressedInputStream(file, "zstd") as unpacked:
                    yield io.BufferedReader(unpacked)  # arrow's stream cannot be read by lines
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        raise _named(path, error, "cannot be unpacked") from error


def _named(path: Path, error: Exception, what: str) -> Exception:
    """An error that names the file: of the system, or of what is in the file."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, str(path))
    return ValueError(f"{path}: {what} ({shown(error)}); is it complete?")


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
    except Exception as error:  # pyarrow's own are of many classes
        raise _named(path, error, "not a Parquet file") from error
    with file:
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(f"{path}: no column {column!r}; pass --column with one of: {listed(names)}")
        if (count := names.count(column)) > 1:
            raise ValueError(
                f"{path}: {count} columns are named {column!r}; expected one: give them names of their own"
            )
        values = chain.from_iterable(_read_column(path, file, column))
        for row, value in enumerate(values):
            if value and isinstance(value, str):
                yield value
            elif value not in (None, ""):
                raise ValueError(
                    f"{path}: row {row:,} of column {column!r} is {reprlib.repr(value)}; expected a string"
                )


def _read_column(path: Path, file: Any, column: str) -> Iterator[list[Any]]:
    """Yields the values of a column, a batch of rows at a time."""
    try:
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            yield batch.column(column).to_pylist()
    except Exception as error:
        raise _named(path, error, "a damaged Parquet file") from error


def _json_lines(path: Path, file: BinaryIO, column: str, *, replace_invalid: bool) -> Iterator[str]:
    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs) and [name for name, _ in pairs].count(column) > 1:
            raise ValueError(f"the field {column!r} is there more than once")  # json would take the last
        return fields

    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        where = f"{path}, line {number:,}"
        try:
            decoded = line.decode("utf-8-sig", "replace") if replace_invalid else line
            value = json.loads(decoded, object_pairs_hook=as_object)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not text in UTF-8 ({error}); {_CONVERT_OR_REPLACE}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: not JSON ({error}); expected one object a line, with the field {column!r}"
            ) from None
        if not isinstance(value, dict):
            found = type(value).__name__
            raise ValueError(f"{where}: found a {found}; expected an object with the field {column!r}")
        if column not in value:
            raise ValueError(
                f"{where}: no field {column!r}; pass --column with one of: {listed(list(value))}"
            )
        text = value[column]
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}: field {column!r} is {reprlib.repr(text)}; expected a string")
        if text:
            yield _encodable(text, f"{where}: field {column!r}", replace_invalid=replace_invalid)


def _encodable(text: str, where: str, *, replace_invalid: bool) -> str:
    """Returns text without halves of surrogate pairs: an error that begins with `where`, or replaced."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if not replace_invalid:
            raise ValueError(
                f"{where} has half of a surrogate pair, {shown(text[error.start])}, at character "
                f"{error.start:,}, which is no text; correct it, or --replace-invalid puts U+FFFD in the "
                f"place of each"
            ) from None
        return _SURROGATE.sub("\ufffd", text)
    return text


def _plain(
    path: Path, file: BinaryIO, separator: str, read_bytes: int, *, replace_invalid: bool
) -> Iterator[str]:
    """Splits a file while it is read, so that one document is in memory and not the file."""
    mark = separator.encode()
    left = bytearray()
    searched = 0
    encoding = "utf-8-sig"  # which has no byte order mark in the text, of the first document

    def decoded(document: bytes) -> str:
        try:
            return document.decode(encoding, "replace" if replace_invalid else "strict").strip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not text in UTF-8 ({error}); {_CONVERT_OR_REPLACE}") from None

    while data := file.read(read_bytes):
        left += data
        while (at := left.find(mark, searched)) >= 0:
            if text := decoded(bytes(left[:at])):
                yield text
            del left[: at + len(mark)]
            searched, encoding = 0, "utf-8"
        searched = max(0, len(left) - len(mark))
    if text := decoded(bytes(left)):
        yield text
