"""Reading documents of text: JSON lines, Parquet, plain, packed; and where a file is wrong."""

import errno
import gzip
import json
import os
import re
import sys

import pyarrow
import pyarrow.parquet
import pytest

from tokenloader.prepare.text import read_texts

DOCUMENTS = ["One.", "Two\nlines.", "ünï 日本", "  spaces kept  "]
END = "<|endoftext|>"


def read(path, column="text", **kwargs):
    return list(read_texts(path, column=column, separator=END, **kwargs))


def json_lines(documents, column="text"):
    return "".join(json.dumps({column: one, "id": i}) + "\n" for i, one in enumerate(documents))


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".JSONL"])
def test_json_lines_are_documents(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_text(json_lines(DOCUMENTS), encoding="utf-8")
    assert read(path) == DOCUMENTS


def test_the_column_may_have_another_name(tmp_path):
    (tmp_path / "a.jsonl").write_text(json_lines(DOCUMENTS, "content"), encoding="utf-8")
    assert read(tmp_path / "a.jsonl", "content") == DOCUMENTS


def test_parquet_columns_are_documents(tmp_path):
    table = pyarrow.table({"id": range(5000), "text": [f"document {i}" for i in range(5000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert read(tmp_path / "a.parquet") == [f"document {i}" for i in range(5000)]


def test_null_and_empty_documents_are_left_out(tmp_path):
    documents = ["a", None, "", "b"]
    (tmp_path / "a.jsonl").write_text(json_lines(documents) + "\n  \n")
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text(f"a{END}\n{END}b{END}")
    for name in ("a.jsonl", "a.parquet", "a.txt"):
        assert read(tmp_path / name) == ["a", "b"]


def test_a_plain_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("\nOne.\n\nTwo.\n")
    assert read(tmp_path / "a.txt") == ["One.\n\nTwo."]
    (tmp_path / "empty.txt").touch()
    assert read(tmp_path / "empty.txt") == []


@pytest.mark.parametrize("read_bytes", [1, 2, 7, 13, 1000])
def test_or_several_with_the_end_of_text_between_them(tmp_path, read_bytes):
    path = tmp_path / "a.txt"
    path.write_text(f"\n{END}\n".join(DOCUMENTS), encoding="utf-8")
    assert read(path, read_bytes=read_bytes) == DOCUMENTS
    path.write_text(END.join(["a", "<|endof", "b<|"]))
    assert read(path, read_bytes=read_bytes) == ["a", "<|endof", "b<|"]


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_files_may_be_packed(tmp_path, packing, suffix):
    text = json_lines(DOCUMENTS) if suffix == ".jsonl" else END.join(DOCUMENTS)
    path = tmp_path / f"a{suffix}{packing}"
    if packing == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(text.encode())
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "a.jsonl, line 2: not JSON (Expecting property name"),
        (
            '{"body": "x", "id": 1}',
            "a.jsonl, line 2: no field 'text'; pass --column with one of: body, id",
        ),
        ('{"text": 5}', "a.jsonl, line 2: field 'text' is 5; expected a string"),
        (
            '{"text": ' + "[" * 800 + "]" * 800 + "}",
            "a.jsonl, line 2: field 'text' is [[[[[[[...]]]]]]]; expected a string",
        ),
        (
            '{"text": "a", "id": 1, "text": "b"}',
            "a.jsonl, line 2: not JSON (the field 'text' is there more than once)",
        ),
        (
            '{"text": "a half: \\ud83d"}',
            "a.jsonl, line 2: field 'text' has half of a surrogate pair, \\ud83d, at character 8, which is "
            "no text; correct it, or --replace-invalid puts U+FFFD in the place of each",
        ),
        ("[" * 100_000, "a.jsonl, line 2: not JSON (maximum recursion depth exceeded"),
        ('{"text": ' * 100_000, "a.jsonl, line 2: not JSON (maximum recursion depth exceeded"),
        (
            json.dumps({"\x1b[2J": 1} | dict.fromkeys(range(1000))),
            "a.jsonl, line 2: no field 'text'; pass --column with one of: "
            "\\x1b[2J, 0, 1, 2, 3, 4, 5, 6, 7, 8 and 991 more",
        ),
        ("[1]", "a.jsonl, line 2: found a list; expected an object with the field 'text'"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(json_lines(["fine"]) + line + "\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path / "a.jsonl")


def test_a_line_that_is_not_utf_8_is_named_and_can_be_read_all_the_same(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["fine"]).encode() + b'{"text": "\xff"}')
    message = "a.jsonl, line 2: not text in UTF-8 ('utf-8' codec can't decode byte 0xff in position 10: "
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read(tmp_path / "a.jsonl")
    assert "; convert it first, or --replace-invalid puts U+FFFD in the place" in str(raised.value)


def test_a_column_that_is_missing_or_no_text_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "body": ["a", "b"]}), path)
    with pytest.raises(
        ValueError, match=r"a.parquet: no column 'text'; pass --column with one of: id, body"
    ):
        read(path)
    with pytest.raises(ValueError, match=r"a.parquet: row 0 of column 'id' is 1; expected a string"):
        read(path, "id")


def test_a_file_that_is_damaged_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"a.parquet: not a Parquet file .*is it complete"):
        read(tmp_path / "a.parquet")
    packed = gzip.compress(bytes(range(256)) * 99)
    damaged = {
        "a.txt.gz": b"no gzip",
        "b.txt.gz": packed[:-9],
        "c.txt.gz": packed[:20] + b"xxxxxxxx" + packed[28:],
        "a.txt.zst": b"no zstd, but something else",
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}: cannot be unpacked .*is it complete"):
            read(tmp_path / name)
    (tmp_path / "a.txt").write_bytes("ü".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a.txt: not text in UTF-8 .*0xfc in position 0"):
        read(tmp_path / "a.txt")


def test_a_packed_file_of_no_bytes_is_not_complete(tmp_path):
    for name in ("a.txt.gz", "a.jsonl.gz", "a.txt.zst", "a.jsonl.zst"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"{name}: cannot be unpacked \(the file is empty\); is it"):
            read(tmp_path / name)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b""))
    assert read(tmp_path / "a.txt.gz") == []


@pytest.mark.parametrize("data", [DOCUMENTS[2], f"{DOCUMENTS[2]}{END}{DOCUMENTS[2]}", "", END])
@pytest.mark.parametrize("read_bytes", [1, 1000])
def test_a_byte_order_mark_is_no_text(tmp_path, data, read_bytes):
    (tmp_path / "a.txt").write_text(data, encoding="utf-8-sig")
    assert read(tmp_path / "a.txt", read_bytes=read_bytes) == [one for one in data.split(END) if one]
    (tmp_path / "a.jsonl").write_text(json_lines([data]), encoding="utf-8-sig")
    assert read(tmp_path / "a.jsonl") == [data][: bool(data)]
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf-8-sig") as file:
        file.write(data)
    assert read(tmp_path / "a.txt.gz") == [one for one in data.split(END) if one]


def test_a_mark_that_is_not_at_the_beginning_is_text(tmp_path):
    (tmp_path / "a.txt").write_text(f"a{END}\ufeffb", encoding="utf-8")
    assert read(tmp_path / "a.txt") == ["a", "\ufeffb"]


def test_what_is_not_utf_8_is_replaced_if_asked(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xfcn" + END.encode() + b"fine" + END.encode() + b"\xe2\x82")
    (tmp_path / "a.jsonl").write_bytes(
        rb'{"text": "\ud83dn"}' + b'\n{"text": "fine \\ud83d\\ude42"}\n{"text": "\xfc"}'
    )
    assert read(tmp_path / "a.txt", replace_invalid=True) == ["\ufffdn", "fine", "\ufffd"]
    assert read(tmp_path / "a.jsonl", replace_invalid=True) == ["\ufffdn", "fine 🙂", "\ufffd"]
    with pytest.raises(ValueError, match=r"a.txt: not text in UTF-8 .* or --replace-invalid puts U\+FFFD"):
        read(tmp_path / "a.txt")


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "body"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: 2 columns are named 'text'; expected one"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "body") == ["c"]


def test_a_column_is_not_taken_for_a_field_of_another_that_is_called_alike(tmp_path):
    table = pyarrow.table({"meta": [{"text": "nested"}], "meta.text": ["top"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "meta.text") == ["top"]


@pytest.mark.parametrize("compression", ["snappy", "none"])
def test_a_parquet_file_with_damaged_pages_is_named(tmp_path, compression):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"ünï {i}" for i in range(3000)]})
    pyarrow.parquet.write_table(table, path, compression=compression)
    data = bytearray(path.read_bytes())
    data[100:10_000] = b"\xff" * 9_900
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a.parquet: a damaged Parquet file \(.*is it compl"):
        read(path)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="a file whose reading fails")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_disk_that_fails_is_told_with_the_name_of_the_file(tmp_path, name):
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=re.escape(str(tmp_path / name))) as raised:
        read(tmp_path / name)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.txt.zst"])
def test_a_file_that_is_missing_is_an_error_of_its_own(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=name):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "what"), [("a.parquet", "reading Parquet"), ("a.txt.zst", "unpacking zstd")]
)
def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch, name, what):
    (tmp_path / name).write_bytes(b"anything")
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{name}: {what} needs pyarrow.*tokenloader\[tokenize\]"):
        read(tmp_path / name)
