"""Advice on ranges of mapped memory: what is asked of the kernel, and what it says of a lost file."""

import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from tokenloader.storage import kernel_advice as _advice
from tokenloader.storage.kernel_advice import (
    PAGE,
    FaultError,
    fault_in,
    is_cached,
    page_ranges,
    start_reading,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells, others do not")
PAGES = 300


@pytest.fixture(params=["in bulk", "range by range"])
def way(request, monkeypatch):
    if request.param == "range by range":
        monkeypatch.setattr(_advice, "_bulk_works", lambda advice: False)
    elif not (sys.platform == "linux" and _advice._bulk_works(_advice._MADV_POPULATE_READ)):
        pytest.skip("needs Linux 6.13")


@pytest.fixture
def mapped(tmp_path):
    """A mapped file, and where in memory it begins."""
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGES * PAGE))
    with path.open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    return path, data, data.ctypes.data


def ranges_of(base, offsets, length=100):
    begins = np.array(offsets, np.uint64) + np.uint64(base)
    return page_ranges(begins, begins + np.uint64(length))


def resident_pages(path, base):
    return [page for page in range(PAGES) if is_cached(base + page * PAGE)]


def drop_from_page_cache(path):
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_page_ranges_are_the_whole_pages_that_hold_the_bytes():
    begins = np.array([0, 1, PAGE - 1, PAGE, 10 * PAGE + 5], np.uint64)
    ends = np.array([1, PAGE, PAGE + 1, 3 * PAGE, 10 * PAGE + 6], np.uint64)
    assert page_ranges(begins, ends).tolist() == [
        [0, PAGE],
        [0, PAGE],
        [0, 2 * PAGE],
        [PAGE, 2 * PAGE],
        [10 * PAGE, PAGE],
    ]


@linux
def test_start_reading_brings_the_ranges_into_the_page_cache_and_no_others(mapped, way):
    path, data, base = mapped
    drop_from_page_cache(path)
    if resident_pages(path, base):
        pytest.skip("this file system keeps its pages")
    asked = [3, 50, 51, 299]
    start_reading(ranges_of(base, [page * PAGE + 7 for page in asked]))
    assert wait_until(lambda: resident_pages(path, base) == asked), resident_pages(path, base)
    assert data[0] == 0


@linux
def test_long_ranges_are_asked_for_in_pieces_that_the_kernel_serves_whole(mapped, way, monkeypatch):
    *_, base = mapped
    asked = []
    real = _advice._advise
    monkeypatch.setattr(
        _advice, "_advise", lambda ranges, advice: asked.append(ranges) or real(ranges, advice)
    )
    start_reading(
        page_ranges(np.array([base], np.uint64), np.array([base + PAGES * PAGE], np.uint64))
    )
    (pieces,) = asked
    assert pieces[:, 1].max() <= 128 << 10
    assert pieces[0, 0] == base
    assert (pieces[1:, 0] == pieces[:-1].sum(axis=1)).all()
    assert pieces[-1].sum() == base + PAGES * PAGE


@linux
def test_fault_in_makes_ranges_readable(mapped, way):
    path, _data, base = mapped
    drop_from_page_cache(path)
    assert fault_in(ranges_of(base, [0, 70 * PAGE, 299 * PAGE]))
    assert {0, 70, 299} <= set(resident_pages(path, base))
    assert fault_in(np.empty((0, 2), np.uint64))


@linux
@pytest.mark.parametrize("lost", [0, 1, 1500, 2999])
def test_fault_in_names_the_first_range_that_the_file_no_longer_has(mapped, way, lost):
    # 3,000 ranges: more than one call takes.
    path, _data, base = mapped
    os.truncate(path, 10 * PAGE)
    offsets = np.zeros(3000, np.int64)
    offsets[lost:] = 200 * PAGE + np.arange(3000 - lost) % 3
    with pytest.raises(FaultError) as caught:
        fault_in(ranges_of(base, offsets))
    assert caught.value.address == base + 200 * PAGE


def test_where_the_kernel_does_not_know_populate_fault_in_says_so(mapped, monkeypatch):
    *_, base = mapped
    monkeypatch.setattr(_advice, "_MADV_POPULATE_READ", 9999)
    assert fault_in(ranges_of(base, [0])) is False


def test_other_systems_than_linux_get_no_call(mapped, monkeypatch):
    *_, base = mapped
    monkeypatch.setattr(_advice, "_LINUX", False)
    monkeypatch.setattr(_advice, "_libc", None)
    start_reading(ranges_of(base, [0]))
    assert fault_in(ranges_of(base, [0])) is False
    assert is_cached(base) is True


@linux
def test_a_forked_child_advises_on_itself(tmp_path):
    # In a process of its own: this one may have threads, with which a fork is no good.
    script = f"""
import mmap, os, numpy as np
from tokenloader.storage.kernel_advice import FaultError, PAGE, fault_in, page_ranges
path = {str(tmp_path / "file")!r}
open(path, "wb").write(bytes(PAGE))
data = np.frombuffer(mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ), np.uint8)
page = page_ranges(*np.array([[data.ctypes.data], [data.ctypes.data + 1]], np.uint64))
assert fault_in(page)
os.truncate(path, 0)
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    fault_in(page)
except FaultError:
    os._exit(7)
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


def wait_until(true):
    for _ in range(500):
        if true():
            return True
        time.sleep(0.01)
    return False


@linux
def test_a_python_without_pidfd_open_advises_range_by_range(mapped, monkeypatch):
    *_, base = mapped
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    _advice._bulk_works.cache_clear()
    _advice._own_pidfd.cache_clear()
    try:
        assert fault_in(ranges_of(base, [0, 5 * PAGE]))
        assert not _advice._bulk_works(_advice._MADV_POPULATE_READ)
    finally:
        _advice._bulk_works.cache_clear()
