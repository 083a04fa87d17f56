"""Located windows: found once, read ahead, and copied later, whatever happens to the tokens meanwhile."""

import os
import re
import threading
from functools import partial

import numpy as np
import pytest
from helpers import naive_gather
from token_files import RecordingKernel, fill_with, random_tokens, sharded, write_raw

from tokenloader import open_tokens
from tokenloader.storage.kernel_advice import page_ranges
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
    assert windows.is_cached() in (True, False)
    first, second = windows.copy(), windows.copy()
    np.testing.assert_array_equal(first, naive_gather(TOKENS, STARTS, 100))
    np.testing.assert_array_equal(first, second)
    assert not np.shares_memory(first, second)


def test_no_windows_are_located_too(tokens):
    windows = tokens.locate([], 7)
    windows.prefetch()
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
