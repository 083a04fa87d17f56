"""The cursor: batch sizes against the list of all steps written out, ends, and probes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloader import RandomWindows, SequentialWindows, ShuffledEpochs
from tokenloader.plans.cursor import MAX_CHANGES, BatchSizeSchedule, Cursor, Stretch, probe

legs = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=8)


ENDLESS = RandomWindows(0).bind(1000, 9)


def schedule_of(legs):
    """The schedule, and the samples of each step handed out, of a run in legs of (steps, batch_size)."""
    schedule, steps, sample = BatchSizeSchedule.constant(legs[0][1]), [], 0
    for count, batch_size in legs:
        schedule = schedule.changed(len(steps), batch_size)
        for _ in range(count):
            steps.append(range(sample, sample + batch_size))
            sample += batch_size
    return schedule, steps


@given(legs=legs, ahead=st.integers(0, 10**15))
def test_every_step_has_its_samples_after_any_changes(legs, ahead):
    schedule, steps = schedule_of(legs)
    assert [schedule.samples(step) for step in range(len(steps))] == steps
    sample, size = steps[-1].stop if steps else 0, legs[-1][1]
    begin = sample + ahead * size
    assert schedule.samples(len(steps) + ahead) == range(begin, begin + size)
    assert schedule.last.batch_size == size


@given(legs=legs)
def test_a_batch_size_that_handed_out_nothing_leaves_no_trace(legs):
    schedule, _ = schedule_of(legs)
    handed_out = [leg for leg in legs if leg[0]]
    assert schedule == schedule_of([*handed_out, (0, legs[-1][1])])[0]
    sizes = [stretch.batch_size for stretch in schedule.stretches]
    assert all(a != b for a, b in itertools.pairwise(sizes))


@given(legs=legs, data=st.data())
def test_going_back_to_a_step_forgets_what_came_after(legs, data):
    schedule, steps = schedule_of(legs)
    step = data.draw(st.integers(0, len(steps)))
    back = schedule.changed(step, 9)
    assert [back.samples(i) for i in range(step)] == steps[:step]
    begin = schedule.samples(step).start
    assert back.samples(step + 2) == range(begin + 18, begin + 27)


def test_a_change_past_those_that_a_state_holds_is_an_error_that_says_how_to_go_on():
    schedule = BatchSizeSchedule.constant(1)
    for step in range(1, MAX_CHANGES + 1):
        schedule = schedule.changed(step, step + 1)
    assert len(schedule.stretches) == MAX_CHANGES + 1
    cursor = Cursor.begin(ENDLESS, 7)
    with pytest.raises(
        ValueError, match="batch_size=7 from step 1001 on would be change 1,001 of"
    ) as caught:
        cursor.restore(schedule, MAX_CHANGES + 1)
    assert str(caught.value).endswith("state holds 1,000; go on with batch_size=1001, as before that step")
    go_on = Cursor.begin(ENDLESS, MAX_CHANGES + 1).restore(schedule, MAX_CHANGES + 1)
    assert go_on.schedule == schedule
    assert cursor.restore(schedule, MAX_CHANGES).schedule.last.batch_size == 7  # the last was never used


def test_samples_are_int64_and_pass_32_bits():
    samples = Cursor.begin(ENDLESS, 3).samples(2**40)
    assert samples.dtype == np.int64
    assert samples.tolist() == [3 * 2**40, 3 * 2**40 + 1, 3 * 2**40 + 2]


def test_a_step_past_the_last_sample_number_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match=f"step {2**62} begins with sample {2**63}; samples end at"):
        Cursor.begin(ENDLESS, 2).samples(2**62)
    assert Cursor.begin(ENDLESS, 2).samples(2**62 - 1)[-1] == 2**63 - 1


@pytest.mark.parametrize("step", [-1, -(10**12)])
def test_a_negative_step_is_an_error(step):
    with pytest.raises(ValueError, match=f"step {step} is negative; steps are counted from 0"):
        Cursor.begin(ENDLESS, 2).samples(step)


def test_a_cursor_that_advances_leaves_the_one_it_came_from():
    first = Cursor.begin(ENDLESS, 4)
    third = first.advance().advance()
    assert (first.step, first.sample) == (0, 0)
    assert (third.step, third.sample) == (2, 8)
    np.testing.assert_array_equal(third.window_starts(1), first.window_starts(1))


@pytest.mark.parametrize(
    ("plan", "batch_size", "num_steps"),
    [
        (ShuffledEpochs(0, num_epochs=2), 4, 5),  # 20 samples
        (ShuffledEpochs(0, num_epochs=2), 6, 3),  # the last two are left out
        (SequentialWindows(), 4, 3),  # 11 samples, and one that counts for nothing
        (SequentialWindows(), 11, 1),
        (SequentialWindows(), 100, 1),
    ],
)
def test_a_cursor_ends_with_its_plan(plan, batch_size, num_steps):
    cursor = Cursor.begin(plan.bind(104, 10 if plan == SequentialWindows() else 9), batch_size)
    for _ in range(num_steps):
        assert not cursor.ended
        cursor = cursor.advance()
    assert cursor.ended
    with pytest.raises(ValueError, match=f"step {num_steps} is past the end"):
        cursor.samples(num_steps)


def test_a_plan_that_ends_before_its_first_full_batch_is_refused():
    message = "ends after 20 windows of these tokens, before the first batch of batch_size=21 is full"
    with pytest.raises(ValueError, match=message):
        Cursor.begin(ShuffledEpochs(0, num_epochs=2).bind(104, 9), 21)


def test_the_end_holds_for_the_present_batch_size_only():
    plan = ShuffledEpochs(0, num_epochs=1).bind(104, 9)  # 10 samples
    schedule = BatchSizeSchedule((Stretch(0, 0, 1), Stretch(9, 9, 4)))
    cursor = Cursor.at(plan, schedule, 9)
    assert cursor.ended
    assert cursor.samples(8).tolist() == [8]
    with pytest.raises(ValueError, match="step 9 is past the end"):
        cursor.samples(9)


def test_a_restored_cursor_keeps_its_own_batch_size_from_the_step_on():
    cursor = Cursor.begin(ENDLESS, 8).restore(BatchSizeSchedule.constant(3), 5)
    assert cursor.samples(4).tolist() == [12, 13, 14]
    assert cursor.samples(5).tolist() == list(range(15, 23))


@given(until=st.integers(1, 2**62), seed=st.integers(1, 2**64 - 1))
def test_probes_tell_plans_apart_and_do_not_look_past_the_position(until, seed):
    assert probe(ENDLESS, until) == probe(RandomWindows(0).bind(1000, 9), until)
    if until > 8:
        assert probe(ENDLESS, until) != probe(RandomWindows(seed).bind(1000, 9), until)
    ending = ShuffledEpochs(0, num_epochs=3).bind(100, 9)
    assert len(probe(ending, min(until, 30))) == 16  # what is past the end raises


def test_probes_at_the_beginning_are_equal():
    assert probe(ENDLESS, 0) == probe(SequentialWindows().bind(1000, 9), 0)
