"""Recognising files, and finding the tokens in each format without an index: golden bytes, and every way
a file can be wrong.

Good files are made by the format's own writer, or by hand from its specification.
"""

import io
import os
import re
import struct

import numpy as np
import pytest
from safetensors.numpy import save

from tokenloader import open_tokens
from tokenloader.formats.detect import locate
from tokenloader.formats.extent import TOKEN_DTYPES, Extent, token_dtype

DTYPES = "uint8", "uint16", "uint32", "int32", "int64"
TOKENS = np.array([5, 0, 65_535, 50_256, 7], np.uint16)


def npy_bytes(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def llm_c_bytes(tokens, magic=20240520, version=1, count=None):
    """As llm.c's dev/data/data_common.py writes: 256 int32, then the tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


def tokens_at(extent):
    data = extent.path.read_bytes()[extent.offset_bytes : extent.offset_bytes + extent.nbytes]
    return np.frombuffer(data, extent.dtype)


def fails(path, *named, error=ValueError, key="tokens", dtype=None):
    """locate and open_tokens fail with a message that has the path and everything named."""
    for opening in (locate, open_tokens):
        with pytest.raises(error) as raised:
            opening(path, key=key, dtype=dtype)
        for part in (str(path), *named):
            assert part in str(raised.value)


# .npy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_an_npy_file_of_each_version(file, version, dtype):
    tokens = np.arange(200, 255).astype(dtype)
    path = file("tokens.npy", npy_bytes(tokens, version))
    extent = locate(path, key="tokens", dtype=None)
    begin = path.stat().st_size - tokens.nbytes
    assert extent == Extent(path, begin, np.dtype(dtype), 55, "NumPy .npy")
    np.testing.assert_array_equal(tokens_at(extent), tokens)


def test_an_npy_file_by_hand(file):
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (5,), }\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + TOKENS.tobytes()
    extent = locate(file("tokens.npy", data), key="tokens", dtype=None)
    assert extent.offset_bytes == 10 + len(header)
    np.testing.assert_array_equal(tokens_at(extent), TOKENS)


def test_an_npy_file_is_known_by_its_bytes_whatever_its_name(file):
    extent = locate(file("tokens.bin", npy_bytes(TOKENS)), key="tokens", dtype=None)
    np.testing.assert_array_equal(tokens_at(extent), TOKENS)


def test_the_fortran_flag_says_nothing_of_a_flat_array(file):
    data = npy_bytes(TOKENS).replace(b"'fortran_order': False", b"'fortran_order': True ")
    assert np.load(io.BytesIO(data)).tolist() == TOKENS.tolist()
    np.testing.assert_array_equal(open_tokens(file("tokens.npy", data))[:], TOKENS)


@pytest.mark.parametrize("dtype", [">u2", ">u4", ">i4", ">i8"])
def test_a_big_endian_npy_file_is_refused_and_called_that(file, dtype):
    name = np.dtype(dtype).name
    fails(
        file("t.npy", npy_bytes(np.arange(4).astype(dtype))),
        f"the array is of dtype {name} in big-endian byte order",
        ".astype(...)",
    )


def test_an_npy_file_that_is_not_flat_is_refused_with_its_shape(file):
    for array in (np.zeros((2, 3), np.uint16), np.asfortranarray(np.zeros((2, 3), np.uint16))):
        fails(file("t.npy", npy_bytes(array)), "the array has shape (2, 3)", "reshape(-1)")
    fails(file("t.npy", npy_bytes(np.array(3, np.uint16))), "the array has shape ()")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int8", "int16", "uint64", "U3"])
def test_an_npy_file_of_another_dtype_is_refused_with_its_dtype(file, dtype):
    array = np.zeros(4, dtype)
    fails(
        file("t.npy", npy_bytes(array)),
        f"the array is of dtype {array.dtype.name}, which cannot hold token ids",
        "uint8, uint16, uint32, int32, int64",
    )


def test_an_npy_file_of_objects_is_refused_and_not_unpickled(file):
    data = io.BytesIO()
    np.save(data, np.array([1, "a", None], object), allow_pickle=True)
    fails(
        file("t.npy", data.getvalue()), "the array is of dtype object, which cannot hold token ids"
    )


def test_an_npy_file_without_tokens_is_refused(file):
    fails(file("t.npy", npy_bytes(np.zeros(0, np.uint16))), "the array has no tokens")


@pytest.mark.parametrize("cut", [1, 2, 9_999, 10_000])
def test_a_truncated_npy_file_is_refused_with_both_sizes(file, cut):
    data = npy_bytes(np.zeros(5000, np.uint16))
    path = file("t.npy", data[:-cut])
    fails(path, "promises 10,000 bytes of tokens", f"the file has {10_000 - cut:,}")


def test_an_npy_file_longer_than_its_header_says_is_refused_with_both_sizes(file):
    path = file("t.npy", npy_bytes(TOKENS) + b"\0\0")
    fails(path, "promises 10 bytes of tokens", "the file has 12")


@pytest.mark.parametrize("size", [6, 7, 8, 9, 40, 127])
def test_an_npy_file_truncated_in_its_header_is_refused(file, size):
    data = npy_bytes(TOKENS)
    assert len(data) == 128 + TOKENS.nbytes
    fails(file("t.npy", data[:size]), "corrupt .npy header (")


def test_a_corrupt_npy_header_is_refused(file):
    data = npy_bytes(TOKENS)
    fails(file("a.npy", data.replace(b"{'descr'", b"['descr'")), "corrupt .npy header (")
    fails(file("b.npy", data.replace(b"'descr'", b"'dascr'")), "corrupt .npy header (")
    fails(file("c.npy", data.replace(b"<u2", b"<x2")), "corrupt .npy header (")


def test_an_npy_file_of_an_unknown_version_is_refused_with_its_version(file):
    data = npy_bytes(TOKENS)
    path = file("t.npy", data[:6] + b"\x09\x00" + data[8:])
    fails(path, "corrupt .npy header (format version (9, 0); known are 1.0, 2.0 and 3.0)")


# llm.c


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")]
)
def test_an_llm_c_file_of_each_magic(file, magic, version, dtype):
    tokens = TOKENS.astype(dtype)
    for name in ("fineweb_train_000001.bin", "tokens.npy", "3f2a9c"):
        path = file(name, llm_c_bytes(tokens, magic, version))
        extent = locate(path, key="tokens", dtype=None)
        assert extent == Extent(path, 1024, np.dtype(dtype), 5, "llm.c .bin")
        np.testing.assert_array_equal(tokens_at(extent), tokens)


def test_an_llm_c_file_by_hand(file):
    head = bytes.fromhex("88d83401 01000000 02000000") + bytes(1012)
    np.testing.assert_array_equal(
        open_tokens(file("t.bin", head + b"\x05\0\x50\xc4"))[:], [5, 50256]
    )


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
            "an llm.c file of magic 20240520 and version 3; known is version 1",
        ),
        (llm_c_bytes(TOKENS, 20240801, 1), "of magic 20240801 and version 1; known is version 7"),
        (llm_c_bytes(TOKENS, count=-5), "counts -5 tokens; the format counts up to 2**31 - 1"),
        (llm_c_bytes(TOKENS[:0]), "the data has no tokens"),
        (llm_c_bytes(TOKENS)[:600], "is cut off in its llm.c header, after 600 of 1024 bytes"),
        (llm_c_bytes(TOKENS)[:4], "is cut off in its llm.c header, after 4 of 1024 bytes"),
    ],
)
@pytest.mark.parametrize("dtype", [None, "uint8"])
def test_a_damaged_llm_c_file_is_refused_with_what_is_wrong(file, data, named, dtype):
    # With dtype= too: headerless tokens begin like this once in 2**32 files, truncated downloads daily.
    fails(file("t.bin", data), named, dtype=dtype)


# Headerless


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_headerless_file_of_each_dtype(file, dtype):
    tokens = np.arange(200, 255).astype(dtype)
    path = file("train.bin", tokens.tobytes())
    for given in (dtype, np.dtype(dtype), getattr(np, dtype), tokens.dtype.str):
        extent = locate(path, key="tokens", dtype=given)
        assert extent == Extent(path, 0, np.dtype(dtype), 55, "headerless")
    np.testing.assert_array_equal(tokens_at(extent), tokens)


def test_a_headerless_file_may_be_one_token(file):
    assert len(open_tokens(file("train.bin", b"\x07"), dtype="uint8")) == 1
    assert open_tokens(file("train.bin", b"\x07\x01"), dtype="uint16")[0] == 0x107


def test_a_headerless_file_without_dtype_is_refused_with_its_first_bytes(file, tmp_path):
    fails(
        file("train.bin", TOKENS.tobytes()),
        "it has 10 bytes and begins with 05 00 00 00 ff ff 50 c4 07 00. Tried: ",
        f'open_tokens("{tmp_path / "train.bin"}", dtype="uint16")',
    )
    fails(file("short.bin", b"\x01\x02"), "it has 2 bytes and begins with 01 02. Tried: ")


def test_the_error_says_of_each_format_why_the_file_is_not_of_it(file):
    fails(
        file("train.bin", bytes([16, 0, 0, 0, 0, 0, 0, 0, 9]) + bytes(40)),
        "NumPy .npy (does not begin with 93 4e 55 4d 50 59); ",
        "llm.c .bin (begins with neither 20240520 nor 20240801); ",
        "Megatron-LM .bin (there is no train.idx beside it); ",
        "datatrove .ds (there is no train.bin.index or .metadata beside it); ",
        "safetensors (byte 8 is 09, not 7b). ",
    )
    fails(
        file("train.bin", TOKENS.tobytes()),
        f"safetensors (a header of {int.from_bytes(TOKENS.tobytes()[:8], 'little'):,} bytes does not fit",
    )


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, so fetch the file"),
        (b"PAR1\x15\x04", "a Parquet file"),
        (b"PK\x03\x04\x14", "a zip archive (.npz, or PyTorch's)"),
        (b"\x1f\x8b\x08", "gzip; decompress it first"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd; decompress it first"),
        (struct.pack("<256i", 20240522, 1, *[0] * 254), "llm.c's evaluation file"),
        (struct.pack(">256i", 20240520, 1, *[0] * 254), "llm.c .bin in big-endian byte order"),
        (struct.pack(">256i", 20240801, 7, *[0] * 254), "llm.c .bin in big-endian byte order"),
    ],
)
def test_a_file_that_is_known_to_be_something_else_is_called_that(file, head, named):
    fails(file("train.bin", head + b"more"), f": is {named}")
    # Whoever says that it is nothing but tokens is believed.
    assert len(open_tokens(file("raw.bin", head), dtype="uint8")) == len(head)


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("uint16", 2), ("uint32", 4), ("int32", 4), ("int64", 8)]
)
def test_a_headerless_file_of_odd_size_is_refused_with_its_size(file, dtype, itemsize):
    fails(
        file("train.bin", bytes(1001)),
        f"1001 bytes is not a whole number of {dtype} tokens ({itemsize} bytes each)",
        "is it truncated, or is dtype= wrong?",
        dtype=dtype,
    )


def test_a_raw_file_named_npy_is_opened_with_dtype_and_explained_without(file):
    # OLMo-core writes raw tokens to files of this name.
    path = file("part-00.npy", TOKENS.tobytes())
    np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)
    fails(path, "does not begin with 93 4e 55 4d 50 59", 'dtype="uint16")')


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


@pytest.mark.parametrize("given", ["uint16", "uint32", np.int64])
def test_dtype_is_refused_for_a_file_whose_header_tells_it(file, given):
    for path, format in (
        (file("t.safetensors", save({"tokens": TOKENS})), "safetensors"),
        (file("a.bin", save({"tokens": TOKENS})), "safetensors"),
        (file("t.npy", npy_bytes(TOKENS)), "NumPy .npy"),
        (file("l.bin", llm_c_bytes(TOKENS)), "llm.c .bin"),
    ):
        fails(
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
    fails(path, named, "one of uint8, uint16, uint32, int32, int64", dtype=dtype)


# Any file


def test_an_empty_file_is_refused(file):
    for name in ("t.bin", "t.npy", "t.safetensors"):
        fails(file(name, b""), "the file is empty")
        fails(file(name, b""), "the file is empty", dtype="uint16")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    fails(tmp_path / "pipe", "is a pipe or a device; write its tokens to a file")


def test_a_link_is_followed_and_a_name_may_be_in_any_script(file, tmp_path):
    data = file("データ [1]*.bin", llm_c_bytes(TOKENS))
    (tmp_path / "link").symlink_to(data)
    for path in (data, tmp_path / "link"):
        np.testing.assert_array_equal(open_tokens(path)[:], TOKENS)
    (tmp_path / "loose").symlink_to(tmp_path / "gone")
    fails(tmp_path / "loose", "no such file", error=FileNotFoundError)


def test_a_missing_file_is_refused_with_where_it_was_looked_for(tmp_path, monkeypatch):
    fails(tmp_path / "gone.bin", "no such file", f"looked in {tmp_path}", error=FileNotFoundError)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"(looked in {tmp_path / 'data'})")):
        open_tokens("data/gone.safetensors")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(file):
    path = file("t.bin", TOKENS.tobytes())
    path.chmod(0)
    fails(path, error=PermissionError, dtype="uint16")


def test_every_token_dtype_is_accepted_and_is_native():
    assert tuple(dtype.name for dtype in TOKEN_DTYPES) == DTYPES
    for name in DTYPES:
        for form in (name, np.dtype(name), np.dtype(name).type, np.dtype(name).newbyteorder("<")):
            assert token_dtype(form, "") == np.dtype(name)
            assert token_dtype(form, "").isnative


def test_the_message_about_a_dtype_begins_with_where_it_was_found():
    with pytest.raises(ValueError, match=r"^the book: float64, which cannot hold token ids"):
        token_dtype(float, "the book: ")


def test_an_extent_knows_its_bytes(tmp_path):
    assert Extent(tmp_path, 9, np.dtype("uint32"), 2**33, "headerless").nbytes == 2**35
