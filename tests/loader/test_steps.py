"""Steps: the plan at each step's own samples, for the rows that this process holds."""

import itertools
from itertools import islice

import numpy as np
import pytest

from tokenloader import BoundPlan, RandomWindows, SequentialWindows, ShuffledBlocks, ShuffledEpochs
from tokenloader.loader.steps import (
    PLANNED_READS,
    PLANNED_SAMPLES,
    REMEMBERED_SAMPLES,
    Read,
    plan_reads,
    plan_steps,
)
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

    def __init__(self, starts, reads=None):
        self.starts_of, self.reads_of = starts, reads

    def __repr__(self):
        return "Mine()"

    def window_starts(self, samples):
        return self.starts_of(samples)

    def reads(self, samples):
        return None if self.reads_of is None else self.reads_of(samples)

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


# Reads


def naive_reads(bound, batch_size, rows, num_steps):
    """Each read of the first steps, at the step that needs it first, in the order of their samples."""
    first = {}
    for step in range(num_steps):
        for start, stop in bound.reads(step * batch_size + rows).tolist():
            first.setdefault((start, stop), step)
    return [Read(step, start, stop) for (start, stop), step in first.items()]


@pytest.mark.parametrize("plan", [SequentialWindows(), ShuffledBlocks(3, block_tokens=100, open_blocks=4)])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [1, 2], [4, 0]])
@pytest.mark.parametrize("planned_samples", [1, 30, 4096])
def test_each_read_comes_once_with_the_first_step_that_needs_it(plan, rows, planned_samples):
    rows, num_steps = np.array(rows), 20
    bound = plan.bind(N, T)
    planned = list(plan_reads(cursor_at(plan, 5, 0, num_steps), rows, N, planned_samples))
    assert [read for some in planned for read in some.reads] == naive_reads(bound, 5, rows, num_steps)
    chunk = max(1, planned_samples // len(rows))
    assert [some.stop_step for some in planned] == [
        *range(chunk, num_steps, chunk),
        num_steps,
    ]


def test_reads_go_on_from_the_step_of_a_cursor():
    plan, rows = ShuffledBlocks(3, block_tokens=100, open_blocks=4), np.arange(5)
    some = next(plan_reads(cursor_at(plan, 5, 7), rows, N, 30))
    expected = plan.bind(N, T).reads(35 + np.arange(30)).tolist()
    assert some.stop_step == 13
    assert some.reads[0] == (7, *expected[0])
    assert {read[1:] for read in some.reads} == set(map(tuple, expected))


@pytest.mark.parametrize("plan", [RandomWindows(0), ShuffledEpochs(0)])
def test_a_plan_whose_windows_are_read_by_themselves_has_no_reads(plan):
    assert list(plan_reads(cursor_at(plan, 5), np.arange(5), N)) == []


def test_a_read_comes_again_when_it_was_not_needed_for_as_many_samples_as_are_remembered():
    # Each sample has a read of its own, but every 10,000th the first's, until it is needed no more.
    def reads(samples):
        is_first = (samples % 10_000 == 0) & (samples < 100_000) | (samples == 200_000)
        starts = np.where(is_first, 0, samples)
        return np.stack([starts, starts + 1], axis=1)

    cursor = Cursor(Mine(None, reads), ENDLESS(1), 0, 210_000)
    steps = [read.step for some in plan_reads(cursor, np.arange(1), 10**6) for read in some.reads]
    assert steps == [step for step in range(210_000) if not step or step % 10_000 or step >= 100_000]
    assert 90_000 + REMEMBERED_SAMPLES + PLANNED_READS < 200_000


def test_what_a_step_needs_is_remembered_for_the_next_however_many_rows_it_has():
    rows = np.arange(REMEMBERED_SAMPLES + 1)
    in_two = Mine(None, lambda samples: np.stack([samples % 2, samples % 2 + 1], axis=1))
    some = plan_reads(Cursor(in_two, ENDLESS(len(rows)), 0, 3), rows, 2)
    assert list(some) == [(1, [(0, 0, 1), (0, 1, 2)]), (2, []), (3, [])]


def test_open_blocks_are_read_once_however_many():
    plan, num_tokens = ShuffledBlocks(3, block_tokens=2 * T, open_blocks=50_000), 4 * 50_000 * T
    cursor = Cursor.begin(plan.bind(num_tokens, T), 100)
    some = itertools.islice(plan_reads(cursor, np.arange(100), num_tokens), 10)
    reads = [read[1:] for part in some for read in part.reads]
    assert len(reads) == len(set(reads)) > 50_000


def test_processes_that_hold_rows_of_different_lanes_read_different_blocks():
    plan = ShuffledBlocks(3, block_tokens=1000, open_blocks=64)
    bound = plan.bind(10**6, T)
    for num_hosts in (2, 4, 16):
        read = []
        for host in range(num_hosts):
            rows = np.arange(32 // num_hosts) + host * (32 // num_hosts)
            cursor = Cursor.begin(bound, 32)
            some = next(plan_reads(cursor, rows, 10**6, 8192 // num_hosts))
            assert some.stop_step == 256
            read.append({read[1:] for read in some.reads})
        assert sum(map(len, read)) == len(set.union(*read))
        num_tokens = [sum(stop - start for start, stop in own) for own in read]
        assert max(num_tokens) * num_hosts <= 1.3 * sum(num_tokens)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda samples: samples, r"reads returned int64\[16384\] for 16384 samples; .* \[16384, 2\]"),
        (lambda samples: np.ones((len(samples), 2)), r"reads returned float64\[16384, 2\] for 16384"),
        (lambda samples: [[0, 7]] * 4000, r"reads returned int64\[4000, 2\] for 16384"),
        (lambda samples: [[0, 7]] * 4000 + [[0, 8]] * 12384, r"reads returned \[0, 8\) for sample 4000;"),
    ],
)
def test_a_plan_whose_reads_are_not_one_range_of_tokens_a_sample_is_an_error_that_names_it(given, named):
    with pytest.raises(ValueError, match=rf"^Mine\(\): {named}"):
        next(plan_reads(Cursor.begin(Mine(None, given), 2), np.arange(2), 7))
