"""The contract of a TokenArray: however the bytes are held, the same tokens come back.

The reference is a numpy array of the tokens and its own indexing.
"""

import copy
import errno
import json
import mmap
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tokenloader import TokenArray, open_tokens
from tokenloader.storage import ram as _storage
from tokenloader.tokens import token_array as _tokens
from tokenloader.tokens.gather import Pieces

NUM_TOKENS = 2000
CUTS = [1, 3, 900, 905, 1990]  # pieces of 1, 2, 897, 5, 1085 and 10 tokens
DTYPES = "uint8", "uint16", "uint32", "int32", "int64"


def random_tokens(num_tokens=NUM_TOKENS, dtype="uint16", seed=0):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    return rng.integers(info.min, info.max, num_tokens, dtype=dtype, endpoint=True)


def naive_gather(tokens, starts, length):
    return np.array([tokens[start : start + length] for start in starts]).reshape(-1, length)


def write_safetensors(path, tokens):
    save_file({"tokens": tokens}, path)
    return path


def write_safetensors_at_odd_offset(path, tokens):
    offsets = [0, tokens.nbytes]
    name = {"u": "U", "i": "I"}[tokens.dtype.kind] + str(8 * tokens.itemsize)
    header = {"tokens": {"dtype": name, "shape": [len(tokens)], "data_offsets": offsets}}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    assert (8 + len(text)) % 2 == 1
    path.write_bytes(struct.pack("<Q", len(text)) + text + tokens.tobytes())
    return path


def write_npy(path, tokens):
    with path.open("wb") as file:
        np.save(file, tokens)
    return path


def write_raw(path, tokens):
    tokens.tofile(path)
    return path


def write_llm_c(path, tokens):
    magic, version = {2: (20240520, 1), 4: (20240801, 7)}[tokens.itemsize]
    path.write_bytes(
        struct.pack("<256i", magic, version, len(tokens), *[0] * 253) + tokens.tobytes()
    )
    return path


def write_megatron(path, tokens):
    """One sequence, which is one document."""
    code = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}[tokens.dtype.name]
    counts = struct.pack("<QBQQ", 1, code, 1, 2)
    sequences = struct.pack("<iqqq", len(tokens), 0, 0, 1)
    path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + counts + sequences)
    return write_raw(path.with_suffix(".bin"), tokens)


def write_datatrove(path, tokens):
    """Documents of 100 tokens, the last as long as it comes."""
    ends = np.append(np.arange(100, len(tokens), 100), len(tokens))
    write_raw(path.with_name(path.name + ".index"), ends.astype("<u8"))
    return write_raw(path, tokens)


def aligned(folder, tokens):
    return write_safetensors(folder / "t.safetensors", tokens), {}


def at_odd_offset(folder, tokens):
    return write_safetensors_at_odd_offset(folder / "t.safetensors", tokens), {}


def npy(folder, tokens):
    return write_npy(folder / "t.npy", tokens), {}


def raw(folder, tokens):
    return write_raw(folder / "t.bin", tokens), {"dtype": tokens.dtype.name}


def llm_c(folder, tokens):
    return write_llm_c(folder / "t.bin", tokens), {}


def megatron(folder, tokens):
    return write_megatron(folder / "t.bin", tokens), {}


def datatrove(folder, tokens):
    return write_datatrove(folder / "t.ds", tokens), {}


def in_a_directory(folder, tokens):
    for i, piece in enumerate(np.split(tokens, CUTS), start=8):  # 8 to 13: 8 and 9 are first
        write_safetensors(folder / f"shard_{i}.safetensors", piece)
    return folder, {}


def by_a_pattern(folder, tokens):
    for i, piece in enumerate(np.split(tokens, CUTS), start=8):
        write_raw(folder / f"shard_{i}", piece)
    return folder / "shard_*", {"dtype": tokens.dtype}


def mixed(folder, tokens):
    """A path, an array, an open TokenArray of two files, a directory."""
    pieces = np.split(tokens, CUTS)
    (folder / "rest").mkdir()
    for i, piece in enumerate(pieces[4:]):
        write_npy(folder / f"rest/{i}.npy", piece)
    opened = open_tokens([write_npy(folder / str(i), pieces[i]) for i in (2, 3)])
    return [write_safetensors(folder / "0", pieces[0]), pieces[1], opened, folder / "rest"], {}


def sharded(folder, tokens):
    writers = write_safetensors, write_npy, write_safetensors_at_odd_offset
    pieces = enumerate(np.split(tokens, CUTS))
    return [writers[i % 3](folder / f"{i}", piece) for i, piece in pieces], {}


def sharded_raw(folder, tokens):
    pieces = enumerate(np.split(tokens, CUTS))
    return [write_raw(folder / f"{i}", p) for i, p in pieces], {"dtype": tokens.dtype}


def array(folder, tokens):
    return tokens.copy(), {}


def array_with_gaps(folder, tokens):
    return np.repeat(tokens, 3)[1::3], {}


def array_backwards(folder, tokens):
    return tokens[::-1].copy()[::-1], {}


def array_mapped(folder, tokens):
    return np.memmap(write_raw(folder / "t.bin", tokens), tokens.dtype, "r"), {}


def array_read_only(folder, tokens):
    return np.frombuffer(tokens.tobytes(), tokens.dtype), {}


FILES = aligned, at_odd_offset, npy, raw, sharded, sharded_raw, in_a_directory, by_a_pattern
SOME_DTYPES = {  # what has no name for the others
    llm_c: ("uint16", "uint32"),
    megatron: ("uint8", "uint16", "int32", "int64"),
    datatrove: ("uint16", "uint32"),
}
ARRAYS = array, array_with_gaps, array_backwards, array_mapped, array_read_only
CASES = [
    *(
        (make, residency, dtype)
        for make in FILES
        for residency in ("mmap", "ram")
        for dtype in DTYPES
    ),
    *(
        (make, residency, dtype)
        for make, dtypes in SOME_DTYPES.items()
        for residency in ("mmap", "ram", "filling")
        for dtype in dtypes
    ),
    *((mixed, "mmap", dtype) for dtype in DTYPES),
    *((make, "ram", dtype) for make in ARRAYS for dtype in ("uint16", "int64")),
    # Windows come from the mapped files until the reading has ended, which here it never does.
    *((make, "filling", dtype) for make in FILES for dtype in ("uint16", "int32")),
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
    def __init__(self, folder, make, residency, dtype):
        self.expected = random_tokens(dtype=dtype)
        self.expected.flags.writeable = False
        self.residency = "ram" if residency == "filling" else residency
        self._filling = residency == "filling"
        self._source, self._arguments = make(folder, self.expected)

    def open(self):
        with pytest.MonkeyPatch.context() as patch:
            if self._filling:
                patch.setattr(
                    _storage.RamFill, "_run", lambda fill: [file.close() for file in fill._files]
                )
            tokens = open_tokens(self._source, residency=self.residency, **self._arguments)
        tokens.wait_until_loaded()
        return tokens


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=[f"{make.__name__}-{residency}-{dtype}" for make, residency, dtype in CASES],
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
        np.testing.assert_array_equal(
            tokens.gather(range(5), 10), naive_gather(expected, range(5), 10)
        )

    def test_gathers_into_out(self, tokens, expected):
        starts = [0, 890, 1700, 1]
        out = np.full((4, 300), 1, expected.dtype)
        assert tokens.gather(starts, 300, out=out) is out
        np.testing.assert_array_equal(out, naive_gather(expected, starts, 300))
        frame = np.full((6, 602), 1, expected.dtype)
        view = frame[1:5, 1:601:2]
        assert tokens.gather(starts, 300, out=view) is view
        np.testing.assert_array_equal(view, out)
        view[:] = 1
        assert (frame == 1).all()  # nothing written outside of the view

    def test_gathers_no_windows(self, tokens, expected):
        for starts in ([], np.array([], np.int64), np.array([], np.int32)):
            for length in (1, 10, 2001):
                block = tokens.gather(starts, length)
                assert block.shape == (0, length)
                assert block.dtype == expected.dtype
        out = np.empty((0, 5), expected.dtype)
        assert tokens.gather([], 5, out=out) is out

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
            if tokens.residency == "mmap":
                with pytest.raises(IndexError, match=message):
                    tokens.prefetch(starts, length)

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
            message = re.escape(f"starts is {found}; needed is a 1-D array of integers")
            with pytest.raises(ValueError, match=message):
                tokens.gather(starts, 1)

    def test_refuses_windows_of_no_length(self, tokens):
        for length in (0, -1):
            with pytest.raises(ValueError, match=f"^length={length}; a window has 1 token or more"):
                tokens.gather([0], length)

    def test_refuses_an_out_of_another_shape_or_dtype(self, tokens, expected):
        name = expected.dtype.name
        for shape, found in (((2, 4), "[2, 4]"), ((3, 5), "[3, 5]"), ((10,), "[10]")):
            message = f"^out is {name}{re.escape(found)}; needed is {name}{re.escape('[2, 5]')}$"
            with pytest.raises(ValueError, match=message):
                tokens.gather([0, 1], 5, out=np.empty(shape, expected.dtype))
        with pytest.raises(ValueError, match=r"^out is float32\[2, 5\]; needed is " + name):
            tokens.gather([0, 1], 5, out=np.empty((2, 5), np.float32))

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

        in_threads(*(lambda number=number: work(number) for number in range(6)))
        assert not wrong


def in_threads(*calls):
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Six files as one axis, mapped, and what they hold."""
    expected = random_tokens()
    files, _ = sharded(tmp_path_factory.mktemp("shards"), expected)
    with open_tokens(files) as tokens:
        yield tokens, expected


@settings(deadline=None)
@given(
    st.builds(
        slice,
        st.none() | st.integers(-2500, 2500),
        st.none() | st.integers(-2500, 2500),
        st.none() | st.integers(-50, 50).filter(bool),
    )
)
def test_any_slice_is_numpys(shards, bounds):
    tokens, expected = shards
    np.testing.assert_array_equal(tokens[bounds], expected[bounds])


@pytest.mark.parametrize("copy_tokens", [1, 3, 100, 1999, 2000])
def test_a_long_slice_is_copied_in_strides(shards, monkeypatch, copy_tokens):
    tokens, expected = shards
    monkeypatch.setattr(_tokens, "_COPY_TOKENS", copy_tokens)
    for begin, end in ((0, 2000), (2, 1991), (899, 906)):
        np.testing.assert_array_equal(tokens[begin:end], expected[begin:end])


def test_gathering_row_by_row_gives_the_same(shards, monkeypatch):
    tokens, expected = shards
    monkeypatch.setattr(Pieces, "_records_of", None)  # not used
    monkeypatch.setattr(tokens._held.pieces, "_span_bytes", 2**62)
    starts = [0, 1, 890, 904, 1985]
    np.testing.assert_array_equal(tokens.gather(starts, 15), naive_gather(expected, starts, 15))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells, others do not")
def test_hints_name_exactly_the_pages_of_the_windows_in_each_shard(tmp_path, monkeypatch):
    expected = random_tokens(500_000)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, piece in zip(paths, np.split(expected, [200_000]), strict=True):
        write_safetensors_at_odd_offset(path, piece)
    named = set()

    def record(ranges):
        for address, length in ranges.tolist():
            assert address % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
            named.update(range(address, address + length, mmap.PAGESIZE))

    monkeypatch.setattr(_tokens, "start_reading", record)
    with open_tokens(paths) as tokens:
        tokens.gather([0, 199_000], 2000)
        tokens.prefetch([], 10)
        assert not named  # nothing is read ahead for being opened, or for being read
        tokens.prefetch([100, 150_000, 499_990], 10)
        tokens.prefetch([150_010], 200_000)
        maps = Path("/proc/self/maps").read_text()
    wanted = set()
    for path, first, num_tokens in ((paths[0], 0, 200_000), (paths[1], 200_000, 300_000)):
        header = path.stat().st_size - 2 * num_tokens
        address = int(re.search(rf"^([0-9a-f]+)-.*{path}$", maps, re.MULTILINE)[1], 16)
        for window in ((100, 110), (150_000, 350_010), (499_990, 500_000)):
            begin, end = (min(max(token - first, 0), num_tokens) for token in window)
            if begin < end:
                from_page = (header + 2 * begin) // mmap.PAGESIZE
                to_page = (header + 2 * end - 1) // mmap.PAGESIZE + 1
                pages = range(from_page, to_page)
                wanted |= {address + page * mmap.PAGESIZE for page in pages}
    assert named == wanted


def test_tokens_in_ram_are_not_hinted_at(tmp_path, monkeypatch):
    monkeypatch.setattr(_tokens, "start_reading", None)  # not called
    path = write_npy(tmp_path / "t.npy", random_tokens())
    in_ram = open_tokens(path, residency="ram")
    in_ram.wait_until_loaded()
    for tokens in (in_ram, open_tokens(random_tokens())):
        tokens.prefetch([0, 5], 100)
        np.testing.assert_array_equal(tokens[:], random_tokens())


# Fingerprints


def test_the_fingerprint_of_tokens_stays_what_it_was():
    # Saved runs compare it.
    tokens = np.arange(100_000, dtype=np.uint32)
    assert open_tokens(tokens).fingerprint() == "uint32:100000:0c758b1bd05ff25f"
    assert open_tokens(tokens[:100].astype("u2")).fingerprint() == "uint16:100:b1380fb3b9ccb1ae"


def test_equal_tokens_have_one_fingerprint_however_they_are_held(tmp_path):
    expected = random_tokens(70_000)
    opened = [open_tokens(expected), open_tokens(np.repeat(expected, 2)[::2])]
    for number, (make, residency) in enumerate(
        (make, residency) for make in FILES for residency in ("mmap", "ram")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        source, arguments = make(folder, expected)
        opened.append(open_tokens(source, residency=residency, **arguments))
    halves = [
        write_raw(tmp_path / "a", expected[:35_000]),
        write_raw(tmp_path / "b", expected[35_000:]),
    ]
    opened.append(open_tokens(halves, dtype="uint16"))
    fingerprints = {tokens.fingerprint() for tokens in opened}
    assert len(opened) == 19
    assert len(fingerprints) == 1
    assert re.fullmatch(r"uint16:70000:[0-9a-f]{16}", fingerprints.pop())


@pytest.mark.parametrize("num_tokens", [1, 2, 511, 512, 513, 3000, 10**6])
def test_other_tokens_have_another_fingerprint(num_tokens):
    tokens = random_tokens(num_tokens)
    first, last = tokens.copy(), tokens.copy()
    first[0] ^= 1
    last[-1] ^= 1
    longer = np.append(tokens, tokens[-1:])
    several = [tokens, first, longer, tokens.astype(np.uint32), tokens.astype(np.int32)]
    several += [last] if num_tokens > 1 else []
    several += [tokens[:-1], tokens[::-1]] if num_tokens > 2 else []
    assert len({open_tokens(one).fingerprint() for one in several}) == len(several)


def test_the_order_of_the_files_is_part_of_the_fingerprint(tmp_path):
    a = write_raw(tmp_path / "a", random_tokens(100, seed=1))
    b = write_raw(tmp_path / "b", random_tokens(100, seed=2))
    prints = [open_tokens(files, dtype="uint16").fingerprint() for files in ([a, b], [b, a])]
    assert prints[0] != prints[1]


# Closing while in use


@pytest.fixture
def pause(monkeypatch):
    """Pieces.gather and Pieces.copy stop at the door: (somebody came, go on)."""
    came, go_on = threading.Event(), threading.Event()

    def paused(real):
        def method(*args):
            came.set()
            assert go_on.wait(30)
            return real(*args)

        return method

    monkeypatch.setattr(Pieces, "gather", paused(Pieces.gather))
    monkeypatch.setattr(Pieces, "copy", paused(Pieces.copy))
    return came, go_on


@pytest.mark.parametrize("residency", ["mmap", "ram"])
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda tokens: tokens.gather([0, 895, 1900], 100), id="gather"),
        pytest.param(lambda tokens: tokens[100:1950], id="slice"),
        pytest.param(lambda tokens: tokens[5], id="index"),
        pytest.param(lambda tokens: tokens.fingerprint(), id="fingerprint"),
    ],
)
def test_what_another_thread_reads_during_close_still_completes(
    tmp_path, pause, monkeypatch, residency, use
):
    came, go_on = pause
    monkeypatch.setattr(_tokens, "_COPY_TOKENS", 100)
    expected = random_tokens()
    source, _ = sharded(tmp_path, expected)
    tokens = open_tokens(source, residency=residency)
    results = []

    def read():
        try:
            results.append(use(tokens))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert came.wait(30)
    tokens.close()
    for path in source:
        path.unlink()
    go_on.set()
    thread.join(30)
    assert not isinstance(results[0], BaseException), results[0]
    np.testing.assert_array_equal(results[0], use(open_tokens(expected)))
    with pytest.raises(ValueError, match="closed"):
        tokens.gather([0], 1)


def test_threads_that_meet_a_close_get_their_tokens_or_a_clear_error(tmp_path):
    expected = random_tokens()
    files, _ = sharded(tmp_path, expected)
    block = naive_gather(expected, [0, 895, 1900], 100)
    ends = []

    def gather_until_closed(tokens):
        try:
            while True:
                tokens.prefetch([0, 895, 1900], 100)
                np.testing.assert_array_equal(tokens.gather([0, 895, 1900], 100), block)
        except BaseException as error:
            ends.append(error)

    for _ in range(10):
        tokens = open_tokens(files)
        calls = [lambda tokens=tokens: gather_until_closed(tokens)] * 3
        in_threads(*calls, lambda tokens=tokens: (threading.Event().wait(0.005), tokens.close()))
    assert len(ends) == 30
    for error in ends:
        assert isinstance(error, ValueError), error
        assert "closed" in str(error)


def test_a_closed_array_leaves_no_file_open(tmp_path):
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    files, _ = sharded(tmp_path, random_tokens())
    open_tokens(files).prefetch([0], 2000)  # what is opened once for the process
    before = len(os.listdir("/proc/self/fd"))
    tokens = open_tokens(files)
    tokens.gather([0], 2000)
    tokens.prefetch([0], 2000)
    tokens.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# More than 2**32 tokens


@pytest.fixture(scope="module")
def past_32_bits(tmp_path_factory):
    """A sparse file of 2**33 + 1000 uint16 tokens: 16 GiB that take a few KiB of disk."""
    path = tmp_path_factory.mktemp("sparse") / "tokens.bin"
    num_tokens = 2**33 + 1000
    islands = {
        at: random_tokens(600, seed=number) | 1  # no zeros: told apart from the hole
        for number, at in enumerate([0, 2**31 - 300, 2**32 - 300, 2**33 - 300, num_tokens - 600])
    }
    try:
        with path.open("wb") as file:
            file.truncate(2 * num_tokens)
            for at, tokens in islands.items():
                file.seek(2 * at)
                file.write(tokens.tobytes())
    except OSError as error:  # no sparse files, or no files of this size
        path.unlink()
        pytest.skip(str(error))
    if path.stat().st_blocks * 512 > 2**24:
        path.unlink()
        pytest.skip("no sparse files here")
    yield path, num_tokens, islands
    blocks = path.stat().st_blocks
    path.unlink()
    assert blocks * 512 < 2**24  # still almost no disk


def test_windows_past_32_bits_are_found(past_32_bits):
    path, num_tokens, islands = past_32_bits
    with open_tokens(path, dtype="uint16") as tokens:
        assert len(tokens) == num_tokens
        assert tokens.nbytes == 2 * num_tokens
        assert "16.00 GiB" in repr(tokens)
        starts = [at + shift for at in islands for shift in (0, 100, 299, 300)]
        expected = [
            islands[at][shift : shift + 300] for at in islands for shift in (0, 100, 299, 300)
        ]
        tokens.prefetch(starts, 300)
        np.testing.assert_array_equal(tokens.gather(starts, 300), expected)
        np.testing.assert_array_equal(tokens.gather([2**30, 2**32 + 2**31], 50), np.zeros((2, 50)))
        for at, island in islands.items():
            np.testing.assert_array_equal(tokens[at : at + 600], island)
            np.testing.assert_array_equal(tokens[at + 590 : at + 10 : -7], island[590:10:-7])
            assert tokens[at + 5] == island[5]
        assert tokens[-1] == islands[num_tokens - 600][-1]
        np.testing.assert_array_equal(tokens[-600:], islands[num_tokens - 600])
        with pytest.raises(
            IndexError, match=r"\[8,589,935,493, 8,589,935,593\) does not lie within"
        ):
            tokens.gather([num_tokens - 99], 100)


def test_a_shard_after_2_to_the_33_tokens_continues_the_axis(past_32_bits, tmp_path):
    path, num_tokens, islands = past_32_bits
    after = random_tokens(500, seed=9)
    joined = np.concatenate([islands[num_tokens - 600], after])
    files = [path, write_raw(tmp_path / "after.bin", after), path]
    with open_tokens(files, dtype="uint16") as tokens:
        assert len(tokens) == 2 * num_tokens + 500
        starts = np.arange(0, 800, 50)
        np.testing.assert_array_equal(
            tokens.gather(num_tokens - 600 + starts, 300), naive_gather(joined, starts, 300)
        )
        np.testing.assert_array_equal(tokens[num_tokens - 600 : num_tokens + 500], joined)
        again = num_tokens + 500 + 2**32 - 300
        np.testing.assert_array_equal(tokens.gather([again], 600)[0], islands[2**32 - 300])


def test_a_token_changed_at_the_far_end_changes_the_fingerprint(past_32_bits):
    path, num_tokens, islands = past_32_bits
    with open_tokens(path, dtype="uint16") as tokens:
        before = tokens.fingerprint()
        assert before.startswith(f"uint16:{num_tokens}:")
        with path.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write((islands[num_tokens - 600][-1] ^ 2).tobytes())
    with open_tokens(path, dtype="uint16") as tokens:
        after = tokens.fingerprint()
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(islands[num_tokens - 600][-1].tobytes())
    assert after != before


# What may be opened


def test_paths_may_be_strings_or_path_objects_in_any_sequence(tmp_path):
    class Somewhere:
        def __fspath__(self):
            return str(a)

    expected = random_tokens(10)
    a = write_npy(tmp_path / "a.npy", expected)
    for source in (a, str(a), Somewhere(), [a], (str(a),)):
        np.testing.assert_array_equal(open_tokens(source)[:], expected)
    for source in ([a, str(a)], (Somewhere(), a)):
        np.testing.assert_array_equal(open_tokens(source)[:], np.concatenate([expected] * 2))


def test_a_key_names_the_tensor_in_every_file(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for path, tokens in zip(files, np.split(random_tokens(), [700]), strict=True):
        save_file({"ids": tokens, "tokens": tokens[:3]}, path)
    np.testing.assert_array_equal(open_tokens(files, key="ids")[:], random_tokens())
    assert len(open_tokens(files)) == 6


def test_an_array_is_not_copied_unless_it_has_gaps():
    source = random_tokens()
    tokens, copied = open_tokens(source), open_tokens(source[::2])
    old = int(source[4])
    source[4] = old ^ 1
    assert tokens[4] == old ^ 1
    assert copied[2] == old


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_an_array_is_in_ram_whatever_was_asked_for(residency):
    assert open_tokens(random_tokens(), residency=residency).residency == "ram"


def test_a_repr_names_the_files_their_size_and_the_state(tmp_path):
    files, _ = sharded(tmp_path, random_tokens())
    tokens = open_tokens(files)
    name = f"TokenArray({files[0]} and 5 more: 2,000 uint16 tokens, 4,000 bytes"
    assert repr(tokens) == f"{name}, mmap)"
    tokens.close()
    assert repr(tokens) == f"{name}, closed)"
    assert repr(open_tokens(files, residency="ram")) == f"{name}, ram)"
    assert repr(open_tokens(files[4])).startswith(f"TokenArray({files[4]}: 1,085 uint16")
    assert repr(open_tokens(random_tokens(3))) == "TokenArray(array: 3 uint16 tokens, 6 bytes, ram)"


@pytest.mark.parametrize("residency", ["gpu", "", "MMAP", None])
def test_an_unknown_residency_is_refused(residency):
    with pytest.raises(ValueError, match=f'residency={residency!r}; it must be "mmap" or "ram"'):
        open_tokens(random_tokens(), residency=residency)


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_files_of_different_dtypes_are_refused_and_both_are_named(tmp_path, residency):
    a = write_npy(tmp_path / "a.npy", random_tokens(10))
    b = write_npy(tmp_path / "b.npy", random_tokens(10))
    c = write_npy(tmp_path / "c.npy", random_tokens(10, "uint32"))
    message = f"^{re.escape(str(c))} holds uint32 tokens and {re.escape(str(a))} uint16; "
    with pytest.raises(ValueError, match=message):
        open_tokens([a, b, c], residency=residency)


def test_one_bad_file_of_several_is_named(tmp_path):
    a = write_npy(tmp_path / "a.npy", random_tokens(10))
    b = write_raw(tmp_path / "b.npy", random_tokens(10))
    with pytest.raises(ValueError, match=re.escape(str(b))):
        open_tokens([a, b])
    with pytest.raises(ValueError, match=f"^{re.escape(str(a))}: dtype=uint16 was given"):
        open_tokens([b, a], dtype="uint16")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "c"))):
        open_tokens([a, tmp_path / "c"])


@pytest.mark.parametrize("source", [[], ()])
def test_an_empty_sequence_is_refused(source):
    with pytest.raises(ValueError, match=r"source is an empty sequence; needed is a path"):
        open_tokens(source)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (None, "NoneType"),
        (7, "int"),
        (b"tokens.bin", "bytes"),
        ({"tokens.bin"}, "set"),
        ({"train": "tokens.bin"}, "dict"),
        ((path for path in ["tokens.bin"]), "generator"),
    ],
)
def test_a_source_of_another_type_is_refused_and_named(source, kind):
    with pytest.raises(TypeError, match=f"source is of type {kind}; needed is a path") as raised:
        open_tokens(source)
    assert "np.asarray" not in str(raised.value)


@pytest.mark.parametrize(
    ("element", "kind"),
    [(7, "int"), (None, "NoneType"), (["c"], "list"), (b"b", "bytes")],
)
def test_an_element_of_another_type_is_refused_and_named(tmp_path, element, kind):
    a = write_npy(tmp_path / "a.npy", random_tokens(10))
    with pytest.raises(TypeError, match=rf"source\[1\] is of type {kind}; needed is a path"):
        open_tokens([a, element])


def test_a_jax_array_is_refused_with_the_remedy():
    import jax.numpy as jnp

    with pytest.raises(
        TypeError, match=r"source is of type ArrayImpl; .*: pass np\.asarray\(source\)"
    ):
        open_tokens(jnp.arange(10))


@pytest.mark.parametrize("shape", [(2, 3), (1, 6), ()])
def test_an_array_that_is_not_flat_is_refused_with_its_shape(shape):
    with pytest.raises(ValueError, match=re.escape(f"the array has shape {shape}; tokens must be")):
        open_tokens(np.zeros(shape, np.uint16))


@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "int16", "uint64", "object", "U2"])
def test_an_array_of_another_dtype_is_refused_with_its_dtype(dtype):
    array = np.zeros(3, dtype)
    with pytest.raises(
        ValueError, match=f"^the array is of dtype {array.dtype.name}, which cannot hold"
    ):
        open_tokens(array)


def test_a_big_endian_array_is_refused_and_called_that():
    with pytest.raises(ValueError, match="the array is of dtype uint16 in big-endian byte order"):
        open_tokens(np.zeros(3, ">u2"))


def test_an_empty_array_is_refused():
    with pytest.raises(ValueError, match="the array is empty"):
        open_tokens(np.zeros(0, np.uint16))


def test_dtype_is_refused_for_an_array():
    with pytest.raises(
        ValueError, match=r"dtype='uint32' was given with an array of uint16; .*leave it"
    ):
        open_tokens(random_tokens(3), dtype="uint32")


# Into RAM, in the background


def test_ram_is_served_from_the_mapped_file_until_all_is_read_and_then_from_ram(
    tmp_path, monkeypatch
):
    expected = random_tokens(100_000)
    path = write_raw(tmp_path / "t.bin", expected)
    go_on = threading.Event()
    read = _storage._read
    monkeypatch.setattr(_storage, "_READ_BYTES", 10_000)
    monkeypatch.setattr(_storage, "_read", lambda chunk, out: go_on.wait(20) and read(chunk, out))
    tokens = open_tokens(path, dtype="uint16", residency="ram")
    starts = [0, 5, 99_000]
    assert tokens._held.mapped
    np.testing.assert_array_equal(tokens.gather(starts, 1000), naive_gather(expected, starts, 1000))
    go_on.set()
    tokens.wait_until_loaded()
    assert not tokens._held.mapped
    np.testing.assert_array_equal(tokens.gather(starts, 1000), naive_gather(expected, starts, 1000))
    path.write_bytes(b"")  # in RAM, nothing that befalls the file matters
    np.testing.assert_array_equal(tokens[:], expected)


def test_an_error_while_reading_into_ram_arrives_at_the_next_gather(tmp_path, monkeypatch):
    path = write_raw(tmp_path / "t.bin", random_tokens())

    def fails(chunk, out):
        raise OSError(5, "disk on fire", str(chunk.extent.path))

    monkeypatch.setattr(_storage, "_read", fails)
    tokens = open_tokens(path, dtype="uint16", residency="ram")
    for use in (tokens.wait_until_loaded, lambda: tokens.gather([0], 1), lambda: tokens[5]):
        with pytest.raises(OSError, match=f"disk on fire: '{re.escape(str(path))}'"):
            use()
    tokens.close()
    with pytest.raises(ValueError, match="closed"):
        tokens.gather([0], 1)


@pytest.mark.parametrize("how", ["close", "collect"])
def test_reading_into_ram_ends_with_the_tokens(tmp_path, monkeypatch, how):
    path = write_raw(tmp_path / "t.bin", random_tokens(100_000))
    monkeypatch.setattr(_storage, "_READ_BYTES", 10)
    monkeypatch.setattr(_storage, "_read", lambda chunk, out: time.sleep(0.01))
    tokens = open_tokens(path, dtype="uint16", residency="ram")
    fill = tokens._fill
    if how == "close":
        tokens.close()
    del tokens
    fill.wait()
    assert fill._left_bytes > 0


def test_data_that_does_not_fit_in_memory_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    path = write_raw(tmp_path / "t.bin", random_tokens(2**20))
    monkeypatch.setattr(_storage, "available_bytes", lambda: 2**20)
    monkeypatch.setattr(_storage, "_read", None)
    message = (
        rf'^{re.escape(str(path))}: residency="ram" needs 0.00 GiB and 0.00 GiB of memory are '
        r'available \(control group limits included\); use residency="mmap"'
    )
    with pytest.raises(MemoryError, match=message):
        open_tokens(path, dtype="uint16", residency="ram")
    monkeypatch.undo()
    monkeypatch.setattr(_storage, "available_bytes", lambda: 2**21)
    open_tokens(path, dtype="uint16", residency="ram").wait_until_loaded()
    open_tokens(path, dtype="uint16").close()


# A file that is lost under the mapping


LOST = """
import os, sys, numpy as np, tokenloader as tl
from tokenloader.storage import kernel_advice as _advice
from tokenloader.tokens import token_array as _tokens
path, use, kernel = sys.argv[1:]
if kernel == "old":
    _tokens.fault_in = lambda ranges: False
tokens = tl.open_tokens(path, dtype="uint16")
tokens.gather([0, 50_000], 1000)
os.truncate(path, 10_000)
try:
    tokens.gather([0, 50_000], 1000) if use == "gather" else tokens[40_000:90_000]
except OSError as error:
    print(error)
if kernel == "new":
    print(tokens.gather([0], 1000)[0, :3].tolist())  # what is left can still be read
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a lost file is fatal")
@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("use", ["gather", "slice"])
def test_a_truncated_file_is_an_error_with_its_name_and_does_not_kill_the_process(
    tmp_path, use, kernel
):
    expected = random_tokens(100_000)
    path = write_raw(tmp_path / "t.bin", expected)
    found = subprocess.run(
        [sys.executable, "-c", LOST, str(path), use, kernel],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    error, *rest = found.stdout.splitlines()
    at = r"10,000" if kernel == "old" else r"[\d,]+"
    assert re.match(
        rf"\[Errno 5\] cannot be read at byte {at}: it has 10,000 bytes now and had 200,000 when it "
        rf"was opened; .*: '{re.escape(str(path))}'$",
        error,
    )
    assert rest == ([str(expected[:3].tolist())] if kernel == "new" else [])


def test_the_error_names_the_shard_that_was_lost(tmp_path):
    paths = [write_raw(tmp_path / str(i), random_tokens(10_000)) for i in range(3)]
    tokens = open_tokens(paths, dtype="uint16")
    os.truncate(paths[1], 4096)
    with pytest.raises(OSError, match=re.escape(str(paths[1]))) as caught:
        tokens.gather([0, 9_900, 19_000], 500)
    assert caught.value.errno == errno.EIO
    np.testing.assert_array_equal(tokens.gather([20_000], 100)[0], random_tokens(10_000)[:100])


def test_is_cached_tells_whether_a_token_is_in_memory(tmp_path):
    path = write_raw(tmp_path / "t.bin", random_tokens())
    tokens = open_tokens(path, dtype="uint16")
    assert tokens.gather([1999], 1).shape == (1, 1)
    assert tokens.is_cached(1999)
    assert open_tokens(random_tokens()).is_cached(0)


def test_a_file_that_is_replaced_while_it_is_read_into_ram_is_not_mixed_in(tmp_path, monkeypatch):
    old, new = random_tokens(50_000), random_tokens(50_000)[::-1]
    path = write_raw(tmp_path / "old", old)
    write_raw(tmp_path / "new", new)
    go_on = threading.Event()
    read = _storage._read
    monkeypatch.setattr(_storage, "_READ_BYTES", 1000)
    monkeypatch.setattr(_storage, "_read", lambda chunk, out: go_on.wait(20) and read(chunk, out))
    monkeypatch.chdir(tmp_path)
    tokens = open_tokens("old", dtype="uint16", residency="ram")
    monkeypatch.chdir("/")  # relative paths mean something else now
    os.replace(tmp_path / "new", path)
    go_on.set()
    tokens.wait_until_loaded()
    assert not tokens._held.mapped
    np.testing.assert_array_equal(tokens[:], old)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_token_array_is_not_copied_with_its_addresses(tmp_path, copied):
    tokens = open_tokens(write_npy(tmp_path / "t.npy", random_tokens()))
    with pytest.raises(
        TypeError, match=r"t\.npy.* cannot be copied or pickled; open the tokens again"
    ):
        copied(tokens)


@pytest.mark.parametrize("kind", [np.uint16, np.int8, np.int64])
def test_the_length_may_be_an_integer_of_numpy(kind):
    expected = random_tokens(60_000)
    tokens = open_tokens(expected)
    tokens.prefetch([0], kind(100))
    np.testing.assert_array_equal(
        tokens.gather([3, 50_000], kind(100)), naive_gather(expected, [3, 50_000], 100)
    )
