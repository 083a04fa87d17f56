"""datatrove's files: those of the real writer, and every way an index can be wrong.

data/datatrove_uint* was written by the published datatrove 0.10.1:

    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    documents = [5, 6, 50256], [7, 8, 9, 65535, 50256], [50256], [11, 50256]
    for size, name in (2, "uint16"), (4, "uint32"):
        file = TokenizedFile(".", f"datatrove_{name}.ds", tokenizer_name_or_path="gpt2",
                             save_final_metadata=True, token_size=size)
        for document in documents:
            file.write(document, None)
        file.close()
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_raises
from token_files import watch_reads

from tokenloader import open_tokens
from tokenloader.formats import datatrove, headerless
from tokenloader.formats.detect import locate
from tokenloader.formats.extent import Extent

DATA = Path(__file__).parent / "data"
TOKENS = np.array([5, 6, 50256, 7, 8, 9, 65535, 50256, 11, 50256], np.uint16)
FROM_DATATROVE = [5, 6, 50256, 7, 8, 9, 65535, 50256, 50256, 11, 50256]


def write_datatrove(path, tokens, ends=None, metadata=None):
    path.write_bytes(tokens.tobytes())
    if ends is not None:
        path.with_name(path.name + ".index").write_bytes(np.array(ends, "<u8").tobytes())
    if metadata is not None:
        path.with_name(path.name + ".metadata").write_text(metadata)
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_of_datatrove_are_opened(dtype):
    path = DATA / f"datatrove_{dtype}.ds"
    extent = locate(path, key="tokens", dtype=None)
    index_path = path.with_name(path.name + ".index")
    assert extent == Extent(path, 0, np.dtype(dtype), 11, datatrove.FORMAT, index_path)
    with open_tokens(path) as tokens:
        np.testing.assert_array_equal(tokens[:], FROM_DATATROVE)
        assert tokens.documents.tolist() == [0, 3, 8, 9, 11]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_without_an_index_the_metadata_of_datatrove_tells_the_width_and_no_documents(tmp_path, dtype):
    for suffix in ("", ".metadata"):
        shutil.copy(DATA / f"datatrove_{dtype}.ds{suffix}", tmp_path / f"t.ds{suffix}")
    with open_tokens(tmp_path / "t.ds") as tokens:
        np.testing.assert_array_equal(tokens[:], FROM_DATATROVE)
        assert tokens.dtype == dtype
        assert tokens.documents is None


def test_a_datatrove_file_alone_is_headerless(tmp_path):
    path = write_datatrove(tmp_path / "t.ds", TOKENS)
    assert locate(path, key="tokens", dtype="uint16").format is headerless.FORMAT
    assert_raises(
        lambda: open_tokens(path),
        "datatrove .ds (there is no t.ds.index or .metadata beside it)",
        'dtype="uint16"',
    )


@pytest.mark.parametrize("metadata", ["", "gpt2|2", "gpt2|2\nmany\n", "gpt2|2\n-10\n"])
def test_metadata_that_counts_no_tokens_does_not_count(tmp_path, metadata):
    path = write_datatrove(tmp_path / "t.ds", TOKENS, metadata=metadata)
    assert_raises(lambda: open_tokens(path), "t.ds.metadata beside it tells no number of tokens")
    np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)


def test_dtype_may_be_given_for_a_datatrove_file_if_it_is_as_wide_as_its_tokens(tmp_path):
    path = write_datatrove(tmp_path / "t.ds", TOKENS.astype(np.uint32), [3, 10])
    for given in ("uint32", "int32"):
        with open_tokens(path, dtype=given) as tokens:
            assert tokens.dtype == given
            assert tokens.documents.tolist() == [0, 3, 10]
    assert_raises(
        lambda: open_tokens(path, dtype="uint16"),
        "dtype=uint16 was given, but the file is datatrove .ds and tells it: uint32",
    )


@pytest.mark.parametrize(
    ("ends", "metadata", "named"),
    [
        (
            [3, 9],
            None,
            "by t.ds.index it has 9 tokens, which in 20 bytes are neither 2 nor 4 bytes",
        ),
        ([0], None, "by t.ds.index it has 0 tokens"),
        ([2**64 - 1], None, "by t.ds.index it has 18,446,744,073,709,551,615 tokens"),
        (None, "gpt2|2\n11\n11.0 T", "by t.ds.metadata it has 11 tokens"),
        ([], None, "by t.ds.index it has 0 tokens"),
    ],
)
def test_a_datatrove_file_that_its_index_does_not_fit_is_refused_with_both(tmp_path, ends, metadata, named):
    path = write_datatrove(tmp_path / "t.ds", TOKENS, ends, metadata)
    for given in (None, "uint16"):  # with dtype= too: a truncated .ds must not pass
        assert_raises(lambda given=given: open_tokens(path, dtype=given), str(path), named)


def test_an_index_of_odd_size_is_refused_with_its_size(tmp_path):
    path = write_datatrove(tmp_path / "t.ds", TOKENS)
    path.with_name("t.ds.index").write_bytes(bytes(17))
    assert_raises(lambda: open_tokens(path), "17 bytes is not a whole number of document ends")


def test_a_stray_index_does_not_keep_other_files_from_being_opened(tmp_path):
    for name in ("train.bin", "part-0"):
        path = write_datatrove(tmp_path / name, TOKENS, [4711])
        np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)
        assert_raises(lambda path=path: open_tokens(path), "by " + path.name + ".index it has 4,711 tokens")
    path = tmp_path / "t.npy"
    np.save(path, TOKENS)
    path.with_name("t.npy.index").write_bytes(b"?")
    np.testing.assert_array_equal(open_tokens(path)[:], TOKENS)


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        ([3, 2, 10], "document 1 begins at token 3 and ends before it, at 2"),
        ([11, 10], "document 1 begins at token 11 and ends before it, at 10"),
        ([2**63, 10], "document 0 begins at token 0 and ends before it, at -9,223"),
    ],
)
def test_document_ends_that_go_backwards_are_refused_when_they_are_asked_for(tmp_path, ends, named):
    path = write_datatrove(tmp_path / "t.ds", TOKENS, ends)
    with open_tokens(path) as tokens:
        assert_raises(lambda: tokens.documents, str(tmp_path / "t.ds.index"), named)


def test_an_index_that_was_exchanged_or_lost_after_opening_is_an_error(tmp_path):
    path = write_datatrove(tmp_path / "t.ds", TOKENS, [3, 10])
    index_path = tmp_path / "t.ds.index"
    tokens = open_tokens(path)
    index_path.write_bytes(np.array([3, 9], "<u8").tobytes())
    assert_raises(lambda: tokens.documents, "has changed since it was opened", error=OSError)
    index_path.unlink()
    assert_raises(lambda: tokens.documents, str(index_path), error=FileNotFoundError)
    np.testing.assert_array_equal(tokens[:], TOKENS)


def test_an_index_is_not_read_to_open_its_data(tmp_path, monkeypatch):
    path = write_datatrove(tmp_path / "t.ds", np.zeros(10**6, np.uint16), np.arange(10**6) + 1)
    reads = watch_reads(monkeypatch)
    tokens = open_tokens(path)
    assert sum(reads) < 4096  # what all formats look at, and the last document end
    assert reads[-1] == 8
    assert len(tokens.documents) == 10**6 + 1
    again = len(reads)
    assert tokens.documents is tokens.documents
    assert len(reads) == again


@pytest.mark.parametrize("length", [240, 249, 251, 255])
def test_a_name_that_leaves_no_room_for_the_index_s_name_has_none(tmp_path, length):
    path = tmp_path / ("a" * length)
    path.write_bytes(TOKENS.tobytes())
    np.testing.assert_array_equal(open_tokens(path, dtype="uint16")[:], TOKENS)
