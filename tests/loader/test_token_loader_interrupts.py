"""Ctrl-C at every point of a loader's calls: no batch is lost, none comes twice, and nothing hangs."""

import functools

import numpy as np
import pytest
from helpers import eventually, interrupted, planned_rows, random_tokens, watched_tokens

import tokenloader as tl
from tokenloader.loader.prefetch import Prefetcher

pytestmark = pytest.mark.timeout(100)

TOKENS = random_tokens()
B, T = 3, 40
KINDS = {  # prefetch and transform; with prefetch=8 small batches come in groups of five
    "grouped": (8, tl.next_token),
    "ungrouped": (1, tl.next_token),
    "raw": (8, None),
}
GROUP = 5
PLAN = tl.ShuffledEpochs(0)
CLOSED = "this TokenLoader was closed; make another"
STRIDE = 3  # between points at which calls other than next() are interrupted; each kind begins with another
FIRST = {kind: first for first, kind in enumerate(KINDS)}


def make_loader(kind, plan=PLAN, tokens=None):
    prefetch, transform = KINDS[kind]
    tokens = tl.open_tokens(TOKENS) if tokens is None else tokens
    return tl.TokenLoader(tokens, B, T, plan=plan, prefetch=prefetch, transform=transform)


@functools.cache  # computing it beside a busy background thread takes longer than all else
def rows_of_step(plan, step):
    return planned_rows(TOKENS, plan, B * step, B, T)


def check_is_of_step(loader, batch, step):
    rows = rows_of_step(loader.plan, step)
    if loader.transform is None:
        np.testing.assert_array_equal(batch, rows)
    else:
        np.testing.assert_array_equal(batch.targets, rows[:, 1:])


def check_next_batches(loader, count):
    for step in range(loader.step, loader.step + count):
        check_is_of_step(loader, next(loader), step)
        assert loader.step == step + 1


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        ("grouped", 0),
        ("grouped", 1),
        ("grouped", GROUP),
        ("ungrouped", 0),
        ("ungrouped", 1),
        ("raw", 0),
        ("raw", 1),
    ],
)
def test_next_interrupted_at_any_point_goes_on_with_the_batch_of_the_step(kind, taken):
    # Where a number of batches were taken, so that all is yet to begin, or a block is there, or another
    # is needed. Interrupted at the first point, then, all anew, at the second, and so on to the last: the
    # step and the batch change hands within two of them.
    point, moved, was_interrupted = 0, set(), False
    with make_loader(kind) as loader:
        beginning = loader.get_state()
        for _ in range(taken):
            next(loader)
        while was_interrupted or moved != {0, 1}:
            was_interrupted = interrupted(lambda: check_is_of_step(loader, next(loader), taken), point)
            # The batch was handed out or it was not, and the state says which.
            assert loader.step in ((taken, taken + 1) if was_interrupted else (taken + 1,))
            assert loader.get_state()["step"] == loader.step
            if was_interrupted:
                moved.add(loader.step - taken)
            # It has fewer points where it need not wait for the block, and did before.
            point = point + 1 if was_interrupted else max(0, point - 10)
            check_next_batches(loader, 2 * GROUP + 1)
            loader.set_state(beginning)
            for _ in range(taken):
                next(loader)
    assert point > 50


@pytest.mark.parametrize("kind", KINDS)
def test_interrupts_that_follow_each_other_lose_nothing(kind):
    # Each next() is interrupted some points later than the one before, whatever that has left behind.
    def next_batch():
        check_is_of_step(loader, next(loader), step)

    with make_loader(kind) as loader:
        for stride in (7, 11, 13, 17, 23, 29, 31, 37):
            point, step = 0, loader.step
            while interrupted(next_batch, point):
                assert loader.step in (step, step + 1)
                point, step = point + stride, loader.step
            check_next_batches(loader, GROUP)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_batches_of_a_plan_are_not_lost_and_the_end_stays_the_end(kind):
    plan = tl.SequentialWindows()  # of 25 windows, so of 9 steps
    point, handed_out = FIRST[kind], []
    with make_loader(kind, plan) as loader:
        for _ in range(8):
            next(loader)
        before_the_last = loader.get_state()
        while interrupted(lambda: handed_out.extend(loader), point):
            if not handed_out and loader.step == 8:
                check_next_batches(loader, 1)
            assert loader.step == 9
            with pytest.raises(StopIteration):
                next(loader)
            loader.set_state(before_the_last)
            handed_out.clear()
            point += STRIDE
        assert (len(handed_out), loader.step) == (1, 9)
        check_is_of_step(loader, handed_out[0], 8)
    assert point > 50


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_whose_arrival_is_interrupted_comes_at_the_next_batch_or_is_made_good(kind):
    failures = 0

    def fail():
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError("disk on fire")

    def next_fails():
        with pytest.raises(OSError, match="disk on fire"):
            next(loader)

    point, outcomes = FIRST[kind], set()
    with make_loader(kind, tokens=watched_tokens(fail, TOKENS)) as loader:
        beginning = loader.get_state()
        failures = 2 if kind == "grouped" else 1  # of the group, and of its first step alone
        while interrupted(next_fails, point):
            assert loader.step == 0
            try:
                check_next_batches(loader, 1)
                outcomes.add("made good")
            except OSError:
                outcomes.add("comes again")
            check_next_batches(loader, GROUP)
            loader.set_state(beginning)
            failures = 2 if kind == "grouped" else 1
            point += STRIDE
        assert outcomes == {"made good", "comes again"}
        check_next_batches(loader, GROUP)
    assert point > 50


@pytest.mark.parametrize("kind", KINDS)
def test_set_state_interrupted_at_any_point_has_moved_or_not(kind):
    with make_loader(kind) as loader:
        states = []
        for _ in range(8):
            states.append(loader.get_state())
            next(loader)
        point = FIRST[kind]
        loader.set_state(states[2])
        next(loader)
        while interrupted(lambda: loader.set_state(states[7]), point, within="tokenloader.loader"):
            assert loader.step in (3, 7)
            check_next_batches(loader, 1)
            loader.set_state(states[2])
            next(loader)
            point += STRIDE
        assert loader.step == 7
        check_next_batches(loader, GROUP)
    assert point > 50


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_while_the_thread_is_being_ended_does_not_hang_the_next_batch(kind, monkeypatch):
    stop = Prefetcher.stop

    def interrupted_stop(self, *, wait=True):
        stop(self, wait=False)
        if wait:
            raise KeyboardInterrupt

    with make_loader(kind) as loader:
        next(loader)
        state = loader.get_state()
        with monkeypatch.context() as patches:
            patches.setattr(Prefetcher, "stop", interrupted_stop)
            with pytest.raises(KeyboardInterrupt):
                loader.set_state(state)
        check_next_batches(loader, 7)


@pytest.mark.parametrize(
    ("kind", "taken"), [("grouped", 0), ("grouped", GROUP), ("ungrouped", 1), ("raw", 1)]
)
def test_close_at_any_point_of_next_ends_it_and_the_thread(kind, taken, own_threads):
    # As a signal handler calls close(), between any two bytecodes; another thread can do nothing else.
    def next_batch():
        try:
            next(loader)
        except ValueError as error:
            if CLOSED not in str(error):
                raise

    point, was_closed = (FIRST[kind] + taken) % STRIDE, True
    while was_closed:
        with make_loader(kind) as loader:
            for _ in range(taken):
                next(loader)
            was_closed = interrupted(next_batch, point, instead=loader.close)
        with pytest.raises(ValueError, match=CLOSED):
            next(loader)
        assert eventually(lambda: own_threads() == [])
        point += STRIDE
    assert point > 50
