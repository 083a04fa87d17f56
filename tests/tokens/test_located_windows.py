"""Located windows: found once, read ahead, and copied later, whatever happens to the tokens meanwhile."""

import os
import re
import threading
from functools import partial

import numpy as np
import pytest
from helpers import eventually, naive_gather
from token_files import RecordingKernel, fill_with, random_tokens, sharded, write_npy, write_raw

from tokenloader import open_tokens
from tokenloader.storage.kernel_advice import (
    CACHE_IS_TOLD,
    COMMON_READ_AHEAD_BYTES,
    KernelAdvice,
    page_ranges,
)
from tokenloader.storage.ram import RamFill, read_exactly
from tokenloader.tokens.opening import join

TOKENS = random_tokens()
STARTS = [0, 2, 895, 1900]  # of 100 tokens; the first three straddle files


@pytest.fixture(params=["one file", "files", "array", "ram", "view"])
def tokens(request, tmp_path):
    files = sharded(tmp_path, TOKENS)[0]
    whole = write_raw(tmp_path / "whole.bin", TOKENS)
    return {
        "one file": lambda: open_tokens(whole, dtype="uint16"),
        "files": lambda: open_tokens(files),
        "array": lambda: open_tokens(TOKENS),
        "ram": lambda: open_tokens(files, residency="ram"),
        "view": lambda: open_tokens([TOKENS[:50], *files, TOKENS[:50]]).view(50, 2050),
    }[request.param]()


def test_windows_are_copied_as_often_as_asked(tokens):
    windows = tokens.locate(STARTS, 100)
    assert len(windows) == 4
    windows.prefetch()
    windows.load()
    assert windows.is_cached() in (True, False)
    first, second = windows.copy(), windows.copy()
    np.testing.assert_array_equal(first, naive_gather(TOKENS, STARTS, 100))
    np.testing.assert_array_equal(first, second)
    assert not np.shares_memory(first, second)


def test_no_windows_are_located_too(tokens):
    windows = tokens.locate([], 7)
    windows.prefetch()
    windows.load()
    assert len(windows) == 0
    assert windows.is_cached()
    assert windows.copy().shape == (0, 7)


def test_what_becomes_of_the_starts_later_does_not_matter(tokens):
    starts = np.array(STARTS)
    windows = tokens.locate(starts, 100)
    starts[:] = 10**12
    windows.prefetch()
    np.testing.assert_array_equal(windows.copy(), naive_gather(TOKENS, STARTS, 100))


def test_windows_of_tokens_that_were_closed_meanwhile_are_refused(tokens):
    windows = tokens.locate(STARTS, 100)
    tokens.close()
    windows.prefetch()  # still harmless
    windows.load()
    assert not windows.is_over_a_network
    with pytest.raises(ValueError, match="it was closed; open the tokens again"):
        windows.copy()


def test_windows_that_were_located_in_a_file_are_copied_after_it_was_read_into_ram(tmp_path):
    go_on = threading.Event()

    def read(*chunk):
        assert go_on.wait(20)
        read_exactly(*chunk)

    tokens = fill_with(partial(RamFill, read=read), sharded(tmp_path, TOKENS)[0])
    windows = tokens.locate(STARTS, 100)
    go_on.set()
    tokens.wait_until_loaded()
    expected = naive_gather(TOKENS, STARTS, 100)
    np.testing.assert_array_equal(tokens.gather(STARTS, 100), expected)
    windows.prefetch()
    np.testing.assert_array_equal(windows.copy(), expected)


def test_the_pages_that_are_announced_are_those_that_are_read(tmp_path):
    class Both(RecordingKernel):
        def copy(self, ranges, out):
            self.read = page_ranges(ranges)
            return super().copy(ranges, out)

    kernel = Both()
    extents = open_tokens(sharded(tmp_path, TOKENS)[0]).extents
    windows = join(extents, "mmap", kernel=kernel).locate(STARTS, 100)
    windows.prefetch()
    windows.copy()
    assert np.array_equal(kernel.announced, kernel.read)


class Loading(KernelAdvice):
    """Advice that is only recorded: ranges, and how many bytes of them are to be asked for at once."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def start_reading(self, ranges, *most_bytes):
        self.loaded.append((ranges.tolist(), *most_bytes))


def test_what_is_loaded_of_each_file_is_its_whole_pages_in_the_requests_of_its_disk(tmp_path, monkeypatch):
    files = [write_npy(tmp_path / name, random_tokens(50_000)) for name in "abc"]
    extents = open_tokens(files).extents
    monkeypatch.setattr(
        "tokenloader.storage.mapped.announced_bytes",
        lambda descriptor: 1 << (20 + "abc".index(os.readlink(f"/proc/self/fd/{descriptor}")[-1])),
    )
    kernel = Loading()
    tokens = join(extents, "mmap", kernel=kernel)
    tokens.locate([40_000], 70_000).load()  # the last of a, all of b, the first of c
    copied = []
    monkeypatch.setattr(kernel, "copy", lambda ranges, out: copied.extend(ranges.tolist()) or (len(out), 0))
    tokens.locate([40_000], 70_000).copy()
    assert [most_bytes for _, most_bytes in kernel.loaded] == [1 << 20, 2 << 20, 4 << 20]
    assert [ranges for ranges, _ in kernel.loaded] == page_ranges(np.array(copied))[:, None].tolist()


def test_arrays_between_files_are_loaded_too_and_arrays_alone_are_not(tmp_path):
    # What is swapped out comes back.
    kernel = Loading()
    files = open_tokens(sharded(tmp_path, TOKENS)[0]).extents
    join([*files, TOKENS], "mmap", kernel=kernel).locate([1500], 1000).load()
    assert len(kernel.loaded) == 3  # two files, and the array
    assert kernel.loaded[-1][1] == COMMON_READ_AHEAD_BYTES
    mapped = join([*files, TOKENS], "mmap").locate([1500], 1000)
    alone = join([TOKENS], "mmap", kernel=kernel).locate([500], 1000)
    alone.load()
    assert len(kernel.loaded) == 3
    assert (mapped.is_mapped, alone.is_mapped) == (True, False)


@pytest.mark.skipif(not CACHE_IS_TOLD, reason="Linux tells, others do not")
def test_what_is_loaded_comes_to_be_in_the_page_cache_and_no_more(tmp_path):
    path = write_raw(tmp_path / "t.bin", random_tokens(2_000_000))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tokens = open_tokens(path, dtype="uint16")
    block, behind = tokens.locate([500_000], 300_000), tokens.locate([803_000], 1_000_000)
    if behind.is_cached():
        pytest.skip("this file system keeps its pages")
    block.load()
    assert eventually(lambda: block.first_not_cached() is None)
    assert not behind.is_cached()


@pytest.mark.parametrize("name", ["nfs", None])
def test_windows_are_over_a_network_where_a_file_is(tmp_path, monkeypatch, name):
    monkeypatch.setattr("tokenloader.storage.mapped.file_system_type", lambda descriptor: name)
    tokens = open_tokens([TOKENS, *sharded(tmp_path, TOKENS)[0]])
    assert tokens.locate([0], 1).is_over_a_network == (name == "nfs")
    assert not open_tokens(TOKENS).locate([0], 1).is_over_a_network


def test_the_type_of_a_file_system_is_asked_for_once_however_many_files_are_on_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("tokenloader.storage.mapped.file_system_type", asked.append)
    tokens = open_tokens(sharded(tmp_path, TOKENS)[0])
    assert not tokens.locate([0], 1).is_over_a_network
    assert len(asked) == 1


@pytest.mark.parametrize("start", [0, 2, 895])
def test_the_first_page_of_the_first_window_is_looked_for_in_the_page_cache(tmp_path, start):
    class Asked(RecordingKernel):
        def is_cached(self, address):
            self.address = address
            return False

    kernel = Asked()
    extents = open_tokens(sharded(tmp_path, TOKENS)[0]).extents
    tokens = join(extents, "mmap", kernel=kernel)
    assert not tokens.locate([start, 500], 100).is_cached()
    found = kernel.address
    assert not tokens.locate([start], 1).is_cached()
    assert kernel.address == found


def test_a_file_that_was_truncated_since_is_an_error_with_its_name(tmp_path):
    path = write_raw(tmp_path / "t.bin", random_tokens(100_000))
    tokens = open_tokens(path, dtype="uint16")
    lost, left = tokens.locate([90_000], 100), tokens.locate([0], 100)
    os.truncate(path, 4096)
    for windows in (lost, left):
        with pytest.raises(OSError, match=f"it has 4,096 bytes and had 200,000.*{re.escape(str(path))}"):
            windows.copy()
