"""Reading in order: the same tokens as by gathering, from files or from memory."""

import os
import threading
from functools import partial

import numpy as np
import pytest
from helpers import in_threads
from token_files import NeverFull, fill_with, random_tokens, sharded, write_raw

from tokenloader import open_tokens
from tokenloader.tokens.reader import Reader

TOKENS = random_tokens()


def opened(held, folder):
    files = sharded(folder, TOKENS)[0]
    if held == "filling":
        return fill_with(NeverFull, files)
    if held == "view":
        return open_tokens([TOKENS[:3], *files, files[3]]).view(3, 2003)
    if held == "mixed":
        return open_tokens([*files[:2], TOKENS[3:900], open_tokens(files).view(900, 2000)])
    tokens = open_tokens(TOKENS) if held == "array" else open_tokens(files, residency=held)
    tokens.wait_until_loaded()
    return tokens


@pytest.mark.parametrize("held", ["mmap", "ram", "filling", "array", "mixed", "view"])
def test_arrays_are_filled_across_files(tmp_path, held):
    with Reader(opened(held, tmp_path)) as reader:
        assert reader.dtype == np.uint16
        for start, length in ((0, 2000), (0, 1), (2, 5), (899, 10), (1999, 1), (5, 0)):
            out = np.empty(length, np.uint16)
            reader.read(start, out)
            np.testing.assert_array_equal(out, TOKENS[start : start + length])


@pytest.mark.parametrize("missing", ["preadv", "posix_fadvise"])
def test_systems_that_lack_a_call_read_the_same(tmp_path, monkeypatch, missing):
    monkeypatch.delattr(os, missing, raising=False)
    out = np.empty(2000, np.uint16)
    with Reader(opened("mmap", tmp_path)) as reader:
        reader.read(0, out)
    np.testing.assert_array_equal(out, TOKENS)


def test_several_threads_read_at_once(tmp_path):
    wrong = []
    barrier = threading.Barrier(4)

    def read(number):
        barrier.wait()
        for start in range(number, 1900, 7):
            out = np.empty(100, np.uint16)
            reader.read(start, out)
            if not np.array_equal(out, TOKENS[start : start + 100]):
                wrong.append(start)

    with Reader(opened("mmap", tmp_path)) as reader:
        in_threads(*(partial(read, number) for number in range(4)))
    assert not wrong


def test_positions_past_2_32_are_read_from_sparse_files(tmp_path):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(2 * (2**32 + 100))
        file.seek(2 * (2**32 + 50))
        file.write(np.array([7], np.uint16).tobytes())
    out = np.empty(100, np.uint16)
    with Reader(open_tokens(tmp_path / "sparse.bin", dtype="uint16")) as reader:
        reader.read(2**32, out)
    assert np.flatnonzero(out).tolist() == [50]


def test_a_file_that_ends_early_is_an_error_that_says_where(tmp_path):
    path = write_raw(tmp_path / "t.bin", TOKENS)
    with Reader(open_tokens(path, dtype="uint16").view(100, 2000)) as reader:
        os.truncate(path, 1001)
        with pytest.raises(OSError, match=r"at byte 800: .* it has 1,001 bytes and had 4,000") as raised:
            reader.read(300, np.empty(500, np.uint16))
    assert raised.value.filename == str(path)


def test_what_was_opened_is_read_whatever_its_paths_are_now(tmp_path):
    tokens, out = opened("mmap", tmp_path), np.empty(2000, np.uint16)
    gone, replaced = (tokens.extents[number].path for number in (2, 4))
    gone.unlink()
    (tmp_path / "new").write_bytes(bytes(10_000))
    os.replace(tmp_path / "new", replaced)
    with Reader(tokens) as reader:
        reader.read(0, out)
    np.testing.assert_array_equal(out, TOKENS)


def test_a_file_that_is_rewritten_while_it_is_read_is_an_error_with_its_name(tmp_path):
    path = write_raw(tmp_path / "t.bin", TOKENS)
    os.utime(path, ns=(0, 0))
    with Reader(open_tokens(path, dtype="uint16")) as reader:
        reader.read(0, np.empty(500, np.uint16))
        write_raw(path, TOKENS[::-1])
        with pytest.raises(OSError, match=r"before at 1970-01-01T00:00:00\.0+ \(UTC\)") as raised:
            reader.read(500, np.empty(500, np.uint16))
    assert raised.value.filename == str(path)


def test_a_closed_array_is_not_read(tmp_path):
    tokens = opened("mmap", tmp_path)
    tokens.close()
    with pytest.raises(ValueError, match="it was closed"):
        Reader(tokens)
