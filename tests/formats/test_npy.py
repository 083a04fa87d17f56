"""NumPy's .npy files: golden bytes, every way a file can be wrong, and what is written."""

import io
import struct

import numpy as np
import pytest
from helpers import DTYPES, assert_refused, npy_bytes, tokens_at

from tokenloader import open_tokens
from tokenloader.formats import npy
from tokenloader.formats.detect import locate
from tokenloader.formats.extent import Extent
from tokenloader.tokens.writing import write_file

TOKENS = np.array([5, 0, 65_535, 50_256, 7], np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_an_npy_file_of_each_version_is_opened(file, version, dtype):
    tokens = np.arange(200, 255).astype(dtype)
    path = file("tokens.npy", npy_bytes(tokens, version))
    extent = locate(path, key="tokens", dtype=None)
    begin = path.stat().st_size - tokens.nbytes
    assert extent == Extent(path, begin, np.dtype(dtype), 55, npy.FORMAT)
    np.testing.assert_array_equal(tokens_at(extent), tokens)


def test_an_npy_file_by_hand_is_opened(file):
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
    assert_refused(
        file("t.npy", npy_bytes(np.arange(4).astype(dtype))),
        f"the array is of dtype {name} in big-endian byte order",
        ".astype(...)",
    )


def test_an_npy_file_that_is_not_flat_is_refused_with_its_shape(file):
    for array in (np.zeros((2, 3), np.uint16), np.asfortranarray(np.zeros((2, 3), np.uint16))):
        assert_refused(file("t.npy", npy_bytes(array)), "the array has shape (2, 3)", "reshape(-1)")
    assert_refused(file("t.npy", npy_bytes(np.array(3, np.uint16))), "the array has shape ()")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int8", "int16", "uint64", "U3"])
def test_an_npy_file_of_another_dtype_is_refused_with_its_dtype(file, dtype):
    array = np.zeros(4, dtype)
    assert_refused(
        file("t.npy", npy_bytes(array)),
        f"the array is of dtype {array.dtype.name}, which cannot hold token ids",
        "uint8, uint16, uint32, int32, int64",
    )


def test_an_npy_file_of_objects_is_refused_and_not_unpickled(file):
    data = io.BytesIO()
    np.save(data, np.array([1, "a", None], object), allow_pickle=True)
    assert_refused(
        file("t.npy", data.getvalue()), "the array is of dtype object, which cannot hold token ids"
    )


@pytest.mark.parametrize("cut", [1, 2, 9_999, 10_000])
def test_a_truncated_npy_file_is_refused_with_both_sizes(file, cut):
    data = npy_bytes(np.zeros(5000, np.uint16))
    path = file("t.npy", data[:-cut])
    assert_refused(path, "promises 10,000 bytes of tokens", f"the file has {10_000 - cut:,}")


def test_an_npy_file_longer_than_its_header_says_is_refused_with_both_sizes(file):
    path = file("t.npy", npy_bytes(TOKENS) + b"\0\0")
    assert_refused(path, "promises 10 bytes of tokens", "the file has 12")


@pytest.mark.parametrize("size", [6, 7, 8, 9, 40, 127])
def test_an_npy_file_truncated_in_its_header_is_refused(file, size):
    data = npy_bytes(TOKENS)
    assert len(data) == 128 + TOKENS.nbytes
    assert_refused(file("t.npy", data[:size]), "corrupt .npy header (")


def test_a_corrupt_npy_header_is_refused(file):
    data = npy_bytes(TOKENS)
    assert_refused(file("a.npy", data.replace(b"{'descr'", b"['descr'")), "corrupt .npy header (")
    assert_refused(file("b.npy", data.replace(b"'descr'", b"'dascr'")), "corrupt .npy header (")
    assert_refused(file("c.npy", data.replace(b"<u2", b"<x2")), "corrupt .npy header (")


def test_an_npy_file_of_an_unknown_version_is_refused_with_its_version(file):
    data = npy_bytes(TOKENS)
    path = file("t.npy", data[:6] + b"\x09\x00" + data[8:])
    assert_refused(path, "corrupt .npy header (format version (9, 0); known are 1.0, 2.0 and 3.0)")


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_are_of_one_length_for_any_count(dtype):
    lengths = {len(npy.header(np.dtype(dtype), n)) for n in (0, 1, 2**31, 2**33, 10**15)}
    assert len(lengths) == 1
    assert lengths.pop() % 64 == 0


def test_what_is_written_is_what_numpy_reads(tmp_path):
    write_file(tmp_path / "t.npy", [np.arange(1000)], np.dtype("uint16"), npy.WRITER, replace=False)
    np.testing.assert_array_equal(np.load(tmp_path / "t.npy"), np.arange(1000))
    assert np.load(tmp_path / "t.npy").dtype == np.uint16
