"""Megatron-LM's files: those of the real writers, and every way an index can be wrong.

data/megatron_* was written by the published megatron-core 0.16.1 (torch, which it needs, is too large for
the tests' own environment):

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    for name, dtype in ("megatron_uint16", np.uint16), ("megatron_int32", np.int32):
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=dtype)
        builder.add_item(torch.tensor([5, 6, 50256]))
        builder.end_document()
        builder.add_document(torch.tensor([7, 8, 9, 65535, 50256]), [2, 3])  # of two sequences
        builder.add_item(torch.tensor([], dtype=torch.int64))
        builder.end_document()
        builder.add_item(torch.tensor([11, 50256]))
        builder.end_document()
        builder.finalize(f"{name}.idx")

and data/datatrove_megatron by datatrove 0.10.1:

    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
    documents = [5, 6, 50256], [7, 8, 9, 65535, 50256], [50256], [11, 50256]
    file = MegatronTokenizedFile(".", "datatrove_megatron", token_size=2)
    for document in documents:
        file.write(document)
    file.close()
"""

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_raises

from tokenloader import open_tokens
from tokenloader.formats import megatron
from tokenloader.formats.detect import locate
from tokenloader.formats.extent import Extent
from tokenloader.formats.format import read_document_boundaries

DATA = Path(__file__).parent / "data"
TOKENS = np.array([5, 6, 50256, 7, 8, 9, 65535, 50256, 11, 50256], np.uint16)
FROM_DATATROVE = [5, 6, 50256, 7, 8, 9, 65535, 50256, 50256, 11, 50256]


def write_megatron(prefix, sequences, documents=None, dtype="uint16", code=8, pointers=None, instead=None):
    """By the format's description. documents: sequence numbers; instead: bytes, by field."""
    lengths = [len(sequence) for sequence in sequences]
    tokens = np.concatenate([np.zeros(0, dtype), *sequences]).astype(dtype)
    if pointers is None:
        pointers = np.cumsum([0, *lengths])[:-1] * tokens.itemsize
    if documents is None:
        documents = range(len(lengths) + 1)
    fields = {
        "magic": b"MMIDIDX\0\0",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", code),
        "counts": struct.pack("<QQ", len(lengths), len(documents)),
        "lengths": np.array(lengths, "<i4").tobytes(),
        "pointers": np.array(pointers, "<i8").tobytes(),
        "documents": np.array(documents, "<i8").tobytes(),
        "modes": b"",
    }
    prefix.with_name(prefix.name + ".idx").write_bytes(b"".join((fields | (instead or {})).values()))
    path = prefix.with_name(prefix.name + ".bin")
    path.write_bytes(tokens.tobytes())
    return path


SEQUENCES = TOKENS[:3], TOKENS[3:5], TOKENS[5:5], TOKENS[5:]


# Megatron-LM


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("given", ["bin", "idx"])
def test_files_of_megatron_core_are_opened(dtype, given):
    path = DATA / f"megatron_{dtype}.bin"
    extent = locate(path.with_suffix(f".{given}"), key="tokens", dtype=None)
    assert extent == Extent(path, 0, np.dtype(dtype), 10, megatron.FORMAT, path.with_suffix(".idx"))
    with open_tokens(path.with_suffix(f".{given}")) as tokens:
        np.testing.assert_array_equal(tokens[:], TOKENS.astype(dtype))
        assert tokens.documents.dtype == np.int64
        assert tokens.documents.tolist() == [0, 3, 8, 8, 10]


def test_a_file_of_datatroves_megatron_writer_is_opened():
    with open_tokens(DATA / "datatrove_megatron.bin") as tokens:
        np.testing.assert_array_equal(tokens[:], FROM_DATATROVE)
        assert tokens.documents.tolist() == [0, 3, 8, 9, 11]


def test_what_is_written_by_the_description_is_what_megatron_core_writes(tmp_path):
    sequences = TOKENS[:3], TOKENS[3:5], TOKENS[5:8], TOKENS[8:8], TOKENS[8:]
    path = write_megatron(tmp_path / "t", sequences, [0, 1, 3, 4, 5])
    for suffix in (".bin", ".idx"):
        golden = DATA / f"megatron_uint16{suffix}"
        assert path.with_suffix(suffix).read_bytes() == golden.read_bytes()


@pytest.mark.parametrize(("code", "dtype"), [(1, "uint8"), (4, "int32"), (5, "int64"), (8, "uint16")])
def test_megatron_tokens_of_each_dtype(tmp_path, code, dtype):
    sequences = [np.array([1, 2, 3], dtype), np.array([200], dtype)]
    with open_tokens(write_megatron(tmp_path / "t", sequences, None, dtype, code)) as tokens:
        assert tokens.dtype == dtype
        assert tokens[:].tolist() == [1, 2, 3, 200]
        assert tokens.documents.tolist() == [0, 3, 4]


@pytest.mark.parametrize("code", [2, 3, 6, 7])
def test_megatron_data_that_is_no_tokens_is_refused_with_its_dtype(tmp_path, code):
    dtype = {2: "int8", 3: "int16", 6: "float64", 7: "float32"}[code]
    path = write_megatron(tmp_path / "t", [np.ones(4, dtype)], None, dtype, code)
    assert_raises(
        lambda: open_tokens(path),
        f"t.idx: its data is of dtype {dtype}, which cannot hold token ids",
    )


def test_megatron_int64_tokens_that_begin_like_safetensors_are_megatrons(tmp_path):
    sequence = np.array([50, 123, 7, 8, 9, 10, 11, 12], np.int64)
    path = write_megatron(tmp_path / "t", [sequence], dtype="int64", code=5)
    assert open_tokens(path)[:].tolist() == sequence.tolist()


def test_the_modes_of_multimodal_data_are_no_tokens(tmp_path):
    path = write_megatron(tmp_path / "t", SEQUENCES, instead={"modes": bytes(4)})
    np.testing.assert_array_equal(open_tokens(path)[:], TOKENS)


def test_megatron_data_of_which_no_document_was_ended_has_no_documents(tmp_path):
    path = write_megatron(tmp_path / "t", SEQUENCES, documents=[0])
    with open_tokens(path) as tokens:
        assert tokens.documents is None
        np.testing.assert_array_equal(tokens[:], TOKENS)


def test_an_index_without_its_data_is_refused_with_the_name_of_what_is_missing(tmp_path):
    write_megatron(tmp_path / "a.b", SEQUENCES).unlink()
    assert_raises(
        lambda: open_tokens(tmp_path / "a.b.idx"),
        str(tmp_path / "a.b.idx"),
        "should be in a.b.bin beside it, a file that is not there",
        error=FileNotFoundError,
    )


def test_an_index_of_another_name_is_refused(tmp_path):
    path = write_megatron(tmp_path / "t", SEQUENCES)
    shutil.copy(path.with_suffix(".idx"), tmp_path / "index.bin")
    assert_raises(
        lambda: open_tokens(tmp_path / "index.bin"),
        "named PREFIX.idx and PREFIX.bin",
        error=FileNotFoundError,
    )


def test_a_file_beside_that_is_no_megatron_index_does_not_count(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(TOKENS.tobytes())
    path.with_suffix(".idx").write_bytes(b"something else")
    np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)
    assert_raises(lambda: open_tokens(path), "Megatron-LM .bin (t.idx beside it is no Megatron-LM index)")


@pytest.mark.parametrize("given", ["uint16", "int32"])
def test_dtype_is_refused_for_megatron_data(tmp_path, given):
    path = write_megatron(tmp_path / "t", SEQUENCES)
    assert_raises(
        lambda: open_tokens(path, dtype=given),
        f"dtype={given} was given, but the file is Megatron-LM .bin and tells it: uint16",
    )


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"version": struct.pack("<Q", 2)}, "is of version 2 of the format; expected version 1"),
        ({"code": b"\x09"}, "the code of its dtype is 9; expected one of 1 (uint8), 2 (int8), 3 (int16)"),
        ({"counts": struct.pack("<QQ", 4, 6)}, "has 122 bytes, and 4 sequences and 6 document"),
        ({"counts": struct.pack("<QQ", 2**40, 5)}, "1,099,511,627,776 sequences"),
        ({"documents": bytes(39)}, "document entries, as its header says, take 122;"),
        ({"modes": bytes(3)}, "has 125 bytes"),
        (
            {"version": b"", "code": b"\1", "counts": bytes(5), "lengths": b"", "pointers": b"",
             "documents": b""},
            "is cut off in its header, after 15 of 34 bytes",
        ),
        (
            {"lengths": np.array([3, 2, -1, 6], "<i4").tobytes()},
            "sequence 2 has -1 tokens",
        ),
        (
            {"pointers": np.array([0, 6, 12, 10], "<i8").tobytes()},
            "sequence 2 begins at byte 12 and the tokens before it end at byte 10",
        ),
        (
            {"pointers": np.array([2, 8, 12, 12], "<i8").tobytes()},
            "sequence 0 begins at byte 2 and the tokens before it end at byte 0",
        ),
    ],
)  # fmt: skip
def test_a_damaged_megatron_index_is_refused_with_what_is_wrong(tmp_path, parts, named):
    path = write_megatron(tmp_path / "t", SEQUENCES, instead=parts)
    for opened in (path, path.with_suffix(".idx")):
        assert_raises(lambda opened=opened: open_tokens(opened), str(tmp_path / "t.idx"), named)


@pytest.mark.parametrize("size", [19, 18, 21, 2])
def test_megatron_data_of_another_size_than_its_index_is_refused_with_both(tmp_path, size):
    path = write_megatron(tmp_path / "t", SEQUENCES)
    path.write_bytes(bytes(size))
    assert_raises(
        lambda: open_tokens(path),
        f"t.bin: has {size} bytes, and by t.idx its tokens end at byte 20",
    )


def test_a_megatron_file_of_no_sequences_is_written_as_datatrove_does(tmp_path):
    # By MegatronTokenizedFile of datatrove 0.10.1, to which no document was written.
    path = write_megatron(tmp_path / "t", [])
    golden = "4d4d49444944580000 0100000000000000 08 0000000000000000 0100000000000000 0000000000000000"
    assert path.with_suffix(".idx").read_bytes() == bytes.fromhex(golden)
    for given in (path, path.with_suffix(".idx")):
        assert_raises(
            lambda given=given: open_tokens(given),
            f"{path}: has no tokens, as the file or its index says (Megatron-LM .bin); was the conversion",
        )


def test_megatron_data_that_was_lost_is_not_taken_for_empty(tmp_path):
    path = write_megatron(tmp_path / "t", SEQUENCES)
    path.write_bytes(b"")
    assert_raises(lambda: open_tokens(path), f"{path}: has 0 bytes, and by t.idx its tokens end at byte 20")


@pytest.mark.parametrize("wrong", [0, 5, 32_767, 32_768, 35_000, 37_231, 37_233, 69_999])
def test_of_a_long_megatron_index_the_ends_are_checked_at_once_and_the_rest_with_the_documents(
    tmp_path, wrong
):
    pointers = np.arange(70_000) * 4
    pointers[wrong] += 2
    sequences = np.zeros((70_000, 2), np.uint16)
    path = write_megatron(tmp_path / "t", sequences, pointers=pointers)
    named = f"sequence {wrong:,} begins at byte {4 * wrong + 2:,} and the tokens before it end at "
    if wrong < 32_768 or wrong > 37_232:
        assert_raises(lambda: open_tokens(path), named)
    else:
        with open_tokens(path) as tokens:
            assert_raises(lambda: tokens.documents, named)


@pytest.mark.parametrize(
    ("documents", "named"),
    [
        ([0, 3, 1, 4], "document 1 begins at token 5 and ends before it, at 3"),
        ([1, 2, 4], "its documents are tokens 3 to 10, and t.bin has tokens 0 to 10"),
        ([0, 1, 3], "its documents are tokens 0 to 5, and t.bin has tokens 0 to 10"),
        ([0, 1, 5], "document entry 2 is sequence 5, and there are 4"),
        ([0, -1, 4], "document entry 1 is sequence -1, and there are 4"),
    ],
)
def test_documents_that_do_not_fit_the_tokens_are_refused_when_they_are_asked_for(
    tmp_path, documents, named
):
    path = write_megatron(tmp_path / "t", SEQUENCES, documents)
    with open_tokens(path) as tokens:
        np.testing.assert_array_equal(tokens[:], TOKENS)
        assert_raises(lambda: tokens.documents, str(tmp_path / "t.idx"), named)


def test_megatron_offsets_past_32_bits_are_found(tmp_path):
    # Sparse: 6 sequences of 2**30 tokens and one of 7.
    lengths = np.array([2**30] * 6 + [7], np.int64)
    path = tmp_path / "t.bin"
    with path.open("wb") as file:
        file.truncate(4 * int(lengths.sum()))
        file.seek(-4 * 7, os.SEEK_END)
        file.write(np.arange(1, 8, dtype=np.int32).tobytes())
    if path.stat().st_blocks * 512 > 2**24:
        path.unlink()
        pytest.skip("no sparse files here")
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 4, 7, 8)
        + lengths.astype("<i4").tobytes()
        + (4 * (lengths.cumsum() - lengths)).astype("<i8").tobytes()
        + np.arange(8, dtype="<i8").tobytes()
    )
    with open_tokens([path, path]) as tokens:
        assert len(tokens) == 2 * (6 * 2**30 + 7)
        np.testing.assert_array_equal(tokens[-7:], np.arange(1, 8))
        assert tokens.documents[-2:].tolist() == [12 * 2**30 + 7, 12 * 2**30 + 14]
        documents = tokens.documents
        np.testing.assert_array_equal(np.diff(documents), np.tile(lengths, 2))
    path.unlink()


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_what_a_loop_over_the_sequences_finds(tmp_path, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, 30)
    sequences = [rng.integers(0, 65536, n).astype(np.uint16) for n in lengths]
    if not sum(lengths):
        return
    entries = [0, *sorted(rng.integers(0, 31, 8).tolist()), 30]
    path = write_megatron(tmp_path / "t", sequences, entries)
    naive = [sum(lengths[:entry].tolist()) for entry in entries]
    assert read_document_boundaries(locate(path, key="tokens", dtype=None)).tolist() == naive
