"""Where batches go, what is sent there, and what is said about it."""

import os
import types
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tokenloader import _transfer
from tokenloader._transfer import put, resolve_sharding


def mesh(*sizes, names="abc"):
    return jax.make_mesh(
        sizes, tuple(names[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes)
    )


def test_none_is_the_default_device_of_the_moment():
    assert resolve_sharding(None, 4) == SingleDeviceSharding(jax.devices()[0])
    with jax.default_device(jax.devices()[3]):
        assert resolve_sharding(None, 4) == SingleDeviceSharding(jax.devices()[3])


def test_a_device_is_a_sharding_over_that_device():
    assert resolve_sharding(jax.devices()[5], 4) == SingleDeviceSharding(jax.devices()[5])


@pytest.mark.parametrize("spec", [P("a"), P("a", None), P(("a", "b")), P(), P(None), P(None, None)])
def test_a_sharding_that_fits_is_taken_as_it_is(spec):
    sharding = NamedSharding(mesh(4, 2), spec)
    assert resolve_sharding(sharding, 16) is sharding


@pytest.mark.parametrize("wrong", ["cpu", "cpu:0", 0, P("a"), [jax.devices()[0]]])
def test_a_sharding_of_another_type_is_a_type_error(wrong):
    with pytest.raises(TypeError, match=f"sharding is of type {type(wrong).__name__}; needed is a"):
        resolve_sharding(wrong, 4)


def test_a_mesh_is_not_a_sharding():
    with pytest.raises(TypeError, match=r"sharding is of type Mesh; .* a jax\.sharding\.Sharding"):
        resolve_sharding(mesh(8), 8)


@pytest.mark.parametrize(
    ("batch_size", "spec", "shards", "axes", "nearest"),
    [
        (10, P("a"), 4, "'a'", "8 and 12"),
        (9, P("b"), 2, "'b'", "8 and 10"),
        (3, P("a"), 4, "'a'", "4"),
        (20, P(("a", "b")), 8, "'a' and 'b'", "16 and 24"),
        (7, P(("b", "a"), None), 8, "'b' and 'a'", "8"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(
    batch_size, spec, shards, axes, nearest
):
    with pytest.raises(ValueError, match="does not divide") as caught:
        resolve_sharding(NamedSharding(mesh(4, 2), spec), batch_size)
    assert str(caught.value) == (
        f"batch_size={batch_size} does not divide over the {shards} shards of mesh axis {axes}; "
        f"the nearest that does: {nearest}"
    )


@pytest.mark.parametrize(
    ("spec", "use"),
    [(P("a", "b"), "P('a')"), (P(None, "b"), "P(None)"), (P(("a", "b"), "c"), "P(('a', 'b'))")],
)
def test_a_split_sequence_is_an_error_that_shows_the_spec_and_what_to_use(spec, use):
    with pytest.raises(ValueError, match="splits more than the batch axis") as caught:
        resolve_sharding(NamedSharding(mesh(2, 2, 2), spec), 8)
    assert repr(spec) in str(caught.value)
    assert str(caught.value).endswith(f"whole on each device: use {use}")


def test_a_third_axis_is_an_error():
    with pytest.raises(ValueError, match=r"splits more than the batch axis.*use P\('a'\)"):
        resolve_sharding(NamedSharding(mesh(4, 2), P("a", None, None)), 8)


def test_devices_of_other_processes_are_an_error(monkeypatch):
    sharding = NamedSharding(mesh(8), P("a"))
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    with pytest.raises(ValueError, match="has devices of other processes") as caught:
        resolve_sharding(sharding, 8)
    assert str(sharding) in str(caught.value)
    assert "jax.local_devices()" in str(caught.value)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_a_block_keeps_its_dtype_on_the_way(dtype):
    block = np.arange(12).reshape(3, 4).astype(dtype)
    tokens, new_targets = put(block, None, SingleDeviceSharding(jax.devices()[1]))
    assert tokens.dtype == dtype
    assert tokens.devices() == {jax.devices()[1]}
    assert new_targets is None
    np.testing.assert_array_equal(tokens, block)


def test_int64_is_narrowed_to_int32():
    tokens, _ = put(np.array([[0, 2**31 - 1, -(2**31)]]), None, resolve_sharding(None, 1))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [[0, 2**31 - 1, -(2**31)]]


def test_row_counts_travel_with_the_block():
    sharding = NamedSharding(mesh(8), P("a"))
    block, counts = np.zeros((8, 3), np.uint16), np.arange(8, dtype=np.int32)[:, None]
    tokens, new_targets = put(block, counts, sharding)
    assert tokens.sharding == new_targets.sharding == sharding
    np.testing.assert_array_equal(new_targets, counts)


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
        put(np.array([ids], dtype), None, resolve_sharding(None, 1))


def test_the_largest_id_that_fits_passes():
    tokens, _ = put(np.array([[2**31 - 1]], np.uint32), None, resolve_sharding(None, 1))
    assert tokens.tolist() == [[2**31 - 1]]


def fake_jax(monkeypatch, *, accelerator=None, platforms=None, nvidia=False):
    """Another jax for _transfer: one with an accelerator that is not the default device, or without."""

    def local_devices(backend):
        if backend != accelerator:
            raise RuntimeError(f"Unknown backend {backend}")
        return [f"{backend}:0", f"{backend}:1"]

    monkeypatch.setattr(
        _transfer,
        "jax",
        types.SimpleNamespace(
            Device=jax.Device,
            device_put=jax.device_put,
            local_devices=local_devices,
            config=types.SimpleNamespace(jax_platforms=platforms),
        ),
    )
    exists = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: nvidia if path == "/dev/nvidia0" else exists(path)
    )


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_idle_accelerator_is_named_in_a_warning(monkeypatch, platform):
    fake_jax(monkeypatch, accelerator=platform)
    with pytest.warns(UserWarning, match="batches will land on") as caught:
        resolve_sharding(None, 4)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert (
        f"will land on {jax.devices()[0]}, the default device, while {platform}:0 is idle"
        in message
    )
    assert f'sharding=jax.devices("{platform}")[0]' in message


@pytest.mark.parametrize("platforms", [None, "", "cuda"])
def test_a_gpu_that_the_installed_jax_does_not_use_is_told_of(monkeypatch, platforms):
    fake_jax(monkeypatch, nvidia=True, platforms=platforms)
    with pytest.warns(UserWarning, match=r"has an NVIDIA GPU, .* Install jax for CUDA") as caught:
        resolve_sharding(None, 4)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "situation",
    [{}, {"nvidia": True, "platforms": "cpu"}, {"accelerator": "metal"}],
    ids=["no accelerator", "the CPU was asked for", "unknown accelerator"],
)
def test_nothing_is_said_without_an_accelerator_to_use(monkeypatch, situation):
    fake_jax(monkeypatch, **situation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_sharding(None, 4)


def test_nothing_is_said_when_the_sharding_is_given(monkeypatch):
    fake_jax(monkeypatch, accelerator="gpu", nvidia=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_sharding(jax.devices()[0], 4)
        resolve_sharding(SingleDeviceSharding(jax.devices()[0]), 4)
        resolve_sharding(NamedSharding(mesh(8), P("a")), 8)
