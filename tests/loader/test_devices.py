"""Sharding over eight devices: what one device gets is what eight get together."""

import contextlib
import itertools
import logging
import textwrap

import jax
import numpy as np
import pytest
from helpers import assert_same_batches, make_mesh, naive_gather, run_python
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tokenloader as tl

EOT = 3
TOKENS = np.random.default_rng(0).integers(0, 16, 1500).astype(np.uint16)
B, T = 16, 12
PLANS = [tl.ShuffledEpochs(seed=0), tl.RandomWindows(seed=0), tl.SequentialWindows()]
TRANSFORMS = {"raw": None, "next_token": tl.next_token, "documents": tl.segment_documents(EOT)}
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
SPECS = [P("data"), P("data", None), P(("data", "model")), P("model"), P()]

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; see conftest.py")


def sharding(spec, axis_type=AxisType.Auto):
    return NamedSharding(make_mesh(4, 2, names=("data", "model"), axis_type=axis_type), spec)


def batches(count, where, plan=PLANS[0], transform=tl.next_token):
    tokens = tl.open_tokens(TOKENS)
    with tl.TokenLoader(tokens, B, T, plan=plan, sharding=where, transform=transform) as loader:
        return list(itertools.islice(loader, count))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_sharded_batches_equal_those_of_one_device_and_carry_the_sharding(spec, axis_type, transform):
    # Every pair of a plan and another of these comes once at least.
    plan = PLANS[(SPECS.index(spec) + list(TRANSFORMS).index(transform) + AXIS_TYPES.index(axis_type)) % 3]
    where, transform = sharding(spec, axis_type), TRANSFORMS[transform]
    sharded = batches(3, where, plan, transform)
    single = batches(3, jax.devices()[0], plan, transform)
    assert_same_batches(sharded, single, where)


def test_each_device_holds_its_own_rows_only():
    (batch,) = batches(1, sharding(P(("data", "model"))))
    assert [shard.data.shape for shard in batch.inputs.addressable_shards] == [(B // 8, T)] * 8
    (batch,) = batches(1, sharding(P("data")))  # replicated over the model axis
    assert [shard.data.shape for shard in batch.inputs.addressable_shards] == [(B // 4, T)] * 8
    (batch,) = batches(1, sharding(P()))
    assert [shard.data.shape for shard in batch.inputs.addressable_shards] == [(B, T)] * 8


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_device_gets_whole_batches_also_when_it_is_not_the_default(plan, transform):
    device = jax.devices()[5]
    given = batches(3, device, plan, TRANSFORMS[transform])
    default = batches(3, None, plan, TRANSFORMS[transform])
    for there, here in zip(given, default, strict=True):
        for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
            assert a.devices() == {device}
            assert b.devices() == {jax.devices()[0]}
            np.testing.assert_array_equal(a, b, strict=True)


def test_the_default_device_is_that_of_construction_and_not_of_iteration():
    tokens = tl.open_tokens(TOKENS)
    with jax.default_device(jax.devices()[3]):
        loader = tl.TokenLoader(tokens, B, T, plan=tl.SequentialWindows())
    with loader:
        assert loader.sharding == SingleDeviceSharding(jax.devices()[3])
        for batch in itertools.islice(loader, 3):
            assert {d for leaf in jax.tree.leaves(batch) for d in leaf.devices()} == {jax.devices()[3]}
        with jax.default_device(jax.devices()[6]):
            assert next(loader).inputs.devices() == {jax.devices()[3]}


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("where", ["device", "Auto", "Explicit"])
def test_nothing_is_compiled_after_the_first_batch(where, plan, caplog):
    given = jax.devices()[2] if where == "device" else sharding(P("data"), AxisType[where])
    traces = []

    def transform(block):
        traces.append(block.shape)
        return tl.segment_documents(EOT)(block)

    def compilations():
        return [r for r in caplog.records if "compil" in r.getMessage().lower()]

    with (
        jax.log_compiles(),
        caplog.at_level(logging.DEBUG),
        tl.TokenLoader(
            tl.open_tokens(TOKENS), B, T, plan=plan, sharding=given, transform=transform
        ) as loader,
    ):
        next(loader)
        assert len(compilations()) > 0  # they are seen
        caplog.clear()
        count = sum(1 for _ in itertools.islice(loader, 20))
        assert count > 5
        assert compilations() == []
    assert len(traces) == 1


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_a_train_step_under_a_mesh_takes_the_batches(axis_type):
    where = sharding(P("data"), axis_type)
    traces = []

    @jax.jit
    def step(batch):
        traces.append(None)
        return (batch.inputs * batch.targets).sum()

    with (
        jax.set_mesh(where.mesh),
        tl.TokenLoader(tl.open_tokens(TOKENS), B, T, sharding=where) as loader,
    ):
        sums = [int(step(next(loader))) for _ in range(5)]
    single = batches(5, jax.devices()[0])
    assert sums == [int((batch.inputs * batch.targets).sum()) for batch in single]
    assert len(traces) == 1


def test_a_run_may_be_resumed_on_other_devices():
    tokens = tl.open_tokens(TOKENS)
    whole, parts, state = batches(6, jax.devices()[0]), [], None
    for where in (sharding(P("data")), jax.devices()[4], sharding(P(), AxisType.Explicit)):
        with tl.TokenLoader(tokens, B, T, sharding=where) as loader:
            if state:
                loader.set_state(state)
            parts += [np.asarray(next(loader).inputs), np.asarray(next(loader).inputs)]
            state = loader.get_state()
    np.testing.assert_array_equal(parts, [batch.inputs for batch in whole])


def test_sharded_batches_kept_alive_never_change():
    # With eight devices only the aligned shard of a block would be used in place (jax#37830).
    tokens = tl.open_tokens(TOKENS)
    where, plan = sharding(P(("data", "model"))), tl.RandomWindows(seed=1)
    with tl.TokenLoader(tokens, 64, 255, plan=plan, sharding=where, transform=None) as loader:
        blocks = [next(loader) for _ in range(100)]
        starts = [loader.window_starts(step) for step in range(100)]
    for block, at in zip(blocks, starts, strict=True):
        np.testing.assert_array_equal(block, naive_gather(TOKENS, at, 256))


@pytest.mark.parametrize(
    ("batch_size", "spec", "message"),
    [
        (
            10,
            P("data"),
            "batch_size=10 does not divide over the 4 shards of mesh axis 'data'; the ",
        ),
        (10, P("data"), "the nearest that does: 8 and 12"),
        (
            12,
            P(("data", "model")),
            "over the 8 shards of mesh axis 'data' and 'model'; the nearest",
        ),
        (16, P("data", None, "model"), "splits 3 axes; a batch has two"),
    ],
)
def test_a_sharding_that_does_not_fit_the_batch_is_an_error_at_construction(batch_size, spec, message):
    with pytest.raises(ValueError, match=message):
        tl.TokenLoader(tl.open_tokens(TOKENS), batch_size, T, sharding=sharding(spec))


GUARDED = textwrap.dedent("""
    import itertools
    import jax, numpy as np
    jax.config.update("jax_transfer_guard", "disallow")
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import tokenloader as tl

    def meshes():
        yield None
        yield jax.devices()[3]
        for axis_type in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
            for spec in (P("data"), P(("data", "model")), P()):
                yield NamedSharding(mesh, spec)

    count = 0
    tokens = tl.open_tokens(np.arange(600, dtype=np.uint16))
    plans = tl.RandomWindows(0), tl.ShuffledEpochs(0), tl.SequentialWindows()
    transforms = None, tl.next_token, tl.segment_documents(7)
    for (i, where), (j, plan) in itertools.product(enumerate(meshes()), enumerate(plans)):
        transform = transforms[(i + j) % 3]  # each pair of the three comes once at least
        with tl.TokenLoader(
            tokens, 16, 8, plan=plan, transform=transform, sharding=where
        ) as loader:
            for batch in itertools.islice(loader, 4):
                jax.block_until_ready(batch)
                count += 1
            state = loader.get_state()
            loader.set_state(state)
            next(loader)
    try:  # the guard is on
        jax.numpy.add(jax.device_put(np.ones(3)), np.ones(3))
    except Exception as error:
        assert "isallowed" in str(error), error
        print(count, "batches")
""")


def test_everything_runs_with_implicit_transfers_forbidden():
    assert run_python(GUARDED) == f"{8 * 3 * 4} batches\n"


def test_a_loader_without_sharding_is_not_lost_when_the_default_device_changes():
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(jax.devices()[2]))
        loader = stack.enter_context(tl.TokenLoader(tl.open_tokens(TOKENS), B, T))
        stack.enter_context(jax.default_device(jax.devices()[7]))
        state = loader.get_state()
        next(loader)
        loader.set_state(state)  # a new thread, the same device
        assert next(loader).inputs.devices() == {jax.devices()[2]}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("where", ["default", "device", "four"])
def test_a_mesh_that_the_caller_has_set_does_not_move_or_break_a_loader(kind, where):
    tokens = tl.open_tokens(np.arange(5000, dtype=np.uint16))
    four = make_mesh(4, names=("rows",))
    sharding = {
        "default": None,
        "device": jax.devices()[3],
        "four": NamedSharding(four, P("rows")),
    }[where]
    loader = tl.TokenLoader(tokens, 8, 10, plan=tl.SequentialWindows(), sharding=sharding)
    with jax.set_mesh(make_mesh(8, names=("data",), axis_type=kind)):
        for step in range(3):
            batch = next(loader)
            np.testing.assert_array_equal(batch.inputs, loader.window_tokens(step)[:, :-1])
            assert batch.inputs.devices() == loader.sharding.device_set
            assert np.asarray(batch.loss_mask).all()


@pytest.mark.skipif(not hasattr(jax.sharding, "get_mesh"), reason="jax 0.8.0 does not tell the mesh")
@pytest.mark.parametrize(("plan", "transform"), list(zip(PLANS, TRANSFORMS, strict=True)), ids=repr)
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_a_bare_spec_gives_the_batches_of_its_sharding_over_the_mesh_that_is_set(
    axis_type, plan, transform
):
    where = sharding(P("data", None, None), axis_type)
    with jax.set_mesh(where.mesh):
        given = batches(2, P("data", None, None), plan, TRANSFORMS[transform])
    two_axes = sharding(P("data"), axis_type)
    assert_same_batches(given, batches(2, jax.devices()[0], plan, TRANSFORMS[transform]), two_axes)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
@pytest.mark.parametrize("over", ["device", "rows", "sequences"])
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_memory_kind_is_where_blocks_land_or_refused_at_construction(plan, over, kind):
    device = jax.devices()[2]
    if kind not in [memory.kind for memory in device.addressable_memories()]:
        pytest.skip(f"this jax has no {kind} memory on CPUs")
    spec = P("data", "model") if over == "sequences" else P("data")
    where = (
        SingleDeviceSharding(device, memory_kind=kind)
        if over == "device"
        else NamedSharding(sharding(spec).mesh, spec, memory_kind=kind)
    )
    for block in batches(3, where, plan, None):
        assert block.sharding.is_equivalent_to(where, 2)
        assert block.sharding.memory_kind == kind
    for transform in (tl.next_token, tl.segment_documents(EOT), lambda block: block):
        told = f"sharding has memory_kind='{kind}', and a transform computes in the devices' own memory"
        with pytest.raises(ValueError, match=told) as caught:
            batches(1, where, plan, transform)
        assert "or pass transform=None, whose blocks go there" in str(caught.value)
    default = device.default_memory().kind
    for batch in batches(1, SingleDeviceSharding(device, memory_kind=default), plan):
        assert batch.inputs.sharding.memory_kind == default


@pytest.mark.parametrize("prefetch", [1, 2], ids=["alone", "grouped"])
@pytest.mark.parametrize(
    ("types", "seq_len"),
    [((AxisType.Explicit, AxisType.Auto), T), ((AxisType.Auto, AxisType.Auto), 1)],
    ids=["mixed axis types", "one input a row"],
)
def test_batches_keep_their_sharding_where_jax_alone_would_gather_them(types, seq_len, prefetch):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=types)
    where = NamedSharding(mesh, P(("b", "a")))
    tokens = tl.open_tokens(TOKENS)
    for transform in (tl.next_token, tl.segment_documents(EOT)):
        with tl.TokenLoader(
            tokens, 8, seq_len, sharding=where, prefetch=prefetch, transform=transform
        ) as loader:
            for array in jax.tree.leaves(next(loader)):
                assert array.sharding.is_equivalent_to(where, 2)
