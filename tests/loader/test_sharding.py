"""Which rows and columns of a batch each device holds, and what is said about it."""

import contextlib
import os
import types
import warnings

import jax
import numpy as np
import pytest
from helpers import make_mesh
from jax.sharding import AxisType, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tokenloader.loader.sharding import Placement, check_processes, resolve_sharding
from tokenloader.loader.transfer import gather_starts


def test_none_is_the_default_device_of_the_moment():
    assert resolve_sharding(None, 4, 16).sharding == SingleDeviceSharding(jax.devices()[0])
    with jax.default_device(jax.devices()[3]):
        assert resolve_sharding(None, 4, 16).sharding == SingleDeviceSharding(jax.devices()[3])


def test_a_device_is_a_sharding_over_that_device():
    assert resolve_sharding(jax.devices()[5], 4, 16).sharding == SingleDeviceSharding(jax.devices()[5])


@pytest.mark.parametrize(
    "spec", [P("a"), P("a", None), P(("a", "b")), P(), P(None), P("a", "b"), P(None, "b")]
)
def test_a_sharding_that_fits_is_taken_as_it_is(spec):
    sharding = NamedSharding(make_mesh(4, 2), spec)
    assert resolve_sharding(sharding, 16, 16).sharding is sharding


@pytest.mark.parametrize("wrong", ["cpu", "cpu:0", 0, P("a"), [jax.devices()[0]]])
def test_a_sharding_of_another_type_is_a_type_error(wrong):
    with pytest.raises(TypeError, match=f"sharding is of type {type(wrong).__name__}; expected a"):
        resolve_sharding(wrong, 4, 16)


def test_a_mesh_is_not_a_sharding():
    with pytest.raises(TypeError, match=r"sharding is of type Mesh; .* a jax\.sharding\.Sharding"):
        resolve_sharding(make_mesh(8), 8, 16)


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
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(batch_size, spec, shards, axes, nearest):
    with pytest.raises(ValueError, match="does not divide") as caught:
        resolve_sharding(NamedSharding(make_mesh(4, 2), spec), batch_size, 16)
    assert str(caught.value) == (
        f"batch_size={batch_size} does not divide over the {shards} shards of mesh axis {axes}; "
        f"the nearest that does: {nearest}"
    )


@pytest.mark.parametrize(
    ("seq_len", "spec", "shards", "axes", "nearest"),
    [
        (10, P(None, "a"), 4, "'a'", "8 and 12"),
        (3, P("b", "a"), 4, "'a'", "4"),
        (20, P(None, ("a", "b")), 8, "'a' and 'b'", "16 and 24"),
    ],
)
def test_a_sequence_that_does_not_divide_names_the_nearest_that_do(seq_len, spec, shards, axes, nearest):
    with pytest.raises(ValueError, match="does not divide") as caught:
        resolve_sharding(NamedSharding(make_mesh(4, 2), spec), 8, seq_len)
    assert str(caught.value) == (
        f"seq_len={seq_len} does not divide over the {shards} shards of mesh axis {axes}; "
        f"the nearest that does: {nearest}"
    )


def test_a_third_axis_is_an_error():
    for spec in (P("a", None, "b"), P(None, None, P.UNCONSTRAINED)):
        with pytest.raises(ValueError, match="splits 3 axes; a batch has two, ") as caught:
            resolve_sharding(NamedSharding(make_mesh(4, 2), spec), 8, 16)
        assert str(caught.value).startswith(f"{spec} splits")


@pytest.mark.parametrize(
    "spec", [P("a", None, None), P("a", "b", None, None), P(None, None, None), P("a", (), ())]
)
def test_axes_that_batches_have_not_may_be_named_as_not_split(spec):
    whole = NamedSharding(make_mesh(4, 2), spec, memory_kind="pinned_host")
    placement = resolve_sharding(whole, 8, 16)
    two = NamedSharding(make_mesh(4, 2), P(*spec[:2]), memory_kind="pinned_host")
    assert placement == resolve_sharding(two, 8, 16)


def test_a_sharding_of_sums_is_an_error():
    mesh = make_mesh(4, 2, axis_type=AxisType.Explicit)
    with pytest.raises(ValueError, match="is of sums over mesh axes; expected one that splits"):
        resolve_sharding(NamedSharding(mesh, P("a", unreduced={"b"})), 8, 16)


def test_an_unconstrained_axis_is_an_error():
    spec = P("a", P.UNCONSTRAINED)
    with pytest.raises(ValueError, match=r"unconstrained; say for seq_len which mesh axes"):
        resolve_sharding(NamedSharding(make_mesh(4, 2), spec), 8, 16)


def test_a_mesh_without_devices_is_an_error():
    sharding = NamedSharding(make_mesh(4, 2).abstract_mesh, P("a"))
    with pytest.raises(ValueError, match=r"over a AbstractMesh, which has no devices; expected a Mesh"):
        resolve_sharding(sharding, 8, 16)


# The mesh of jax.set_mesh

can_ask_for_the_mesh = pytest.mark.skipif(
    not hasattr(jax.sharding, "get_mesh"), reason="jax 0.8.0 does not tell which mesh is set"
)


@can_ask_for_the_mesh
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, ("a", "b")), P(), P("b", None, None)])
def test_a_bare_spec_is_over_the_mesh_that_is_set(spec, axis_type):
    mesh = make_mesh(4, 2, axis_type=axis_type)
    with jax.set_mesh(mesh):
        placement = resolve_sharding(spec, 8, 16)
    assert placement == resolve_sharding(NamedSharding(mesh, P(*spec[:2])), 8, 16)


@can_ask_for_the_mesh
def test_a_sharding_over_an_abstract_mesh_is_over_the_one_of_the_same_axes_that_is_set():
    mesh = make_mesh(4, 2)
    abstract = NamedSharding(mesh.abstract_mesh, P("b", "a"), memory_kind="pinned_host")
    with jax.set_mesh(mesh):
        placement = resolve_sharding(abstract, 8, 16)
    assert placement.sharding == NamedSharding(mesh, P("b", "a"), memory_kind="pinned_host")
    for other in (make_mesh(2, 4), make_mesh(8), make_mesh(4, 2, names="xy")):
        with jax.set_mesh(other), pytest.raises(ValueError, match="which has no devices") as caught:
            resolve_sharding(abstract, 8, 16)
        assert "jax.set_mesh of one with the axes {'a': 4, 'b': 2} around" in str(caught.value)


@pytest.mark.parametrize("context", ["none", "abstract"])
def test_a_bare_spec_without_a_mesh_is_an_error_that_names_the_calls(context):
    axes = make_mesh(4, 2).abstract_mesh
    mesh = jax.sharding.use_abstract_mesh(axes) if context == "abstract" else contextlib.nullcontext()
    with mesh, pytest.raises(TypeError, match="expected a mesh for it") as caught:
        resolve_sharding(P("a", None), 8, 16)
    assert f"expected a mesh for it: sharding=NamedSharding(mesh, {P('a', None)}), or since" in str(
        caught.value
    )
    assert str(caught.value).endswith("`with jax.set_mesh(mesh):` around this call")


@can_ask_for_the_mesh
@pytest.mark.parametrize(
    ("spec", "told"), [(P("x"), "axis: x of"), (P("a", "a"), "duplicate entries for `a`")]
)
def test_a_bare_spec_that_does_not_fit_the_mesh_is_an_error(spec, told):
    with jax.set_mesh(make_mesh(4, 2)), pytest.raises(ValueError, match="does not fit the mesh") as caught:
        resolve_sharding(spec, 8, 16)
    assert str(caught.value).startswith(f"sharding={spec} does not fit the mesh of jax.set_mesh: ")
    assert told in str(caught.value)


def test_no_sharding_under_a_mesh_of_several_devices_is_an_error_that_names_the_calls():
    with jax.set_mesh(make_mesh(4, 2)), pytest.raises(ValueError, match="sharding is None under") as caught:
        resolve_sharding(None, 8, 16)
    assert "whose mesh has the axes {'a': 4, 'b': 2}; expected sharding=NamedSharding(mesh, " in str(
        caught.value
    )
    assert "(mesh, PartitionSpec('a')) for rows split over 'a', with PartitionSpec() for copies" in str(
        caught.value
    )


@can_ask_for_the_mesh
def test_no_sharding_under_a_mesh_of_one_device_is_that_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[3:4]), ("a",))
    with jax.set_mesh(mesh):
        assert resolve_sharding(None, 8, 16).sharding == NamedSharding(mesh, P())


def over_eight():
    return NamedSharding(make_mesh(8), P("a"))


def test_a_mesh_without_a_device_of_this_process_is_an_error():
    with pytest.raises(
        ValueError,
        match="has no device of this process, 2 of 4, but of processes 0, 1; make the loader in those",
    ):
        check_processes(over_eight(), there=[0, 1], here=2, count=4)
    with pytest.raises(
        ValueError, match="has no device of this process, 2 of 4, but of process 0; make the"
    ) as caught:
        check_processes(SingleDeviceSharding(jax.devices()[0]), there=[0], here=2, count=4)
    assert str(caught.value).startswith("SingleDeviceSharding(")


@pytest.mark.parametrize("there", [[1], [1, 3], [0, 1, 2, 3]])
def test_a_mesh_of_one_process_of_the_program_of_some_or_of_all_is_allowed(there):
    check_processes(over_eight(), there, here=1, count=4)


def test_over_several_processes_a_sharding_is_over_a_mesh():
    with pytest.raises(
        ValueError,
        match=r"has devices of 2 processes and is a SingleDeviceSharding; .* expected a Na",
    ):
        check_processes(SingleDeviceSharding(jax.devices()[0]), there=[0, 1], here=1, count=2)


class SeenFromOneProcess(Sharding):
    """A sharding as a process sees it that has some of the devices only."""

    is_fully_addressable = False

    def __init__(self, sharding, devices):
        self.sharding, self.devices = sharding, devices

    def addressable_devices_indices_map(self, global_shape):
        everything = self.sharding.devices_indices_map(global_shape)
        return {device: everything[device] for device in everything if device.id in self.devices}


SPECS = [P("a", "b"), P("b", "a"), P("a"), P(None, "a"), P(("a", "b")), P(None, ("b", "a")), P()]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("devices", [{0}, {0, 1}, {2, 3}, {1, 6}, {0, 3, 5}, set(range(8))], ids=str)
def test_a_process_gathers_what_its_devices_hold_and_nothing_twice(spec, devices):
    num_steps, batch_size, seq_len = 3, 8, 16
    sharding = NamedSharding(make_mesh(4, 2), spec)
    num_seq_shards = seq_len // sharding.shard_shape((batch_size, seq_len))[1]
    placement = Placement(SeenFromOneProcess(sharding, devices), batch_size, seq_len, num_seq_shards)
    starts = 100 * np.arange(num_steps * batch_size).reshape(num_steps, batch_size)
    windows, at = gather_starts(starts[:, placement.rows], placement), 0
    assert sorted(d.id for shard in placement.local_shards for d in shard.devices) == sorted(devices)
    held = sharding.devices_indices_map((batch_size, seq_len))
    for shard in placement.local_shards:
        size = num_steps * (shard.end - shard.begin)
        for device in shard.devices:  # what it is sent begins where its share of the batch does
            rows, columns = held[device]
            begins = starts[:, rows] + (columns.start or 0)
            assert windows[at : at + size].tolist() == begins.reshape(-1).tolist()
        at += size
    assert len(windows) == at == len(set(windows.tolist()))
    assert placement.window_len == seq_len // num_seq_shards + 1


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_one_process_gathers_in_the_order_of_a_block(spec):
    placement = resolve_sharding(NamedSharding(make_mesh(4, 2), spec), 8, 16)
    starts = 100 * np.arange(24).reshape(3, 8)
    shards = range(placement.num_seq_shards)
    assert placement.rows.tolist() == list(range(8))
    assert gather_starts(starts, placement).tolist() == [
        start + shard * placement.shard_len for start in starts.reshape(-1) for shard in shards
    ]


def fake_jax(monkeypatch, *, accelerator=None, platforms=None, nvidia=False):
    """Lets jax say that there is an accelerator, which is not the default device, or that there is none."""

    def local_devices(backend):
        if backend != accelerator:
            raise RuntimeError(f"Unknown backend {backend}")
        return [f"{backend}:0", f"{backend}:1"]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_platforms=platforms))
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: nvidia if path == "/dev/nvidia0" else exists(path))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_idle_accelerator_is_named_in_a_warning(monkeypatch, platform):
    fake_jax(monkeypatch, accelerator=platform)
    with pytest.warns(UserWarning, match="batches will land on") as caught:
        resolve_sharding(None, 4, 16)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert f"will land on {jax.devices()[0]}, the default device, while {platform}:0 is idle" in message
    assert f'sharding=jax.devices("{platform}")[0]' in message


@pytest.mark.parametrize("platforms", [None, "", "cuda"])
def test_a_gpu_that_the_installed_jax_does_not_use_is_told_of(monkeypatch, platforms):
    fake_jax(monkeypatch, nvidia=True, platforms=platforms)
    with pytest.warns(UserWarning, match=r"has an NVIDIA GPU, .* Install jax for CUDA") as caught:
        resolve_sharding(None, 4, 16)
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
        resolve_sharding(None, 4, 16)


def test_nothing_is_said_when_the_sharding_is_given(monkeypatch):
    fake_jax(monkeypatch, accelerator="gpu", nvidia=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_sharding(jax.devices()[0], 4, 16)
        resolve_sharding(SingleDeviceSharding(jax.devices()[0]), 4, 16)
        resolve_sharding(NamedSharding(make_mesh(8), P("a")), 8, 16)
