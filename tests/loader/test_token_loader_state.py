"""The position of a loader: states, resuming, and the windows of any step."""

import collections
import itertools
import json
import os
from functools import partial

import numpy as np
import pytest
from helpers import (
    NAMED_PLANS,
    PLANS,
    SOURCES,
    eventually,
    naive_gather,
    planned_rows,
    random_tokens,
    watched_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenloader as tl
from tokenloader.plans.cursor import BatchSizeSchedule, probe

TOKENS = random_tokens()
N = len(TOKENS)
rows_of = partial(planned_rows, TOKENS)


def json_state(loader):
    return json.loads(json.dumps(loader.get_state()))


def test_the_state_counts_batches_handed_out_and_not_those_made():
    made = []
    with tl.TokenLoader(
        watched_tokens(lambda: made.append(1), TOKENS), 3, 10, prefetch=4, transform=None
    ) as loader:
        assert loader.step == 0
        next(loader)
        assert eventually(lambda: len(made) == 5)
        state = loader.get_state()
    assert state == {
        "version": 2,
        "step": 1,
        "sample": 3,
        "batch_sizes": "0:0:3",
        "seq_len": 10,
        "plan": "ShuffledEpochs(seed=0)",
        "probe": probe(tl.ShuffledEpochs(0).bind(N, 10), 3),
        "data": tl.open_tokens(TOKENS).fingerprint(),
    }
    assert len(json.dumps(state)) < 250


def test_a_state_is_flat_and_holds_integers_and_strings_only(tokens):
    plan = tl.Mixture({range(500): 3, range(500, N): 1}, tl.ShuffledEpochs(3))
    state = None
    for batch_size in (1, 4, 2):
        with tl.TokenLoader(tokens, batch_size, 10, plan=plan) as loader:
            if state:
                loader.set_state(state)
            next(loader)
            state = loader.get_state()
        assert {type(value) for value in state.values()} == {int, str}
    assert state["batch_sizes"] == "0:0:1 1:1:4 2:5:2"


def test_step_counts_the_batches_handed_out_since_the_run_began(tokens):
    with tl.TokenLoader(tokens, 4, 100, plan=tl.SequentialWindows()) as loader:
        assert loader.step == 0
        for step, _ in enumerate(loader):
            assert loader.step == step + 1
        assert loader.step == 3  # also at the end
        iter(loader)
        assert loader.step == 0
        next(loader)
        state = loader.get_state()
    assert loader.step == 1  # also when it is closed
    with tl.TokenLoader(tokens, 2, 100, plan=tl.SequentialWindows()) as loader:
        loader.set_state(state)
        assert loader.step == 1
        next(loader)
        assert loader.step == 2
        with pytest.raises(AttributeError):
            loader.step = 5


class Hidden(tl.Plan):
    """A plan whose key hides what decides its windows."""

    def __init__(self, shift):
        self.shift = shift

    def bind(self, num_tokens, seq_len):
        return BoundHidden(self.shift, num_tokens - seq_len)


class BoundHidden(tl.BoundPlan):
    num_samples = None

    def __init__(self, shift, num_starts):
        self.shift, self.num_starts = shift, num_starts

    def window_starts(self, samples):
        return (samples * 10 + self.shift) % self.num_starts

    def key(self, until_sample):
        return "Hidden()"


def test_a_plan_of_an_equal_key_and_other_windows_is_refused_or_warned_of(tokens):
    with tl.TokenLoader(tokens, 2, 10, plan=Hidden(0), transform=None) as there:
        next(there)
        state = there.get_state()
    with tl.TokenLoader(tokens, 2, 10, plan=Hidden(0)) as alike:
        alike.set_state(state)
    with tl.TokenLoader(tokens, 2, 10, plan=Hidden(1), transform=None) as here:
        told = rf"probe: saved {state['probe']}, here \w{{16}}: Hidden\(\) draws other windows here"
        with pytest.raises(ValueError, match=told):
            here.set_state(state)
        assert here.step == 0
        with pytest.warns(UserWarning, match=told):
            here.set_state(state, strict=False)
        np.testing.assert_array_equal(next(here), rows_of(Hidden(1), 2, 2, 10))


@settings(deadline=None, max_examples=80)
@given(
    plan=st.sampled_from(PLANS),
    legs=st.lists(
        st.tuples(
            st.integers(0, 9),  # batches taken
            st.sampled_from([1, 2, 3, 5]),  # batch_size
            st.integers(1, 5),  # prefetch
            st.sampled_from(SOURCES),
        ),
        min_size=2,
        max_size=4,
    ),
    to_the_end=st.booleans(),
)
def test_a_resumed_run_goes_on_in_order_whatever_changed_at_the_cut(sources, plan, legs, to_the_end):
    # 8 windows an epoch, so that the cuts lie around the ends of epochs.
    seq_len, state, steps, rows = 100, None, 0, [np.zeros((0, 101), np.uint16)]
    finite = plan.bind(N, seq_len).num_samples
    for i, (count, batch_size, prefetch, source) in enumerate(legs):
        with tl.TokenLoader(
            sources[source], batch_size, seq_len, plan=plan, prefetch=prefetch, transform=None
        ) as loader:
            if state is not None:
                loader.set_state(state)
            all_of_it = to_the_end and finite and i == len(legs) - 1
            blocks = list(itertools.islice(loader, None if all_of_it else count))
            rows, steps = rows + blocks, steps + len(blocks)
            state = json_state(loader)
            assert state["step"] == steps
            assert state["sample"] == sum(map(len, rows))
    rows = np.concatenate(rows)
    np.testing.assert_array_equal(rows, rows_of_or_none(plan, len(rows), seq_len))
    if all_of_it and plan != tl.SequentialWindows():
        assert finite - batch_size < len(rows) <= finite
    if all_of_it and plan == tl.SequentialWindows():
        assert len(rows) >= finite


def rows_of_or_none(plan, count, seq_len):
    return rows_of(plan, 0, count, seq_len) if count else np.zeros((0, seq_len + 1), np.uint16)


def test_set_state_rewinds_a_running_loader_and_one_that_has_ended(tokens):
    plan = tl.SequentialWindows()
    with tl.TokenLoader(tokens, 1, 100, plan=plan, transform=None) as loader:
        next(loader)
        state = loader.get_state()
        for _ in range(2):
            rest = list(loader)
            np.testing.assert_array_equal(np.concatenate(rest), rows_of(plan, 1, 9, 100))
            loader.set_state(state)
        next(loader)
        loader.set_state(state)
        np.testing.assert_array_equal(next(loader), rows_of(plan, 1, 1, 100))


def test_a_state_saved_at_the_end_resumes_at_the_end(tokens):
    with tl.TokenLoader(tokens, 4, 60, plan=tl.SequentialWindows()) as loader:
        list(loader)
        state = loader.get_state()
    with tl.TokenLoader(tokens, 4, 60, plan=tl.SequentialWindows()) as loader:
        loader.set_state(state)
        assert list(loader) == []
        assert len(list(loader)) > 0  # and another for is another pass


def test_a_run_may_be_resumed_with_more_epochs(tokens):
    with tl.TokenLoader(tokens, 3, 100, plan=tl.ShuffledEpochs(7, num_epochs=1), transform=None) as loader:
        blocks = list(loader)
        state = json_state(loader)
    more = tl.ShuffledEpochs(7, num_epochs=3)
    with tl.TokenLoader(tokens, 3, 100, plan=more, transform=None) as loader:
        loader.set_state(state)
        blocks += list(loader)
    assert len(blocks) == 8
    np.testing.assert_array_equal(np.concatenate(blocks), rows_of(more, 0, 24, 100))


def test_a_state_of_another_run_is_refused_with_each_difference_and_nothing_moves(tokens):
    other = TOKENS[:-1].astype(np.uint32)
    with (
        tl.TokenLoader(tokens, 2, 10, plan=tl.RandomWindows(1), transform=None) as here,
        tl.TokenLoader(tl.open_tokens(other), 2, 20, plan=tl.ShuffledEpochs(9)) as there,
    ):
        next(here)
        with pytest.raises(ValueError, match="this state is of another run") as caught:
            here.set_state(there.get_state())
        message = str(caught.value)
        assert "plan: saved ShuffledEpochs(seed=9), here RandomWindows(seed=1)" in message
        assert "seq_len: saved 20, here 10" in message
        assert f"data: saved uint32:{N - 1}:" in message
        assert f"here uint16:{N}:" in message
        assert "another dtype and another number of tokens and other contents" in message
        assert message.endswith("begin anew without set_state; strict=False goes on all the same")
        assert here.get_state()["step"] == 1
        np.testing.assert_array_equal(next(here), rows_of(tl.RandomWindows(1), 2, 2, 10))


def test_a_state_of_another_run_is_gone_on_with_if_asked_and_warned_of(tokens):
    plan = tl.RandomWindows(1)
    with tl.TokenLoader(tokens, 2, 20, plan=tl.ShuffledEpochs(9)) as there:
        next(there)
        state = there.get_state()
    with tl.TokenLoader(tokens, 3, 10, plan=plan, transform=None) as here:
        with pytest.warns(UserWarning, match="going on from step 1 of another run") as caught:
            here.set_state(state, strict=False)
        assert caught[0].filename == __file__
        lines = str(caught[0].message).splitlines()
        assert [line.split(": ")[0].strip() for line in lines[1:]] == ["plan", "seq_len"]
        assert "saved ShuffledEpochs(seed=9), here RandomWindows(seed=1)" in lines[1]
        assert "saved 20, here 10" in lines[2]
        np.testing.assert_array_equal(next(here), rows_of(plan, 2, 3, 10))
        assert here.get_state()["batch_sizes"] == "0:0:2 1:2:3"
        here.set_state(here.get_state())  # a state of this run from now on


def test_strict_or_not_the_state_of_the_same_run_is_not_warned_of(tokens):
    loader = tl.TokenLoader(tokens, 2, 20)
    loader.set_state(loader.get_state(), strict=False)


def test_not_being_strict_does_not_read_what_is_no_state(tokens):
    loader = tl.TokenLoader(tokens, 2, 10)
    with pytest.raises(ValueError, match="state has version 3; this tokenloader reads version 2"):
        loader.set_state({**loader.get_state(), "version": 3}, strict=False)
    with pytest.raises(ValueError, match="state: sample is 7, and 0 steps"):
        loader.set_state({**loader.get_state(), "sample": 7}, strict=False)


def test_changed_contents_of_the_same_length_are_refused(tokens):
    changed = TOKENS.copy()
    changed[-1] ^= 1
    state = tl.TokenLoader(tl.open_tokens(changed), 2, 10).get_state()
    with pytest.raises(ValueError, match="other contents"):
        tl.TokenLoader(tokens, 2, 10).set_state(state)


def test_a_state_that_is_none_is_refused_as_such(tokens):
    loader = tl.TokenLoader(tokens, 2, 10)
    with pytest.raises(TypeError, match="state is of type NoneType"):
        loader.set_state(None)
    with pytest.raises(ValueError, match="state has version None"):
        loader.set_state({"epoch": 3})


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_window_starts_and_window_tokens_tell_past_present_and_future_steps(tokens, plan):
    with tl.TokenLoader(tokens, 3, 40, plan=plan, transform=None) as loader:
        foretold = [loader.window_tokens(step) for step in range(8)]
        blocks = [next(loader) for _ in range(8)]
        np.testing.assert_array_equal(foretold, blocks)
        for step, block in enumerate(blocks):
            np.testing.assert_array_equal(loader.window_tokens(step), block, strict=True)
            starts = loader.window_starts(step)
            assert (starts.dtype, starts.shape) == (np.int64, (3,))
            np.testing.assert_array_equal(naive_gather(TOKENS, starts, 41), block)
        assert loader.step == 8


def test_window_starts_read_nothing():
    tokens = tl.open_tokens(TOKENS)
    loader = tl.TokenLoader(tokens, 3, 40)
    expected = loader.window_starts(5)
    tokens.close()
    np.testing.assert_array_equal(loader.window_starts(5), expected)


def test_window_starts_know_the_steps_before_a_change_of_batch_size(tokens):
    plan, handed_out = tl.ShuffledEpochs(3), []
    with tl.TokenLoader(tokens, 2, 40, plan=plan, transform=None) as loader:
        handed_out += [next(loader) for _ in range(5)]
        state = json_state(loader)
    with tl.TokenLoader(tokens, 7, 40, plan=plan, transform=None) as loader:
        loader.set_state(state)
        handed_out += [next(loader) for _ in range(5)]
        for step, block in enumerate(handed_out):
            np.testing.assert_array_equal(loader.window_tokens(step), block)
        np.testing.assert_array_equal(
            loader.window_starts(10), plan.bind(N, 40).window_starts(range(45, 52))
        )
        state = json_state(loader)
    with tl.TokenLoader(tokens, 3, 40, plan=plan, transform=None) as loader:
        loader.set_state(state)
        np.testing.assert_array_equal(loader.window_tokens(10), next(loader))
        for step, block in enumerate(handed_out):
            np.testing.assert_array_equal(loader.window_tokens(step), block)


def test_window_starts_know_past_steps_near_the_end_of_a_finite_plan(tokens):
    # 8 windows: with batch_size=4 no batch begins at 6, with batch_size=1 one did.
    plan, handed_out = tl.ShuffledEpochs(0, num_epochs=1), []
    with tl.TokenLoader(tokens, 1, 100, plan=plan, transform=None) as loader:
        handed_out += [next(loader) for _ in range(7)]
        state = json_state(loader)
    with tl.TokenLoader(tokens, 4, 100, plan=plan, transform=None) as loader:
        loader.set_state(state)
        for step, block in enumerate(handed_out):
            np.testing.assert_array_equal(loader.window_tokens(step), block)
        with pytest.raises(ValueError, match="step 7 is past the end"):
            loader.window_starts(7)


@pytest.mark.parametrize("plan", PLANS[:2], ids=repr)
def test_a_run_of_a_billion_steps_is_addressed_and_resumed_at_once(tokens, plan):
    step = 10**9
    with tl.TokenLoader(tokens, 5, 10, plan=plan, transform=None) as loader:
        np.testing.assert_array_equal(loader.window_tokens(step), rows_of(plan, 5 * step, 5, 10))
        moved = {"step": step, "sample": 5 * step, "probe": probe(plan.bind(N, 10), 5 * step)}
        loader.set_state({**loader.get_state(), **moved})
        np.testing.assert_array_equal(next(loader), rows_of(plan, 5 * step, 5, 10))
        assert loader.step == step + 1


def test_window_starts_end_with_the_plan(tokens):
    plan = tl.ShuffledEpochs(0, num_epochs=2)  # 16 windows
    loader = tl.TokenLoader(tokens, 5, 100, plan=plan)
    assert loader.window_starts(2).shape == (5,)
    with pytest.raises(ValueError, match=r"step 3 is past the end: ShuffledEpochs\(seed=0\) ends before"):
        loader.window_starts(3)
    loader = tl.TokenLoader(tokens, 4, 100, plan=tl.SequentialWindows())  # 10 windows
    assert loader.window_starts(2).tolist() == [800, 896, 896, 896]
    with pytest.raises(ValueError, match=r"step 3 is past the end: SequentialWindows\(\) ends before"):
        loader.window_tokens(3)


@pytest.mark.parametrize("step", [-1, -(10**9)])
def test_a_negative_step_is_an_error(tokens, step):
    with pytest.raises(ValueError, match=f"step {step} is negative"):
        tl.TokenLoader(tokens, 5, 100).window_starts(step)


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_a_step_that_is_no_integer_is_a_type_error(tokens, step):
    with pytest.raises(TypeError, match=type(step).__name__):
        tl.TokenLoader(tokens, 5, 100).window_starts(step)


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_a_state_is_had_in_an_emergency_when_the_file_cannot_be_read_any_more(tmp_path, residency):
    path = tmp_path / "t.bin"
    TOKENS.tofile(path)
    tokens = tl.open_tokens(path, dtype="uint16", residency=residency)
    fresh, used = (tl.TokenLoader(tokens, 2, 9) for _ in range(2))
    expected = tl.TokenLoader(tl.open_tokens(TOKENS), 2, 9).get_state()
    next(used)
    os.truncate(path, 0)
    assert fresh.get_state() == expected
    assert used.get_state()["step"] == 1
    tokens.close()
    assert fresh.get_state() == expected
    fresh.set_state(used.get_state())
    assert fresh.step == 1


def test_a_loader_of_tokens_that_cannot_be_read_is_refused_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "t.bin"
    TOKENS.tofile(path)
    tokens = tl.open_tokens(path, dtype="uint16")
    os.truncate(path, 0)
    with pytest.raises(OSError, match="it has 0 bytes and had") as raised:
        tl.TokenLoader(tokens, 2, 9)
    assert raised.value.filename == str(path)


def test_the_state_of_each_batch_is_kept_where_another_iterator_takes_batches_ahead(tokens):
    def prefetched(batches, size):  # as flax.jax_utils.prefetch_to_device does
        queue = collections.deque(itertools.islice(batches, size))
        while queue:
            yield queue.popleft()
            queue.extend(itertools.islice(batches, 1))

    states = collections.deque()  # as get_state says to do it

    def with_states(loader):
        for batch in loader:
            states.append(loader.get_state())
            yield batch

    plan = tl.SequentialWindows()
    with tl.TokenLoader(tokens, 2, 100, plan=plan, transform=None) as loader:
        for step, _ in enumerate(prefetched(with_states(loader), 3), start=1):
            state = states.popleft()
            assert state["step"] == step
            if step == 1:
                assert loader.get_state()["step"] == 3  # which is where the wrapper is
                saved = state
    assert step == 5
    assert not states
    with tl.TokenLoader(tokens, 2, 100, plan=plan, transform=None) as loader:
        loader.set_state(saved)
        np.testing.assert_array_equal(next(loader), rows_of(plan, 2, 2, 100))


def test_batch_size_may_change_a_thousand_times_and_the_state_stays_small(tokens):
    schedule = BatchSizeSchedule.constant(1)
    for step in range(1, 1001):
        schedule = schedule.changed(step, 1 + step % 7)
    with tl.TokenLoader(tokens, 9, 10) as loader:
        state = loader.get_state()
        sample = schedule.samples(1000).start
        state |= {"step": 1000, "sample": sample, "batch_sizes": schedule.text}
        state["probe"] = probe(loader.plan.bind(N, 10), sample)
        loader.set_state(state)  # the last change was of step 1000, which this one takes the place of
        next(loader)
        saved = json_state(loader)
        assert len(json.dumps(saved)) < 15_000
        loader.set_state(saved)
    with tl.TokenLoader(tokens, 8, 10) as loader:
        with pytest.raises(ValueError, match=r"change 1,001 of .* go on with batch_size=9") as caught:
            loader.set_state(saved)
        assert "batch_size=8 from step 1001 on would" in str(caught.value)
        assert loader.step == 0


# The last positions that a state may have


@pytest.mark.parametrize("plan", NAMED_PLANS, ids=repr)
def test_a_loader_goes_on_from_the_last_position_that_a_state_may_have(tokens, plan):
    last = 2**62 - 5
    with tl.TokenLoader(tokens, 5, 20, plan=plan, transform=None) as loader:
        bound = plan.bind(N, 20)
        ended = bound.num_samples is not None
        moved = {
            "step": last // 5,
            "sample": last // 5 * 5,
            "plan": bound.key(last // 5 * 5),
            "probe": "0" * 16 if ended else probe(bound, last // 5 * 5),
        }
        loader.set_state({**loader.get_state(), **moved})
        handed_out = list(itertools.islice(loader, 3))
        for i, block in enumerate(handed_out):
            np.testing.assert_array_equal(block, loader.window_tokens(last // 5 + i))
        assert len(handed_out) == (0 if ended else 3)


@pytest.mark.parametrize("sample", [2**62, 2**63 - 8, 2**63 - 1])
def test_a_position_past_it_is_refused_where_the_state_is_read(tokens, sample):
    with tl.TokenLoader(tokens, 1, 20) as loader:
        forged = {**loader.get_state(), "step": sample, "sample": sample}
        with pytest.raises(ValueError, match=rf"state: step is {sample}; expected .* below 2\*\*62"):
            loader.set_state(forged)
        assert loader.step == 0
