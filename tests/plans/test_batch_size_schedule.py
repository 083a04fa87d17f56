"""The history of batch sizes against the list of all steps, written out."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloader.plans.batch_size_schedule import History, samples_at

legs = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=8)


def history_of(legs):
    """The history, and the samples of each step handed out, of a run in legs of (steps, batch_size)."""
    history, steps, sample = History(((0, legs[0][1]),)), [], 0
    for count, batch_size in legs:
        history = history.changed(len(steps), batch_size)
        for _ in range(count):
            steps.append(range(sample, sample + batch_size))
            sample += batch_size
    return history, steps


@given(legs=legs, ahead=st.integers(0, 10**15))
def test_every_step_has_its_samples_after_any_changes(legs, ahead):
    history, steps = history_of(legs)
    assert [history.samples_of(step) for step in range(len(steps))] == steps
    sample, size = steps[-1].stop if steps else 0, legs[-1][1]
    begin = sample + ahead * size
    assert history.samples_of(len(steps) + ahead) == range(begin, begin + size)
    assert history.batch_size == size


@given(legs=legs)
def test_a_batch_size_that_handed_out_nothing_leaves_no_trace(legs):
    history, _ = history_of(legs)
    handed_out = [leg for leg in legs if leg[0]]
    assert history == history_of([*handed_out, (0, legs[-1][1])])[0]
    sizes = [size for _, size in history.changes]
    assert all(a != b for a, b in itertools.pairwise(sizes))


@given(legs=legs, data=st.data())
def test_going_back_to_a_step_forgets_what_came_after(legs, data):
    history, steps = history_of(legs)
    step = data.draw(st.integers(0, len(steps)))
    back = history.changed(step, 9)
    assert [back.samples_of(i) for i in range(step)] == steps[:step]
    begin = history.samples_of(step).start
    assert back.samples_of(step + 2) == range(begin + 18, begin + 27)


def test_samples_are_int64_and_pass_32_bits():
    samples = samples_at(2**40, History(((0, 3),)), plan=None, end=None)
    assert samples.dtype == np.int64
    assert samples.tolist() == [3 * 2**40, 3 * 2**40 + 1, 3 * 2**40 + 2]


def test_a_step_past_the_last_sample_number_is_an_error_that_shows_it():
    with pytest.raises(
        ValueError, match=f"step {2**62} begins with sample {2**63}; samples end at"
    ):
        samples_at(2**62, History(((0, 2),)), plan=None, end=None)
    assert samples_at(2**62 - 1, History(((0, 2),)), plan=None, end=None)[-1] == 2**63 - 1


def test_the_end_holds_for_the_present_batch_size_only():
    history = History(((0, 1), (7, 4)))
    assert samples_at(6, history, plan="a plan", end=5).tolist() == [6]
    with pytest.raises(ValueError, match="step 7 is past the end of a plan"):
        samples_at(7, history, plan="a plan", end=5)
