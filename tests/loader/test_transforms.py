"""What is compiled of a transform, how often, and what it keeps alive."""

import copy
import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tokenloader as tl
from tokenloader.loader.sharding import resolve_sharding
from tokenloader.loader.transforms import MAX_KEPT, compiled

BLOCK = np.arange(2 * 3 * 5, dtype=np.uint16).reshape(2, 3, 5)  # two steps of 3 rows and 4 inputs
DOUBLED = (2 * BLOCK.astype(int)).tolist()


def here(batch_size=3, seq_len=4):
    return resolve_sharding(None, batch_size, seq_len)


def split():
    """Sequences split over the mesh, so that users' transforms are given gathered rows."""
    return resolve_sharding(NamedSharding(make_mesh(1, 4), P("a", "b")), 3, 4)


# Transforms of a user's own, each with something that it holds and that can be watched


class Held:
    """Something a transform holds, as a bound method holds a model."""

    def double(self, block):
        return 2 * block.astype(jnp.int32)


def double(held, block):
    return held.double(block)


class Callable:
    def __init__(self, held):
        self.held = held

    def __call__(self, block):
        return self.held.double(block)


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held

    def __call__(self, block):
        return self.held.double(block)


class Comparable(Callable):
    def __eq__(self, other):
        return isinstance(other, Comparable)

    def __hash__(self):
        return 7


class Unhashable(Callable):
    __hash__ = None


USERS = {
    "function": lambda held: lambda block: double(held, block),
    "partial": lambda held: functools.partial(double, held),
    "jitted function": lambda held: jax.jit(lambda block: double(held, block)),
    "object": Callable,
    "bound method": lambda held: held.double,
    "object with slots": Slots,
    "object equal to others": Comparable,
    "unhashable object": Unhashable,
}
KEPT = ["function", "partial", "jitted function", "object"]


@pytest.mark.parametrize(
    "make", [lambda: tl.next_token, lambda: tl.segment_documents(7), lambda: tl.segment_documents(bos_id=7)]
)
def test_equal_transforms_of_ours_share_what_is_compiled(make):
    transform, same = make(), make()
    assert compiled(transform, here(), 2) is compiled(same, here(), 2)
    assert compiled(transform, here(), 2) is not compiled(transform, here(), 3)
    assert compiled(transform, here(), 2) is not compiled(transform, here(batch_size=6), 2)
    assert compiled(tl.segment_documents(8), here(), 2) is not compiled(transform, here(), 2)


@pytest.mark.parametrize("name", ["eos_id", "bos_id"])
def test_equal_segment_documents_are_one_object_also_copied_and_pickled(name):
    one = tl.segment_documents(**{name: 7})
    assert tl.segment_documents(**{name: np.uint16(7)}) is one
    assert copy.copy(one) is copy.deepcopy({"transform": one})["transform"] is one
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(one, protocol)) is one
    assert tl.segment_documents(8) is not one


@pytest.mark.parametrize("kind", KEPT)
def test_a_transform_of_ones_own_is_compiled_once_for_each_shape(kind):
    transform = USERS[kind](Held())
    function = compiled(transform, here(), 2)
    assert compiled(transform, here(), 2) is function
    assert compiled(transform, here(batch_size=6), 2) is function  # jit knows the rows
    assert compiled(transform, here(), 1) is not function
    assert compiled(transform, here(seq_len=8), 2) is not function
    assert compiled(USERS[kind](Held()), here(), 2) is not function
    gathered = compiled(transform, split(), 2)
    assert gathered is compiled(transform, split(), 2)
    assert gathered is not function


@pytest.mark.parametrize("placement", [here, split])
@pytest.mark.parametrize("kind", USERS)
def test_a_transform_of_ones_own_does_not_live_on_in_what_is_compiled(kind, placement):
    held = Held()
    transform = USERS[kind](held)
    function = compiled(transform, placement(), 2)
    block = BLOCK if placement is here else np.concatenate([BLOCK] * 2, axis=2)[:, :, :8]
    made = function(block)
    assert len(made) == 2
    if placement is here:
        assert [batch.tolist() for batch in made] == DOUBLED
    alive = weakref.ref(held)
    held_weakly = kind != "object with slots"  # nothing can refer to those weakly
    kept = function if held_weakly else None
    del held, transform, function, made
    gc.collect()
    assert alive() is None
    del kept


@pytest.mark.parametrize("kind", USERS)
def test_a_loader_that_its_own_transform_holds_is_collected(kind):
    class Model(Held):
        pass

    model = Model()
    model.loader = tl.TokenLoader(
        tl.open_tokens(np.arange(50, dtype=np.uint16)), 3, 4, transform=USERS[kind](model)
    )
    next(model.loader)
    alive = weakref.ref(model.loader)
    del model
    gc.collect()
    assert alive() is None


def test_what_is_kept_for_a_transform_is_bounded():
    def twice(block):
        return 2 * block

    for transform in (twice, tl.segment_documents(12_345)):
        first = weakref.ref(compiled(transform, here(seq_len=1), 1))
        newest = [compiled(transform, here(seq_len=n), 1) for n in range(2, MAX_KEPT + 1)]
        gc.collect()
        assert first() is not None
        newest.append(compiled(transform, here(seq_len=MAX_KEPT + 1), 1))
        gc.collect()
        assert first() is None
        for n, function in enumerate(newest, 2):
            assert compiled(transform, here(seq_len=n), 1) is function


@pytest.mark.parametrize("group", [1, 2])
def test_each_step_of_a_group_is_what_the_transform_makes_of_it_alone(group):
    blocks = BLOCK if group == 2 else BLOCK[0]
    made = compiled(tl.next_token, here(), group)(blocks)
    assert len(made) == group
    for batch, block in zip(made, BLOCK, strict=False):
        np.testing.assert_array_equal(batch.inputs, block[:, :-1])
        np.testing.assert_array_equal(batch.targets, block[:, 1:])
        assert batch.loss_mask is None


def test_targets_that_do_not_count_are_hidden_step_by_step():
    counts = np.array([[[4], [1], [0]], [[2], [3], [4]]], np.int32)
    first, second = compiled(tl.next_token, here(), 2)(BLOCK, counts)
    assert first.loss_mask.sum(axis=1).tolist() == [4, 1, 0]
    assert second.loss_mask.tolist() == [
        [False, False, True, True],
        [False, True, True, True],
        [True, True, True, True],
    ]


def test_a_transform_that_makes_no_batch_is_named_as_one_whose_targets_are_not_masked():
    def pair(block):
        return block[:, :-1], block[:, 1:]

    counts = np.full((2, 3, 1), 4, np.int32)
    with pytest.warns(UserWarning, match=r"^<function .*pair at .* returns tuple and not a Batch, so"):
        compiled(pair, here(), 2)(BLOCK, counts)
