"""llm.c's .bin files: golden bytes, every way a file can be wrong, and what is written."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import assert_refused, llm_c_bytes, tokens_at

from tokenloader import open_tokens
from tokenloader.formats import llm_c
from tokenloader.formats.detect import locate
from tokenloader.formats.extent import Extent
from tokenloader.tokens.writing import write_file

TOKENS = np.array([5, 0, 65_535, 50_256, 7], np.uint16)


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_an_llm_c_file_of_each_magic_is_opened(file, magic, version, dtype):
    tokens = TOKENS.astype(dtype)
    for name in ("fineweb_train_000001.bin", "tokens.npy", "3f2a9c"):
        path = file(name, llm_c_bytes(tokens, magic, version))
        extent = locate(path, key="tokens", dtype=None)
        assert extent == Extent(path, 1024, np.dtype(dtype), 5, llm_c.FORMAT)
        np.testing.assert_array_equal(tokens_at(extent), tokens)


def test_an_llm_c_file_by_hand_is_opened(file):
    head = bytes.fromhex("88d83401 01000000 02000000") + bytes(1012)
    np.testing.assert_array_equal(open_tokens(file("t.bin", head + b"\x05\0\x50\xc4"))[:], [5, 50256])


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (
            llm_c_bytes(TOKENS)[:-3],
            "the header promises 10 bytes of tokens, the file has 7",
        ),
        (
            llm_c_bytes(TOKENS) + b"\0",
            "the header promises 10 bytes of tokens, the file has 11",
        ),
        (
            llm_c_bytes(TOKENS, 20240801, 7),
            "the header promises 20 bytes of tokens, the file has 10",
        ),
        (
            llm_c_bytes(TOKENS, version=3),
            "an llm.c file of magic 20240520 and version 3; expected version 1",
        ),
        (llm_c_bytes(TOKENS, 20240801, 1), "of magic 20240801 and version 1; expected version 7"),
        (llm_c_bytes(TOKENS, count=-5), "counts -5 tokens; the format counts up to 2**31 - 1"),
        (llm_c_bytes(TOKENS)[:600], "is cut off in its llm.c header, after 600 of 1024 bytes"),
        (llm_c_bytes(TOKENS)[:4], "is cut off in its llm.c header, after 4 of 1024 bytes"),
    ],
)
@pytest.mark.parametrize("dtype", [None, "uint8"])
def test_a_damaged_llm_c_file_is_refused_with_what_is_wrong(file, data, named, dtype):
    # With dtype= too: headerless tokens begin like this once in 2**32 files, truncated downloads daily.
    assert_refused(file("t.bin", data), named, dtype=dtype)


@pytest.mark.parametrize(("dtype", "magic", "version"), [("uint16", 20240520, 1), ("uint32", 20240801, 7)])
def test_what_is_written_has_its_header_of_256_integers(tmp_path, dtype, magic, version):
    write_file(tmp_path / "t.bin", [np.arange(1000)], np.dtype(dtype), llm_c.WRITER, replace=False)
    data = (tmp_path / "t.bin").read_bytes()
    assert np.frombuffer(data[:1024], "<i4").tolist() == [magic, version, 1000, *[0] * 253]
    np.testing.assert_array_equal(np.frombuffer(data[1024:], dtype), np.arange(1000))
    assert len(open_tokens(tmp_path / "t.bin")) == 1000


def test_no_other_dtype_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"an llm.c .bin file holds uint16 or uint32 tokens, not int64"):
        write_file(tmp_path / "t.bin", [np.arange(5)], np.dtype("int64"), llm_c.WRITER, replace=False)
    assert not list(tmp_path.iterdir())


def test_it_counts_to_2_31_and_no_further():
    header = llm_c.header(np.dtype("uint16"), 2**31 - 1)
    assert header[8:12] == b"\xff\xff\xff\x7f"
    message = "it holds at most 2,147,483,647, and these are 2,147,483,648 or more"
    with pytest.raises(ValueError, match=message):
        llm_c.header(np.dtype("uint16"), 2**31)


def test_tokens_past_the_most_are_refused_while_they_are_written(tmp_path):
    def header(dtype, num_tokens):
        return llm_c.header(dtype, num_tokens + 2**31 - 1 - 10)

    writer = replace(llm_c.WRITER, header=header)
    write_file(tmp_path / "t.bin", [np.arange(10)], np.dtype("uint16"), writer, replace=False)
    with pytest.raises(ValueError, match="these are 2,147,483,648 or more"):
        write_file(
            tmp_path / "u.bin", [np.arange(10), np.arange(1)], np.dtype("uint16"), writer, replace=False
        )
    assert not (tmp_path / "u.bin").exists()
