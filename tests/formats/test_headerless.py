"""Headerless files: what is opened with dtype=, and what is said where it is missing or wrong."""

import numpy as np
import pytest
from helpers import DTYPES, assert_refused, tokens_at

from tokenloader import open_tokens
from tokenloader.formats import headerless
from tokenloader.formats.detect import locate
from tokenloader.formats.extent import Extent
from tokenloader.tokens.writing import write_file

TOKENS = np.array([5, 0, 65_535, 50_256, 7], np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_headerless_file_of_each_dtype_is_opened(file, dtype):
    tokens = np.arange(200, 255).astype(dtype)
    path = file("train.bin", tokens.tobytes())
    for given in (dtype, np.dtype(dtype), getattr(np, dtype), tokens.dtype.str):
        extent = locate(path, key="tokens", dtype=given)
        assert extent == Extent(path, 0, np.dtype(dtype), 55, headerless.FORMAT)
    np.testing.assert_array_equal(tokens_at(extent), tokens)


def test_a_headerless_file_may_be_one_token(file):
    assert len(open_tokens(file("train.bin", b"\x07"), dtype="uint8")) == 1
    assert open_tokens(file("train.bin", b"\x07\x01"), dtype="uint16")[0] == 0x107


def test_a_headerless_file_without_dtype_is_refused_with_its_first_bytes(file, tmp_path):
    assert_refused(
        file("train.bin", TOKENS.tobytes()),
        f"{tmp_path / 'train.bin'}: is of no known format. If it is headerless (nothing but tokens, as "
        f'nanoGPT and OLMo-core write), pass dtype=, as in dtype="uint16". It has 10 bytes and begins with '
        f"05 00 00 00 ff ff 50 c4 07 00. Tried: ",
    )
    assert_refused(file("short.bin", b"\x01\x02"), "It has 2 bytes and begins with 01 02. Tried: ")


@pytest.mark.parametrize(("dtype", "itemsize"), [("uint16", 2), ("uint32", 4), ("int32", 4), ("int64", 8)])
def test_a_headerless_file_of_odd_size_is_refused_with_its_size(file, dtype, itemsize):
    assert_refused(
        file("train.bin", bytes(1001)),
        f"1001 bytes is not a whole number of {dtype} tokens ({itemsize} bytes each)",
        "is it truncated, or is dtype= wrong?",
        dtype=dtype,
    )


def test_a_raw_file_named_npy_is_opened_with_dtype_and_explained_without(file):
    # OLMo-core writes raw tokens to files of this name.
    path = file("part-00.npy", TOKENS.tobytes())
    np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)
    assert_refused(path, "does not begin with 93 4e 55 4d 50 59", 'as in dtype="uint16".')


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([50, 123, 7, 8, 9, 10, 11, 12], np.int64),
        np.array([40, 123 + 256 * 3, 7, 8, 9, 10, 11, 12], np.int64),
        np.array([16, 0, 123, 5, 6, 7, 8, 9], np.uint32),
        np.array([40, 0, 0, 0, 123] + 40 * [1], np.uint16),
    ],
    ids=["int64", "int64 again", "uint32", "uint16"],
)
def test_a_headerless_file_may_begin_like_a_safetensors_file(file, tokens):
    # Of int64 files one in 256 does: the first token reads as a header length, and '{' is 123.
    path = file("train.bin", tokens.tobytes())
    np.testing.assert_array_equal(open_tokens(path, dtype=tokens.dtype)[:], tokens)


def test_what_is_written_is_nothing_but_tokens(tmp_path):
    write_file(tmp_path / "t.bin", [np.arange(1000)], np.dtype("uint16"), headerless.WRITER, replace=False)
    assert (tmp_path / "t.bin").read_bytes() == np.arange(1000, dtype="<u2").tobytes()
