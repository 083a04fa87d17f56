"""Joining whatever a person has to one axis: what is shared, what is closed, where documents end."""

import os
import re
import struct
import threading
from functools import partial

import numpy as np
import pytest
from token_files import RecordingKernel, fill_with

from tokenloader import open_tokens
from tokenloader.storage.memory_limits import MemoryLimit
from tokenloader.storage.ram import RamFill, read_exactly
from tokenloader.tokens.opening import join

A, B, C = (np.arange(n, n + 5, dtype=np.uint16) for n in (0, 100, 200))


def npy(path, tokens):
    np.save(path, tokens)
    return path


def datatrove(path, tokens, ends):
    tokens.tofile(path)
    path.with_name(path.name + ".index").write_bytes(np.array(ends, "<u8").tobytes())
    return path


def megatron(prefix, tokens, lengths):
    tokens.tofile(prefix.with_suffix(".bin"))
    ends = np.cumsum(lengths)
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
        + np.array(lengths, "<i4").tobytes()
        + ((ends - lengths) * 2).astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )
    return prefix.with_suffix(".bin")


# Joining


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_paths_arrays_and_open_tokens_are_one_axis_in_the_order_given(tmp_path, residency):
    opened = open_tokens([npy(tmp_path / "b.npy", B), A])
    source = [C, npy(tmp_path / "c.npy", C), opened, str(npy(tmp_path / "a.npy", A)), opened]
    expected = np.concatenate([C, C, B, A, A, B, A])
    with open_tokens(source, residency=residency) as tokens:
        for _ in range(2):
            np.testing.assert_array_equal(tokens[:], expected)
            np.testing.assert_array_equal(
                tokens.gather(range(30), 6), [expected[i : i + 6] for i in range(30)]
            )
            tokens.prefetch(range(30), 6)
            assert all(tokens.locate([i], 1).is_cached() in (True, False) for i in range(35))
            tokens.wait_until_loaded()
    with pytest.raises(ValueError, match="closed"):
        tokens[0]
    np.testing.assert_array_equal(opened[:], np.concatenate([B, A]))


def test_one_open_token_array_may_be_opened_again():
    tokens = open_tokens(open_tokens(A))
    np.testing.assert_array_equal(tokens[:], A)


def test_the_residency_of_a_joint_array_is_mmap_if_any_of_it_is(tmp_path):
    path = npy(tmp_path / "a.npy", A)
    mapped, in_ram = open_tokens(path), open_tokens(path, residency="ram")
    for source, asked, found in (
        ([A, B], "mmap", "ram"),
        ([A, path], "mmap", "mmap"),
        ([A, path], "ram", "ram"),
        ([mapped, A], "ram", "mmap"),
        ([mapped, path], "ram", "mmap"),
        ([in_ram, A], "mmap", "ram"),
        ([in_ram, path], "mmap", "mmap"),
        ([in_ram, path], "ram", "ram"),
    ):
        tokens = open_tokens(source, residency=asked)
        assert tokens.residency == found
        tokens.wait_until_loaded()
        assert tokens.residency == found
        kernel = RecordingKernel()
        join([tokens], asked, kernel=kernel).prefetch([0], len(tokens))
        assert bool(kernel.announced) == (found == "mmap")


def test_the_memory_of_an_open_array_is_shared_and_not_copied():
    source = A.copy()
    inner = open_tokens(source)
    outer = open_tokens([B, inner])
    source[2] = 4711
    assert outer[7] == inner[2] == 4711


@pytest.mark.parametrize("residency", ["mmap", "ram"])
@pytest.mark.parametrize("first", ["inner", "outer"])
def test_closing_one_leaves_the_other_its_bytes(tmp_path, residency, first):
    path = npy(tmp_path / "a.npy", A)
    inner = open_tokens(path, residency=residency)
    outer = open_tokens([inner, B], residency=residency)
    path.unlink()
    closed, left = (inner, outer) if first == "inner" else (outer, inner)
    closed.close()
    del closed, inner, outer
    np.testing.assert_array_equal(left[:5], A)
    left.close()


def test_a_closed_array_is_not_joined(tmp_path):
    inner = open_tokens(A)
    inner.close()
    with pytest.raises(ValueError, match=r"TokenArray\(array: .*closed\): it was closed; open"):
        open_tokens([B, inner])


def test_an_array_that_is_being_read_into_ram_is_waited_for(tmp_path):
    go_on = threading.Event()

    def read(*chunk):
        assert go_on.wait(20)
        read_exactly(*chunk)

    path = npy(tmp_path / "a.npy", A)
    inner = fill_with(partial(RamFill, read=read), path)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    outer = open_tokens([inner, B])
    assert go_on.is_set()
    timer.join()
    assert outer.residency == "ram"
    path.write_bytes(b"")
    np.testing.assert_array_equal(outer[:], np.concatenate([A, B]))


def test_files_are_read_into_ram_between_arrays_that_stay_where_they_are(tmp_path):
    source = B.copy()
    paths = [npy(tmp_path / f"{i}.npy", tokens) for i, tokens in enumerate((A, C))]
    tokens = open_tokens([source, paths[0], source, paths[1], open_tokens(A)], residency="ram")
    tokens.wait_until_loaded()
    for path in paths:
        path.write_bytes(b"")
    source[0] = 4711
    expected = np.concatenate([source, A, source, C, A])
    np.testing.assert_array_equal(tokens[:], expected)
    np.testing.assert_array_equal(tokens.gather([3, 12], 9), [expected[3:12], expected[12:21]])


def test_memory_is_asked_for_the_files_only(tmp_path):
    path = npy(tmp_path / "a.npy", A)
    (extent,) = open_tokens(path).extents
    large = np.zeros(10**6, np.uint16)
    limit = MemoryLimit(path, 10)
    start = partial(RamFill, limits=lambda: [limit])
    with join([large, extent, open_tokens(large)], "ram", start_fill=start) as tokens:
        assert len(tokens) == 2 * 10**6 + 5
    with pytest.raises(MemoryError, match=re.escape(f'{path} and 1 more: residency="ram" needs')):
        join([extent, large, extent], "ram", start_fill=start)


def test_a_lost_file_among_arrays_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "t.bin"
    np.zeros(100_000, np.uint16).tofile(path)
    tokens = open_tokens([A, path, B], dtype="uint16")
    os.truncate(path, 4096)
    with pytest.raises(OSError, match=re.escape(str(path))):
        tokens.gather([90_000], 10)
    np.testing.assert_array_equal(tokens.gather([0, 100_005], 5), [A, B])


def test_parts_of_different_dtypes_are_refused_and_both_are_named(tmp_path):
    path = npy(tmp_path / "c.npy", C.astype(np.int32))
    for source, named in (
        ([A, path], f"{path} holds int32 tokens and array uint16"),
        ([open_tokens(path), A], f"array holds uint16 tokens and {path} int32"),
        ([A, A.astype(np.uint32)], "array holds uint32 tokens and array uint16"),
    ):
        with pytest.raises(ValueError, match=re.escape(named)):
            open_tokens(source)


def test_both_files_of_one_data_set_are_not_joined_to_twice_its_tokens(tmp_path):
    path = megatron(tmp_path / "t", A, [5])
    index = path.with_suffix(".idx")
    message = re.escape(f"source has both {path} and {index}, which are one data set; name one")
    for source in ([path, index], [index, path], sorted(tmp_path.glob("*"))):
        with pytest.raises(ValueError, match=message):
            open_tokens(source)
    (tmp_path / "t.idx").write_bytes(index.read_bytes()[:26] + struct.pack("<Qiqq", 1, 5, 0, 0))
    with pytest.raises(ValueError, match=message):  # that knows no documents
        open_tokens([path, index])
    assert len(open_tokens([path, path])) == len(open_tokens([index, index])) == 10


def test_a_repr_counts_the_parts(tmp_path):
    path = npy(tmp_path / "a.npy", A)
    tokens = open_tokens([path, A, open_tokens([path, A])])
    assert repr(tokens).startswith(f"TokenArray({path} and 2 more: 20 uint16 tokens")


# Documents


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_documents_of_joined_files_end_where_the_files_do(tmp_path, residency):
    a = datatrove(tmp_path / "a.ds", A, [2, 2, 5])
    b = megatron(tmp_path / "b", B, [1, 4])
    index = b.with_suffix(".idx")
    source = [a, index, open_tokens([a], residency=residency), index]
    with open_tokens(source, residency=residency) as tokens:
        assert tokens.documents.tolist() == [0, 2, 2, 5, 6, 10, 12, 12, 15, 16, 20]
        assert tokens.documents.dtype == np.int64
        for begin, end in zip(tokens.documents, tokens.documents[1:], strict=False):
            assert not {5, 10, 15} & set(range(begin + 1, end))  # none goes over a join
        tokens.wait_until_loaded()
        assert tokens.documents[-1] == len(tokens)


def test_there_are_documents_only_where_every_part_has_an_index(tmp_path):
    a = datatrove(tmp_path / "a.ds", A, [2, 5])
    plain = npy(tmp_path / "b.npy", B)
    assert open_tokens(a).documents.tolist() == [0, 2, 5]
    for source in (plain, B, [a, plain], [plain, a], [a, B], [a, open_tokens(B)]):
        assert open_tokens(source).documents is None


def test_documents_cannot_be_written_to_and_are_gone_after_close(tmp_path):
    tokens = open_tokens(datatrove(tmp_path / "a.ds", A, [2, 5]))
    kept = tokens.documents
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1
    tokens.close()
    with pytest.raises(ValueError, match="closed"):
        tokens.documents  # noqa: B018
    assert kept.tolist() == [0, 2, 5]


def test_the_documents_past_32_bits_are_in_64(tmp_path):
    path = tmp_path / "a.ds"
    num_tokens = 2**32 + 5
    with path.open("wb") as file:
        file.truncate(2 * num_tokens)
    if path.stat().st_blocks * 512 > 2**24:
        path.unlink()
        pytest.skip("no sparse files here")
    path.with_name("a.ds.index").write_bytes(struct.pack("<2Q", 2**31 + 7, num_tokens))
    with open_tokens([path, path]) as tokens:
        ends = [2**31 + 7, num_tokens]
        assert tokens.documents.tolist() == [0, *ends, *(num_tokens + end for end in ends)]
    path.unlink()
