"""The store of the bytes: closing while in use, the exchange of files for RAM, and files that are lost."""

import errno
import gc
import os
import re
import subprocess
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import in_threads, naive_gather
from token_files import fill_with, random_tokens, sharded, write_raw

from tokenloader import open_tokens
from tokenloader.storage.kernel_advice import KernelAdvice
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

    monkeypatch.setattr(Axis, "gather", paused(Axis.gather))
    monkeypatch.setattr(Axis, "copy", paused(Axis.copy))
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
    assert memory() is None
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


# A file that is lost under the mapping


LOST = """
import os, sys, numpy as np, tokenloader as tl
from tokenloader.storage.kernel_advice import KERNEL, KernelAdvice
from tokenloader.tokens.opening import join
path, use, kernel = sys.argv[1:]
extents = tl.open_tokens(path, dtype="uint16").extents
advice = KERNEL if kernel == "new" else KernelAdvice(populate_read=9999)
tokens = join(extents, "mmap", kernel=advice)
tokens.gather([0, 50_000], 1000)
os.truncate(path, 10_000)
try:
    tokens.gather([0, 50_000], 1000) if use == "gather" else tokens[40_000:90_000]
except OSError as error:
    print(error)
if kernel == "new":
    print(tokens.gather([0], 1000)[0, :3].tolist())  # what is left can still be read
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a lost file is fatal")
@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("use", ["gather", "slice"])
def test_a_truncated_file_is_an_error_with_its_name_and_does_not_kill_the_process(tmp_path, use, kernel):
    expected = random_tokens(100_000)
    path = write_raw(tmp_path / "t.bin", expected)
    found = subprocess.run(
        [sys.executable, "-c", LOST, str(path), use, kernel],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    error, *rest = found.stdout.splitlines()
    at = r"10,000" if kernel == "old" else r"[\d,]+"
    assert re.match(
        rf"\[Errno 5\] cannot be read at byte {at}: it has 10,000 bytes now and had 200,000 when it "
        rf"was opened; .*: '{re.escape(str(path))}'$",
        error,
    )
    assert rest == ([str(expected[:3].tolist())] if kernel == "new" else [])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a lost file is fatal")
def test_the_error_names_the_shard_that_was_lost(tmp_path):
    paths = [write_raw(tmp_path / str(i), random_tokens(10_000)) for i in range(3)]
    tokens = open_tokens(paths, dtype="uint16")
    os.truncate(paths[1], 4096)
    with pytest.raises(OSError, match=re.escape(str(paths[1]))) as caught:
        tokens.gather([0, 9_900, 19_000], 500)
    assert caught.value.errno == errno.EIO
    np.testing.assert_array_equal(tokens.gather([20_000], 100)[0], random_tokens(10_000)[:100])


@pytest.mark.parametrize("kernel", [KernelAdvice(populate_read=9999), KernelAdvice(linux=False)])
def test_a_system_that_cannot_tell_has_the_sizes_of_the_files_looked_at_that_are_read(tmp_path, kernel):
    paths = [write_raw(tmp_path / str(i), random_tokens(10_000)) for i in range(3)]
    tokens = join(open_tokens(paths, dtype="uint16").extents, "mmap", kernel=kernel)
    os.truncate(paths[1], 4096)
    for starts in ([0, 10_000], [9_990]):  # what is left of the file could be read
        with pytest.raises(OSError, match=rf"4,096 bytes now .*: '{re.escape(str(paths[1]))}'"):
            tokens.gather(starts, 100)
    np.testing.assert_array_equal(tokens.gather([0, 20_000], 100), [random_tokens(10_000)[:100]] * 2)
