"""Steps: the plan at each step's own samples, for the rows that this process holds."""

from itertools import islice

import numpy as np
import pytest

from tokenloader import BoundPlan, RandomWindows, SequentialWindows, ShuffledEpochs
from tokenloader.loader.steps import PLANNED_SAMPLES, plan_steps
from tokenloader.plans.cursor import BatchSizeSchedule, Cursor

N, T = 1000, 9
ENDLESS = BatchSizeSchedule.constant


def cursor_at(plan, batch_size, step=0, stop_step=None):
    return Cursor(plan.bind(N, T), ENDLESS(batch_size), step, stop_step)


@pytest.mark.parametrize("plan", [RandomWindows(3), ShuffledEpochs(3), SequentialWindows()])
@pytest.mark.parametrize("batch_size", [1, 7, 4096, 5000])
@pytest.mark.parametrize("step", [0, 5, 10**14])
def test_each_step_is_the_plan_at_its_own_samples(plan, batch_size, step):
    num_steps = min(50, 2 * PLANNED_SAMPLES // batch_size + 3)
    steps = plan_steps(cursor_at(plan, batch_size, step), np.arange(batch_size))
    for number, planned in enumerate(islice(steps, num_steps), step):
        samples = np.arange(number * batch_size, (number + 1) * batch_size)
        assert planned.number == number
        np.testing.assert_array_equal(
            planned.window_starts, plan.bind(N, T).window_starts(samples), strict=True
        )


@pytest.mark.parametrize("planned_samples", [1, 30, 45, 4096])
def test_steps_do_not_change_where_one_computation_of_the_plan_meets_the_next(planned_samples):
    bound = ShuffledEpochs(0).bind(N, T)
    steps = plan_steps(Cursor.begin(bound, 10), np.arange(10), planned_samples)
    np.testing.assert_array_equal(
        np.concatenate([step.window_starts for step in islice(steps, 20)]),
        bound.window_starts(np.arange(200)),
    )


@pytest.mark.parametrize("planned_samples", [1, 3, 12, 4096])
@pytest.mark.parametrize(
    ("step", "stop_step", "numbers"),
    [(0, 2, [0, 1]), (0, 1, [0]), (7, 10, [7, 8, 9]), (10, 10, []), (11, 10, [])],
)
def test_no_step_is_the_stop_or_later(step, stop_step, numbers, planned_samples):
    cursor = cursor_at(RandomWindows(0), 5, step, stop_step)
    steps = plan_steps(cursor, np.arange(5), planned_samples)
    assert [planned.number for planned in steps] == numbers


def test_a_process_has_the_rows_that_its_devices_hold():
    bound, rows = ShuffledEpochs(0).bind(N, T), np.array([1, 2, 6])
    for number, step in enumerate(islice(plan_steps(Cursor.begin(bound, 8), rows), 30)):
        assert step.window_starts.tolist() == bound.window_starts(8 * number + rows).tolist()


def test_steps_go_on_with_the_batch_size_of_the_schedules_end():
    bound = ShuffledEpochs(0).bind(N, T)
    cursor = Cursor.begin(bound, 3).restore(ENDLESS(7).changed(4, 2), 6)
    for step, first in zip(plan_steps(cursor, np.arange(3)), [32, 35, 38], strict=False):
        assert step.window_starts.tolist() == bound.window_starts(first + np.arange(3)).tolist()


def test_a_plan_with_valid_targets_has_them_in_each_step_as_int32():
    cursor = Cursor.begin(SequentialWindows().bind(25, 10), 2)
    steps = list(plan_steps(cursor, np.arange(2)))
    assert [step.window_starts.tolist() for step in steps] == [[0, 10], [14, 14]]
    assert [step.valid_targets.tolist() for step in steps] == [[10, 10], [4, 0]]
    assert all(step.valid_targets.dtype == np.int32 for step in steps)


def test_a_plan_without_valid_targets_has_none():
    assert next(plan_steps(cursor_at(RandomWindows(0), 2), np.arange(2))).valid_targets is None


class Mine(BoundPlan):
    num_samples = None

    def __init__(self, starts):
        self.starts_of = starts

    def __repr__(self):
        return "Mine()"

    def window_starts(self, samples):
        return self.starts_of(samples)

    def key(self, until_sample):
        return "Mine()"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda samples: list(samples[:-1]), r"int64\[4095\] for 4096"),
        (lambda samples: samples / 2, r"float64\[4096\] for 4096"),
        (lambda samples: None, r"object\[\] for 4096"),
    ],
)
def test_a_plan_whose_starts_are_not_one_integer_a_sample_is_an_error_that_names_it(given, named):
    with pytest.raises(ValueError, match=rf"^Mine\(\): window_starts returned {named} samples"):
        next(plan_steps(Cursor.begin(Mine(given), 2), np.arange(2)))


def test_starts_may_be_a_list():
    mine = Mine(lambda samples: [int(sample) % 7 for sample in samples])
    cursor = Cursor(mine, ENDLESS(5), 1, None)
    assert next(plan_steps(cursor, np.arange(3))).window_starts.tolist() == [5, 6, 0]
