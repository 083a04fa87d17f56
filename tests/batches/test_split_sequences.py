"""Context parallelism: sequences split over devices give the batches that one device gets."""

import itertools

import jax
import numpy as np
import pytest
from helpers import assert_same_batches, make_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tokenloader as tl

EOT = 3
TOKENS = np.random.default_rng(0).integers(0, 8, 3000).astype(np.uint16)
B, T = 16, 48
PLANS = [tl.ShuffledEpochs(seed=0), tl.SequentialWindows()]
TRANSFORMS = {
    "next_token": tl.next_token,
    "documents": tl.segment_documents(EOT),
    "begun documents": tl.segment_documents(bos_id=EOT),
}
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8), (2, 2, 2)]

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; see conftest.py")


def mesh(shape, axis_type=AxisType.Auto):
    return make_mesh(*shape, names=("data", "seq", "model"), axis_type=axis_type)


def batches(count, where, plan=PLANS[0], transform=tl.next_token, tokens=TOKENS):
    with tl.TokenLoader(
        tl.open_tokens(tokens), B, T, plan=plan, sharding=where, transform=transform
    ) as loader:
        return list(itertools.islice(loader, count))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_batches_split_over_rows_and_sequences_equal_those_of_one_device(shape, axis_type, transform):
    # Every plan comes with every mesh, kind of axis, and transform.
    plan = PLANS[(list(TRANSFORMS).index(transform) + (axis_type is AxisType.Explicit)) % 2]
    where = NamedSharding(mesh(shape, axis_type), P("data", "seq"))
    split = batches(5, where, plan, TRANSFORMS[transform])
    single = batches(5, jax.devices()[0], plan, TRANSFORMS[transform])
    assert_same_batches(split, single, where)


@pytest.mark.parametrize(
    "spec",
    [P(None, "seq"), P("seq", "data"), P(None, ("data", "seq")), P("model", ("seq", "data"))],
    ids=repr,
)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_any_axes_may_split_a_sequence(spec, transform):
    where = NamedSharding(mesh((2, 2, 2)), spec)
    split = batches(3, where, tl.SequentialWindows(), TRANSFORMS[transform])
    single = batches(3, None, tl.SequentialWindows(), TRANSFORMS[transform])
    for many, one in zip(split, single, strict=True):
        for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            assert a.sharding.is_equivalent_to(where, 2)
            np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("token_id", [0, 7, 100])
@pytest.mark.parametrize("name", ["eos_id", "bos_id"])
def test_documents_are_counted_across_the_shards_of_a_sequence(name, token_id):
    # Every token an end, none, or runs of them that begin and end where a shard does.
    tokens = np.where(np.arange(3000) % 24 < 12, 7, np.arange(3000) % 5).astype(np.uint16)
    tokens = np.zeros(3000, np.uint16) if token_id == 0 else tokens
    transform = tl.segment_documents(**{name: token_id})
    where = NamedSharding(mesh((1, 8)), P("data", "seq"))
    split = batches(4, where, tl.SequentialWindows(), transform, tokens)
    single = batches(4, None, tl.SequentialWindows(), transform, tokens)
    for many, one in zip(split, single, strict=True):
        for a, b in zip(many, one, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)


def test_documents_are_int32_also_where_the_caller_enables_64_bits():
    where = NamedSharding(mesh((2, 4)), P("data", "seq"))
    with jax.enable_x64(True):  # noqa: FBT003 (positional only in some releases)
        (batch,) = batches(1, where, transform=TRANSFORMS["documents"])
    dtypes = [array.dtype for array in batch]
    assert dtypes == [np.int32, np.int32, bool, np.int32, np.int32]


def test_raw_blocks_have_a_halo_of_one_token_a_shard():
    where = NamedSharding(mesh((2, 4)), P("data", "seq"))
    (block,) = batches(1, where, tl.SequentialWindows(), None)
    assert block.dtype == np.uint16
    assert block.sharding.is_equivalent_to(where, 2)
    shards = np.asarray(block).reshape(B, 4, T // 4 + 1)
    for row, shard in itertools.product(range(B), range(4)):
        start = row * T + shard * T // 4
        assert shards[row, shard].tolist() == TOKENS[start : start + T // 4 + 1].tolist()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_transform_of_ones_own_is_given_whole_rows(plan, axis_type):
    shapes = []

    def transform(block):
        shapes.append(block.shape)
        return tl.next_token(block)

    where = NamedSharding(mesh((2, 4), axis_type), P("data", "seq"))
    split = batches(3, where, plan, transform)
    for many, one in zip(split, batches(3, None, plan), strict=True):
        for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
    assert shapes == [(B, T + 1)]


def test_a_device_holds_its_rows_and_columns_and_nothing_is_sent_twice(monkeypatch):
    sent, device_put = [], jax.device_put

    def counted(x, *where, **how):
        placed = device_put(x, *where, **how)
        sent.extend(s.data.size for leaf in jax.tree.leaves(placed) for s in leaf.addressable_shards)
        return placed

    monkeypatch.setattr(jax, "device_put", counted)
    where = NamedSharding(mesh((2, 4)), P("data", "seq"))
    (batch,) = batches(1, where)
    assert {shard.data.shape for shard in batch.inputs.addressable_shards} == {(B // 2, T // 4)}
    assert set(sent) == {2 * (B // 2) * (T // 4 + 1)}  # two steps at a time


def test_a_train_step_takes_split_batches_under_its_mesh():
    where = NamedSharding(mesh((2, 4), AxisType.Explicit), P("data", "seq"))
    with (
        jax.set_mesh(where.mesh),
        tl.TokenLoader(tl.open_tokens(TOKENS), B, T, sharding=where) as loader,
    ):
        sums = [int(jax.jit(lambda b: (b.inputs * b.targets).sum())(next(loader))) for _ in range(4)]
    assert sums == [int((b.inputs * b.targets).sum()) for b in batches(4, None)]
