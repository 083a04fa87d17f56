"""What is handed to jax, and how it arrives."""

import jax
import numpy as np
import pytest
from helpers import OverProcesses, make_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tokenloader.loader.sharding import Placement, resolve_sharding
from tokenloader.loader.transfer import gather_starts, transfer


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_a_block_keeps_its_dtype_on_the_way(dtype):
    block = np.arange(12).reshape(3, 4).astype(dtype)
    tokens, valid_targets = transfer(block, None, resolve_sharding(jax.devices()[1], 3, 3))
    assert tokens.dtype == dtype
    assert tokens.devices() == {jax.devices()[1]}
    assert valid_targets is None
    np.testing.assert_array_equal(tokens, block)


def test_int64_is_narrowed_to_int32():
    tokens, _ = transfer(np.array([[0, 2**31 - 1, -(2**31)]]), None, resolve_sharding(None, 1, 2))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [[0, 2**31 - 1, -(2**31)]]


@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, "b"), P()], ids=repr)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_row_counts_travel_with_the_block(spec, num_steps):
    placement = resolve_sharding(NamedSharding(make_mesh(4, 2), spec), 8, 6)
    columns = placement.num_seq_shards * placement.window_len
    windows = np.arange(num_steps * 8 * columns, dtype=np.uint16).reshape(-1, placement.window_len)
    counts = np.arange(num_steps * 8, dtype=np.int32).reshape(num_steps, 8, 1)
    tokens, valid_targets = transfer(windows, counts, placement, num_steps)
    lead = () if num_steps == 1 else (num_steps,)
    assert tokens.shape == (*lead, 8, columns)
    np.testing.assert_array_equal(tokens, windows.reshape(tokens.shape), strict=True)
    np.testing.assert_array_equal(valid_targets, counts.reshape(*lead, 8, 1), strict=True)
    of_block = NamedSharding(placement.mesh, P(*(None for _ in lead), *spec))
    assert tokens.sharding.is_equivalent_to(of_block, tokens.ndim)


def test_several_processes_send_to_the_memory_that_was_asked_for():
    sharding = NamedSharding(make_mesh(4, 2), P("a", "b"), memory_kind="pinned_host")
    placement = OverProcesses(sharding, 8, 6, 2)
    windows = np.arange(64, dtype=np.uint16).reshape(16, 4)
    counts = np.arange(8, dtype=np.int32).reshape(1, 8, 1)
    for sent in transfer(windows, counts, placement):
        assert {shard.data.sharding.memory_kind for shard in sent.addressable_shards} == {"pinned_host"}


@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec",
    [P("a"), P("b", "a"), P(None, "b"), P(("a", "b")), P(None, ("b", "a")), P()],
    ids=repr,
)
def test_one_process_and_several_gather_in_other_orders_and_send_the_same(
    spec, axis_type, num_steps, with_targets
):
    sharding = NamedSharding(make_mesh(4, 2, axis_type=axis_type), spec)
    rows = 100 * np.arange(num_steps * 8).reshape(num_steps, 8)  # a token is its own position
    counts = np.arange(num_steps * 8, dtype=np.int32).reshape(num_steps, 8, 1)
    num_seq_shards = 16 // sharding.shard_shape((8, 16))[1]
    sent = []
    for kind in (Placement, OverProcesses):
        placement = kind(sharding, 8, 16, num_seq_shards)
        starts = gather_starts(rows, placement)
        windows = (starts[:, None] + np.arange(placement.window_len)).astype(np.uint16)
        sent.append(transfer(windows, counts if with_targets else None, placement, num_steps))
    shards = rows[..., None] + np.arange(num_seq_shards) * placement.shard_len
    expected = (shards[..., None] + np.arange(placement.window_len)).reshape(num_steps, 8, -1)
    for tokens, valid_targets in sent:
        np.testing.assert_array_equal(np.asarray(tokens).reshape(expected.shape), expected)
        assert tokens.sharding == sent[0][0].sharding
        if with_targets:
            np.testing.assert_array_equal(np.asarray(valid_targets).reshape(counts.shape), counts)
            assert valid_targets.sharding == sent[0][1].sharding
        else:
            assert valid_targets is None


@pytest.mark.parametrize(
    ("dtype", "ids", "outside"),
    [
        ("uint32", [1, 2**31], 2**31),
        ("uint32", [2**32 - 1, 2**31], 2**32 - 1),
        ("int64", [2**31, 0], 2**31),
        ("int64", [0, -(2**31) - 1], -(2**31) - 1),
        ("int64", [2**40, -(2**40)], 2**40),
    ],
)
def test_an_id_that_does_not_fit_int32_is_an_error_that_shows_it(dtype, ids, outside):
    with pytest.raises(ValueError, match=f"token id {outside} does not fit in int32"):
        transfer(np.array([ids], dtype), None, resolve_sharding(None, 1, 1))


def test_the_largest_id_that_fits_passes():
    tokens, _ = transfer(np.array([[2**31 - 1, 0]], np.uint32), None, resolve_sharding(None, 1, 1))
    assert tokens.tolist() == [[2**31 - 1, 0]]
