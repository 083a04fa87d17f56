"""The thread of a loader: its bound, its end, and what is freed with it."""

import contextlib
import errno
import gc
import itertools
import threading
import time
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import eventually, planned_rows, random_tokens, watched_tokens

import tokenloader as tl
from tokenloader.loader.prefetch import Prefetcher
from tokenloader.storage.ram import RamFill
from tokenloader.tokens.opening import join

TOKENS = random_tokens()
N = len(TOKENS)
rows_of = partial(planned_rows, TOKENS)


def test_nothing_is_read_and_no_thread_started_before_the_first_next(own_threads):
    made = []
    tl.TokenLoader(watched_tokens(lambda: made.append(1), TOKENS), 2, 4)
    time.sleep(0.02)
    assert (made, own_threads()) == ([], [])


@pytest.mark.parametrize(("prefetch", "group"), [(1, 1), (2, 2), (3, 2), (5, 3), (8, 5)])
def test_never_more_than_prefetch_and_one_batches_are_made_beyond_those_taken(prefetch, group):
    made = []  # an entry for a gather, which is of a group
    with tl.TokenLoader(watched_tokens(lambda: made.append(1), TOKENS), 2, 4, prefetch=prefetch) as loader:
        for taken in range(1, 2 * group + 3):
            next(loader)
            groups = -(-taken // group) + prefetch // group
            assert groups * group <= taken + prefetch + 1
            assert eventually(lambda groups=groups: len(made) == groups)
            time.sleep(0.01)
            assert len(made) == groups


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_blocks_that_are_handed_out_raw_are_made_one_by_one(prefetch):
    made = []
    with tl.TokenLoader(
        watched_tokens(lambda: made.append(1), TOKENS), 2, 4, prefetch=prefetch, transform=None
    ) as loader:
        for taken in range(1, 7):
            next(loader)
            assert eventually(lambda taken=taken: len(made) == taken + prefetch)
            time.sleep(0.01)
            assert len(made) == taken + prefetch


LARGE = 8, 9000  # 144,016 bytes a batch: sent alone, also with prefetch=2


def test_the_transform_of_a_large_batch_is_launched_while_the_one_before_it_is_used():
    launched = []

    def transform(block):
        jax.debug.callback(lambda: launched.append(1))
        return block

    with tl.TokenLoader(tl.open_tokens(random_tokens(100_000)), *LARGE, transform=transform) as loader:
        for step in range(50):  # the first batches may be asked for before the next is there
            np.testing.assert_array_equal(next(loader), loader.window_tokens(step))
            time.sleep(0.02)
            if len(launched) > loader.step:
                break
        assert len(launched) == loader.step + 1
        assert loader.stats.batches == loader.get_state()["step"] == step + 1


def test_an_error_of_a_transform_launched_early_comes_when_its_batch_is_asked_for():
    made, plan = [], tl.RandomWindows(seed=0)
    first_of_step_2 = int(plan.bind(100_000, LARGE[1]).window_starts([2 * LARGE[0]])[0])

    def nan_in_step_2(block):
        return jnp.where(block[0, 0] == first_of_step_2, jnp.nan, 1.0)

    tokens = watched_tokens(lambda: made.append(1), np.arange(100_000, dtype=np.uint32))
    with (
        jax.debug_nans(True),  # noqa: FBT003
        tl.TokenLoader(tokens, *LARGE, plan=plan, transform=nan_in_step_2) as loader,
    ):
        assert next(loader) == 1.0
        assert eventually(lambda: len(made) == 3)
        assert next(loader) == 1.0
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                next(loader)
            assert loader.step == 2


def test_a_slow_source_is_waited_for_and_the_wait_is_counted():
    with tl.TokenLoader(watched_tokens(lambda: time.sleep(0.03), TOKENS), 2, 10, transform=None) as loader:
        for step in range(4):
            np.testing.assert_array_equal(next(loader), rows_of(tl.ShuffledEpochs(0), 2 * step, 2, 10))
        stats = loader.stats
    assert stats.wait_seconds > 0.06
    assert stats.gather_seconds > 0.1


def test_next_after_close_is_an_error(tokens):
    loader = tl.TokenLoader(tokens, 2, 4)
    next(loader)
    loader.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="this TokenLoader was closed; make another"):
            next(loader)


def test_close_ends_the_thread_and_leaves_the_tokens_open(tokens, own_threads):
    loader = tl.TokenLoader(tokens, 2, 4)
    next(loader)
    assert len(own_threads()) == 1
    loader.close()
    assert own_threads() == []
    loader.close()
    assert tokens[:3].tolist() == TOKENS[:3].tolist()
    assert loader.stats.batches == loader.step == 1


def test_close_before_the_first_next_and_after_the_end_is_allowed(tokens):
    loader = tl.TokenLoader(tokens, 2, 4)
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    loader = tl.TokenLoader(tokens, 4, 200, plan=tl.SequentialWindows())
    list(loader)
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(iter(loader))


def test_a_with_block_closes_also_when_its_body_fails(tokens, own_threads):
    def fail(loader):
        with loader:
            next(loader)
            raise ZeroDivisionError

    loader = tl.TokenLoader(tokens, 2, 4)
    with pytest.raises(ZeroDivisionError):
        fail(loader)
    assert own_threads() == []
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def loader_whose_source_blocks():
    """A loader whose thread waits in its third gather, and the event that lets it go."""
    going, blocked = threading.Event(), threading.Event()
    calls = itertools.count()

    def block_from_the_third_on():
        if next(calls) >= 2:
            blocked.set()
            going.wait()

    loader = tl.TokenLoader(watched_tokens(block_from_the_third_on, TOKENS), 2, 4, transform=None)
    next(loader)
    blocked.wait()
    return loader, going


def test_close_while_the_source_blocks_returns_and_the_thread_ends_later(monkeypatch, own_threads):
    impatient = partial(Prefetcher, join_seconds=0.1)
    monkeypatch.setattr("tokenloader.loader.token_loader.Prefetcher", impatient)
    loader, going = loader_whose_source_blocks()
    loader.close()
    assert len(own_threads()) == 1
    going.set()
    assert eventually(lambda: own_threads() == [])


def test_close_on_another_thread_ends_a_next_that_waits_at_once():
    loader, going = loader_whose_source_blocks()
    next(loader)

    def close_soon():
        time.sleep(0.05)  # for next() to wait
        loader.close()

    closing = threading.Thread(target=close_soon)
    closing.start()
    with pytest.raises(ValueError, match="this TokenLoader was closed; make another"):
        next(loader)
    assert closing.is_alive()  # it waits for the source, which has not answered
    going.set()
    closing.join()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_seeking_ends_the_thread_before(tokens, own_threads):
    with tl.TokenLoader(tokens, 2, 4) as loader:
        for _ in range(3):
            state = loader.get_state()
            next(loader)
            loader.set_state(state)
            assert own_threads() == []


def test_an_abandoned_loader_is_collected_and_its_thread_ends(tokens, own_threads):
    gc.collect()
    gc.disable()  # mid-iteration no cycle holds it: del is enough
    try:
        loader = tl.TokenLoader(tokens, 2, 4)
        next(loader)
        ref = weakref.ref(loader)
        del loader
        assert ref() is None
        assert eventually(lambda: own_threads() == [])
    finally:
        gc.enable()


def test_a_loader_in_a_cycle_is_collected_and_its_thread_ends(tokens, own_threads):
    loader = tl.TokenLoader(tokens, 2, 4)
    next(loader)
    cycle = [loader]
    cycle.append(cycle)
    ref = weakref.ref(loader)
    del loader, cycle
    gc.collect()
    assert ref() is None
    assert eventually(lambda: own_threads() == [])


def test_a_loader_abandoned_while_its_source_blocks_is_collected_at_once(own_threads):
    loader, going = loader_whose_source_blocks()
    del loader
    assert len(own_threads()) == 1
    going.set()
    assert eventually(lambda: own_threads() == [])


@pytest.mark.parametrize("how", ["exhausted", "failed", "closed"])
def test_loader_and_tokens_are_freed_without_the_garbage_collector(how):
    # Tokens in RAM may be 19 GiB: they must go when the last name for them does.
    def use():
        calls = itertools.count()

        def fail():
            if how == "failed" and next(calls):
                raise OSError("disk on fire")

        tokens = watched_tokens(fail, TOKENS)
        loader = tl.TokenLoader(tokens, 4, 100, plan=tl.SequentialWindows())
        if how == "exhausted":
            for _ in loader:
                pass
        else:
            next(loader)
        if how == "failed":
            with contextlib.suppress(OSError):
                next(loader)
        if how == "closed":
            loader.close()
        return weakref.ref(loader), weakref.ref(tokens)

    gc.collect()
    gc.disable()
    try:
        loader, tokens = use()
        assert eventually(lambda: (loader(), tokens()) == (None, None), seconds=1)
    finally:
        gc.enable()


def test_two_loaders_over_the_same_tokens_do_not_disturb_each_other(tokens):
    plans = tl.ShuffledEpochs(0), tl.RandomWindows(0)
    with (
        tl.TokenLoader(tokens, 3, 10, plan=plans[0], transform=None) as a,
        tl.TokenLoader(tokens, 2, 20, plan=plans[1], transform=None) as b,
    ):
        for step in range(30):
            np.testing.assert_array_equal(next(a), rows_of(plans[0], 3 * step, 3, 10))
            np.testing.assert_array_equal(next(b), rows_of(plans[1], 2 * step, 2, 20))


def test_a_transform_that_holds_its_loader_does_not_keep_it(tokens, own_threads):
    class Trainer:
        def __init__(self, plan):
            self.loader = tl.TokenLoader(tokens, 4, 16, plan=plan, transform=self.transform)

        def transform(self, block):
            return tl.next_token(block)

    for plan in (tl.ShuffledEpochs(0), tl.SequentialWindows()):
        trainer = Trainer(plan)
        next(trainer.loader)
        loader = weakref.ref(trainer.loader)
        del trainer
        gc.collect()
        assert eventually(lambda loader=loader: loader() is None)
    assert eventually(lambda: own_threads() == [])


# Tokens in RAM


def test_closing_tokens_in_ram_frees_them_while_loaders_are_open(tmp_path, allocations):
    TOKENS.tofile(tmp_path / "t.bin")
    tokens = tl.open_tokens(tmp_path / "t.bin", dtype="uint16", residency="ram")
    with tl.TokenLoader(tokens, 2, 4) as loader, tl.TokenLoader(tokens.view(0, N), 2, 4) as other:
        first = next(loader)
        tokens.wait_until_loaded()
        next(loader), next(other)
        [memory] = allocations
        tokens.close()
        other.tokens.close()
        assert eventually(lambda: memory() is None)  # when the copy that is being made is done
        np.testing.assert_array_equal(first.inputs, rows_of(loader.plan, 0, 2, 4)[:, :-1])
        with pytest.raises(ValueError, match="it was closed"):
            list(itertools.islice(loader, 10))


def test_a_loader_goes_on_from_the_mapped_file_where_reading_it_into_ram_fails(tmp_path, caplog):
    TOKENS.tofile(tmp_path / "t.bin")

    def fails(file, *_):
        raise OSError(errno.EIO, "disk on fire", str(file.name))

    extents = tl.open_tokens(tmp_path / "t.bin", dtype="uint16").extents
    tokens = join(extents, "ram", start_fill=partial(RamFill, read=fails))
    with tl.TokenLoader(tokens, 2, 4) as loader:
        for step in range(20):
            np.testing.assert_array_equal(next(loader).inputs, rows_of(loader.plan, 2 * step, 2, 4)[:, :-1])
    assert [record.message.split("; ")[0] for record in caplog.records if record.name == "tokenloader"] == [
        f"{tmp_path / 't.bin'}: disk on fire"
    ]
