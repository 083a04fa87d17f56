"""The background's work as a plain generator: which step, in which order of announcing and gathering."""

import itertools
import types

import jax
import numpy as np
import pytest

from tokenloader import RandomWindows, SequentialWindows, ShuffledEpochs, open_tokens
from tokenloader.loader import pipeline as _pipeline
from tokenloader.loader.pipeline import (
    _GROUPS_WITHOUT_MISS,
    _PLAN_SAMPLES,
    LookAhead,
    group_size,
    look_ahead_depth,
    plan_steps,
    produce,
)
from tokenloader.loader.sharding import place
from tokenloader.loader.stats import Counters

N, T = 1000, 9


def steps_of(plan, batch_size, sample=0, end=None, *, group=1, num_tokens=N, seq_len=T):
    placement = place(None, batch_size, seq_len)
    return plan_steps(plan, num_tokens, placement, group, sample, end)


def take(steps, n):
    return [next(steps) for _ in range(n)]


@pytest.mark.parametrize("plan", [RandomWindows(3), ShuffledEpochs(3), SequentialWindows()])
@pytest.mark.parametrize("batch_size", [1, 7, 4096, 5000])
@pytest.mark.parametrize("sample", [0, 5, 10**14])
def test_each_step_is_the_plan_at_its_own_samples(plan, batch_size, sample):
    num_steps = min(50, 2 * _PLAN_SAMPLES // batch_size + 3)
    for i, step in enumerate(take(steps_of(plan, batch_size, sample), num_steps)):
        first = sample + i * batch_size
        samples = np.arange(first, first + batch_size)
        assert step.sample == first
        np.testing.assert_array_equal(
            step.starts, plan.bind(N, T).window_starts(samples)[None], strict=True
        )


def test_steps_do_not_change_where_one_computation_of_the_plan_meets_the_next():
    plan, batch_size = ShuffledEpochs(0), 1000  # four steps a computation
    steps = take(steps_of(plan, batch_size), 20)
    np.testing.assert_array_equal(
        np.concatenate([step.starts[0] for step in steps]),
        plan.bind(N, T).window_starts(np.arange(20_000)),
    )


@pytest.mark.parametrize(
    ("sample", "end", "batch_size", "firsts"),
    [
        (0, 10, 5, [0, 5]),
        (0, 11, 5, [0, 5, 10]),
        (0, 1, 5, [0]),
        (7, 10, 1, [7, 8, 9]),
        (10, 10, 5, []),
        (11, 10, 5, []),
    ],
)
def test_no_step_begins_at_the_end_or_later(sample, end, batch_size, firsts):
    steps = steps_of(RandomWindows(0), batch_size, sample, end)
    assert [step.sample for step in steps] == firsts


def test_a_plan_with_new_targets_has_them_in_each_step_as_int32_columns():
    steps = list(steps_of(SequentialWindows(), 2, 0, 3, num_tokens=25, seq_len=10))
    assert [step.starts.tolist() for step in steps] == [[[0, 10]], [[14, 14]]]
    assert [step.new_targets.tolist() for step in steps] == [[[[10], [10]]], [[[4], [0]]]]
    assert all(step.new_targets.dtype == np.int32 for step in steps)


def test_a_plan_without_new_targets_has_none():
    assert next(steps_of(RandomWindows(0), 2)).new_targets is None


class RecordingTokens:
    """Tokens that write down what is asked of them."""

    def __init__(self, array, cached=False):
        self.tokens, self.log, self.cached = open_tokens(array), [], cached
        self.dtype = self.tokens.dtype

    def is_cached(self, start):
        return self.cached

    def prefetch(self, starts, length):
        self.log.append(("prefetch", starts.tolist(), length))

    def gather(self, starts, length):
        self.log.append(("gather", starts.tolist(), length))
        return self.tokens.gather(starts, length)


def run(tokens, plan, batch_size, end, counters=None, group=1):
    return produce(
        tokens,
        steps_of(plan, batch_size, end=end, group=group),
        place(None, batch_size, T),
        group,
        counters or Counters(),
    )


def test_each_step_is_announced_once_in_order_and_well_before_it_is_gathered(monkeypatch):
    monkeypatch.setattr(_pipeline, "_AHEAD_WINDOWS", 16)
    tokens, num_steps, batch_size = RecordingTokens(np.arange(N, dtype=np.uint16)), 30, 2
    blocks = run(tokens, RandomWindows(0), batch_size, num_steps * batch_size)
    for gathered in range(1, num_steps + 1):
        next(blocks)
        kinds = [kind for kind, *_ in tokens.log]
        assert kinds.count("gather") == gathered
        assert kinds.count("prefetch") == min(num_steps, gathered + 8)
    assert list(blocks) == []
    announced = [windows for kind, *windows in tokens.log if kind == "prefetch"]
    assert announced == [windows for kind, *windows in tokens.log if kind == "gather"]
    # The first gather comes after the first announcements, and not before.
    assert [kind for kind, *_ in tokens.log[:10]] == ["prefetch"] * 9 + ["gather"]


@pytest.mark.parametrize(
    ("batch_size", "window_bytes", "steps"),
    [
        (32, 2050, 16),  # 512 windows
        (1, 2050, 512),
        (8, 2050, 64),
        (256, 2050, 2),
        (5000, 2050, 2),  # never fewer than two batches
        (8, 1 << 20, 4),  # 32 MiB
        (1, 1 << 40, 2),
    ],
)
def test_the_depth_keeps_the_disk_busy_and_is_bounded_in_bytes(batch_size, window_bytes, steps):
    assert look_ahead_depth(batch_size, window_bytes) == steps


def announced_steps(look_ahead, tokens, num_steps):
    """Of the next steps, which were announced at all: [bool]."""
    steps = [look_ahead.next_steps() for _ in range(num_steps)]
    announced = [starts for kind, starts, _ in tokens.log if kind == "prefetch"]
    return [step.starts[0].tolist() in announced for step in steps]


def endless(tokens):
    return LookAhead(tokens, steps_of(RandomWindows(0), 5), place(None, 5, T), 4)


def test_cached_data_is_soon_no_longer_announced():
    tokens = RecordingTokens(np.arange(N, dtype=np.uint16), cached=True)
    found = announced_steps(endless(tokens), tokens, 3 * _GROUPS_WITHOUT_MISS)
    assert found == [True] * _GROUPS_WITHOUT_MISS + [False] * 2 * _GROUPS_WITHOUT_MISS


def test_data_that_is_not_cached_is_announced_without_end():
    tokens = RecordingTokens(np.arange(N, dtype=np.uint16))
    assert all(announced_steps(endless(tokens), tokens, 5 * _GROUPS_WITHOUT_MISS))


@pytest.mark.parametrize("found_by", ["probe", "fault"])
def test_announcing_begins_again_when_the_cache_is_lost_and_ends_when_it_is_back(found_by):
    tokens = RecordingTokens(np.arange(N, dtype=np.uint16), cached=True)
    look_ahead = endless(tokens)
    assert not announced_steps(look_ahead, tokens, 2 * _GROUPS_WITHOUT_MISS)[-1]
    if found_by == "fault":
        look_ahead.missed()
    else:
        tokens.cached = False
        announced_steps(look_ahead, tokens, 1)
        tokens.cached = True
    found = announced_steps(look_ahead, tokens, 2 * _GROUPS_WITHOUT_MISS)
    assert True in found
    assert sum(found) <= _GROUPS_WITHOUT_MISS
    assert not found[-1]


def test_a_fault_while_gathering_counts_as_a_miss(monkeypatch):
    monkeypatch.setattr(_pipeline, "_AHEAD_WINDOWS", 16)
    faults = itertools.chain([0, 0] * 100, [0, 1], itertools.repeat(0))
    monkeypatch.setattr(_pipeline, "_major_page_faults", lambda: next(faults))
    tokens = RecordingTokens(np.arange(N, dtype=np.uint16), cached=True)
    list(run(tokens, RandomWindows(0), 2, 400))
    kinds = [kind for kind, *_ in tokens.log]
    assert kinds.count("gather") == 200
    assert kinds.count("prefetch") == 2 * _GROUPS_WITHOUT_MISS


def test_blocks_are_the_windows_in_order_with_their_sample():
    array = np.random.default_rng(0).integers(0, 2**16, N).astype(np.uint16)
    blocks = run(open_tokens(array), ShuffledEpochs(1), 3, 60)
    for i, block in enumerate(blocks):
        starts = ShuffledEpochs(1).bind(N, T).window_starts(np.arange(3 * i, 3 * i + 3))
        assert block.sample == 3 * i
        assert isinstance(block.tokens, jax.Array)
        assert block.tokens.dtype == np.uint16
        np.testing.assert_array_equal(
            block.tokens, np.stack([array[s : s + T + 1] for s in starts])
        )
        assert block.new_targets is None
    assert i == 19


@pytest.mark.parametrize("plan", [ShuffledEpochs(1), SequentialWindows()], ids=repr)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 40])
def test_steps_that_are_sent_as_one_are_the_steps_one_by_one(plan, group):
    array = np.random.default_rng(0).integers(0, 2**16, N).astype(np.uint16)
    singly = list(run(open_tokens(array), plan, 3, 60))
    grouped = list(run(open_tokens(array), plan, 3, 60, group=group))
    assert [block.sample for block in grouped] == [3 * i for i in range(0, 20, group)]
    assert sum(block.num_steps for block in grouped) == len(singly) == 20
    # The last is filled up, so that its shape is that of the others.
    assert {block.tokens.shape for block in grouped} == {
        (3, T + 1) if group == 1 else (group, 3, T + 1)
    }
    for i, one in enumerate(singly):
        block, at = grouped[i // group], i % group
        assert at < block.num_steps
        several = block.tokens if group > 1 else block.tokens[None]
        np.testing.assert_array_equal(several[at], one.tokens)
        if one.new_targets is not None:
            counts = block.new_targets if group > 1 else block.new_targets[None]
            np.testing.assert_array_equal(counts[at], one.new_targets)


def test_what_precedes_an_error_in_a_group_is_sent_before_it_is_raised():
    class Torn(RecordingTokens):
        def gather(self, starts, length):
            if starts.max() + length > 500:
                raise OSError("torn at 500")
            return super().gather(starts, length)

    array = np.arange(N, dtype=np.uint16)
    blocks = run(Torn(array), SequentialWindows(), 2, 1000, group=4)
    # Windows of 10 tokens, 9 apart: the last that is whole is number 54, in step 27 of the group 24-27.
    sent = take(blocks, 6)
    assert [block.num_steps for block in sent] == [4] * 6
    alone = take(blocks, 3)
    assert [(block.sample, block.num_steps) for block in alone] == [(48, 1), (50, 1), (52, 1)]
    assert {block.tokens.shape for block in alone} == {(4, 2, T + 1)}
    assert alone[-1].tokens[0, :, 0].tolist() == [52 * 9, 53 * 9]
    with pytest.raises(OSError, match="torn at 500"):
        next(blocks)


@pytest.mark.parametrize(
    ("batch_bytes", "prefetch", "group"),
    [
        (1, 1, 1),
        (1, 2, 2),
        (1, 3, 2),
        (1, 8, 5),
        (65_600, 8, 3),  # 256 KiB
        (65_600, 2, 2),
        (131_072, 2, 2),
        (131_073, 2, 1),
        (1 << 30, 8, 1),
    ],
)
def test_small_batches_are_sent_together_within_what_prefetch_allows(batch_bytes, prefetch, group):
    assert group_size(batch_bytes, prefetch) == group


def test_counters_are_the_seconds_and_faults_of_each_part(monkeypatch):
    times, faults = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0, 30.0, 38.0]), iter([5, 7, 7, 10])
    monkeypatch.setattr(_pipeline, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(_pipeline, "_major_page_faults", lambda: next(faults))
    counters = Counters()
    for _ in run(open_tokens(np.arange(N, dtype=np.uint16)), RandomWindows(0), 2, 4, counters):
        pass
    assert counters == Counters(
        gather_seconds=1.0 + 4.0, transfer_seconds=2.0 + 8.0, major_page_faults=2 + 3
    )


def test_major_page_faults_are_those_of_the_thread_where_the_system_tells(monkeypatch):
    asked = []

    def getrusage(who):
        asked.append(who)
        return types.SimpleNamespace(ru_majflt=42)

    fake = types.SimpleNamespace(getrusage=getrusage, RUSAGE_THREAD="this thread")
    monkeypatch.setattr(_pipeline, "resource", fake)
    monkeypatch.setattr(_pipeline, "sys", types.SimpleNamespace(platform="linux"))
    assert _pipeline._major_page_faults() == 42
    assert asked == ["this thread"]
    monkeypatch.setattr(_pipeline, "sys", types.SimpleNamespace(platform="darwin"))
    assert _pipeline._major_page_faults() == 0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda samples: list(samples[:-1]), r"int64\[4095\] for 4096"),
        (lambda samples: samples / 2, r"float64\[4096\] for 4096"),
        (lambda samples: None, r"object\[\] for 4096"),
    ],
)
def test_a_plan_whose_starts_are_not_one_integer_a_sample_is_an_error_that_names_it(given, named):
    class Mine:
        def __repr__(self):
            return "Mine()"

        def starts(self, samples, *, num_tokens, seq_len):
            return given(samples)

    with pytest.raises(ValueError, match=rf"^Mine\(\): starts gave {named} samples"):
        next(steps_of(Mine(), 2))


def test_starts_may_be_a_list():
    class Mine:
        def starts(self, samples, *, num_tokens, seq_len):
            return [int(sample) % 7 for sample in samples]

    assert next(steps_of(Mine(), 3, 5)).starts.tolist() == [[5, 6, 0]]
