"""Files read into RAM: the bytes, the page cache, the failures, the memory and the threads."""

import errno
import gc
import mmap
import os
import re
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import eventually
from token_files import random_tokens, written_extent

from tokenloader import open_tokens
from tokenloader.storage.kernel_advice import KERNEL
from tokenloader.storage.mapped import map_read_only, open_file
from tokenloader.storage.memory_limits import MemoryLimit
from tokenloader.storage.ram import RamFill, read_exactly

TOKENS = random_tokens(3000)
NO_SUCH_FLAG = partial(read_exactly, dontcache_flag=0x40000000)  # a flag that no kernel knows


def read_into_ram(extents, **arguments):
    """What a RamFill has read when it is full; raises its failure."""
    files = [open_file(extent) for extent in extents]
    fill = RamFill(extents, files, **arguments)
    fill.wait()
    held = [weakref.ref(files.pop()) for _ in extents]
    assert not any(file() for file in held)
    if fill.failure is not None:
        assert fill.arrays is None
        raise OSError(*fill.failure)
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


def test_a_slow_read_shows_a_progress_bar_that_ends_full(tmp_path, capfd):
    extents = [written_extent(tmp_path / "a", TOKENS), written_extent(tmp_path / "b", TOKENS[:1096], 3)]
    read_into_ram(extents, chunk_bytes=1024, progress_after_seconds=0)
    shown = ""

    def is_full():
        nonlocal shown
        shown += capfd.readouterr().err
        return "reading tokens into RAM: 100%" in shown

    assert eventually(is_full)
    assert "8.00k/8.00k" in shown  # 2 x (3,000 + 1,096) bytes


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


# Failures


def test_any_error_while_reading_is_kept_for_whoever_waits(tmp_path):
    def fails(*_):
        raise RuntimeError("not foreseen")

    path = tmp_path / "t"
    message = rf"cannot be read into RAM: RuntimeError: not foreseen: '{re.escape(str(path))}'"
    with pytest.raises(OSError, match=message) as raised:
        read_into_ram([written_extent(path, TOKENS)], read=fails)
    assert raised.value.errno == errno.EIO


def test_a_disk_that_fails_is_an_error_with_file_and_offset(tmp_path, monkeypatch):
    """A memory page that cannot be read stands for a sector: both are errors of the call."""
    extent = written_extent(tmp_path / "t", TOKENS, 100)

    def fails(descriptor, buffers, offset, *flags):
        if offset >= 1100:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset, *flags)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", fails)
    message = (
        rf"^\[Errno 5\] cannot be read at byte 1,100: Input/output error; does its disk fail\?: "
        rf"'{re.escape(str(extent.path))}'$"
    )
    with pytest.raises(OSError, match=message):
        read_into_ram([extent], chunk_bytes=1000)


@pytest.mark.parametrize("change", ["same size", "appended", "truncated at the end"])
def test_a_file_that_is_written_to_meanwhile_is_an_error_and_not_a_mixture(tmp_path, change):
    other = written_extent(tmp_path / "other", TOKENS)
    extent = written_extent(tmp_path / "t", TOKENS, after=b"after")
    os.utime(extent.path, ns=(0, 0))

    def read(file, offset_bytes, out):
        read_exactly(file, offset_bytes, out)
        if file.name == str(extent.path) and offset_bytes == 0:
            with extent.path.open("r+b") as writing:
                if change == "same size":
                    writing.write(TOKENS[::-1].tobytes())
                else:
                    writing.truncate({"appended": 7000, "truncated at the end": 6000}[change])

    size = {"same size": "", "appended": "it has 7,000 bytes", "truncated at the end": "it has 6,000 bytes"}
    message = rf"has changed since it was opened: {size[change]}.* {re.escape(repr(str(extent.path)))}$"
    with pytest.raises(OSError, match=message):
        read_into_ram([other, extent], read=read, chunk_bytes=1000)


def test_a_failure_is_logged_once(tmp_path, caplog):
    def fails(file, *_):
        raise OSError(errno.EIO, "disk on fire", str(file.name))

    extents = [written_extent(tmp_path / name, TOKENS) for name in ("a\x1b[2J", "b")]
    with pytest.raises(OSError, match="disk on fire"):
        read_into_ram(extents, read=fails, chunk_bytes=1000)
    [record] = caplog.records
    assert (record.name, record.levelname) == ("tokenloader", "WARNING")
    assert record.getMessage() == (
        rf"{tmp_path}/a\x1b[2J: disk on fire; the tokens are not read into RAM, and go on being read "
        rf"from the mapped files"
    )


def test_a_fill_that_is_stopped_ends_soon_with_its_files_closed_and_nothing_given_out(tmp_path):
    allowed = threading.Semaphore(0)

    def read(*chunk):
        assert allowed.acquire(timeout=20)
        read_exactly(*chunk)

    extent = written_extent(tmp_path / "t", TOKENS)
    file = open_file(extent)
    held = weakref.ref(file)
    fill = RamFill([extent], [file], read=read, chunk_bytes=10)
    del file
    fill.stop()
    allowed.release(10)  # what each thread may have begun
    fill.wait()
    assert held() is None
    assert fill.arrays is None
    assert fill.failure is None


# Memory and threads


@pytest.mark.parametrize("how", ["failure", "stop", "read"])
def test_the_memory_is_let_go_of_when_the_reading_ends_or_the_arrays_do(tmp_path, allocations, how):
    def read(*chunk):
        read_exactly(*chunk)
        if how == "failure":
            raise OSError(errno.EIO, "disk on fire", str(chunk[0].name))
        if how == "stop":
            fills[0].stop()

    extent, fills = written_extent(tmp_path / "t", TOKENS), []
    fills.append(RamFill([extent], [open_file(extent)], read=read, chunk_bytes=1000))
    fills[0].wait()
    [memory] = allocations
    assert (memory() is not None) == (how == "read")
    assert (fills[0].failure is not None) == (how == "failure")
    fills.clear()
    assert memory() is None


def limited(tmp_path, left_bytes):
    """Limits on memory that leave so many bytes."""
    (tmp_path / "limit").touch()
    return lambda: [MemoryLimit(tmp_path / "limit", left_bytes)]


@pytest.mark.parametrize("left_bytes", [12_000, 12_001])
def test_tokens_that_fit_into_the_memory_available_are_not_refused(tmp_path, left_bytes):
    extents = [written_extent(tmp_path / name, TOKENS) for name in "ab"]
    for _ in range(2):  # the first let go of what it had reserved
        read_into_ram(extents, limits=limited(tmp_path, left_bytes))
    read_into_ram(extents, limits=list)  # unknown


def test_tokens_that_are_larger_than_the_memory_available_are_refused_with_both_sizes(tmp_path):
    extent = written_extent(tmp_path / "t", TOKENS)
    large = replace(extent, num_tokens=2**30)
    message = (
        rf'^{extent.path} and 2 more: residency="ram" needs 6.00 GiB and 5.50 GiB of memory are available '
        r'\(control group limits included\); use residency="mmap", which needs none, and whose page cache '
        r"all processes of a host share$"
    )
    with pytest.raises(MemoryError, match=message):
        read_into_ram([large] * 3, limits=limited(tmp_path, 11 << 29))


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is reserved there")
def test_what_is_still_to_be_read_is_reserved(tmp_path):
    allowed, reached = threading.Semaphore(0), threading.Semaphore(0)

    def read(*chunk):
        reached.release()
        assert allowed.acquire(timeout=20)
        read_exactly(*chunk)

    limits = limited(tmp_path, 10_000)
    extent = written_extent(tmp_path / "t", TOKENS)
    fill = RamFill(
        [extent], [open_file(extent)], read=read, limits=limits, chunk_bytes=1000
    )  # of 6,000 bytes
    with pytest.raises(MemoryError, match=r"fills under way on this host reserve 0\.00 GiB"):
        read_into_ram([extent], limits=limits)
    for _ in range(4):
        reached.acquire(timeout=20)
    allowed.release(2)
    for _ in range(2):  # the next chunks are begun: two are in
        reached.acquire(timeout=20)
    read_into_ram([extent], limits=limits)
    allowed.release(4)
    fill.wait()
    assert fill.arrays is not None


NO_ROOM = """
import resource, sys, numpy as np
from tokenloader import open_tokens
path, residency = sys.argv[1:]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 29), -1))  # 1.5 GiB more than now
try:
    open_tokens(path, dtype="uint16", residency=residency)
except (MemoryError, OSError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit works there")
@pytest.mark.parametrize(
    ("residency", "gib", "message"),
    [
        (
            "ram",
            1,
            'MemoryError {path}: residency="ram" needs 1.00 GiB, which the system does not give (Cannot '
            'allocate memory); raise the limit if there is one (ulimit -v), or use residency="mmap", which '
            "needs no memory",
        ),
        (
            "mmap",
            2,
            "OSError [Errno 12] mapping it takes 2.00 GiB of address space, which the system does not "
            "give: raise the limit on that (ulimit -v), or on the number of mappings (vm.max_map_count): "
            "'{path}'",
        ),
    ],
)
def test_address_space_that_is_refused_is_named_with_its_file(tmp_path, residency, gib, message):
    path = tmp_path / "t.bin"
    with path.open("wb") as file:
        file.truncate(gib << 30)  # sparse
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, path, residency], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == message.format(path=path) + "\n"


@pytest.fixture
def threads_left(monkeypatch):
    """Says how many threads may still be started."""
    start = threading.Thread.start

    def start_if_any_are_left(thread):
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    left = [0]
    monkeypatch.setattr(threading.Thread, "start", start_if_any_are_left)
    return lambda number: left.__setitem__(0, number)


@pytest.mark.parametrize("number", [1, 2, 4])  # of five
def test_where_few_threads_can_be_started_these_read_all(tmp_path, threads_left, number):
    threads_left(number)
    [found] = read_into_ram([written_extent(tmp_path / "t", TOKENS)], chunk_bytes=1000)
    np.testing.assert_array_equal(found, TOKENS)


def test_where_no_thread_can_be_started_the_error_says_what_to_do(tmp_path, threads_left):
    path = tmp_path / "t.bin"
    TOKENS.tofile(path)
    threads_left(0)
    message = (
        f'{path}: residency="ram" reads on background threads, and the system gives none (can\'t start new '
        f"thread); raise the limit on processes (ulimit -u, or the container's on pids), end some, or use "
        f'residency="mmap"'
    )
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        open_tokens(path, dtype="uint16", residency="ram")
    assert len(os.listdir("/dev/fd")) == before
    threads_left(5)
    with open_tokens(path, dtype="uint16", residency="ram") as tokens:
        tokens.wait_until_loaded()
        np.testing.assert_array_equal(tokens[:], TOKENS)
