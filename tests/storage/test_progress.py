"""Progress bars: what they show, and screens that fail, block, or are not there."""

import io
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import tqdm

from tokenloader.storage.progress import Progress, progress_bar

# tqdm before 4.66.3, on Python 3.12 and later
pytestmark = pytest.mark.filterwarnings("ignore:.*utcfromtimestamp:DeprecationWarning")


def work(progress):
    """Counts 8,000 bytes, and waits for the bar however busy the machine is."""
    progress.start()
    for _ in range(8):
        progress.done_bytes += 1000
    progress.close()
    for thread in threading.enumerate():
        if thread.name == "tokenloader-progress":
            thread.join(20)
            assert not thread.is_alive()


def test_quick_work_shows_no_bar(capfd):
    work(Progress("working", 8000, after_seconds=100))
    assert capfd.readouterr() == ("", "")


def test_slow_work_shows_a_bar_that_ends_full(capfd):
    work(Progress("working", 8000, after_seconds=0))
    out, err = capfd.readouterr()
    assert out == ""
    assert "working: 100%" in err
    assert "7.81k/7.81k" in err


def test_work_that_is_given_up_leaves_the_bar_where_it_was(capfd):
    work(Progress("working", 16_000, after_seconds=0))
    assert "working:  50%" in capfd.readouterr().err


def test_a_bar_for_a_block_disappears_at_its_end(capfd):
    with progress_bar("working", None, shown=True) as bar:
        bar.done_bytes += 1000
    err = capfd.readouterr().err
    assert "working: " in err
    assert err.endswith("\r")
    assert not err.split("\r")[-2].strip()


def test_a_bar_that_is_not_to_be_shown_is_not(capfd):
    with progress_bar("working", 1000, shown=False) as bar:
        bar.done_bytes += 1000
    assert capfd.readouterr() == ("", "")


def test_the_bar_is_in_text_where_standard_error_is_no_file(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as in a notebook
    work(Progress("working", 8000, after_seconds=0))
    assert "working: 100%" in sys.stderr.getvalue()


class Broken(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error, self.count = error, 0

    def write(self, text):
        self.count += 1
        raise self.error


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), ValueError("I/O operation on closed file"), KeyError()],
)
def test_a_screen_that_fails_is_written_to_once(monkeypatch, error):
    monkeypatch.setattr(sys, "stderr", Broken(error))
    progress = Progress("working", 8000, after_seconds=0)
    work(progress)
    assert progress.done_bytes == 8000
    assert sys.stderr.count == 1


def test_another_bar_that_redraws_this_one_meets_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Broken(OSError(28, "No space left on device")))
    progress = Progress("working", 8000, after_seconds=0)
    progress.start()
    while not sys.stderr.count:
        time.sleep(0.001)
    for bar in list(tqdm.tqdm._instances):  # as its monitor thread does
        bar.refresh()
    progress.close()


@pytest.mark.parametrize("method", ["__init__", "update", "close", "__new__"])
def test_a_bar_that_fails_is_dropped(monkeypatch, capfd, method):
    def fails(*_, **__):
        raise ValueError("not foreseen")

    monkeypatch.setattr(tqdm.tqdm, method, fails)
    work(Progress("working", 8000, after_seconds=0))


def test_where_no_thread_can_be_started_there_is_no_bar(monkeypatch, capfd):
    def fails(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    work(Progress("working", 8000, after_seconds=0))
    assert capfd.readouterr() == ("", "")


READ = """
import sys, numpy as np
from functools import partial
from tokenloader import open_tokens
from tokenloader.storage.ram import RamFill
from tokenloader.tokens.opening import join
path = sys.argv[1]
extents = open_tokens(path, dtype="uint16").extents
tokens = join(extents, "ram", start_fill=partial(RamFill, chunk_bytes=1000, progress_after_seconds=0))
tokens.wait_until_loaded()
assert tokens.residency == "ram"
assert np.array_equal(tokens[:], np.fromfile(path, np.uint16))
print("read")
"""


def run_reading(tmp_path, *before, **arguments):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(range(256)) * 100)
    command = [*before, sys.executable, "-c", READ, path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False, **arguments)
    return done.returncode, done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device")
def test_a_full_disk_behind_standard_error_reaches_neither_data_nor_exit_status(tmp_path):
    with open("/dev/full", "w") as full:
        assert run_reading(tmp_path, stderr=full) == (0, "read\n")


def test_a_pipe_that_nobody_reads_any_more_reaches_neither_data_nor_exit_status(tmp_path):
    reads, writes = os.pipe()
    os.close(reads)
    assert run_reading(tmp_path, stderr=writes) == (0, "read\n")
    os.close(writes)


def test_without_standard_error_the_data_arrives(tmp_path):
    assert run_reading(tmp_path, "sh", "-c", 'exec "$0" "$@" 2>&-') == (0, "read\n")


def test_a_screen_that_blocks_holds_up_neither_data_nor_exit(tmp_path):
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writes, bytes(4096))
    os.set_blocking(writes, True)
    assert run_reading(tmp_path, stderr=writes) == (0, "read\n")
    os.close(reads)
    os.close(writes)
