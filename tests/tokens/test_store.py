"""The store of the bytes: closing while in use, the exchange of files for RAM, and files that are lost."""

import errno
import gc
import mmap
import os
import re
import subprocess
import sys
import threading
import traceback
import tracemalloc
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import eventually, in_threads, naive_gather
from token_files import RecordingKernel, fill_with, random_tokens, sharded, write_raw

from tokenloader import open_tokens
from tokenloader.check.scan import scan
from tokenloader.storage.kernel_advice import KERNEL, KernelAdvice
from tokenloader.storage.memory_limits import MemoryLimit
from tokenloader.storage.ram import RamFill, read_exactly
from tokenloader.tokens.gather import Axis
from tokenloader.tokens.opening import join
from tokenloader.tokens.store import Memory

# Closing while in use


@pytest.fixture
def pause(monkeypatch):
    """An axis stops before it copies anything: (somebody came, go on)."""
    came, go_on = threading.Event(), threading.Event()

    def paused(real):
        def method(*args):
            came.set()
            assert go_on.wait(30)
            return real(*args)

        return method

    for way in ((Axis, "gather"), (Axis, "copy"), (Memory, "read")):
        monkeypatch.setattr(*way, paused(getattr(*way)))
    copy = Memory.copy
    monkeypatch.setattr(Memory, "copy", lambda self, start, out: copy(self, start, out, 100))
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
def test_what_another_thread_reads_during_close_still_completes(tmp_path, pause, residency, use):
    came, go_on = pause
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

    def close_soon(tokens):
        threading.Event().wait(0.005)
        tokens.close()

    for _ in range(10):
        tokens = open_tokens(files)
        calls = [partial(gather_until_closed, tokens)] * 3
        in_threads(*calls, partial(close_soon, tokens))
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


# Into RAM, in the background


def slowly(go_on, *chunk):
    """Reads a chunk when it is told to go on."""
    assert go_on.wait(20)
    read_exactly(*chunk)


def test_ram_is_served_from_the_mapped_file_until_all_is_read_and_then_from_ram(tmp_path):
    expected = random_tokens(100_000)
    path = write_raw(tmp_path / "t.bin", expected)
    go_on = threading.Event()
    fill = partial(RamFill, read=partial(slowly, go_on), chunk_bytes=10_000)
    tokens = fill_with(fill, path, dtype="uint16")
    starts = [0, 5, 99_000]
    np.testing.assert_array_equal(tokens.gather(starts, 1000), naive_gather(expected, starts, 1000))
    go_on.set()
    tokens.wait_until_loaded()
    np.testing.assert_array_equal(tokens.gather(starts, 1000), naive_gather(expected, starts, 1000))
    path.write_bytes(b"")  # in RAM, nothing that befalls the file matters
    np.testing.assert_array_equal(tokens[:], expected)


def test_threads_that_gather_while_the_files_are_exchanged_for_ram_get_their_tokens(tmp_path):
    expected = random_tokens()
    files, _ = sharded(tmp_path, expected)
    starts = [0, 895, 1900]
    block = naive_gather(expected, starts, 100)
    for _ in range(10):
        go_on = threading.Event()
        tokens = fill_with(partial(RamFill, read=partial(slowly, go_on), chunk_bytes=100), files)

        def gather_until_loaded(tokens=tokens, go_on=go_on):
            for i in range(200):
                if i == 50:
                    go_on.set()
                np.testing.assert_array_equal(tokens.gather(starts, 100), block)
                np.testing.assert_array_equal(tokens[890:910], expected[890:910])

        in_threads(*[gather_until_loaded] * 3, tokens.wait_until_loaded)
        assert tokens.residency == "ram"


def disk_on_fire(file, *_):
    raise OSError(errno.EIO, "disk on fire", str(file.name))


def test_where_reading_into_ram_fails_tokens_stay_mapped_and_each_wait_raises_anew(tmp_path, allocations):
    expected = random_tokens()
    path = write_raw(tmp_path / "t.bin", expected)
    go_on = threading.Event()

    def fails(file, *_):
        assert go_on.wait(20)
        disk_on_fire(file)

    tokens = fill_with(partial(RamFill, read=fails, chunk_bytes=1000), path, dtype="uint16")
    assert tokens.residency == "ram"
    windows, view = tokens.locate([7], 100), tokens.view(100, 200)
    go_on.set()
    raised = []
    for waiting in (tokens, tokens, view):
        with pytest.raises(OSError, match=f"disk on fire: '{re.escape(str(path))}'") as caught:
            waiting.wait_until_loaded()
        assert caught.value.errno == errno.EIO
        raised.append(caught.value)
    assert len(set(map(id, raised))) == 3
    assert len(traceback.extract_tb(raised[0].__traceback__)) == 2  # here, and there
    [memory] = allocations
    assert memory() is None  # although the errors are held
    for one in (tokens, view):
        assert one.residency == "mmap"
        assert "mmap" in repr(one)
    np.testing.assert_array_equal(tokens[:], expected)
    np.testing.assert_array_equal(windows.copy()[0], expected[7:107])
    np.testing.assert_array_equal(view[:], expected[100:200])
    both = open_tokens([tokens, expected], residency="ram")
    assert both.residency == "mmap"
    assert both.wait_until_loaded() is None
    np.testing.assert_array_equal(both[:], np.concatenate([expected, expected]))
    tokens.close()
    assert tokens.residency == "mmap"
    with pytest.raises(ValueError, match="closed"):
        tokens.wait_until_loaded()


def test_what_could_not_be_read_into_ram_can_be_opened_and_read_again(tmp_path, allocations):
    expected = random_tokens()
    path = write_raw(tmp_path / "t.bin", expected)
    errors = []
    for _ in range(3):
        tokens = fill_with(partial(RamFill, read=disk_on_fire), path, dtype="uint16")
        with pytest.raises(OSError, match="disk on fire") as caught:
            tokens.wait_until_loaded()
        errors.append(caught.value)
    assert [memory() for memory in allocations] == [None] * 3
    with open_tokens(path, dtype="uint16", residency="ram") as tokens:
        tokens.wait_until_loaded()
        assert tokens.residency == "ram"
        np.testing.assert_array_equal(tokens[:], expected)


@pytest.mark.parametrize("how", ["alone", "with windows", "with a view", "joined"])
def test_tokens_in_ram_are_freed_when_the_last_that_share_them_are_closed(tmp_path, allocations, how):
    files, _ = sharded(tmp_path, random_tokens())
    tokens = open_tokens(files, residency="ram")
    windows = [tokens.locate([0, 895], 100)] if how == "with windows" else []
    tokens.wait_until_loaded()
    tokens.gather([0, 895], 100), tokens[10:1990], tokens.fingerprint()
    others = {
        "with a view": lambda: tokens.split(500),
        "joined": lambda: [open_tokens([tokens, random_tokens()])],
    }.get(how, list)()
    if how == "with windows":
        windows.append(tokens.locate([0, 895], 100))
        for one in windows:
            one.copy()
    [memory] = allocations
    tokens.close()
    for other in others:
        assert memory() is not None
        other.close()
    assert eventually(lambda: memory() is None)  # its last reader may be ending still
    for one in windows:
        one.prefetch()
        assert one.is_cached()


NO_MEMORY = """
import re, resource, sys
import numpy as np
from tokenloader import open_tokens
tokens = open_tokens(sys.argv[1], dtype="uint16")
windows = tokens.locate(np.zeros(2**11, np.int64), 2**19)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, -1))
for read in (lambda: tokens[:], lambda: tokens.gather([0] * 2**11, 2**19), windows.copy):
    try:
        read()
    except MemoryError as error:
        print(error)
print(tokens[-3:].tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit works there")
def test_a_copy_that_does_not_fit_into_memory_says_how_large_it_is_and_of_which_file(tmp_path):
    path = tmp_path / "t.bin"
    with path.open("wb") as file:
        file.truncate(2**31)  # sparse
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY, path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    message = (
        f"{path}: a copy of 1,073,741,824 uint16 tokens needs 2.00 GiB of memory, which the system does "
        f"not give; take fewer at once"
    )
    assert done.stdout.splitlines() == [message] * 3 + ["[0, 0, 0]"]


NO_MEMORY_FOR_AN_INDEX = """
import resource, sys
from tokenloader import open_tokens
tokens = open_tokens(sys.argv[1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, -1))
try:
    tokens.documents
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit works there")
def raise_an_error(mine):
    raise KeyError(mine)


def use_in_handler(use, tokens):
    try:
        raise_an_error(tokens)
    except KeyError:
        use(tokens)


@pytest.mark.parametrize("use", [lambda tokens: tokens[:], lambda tokens: tokens.gather([0], len(tokens))])
def test_an_error_that_is_kept_keeps_no_tokens(tmp_path, use):
    tokens = open_tokens(write_raw(tmp_path / "t.bin", random_tokens(1 << 20)), dtype="uint16")
    os.truncate(tmp_path / "t.bin", (2 << 20) - 4096)
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match="has changed") as raised:
            use_in_handler(use, tokens)
        context = raised.value.__context__
        while not isinstance(context, KeyError):
            context = context.__context__
        assert context.__traceback__.tb_next.tb_frame.f_locals == {"mine": tokens}
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_error_of_arguments_that_is_kept_keeps_no_tokens_in_ram(tmp_path):
    path = write_raw(tmp_path / "t.bin", random_tokens(1000))
    tokens = open_tokens(path, dtype="uint16", residency="ram")
    tokens.wait_until_loaded()
    memory = weakref.ref(tokens._memory())
    with pytest.raises(IndexError) as raised:
        tokens.gather([5000], 1)
    tokens.close()
    gc.collect()
    assert memory() is None
    assert raised.value.__traceback__ is not None


def test_an_index_that_does_not_fit_into_memory_is_named(tmp_path):
    index = tmp_path / "t.ds.index"
    (tmp_path / "t.ds").write_bytes(bytes(20))
    with index.open("wb") as file:
        file.seek(2**30 - 8)  # sparse
        file.write((10).to_bytes(8, "little"))
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY_FOR_AN_INDEX, tmp_path / "t.ds"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{index}: where documents end does not fit into memory: Unable to alloc")


class Filling:
    """Tokens whose fill reads a chunk of ten bytes each time it is allowed to, and the fill."""

    def __init__(self, path):
        self.allowed = threading.Semaphore(0)
        self.tokens = fill_with(self._start, path, dtype="uint16")

    def _start(self, extents, files):
        self.fill = RamFill(extents, files, read=self._read, chunk_bytes=10)
        return self.fill

    def _read(self, *chunk):
        assert self.allowed.acquire(timeout=20)
        read_exactly(*chunk)

    def is_stopped(self):
        """Whether the threads end long before the end, after what they have begun."""
        self.allowed.release(100)
        waiting = threading.Thread(target=self.fill.wait, daemon=True)
        waiting.start()
        waiting.join(20)
        return not waiting.is_alive() and self.fill.arrays is None


@pytest.mark.parametrize("how", ["close", "collect", "close every view", "close while waiting"])
def test_reading_into_ram_ends_with_the_tokens(tmp_path, how):
    filling = Filling(write_raw(tmp_path / "t.bin", random_tokens(100_000)))
    tokens, filling.tokens = filling.tokens, None
    if how == "close":
        tokens.close()
    elif how == "close every view":
        views = tokens.split(50_000)
        tokens.close()
        for view in views:
            view.close()
    elif how == "close while waiting":

        def wait():
            with pytest.raises(ValueError, match="closed"):
                tokens.wait_until_loaded()
            ended.set()

        ended = threading.Event()
        threading.Thread(target=wait, daemon=True).start()
        threading.Event().wait(0.05)
        tokens.close()
        filling.allowed.release(100)
        assert ended.wait(20)
    else:
        del tokens
    assert filling.is_stopped()


def test_reading_into_ram_goes_on_while_a_view_is_open(tmp_path):
    expected = random_tokens(5_000)
    filling = Filling(write_raw(tmp_path / "t.bin", expected))
    first, second = filling.tokens.split(1_000)
    filling.tokens.close()
    first.close()
    del first, filling.tokens
    gc.collect()
    np.testing.assert_array_equal(second[:], expected[1_000:])
    filling.allowed.release(1_000)
    second.wait_until_loaded()
    assert filling.fill.arrays is not None
    os.truncate(tmp_path / "t.bin", 0)
    np.testing.assert_array_equal(second[:], expected[1_000:])


def test_data_that_does_not_fit_in_memory_is_refused_before_anything_is_read(tmp_path):
    path = write_raw(tmp_path / "t.bin", random_tokens(2**20))
    with open_tokens(path, dtype="uint16") as mapped:
        extents = mapped.extents
    (tmp_path / "limit").touch()

    def opened(residency, *left_bytes):
        limits = [MemoryLimit(tmp_path / "limit", left) for left in left_bytes]
        return join(extents, residency, start_fill=partial(RamFill, limits=lambda: limits))

    message = (
        rf'^{re.escape(str(path))}: residency="ram" needs 0.00 GiB and 0.00 GiB of memory are '
        r'available \(control group limits included\); use residency="mmap"'
    )
    with pytest.raises(MemoryError, match=message):
        opened("ram", 2**20)
    opened("ram", 2**21).wait_until_loaded()
    opened("ram").wait_until_loaded()
    opened("mmap", 2**20).close()


def test_a_file_that_is_replaced_while_it_is_read_into_ram_is_not_mixed_in(tmp_path, monkeypatch):
    old, new = random_tokens(50_000), random_tokens(50_000)[::-1]
    path = write_raw(tmp_path / "old", old)
    write_raw(tmp_path / "new", new)
    go_on = threading.Event()
    fill = partial(RamFill, read=partial(slowly, go_on), chunk_bytes=1000)
    monkeypatch.chdir(tmp_path)
    tokens = fill_with(fill, "old", dtype="uint16")
    monkeypatch.chdir("/")  # relative paths mean something else now
    os.replace(tmp_path / "new", path)
    go_on.set()
    tokens.wait_until_loaded()
    np.testing.assert_array_equal(tokens[:], old)


# A file that is lost, or written to, under the mapping

COPYING = [
    pytest.param(KERNEL, id="by the kernel"),  # on Linux
    pytest.param(KernelAdvice(linux=False), id="by reading"),
]
AGES_AGO_NS = 0  # a file that was last written to just now may be written to again in the same tick


def written_long_ago(path, tokens):
    write_raw(path, tokens)
    os.utime(path, ns=(AGES_AGO_NS, AGES_AGO_NS))
    return path


def opened_by(kernel, *paths):
    return join(open_tokens(paths, dtype="uint16").extents, "mmap", kernel=kernel)


USES = [
    pytest.param(lambda tokens: tokens.gather([0, 50_000], 1000), id="gather"),
    pytest.param(lambda tokens: tokens[40_000:90_000], id="slice"),
    pytest.param(lambda tokens: tokens[95_000], id="index"),
    pytest.param(lambda tokens: tokens[::1000], id="slice with a step"),
    pytest.param(lambda tokens: tokens.fingerprint(), id="fingerprint"),
    pytest.param(lambda tokens: list(scan(tokens, lambda chunk, _: len(chunk), 10_000)), id="scan"),
    pytest.param(lambda tokens: tokens.view(90_000, 100_000).gather([0], 1000), id="view"),
]


@pytest.mark.parametrize("kernel", COPYING)
@pytest.mark.parametrize("use", USES)
def test_a_truncated_file_is_an_error_with_its_name_and_its_size(tmp_path, use, kernel):
    path = write_raw(tmp_path / "t.bin", random_tokens(100_000))
    with opened_by(kernel, path) as tokens:
        tokens.gather([0, 50_000], 1000)
        os.truncate(path, 10_000)
        with pytest.raises(OSError, match="it has 10,000 bytes and had 200,000") as raised:
            use(tokens)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))


@pytest.mark.parametrize("kernel", COPYING)
@pytest.mark.parametrize("use", USES)
def test_a_file_that_was_rewritten_at_its_size_is_an_error_with_its_name(tmp_path, use, kernel):
    path = written_long_ago(tmp_path / "t.bin", random_tokens(100_000))
    with opened_by(kernel, path) as tokens:
        tokens.gather([0, 50_000], 1000)
        with path.open("r+b") as file:
            file.write(bytes(200_000))
        for _ in range(2):  # for good: it is other data
            with pytest.raises(OSError, match=r"before at 1970-01-01T00:00:00\.0+ \(UTC\)") as raised:
                use(tokens)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    open_tokens(path, dtype="uint16").gather([0], 1000)


@pytest.mark.parametrize("kernel", COPYING)
def test_only_files_that_windows_lie_in_matter_and_the_error_names_the_one(tmp_path, kernel):
    paths = [written_long_ago(tmp_path / str(i), random_tokens(10_000)) for i in range(3)]
    tokens = opened_by(kernel, *paths)
    os.truncate(paths[1], 4096)
    for starts in ([0, 10_000], [9_990], [9_990, 19_990]):  # what is left of the file could be read
        with pytest.raises(OSError, match="it has 4,096 bytes and had 20,000") as raised:
            tokens.gather(starts, 100)
        assert raised.value.filename == str(paths[1])
    np.testing.assert_array_equal(tokens.gather([0, 20_000], 100), [random_tokens(10_000)[:100]] * 2)


class Stops(KernelAdvice):
    """Copies as Linux does, and stops at some bytes of a page as if its disk had failed, once each."""

    def __init__(self, stops):
        super().__init__()
        self.stops = stops

    def copy(self, ranges, out):
        if not self.stops:
            return super().copy(ranges, out)
        copied = min(self.stops.pop(0), len(out))
        kept = out[copied:].copy()
        found = super().copy(ranges, out)
        if copied == len(out):
            return found
        out[copied:] = kept
        return copied, errno.EFAULT


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel copies on Linux only")
@pytest.mark.parametrize("stops", [[0], [1], [199, 0], [200, 50, 7], [2999], [0] * 20])
def test_a_page_that_can_be_read_after_all_is_read_and_the_rest_is_copied(tmp_path, stops):
    expected = random_tokens()
    files, _ = sharded(tmp_path, expected)
    tokens = join(open_tokens(files).extents, "mmap", kernel=Stops(stops))
    starts = [0, 895, 2, 700, 1, 890, 17, 3, 4, 5, 6, 800, 8, 9, 10]
    np.testing.assert_array_equal(tokens.gather(starts, 100), naive_gather(expected, starts, 100))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel copies on Linux only")
def test_a_disk_that_fails_is_an_error_with_the_name_of_the_file_and_the_offset(tmp_path, monkeypatch):
    path = write_raw(tmp_path / "t.bin", random_tokens(10_000))
    tokens = opened_by(Stops([250]), path)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, fails, raising=False)
    with pytest.raises(OSError, match="Input/output error") as raised:
        tokens.gather([0, 5000], 100)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))


FLAT_OUT = """
import os, sys, threading, time, tokenloader as tl
path, how = sys.argv[1:]
size = os.path.getsize(path)
os.utime(path, (0, 0))
tokens = tl.open_tokens(path, dtype="uint16")
loader = tl.TokenLoader(tokens, 256, 1024, plan=tl.RandomWindows(seed=0))
next(loader)
starts, errors = range(0, size // 2 - 4097, 4097), []
end = time.monotonic() + 0.8
def read(use):
    while time.monotonic() < end:
        try:
            use()
        except OSError as error:
            assert error.filename == path, error
            errors.append(str(error))
uses = [lambda: next(loader), lambda: tokens.gather(starts, 4097), lambda: tokens[:]]
threads = [threading.Thread(target=read, args=[use]) for use in uses]
for thread in threads:
    thread.start()
while time.monotonic() < end:
    os.truncate(path, size // 16)
    if how == "rewrite":
        with open(path, "r+b") as file:
            file.write(bytes(size))
    else:
        os.truncate(path, size)
for thread in threads:
    thread.join()
loader.close()
print(errors[-1])
"""


@pytest.mark.parametrize("how", ["truncate", "rewrite"])
def test_a_file_that_changes_all_the_time_under_a_loader_at_full_speed_ends_no_process(tmp_path, how):
    path = write_raw(tmp_path / "t.bin", random_tokens(1 << 22))
    command = [sys.executable, "-c", FLAT_OUT, str(path), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert "has changed since it was opened: it" in done.stdout


# Arrays that are mapped from files


def memmap(path):
    return np.memmap(path, np.uint16, "r")


def loaded(path):
    np.save(path.with_suffix(".npy"), np.fromfile(path, np.uint16))
    path.with_suffix(".npy").replace(path)
    os.utime(path, ns=(AGES_AGO_NS, AGES_AGO_NS))
    return np.load(path, mmap_mode="r")


def view_of_a_memmap(path):
    return np.asarray(memmap(path).reshape(2, -1)).reshape(-1)


def writable_memmap(path):
    return np.memmap(path, np.uint16, "r+")


def python_mapping(path):
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint16)


MAPPINGS = [memmap, loaded, view_of_a_memmap, writable_memmap, python_mapping]
KNOWN_FILES = MAPPINGS[:3]


@pytest.mark.parametrize("map_it", MAPPINGS)
def test_a_mapped_array_says_that_it_is_and_is_announced_as_files_are(tmp_path, map_it):
    array = map_it(written_long_ago(tmp_path / "t.bin", random_tokens(100_000)))
    kernel = RecordingKernel()
    tokens = join([np.asarray(array)], "mmap", kernel=kernel)
    assert tokens.residency == open_tokens(array, residency="ram").residency == "mmap"
    assert repr(tokens).endswith(", mmap)")
    windows = tokens.locate([50_000], 1000)
    windows.prefetch()
    first = array.ctypes.data + 100_000
    assert [first & -mmap.PAGESIZE] == [address for address, _ in kernel.announced]
    np.testing.assert_array_equal(windows.copy()[0], array[50_000:51_000])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a lost file of an array is fatal")
@pytest.mark.parametrize("map_it", MAPPINGS)
@pytest.mark.parametrize("use", USES)
def test_a_mapped_array_whose_file_was_truncated_is_an_error(tmp_path, map_it, use):
    path = written_long_ago(tmp_path / "t.bin", random_tokens(100_000))
    tokens = open_tokens(map_it(path))
    os.truncate(path, 4096)
    with pytest.raises(OSError, match=r"^\[Errno 5\]") as raised:
        use(tokens)
    if map_it in KNOWN_FILES:
        assert "it has 4,096 bytes and had 200," in str(raised.value)
        assert raised.value.filename == str(path)
    else:
        found = r"byte [\d,]+ of an array that was given as tokens cannot be read; is the array mapped"
        assert re.search(found, str(raised.value))


@pytest.mark.parametrize("kernel", COPYING)
@pytest.mark.parametrize("map_it", KNOWN_FILES)
def test_a_mapped_array_whose_file_was_rewritten_is_an_error_where_nobody_may_write_to_it(
    tmp_path, map_it, kernel
):
    path = written_long_ago(tmp_path / "t.bin", random_tokens(100_000))
    tokens = join([np.asarray(map_it(path))], "mmap", kernel=kernel)
    tokens.gather([0], 10)
    with path.open("r+b") as file:
        file.write(bytes(200))
    with pytest.raises(OSError, match="before at 1970") as raised:
        tokens.gather([0], 10)
    assert raised.value.filename == str(path)


@pytest.mark.parametrize("kernel", COPYING)
def test_what_is_written_through_a_memmap_is_read(tmp_path, kernel):
    array = writable_memmap(write_raw(tmp_path / "t.bin", random_tokens(10_000)))
    tokens = join([np.asarray(array)], "mmap", kernel=kernel)
    array[77:80] = 1, 2, 3
    assert tokens.gather([77], 3).tolist() == [[1, 2, 3]]


def test_the_file_of_a_memmap_may_be_gone_or_another_by_now(tmp_path):
    path = write_raw(tmp_path / "t.bin", random_tokens(10_000))
    gone, replaced = memmap(path), memmap(write_raw(tmp_path / "u.bin", random_tokens(10_000)))
    a_pipe = memmap(write_raw(tmp_path / "v.bin", random_tokens(10_000)))
    (tmp_path / "v.bin").unlink()
    os.mkfifo(tmp_path / "v.bin")
    path.unlink()
    os.replace(write_raw(tmp_path / "other", random_tokens(10)), tmp_path / "u.bin")
    for array in (gone, replaced, a_pipe):
        np.testing.assert_array_equal(open_tokens(array)[:], random_tokens(10_000))
