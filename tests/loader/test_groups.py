"""Groups: which steps are put together, filled up, and taken apart again."""

import numpy as np
import pytest

from tokenloader.loader.groups import group_size, group_steps
from tokenloader.loader.steps import Step


def steps_of(count, *, with_targets=False):
    """Steps 5, 6, ... of three windows each."""
    for number in range(5, 5 + count):
        starts = np.arange(3) + 10 * number
        yield Step(number, starts, np.full(3, number, np.int32) if with_targets else None)


@pytest.mark.parametrize(
    ("batch_bytes", "prefetch", "size"),
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
def test_small_batches_are_sent_together_within_what_prefetch_allows(batch_bytes, prefetch, size):
    assert group_size(batch_bytes, prefetch) == size


@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("count", [0, 1, 6, 20])
def test_groups_are_the_steps_in_order_and_the_last_repeats_its_last_step(count, size, with_targets):
    steps = list(steps_of(count, with_targets=with_targets))
    groups = list(group_steps(iter(steps), size))
    assert [group.step for group in groups] == [step.number for step in steps[::size]]
    assert sum(group.num_steps for group in groups) == count
    for i, group in enumerate(groups):
        held = steps[i * size : (i + 1) * size]
        held += [held[-1]] * (size - len(held))
        assert group.num_steps == len(steps[i * size : (i + 1) * size])
        np.testing.assert_array_equal(
            group.window_starts, [step.window_starts for step in held], strict=True
        )
        if with_targets:
            expected = np.array([step.valid_targets for step in held])[..., None]
            np.testing.assert_array_equal(group.valid_targets, expected, strict=True)
        else:
            assert group.valid_targets is None


def test_a_group_takes_no_more_steps_than_its_own():
    steps = steps_of(10)
    next(group_steps(steps, 4))
    assert next(steps).number == 9


@pytest.mark.parametrize("with_targets", [False, True])
def test_a_group_that_is_split_has_each_step_alone_with_its_number_and_the_same_shape(
    with_targets,
):
    *_, last = group_steps(steps_of(7, with_targets=with_targets), 4)
    assert (last.step, last.num_steps) == (9, 3)
    alone = list(last.split())
    assert [(group.step, group.num_steps) for group in alone] == [(9, 1), (10, 1), (11, 1)]
    for i, group in enumerate(alone):
        np.testing.assert_array_equal(group.window_starts, [last.window_starts[i]] * 4)
        if with_targets:
            np.testing.assert_array_equal(group.valid_targets, [last.valid_targets[i]] * 4)
        else:
            assert group.valid_targets is None
