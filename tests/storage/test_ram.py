"""One file's tokens in host memory, mapped or read: the bytes and the errors."""

import gc
import mmap
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tokenloader.formats import headerless
from tokenloader.formats.extent import Extent
from tokenloader.storage import ram as _storage
from tokenloader.storage.kernel_advice import is_cached
from tokenloader.storage.ram import RamFill, map_read_only, open_file

TOKENS = np.random.default_rng(0).integers(0, 2**16, 3000, dtype=np.uint16)


def read_into_ram(extents):
    """What a RamFill gives when it is full; raises its error."""
    given = []
    files = [open_file(extent) for extent in extents]
    fill = RamFill(extents, files, given.append)
    fill.wait()
    assert all(file.closed for file in files)
    if fill.error is not None:
        assert not given
        raise fill.error
    (tokens,) = given
    return tokens


def written(path, offset_bytes=0, tokens=TOKENS, after=b""):
    path.write_bytes(b"\xaa" * offset_bytes + tokens.tobytes() + after)
    return Extent(path, offset_bytes, tokens.dtype, len(tokens), headerless.FORMAT)


@pytest.mark.parametrize("offset_bytes", [0, 1, 7, 64, 4095, 4097])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_both_hold_the_bytes_of_the_extent_and_no_others(tmp_path, offset_bytes, dtype):
    tokens = TOKENS.astype(dtype)
    extent = written(tmp_path / "t", offset_bytes, tokens, after=b"\xbb" * 11)
    for held in (map_read_only(extent), read_into_ram([extent])):
        assert held.dtype == tokens.dtype
        np.testing.assert_array_equal(held, tokens)


def test_a_mapping_cannot_be_written_to(tmp_path):
    tokens = map_read_only(written(tmp_path / "t"))
    assert not tokens.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        tokens.flags.writeable = True


def test_the_tokens_hold_their_mapping(tmp_path):
    tokens = map_read_only(written(tmp_path / "t"))
    gc.collect()
    np.testing.assert_array_equal(tokens, TOKENS)


def test_a_mapping_that_is_let_go_leaves_no_file_open_and_no_warning(tmp_path):
    def open_files():
        return sorted(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else []

    extent = written(tmp_path / "t")
    before = open_files()
    unraisable = []
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tokens = map_read_only(extent)
            del tokens
            gc.collect()
    finally:
        sys.unraisablehook = hook
    assert not unraisable, unraisable
    assert open_files() == before


def test_a_file_may_be_deleted_while_it_is_mapped(tmp_path):
    tokens = map_read_only(written(tmp_path / "t"))
    (tmp_path / "t").unlink()
    np.testing.assert_array_equal(tokens, TOKENS)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells, others do not")
def test_a_mapping_is_advised_to_be_read_at_random(tmp_path):
    # Without it a fault on a cold file reads a whole read-ahead window: 15 to 200 times slower.
    extent = written(tmp_path / "t")
    tokens = map_read_only(extent)
    entry = Path("/proc/self/smaps").read_text().split(str(extent.path))[1]
    flags = re.search(r"VmFlags: (.*)", entry)[1].split()
    assert "rr" in flags
    assert len(tokens) == len(TOKENS)


def test_mapping_needs_no_advice_where_the_system_has_none(tmp_path, monkeypatch):
    monkeypatch.delattr(mmap, "MADV_RANDOM", raising=False)
    np.testing.assert_array_equal(map_read_only(written(tmp_path / "t")), TOKENS)


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_more_files_than_the_system_lets_open_are_an_error_with_a_remedy(tmp_path, residency):
    script = f"""
import resource, numpy as np, tokenloader as tl
np.zeros(10, np.uint16).tofile({str(tmp_path / "shard")!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
tl.open_tokens([{str(tmp_path / "shard")!r}] * 100, dtype="uint16", residency="{residency}")
"""
    found = subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=False
    )
    last = found.stderr.splitlines()[-1]
    assert last.startswith("OSError: [Errno 24] too many open files")
    assert "ulimit -n" in last
    assert str(tmp_path / "shard") in last


# Into RAM


def test_several_extents_are_read_into_one_allocation_in_order(tmp_path):
    cuts = np.split(TOKENS, [1, 700, 703, 2999])
    extents = [written(tmp_path / str(i), 3 * i, cut) for i, cut in enumerate(cuts)]
    tokens = read_into_ram(extents)
    assert tokens.flags.c_contiguous
    np.testing.assert_array_equal(tokens, TOKENS)


@pytest.mark.parametrize("read_bytes", [1, 7, 1000, 6000, 10**9])
def test_the_size_of_a_read_does_not_matter(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(_storage, "_READ_BYTES", read_bytes)
    extents = [written(tmp_path / "a", 5, after=b"zz"), written(tmp_path / "b", 0, TOKENS[:50])]
    np.testing.assert_array_equal(read_into_ram(extents), np.concatenate([TOKENS, TOKENS[:50]]))


def test_tokens_in_ram_are_no_longer_the_file(tmp_path):
    extent = written(tmp_path / "t")
    tokens = read_into_ram([extent])
    extent.path.write_bytes(b"")
    np.testing.assert_array_equal(tokens, TOKENS)


def test_a_file_that_ends_early_is_an_error_with_its_name(tmp_path, monkeypatch):
    whole, short = written(tmp_path / "whole"), written(tmp_path / "short", offset_bytes=100)
    os.truncate(short.path, 100 + 4001)
    message = (
        r"^\[Errno 5\] ended at byte 4,101 while being read into RAM, before its tokens did; has it "
        rf"been truncated\?: '{re.escape(str(short.path))}'$"
    )
    for read_bytes in (64 << 20, 1000):
        monkeypatch.setattr(_storage, "_READ_BYTES", read_bytes)
        with pytest.raises(OSError, match=message):
            read_into_ram([whole, short])


@pytest.mark.parametrize("missing", ["preadv", "preadv2", "posix_fadvise"])
def test_systems_that_lack_a_call_read_the_same(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(_storage, "_READ_BYTES", 1000)
    if missing == "preadv2":
        monkeypatch.setattr(_storage, "_RWF_DONTCACHE", 0x40000000)  # a flag that no kernel knows
    else:
        monkeypatch.delattr(os, missing, raising=False)
    if missing == "posix_fadvise":
        monkeypatch.setattr(_storage, "_RWF_DONTCACHE", 0x40000000)
    np.testing.assert_array_equal(read_into_ram([written(tmp_path / "t", 7)]), TOKENS)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is cached")
def test_reading_into_ram_leaves_no_second_copy_in_the_page_cache(tmp_path):
    tokens = np.zeros(4 << 20, np.uint16)
    extent = written(tmp_path / "t", 0, tokens)
    with extent.path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = map_read_only(extent)
    pages = range(mapped.ctypes.data, mapped.ctypes.data + mapped.nbytes, mmap.PAGESIZE)
    if any(is_cached(page) for page in pages):
        pytest.skip("this file system keeps its pages")
    read_into_ram([extent])
    assert sum(is_cached(page) for page in pages) < len(pages) / 10


def test_a_file_that_is_gone_is_an_error_with_its_name(tmp_path):
    extent = Extent(tmp_path / "gone", 0, np.dtype("uint16"), 10, headerless.FORMAT)
    with pytest.raises(FileNotFoundError, match=re.escape(str(extent.path))):
        read_into_ram([extent])
    with pytest.raises(FileNotFoundError, match=re.escape(str(extent.path))):
        map_read_only(extent)


def test_a_quick_read_shows_no_progress_bar(tmp_path, capfd):
    read_into_ram([written(tmp_path / "t")])
    assert capfd.readouterr() == ("", "")


def test_a_slow_read_shows_a_progress_bar_that_ends_full(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(_storage, "_PROGRESS_AFTER_SECONDS", 0)
    monkeypatch.setattr(_storage, "_READ_BYTES", 1024)
    read_into_ram([written(tmp_path / "a"), written(tmp_path / "b", 3, TOKENS[:1096])])
    out, err = capfd.readouterr()
    assert out == ""
    assert "reading tokens into RAM: 100%" in err
    assert "8.00k/8.00k" in err  # 2 x (3,000 + 1,096) bytes


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_tokens_in_ram_are_memory_of_the_process_and_no_more_than_the_data(tmp_path):
    def anonymous_bytes():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    extent = written(tmp_path / "t", 96, np.ones(32 << 20, np.uint16))
    gc.collect()
    before = anonymous_bytes()
    tokens = read_into_ram([extent])
    assert abs(anonymous_bytes() - before - tokens.nbytes) < 0.1 * tokens.nbytes


def test_a_python_built_without_preadv2_reads_the_same(tmp_path, monkeypatch):
    preadv = os.preadv

    def without_flags(*arguments):
        if len(arguments) > 3:
            raise NotImplementedError("preadv2() is not available on this platform")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", without_flags)
    np.testing.assert_array_equal(read_into_ram([written(tmp_path / "t", 7)]), TOKENS)


def test_a_kernel_without_huge_pages_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    np.testing.assert_array_equal(read_into_ram([written(tmp_path / "t", 7)]), TOKENS)


def test_any_error_while_reading_is_kept_for_whoever_waits(tmp_path, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(_storage, "_read_some", fails)
    with pytest.raises(RuntimeError, match="not foreseen"):
        read_into_ram([written(tmp_path / "t")])
