"""Prefetcher alone, over fake iterators: order, bound, errors, and the end of its thread."""

import contextlib
import gc
import itertools
import subprocess
import sys
import threading
import time
import traceback
import weakref
from queue import Queue

import pytest
from helpers import eventually, interrupted

from tokenloader.loader.prefetch import Prefetcher, PrefetcherStoppedError, end_all

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def start():
    """Prefetcher, and its thread ended when the test ends."""
    started = []

    def start(items, depth, **arguments):
        started.append(Prefetcher(items, depth, **arguments))
        return started[-1]

    yield start
    for prefetcher in started:
        prefetcher.stop(wait=False)


def has_ended(thread):
    """Whether a thread ends within a generous time."""
    thread.join(5)
    return not thread.is_alive()


def take(prefetcher):
    """Peeks at the next item and pops it."""
    item = prefetcher.peek()
    prefetcher.pop()
    return item


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_come_in_order_and_none_is_lost(start, depth):
    prefetcher = start(iter(range(500)), depth)
    assert [take(prefetcher) for _ in range(500)] == list(range(500))
    with pytest.raises(StopIteration):
        take(prefetcher)


@pytest.mark.parametrize("error", [StopIteration, OSError, KeyboardInterrupt])
def test_the_end_and_an_error_are_told_every_time_they_are_asked_for(start, error):
    prefetcher = start(Source(1, error), 2)
    assert not prefetcher.ended
    take(prefetcher)
    assert not prefetcher.ended
    for _ in range(3):
        with pytest.raises(error):
            prefetcher.peek()
        assert prefetcher.ended


def test_an_item_that_is_peeked_at_stays_until_it_is_popped(start):
    prefetcher = start(iter(range(5)), 2)
    for i in range(5):
        assert [prefetcher.peek() for _ in range(3)] == [i] * 3
        prefetcher.pop()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_more_than_depth_items_are_made_beyond_those_taken(start, depth):
    made = []
    prefetcher = start((made.append(i) or i for i in range(10**6)), depth)
    for taken in range(6):
        assert eventually(lambda taken=taken: len(made) == depth + taken)
        time.sleep(0.01)
        assert len(made) == depth + taken
        take(prefetcher)


def test_an_item_that_is_peeked_at_counts_as_waiting_until_it_is_popped(start):
    made = []
    prefetcher = start((made.append(i) or i for i in range(10**6)), 2)
    for i in range(4):
        assert eventually(lambda i=i: len(made) == 2 + i)
        assert prefetcher.peek() == i
        time.sleep(0.01)
        assert len(made) == 2 + i
        prefetcher.pop()


def test_an_item_may_be_looked_at_without_waiting_once_it_is_made(start):
    going = threading.Event()
    prefetcher = start((going.wait() and i for i in range(3)), 2)
    assert prefetcher.peek_if_there() is None
    going.set()
    for i in range(3):
        assert eventually(lambda: prefetcher.peek_if_there() is not None)
        assert prefetcher.peek_if_there() == take(prefetcher) == i


@pytest.mark.parametrize("error", [StopIteration, OSError])
def test_the_end_and_an_error_are_not_there_to_look_at_and_stay_to_be_raised(start, error):
    def source_that_ends():
        if error is not StopIteration:
            raise error
        yield from ()

    prefetcher = start(source_that_ends(), 2)
    assert has_ended(prefetcher.thread)
    for _ in range(3):
        assert prefetcher.peek_if_there() is None
    with pytest.raises(error):
        prefetcher.peek()


def test_items_run_on_a_daemon_thread_of_their_own_and_one_only(start):
    seen = []
    prefetcher = start((seen.append(threading.current_thread()) or i for i in range(5)), 2)
    for _ in range(5):
        take(prefetcher)
    assert len(set(seen)) == 1
    assert seen[0] is not threading.current_thread()
    assert seen[0].daemon
    assert seen[0].name == "tokenloader"


def test_a_slow_source_is_waited_for(start):
    prefetcher = start((time.sleep(0.02) or i for i in range(5)), 3)
    assert [take(prefetcher) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_a_wait_has_an_end_and_says_whether_peek_would_wait(start):
    source = Queue()
    prefetcher = start(iter(source.get, None), 1)
    assert not prefetcher.wait(0.01)
    source.put("item")
    assert prefetcher.wait(5)
    assert prefetcher.wait(0)
    assert take(prefetcher) == "item"
    source.put(None)
    assert prefetcher.wait(5)
    with pytest.raises(StopIteration):
        prefetcher.peek()
    prefetcher.stop()
    assert prefetcher.wait(5)
    with pytest.raises(PrefetcherStoppedError):
        prefetcher.peek()


def test_a_slow_taker_finds_the_items_made_meanwhile(start):
    made = []
    prefetcher = start((made.append(i) or i for i in range(100)), 3)
    assert eventually(lambda: len(made) == 3)
    assert [take(prefetcher) for _ in range(3)] == [0, 1, 2]


class BoomError(Exception):
    pass


class BoomBaseError(BaseException):
    pass


@pytest.mark.parametrize("error", [BoomError, BoomBaseError, SystemExit, KeyboardInterrupt])
def test_an_error_arrives_after_the_items_before_it_with_the_frames_that_raised_it(start, error):
    def source_that_fails():
        yield 0
        yield 1
        raise error("disk on fire")

    prefetcher = start(source_that_fails(), 4)
    assert [take(prefetcher), take(prefetcher)] == [0, 1]
    with pytest.raises(error, match="disk on fire") as caught:
        take(prefetcher)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "source_that_fails" in frames


def test_an_error_goes_to_the_taker_only_and_ends_the_thread(start, monkeypatch):
    complaints = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def source_that_fails():
        yield 0
        raise BoomError

    prefetcher = start(source_that_fails(), 2)
    assert has_ended(prefetcher.thread)
    assert complaints == []


def test_stop_ends_the_thread_when_the_queue_is_full(start):
    made = []
    prefetcher = start((made.append(i) or i for i in range(100)), 3)
    assert eventually(lambda: len(made) == 3)
    prefetcher.stop()
    assert not prefetcher.thread.is_alive()
    assert len(made) == 3


def test_stop_ends_the_thread_after_the_item_that_it_is_making(start):
    making, go_on, made = threading.Event(), threading.Event(), []

    def source():
        for i in range(100):
            making.set()
            go_on.wait()
            made.append(i)
            yield i

    prefetcher = start(source(), 3)
    making.wait()
    prefetcher.stop(wait=False)
    assert prefetcher.thread.is_alive()
    go_on.set()
    assert has_ended(prefetcher.thread)
    assert made == [0]


@pytest.mark.parametrize(("wait", "join_seconds"), [(True, 0.1), (False, 1000)])
def test_stop_waits_for_a_source_that_blocks_as_long_as_it_is_told_to(start, wait, join_seconds):
    go_on = threading.Event()
    prefetcher = start((go_on.wait() for _ in range(3)), 1, join_seconds=join_seconds)
    prefetcher.stop(wait=wait)
    assert prefetcher.thread.is_alive()
    go_on.set()
    assert has_ended(prefetcher.thread)


def test_stopping_twice_and_after_the_end_is_allowed(start):
    prefetcher = start(iter([1]), 1)
    assert take(prefetcher) == 1
    with pytest.raises(StopIteration):
        prefetcher.peek()
    prefetcher.stop()
    prefetcher.stop()


def test_stop_on_the_background_thread_itself_does_not_wait_for_itself(start):
    prefetchers, stopped = Queue(), threading.Event()

    def source():
        prefetchers.get().stop()
        stopped.set()
        yield 0

    prefetcher = start(source(), 1)
    prefetchers.put(prefetcher)
    assert has_ended(prefetcher.thread)
    assert stopped.is_set()


def test_a_taker_that_waits_is_told_at_once_that_the_prefetcher_was_stopped(start):
    going, go_on = threading.Event(), threading.Event()
    prefetcher = start((going.set() or go_on.wait() for _ in range(3)), 1)
    told = Queue()

    def wait():
        try:
            prefetcher.peek()
        except PrefetcherStoppedError as error:
            told.put(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    going.wait()
    prefetcher.stop(wait=False)
    assert told.get() == "the prefetcher was stopped"
    go_on.set()
    waiting.join()
    with pytest.raises(PrefetcherStoppedError):
        prefetcher.peek()


@pytest.mark.parametrize("depth", [1, 3])
def test_interrupts_anywhere_lose_no_item_and_leave_as_many_waiting(start, depth):
    # An interrupt at the first point of a peek and a pop, then one at the second, and so on.
    made, seen = [], []
    prefetcher = start((made.append(i) or i for i in range(10**6)), depth)

    def take_one():
        seen.append(prefetcher.peek())  # a second time, if the interrupt came before the pop
        prefetcher.pop()

    point = 0
    while interrupted(take_one, point):
        item = prefetcher.peek()
        assert item in (seen[-1:] or [0]) + [len(set(seen))]
        point += 1
    assert point > 30
    assert sorted(set(seen)) == list(range(len(set(seen))))
    following = prefetcher.peek()
    assert following == seen[-1] + 1
    assert eventually(lambda: len(made) == following + depth)
    time.sleep(0.01)
    assert len(made) == following + depth


class Item:
    """Something that can be weakly referenced."""


def test_what_was_made_and_not_taken_is_freed_after_stop():
    alive = weakref.WeakSet()

    def source():
        while True:
            item = Item()
            alive.add(item)
            yield item

    prefetcher = Prefetcher(source(), 3)
    assert eventually(lambda: len(alive) >= 3)
    prefetcher.peek()
    prefetcher.stop()
    del prefetcher
    gc.collect()
    assert len(alive) == 0


def test_at_exit_a_thread_is_waited_for_until_it_has_dropped_what_it_held():
    # Dropping jax arrays goes through C++, in which a thread must not be when the interpreter goes.
    making, go_on, dropping = threading.Event(), threading.Event(), threading.Event()

    class SlowToDrop:
        def __del__(self):
            dropping.set()
            time.sleep(0.2)

    def source():
        yield SlowToDrop()
        yield SlowToDrop()
        making.set()
        go_on.wait()
        yield SlowToDrop()

    prefetcher = Prefetcher(source(), 3)
    thread = prefetcher.thread
    making.wait()
    prefetcher.stop(wait=False)
    del prefetcher
    go_on.set()
    dropping.wait()
    assert thread.is_alive()
    end_all()
    assert not thread.is_alive()


def test_an_item_that_was_taken_is_not_kept(start):
    prefetcher = start((Item() for _ in range(10)), 1)
    refs = [weakref.ref(take(prefetcher)) for _ in range(4)]
    assert eventually(lambda: [ref() for ref in refs] == [None] * 4)


class Source:
    """An iterator that can be weakly referenced; it stands for the tokens, which may be 19 GiB of RAM."""

    def __init__(self, num_items, error):
        self.items, self.error = iter(range(num_items)), error

    def __iter__(self):
        return self

    def __next__(self):
        for item in self.items:
            return item
        raise self.error


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("error", [StopIteration, BoomError])
def test_a_source_that_has_ended_is_freed_with_its_prefetcher_and_not_by_the_garbage_collector(error, told):
    gc.collect()
    gc.disable()
    try:
        source = Source(0, error)
        prefetcher = Prefetcher(source, 2)
        assert has_ended(prefetcher.thread)
        if told:
            with contextlib.suppress(error):
                prefetcher.peek()
        prefetcher.stop()
        refs = weakref.ref(source), weakref.ref(prefetcher)
        del source, prefetcher
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_a_prefetcher_that_is_abandoned_ends_its_thread():
    prefetcher = Prefetcher(itertools.count(), 2)
    thread = prefetcher.thread
    prefetcher.peek()
    del prefetcher
    assert has_ended(thread)


def test_a_process_that_was_forked_off_is_told_that_the_thread_is_not_there():
    program = """
import itertools, os, time
from tokenloader.loader.prefetch import Prefetcher
prefetcher = Prefetcher(itertools.count(), 2)
while prefetcher._ready.qsize() < 2:
    time.sleep(0.01)
if os.fork() == 0:
    try:
        while prefetcher.wait(0.1):
            print("item", prefetcher.peek())
            prefetcher.pop()
    except RuntimeError as error:
        print(error)
    prefetcher.stop()
else:
    os.wait()
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=15)
    first, second, said = done.stdout.splitlines()
    assert (first, second, done.stderr) == ("item 0", "item 1", "")
    assert "the background thread is in another process, off which this one was forked" in said
