"""Recognition: what holds for a file of any format."""

import os
import re

import numpy as np
import pytest
from helpers import assert_refused, llm_c_bytes, npy_bytes, tokens_at
from safetensors.numpy import save

from tokenloader import open_tokens
from tokenloader.formats.detect import FORMATS, locate
from tokenloader.tokens.writing import write_file

TOKENS = np.array([5, 0, 65_535, 50_256, 7], np.uint16)


def test_an_empty_file_is_refused(file):
    for name in ("t.bin", "t.npy", "t.safetensors"):
        assert_refused(file(name, b""), "the file is empty")
        assert_refused(file(name, b""), "the file is empty", dtype="uint16")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", "is a pipe or a device; write its tokens to a file")


def test_a_link_is_followed_and_a_name_may_be_in_any_script(file, tmp_path):
    data = file("データ [1]*.bin", llm_c_bytes(TOKENS))
    (tmp_path / "link").symlink_to(data)
    for path in (data, tmp_path / "link"):
        np.testing.assert_array_equal(open_tokens(path)[:], TOKENS)
    (tmp_path / "loose").symlink_to(tmp_path / "gone")
    assert_refused(tmp_path / "loose", "no such file", error=FileNotFoundError)


def test_a_missing_file_is_refused_with_where_it_was_looked_for(tmp_path, monkeypatch):
    assert_refused(tmp_path / "gone.bin", "no such file", f"looked in {tmp_path}", error=FileNotFoundError)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"(looked in {tmp_path / 'data'})")):
        open_tokens("data/gone.safetensors")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(file):
    path = file("t.bin", TOKENS.tobytes())
    path.chmod(0)
    assert_refused(path, error=PermissionError, dtype="uint16")


def test_the_error_says_of_each_format_why_the_file_is_not_of_it(file):
    assert_refused(
        file("train.bin", bytes([16, 0, 0, 0, 0, 0, 0, 0, 9]) + bytes(40)),
        "Tried: safetensors (byte 8 is 09, not 7b); ",
        "NumPy .npy (does not begin with 93 4e 55 4d 50 59); ",
        "llm.c .bin (begins with neither 20240520 nor 20240801); ",
        "Megatron-LM .bin (there is no train.idx beside it); ",
        "datatrove .ds (there is no train.bin.index or .metadata beside it); ",
        "headerless with JSON (no train.bin.json or train.json beside it names a dtype)",
    )
    assert_refused(
        file("train.bin", TOKENS.tobytes()),
        f"safetensors (a header of {int.from_bytes(TOKENS.tobytes()[:8], 'little'):,} bytes does not fit",
    )


@pytest.mark.parametrize("given", ["uint16", "uint32", np.int64])
def test_dtype_is_refused_for_a_file_whose_header_tells_it(file, given):
    for path, format in (
        (file("t.safetensors", save({"tokens": TOKENS})), "safetensors"),
        (file("a.bin", save({"tokens": TOKENS})), "safetensors"),
        (file("t.npy", npy_bytes(TOKENS)), "NumPy .npy"),
        (file("l.bin", llm_c_bytes(TOKENS)), "llm.c .bin"),
    ):
        assert_refused(
            path,
            f"dtype={np.dtype(given).name} was given, but the file is {format} and tells it: uint16",
            "leave it out",
            dtype=given,
        )


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        ("int8", "dtype=int8, which cannot hold"),
        ("int16", "dtype=int16, which cannot hold"),
        ("uint64", "dtype=uint64, which cannot hold"),
        (np.float32, "dtype=float32, which cannot hold"),
        (bool, "dtype=bool, which cannot hold"),
        (">u2", "dtype=uint16 in big-endian byte order, which cannot hold"),
        (object, "dtype=object, which cannot hold"),
        ("nonsense", "dtype='nonsense' is not a dtype"),
        (3, "dtype=3 is not a dtype"),
    ],
)
def test_a_dtype_that_holds_no_tokens_is_refused_and_named(file, dtype, named):
    path = file("train.bin", TOKENS.tobytes())
    assert_refused(path, named, "one of uint8, uint16, uint32, int32, int64", dtype=dtype)


@pytest.mark.parametrize(
    "format", [format for format in FORMATS if format.writer], ids=lambda format: format.name
)
def test_what_a_format_writes_is_recognised_as_that_format(tmp_path, format):
    dtype = np.dtype("uint16")
    write_file(tmp_path / "t.bin", [TOKENS], dtype, format.writer, replace=False)
    extent = locate(tmp_path / "t.bin", key="tokens", dtype=None if format.tells_dtype else dtype)
    assert (extent.format, extent.dtype, extent.num_tokens) == (format, dtype, 5)
    assert extent.offset_bytes == len(format.writer.header(dtype, 5))
    np.testing.assert_array_equal(tokens_at(extent), TOKENS)
