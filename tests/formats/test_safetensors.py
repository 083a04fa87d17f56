"""Safetensors files: those of the real library, by hand from the specification, and damaged ones."""

import json
import struct
import time

import numpy as np
import pytest
from helpers import DTYPES, assert_refused, tokens_at
from safetensors.numpy import save, save_file

from tokenloader import open_tokens
from tokenloader.formats import safetensors
from tokenloader.formats.detect import locate
from tokenloader.formats.extent import Extent
from tokenloader.formats.format import look_at
from tokenloader.formats.safetensors import Tensor, read_tensors

TOKENS = np.array([5, 0, 65_535, 50_256, 7], np.uint16)


def safetensors_bytes(header, data, header_bytes=None):
    """By the specification. header: a str, or what json writes, without the padding of the library."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    length = len(text) if header_bytes is None else header_bytes
    return struct.pack("<Q", length) + text + bytes(data)


def u16_header(name="tokens", count=5):
    return {name: {"dtype": "U16", "shape": [count], "data_offsets": [0, 2 * count]}}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_safetensors_file_of_the_real_library_is_opened(tmp_path, dtype):
    path = tmp_path / "train.safetensors"
    tokens = np.arange(200, 255).astype(dtype)
    save_file({"tokens": tokens}, path)
    extent = locate(path, key="tokens", dtype=None)
    begin = path.stat().st_size - tokens.nbytes
    assert extent == Extent(path, begin, np.dtype(dtype), 55, safetensors.FORMAT)
    np.testing.assert_array_equal(tokens_at(extent), tokens)


def test_a_tensor_is_found_among_others_and_metadata(tmp_path):
    path = tmp_path / "several.safetensors"
    tensors = {
        "first": np.arange(3, dtype=np.uint8),
        "tokens": TOKENS,
        "weights": np.ones((2, 3), np.float32),
        "last": np.arange(9, dtype=np.int64),
    }
    save_file(tensors, path, metadata={"tokens": "a name that is also a tensor's", "end": "50256"})
    for key in ("first", "tokens", "last"):
        extent = locate(path, key=key, dtype=None)
        assert extent.dtype == tensors[key].dtype
        np.testing.assert_array_equal(tokens_at(extent), tensors[key])


@pytest.mark.parametrize("padding", range(9))
def test_safetensors_data_may_start_at_any_offset(file, padding):
    path = file("t.safetensors", safetensors_bytes(json.dumps(u16_header()) + " " * padding, TOKENS))
    extent = locate(path, key="tokens", dtype=None)
    assert extent.offset_bytes == 8 + len(json.dumps(u16_header())) + padding
    np.testing.assert_array_equal(tokens_at(extent), TOKENS)
    np.testing.assert_array_equal(open_tokens(path)[:], TOKENS)


def test_safetensors_data_may_be_misaligned_by_a_tensor_before_it(file):
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "tokens": {"dtype": "U16", "shape": [5], "data_offsets": [3, 13]},
    }
    path = file("t.safetensors", safetensors_bytes(header, b"abc" + TOKENS.tobytes()))
    np.testing.assert_array_equal(open_tokens(path)[:], TOKENS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_safetensors_file_is_known_by_its_bytes_whatever_its_name(file, dtype):
    tokens = np.arange(5).astype(dtype)
    for name in ("tokens.bin", "tokens", "3f2a9c"):
        extent = locate(file(name, save({"tokens": tokens})), key="tokens", dtype=None)
        np.testing.assert_array_equal(tokens_at(extent), tokens)


def test_a_missing_key_is_answered_with_the_keys_there_are(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({"train": TOKENS, "weights": np.ones((2, 3), np.float32)}, path, metadata={"a": "b"})
    assert_refused(path, "no tensor 'tokens'", "train (U16[5])", "weights (F32[2, 3])", "Pass key=")
    assert_refused(path, "no tensor 'ids'", key="ids")
    with pytest.raises(ValueError, match="no tensor") as raised:
        locate(path, key="tokens", dtype=None)
    assert "__metadata__" not in str(raised.value)


def test_metadata_is_no_tensor(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({"train": TOKENS}, path, metadata={"a": "b"})
    assert_refused(path, "no tensor '__metadata__'", key="__metadata__")


def test_a_safetensors_file_without_tensors_says_so(file):
    assert_refused(
        file("t.safetensors", safetensors_bytes({}, b"")), "no tensor 'tokens'", "there are: none"
    )


def test_of_many_tensors_ten_are_named(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({f"layer{i:02}": np.zeros(1, np.float32) for i in range(25)}, path)
    assert_refused(path, "layer09 (F32[1]) and 15 more. Pass key=")


def test_the_tensors_of_a_file_can_be_listed(file):
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "table": {"dtype": "F16", "shape": [1, 5], "data_offsets": [3, 13]},
    }
    path = file("t.safetensors", safetensors_bytes(header, b"abc" + TOKENS.tobytes()))
    begin = path.stat().st_size - 13
    assert read_tensors(look_at(path)) == [
        Tensor("odd", "U8", (3,), range(begin, begin + 3)),
        Tensor("table", "F16", (1, 5), range(begin + 3, begin + 13)),
    ]


def test_duplicate_keys_are_refused_and_named(file):
    # The library takes one of the two and does not say which.
    entry = '"tokens": {"dtype": "%s", "shape": [%d], "data_offsets": [0, 10]}'
    path = file(
        "t.safetensors",
        safetensors_bytes(f"{{{entry % ('U8', 10)}, {entry % ('U16', 5)}}}", TOKENS),
    )
    assert_refused(path, f"not a valid safetensors file of {path.stat().st_size} bytes")
    assert_refused(path, "the header has 'tokens' more than once")


def test_a_header_of_forty_thousand_tensors_and_one_twice_is_refused_in_time_and_in_short(file):
    entries = [f'"t{i}": {{"dtype": "U16", "shape": [0], "data_offsets": [0, 0]}}' for i in range(40_000)]
    path = file("t.safetensors", safetensors_bytes("{" + ", ".join([*entries, *entries[:20]]) + "}", b""))
    begun = time.process_time()
    with pytest.raises(ValueError, match="the header has 't0', 't1', ") as raised:
        open_tokens(path)
    assert time.process_time() - begun < 8
    assert "'t9' and 10 more more than once" in str(raised.value)


@pytest.mark.parametrize(
    "header",
    [
        {"\x1b[2J" * 200_000: {"dtype": "U16", "shape": [5], "data_offsets": [0, 10]}},
        {"tokens": {"dtype": "U16", "shape": [5] + [1] * 500_000, "data_offsets": [0, 10]}},
        {"\u202e" * 10**6: {"dtype": "U16", "shape": [6], "data_offsets": [0, 10]}},
        {"tokens": {"dtype": "\x9b" * 10**6, "shape": [5], "data_offsets": [0, 10]}},
    ],
    ids=["name", "shape", "name of a damaged tensor", "dtype"],
)
def test_what_a_header_holds_is_told_in_a_short_printable_line(file, header):
    with pytest.raises(ValueError, match=r"t.safetensors: ") as raised:
        open_tokens(file("t.safetensors", safetensors_bytes(header, TOKENS)))
    assert len(str(raised.value)) < 2000
    assert str(raised.value).isprintable()
    assert raised.value.__cause__ is None


def test_duplicate_keys_of_different_data_are_refused(file):
    entry = '"tokens": {"dtype": "U16", "shape": [%d], "data_offsets": [%d, %d]}'
    header = f"{{{entry % (2, 0, 4)}, {entry % (3, 4, 10)}}}"
    assert_refused(file("t.safetensors", safetensors_bytes(header, TOKENS)), "tokens")


def test_duplicate_keys_within_a_tensor_are_refused(file):
    header = '{"tokens": {"dtype": "U16", "shape": [5], "data_offsets": [0, 10], "data_offsets": [0, 10]}}'
    path = file("t.safetensors", safetensors_bytes(header, TOKENS))
    assert_refused(path, f"not a valid safetensors file of {path.stat().st_size} bytes")


GOOD = safetensors_bytes(u16_header(), TOKENS.tobytes())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(GOOD[:5], id="shorter than the header length"),
        pytest.param(GOOD[:8], id="nothing but the header length"),
        pytest.param(GOOD[:30], id="truncated in the header"),
        pytest.param(GOOD[:-10], id="truncated to the header"),
        pytest.param(GOOD[:-1], id="data too short"),
        pytest.param(GOOD + b"\0", id="a trailing byte"),
        pytest.param(
            safetensors_bytes(u16_header(), TOKENS, header_bytes=10**6), id="header past the file"
        ),
        pytest.param(
            safetensors_bytes(u16_header(), TOKENS, header_bytes=2**63), id="header of 2**63 bytes"
        ),
        pytest.param(safetensors_bytes("{not json}", TOKENS), id="garbage in the header"),
        pytest.param(safetensors_bytes("[1, 2, 3]", TOKENS), id="a header that is a list"),
        pytest.param(safetensors_bytes('{"\xff": 1}', TOKENS), id="a header of something else"),
        pytest.param(safetensors_bytes(u16_header(count=4), TOKENS), id="a hole at the end"),
        pytest.param(
            safetensors_bytes({"tokens": {"dtype": "U16", "shape": [4], "data_offsets": [2, 10]}}, TOKENS),
            id="a hole at the start",
        ),
        pytest.param(
            safetensors_bytes({"tokens": {"dtype": "U16", "shape": [6], "data_offsets": [0, 10]}}, TOKENS),
            id="a shape of another size",
        ),
        pytest.param(b"\0" * 100, id="zeros, as a download that was set up and not made"),
        pytest.param(b"<!DOCTYPE html><html>404</html>", id="an error page"),
    ],
)
def test_a_damaged_safetensors_file_is_refused_with_its_size(file, data):
    path = file("t.safetensors", data)
    assert_refused(path, f"not a valid safetensors file of {len(data)} bytes", "is the download complete?")


def test_the_size_of_a_damaged_file_is_the_whole_files(file):
    assert_refused(file("t.safetensors", GOOD + bytes(12_345)), f"of {len(GOOD) + 12_345:,} bytes")


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (2, 3, 4), ()])
def test_a_tensor_that_is_not_flat_is_refused_with_its_shape(tmp_path, shape):
    path = tmp_path / "t.safetensors"
    save_file({"tokens": np.zeros(shape, np.uint16)}, path)
    assert_refused(path, f"tensor 'tokens' has shape {shape}", "reshape(-1)")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "F32"),
        ("float16", "F16"),
        ("bool", "BOOL"),
        ("int8", "I8"),
        ("int16", "I16"),
        ("uint64", "U64"),
    ],
)
def test_a_tensor_of_another_dtype_is_refused_with_its_dtype(tmp_path, dtype, name):
    path = tmp_path / "t.safetensors"
    save_file({"tokens": np.zeros(4, dtype)}, path)
    assert_refused(path, f"tensor 'tokens' is of dtype {name},", "U8, U16, U32, I32, I64", "Is key= right?")


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_are_of_one_length_for_any_count(dtype):
    lengths = {len(safetensors.header(np.dtype(dtype), n)) for n in (0, 1, 2**31, 2**33, 10**15)}
    assert len(lengths) == 1
    assert lengths.pop() % 64 == 0
