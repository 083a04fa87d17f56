"""Advice on ranges of mapped memory: what is asked of the kernel, and where it stops in a lost file."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import eventually

from tokenloader.storage.kernel_advice import KERNEL, PAGE, KernelAdvice, page_ranges

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells, others do not")
PAGES = 300
WILLNEED = 3  # of madvise(2)


@pytest.fixture(params=["in bulk", "range by range"])
def kernel(request):
    return KERNEL if request.param == "in bulk" else KernelAdvice(in_bulk=False)


class Libc:
    """The C library, and a record of the ranges that it advises on."""

    def __init__(self):
        self.advised = []
        self.mincore = None

    def madvise(self, address, length, advice):
        self.advised.append((address, length, advice))
        return 0


@pytest.fixture
def mapped(tmp_path):
    """A mapped file, and where in memory it begins."""
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGES * PAGE))
    with path.open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    return path, data, data.ctypes.data


def ranges_of(base, offsets, length=100):
    begins = np.array(offsets, np.int64) + base
    return np.stack([begins, np.full_like(begins, length)], axis=1)


def resident_pages(path, base):
    return [page for page in range(PAGES) if KERNEL.is_cached(base + page * PAGE)]


def drop_from_page_cache(path):
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_page_ranges_are_the_whole_pages_that_hold_the_bytes():
    ranges = [[0, 1], [1, PAGE - 1], [PAGE - 1, 2], [PAGE, 2 * PAGE], [10 * PAGE + 5, 1]]
    assert page_ranges(np.array(ranges)).tolist() == [
        [0, PAGE],
        [0, PAGE],
        [0, 2 * PAGE],
        [PAGE, 2 * PAGE],
        [10 * PAGE, PAGE],
    ]


@linux
def test_start_reading_brings_the_ranges_into_the_page_cache_and_no_others(mapped, kernel):
    path, data, base = mapped
    drop_from_page_cache(path)
    if resident_pages(path, base):
        pytest.skip("this file system keeps its pages")
    asked = [3, 50, 51, 299]
    kernel.start_reading(page_ranges(ranges_of(base, [page * PAGE + 7 for page in asked])))
    assert eventually(lambda: resident_pages(path, base) == asked), resident_pages(path, base)
    assert data[0] == 0


@linux
def test_long_ranges_are_asked_for_in_lengths_that_the_kernel_serves_whole():
    libc = Libc()
    base = 1000 * PAGE
    kernel = KernelAdvice(linux=True, in_bulk=False, libc=libc)
    kernel.start_reading(np.array([[base, PAGES * PAGE]]))
    ends = [address + length for address, length, _ in libc.advised]
    assert {advice for *_, advice in libc.advised} == {WILLNEED}
    assert max(length for _, length, _ in libc.advised) <= 128 << 10
    assert [address for address, *_ in libc.advised] == [base, *ends[:-1]]
    assert ends[-1] == base + PAGES * PAGE


@linux
@pytest.mark.parametrize("most_pages", [1, 7, 256, PAGES, 1000])
def test_ranges_are_asked_for_in_lengths_of_as_many_bytes_as_are_told(most_pages):
    libc = Libc()
    kernel = KernelAdvice(linux=True, in_bulk=False, libc=libc)
    ranges = np.array([[1000 * PAGE, PAGES * PAGE], [10 * PAGE, 3 * PAGE]])
    kernel.start_reading(ranges, most_pages * PAGE)
    expected = [
        (address + at, min(most_pages * PAGE, length - at))
        for address, length in ranges[::-1].tolist()
        for at in range(0, length, most_pages * PAGE)
    ]
    assert [advised[:2] for advised in libc.advised] == expected


def test_windows_that_touch_are_asked_for_together():
    libc = Libc()
    kernel = KernelAdvice(linux=True, in_bulk=False, libc=libc)
    pages = np.array([[7, 1], [3, 1], [5, 1], [4, 1], [4, 1], [9, 3]])  # 3 to 5, 7, and 9 to 11
    kernel.start_reading(pages * PAGE)
    kernel.start_reading(np.empty((0, 2), np.int64))
    found = [(address // PAGE, length // PAGE) for address, length, _ in libc.advised]
    assert found == [(3, 3), (7, 1), (9, 3)]


def copied(ranges, kernel=KERNEL):
    """What a kernel copies of ranges, in bytes, and what stopped it."""
    out = np.full(int(ranges[:, 1].sum()), 0xAA, np.uint8)
    count, stopped_by = kernel.copy(ranges, out)
    assert (out[count:] == 0xAA).all() or count == len(out)
    return out[:count].tobytes(), stopped_by


def numbered(path):
    """Writes bytes to a file that tell where they lie; returns them."""
    data = (np.arange(PAGES * PAGE) * 7919 % 251).astype(np.uint8)
    with path.open("r+b") as file:
        file.write(data)
    return data.tobytes()


@linux
@pytest.mark.parametrize("count", [0, 1, 7, 1024, 1025, 3000])
def test_ranges_are_copied_end_to_end_whatever_their_number(mapped, count):
    path, _data, base = mapped
    expected = numbered(path)
    drop_from_page_cache(path)
    offsets = np.random.default_rng(0).integers(0, PAGES * PAGE - 3000, count)
    lengths = np.random.default_rng(1).integers(1, 3000, count)
    joined = b"".join(expected[a : a + n] for a, n in zip(offsets.tolist(), lengths.tolist(), strict=True))
    assert copied(np.stack([offsets + base, lengths], axis=1)) == (joined, 0)


@linux
@pytest.mark.parametrize("lost", [0, 1, 1500, 2999])
def test_copying_stops_before_the_first_byte_that_the_file_no_longer_has(mapped, lost):
    # 3,000 ranges: more than one call takes.
    path, _data, base = mapped
    expected = numbered(path)
    os.truncate(path, 10 * PAGE)
    offsets = np.zeros(3000, np.int64)
    offsets[lost:] = 10 * PAGE - 30 + np.arange(3000 - lost) % 3
    found = expected[:100] * lost + expected[10 * PAGE - 30 : 10 * PAGE]
    assert copied(ranges_of(base, offsets)) == (found, errno.EFAULT)


@linux
def test_a_call_that_copies_less_than_it_was_asked_for_is_followed_by_another(mapped):
    # As for more than 2 GiB, where the kernel stops without an error.
    path, _data, base = mapped
    expected = numbered(path)
    libc = ctypes.CDLL(None)

    class Short(Libc):
        def process_vm_writev(self, pid, sources, count, block, _one, _flags):
            block[1] = min(block[1], 150)
            return libc.process_vm_writev(pid, ctypes.c_void_p(sources), count, block, 1, 0)

    found = b"".join(expected[offset : offset + 100] for offset in (5, 9000, 700, 0))
    assert copied(ranges_of(base, [5, 9000, 700, 0]), KernelAdvice(libc=Short())) == (found, 0)


@linux
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.ENOMEM])
def test_a_kernel_that_does_not_copy_says_so_and_if_it_never_will_is_not_asked_again(code):
    class Refuses(Libc):
        asked = 0

        def process_vm_writev(self, *_):
            self.asked += 1
            ctypes.set_errno(code)
            return -1

    kernel = KernelAdvice(libc=(libc := Refuses()))
    assert copied(ranges_of(0, [0]), kernel) == (b"", code)
    assert copied(ranges_of(0, [0]), kernel)[1]
    assert libc.asked == (2 if code == errno.ENOMEM else 1)


def test_a_libc_without_the_call_copies_nothing(mapped):
    *_, base = mapped
    for kernel in (KernelAdvice(libc=Libc()), KernelAdvice(linux=False)):
        assert copied(ranges_of(base, [0]), kernel) == (b"", errno.ENOSYS)


def test_other_systems_than_linux_get_no_call(mapped):
    *_, base = mapped
    kernel = KernelAdvice(linux=False)
    kernel.start_reading(page_ranges(ranges_of(base, [0])))
    assert kernel.is_cached(base) is True


@linux
def test_a_forked_child_copies_and_advises_on_itself(tmp_path):
    # In a process of its own: this one may have threads, with which a fork is no good.
    script = f"""
import errno, mmap, os, numpy as np
from tokenloader.storage.kernel_advice import KERNEL, PAGE
path = {str(tmp_path / "file")!r}
open(path, "wb").write(bytes(PAGE))
data = np.frombuffer(mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ), np.uint8)
page, out = np.array([[data.ctypes.data, PAGE]]), np.ones(PAGE, np.uint8)
KERNEL.start_reading(page)
assert KERNEL.copy(page, out) == (PAGE, 0)
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
out[:] = 1
assert KERNEL.copy(page, out) == (PAGE, 0)
assert not out.any()
KERNEL.start_reading(page)
assert len(KERNEL._pidfds) == 2
os.truncate(path, 0)
os._exit(7 if KERNEL.copy(page, out) == (0, errno.EFAULT) else 1)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


@linux
def test_a_python_without_pidfd_open_advises_range_by_range(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    libc = Libc()
    KernelAdvice(libc=libc).start_reading(np.array([[0, PAGE], [5 * PAGE, PAGE]]))
    assert libc.advised == [(0, PAGE, WILLNEED), (5 * PAGE, PAGE, WILLNEED)]


@linux
@pytest.mark.parametrize("served", [-1, 0, PAGE])
def test_what_an_older_kernel_does_not_take_in_bulk_is_advised_on_range_by_range(served):
    libc = Libc()
    libc.syscall = lambda *_: served  # bytes that were advised on, or an error
    KernelAdvice(libc=libc).start_reading(np.array([[0, PAGE], [5 * PAGE, PAGE]]))
    expected = [(0, PAGE, WILLNEED), (5 * PAGE, PAGE, WILLNEED)]
    assert libc.advised == (expected[1:] if served > 0 else expected)


@linux
def test_a_range_that_takes_no_advice_does_not_keep_it_from_the_next():
    class Fails(Libc):
        def madvise(self, *advice):
            return super().madvise(*advice) or -1

    libc = Fails()
    KernelAdvice(in_bulk=False, libc=libc).start_reading(np.array([[0, PAGE], [5 * PAGE, PAGE]]))
    assert len(libc.advised) == 2


@linux
def test_advice_for_which_there_is_no_memory_is_left_out():
    class Full(Libc):
        def madvise(self, *advice):
            super().madvise(*advice)
            raise MemoryError

    libc = Full()
    KernelAdvice(in_bulk=False, libc=libc).start_reading(np.array([[0, PAGE]]))
    assert libc.advised
