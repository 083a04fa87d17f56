"""What is handed to jax, and how it arrives."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tokenloader.loader.sharding import place
from tokenloader.loader.transfer import put


def mesh(*sizes, names="abc"):
    return jax.make_mesh(
        sizes, tuple(names[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes)
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_a_block_keeps_its_dtype_on_the_way(dtype):
    block = np.arange(12).reshape(3, 4).astype(dtype)
    tokens, new_targets = put(block, None, place(jax.devices()[1], 3, 3))
    assert tokens.dtype == dtype
    assert tokens.devices() == {jax.devices()[1]}
    assert new_targets is None
    np.testing.assert_array_equal(tokens, block)


def test_int64_is_narrowed_to_int32():
    tokens, _ = put(np.array([[0, 2**31 - 1, -(2**31)]]), None, place(None, 1, 2))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [[0, 2**31 - 1, -(2**31)]]


@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, "b"), P()], ids=repr)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_row_counts_travel_with_the_block(spec, num_steps):
    placement = place(NamedSharding(mesh(4, 2), spec), 8, 6)
    columns = placement.num_cuts * placement.window
    windows = np.arange(num_steps * 8 * columns, dtype=np.uint16).reshape(-1, placement.window)
    counts = np.arange(num_steps * 8, dtype=np.int32).reshape(num_steps, 8, 1)
    tokens, new_targets = put(windows, counts, placement, num_steps)
    lead = () if num_steps == 1 else (num_steps,)
    assert tokens.shape == (*lead, 8, columns)
    np.testing.assert_array_equal(tokens, windows.reshape(tokens.shape), strict=True)
    np.testing.assert_array_equal(new_targets, counts.reshape(*lead, 8, 1), strict=True)
    of_block = NamedSharding(placement.mesh, P(*(None for _ in lead), *spec))
    assert tokens.sharding.is_equivalent_to(of_block, tokens.ndim)


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
        put(np.array([ids], dtype), None, place(None, 1, 1))


def test_the_largest_id_that_fits_passes():
    tokens, _ = put(np.array([[2**31 - 1, 0]], np.uint32), None, place(None, 1, 1))
    assert tokens.tolist() == [[2**31 - 1, 0]]
