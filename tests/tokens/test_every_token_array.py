"""The contract of a TokenArray: however the bytes are held, the same tokens come back.

The reference is a numpy array of the tokens and its own indexing.
"""

import re
import threading
from functools import partial

import numpy as np
import pytest
from helpers import in_threads, naive_gather
from token_files import (
    ARRAYS,
    CUTS,
    DTYPES,
    FILES,
    MAPPED_ARRAYS,
    NeverFull,
    aligned,
    array,
    at_odd_offset,
    datatrove,
    fill_with,
    in_a_directory,
    llm_c,
    megatron,
    mixed,
    random_tokens,
    raw,
    sharded,
)

from tokenloader import TokenArray, open_tokens

NUM_TOKENS = 2000
SOME_DTYPES = {  # what has no name for the others
    llm_c: ("uint16", "uint32"),
    megatron: ("uint8", "uint16", "int32", "int64"),
    datatrove: ("uint16", "uint32"),
}
# (way, residency, dtype, tokens before and after those that are viewed)
CASES = [
    *(
        (make, residency, dtype, (0, 0))
        for make in FILES
        for residency in ("mmap", "ram")
        for dtype in DTYPES
    ),
    *(
        (make, residency, dtype, (0, 0))
        for make, dtypes in SOME_DTYPES.items()
        for residency in ("mmap", "ram", "filling")
        for dtype in dtypes
    ),
    *((mixed, "mmap", dtype, (0, 0)) for dtype in DTYPES),
    *((make, "ram", dtype, (0, 0)) for make in ARRAYS for dtype in ("uint16", "int64")),
    *((make, "mmap", dtype, (0, 0)) for make in MAPPED_ARRAYS for dtype in ("uint16", "int64")),
    # Windows come from the mapped files until the reading has ended, which here it never does.
    *((make, "filling", dtype, (0, 0)) for make in FILES for dtype in ("uint16", "int32")),
    *(
        (make, residency, "uint16", around)
        for make in (at_odd_offset, raw, sharded)
        for residency in ("mmap", "ram", "filling")
        for around in ((0, 7), (2, 0), (1000, 1000))
    ),
    *((make, "mmap", "int64", (2, 7)) for make in (aligned, in_a_directory, mixed)),
    (array, "ram", "uint16", (5, 5)),
]

SLICES = [
    (None, None, None),
    (0, 10, None),
    (1, 4, None),
    (895, 1991, 1),
    (-15, None, None),
    (None, -1995, None),
    (-5000, 5000, None),
    (1999, 10**20, None),
    # Empty
    (5, 5, None),
    (7, 3, None),
    (2000, None, None),
    (10**20, None, None),
    (3, 9, -1),
    (2000, 2000, 7),
    # With a step
    (None, None, 2),
    (1, 1999, 7),
    (0, 2000, 2000),
    (3, 4, 100),
    (None, None, -1),
    (None, None, -3),
    (1995, 890, -11),
    (5, None, -1),
]


class Case:
    def __init__(self, folder, make, residency, dtype, around):
        before, after = around
        tokens = random_tokens(before + NUM_TOKENS + after, dtype)
        tokens.flags.writeable = False
        self.expected = tokens[before : before + NUM_TOKENS]
        self.residency = "ram" if residency == "filling" else residency
        self._filling, self._before = residency == "filling", before
        self._source, self._arguments = make(folder, tokens)

    def open(self):
        if self._filling:
            tokens = fill_with(NeverFull, self._source, **self._arguments)
        else:
            tokens = open_tokens(self._source, residency=self.residency, **self._arguments)
        tokens.wait_until_loaded()
        if len(tokens) == NUM_TOKENS:
            return tokens
        with tokens:  # the view must not need what it was cut from
            return tokens.view(self._before, self._before + NUM_TOKENS)


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=[f"{case[0].__name__}-{case[1]}-{case[2]}-{case[3][0]}-{case[3][1]}" for case in CASES],
)
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("case"), *request.param)


@pytest.fixture
def expected(case):
    return case.expected


@pytest.fixture
def tokens(case):
    with case.open() as tokens:
        yield tokens


class TestEveryTokenArray:
    def test_knows_its_size_and_dtype(self, tokens, expected, case):
        assert isinstance(tokens, TokenArray)
        assert len(tokens) == NUM_TOKENS
        assert tokens.dtype == expected.dtype
        assert tokens.dtype.isnative
        assert tokens.nbytes == expected.nbytes
        assert tokens.residency == case.residency

    def test_gives_single_tokens(self, tokens, expected):
        for i in (0, 1, 2, 3, 899, 904, 905, 1989, 1990, 1999, -1, -10, -11, -1999, -2000):
            token = tokens[i]
            assert token == expected[i]
            assert isinstance(token, np.generic)
            assert token.dtype == expected.dtype
            assert tokens[np.int32(i)] == token

    def test_refuses_a_token_that_is_not_there(self, tokens):
        for i in (2000, -2001, 2**63, -(10**30)):
            message = re.escape(f"token {i} of {tokens!r}; there are tokens 0 to 1999")
            with pytest.raises(IndexError, match=message):
                tokens[i]

    def test_refuses_an_index_of_another_type(self, tokens):
        for index in (1.0, "1", None, (1, 2), [1, 2]):
            with pytest.raises(TypeError):
                tokens[index]

    def test_slices_as_numpy_does(self, tokens, expected):
        for bounds in SLICES:
            out = tokens[slice(*bounds)]
            assert type(out) is np.ndarray
            assert out.dtype == expected.dtype
            np.testing.assert_array_equal(out, expected[slice(*bounds)], err_msg=str(bounds))

    def test_refuses_a_step_of_zero(self, tokens):
        with pytest.raises(ValueError, match="zero"):
            tokens[::0]

    @pytest.mark.parametrize("length", [1, 2, 7, 100, 1999, 2000])
    def test_gathers_windows_wherever_they_lie(self, tokens, expected, length):
        starts = np.random.default_rng(1).integers(0, NUM_TOKENS - length + 1, 40)
        around_cuts = [cut + d for cut in CUTS for d in (-length, -1, 0, 1)]
        starts = [0, NUM_TOKENS - length, *starts.tolist(), *around_cuts]
        starts = [start for start in starts if 0 <= start <= NUM_TOKENS - length]
        block = tokens.gather(starts, length)
        assert type(block) is np.ndarray
        assert block.dtype == expected.dtype
        assert block.flags.c_contiguous
        np.testing.assert_array_equal(block, naive_gather(expected, starts, length))

    def test_takes_starts_as_any_integers(self, tokens, expected):
        starts = [3, 0, 1990, 3, 500]
        expected_block = naive_gather(expected, starts, 10)
        for make in (list, tuple, np.array, np.int32, np.uint16, np.uint64):
            np.testing.assert_array_equal(tokens.gather(make(starts), 10), expected_block)
        every_other = np.array([3, -1, 0, -1, 1990, -1, 3, -1, 500, -1])[::2]
        every_other.flags.writeable = False
        np.testing.assert_array_equal(tokens.gather(every_other, 10), expected_block)
        np.testing.assert_array_equal(tokens.gather(range(5), 10), naive_gather(expected, range(5), 10))

    def test_gathers_no_windows(self, tokens, expected):
        for starts in ([], np.array([], np.int64), np.array([], np.int32)):
            for length in (1, 10, 2001):
                block = tokens.gather(starts, length)
                assert block.shape == (0, length)
                assert block.dtype == expected.dtype

    def test_refuses_windows_that_do_not_fit_and_names_one(self, tokens):
        for starts, length, window in (
            ([0, 1991], 10, "[1,991, 2,001)"),
            ([5, -1, 7], 10, "[-1, 9)"),
            ([0], 2001, "[0, 2,001)"),
            ([2000], 1, "[2,000, 2,001)"),
            ([2**40], 1, "[1,099,511,627,776, 1,099,511,627,777)"),
        ):
            message = re.escape(f"window {window} does not lie within {tokens!r}")
            with pytest.raises(IndexError, match=message):
                tokens.gather(starts, length)
            with pytest.raises(IndexError, match=message):
                tokens.prefetch(starts, length)
            with pytest.raises(IndexError, match=message):
                tokens.locate(starts, length)

    def test_refuses_starts_at_the_ends_of_64_bits(self, tokens):
        for starts in ([2**63 - 1], [-(2**63)], np.array([2**64 - 1], np.uint64)):
            with pytest.raises(IndexError, match="does not lie within"):
                tokens.gather(starts, 10)

    def test_refuses_starts_that_are_no_list_of_integers(self, tokens):
        for starts, found in (
            ([0.0, 1.0], "float64[2]"),
            ([True, False], "bool[2]"),
            ([[0, 1], [2, 3]], "int64[2, 2]"),
            (5, "int64[]"),
            (["a"], "<U1[1]"),
            (np.zeros((0, 2), np.int64), "int64[0, 2]"),
        ):
            message = re.escape(f"starts is {found}; expected a 1-D array of integers")
            with pytest.raises(ValueError, match=message):
                tokens.gather(starts, 1)

    def test_refuses_windows_of_no_length(self, tokens):
        for length in (0, -1):
            with pytest.raises(ValueError, match=f"^length={length}; expected 1 token or more"):
                tokens.gather([0], length)

    def test_gives_copies_that_may_be_written_to(self, tokens, expected):
        def results():
            return [
                tokens[:],
                tokens[10:20],
                tokens[890:910],
                tokens[::-1],
                tokens[::7],
                tokens.gather([0, 880, 1000, 1985], 15),
                tokens.gather([1000], 15),
            ]

        before, again = results(), results()
        for one, other in zip(before, again, strict=True):
            assert one.flags.writeable
            assert not np.shares_memory(one, other)
            one[...] = 1
        for one, other in zip(results(), again, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(tokens[:], expected)

    def test_keeps_what_it_gave_after_close(self, case, expected):
        tokens = case.open()
        kept = tokens[:], tokens.gather([5, 895], 100), tokens[7]
        tokens.close()
        np.testing.assert_array_equal(kept[0], expected)
        np.testing.assert_array_equal(kept[1], naive_gather(expected, [5, 895], 100))
        assert kept[2] == expected[7]

    def test_takes_hints_that_change_nothing(self, tokens, expected):
        assert tokens.prefetch([], 10) is None
        assert tokens.prefetch([0, 890, 1990, 0], 10) is None
        tokens.prefetch(np.arange(100, dtype=np.uint32), 1900)
        tokens.prefetch([0], 2000)
        np.testing.assert_array_equal(tokens[:], expected)

    def test_has_the_fingerprint_of_its_tokens(self, tokens, expected):
        assert tokens.fingerprint() == open_tokens(expected.copy()).fingerprint()
        assert tokens.fingerprint() == tokens.fingerprint()

    def test_cannot_be_used_after_close(self, case):
        tokens = case.open()
        tokens.close()
        tokens.close()  # again is no error
        message = re.escape(f"{tokens!r}: it was closed; open the tokens again")
        uses = (
            lambda: tokens[0],
            lambda: tokens[0:5],
            lambda: tokens[::2],
            lambda: tokens.gather([0], 1),
            lambda: tokens.gather([], 1),
            lambda: tokens.prefetch([0], 1),
            lambda: tokens.locate([0], 1),
            lambda: tokens.view(0, 1),
            lambda: tokens.split(1),
            lambda: tokens.documents,
            lambda: tokens.extents,
            tokens.wait_until_loaded,
            tokens.fingerprint,
            tokens.__enter__,
        )
        for use in uses:
            with pytest.raises(ValueError, match=message):
                use()
        assert len(tokens) == NUM_TOKENS
        assert "closed" in repr(tokens)

    def test_is_closed_at_the_end_of_a_with_block(self, case):
        with case.open() as tokens:
            assert len(tokens[:]) == NUM_TOKENS
        with pytest.raises(ValueError, match="closed"):
            tokens[0]
        with pytest.raises(KeyError), case.open() as tokens:
            raise KeyError
        with pytest.raises(ValueError, match="closed"):
            tokens[0]

    def test_serves_many_threads_at_once(self, tokens, expected):
        wrong = []
        ready = threading.Barrier(6)

        def work(number):
            rng = np.random.default_rng(number)
            length = 10 * number + 1
            ready.wait()
            try:
                for _ in range(10):
                    starts = rng.integers(0, NUM_TOKENS - length, 20)
                    tokens.prefetch(starts, length)
                    block = tokens.gather(starts, length)
                    np.testing.assert_array_equal(block, naive_gather(expected, starts, length))
                    at = int(starts[0])
                    assert tokens[at] == expected[at]
                    np.testing.assert_array_equal(tokens[at : at + 300], expected[at : at + 300])
            except BaseException as error:
                wrong.append(error)

        in_threads(*(partial(work, number) for number in range(6)))
        assert not wrong
