"""Foreign files: each is called what it is, with dtype= too, and the way to its tokens works.

data/arrow_* was written by pyarrow 26.0.1:

    ids = pyarrow.array([[1, 2, 3], [4, 5]], pyarrow.list_(pyarrow.uint16()))
    table = pyarrow.table({"input_ids": ids})
    for name, make in ("arrow_stream", pyarrow.ipc.new_stream), ("arrow_file", pyarrow.ipc.new_file):
        with pyarrow.OSFile(f"{name}.arrow", "wb") as file, make(file, table.schema) as writer:
            writer.write_table(table)
"""

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_raises, llm_c_bytes, npy_bytes

from tokenloader import open_tokens
from tokenloader.formats.detect import locate

DATA = Path(__file__).parent / "data"
TOKENS = np.random.default_rng(0).integers(0, 50_257, 1000).astype(np.uint16)


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tokens.npy", npy_bytes(TOKENS))
    return file.getvalue()


def tarred():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("000.json"), io.BytesIO())
    return file.getvalue()


def samples(items, settings=b""):
    """By litdata's streaming/writer.py, and with settings by mosaicml-streaming's mds/writer.py."""
    offsets = np.cumsum([8 + 4 * len(items) + len(settings), *map(len, items)]).astype("<u4")
    return struct.pack("<I", len(items)) + offsets.tobytes() + settings + b"".join(items)


def lit_packed(tokens, code):
    """By lit-gpt's packed_dataset.py."""
    return struct.pack("<7sQBQ", b"LITPKDS", 1, code, len(tokens)) + tokens.tobytes()


ITEMS = [TOKENS[:300].tobytes(), TOKENS[300:].tobytes()]
SETTINGS = json.dumps({"column_encodings": ["bytes"], "format": "mds"}).encode()
# By crc32c 2.8: u64 length, masked CRC, "hello", masked CRC.
TFRECORD = bytes.fromhex("0500000000000000 eab2043e 68656c6c6f bb1f1c19")
TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e80024de9032e")  # torch.save without its zip archive
FOREIGN = {
    "a Git LFS pointer; fetch the file itself: git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid",
    "a Parquet file; ": b"PAR1\x15\x04\x15",
    "an Arrow file; ": (DATA / "arrow_file.arrow").read_bytes(),
    "an Arrow stream (Hugging Face datasets); ": (DATA / "arrow_stream.arrow").read_bytes(),
    "a zip archive (.npz, or PyTorch's); ": zipped(),
    "a tar archive; unpack it first": tarred(),
    "an HDF5 file; ": b"\x89HDF\r\n\x1a\n\0\0",
    "a PyTorch file; ": TORCH,
    "a pickle; ": pickle.dumps({"vocab_size": 65, "itos": list("abc")}, protocol=4),
    "gzip; decompress it first": gzip.compress(b"1,2,3\n"),
    "zstd; decompress it first": bytes.fromhex("28b52ffd0401"),
    "xz; decompress it first": lzma.compress(b"1"),
    "bzip2; decompress it first": bz2.compress(b"1"),
    "lz4; decompress it first": bytes.fromhex("04224d186440a7"),
    "llm.c's evaluation file; ": struct.pack("<256i", 20240522, 1, *[0] * 254),
    "llm.c .bin in big-endian byte order; ": struct.pack(">256i", 20240520, 1, *[0] * 254),
    "a TFRecord file; ": TFRECORD,
    "a Riegeli or ArrayRecord file; ": bytes.fromhex("83af70d10d884a3f0000000000000000"),
    "a chunk of samples by litdata; ": samples(ITEMS),
    "a chunk of samples by mosaicml-streaming; ": samples(ITEMS, SETTINGS),
    "an index of samples by litdata; ": b'{"chunks": [{"chunk_bytes": 2000}], "config": {}}',
    "an index of samples by mosaicml-streaming; ": b'{"shards": [{"format": "mds"}], "version": 2}',
    "lit-gpt's packed data, tokens after a header; ": lit_packed(TOKENS, 8),
    "an index of the old kind (TNTIDX); ": b"TNTIDX\0\0" + struct.pack("<QQQ", 1, 4, 4),
}


@pytest.mark.parametrize("name", ["train.bin", "part.npy", "t.safetensors", "t.ds", "t"])
@pytest.mark.parametrize("said", FOREIGN)
def test_a_foreign_file_is_called_what_it_is_with_dtype_too(file, said, name):
    path = file(name, FOREIGN[said])
    assert_raises(lambda: open_tokens(path), f"{path}: is {said}")
    for dtype in ("uint8", "uint16", "uint32", "int64"):
        assert_raises(
            lambda dtype=dtype: open_tokens(path, dtype=dtype),
            f"{path}: is {said}",
            f'open np.memmap({str(path)!r}, "{dtype}", "r") instead of its path',
        )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a.csv.gz", "gzip, by its name; decompress it first"),
        ("a.bin.zst", "zstd, by its name; decompress it first"),
        ("a.BZ2", "bzip2, by its name"),
        ("meta.pkl", "a pickle or PyTorch file, by its name; load it, and write its ids"),
        ("a.pt", "a pickle or PyTorch file, by its name"),
    ],
)
def test_a_file_whose_bytes_are_too_few_to_tell_is_called_by_its_name(file, name, what):
    path = file(name, TOKENS.tobytes())
    for dtype in (None, "uint16"):
        assert_raises(lambda dtype=dtype: open_tokens(path, dtype=dtype), f"{path}: is {what}")
    path.write_bytes(llm_c_bytes(TOKENS))  # bytes come first
    np.testing.assert_array_equal(open_tokens(path)[:], TOKENS)


@pytest.mark.parametrize(
    "text",
    [
        b'{"text": "Once upon a time, there was a caf\xc3\xa9."}\n' * 100,
        b"<!DOCTYPE html>\r\n<html><head><title>404</title></head></html>",
        b"id,length\n" + b"".join(b"%d,%d\n" % (i, 2 * i) for i in range(1000)),
        "データを読む。".encode() * 100,
        "\ufeffid,text\n1,soft\u00adhyphen and zero\u200bwidth\n".encode(),
    ],
)
def test_text_is_tokens_only_of_one_byte(file, text):
    path = file("train.bin", text + b"\n" * (-len(text) % 8))
    for dtype in (None, "uint16", "int32"):
        assert_raises(
            lambda dtype=dtype: open_tokens(path, dtype=dtype),
            f"{path}: is text; it begins with {text.decode()[:30]!r}: ",
            'take its bytes for tokens with dtype="uint8"',
        )
    assert open_tokens(path, dtype="uint8")[: len(text)].tobytes() == text


@pytest.mark.parametrize(
    ("dtype", "first"),
    [
        ("uint16", np.arange(8224, 8224 + 64)),
        ("uint16", np.arange(30_000, 30_040)),
        ("uint16", np.full(1000, 12345)),
        ("uint32", [65, 66, 67] * 50),
        ("int32", np.arange(0x61626364, 0x61626364 + 10)),
    ],
)
def test_ids_that_look_a_little_like_text_are_ids(file, dtype, first):
    tokens = np.asarray(first, dtype)
    np.testing.assert_array_equal(open_tokens(file("train.bin", tokens.tobytes()), dtype=dtype)[:], tokens)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_headerless_tokens_are_not_taken_for_anything_else(tmp_path, dtype):
    rng = np.random.default_rng(1)
    path = tmp_path / "t.bin"
    high = min(50_257, np.iinfo(dtype).max)
    for i in range(300):
        tokens = rng.integers(0, high if i % 2 else min(high, 300), rng.integers(1, 600)).astype(dtype)
        path.write_bytes(tokens.tobytes())
        assert locate(path, key="tokens", dtype=dtype).num_tokens == len(tokens)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],  # the last offset is no longer the size
        lambda data: data[:4] + struct.pack("<I", 17) + data[8:],
        lambda data: struct.pack("<I", 0) + data[4:],
    ],
)
def test_numbers_that_are_almost_offsets_of_samples_are_tokens(file, damage):
    data = damage(samples(ITEMS))
    assert len(open_tokens(file("t.bin", data), dtype="uint8")) == len(data)


def test_numbers_that_are_almost_a_record_or_a_message_are_tokens(file):
    arrow = (DATA / "arrow_stream.arrow").read_bytes()
    for data in (
        TFRECORD[:8] + b"\0" + TFRECORD[9:],
        b"\xff" * 64,
        arrow[:4] + b"\1" + arrow[5:],
        b"\x80\4\x95" * 20,
    ):
        assert len(open_tokens(file("t.bin", data), dtype="uint8")) == len(data)


def test_whoever_knows_better_opens_a_memory_map(file):
    path = file("t.bin", b"\x1f\x8b\x08\x00" + TOKENS.tobytes())
    with pytest.raises(ValueError, match="is gzip") as raised:
        open_tokens(path, dtype="uint16")
    (call,) = re.findall(r"np\.memmap\(.*?\)", str(raised.value))
    tokens = open_tokens(eval(call, {"np": np}))
    np.testing.assert_array_equal(tokens[2:], TOKENS)


@pytest.mark.parametrize(("code", "dtype"), [(1, "uint8"), (4, "int32"), (5, "int64"), (8, "uint16")])
def test_the_advice_for_packed_data_of_lit_gpt_opens_its_tokens(file, code, dtype):
    ids = np.arange(1, 100).astype(dtype)
    with pytest.raises(ValueError, match="is lit-gpt's packed data") as raised:
        open_tokens(file("train_slim_0000000000.bin", lit_packed(ids, code)))
    (call,) = re.findall(r"np\.memmap\(.*?\)", str(raised.value))
    np.testing.assert_array_equal(open_tokens(eval(call, {"np": np}))[:], ids)


def test_data_of_which_the_index_is_of_the_old_kind_is_refused(file):
    path = file("t.bin", (TOKENS.astype(np.int32) + 1).tobytes())  # as fairseq writes: each id plus 1
    index = file("t.idx", b"TNTIDX\0\0" + struct.pack("<QQQQQ", 1, 4, 4, 1, 1))
    for dtype in (None, "int32"):
        said = (
            f"{path}: is data of the old kind (TNTIDX); t.idx beside it says so: load it, and write its ids"
        )
        assert_raises(lambda dtype=dtype: open_tokens(path, dtype=dtype), said)
        assert_raises(
            lambda dtype=dtype: open_tokens(index, dtype=dtype), f"{index}: is an index of the old kind"
        )


def test_foreign_files_beside_shards_are_refused_with_a_call_that_opens_the_shards(tmp_path):
    # As OLMo-core writes: raw tokens named .npy, and beside them gzipped metadata.
    for i in range(3):
        (tmp_path / f"part-{i}-00000.npy").write_bytes(TOKENS.tobytes())
        (tmp_path / f"part-{i}-00000.csv.gz").write_bytes(gzip.compress(b"0,300,a\n300,1000,b\n"))
    (tmp_path / "notes.html").write_text("<!DOCTYPE html><html><body>How these were made.</body></html>")
    assert len(open_tokens(tmp_path, dtype="uint16")) == 3000
    with pytest.raises(ValueError, match="has files of several formats") as raised:
        open_tokens(tmp_path / "*", dtype="uint16")
    message = str(raised.value)
    assert "headerless: part-0-00000.npy and 2 more" in message
    assert "no token files but gzip: part-0-00000.csv.gz and 2 more" in message
    assert "no token files but text: notes.html" in message
    (call,) = re.findall(r"open_tokens\(.*\)", message)
    assert call == f"open_tokens('{tmp_path}/part-*-*.npy', dtype='uint16')"
    assert len(eval(call, {"open_tokens": open_tokens})) == 3000


def test_a_directory_of_chunks_of_litdata_is_no_directory_of_tokens(tmp_path):
    for i in range(2):
        (tmp_path / f"chunk-0-{i}.bin").write_bytes(samples(ITEMS))
    (tmp_path / "index.json").write_bytes(b'{"chunks": []}')
    for source in (tmp_path, tmp_path / "*.bin", tmp_path / "*"):
        for dtype in (None, "uint16"):
            said = f"{tmp_path / 'chunk-0-0.bin'}: is a chunk of samples by litdata; read them with litdata"
            assert_raises(lambda source=source, dtype=dtype: open_tokens(source, dtype=dtype), said)


def test_the_calls_shown_open_all_of_a_group_and_none_of_another(tmp_path):
    for name in ("shard_1.bin", "shard_3.bin"):
        (tmp_path / name).write_bytes(TOKENS.tobytes())
    (tmp_path / "shard_2.bin").write_bytes(gzip.compress(b"2"))
    with pytest.raises(ValueError, match="several formats") as raised:
        open_tokens(tmp_path, dtype="uint16")
    (call,) = re.findall(r"open_tokens\(.*\)", str(raised.value))
    assert len(eval(call, {"open_tokens": open_tokens})) == 2000
    for name in "abcdef":
        (tmp_path / f"{name}_0.bin").write_bytes(TOKENS.tobytes())
    with pytest.raises(ValueError, match="several formats") as raised:
        open_tokens(tmp_path, dtype="uint16")
    assert f"'{tmp_path}/c_0.bin', ...]" in str(raised.value)  # more than can be shown
