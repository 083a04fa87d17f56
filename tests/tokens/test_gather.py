"""Pieces of memory as one token axis, against `np.concatenate`."""

import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloader.tokens.gather import Pieces

DTYPES = "uint8", "uint16", "uint32", "int32", "int64"


def naive(axis, starts, length):
    return np.array([axis[start : start + length] for start in starts]).reshape(-1, length)


def random_tokens(num_tokens, dtype="uint16", seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, np.iinfo(dtype).max, num_tokens, dtype=dtype, endpoint=True)


@st.composite
def pieces_and_windows(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    num_tokens = sum(lengths)
    axis = random_tokens(num_tokens, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    # In memory the pieces lie apart, in an order of their own, at any byte.
    size = axis.itemsize
    memory = np.zeros(num_tokens * size + 50 * len(lengths), np.uint8)
    pieces = [None] * len(lengths)
    at = 0
    ends = np.cumsum(lengths)
    for i in draw(st.permutations(range(len(lengths)))):
        at += draw(st.integers(0, 50))
        piece = memory[at : at + lengths[i] * size].view(axis.dtype)
        piece[:] = axis[ends[i] - lengths[i] : ends[i]]
        pieces[i] = piece
        at += lengths[i] * size
    length = draw(st.integers(1, num_tokens))
    starts = draw(st.lists(st.integers(0, num_tokens - length), max_size=20))
    return axis, pieces, np.array(starts, np.int64), length


@settings(deadline=None, max_examples=200)
@given(pieces_and_windows())
def test_windows_of_any_pieces_are_those_of_the_joined_pieces(case):
    axis, arrays, starts, length = case
    pieces = Pieces(arrays)
    assert pieces.dtype == axis.dtype
    assert pieces.ends[-1] == len(axis)
    block = pieces.gather(starts, length)
    assert block.dtype == axis.dtype
    assert block.shape == (len(starts), length)
    np.testing.assert_array_equal(block, naive(axis, starts, length))
    # Row by row, as it is done where numpy's size arithmetic would overflow.
    pieces._span_bytes = 2**62
    np.testing.assert_array_equal(pieces.gather(starts, length), block)


@settings(deadline=None)
@given(pieces_and_windows())
def test_parts_of_a_window_name_its_tokens_in_order(case):
    axis, arrays, starts, length = case
    pieces = Pieces(arrays)
    for start in starts.tolist():
        parts = list(pieces.parts(start, length))
        assert all(begin < end for _, begin, end in parts)
        tokens = np.concatenate([arrays[piece][begin:end] for piece, begin, end in parts])
        np.testing.assert_array_equal(tokens, axis[start : start + length])
        out = np.empty(length, axis.dtype)
        pieces.copy(start, out)
        np.testing.assert_array_equal(out, tokens)


@settings(deadline=None)
@given(pieces_and_windows())
def test_addresses_of_windows_are_where_their_bytes_lie(case):
    axis, arrays, starts, length = case
    begins, ends = Pieces(arrays).addresses(starts, length)
    assert begins.dtype == ends.dtype == np.uint64
    spans = sorted(zip(begins.tolist(), ends.tolist(), strict=True))
    parts = [part for start in starts for part in Pieces(arrays).parts(int(start), length)]
    views = [arrays[piece][begin:end] for piece, begin, end in parts]
    assert spans == sorted((view.ctypes.data, view.ctypes.data + view.nbytes) for view in views)
    found = b"".join(view.tobytes() for view in views)
    assert found == naive(axis, starts, length).tobytes()


def test_a_window_may_straddle_many_pieces():
    axis = random_tokens(60)
    pieces = Pieces(np.split(axis, [10, 11, 12, 15, 40]))
    starts = np.arange(0, 31)
    np.testing.assert_array_equal(pieces.gather(starts, 30), naive(axis, starts, 30))


def test_the_first_and_the_last_window_are_reached():
    axis = random_tokens(100)
    for arrays in ([axis], np.split(axis, [37]), [axis[:99].copy(), axis[99:].copy()]):
        for length in (1, 2, 99, 100):
            starts = np.array([0, 100 - length])
            block = Pieces(arrays).gather(starts, length)
            np.testing.assert_array_equal(block, naive(axis, starts, length))


def test_pieces_may_lie_far_apart_and_in_any_order_in_memory(tmp_path):
    # On the heap, in an anonymous mapping, in a mapped file, and a static buffer: 2**40 bytes and
    # more lie between them, which are never touched.
    axis = random_tokens(500_000)
    path = tmp_path / "mapped"
    axis[200_000:300_000].tofile(path)
    arrays = [
        np.array(axis[:10]),
        np.array(axis[10:200_000]),
        np.asarray(np.memmap(path, np.uint16, "r")),
        np.array(axis[300_000:499_990]),
        np.frombuffer(axis[499_990:].tobytes(), np.uint16),
    ]
    starts = np.array([0, 5, 9, 10, 199_990, 200_000, 299_999, 300_000, 499_980, 499_989, 499_900])
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
        joined = np.concatenate([arrays[i] for i in order])
        block = Pieces([arrays[i] for i in order]).gather(starts, 11)
        np.testing.assert_array_equal(block, naive(joined, starts, 11))


def test_one_array_may_be_several_pieces():
    axis = random_tokens(50)
    pieces = Pieces([axis, axis[10:20], axis])
    joined = np.concatenate([axis, axis[10:20], axis])
    starts = np.arange(0, 90)
    np.testing.assert_array_equal(pieces.gather(starts, 20), naive(joined, starts, 20))


@pytest.mark.parametrize("cuts", [[], [300, 301]])
def test_a_gather_of_another_length_is_not_served_with_the_records_of_the_last(cuts):
    axis = random_tokens(1000)
    pieces = Pieces(np.split(axis, cuts))
    for length in (10, 3, 10, 999, 1, 1000, 10):
        starts = np.arange(0, 1000 - length + 1, 7)
        np.testing.assert_array_equal(pieces.gather(starts, length), naive(axis, starts, length))


@pytest.mark.parametrize("cuts", [[], [300, 301]])
@pytest.mark.parametrize("length", [1, 300, 5000])
def test_no_windows_make_an_empty_block_of_any_length(cuts, length):
    block = Pieces(np.split(random_tokens(1000), cuts)).gather(np.array([], np.int64), length)
    assert block.shape == (0, length)
    assert block.dtype == np.uint16


@pytest.mark.parametrize("cuts", [[], [50], [1, 2, 99]])
def test_blocks_are_fresh_writable_and_contiguous(cuts):
    axis = random_tokens(100)
    axis.flags.writeable = False
    pieces = Pieces(np.split(axis, cuts))
    starts = np.arange(0, 90, 3)
    first, second = pieces.gather(starts, 10), pieces.gather(starts, 10)
    assert first.flags.writeable
    assert first.flags.c_contiguous
    assert not np.shares_memory(first, second)
    first[:] = 0
    np.testing.assert_array_equal(second, naive(axis, starts, 10))
    np.testing.assert_array_equal(pieces.gather(starts, 10), second)


def test_the_arrays_are_kept_alive():
    axis = random_tokens(100_000)
    pieces = Pieces([axis[:60_000].copy(), axis[60_000:].copy()])
    rubbish = [np.full(60_000, 7, np.uint16) for _ in range(20)]  # would reuse freed memory
    starts = np.arange(0, 99_000, 1000)
    np.testing.assert_array_equal(pieces.gather(starts, 1000), naive(axis, starts, 1000))
    assert len(rubbish) == 20


@pytest.mark.parametrize("cuts", [[], [300, 301]])
def test_threads_that_gather_windows_of_different_lengths_do_not_meet(cuts):
    axis = random_tokens(1000)
    pieces = Pieces(np.split(axis, cuts))
    starts = np.arange(0, 900, 100)
    wrong = []
    stop = threading.Event()

    def gather(length):
        expected = naive(axis, starts, length)
        while not stop.is_set():
            try:
                block = pieces.gather(starts, length)
                assert block.shape == expected.shape
                assert (block == expected).all()
            except Exception as error:
                wrong.append((length, error))
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=gather, args=(length,)) for length in (1, 2, 64, 100)]
    try:
        for thread in threads:
            thread.start()
        stop.wait(0.3)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not wrong
