"""Files without tokens: skipped beside others where they say so themselves, and else refused."""

import json
import struct

import numpy as np
import pytest
from helpers import assert_raises, llm_c_bytes, npy_bytes
from safetensors.numpy import save

from tokenloader import open_tokens

MEGATRON_INDEX = b"MMIDIDX\0\0" + bytes.fromhex("0100000000000000 08") + bytes(8) + b"\1" + bytes(15)
NONE = np.zeros(0, np.uint16)

# What writers leave when they have nothing to write, by format: {suffix: bytes}.
EMPTY = {
    "safetensors": {".safetensors": save({"tokens": NONE})},
    "npy": {".npy": npy_bytes(NONE)},
    "llm.c": {".bin": llm_c_bytes(NONE)},
    "megatron": {".bin": b"", ".idx": MEGATRON_INDEX},
    # By TokenizedFile.copy(max_tokens_per_file=2) of datatrove 0.10.1, after a file that was just full.
    "datatrove": {".ds": b"", ".ds.index": b"", ".ds.metadata": b"gpt2|2\n0\n0.00 T"},
    "datatrove, no metadata": {".ds": b"", ".ds.index": b""},
    "datatrove, no index": {".ds": b"", ".ds.metadata": b"gpt2|2\n0\n0.00 T"},
    "datatrove, empty documents": {".ds": b"", ".ds.index": bytes(16)},
    "headerless with JSON": {".bin": b"", ".bin.json": b'{"dtype": "uint16", "num_tokens": 0}'},
}
FULL = {
    "safetensors": {".safetensors": save({"tokens": np.array([7, 8], np.uint16)})},
    "npy": {".npy": npy_bytes(np.array([7, 8], np.uint16))},
    "llm.c": {".bin": llm_c_bytes(np.array([7, 8], np.uint16))},
    "megatron": {
        ".bin": b"\7\0\10\0",
        ".idx": MEGATRON_INDEX[:18] + struct.pack("<QQiqqq", 1, 2, 2, 0, 0, 1),
    },
    "datatrove": {".ds": b"\7\0\10\0", ".ds.index": bytes.fromhex("0200000000000000")},
    "headerless with JSON": {".bin": b"\7\0\10\0", ".bin.json": b'{"dtype": "uint16"}'},
}  # fmt: skip


def write(folder, name, files):
    for suffix, data in files.items():
        (folder / (name + suffix)).write_bytes(data)
    return folder / (name + next(iter(files)))


@pytest.mark.parametrize("format", EMPTY)
def test_a_file_that_says_it_has_no_tokens_is_skipped_beside_others(tmp_path, format):
    full, suffix = FULL[format.split(",")[0]], next(iter(EMPTY[format]))
    paths = [write(tmp_path, f"part_{i}", full if i % 2 else EMPTY[format]) for i in range(4)]
    for source in (tmp_path, tmp_path / "*", tmp_path / f"**/*{suffix}", paths, [paths[0], tmp_path]):
        with open_tokens(source) as tokens:
            assert tokens[:].tolist() == [7, 8, 7, 8]
            assert [extent.path for extent in tokens.extents] == paths[1::2]
    if format in ("megatron", "datatrove"):
        assert open_tokens(tmp_path).documents.tolist() == [0, 2, 4]


@pytest.mark.parametrize("format", EMPTY)
def test_without_any_tokens_files_are_refused(tmp_path, format):
    path = write(tmp_path, "a", EMPTY[format])
    said = f"{path}: has no tokens, as the file or its index says ("
    assert_raises(lambda: open_tokens(path), said, "); was the conversion completed?")
    assert_raises(lambda: open_tokens([path, path]), said, "), nor have 1 more files; ")
    write(tmp_path, "b", EMPTY[format])
    for source in (tmp_path, tmp_path / "[ab]*"):
        assert_raises(lambda source=source: open_tokens(source), said, "), nor have 1 more files; ")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_with_dtype_files_that_say_so_are_skipped_and_others_are_not(tmp_path, dtype):
    (tmp_path / "a.ds").write_bytes(np.array([7], dtype).tobytes())
    write(tmp_path, "b", EMPTY["datatrove"])
    assert open_tokens(tmp_path, dtype=dtype)[:].tolist() == [7]
    (tmp_path / "b.ds.index").unlink()
    (tmp_path / "b.ds.metadata").unlink()
    assert_raises(lambda: open_tokens(tmp_path, dtype=dtype), f"{tmp_path / 'b.ds'}: the file is empty")


def test_with_dtype_a_json_file_still_says_that_there_are_no_tokens(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\7\0")
    path = write(tmp_path, "b", EMPTY["headerless with JSON"])
    assert open_tokens(tmp_path, dtype="uint16")[:].tolist() == [7]
    (tmp_path / "b.bin.json").write_text(json.dumps({"dtype": "uint16"}))
    for given in (None, "uint16"):
        assert_raises(lambda given=given: open_tokens(path, dtype=given), f"{path}: the file is empty")


@pytest.mark.parametrize("name", ["b.npy", "b.bin", "b.safetensors", "b.ds"])
def test_a_file_of_no_bytes_of_which_nothing_says_so_is_refused_beside_others(tmp_path, name):
    (tmp_path / "a.npy").write_bytes(npy_bytes(np.array([1], np.uint16)))
    (tmp_path / name).write_bytes(b"")
    for source in (tmp_path, tmp_path / "*", [tmp_path / "a.npy", tmp_path / name]):
        assert_raises(
            lambda source=source: open_tokens(source), f"{tmp_path / name}: the file is empty; was"
        )


@pytest.mark.parametrize("metadata", [b"gpt2|2\n5\n5.00 T", b"gpt2|2\n"])
def test_an_empty_datatrove_file_whose_metadata_does_not_agree_is_refused(tmp_path, metadata):
    path = write(tmp_path, "a", EMPTY["datatrove"] | {".ds.metadata": metadata})
    assert_raises(lambda: open_tokens(path), f"{path}: the file is empty")


def test_a_header_of_no_tokens_before_data_is_refused(tmp_path):
    for name, data in (("a.bin", llm_c_bytes(NONE)), ("a.npy", npy_bytes(NONE))):
        (tmp_path / name).write_bytes(data + b"\1\0")
        assert_raises(
            lambda name=name: open_tokens(tmp_path / name), "promises 0 bytes of tokens, the file has 2"
        )
