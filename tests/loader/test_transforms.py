"""What is compiled of a transform, how often, and what it keeps alive."""

import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import tokenloader as tl
from tokenloader.loader.sharding import place
from tokenloader.loader.transforms import jitted

BLOCK = np.arange(2 * 3 * 5, dtype=np.uint16).reshape(2, 3, 5)  # two steps of 3 rows and 4 inputs
HERE = place(None, 3, 4)


@pytest.mark.parametrize("transform", [tl.next_token, tl.segment_documents(7)])
def test_equal_transforms_of_ours_share_what_is_compiled(transform):
    same = tl.segment_documents(7) if transform is not tl.next_token else tl.next_token
    assert jitted(transform, HERE, 2) is jitted(same, place(None, 3, 4), 2)
    assert jitted(transform, HERE, 2) is not jitted(transform, HERE, 3)
    assert jitted(tl.segment_documents(8), HERE, 2) is not jitted(transform, HERE, 2)


def test_a_function_of_ones_own_is_compiled_once_and_not_kept():
    def double(block):
        return 2 * block.astype(jnp.int32)

    compiled = jitted(double, HERE, 2)
    assert jitted(double, place(None, 3, 4), 2) is compiled
    assert [made.tolist() for made in compiled(BLOCK)] == (2 * BLOCK.astype(int)).tolist()
    alive = weakref.ref(double)
    del double, compiled
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("group", [1, 2])
def test_each_step_of_a_group_is_what_the_transform_makes_of_it_alone(group):
    blocks = BLOCK if group == 2 else BLOCK[0]
    made = jitted(tl.next_token, HERE, group)(blocks)
    assert len(made) == group
    for batch, block in zip(made, BLOCK, strict=False):
        np.testing.assert_array_equal(batch.inputs, block[:, :-1])
        np.testing.assert_array_equal(batch.targets, block[:, 1:])
        assert batch.loss_mask is None


def test_targets_that_do_not_count_are_hidden_step_by_step():
    counts = np.array([[[4], [1], [0]], [[2], [3], [4]]], np.int32)
    first, second = jitted(tl.next_token, HERE, 2)(BLOCK, counts)
    assert first.loss_mask.sum(axis=1).tolist() == [4, 1, 0]
    assert second.loss_mask.tolist() == [
        [False, False, True, True],
        [False, True, True, True],
        [True, True, True, True],
    ]
