"""Headerless files with a JSON file beside them: what that tells, and that no other format loses a file."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import DTYPES, assert_raises, assert_refused, llm_c_bytes, npy_bytes, tokens_at
from safetensors.numpy import save

from tokenloader import open_tokens
from tokenloader.check.info import info
from tokenloader.formats import headerless, json_side_file
from tokenloader.formats.detect import locate
from tokenloader.formats.extent import Extent

TOKENS = np.array([5, 0, 65_535, 50_256, 7], np.uint16)
DATA = Path(__file__).parent / "data"


@pytest.fixture
def described(file):
    """Writes train.bin, or a file of another name, and its JSON file; returns the path of the first."""

    def write(fields, data=TOKENS, name="train.bin", side_name="train.json"):
        file(side_name, fields if isinstance(fields, bytes) else json.dumps(fields).encode())
        return file(name, bytes(data))

    return write


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "side_name"),
    [
        ("train.bin", "train.json"),
        ("train.bin", "train.bin.json"),
        ("part.0.npy", "part.0.json"),
        ("part.0.npy", "part.0.npy.json"),
    ],
)
def test_the_json_file_beside_a_headerless_file_tells_its_dtype(described, dtype, name, side_name):
    tokens = np.arange(200, 255).astype(dtype)
    path = described({"dtype": dtype, "vocab_size": 300}, tokens.tobytes(), name, side_name)
    extent = locate(path, key="tokens", dtype=None)
    assert extent == Extent(path, 0, np.dtype(dtype), 55, json_side_file.FORMAT)
    np.testing.assert_array_equal(tokens_at(extent), tokens)
    with open_tokens(path) as opened:
        np.testing.assert_array_equal(opened[:], tokens)
        assert opened.documents is None
        assert info(opened, batch_size=1, seq_len=1).files[0].format == "headerless with JSON"


def test_the_longer_name_goes_before_the_shorter_if_it_names_a_dtype(described, file):
    path = described({"dtype": "uint8"})
    side_path = file("train.bin.json", b'{"dtype": "uint16"}')
    assert open_tokens(path).dtype == np.uint16
    side_path.write_bytes(b'{"vocab_size": 50257}')
    assert open_tokens(path).dtype == np.uint8


@pytest.mark.parametrize("name", ["num_tokens", "n_tokens", "token_count"])
def test_a_count_is_checked_against_the_size_also_with_dtype(described, name):
    assert len(open_tokens(described({"dtype": "uint16", name: 5}))) == 5
    for wrong in (4, 6, -5, "5", None, [5]):
        path = described({"dtype": "uint16", name: wrong})
        for given in (None, "uint16"):
            assert_refused(
                path,
                "has 10 bytes, and train.json beside it says dtype uint16 (2 bytes a token), "
                f"{name} {wrong!r}; is one of the two truncated",
                "move train.json away and pass dtype=",
                dtype=given,
            )


def test_a_size_that_is_no_whole_number_of_tokens_is_refused(described):
    path = described({"dtype": "uint32"})
    assert_refused(path, "has 10 bytes, and train.json beside it says dtype uint32 (4 bytes a token)")


def test_dtype_may_be_given_if_it_agrees_and_the_file_is_then_headerless(described):
    path = described({"dtype": "uint16"})
    assert locate(path, key="tokens", dtype="uint16").format is headerless.FORMAT
    assert_refused(
        path,
        "dtype=int32 was given, and train.json beside it says uint16; leave dtype= out, or correct "
        "train.json",
        dtype="int32",
    )


@pytest.mark.parametrize("named", ["bfloat16", "int16", ">u2", "", 16, None, ["uint16"], {"a": 1}])
def test_a_dtype_that_holds_no_tokens_is_refused_unless_dtype_is_given(described, tmp_path, named):
    path = described({"dtype": named})
    assert_raises(
        lambda: open_tokens(path),
        f'{tmp_path / "train.json"}: its "dtype" is {named!r}; expected one of uint8, uint16, ',
        "Correct it, or if it does not describe train.bin pass dtype=",
    )
    np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"vocab_size": 50257}',
        b'["dtype"]',
        b'"dtype"',
        b"{not json",
        b'{"dtype": "uint16"}\n{"dtype": "uint16"}\n',
        b'{"dtype": "\xff"}',
        b"",
        b'{"a":' * 9999,
        b'{"dtype": "uint16", "a": "' + b"x" * (1 << 20) + b'"}',
    ],
    ids=["empty", "others", "list", "text", "torn", "lines", "bytes", "nothing", "deep", "large"],
)
def test_json_that_names_no_dtype_does_not_count(described, text):
    path = described(text)
    assert_refused(path, "(no train.bin.json or train.json beside it names a dtype)")
    np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)


@pytest.mark.parametrize("length", [240, 249, 251, 255])
def test_a_name_that_leaves_no_room_for_the_json_file_s_name_has_none(file, length):
    path = file("a" * (length - 4) + ".bin", TOKENS.tobytes())
    np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)


def test_a_file_of_another_name_is_not_taken(described, file):
    for name in ("train.txt", "train"):
        path = described({"dtype": "uint16"}, name=name)
        assert_refused(path, "headerless with JSON (is not named .bin or .npy)")
    assert_refused(file("train.json", b'{"dtype": "uint8"}'), "is of no known format")


@pytest.mark.parametrize(
    ("name", "data", "format"),
    [
        ("train.bin", llm_c_bytes(TOKENS), "llm.c .bin"),
        ("train.bin", save({"tokens": TOKENS}), "safetensors"),
        ("train.safetensors", save({"tokens": TOKENS}), "safetensors"),
        ("train.npy", npy_bytes(TOKENS), "NumPy .npy"),
        ("train.bin", npy_bytes(TOKENS), "NumPy .npy"),
    ],
)
def test_a_file_with_a_header_is_its_own_format(described, name, data, format):
    path = described({"dtype": "uint8", "num_tokens": 9}, data, name)
    extent = locate(path, key="tokens", dtype=None)
    assert extent.format.name == format
    np.testing.assert_array_equal(tokens_at(extent), TOKENS)


@pytest.mark.parametrize("source", ["megatron_uint16.bin", "datatrove_uint16.ds"])
@pytest.mark.parametrize("side_name", ["{0}.json", "{1}.json"])
def test_a_file_with_an_index_is_its_own_format(tmp_path, source, side_name):
    for path in DATA.glob(f"{Path(source).stem}.*"):
        shutil.copy(path, tmp_path)
    side_path = tmp_path / side_name.format(source, Path(source).stem)
    side_path.write_text('{"dtype": "uint8"}')
    with open_tokens(tmp_path / source) as tokens:
        assert tokens.dtype == np.uint16
        assert len(tokens.documents) == 5


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("train.safetensors", save({"tokens": TOKENS})[:-2], "not a valid safetensors file"),
        ("train.npy", npy_bytes(TOKENS)[:-2], "the header promises 10 bytes"),
        ("train.bin", llm_c_bytes(TOKENS)[:-2], "the header promises 10 bytes"),
        ("train.bin", b"version https://git-lfs.github.com/spec/v1\n", ": is a Git LFS pointer"),
        ("train.bin", b"PK\x03\x04", ": is a zip archive"),
    ],
)
def test_a_damaged_or_other_file_is_not_opened_by_its_json_file(described, name, data, named):
    assert_refused(described({"dtype": "uint8"}, data, name), named)


def test_tokens_that_begin_like_a_safetensors_file_are_opened(described):
    tokens = np.array([50, 123, 7, 8, 9, 10, 11, 12], np.int64)
    path = described({"dtype": "int64", "n_tokens": 8}, tokens.tobytes())
    np.testing.assert_array_equal(open_tokens(path)[:], tokens)


def test_shards_may_each_have_a_json_file_or_only_some_with_dtype(tmp_path):
    for i in range(3):
        TOKENS.tofile(tmp_path / f"part_{i}.bin")
        (tmp_path / f"part_{i}.json").write_text('{"dtype": "uint16"}')
    for source in (tmp_path, tmp_path / "*", tmp_path / "*.bin"):
        assert open_tokens(source)[:].tolist() == 3 * TOKENS.tolist()
    (tmp_path / "part_1.json").unlink()
    assert_raises(
        lambda: open_tokens(tmp_path),
        "headerless with JSON: part_0.bin and 1 more; unknown or headerless: part_1.bin",
    )
    assert len(open_tokens(tmp_path, dtype="uint16")) == 15
