"""BlockReader over fake tokens: which blocks are read when, who waits for what, how its threads end."""

import itertools
import threading
import time
import weakref
from collections import deque

import numpy as np
import pytest
from helpers import eventually

from tokenloader.loader.block_reader import BlockReader, ahead_steps
from tokenloader.loader.steps import Read, StepReads

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize(
    ("num_windows", "window_bytes", "steps"),
    [
        (32, 2050, 1023),  # 64 MiB
        (32, 258, 1024),  # 32,768 windows
        (4096, 2050, 7),
        (40_000, 258, 1),  # never fewer than one step
        (1, 1 << 40, 1),
    ],
)
def test_steps_ahead_are_bounded_in_windows_and_in_bytes(num_windows, window_bytes, steps):
    assert ahead_steps(num_windows, window_bytes) == steps


class Disk:
    """Tokens that only load: a record of what is being read, and of what was."""

    dtype = np.dtype("uint16")

    def __init__(self, *, is_mapped=True, is_over_a_network=False):
        self.is_mapped, self.is_over_a_network = is_mapped, is_over_a_network
        self.begun, self.read = [], []
        self.going, self.prompt = threading.Event(), []  # all but what is prompt waits for it
        self.going.set()

    def locate(self, starts, length):
        return Tokens(self, starts[0], length)


class Tokens:
    def __init__(self, disk, start, length):
        self.disk, self.start, self.length = disk, start, length
        self.is_mapped, self.is_over_a_network = disk.is_mapped, disk.is_over_a_network

    def load(self):
        block = self.start, self.length
        self.disk.begun.append(block)
        assert block in self.disk.prompt or self.disk.going.wait(20)
        self.disk.read.append(block)


@pytest.fixture
def disk():
    made = Disk()
    yield made
    made.going.set()


def block(step):
    """A block of 100 tokens for each step."""
    return Read(step, 100 * step, 100 * step + 100)


def numbers(*steps):
    return [(100 * step, 100) for step in steps]


def in_chunks(size, stop=10**6, planned=None):
    """The blocks of steps 0 to stop, planned so many at a time; planned: a list of the chunks so far."""
    for first in range(0, stop, size):
        end = min(stop, first + size)
        if planned is not None:
            planned.append(range(first, end))
        yield StepReads(end, [block(step) for step in range(first, end)])


def settles_at(found, expected):
    """Whether a list becomes what is expected, and stays so."""
    reached = eventually(lambda: found == expected)
    time.sleep(0.01)
    return reached and found == expected


@pytest.mark.parametrize("chunk", [1, 3, 10, 1000])
def test_blocks_are_read_in_the_order_of_their_steps_as_far_ahead_as_told(disk, chunk):
    reader = BlockReader(disk, in_chunks(chunk), 4)
    for step in range(40):
        reader.submit(step)
        reader.wait_for(step)
        assert disk.read[: step + 1] == numbers(*range(step + 1))
        # Where a chunk is shorter than what is ahead, planning takes some calls to come so far.
        stop = min(step + 5, (step + 2) * chunk)
        assert settles_at(disk.read, numbers(*range(stop)))


def test_a_step_waits_for_its_own_blocks_and_for_none_after_them(disk):
    disk.going.clear()
    disk.prompt = [(0, 7)]
    blocks = [Read(0, 0, 7), Read(1, 7, 9), Read(1, 2, 5), Read(2, 0, 1)]
    reader = BlockReader(disk, iter([StepReads(3, blocks)]), 4)
    reader.submit(0)
    reader.wait_for(0)
    assert disk.read == [(0, 7)]
    waiting = threading.Thread(target=reader.wait_for, args=(1,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    disk.going.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert disk.read[:3] == [(0, 7), (7, 2), (2, 3)]


def test_blocks_of_later_steps_are_bounded_in_bytes_and_those_of_the_step_are_not(disk):
    now = [Read(0, start, start + 100) for start in range(0, 1000, 100)]
    later = [Read(step, 1000 + 100 * step, 1100 + 100 * step) for step in range(1, 10)]
    expected = [(read.start, 100) for read in now + later]
    reader = BlockReader(disk, iter([StepReads(10, now + later)]), 100, most_ahead_bytes=500)
    reader.submit(0)
    assert settles_at(disk.read, expected[:10])
    reader.wait_for(0)
    for _ in range(2):
        reader.submit(0)
        assert settles_at(disk.read, expected[:13])  # 500 bytes, and what is begun with them
    reader.wait_for(1)
    reader.submit(1)
    assert settles_at(disk.read, expected[:14])


def test_planning_goes_one_chunk_a_call_beyond_what_is_needed(disk):
    planned = []
    reader = BlockReader(disk, in_chunks(10, planned=planned), 100)
    assert len(planned) == 1
    for calls in range(1, 4):
        reader.submit(0)
        assert len(planned) == 1 + calls
    reader.submit(55)
    assert planned[-1] == range(60, 70)
    for _ in range(20):
        reader.submit(55)
    assert planned[-1] == range(150, 160)  # the first that steps up to 155 need


def test_a_plan_that_reads_nothing_new_is_not_planned_without_end(disk):
    asked = itertools.count(1)
    endless = (StepReads(10 * next(asked), [block(0)] if i == 0 else []) for i in itertools.count())
    reader = BlockReader(disk, endless, 50)
    for step in range(100):
        reader.submit(step)
        reader.wait_for(step)
    assert disk.read == numbers(0)
    assert next(asked) <= 17  # chunks of 10 steps, for 150


def test_a_plan_that_ends_has_all_its_blocks_read(disk):
    reader = BlockReader(disk, in_chunks(3, stop=10), 4)
    for step in range(12):
        reader.submit(step)
        reader.wait_for(step)
    assert disk.read == numbers(*range(10))


def test_a_plan_whose_windows_are_read_by_themselves_has_no_blocks(disk, own_threads):
    reader = BlockReader(disk, iter([]), 4)
    assert not reader.has_blocks
    reader.submit(10)
    reader.wait_for(10)
    assert (disk.begun, own_threads()) == ([], [])
    assert BlockReader(disk, in_chunks(3), 4).has_blocks


def test_nothing_is_read_and_no_thread_started_for_tokens_in_ram(own_threads):
    disk, planned = Disk(is_mapped=False), []
    reader = BlockReader(disk, in_chunks(10, planned=planned), 4)
    for step in range(100):
        reader.submit(step)
        reader.wait_for(step)
    assert (disk.begun, own_threads()) == ([], [])
    assert len(planned) == 1


def test_reading_and_planning_end_when_the_tokens_are_in_ram(disk):
    planned = []
    reader = BlockReader(disk, in_chunks(10, planned=planned), 4)
    reader.submit(0)
    disk.is_mapped = False
    for step in range(1, 100):
        reader.submit(step)
        reader.wait_for(step)
    assert disk.read == numbers(0, 1, 2, 3, 4)
    assert len(planned) == 1


@pytest.mark.parametrize(("is_over_a_network", "at_once"), [(False, 1), (True, 16)])
def test_blocks_are_read_one_by_one_from_a_disk_and_many_at_once_over_a_network(
    own_threads, is_over_a_network, at_once
):
    disk = Disk(is_over_a_network=is_over_a_network)
    disk.going.clear()
    reader = BlockReader(disk, in_chunks(100), 50)
    reader.submit(0)
    assert eventually(lambda: len(disk.begun) == at_once)
    time.sleep(0.01)
    assert len(disk.begun) == len(own_threads()) == at_once
    assert {(thread.name, thread.daemon) for thread in own_threads()} == {("tokenloader-read", True)}
    disk.going.set()
    reader.wait_for(50)
    assert sorted(disk.read) == numbers(*range(51))


def test_an_error_of_a_read_is_told_to_who_waits_for_it_and_the_next_are_read(disk, own_threads):
    failures = deque([ZeroDivisionError("first"), None, SystemExit("third")])

    def load(windows):
        disk.read.append((windows.start, windows.length))
        if failures and (error := failures.popleft()):
            raise error

    tokens = type("Failing", (Tokens,), {"load": load})
    disk.locate = lambda starts, length: tokens(disk, starts[0], length)
    reader = BlockReader(disk, in_chunks(10), 3)
    reader.submit(0)
    for step, error in ((0, ZeroDivisionError), (1, None), (2, SystemExit), (3, None)):
        if error is None:
            reader.wait_for(step)
        else:
            with pytest.raises(error):
                reader.wait_for(step)
    assert disk.read == numbers(0, 1, 2, 3)
    assert len(own_threads()) == 1


def test_what_the_plan_raises_comes_when_its_steps_are_asked_for(disk):
    def failing():
        yield StepReads(10, [])
        raise ZeroDivisionError("no such block")

    reader = BlockReader(disk, failing(), 3)
    for step in range(7):
        reader.submit(step)
    with pytest.raises(ZeroDivisionError, match="no such block"):
        reader.submit(7)


@pytest.mark.parametrize("is_over_a_network", [False, True])
def test_a_reader_that_is_let_go_ends_its_threads_and_reads_no_more(own_threads, is_over_a_network):
    disk = Disk(is_over_a_network=is_over_a_network)
    disk.going.clear()
    reader = BlockReader(disk, in_chunks(100), 50)
    reader.submit(0)
    assert eventually(lambda: len(disk.begun) == len(own_threads()) > 0)
    begun, ref = list(disk.begun), weakref.ref(reader)
    del reader
    assert ref() is None
    disk.going.set()
    assert eventually(lambda: own_threads() == [])
    assert disk.begun == begun


def test_threads_that_the_system_does_not_give_are_an_error_and_those_it_gave_end(own_threads, monkeypatch):
    start, calls = threading.Thread.start, itertools.count()

    def refuse_the_third(thread):
        if next(calls) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    reader = BlockReader(Disk(is_over_a_network=True), in_chunks(100), 50)
    told = r"the system gives none \(can't start new thread\); raise the limit on processes \(ulimit -u"
    with pytest.raises(RuntimeError, match=told) as caught:
        reader.submit(0)
    assert len(own_threads()) == 2
    caught.value.__traceback__ = None
    del reader, caught
    assert eventually(lambda: own_threads() == [])
