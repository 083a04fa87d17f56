"""Arrays as one token axis, against `np.concatenate`."""

import ctypes
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import DTYPES, random_tokens

from tokenloader.tokens.gather import Axis


def naive(tokens, starts, length):
    return np.array([tokens[start : start + length] for start in starts]).reshape(-1, length)


def gather(axis, starts, length):
    return axis.gather(axis.locate(np.asarray(starts), length))


def apart(tokens, cuts):
    """The tokens in arrays of their own, which do not lie end to end in memory."""
    return [part.copy() for part in np.split(tokens, cuts)]


@st.composite
def arrays_and_windows(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    num_tokens = sum(lengths)
    tokens = random_tokens(num_tokens, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    # In memory the arrays lie apart or end to end, in an order of their own, at any byte.
    size = tokens.itemsize
    memory = np.zeros(num_tokens * size + 50 * len(lengths), np.uint8)
    arrays = [None] * len(lengths)
    at = 0
    ends = np.cumsum(lengths)
    order = draw(st.one_of(st.just(range(len(lengths))), st.permutations(range(len(lengths)))))
    for i in order:
        at += draw(st.just(0) | st.integers(0, 50))
        array = memory[at : at + lengths[i] * size].view(tokens.dtype)
        array[:] = tokens[ends[i] - lengths[i] : ends[i]]
        arrays[i] = array
        at += lengths[i] * size
    length = draw(st.integers(1, num_tokens))
    starts = draw(st.lists(st.integers(0, num_tokens - length), max_size=20))
    return tokens, arrays, np.array(starts, np.int64), length


@settings(deadline=None, max_examples=200)
@given(arrays_and_windows())
def test_windows_of_any_arrays_are_those_of_the_joined_arrays(case):
    tokens, arrays, starts, length = case
    axis = Axis(arrays)
    assert axis.dtype == tokens.dtype
    assert len(axis) == len(tokens)
    block = gather(axis, starts, length)
    assert block.dtype == tokens.dtype
    assert block.shape == (len(starts), length)
    np.testing.assert_array_equal(block, naive(tokens, starts, length))
    # Row by row, as where numpy's size arithmetic would overflow.
    row_by_row = gather(Axis(arrays, max_records_bytes=1), starts, length)
    assert row_by_row.dtype == tokens.dtype
    np.testing.assert_array_equal(row_by_row, block)


@settings(deadline=None)
@given(arrays_and_windows())
def test_one_window_is_copied_into_a_given_array(case):
    tokens, arrays, starts, length = case
    axis = Axis(arrays)
    for start in starts.tolist():
        out = np.empty(length, tokens.dtype)
        axis.copy(start, out)
        np.testing.assert_array_equal(out, tokens[start : start + length])


@settings(deadline=None)
@given(arrays_and_windows())
def test_byte_ranges_of_windows_are_where_their_bytes_lie(case):
    tokens, arrays, starts, length = case
    expected = naive(tokens, starts, length).tobytes()
    for joins in (True, False):
        axis = Axis(arrays, joins=joins)
        ranges, stretches = axis.byte_ranges(axis.locate(starts, length))
        assert b"".join(ctypes.string_at(*each) for each in ranges.tolist()) == expected
        assert len(ranges) == len(stretches)
        for (address, nbytes), number in zip(ranges.tolist(), stretches.tolist(), strict=True):
            if not joins:  # each array is a stretch of its own
                array = arrays[number]
                assert array.ctypes.data <= address
                assert address + nbytes <= array.ctypes.data + array.nbytes


def test_arrays_that_lie_end_to_end_in_memory_are_not_straddled():
    tokens = random_tokens(100)
    starts = np.arange(0, 90)
    assert not Axis(np.split(tokens, [10, 11, 50])).locate(starts, 10).straddling
    assert Axis(apart(tokens, [50])).locate(starts, 10).straddling == {row: row for row in range(41, 50)}
    backwards = Axis([tokens[50:], tokens[:50]])
    assert list(backwards.locate(starts, 10).straddling) == list(range(41, 50))
    np.testing.assert_array_equal(gather(backwards, starts, 10), naive(np.roll(tokens, 50), starts, 10))


def test_a_window_may_straddle_many_arrays():
    tokens = random_tokens(60)
    axis = Axis(apart(tokens, [10, 11, 12, 15, 40]))
    starts = np.arange(0, 31)
    np.testing.assert_array_equal(gather(axis, starts, 30), naive(tokens, starts, 30))


def test_the_first_and_the_last_window_are_reached():
    tokens = random_tokens(100)
    for arrays in ([tokens], apart(tokens, [37]), apart(tokens, [99])):
        for length in (1, 2, 99, 100):
            starts = np.array([0, 100 - length])
            block = gather(Axis(arrays), starts, length)
            np.testing.assert_array_equal(block, naive(tokens, starts, length))


def test_arrays_may_lie_far_apart_and_in_any_order_in_memory(tmp_path):
    # On the heap, in an anonymous mapping, in a mapped file, and a static buffer: 2**40 bytes and
    # more lie between them, which are never touched.
    tokens = random_tokens(500_000)
    path = tmp_path / "mapped"
    tokens[200_000:300_000].tofile(path)
    arrays = [
        np.array(tokens[:10]),
        np.array(tokens[10:200_000]),
        np.asarray(np.memmap(path, np.uint16, "r")),
        np.array(tokens[300_000:499_990]),
        np.frombuffer(tokens[499_990:].tobytes(), np.uint16),
    ]
    starts = np.array([0, 5, 9, 10, 199_990, 200_000, 299_999, 300_000, 499_980, 499_989, 499_900])
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
        joined = np.concatenate([arrays[i] for i in order])
        block = gather(Axis([arrays[i] for i in order]), starts, 11)
        np.testing.assert_array_equal(block, naive(joined, starts, 11))


def test_one_array_may_be_several_parts_of_the_axis():
    tokens = random_tokens(50)
    axis = Axis([tokens, tokens[10:20], tokens])
    joined = np.concatenate([tokens, tokens[10:20], tokens])
    starts = np.arange(0, 90)
    np.testing.assert_array_equal(gather(axis, starts, 20), naive(joined, starts, 20))


@pytest.mark.parametrize("cuts", [[], [300, 301]])
def test_a_gather_of_another_length_is_not_served_with_the_records_of_the_last(cuts):
    tokens = random_tokens(1000)
    axis = Axis(apart(tokens, cuts))
    for length in (10, 3, 10, 999, 1, 1000, 10):
        starts = np.arange(0, 1000 - length + 1, 7)
        np.testing.assert_array_equal(gather(axis, starts, length), naive(tokens, starts, length))


@pytest.mark.parametrize("cuts", [[], [300, 301]])
@pytest.mark.parametrize("length", [1, 300, 5000])
def test_no_windows_make_an_empty_block_of_any_length(cuts, length):
    block = gather(Axis(apart(random_tokens(1000), cuts)), np.array([], np.int64), length)
    assert block.shape == (0, length)
    assert block.dtype == np.uint16


@pytest.mark.parametrize("cuts", [[], [50], [1, 2, 99]])
def test_blocks_are_fresh_writable_and_contiguous(cuts):
    tokens = random_tokens(100)
    tokens.flags.writeable = False
    axis = Axis(apart(tokens, cuts))
    starts = np.arange(0, 90, 3)
    first, second = gather(axis, starts, 10), gather(axis, starts, 10)
    assert first.flags.writeable
    assert first.flags.c_contiguous
    assert not np.shares_memory(first, second)
    first[:] = 0
    np.testing.assert_array_equal(second, naive(tokens, starts, 10))
    np.testing.assert_array_equal(gather(axis, starts, 10), second)


def test_the_arrays_are_kept_alive():
    tokens = random_tokens(100_000)
    axis = Axis(apart(tokens, [60_000]))
    rubbish = [np.full(60_000, 7, np.uint16) for _ in range(20)]  # would reuse freed memory
    starts = np.arange(0, 99_000, 1000)
    np.testing.assert_array_equal(gather(axis, starts, 1000), naive(tokens, starts, 1000))
    assert len(rubbish) == 20


@pytest.mark.parametrize("cuts", [[], [300, 301]])
def test_threads_that_gather_windows_of_different_lengths_do_not_meet(cuts):
    tokens = random_tokens(1000)
    axis = Axis(apart(tokens, cuts))
    starts = np.arange(0, 900, 100)
    wrong = []
    stop = threading.Event()

    def gather_until_stopped(length):
        expected = naive(tokens, starts, length)
        while not stop.is_set():
            try:
                block = gather(axis, starts, length)
                assert block.shape == expected.shape
                assert (block == expected).all()
            except Exception as error:
                wrong.append((length, error))
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=gather_until_stopped, args=(length,)) for length in (1, 2, 64, 100)]
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
