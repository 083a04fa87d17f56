"""Files read into RAM: the bytes, the page cache, the progress bar and the errors."""

import errno
import gc
import mmap
import os
import re
import sys
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from token_files import random_tokens, written_extent

from tokenloader.formats.extent import Extent
from tokenloader.storage.kernel_advice import KERNEL
from tokenloader.storage.mapped import map_read_only, open_file
from tokenloader.storage.ram import RamFill, check_it_fits, read_exactly

TOKENS = random_tokens(3000)
NO_SUCH_FLAG = partial(read_exactly, dontcache_flag=0x40000000)  # a flag that no kernel knows


def read_into_ram(extents, **arguments):
    """What a RamFill has read when it is full; raises its error."""
    files = [open_file(extent) for extent in extents]
    fill = RamFill(extents, files, **arguments)
    fill.wait()
    assert all(file.closed for file in files)
    if fill.error is not None:
        assert fill.arrays is None
        raise fill.error
    return fill.arrays


@pytest.mark.parametrize("offset_bytes", [0, 1, 7, 64, 4095, 4097])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_ram_holds_the_bytes_of_the_extent_and_no_others(tmp_path, offset_bytes, dtype):
    tokens = TOKENS.astype(dtype)
    [held] = read_into_ram([written_extent(tmp_path / "t", tokens, offset_bytes, after=b"\xbb" * 11)])
    assert held.dtype == tokens.dtype
    np.testing.assert_array_equal(held, tokens)


def test_several_extents_are_read_into_one_allocation_in_order(tmp_path):
    cuts = np.split(TOKENS, [1, 700, 703, 2999])
    extents = [written_extent(tmp_path / str(i), cut, 3 * i) for i, cut in enumerate(cuts)]
    arrays = read_into_ram(extents)
    for one, following in pairwise(arrays):
        assert one.flags.c_contiguous
        assert following.ctypes.data == one.ctypes.data + one.nbytes
    np.testing.assert_array_equal(np.concatenate(arrays), TOKENS)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 6000, 10**9])
def test_the_size_of_a_chunk_does_not_matter(tmp_path, chunk_bytes):
    extents = [
        written_extent(tmp_path / "a", TOKENS, 5, after=b"zz"),
        written_extent(tmp_path / "b", TOKENS[:50]),
    ]
    first, second = read_into_ram(extents, chunk_bytes=chunk_bytes)
    np.testing.assert_array_equal(first, TOKENS)
    np.testing.assert_array_equal(second, TOKENS[:50])


def test_tokens_in_ram_are_no_longer_the_file(tmp_path):
    extent = written_extent(tmp_path / "t", TOKENS)
    [tokens] = read_into_ram([extent])
    extent.path.write_bytes(b"")
    np.testing.assert_array_equal(tokens, TOKENS)


def test_a_file_that_ends_early_is_an_error_with_its_name(tmp_path):
    whole = written_extent(tmp_path / "whole", TOKENS)
    short = written_extent(tmp_path / "short", TOKENS, 100)
    os.truncate(short.path, 100 + 4001)
    message = (
        r"^\[Errno 5\] ended at byte 4,101, before its tokens did; has it "
        rf"been truncated\?: '{re.escape(str(short.path))}'$"
    )
    for chunk_bytes in (64 << 20, 1000):
        with pytest.raises(OSError, match=message) as raised:
            read_into_ram([whole, short], chunk_bytes=chunk_bytes)
        assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("missing", ["preadv", "preadv2", "posix_fadvise"])
def test_systems_that_lack_a_call_read_the_same(tmp_path, monkeypatch, missing):
    if missing != "preadv2":
        monkeypatch.delattr(os, missing, raising=False)
    read = read_exactly if missing == "preadv" else NO_SUCH_FLAG
    [found] = read_into_ram([written_extent(tmp_path / "t", TOKENS, 7)], read=read, chunk_bytes=1000)
    np.testing.assert_array_equal(found, TOKENS)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is cached")
def test_reading_into_ram_leaves_no_second_copy_in_the_page_cache(tmp_path):
    tokens = np.zeros(4 << 20, np.uint16)
    extent = written_extent(tmp_path / "t", tokens)
    with extent.path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped, _ = map_read_only(extent)
    pages = range(mapped.ctypes.data, mapped.ctypes.data + mapped.nbytes, mmap.PAGESIZE)
    if any(KERNEL.is_cached(page) for page in pages):
        pytest.skip("this file system keeps its pages")
    read_into_ram([extent])
    assert sum(KERNEL.is_cached(page) for page in pages) < len(pages) / 10


def test_a_quick_read_shows_no_progress_bar(tmp_path, capfd):
    read_into_ram([written_extent(tmp_path / "t", TOKENS)])
    assert capfd.readouterr() == ("", "")


def test_a_slow_read_shows_a_progress_bar_that_ends_full(tmp_path, capfd):
    extents = [
        written_extent(tmp_path / "a", TOKENS),
        written_extent(tmp_path / "b", TOKENS[:1096], 3),
    ]
    read_into_ram(extents, chunk_bytes=1024, progress_after_seconds=0)
    out, err = capfd.readouterr()
    assert out == ""
    assert "reading tokens into RAM: 100%" in err
    assert "8.00k/8.00k" in err  # 2 x (3,000 + 1,096) bytes


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_tokens_in_ram_are_memory_of_the_process_and_no_more_than_the_data(tmp_path):
    def anonymous_bytes():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    extent = written_extent(tmp_path / "t", np.ones(32 << 20, np.uint16), 96)
    gc.collect()
    before = anonymous_bytes()
    [tokens] = read_into_ram([extent])
    assert abs(anonymous_bytes() - before - tokens.nbytes) < 0.1 * tokens.nbytes


def test_a_python_built_without_preadv2_reads_the_same(tmp_path, monkeypatch):
    preadv = os.preadv

    def without_flags(*arguments):
        if len(arguments) > 3:
            raise NotImplementedError("preadv2() is not available on this platform")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", without_flags)
    [found] = read_into_ram([written_extent(tmp_path / "t", TOKENS, 7)])
    np.testing.assert_array_equal(found, TOKENS)


def test_a_kernel_without_huge_pages_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    [found] = read_into_ram([written_extent(tmp_path / "t", TOKENS, 7)])
    np.testing.assert_array_equal(found, TOKENS)


def test_any_error_while_reading_is_kept_for_whoever_waits(tmp_path):
    def fails(*_):
        raise RuntimeError("not foreseen")

    with pytest.raises(RuntimeError, match="not foreseen"):
        read_into_ram([written_extent(tmp_path / "t", TOKENS)], read=fails)


def test_a_fill_that_is_stopped_ends_soon_with_its_files_closed_and_nothing_given_out(tmp_path):
    allowed = threading.Semaphore(0)

    def read(*chunk):
        assert allowed.acquire(timeout=20)
        read_exactly(*chunk)

    extent = written_extent(tmp_path / "t", TOKENS)
    file = open_file(extent)
    fill = RamFill([extent], [file], read=read, chunk_bytes=10)
    fill.stop()
    allowed.release(10)  # what each thread may have begun
    fill.wait()
    assert file.closed
    assert fill.arrays is None
    assert fill.error is None


@pytest.mark.parametrize("available", [None, 100, 101])
def test_tokens_that_fit_into_the_memory_available_are_not_refused(available):
    check_it_fits([Extent(Path("t"), 0, np.dtype("uint16"), 25, "headerless")] * 2, available)


def test_tokens_that_are_larger_than_the_memory_available_are_refused_with_both_sizes():
    extent = Extent(Path("t"), 0, np.dtype("uint16"), 2**30, "headerless")
    message = (
        r't and 2 more: residency="ram" needs 6.00 GiB and 5.50 GiB of memory are available '
        r'\(control group limits included\); use residency="mmap", which needs none'
    )
    with pytest.raises(MemoryError, match=f"^{message}$"):
        check_it_fits([extent] * 3, 11 << 29)
