"""Prefetcher alone, over fake iterators: order, bound, errors, and the end of its thread."""

import gc
import threading
import time
import traceback
import weakref

import pytest

from tokenloader.loader import prefetch as _prefetch
from tokenloader.loader.prefetch import Prefetcher

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def start():
    """Prefetcher, and its thread ended when the test ends."""
    started = []

    def start(items, depth):
        started.append(Prefetcher(items, depth))
        return started[-1]

    yield start
    for prefetcher in started:
        prefetcher.stop(wait=False)


def eventually(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def threads_of(function):
    """The threads that function() starts, and what it returns."""
    before = set(threading.enumerate())
    result = function()
    return result, [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_come_in_order_and_none_is_lost(start, depth):
    prefetcher = start(iter(range(500)), depth)
    assert [prefetcher.take() for _ in range(500)] == list(range(500))
    with pytest.raises(StopIteration):
        prefetcher.take()


def test_the_end_is_told_every_time_it_is_asked_for(start):
    prefetcher = start(iter([]), 1)
    for _ in range(3):
        with pytest.raises(StopIteration):
            prefetcher.take()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_more_than_depth_items_are_made_beyond_those_taken(start, depth):
    made = []
    prefetcher = start((made.append(i) or i for i in range(10**6)), depth)
    for taken in range(6):
        assert eventually(lambda taken=taken: len(made) == depth + taken)
        time.sleep(0.01)
        assert len(made) == depth + taken
        prefetcher.take()


def test_an_item_taken_early_counts_as_waiting_until_it_is_released(start):
    made = []
    prefetcher = start((made.append(i) or i for i in range(10**6)), 2)
    for i in range(4):
        assert eventually(lambda i=i: len(made) == 2 + i)
        assert prefetcher.take_if_there() == i
        time.sleep(0.01)
        assert len(made) == 2 + i
        prefetcher.release()


def test_nothing_is_taken_early_that_is_not_made_yet(start):
    going = threading.Event()
    prefetcher = start((going.wait() and i for i in range(3)), 2)
    assert prefetcher.take_if_there() is None
    going.set()
    assert [prefetcher.take() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("error", [StopIteration, OSError])
def test_the_end_and_an_error_are_not_taken_early_and_stay_to_be_told(start, error):
    prefetcher = start(Source(0, error), 2)
    prefetcher._thread.join(5)
    for _ in range(3):
        assert prefetcher.take_if_there() is None
    with pytest.raises(error):
        prefetcher.take()


def test_items_run_on_a_daemon_thread_of_their_own_and_one_only(start):
    seen = []
    prefetcher = start((seen.append(threading.current_thread()) or i for i in range(5)), 2)
    for _ in range(5):
        prefetcher.take()
    assert len(set(seen)) == 1
    assert seen[0] is not threading.current_thread()
    assert seen[0].daemon
    assert seen[0].name == "tokenloader"


def test_a_slow_source_is_waited_for(start):
    prefetcher = start((time.sleep(0.02) or i for i in range(5)), 3)
    assert [prefetcher.take() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_a_slow_taker_finds_the_items_made_meanwhile(start):
    made = []
    prefetcher = start((made.append(i) or i for i in range(100)), 3)
    assert eventually(lambda: len(made) == 3)
    assert [prefetcher.take() for _ in range(3)] == [0, 1, 2]


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
    assert [prefetcher.take(), prefetcher.take()] == [0, 1]
    with pytest.raises(error, match="disk on fire") as caught:
        prefetcher.take()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "source_that_fails" in frames
    with pytest.raises(StopIteration):  # as a generator after its error
        prefetcher.take()


def test_an_error_goes_to_the_taker_only_and_ends_the_thread(start, monkeypatch):
    complaints = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def source_that_fails():
        yield 0
        raise BoomError

    _, threads = threads_of(lambda: start(source_that_fails(), 2))
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert complaints == []


def test_stop_ends_the_thread_when_the_queue_is_full():
    made = []
    prefetcher, (thread,) = threads_of(lambda: Prefetcher((made.append(i) or i for i in range(100)), 3))
    assert eventually(lambda: len(made) == 3)
    prefetcher.stop()
    assert not thread.is_alive()
    assert len(made) == 3


def test_stop_ends_the_thread_after_the_item_that_it_is_making():
    making, go_on, made = threading.Event(), threading.Event(), []

    def source():
        for i in range(100):
            making.set()
            go_on.wait()
            made.append(i)
            yield i

    prefetcher, (thread,) = threads_of(lambda: Prefetcher(source(), 3))
    making.wait()
    prefetcher.stop(wait=False)
    assert thread.is_alive()
    go_on.set()
    thread.join(5)
    assert not thread.is_alive()
    assert made == [0]


def test_stop_does_not_wait_for_ever_for_a_source_that_blocks(monkeypatch):
    monkeypatch.setattr(_prefetch, "_JOIN_SECONDS", 0.1)
    go_on = threading.Event()
    prefetcher, (thread,) = threads_of(lambda: Prefetcher((go_on.wait() for _ in range(3)), 1))
    began = time.monotonic()
    prefetcher.stop()
    assert 0.09 < time.monotonic() - began < 5
    assert thread.is_alive()
    go_on.set()
    thread.join(5)
    assert not thread.is_alive()


def test_stop_without_waiting_returns_at_once():
    go_on = threading.Event()
    prefetcher, (thread,) = threads_of(lambda: Prefetcher((go_on.wait() for _ in range(3)), 1))
    began = time.monotonic()
    prefetcher.stop(wait=False)
    assert time.monotonic() - began < 1
    go_on.set()
    thread.join(5)
    assert not thread.is_alive()


def test_stopping_twice_and_after_the_end_is_allowed():
    prefetcher = Prefetcher(iter([1]), 1)
    assert prefetcher.take() == 1
    with pytest.raises(StopIteration):
        prefetcher.take()
    prefetcher.stop()
    prefetcher.stop()


def test_stop_on_the_background_thread_itself_does_not_wait_for_itself():
    prefetchers, waited = [], []

    def source():
        while not prefetchers:
            time.sleep(0.001)
        began = time.monotonic()
        prefetchers[0].stop()
        waited.append(time.monotonic() - began)
        yield 0

    prefetcher, (thread,) = threads_of(lambda: Prefetcher(source(), 1))
    prefetchers.append(prefetcher)
    thread.join(5)
    assert not thread.is_alive()
    assert waited[0] < 1


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

    prefetcher, (thread,) = threads_of(lambda: Prefetcher(source(), 3))
    making.wait()
    prefetcher.stop(wait=False)
    del prefetcher
    go_on.set()
    dropping.wait()
    assert thread.is_alive()
    _prefetch._end_all()
    assert not thread.is_alive()


def test_an_item_that_was_taken_is_not_kept():
    prefetcher = Prefetcher((Item() for _ in range(10)), 1)
    refs = [weakref.ref(prefetcher.take()) for _ in range(4)]
    assert eventually(lambda: [ref() for ref in refs] == [None] * 4)
    prefetcher.stop()


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


@pytest.mark.parametrize("error", [StopIteration, BoomError])
def test_a_source_that_has_ended_is_freed_with_its_prefetcher_and_not_by_the_garbage_collector(
    error,
):
    gc.collect()
    gc.disable()
    try:
        source = Source(1, error)
        prefetcher = Prefetcher(source, 2)
        prefetcher._thread.join(5)
        prefetcher.stop()
        refs = weakref.ref(source), weakref.ref(prefetcher)
        del source, prefetcher
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
