"""The background's work as a plain generator: the blocks, in which order they are read, and errors."""

import gc
import itertools
import resource
import sys
import types
import weakref

import jax
import numpy as np
import pytest
from helpers import OverProcesses, RecordedTokens, naive_gather
from jax.sharding import SingleDeviceSharding
from token_files import write_npy

from tokenloader import RandomWindows, SequentialWindows, ShuffledBlocks, ShuffledEpochs, open_tokens
from tokenloader.loader.pipeline import produce
from tokenloader.loader.read_ahead import GROUPS_WITHOUT_MISS
from tokenloader.loader.sharding import resolve_sharding
from tokenloader.loader.stats import Counters, count_disk_reads, count_page_faults
from tokenloader.plans.cursor import BatchSizeSchedule, Cursor

N, T = 1000, 9
TOKENS = np.random.default_rng(0).integers(0, 2**16, N).astype(np.uint16)


def blocks_of(tokens, plan, batch_size, stop_step, *, group=1, counters=None, **injected):
    """The blocks of the first steps of a run on one device."""
    placement = resolve_sharding(None, batch_size, T)
    cursor = Cursor(plan.bind(N, T), BatchSizeSchedule.constant(batch_size), 0, stop_step)
    return produce(tokens, cursor, placement, group, counters or Counters(), **injected)


@pytest.fixture
def path(tmp_path):
    """TOKENS in a file."""
    return write_npy(tmp_path / "t.npy", TOKENS)


BLOCKS = ShuffledBlocks(seed=0, block_tokens=90, open_blocks=4)


@pytest.mark.parametrize("group", [1, 4])
def test_blocks_are_loaded_before_the_gather_of_their_step_and_no_window_is_announced(path, group):
    recorded = RecordedTokens(path, cached=False)
    for _ in blocks_of(recorded.tokens, BLOCKS, 2, 100, group=group):
        pass
    assert recorded.asked("prefetch") == []
    loaded = set()
    for kind, starts, length in recorded.log:
        if kind == "load":
            assert (starts[0], length) not in loaded
            loaded.add((starts[0], length))
        else:
            for start in starts:
                assert any(at <= start and start + T + 1 <= at + size for at, size in loaded)
    assert len(loaded) > 20


def test_windows_are_announced_where_a_block_was_evicted_before_its_time(path):
    reads = itertools.chain([0, 0] * 100, [0, 1], itertools.repeat(0))
    recorded = RecordedTokens(path)
    counters = Counters(count_reads=reads.__next__)
    for _ in blocks_of(recorded.tokens, BLOCKS, 2, 200, ahead_windows=16, counters=counters):
        pass
    assert len(recorded.asked("prefetch")) == GROUPS_WITHOUT_MISS
    assert recorded.asked("prefetch")[0] == recorded.asked("gather")[101 + 8]


def test_each_step_is_announced_once_in_order_and_well_before_it_is_gathered():
    recorded, num_steps = RecordedTokens(TOKENS, cached=False), 30
    blocks = blocks_of(recorded.tokens, RandomWindows(0), 2, num_steps, ahead_windows=16)
    for gathered in range(1, num_steps + 1):
        next(blocks)
        assert len(recorded.asked("gather")) == gathered
        assert len(recorded.asked("prefetch")) == min(num_steps, gathered + 8)
    assert list(blocks) == []
    assert recorded.asked("prefetch") == recorded.asked("gather")
    # The first gather comes after the first announcements, and not before.
    assert [kind for kind, *_ in recorded.log[:10]] == ["prefetch"] * 9 + ["gather"]


def test_a_page_that_was_read_while_gathering_counts_as_a_miss():
    reads = itertools.chain([0, 0] * 100, [0, 1], itertools.repeat(0))
    recorded = RecordedTokens(TOKENS, cached=True)
    counters = Counters(count_reads=reads.__next__)
    for _ in blocks_of(recorded.tokens, RandomWindows(0), 2, 200, ahead_windows=16, counters=counters):
        pass
    assert len(recorded.asked("gather")) == 200
    assert len(recorded.asked("prefetch")) == 2 * GROUPS_WITHOUT_MISS


def test_blocks_are_the_windows_in_order_with_their_step():
    for step, block in enumerate(blocks_of(open_tokens(TOKENS), ShuffledEpochs(1), 3, 20)):
        starts = ShuffledEpochs(1).bind(N, T).window_starts(np.arange(3 * step, 3 * step + 3))
        assert (block.step, block.num_steps) == (step, 1)
        assert isinstance(block.tokens, jax.Array)
        assert block.tokens.dtype == np.uint16
        np.testing.assert_array_equal(block.tokens, naive_gather(TOKENS, starts, T + 1))
        assert block.valid_targets is None
    assert step == 19


@pytest.mark.parametrize("plan", [ShuffledEpochs(1), SequentialWindows()], ids=repr)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 40])
def test_steps_that_are_sent_as_one_are_the_steps_one_by_one(plan, group):
    singly = list(blocks_of(open_tokens(TOKENS), plan, 3, 20))
    grouped = list(blocks_of(open_tokens(TOKENS), plan, 3, 20, group=group))
    assert [block.step for block in grouped] == list(range(0, 20, group))
    assert sum(block.num_steps for block in grouped) == len(singly) == 20
    # The last is filled up, so that its shape is that of the others.
    assert {block.tokens.shape for block in grouped} == {(3, T + 1) if group == 1 else (group, 3, T + 1)}
    for i, one in enumerate(singly):
        block, at = grouped[i // group], i % group
        assert at < block.num_steps
        several = block.tokens if group > 1 else block.tokens[None]
        np.testing.assert_array_equal(several[at], one.tokens)
        assert (block.valid_targets is None) == (one.valid_targets is None)
        if one.valid_targets is not None:
            counts = block.valid_targets if group > 1 else block.valid_targets[None]
            np.testing.assert_array_equal(counts[at], one.valid_targets)


def test_a_block_is_held_by_whoever_took_it_alone_while_the_next_is_made():
    held = []

    def faults():
        if held:
            gc.collect()
            assert held[-1]() is None  # deleted on its device, too
        return 0

    counters = Counters(count_faults=faults)
    blocks = blocks_of(open_tokens(TOKENS), RandomWindows(0), 2, 4, counters=counters)
    for block in blocks:
        held.append(weakref.ref(block.tokens))
        del block
    assert len(held) == 4


def torn_at(token):
    """Tokens that are the numbers of their places, of which none from `token` on can be read."""
    tokens = open_tokens(np.arange(N, dtype=np.uint16))
    locate = tokens.locate

    def located(starts, length):
        windows = locate(starts, length)
        if max(starts) + length > token:
            windows = types.SimpleNamespace(
                is_cached=windows.is_cached, prefetch=windows.prefetch, copy=torn, is_mapped=False
            )
        return windows

    def torn():
        raise OSError(f"torn at {token}")

    tokens.locate = located
    return tokens


# Windows of 10 tokens, 9 apart, 2 a step: the last whole one before token 500 is the second of step 26, in
# the group of steps 24 to 27.


def test_steps_that_precede_an_error_in_a_group_are_sent_before_it_is_raised():
    blocks = blocks_of(torn_at(500), SequentialWindows(), 2, 500, group=4)
    sent = list(itertools.islice(blocks, 9))
    assert [(block.step, block.num_steps) for block in sent] == [
        *((step, 4) for step in range(0, 24, 4)),
        *((step, 1) for step in (24, 25, 26)),
    ]
    assert {block.tokens.shape for block in sent} == {(4, 2, T + 1)}
    for block in sent:
        first = 2 * 9 * block.step
        assert block.tokens[0, :, 0].tolist() == [first, first + 9]
    with pytest.raises(OSError, match="torn at 500") as caught:
        next(blocks)
    assert caught.value.__context__ is None  # one traceback, not two


def test_blocks_after_one_that_failed_once_go_on_with_the_next_steps():
    failures = iter([False, True])
    recorded = RecordedTokens(np.arange(N, dtype=np.uint16))
    locate = recorded.tokens.locate

    def sometimes(starts, length):
        windows = locate(starts, length)
        return types.SimpleNamespace(
            is_cached=windows.is_cached,
            prefetch=windows.prefetch,
            is_mapped=False,
            copy=lambda: 1 // 0 if next(failures, False) else windows.copy(),
        )

    recorded.tokens.locate = sometimes
    blocks = list(blocks_of(recorded.tokens, SequentialWindows(), 2, 10, group=4))
    assert [(block.step, block.num_steps) for block in blocks] == [
        (0, 4),
        *((step, 1) for step in (4, 5, 6, 7)),
        (8, 2),
    ]
    assert [int(block.tokens[0, 0, 0]) for block in blocks] == [0, 72, 90, 108, 126, 144]


def test_over_several_processes_a_group_that_fails_is_not_split():
    # This process alone would launch its steps one by one, and the others wait for it.
    placement = OverProcesses(SingleDeviceSharding(jax.devices()[0]), 2, T, 1)
    cursor = Cursor.begin(SequentialWindows().bind(N, T), 2)
    blocks = produce(torn_at(500), cursor, placement, 4, Counters())
    sent = [(block.step, block.num_steps) for block in itertools.islice(blocks, 6)]
    assert sent == [(step, 4) for step in range(0, 24, 4)]
    with pytest.raises(OSError, match="torn at 500"):
        next(blocks)


def test_counters_are_the_seconds_and_faults_of_each_part():
    times, faults = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0, 30.0, 38.0]), iter([5, 7, 7, 10])
    counters = Counters(clock=times.__next__, count_faults=faults.__next__)
    for _ in blocks_of(open_tokens(TOKENS), RandomWindows(0), 2, 2, counters=counters):
        pass
    assert counters.gathering.seconds == 1.0 + 4.0
    assert counters.transferring.seconds == 2.0 + 8.0
    assert counters.major_page_faults == 2 + 3
    assert (counters.batches, counters.waiting.seconds) == (0, 0.0)  # the caller's


@pytest.mark.parametrize(
    ("count", "field"), [(count_page_faults, "ru_majflt"), (count_disk_reads, "ru_inblock")]
)
def test_faults_and_reads_are_those_of_the_thread_where_the_system_tells(count, field, monkeypatch):
    asked = []

    def getrusage(who):
        asked.append(who)
        return types.SimpleNamespace(**{field: 42})

    monkeypatch.setattr(resource, "getrusage", getrusage)
    monkeypatch.setattr(resource, "RUSAGE_THREAD", "this thread", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert count() == 42
    assert asked == ["this thread"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert count() == 0
