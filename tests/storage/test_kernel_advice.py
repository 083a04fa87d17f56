"""Advice on ranges of mapped memory: what is asked of the kernel, and what it says of a lost file."""

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import eventually

from tokenloader.storage.kernel_advice import KERNEL, PAGE, FaultError, KernelAdvice, page_ranges

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells, others do not")
PAGES = 300
WILLNEED, POPULATE_READ = 3, 22  # of madvise(2)


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
    return page_ranges(begins, begins + length)


def resident_pages(path, base):
    return [page for page in range(PAGES) if KERNEL.is_cached(base + page * PAGE)]


def drop_from_page_cache(path):
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_page_ranges_are_the_whole_pages_that_hold_the_bytes():
    begins = np.array([0, 1, PAGE - 1, PAGE, 10 * PAGE + 5], np.int64)
    ends = np.array([1, PAGE, PAGE + 1, 3 * PAGE, 10 * PAGE + 6], np.int64)
    assert page_ranges(begins, ends).tolist() == [
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
    kernel.start_reading(ranges_of(base, [page * PAGE + 7 for page in asked]))
    assert eventually(lambda: resident_pages(path, base) == asked), resident_pages(path, base)
    assert data[0] == 0


@linux
def test_long_ranges_are_asked_for_in_lengths_that_the_kernel_serves_whole():
    libc = Libc()
    base = 1000 * PAGE
    kernel = KernelAdvice(linux=True, in_bulk=False, libc=libc)
    kernel.start_reading(page_ranges(np.array([base]), np.array([base + PAGES * PAGE])))
    ends = [address + length for address, length, _ in libc.advised]
    assert {advice for *_, advice in libc.advised} == {WILLNEED}
    assert max(length for _, length, _ in libc.advised) <= 128 << 10
    assert [address for address, *_ in libc.advised] == [base, *ends[:-1]]
    assert ends[-1] == base + PAGES * PAGE


def test_windows_that_touch_are_asked_for_together():
    libc = Libc()
    kernel = KernelAdvice(linux=True, in_bulk=False, libc=libc)
    pages = np.array([7, 3, 5, 4, 4, 9])  # 3 to 5, 7, and 9 to 11
    ends = (pages + 1) * PAGE
    ends[-1] = 12 * PAGE
    kernel.start_reading(page_ranges(pages * PAGE, ends))
    kernel.start_reading(np.empty((0, 2), np.int64))
    found = [(address // PAGE, length // PAGE) for address, length, _ in libc.advised]
    assert found == [(3, 3), (7, 1), (9, 3)]


@linux
def test_fault_in_makes_ranges_readable(mapped, kernel):
    path, _data, base = mapped
    drop_from_page_cache(path)
    assert kernel.fault_in(ranges_of(base, [0, 70 * PAGE, 299 * PAGE]))
    assert {0, 70, 299} <= set(resident_pages(path, base))
    assert kernel.fault_in(np.empty((0, 2), np.int64))


@linux
@pytest.mark.parametrize("lost", [0, 1, 1500, 2999])
def test_fault_in_names_the_first_range_that_the_file_no_longer_has(mapped, kernel, lost):
    # 3,000 ranges: more than one call takes.
    path, _data, base = mapped
    os.truncate(path, 10 * PAGE)
    offsets = np.zeros(3000, np.int64)
    offsets[lost:] = 200 * PAGE + np.arange(3000 - lost) % 3
    with pytest.raises(FaultError) as caught:
        kernel.fault_in(ranges_of(base, offsets))
    assert caught.value.address == base + 200 * PAGE


@pytest.mark.parametrize("in_bulk", [True, False])
def test_where_the_kernel_does_not_know_populate_fault_in_says_so(mapped, in_bulk):
    *_, base = mapped
    kernel = KernelAdvice(populate_read=9999, in_bulk=in_bulk)
    assert kernel.fault_in(ranges_of(base, [0])) is False


def test_other_systems_than_linux_get_no_call(mapped):
    *_, base = mapped
    kernel = KernelAdvice(linux=False)
    kernel.start_reading(ranges_of(base, [0]))
    assert kernel.fault_in(ranges_of(base, [0])) is False
    assert kernel.is_cached(base) is True


@linux
def test_a_forked_child_advises_on_itself(tmp_path):
    # In a process of its own: this one may have threads, with which a fork is no good.
    script = f"""
import mmap, os, numpy as np
from tokenloader.storage.kernel_advice import FaultError, KERNEL, PAGE, page_ranges
path = {str(tmp_path / "file")!r}
open(path, "wb").write(bytes(PAGE))
data = np.frombuffer(mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ), np.uint8)
page = page_ranges(*np.array([[data.ctypes.data], [data.ctypes.data + 1]]))
assert KERNEL.fault_in(page)
os.truncate(path, 0)
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    KERNEL.fault_in(page)
except FaultError:
    os._exit(7)
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


@linux
def test_a_python_without_pidfd_open_advises_range_by_range(mapped, monkeypatch):
    *_, base = mapped
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert KernelAdvice().fault_in(ranges_of(base, [0, 5 * PAGE]))
    libc = Libc()
    assert KernelAdvice(libc=libc).fault_in(ranges_of(base, [0, 5 * PAGE]))
    assert libc.advised == [(base, PAGE, POPULATE_READ), (base + 5 * PAGE, PAGE, POPULATE_READ)]


@linux
@pytest.mark.parametrize("served", [-1, 0, PAGE])
def test_what_an_older_kernel_does_not_take_in_bulk_is_advised_on_range_by_range(served):
    libc = Libc()
    libc.syscall = lambda *_: served  # bytes that were advised on, or an error
    assert KernelAdvice(libc=libc).fault_in(ranges_of(0, [0, 5 * PAGE]))
    expected = [(0, PAGE, POPULATE_READ), (5 * PAGE, PAGE, POPULATE_READ)]
    assert libc.advised == (expected[1:] if served > 0 else expected)
