"""Placement: which rows and columns of a batch each device holds, resolved once for a loader.

A sequence that is split over devices is cut into shards that overlap by one token, the halo: the last
target of a shard is the first input of the next. So a block has a column more for each shard, every
device shifts its own, and nothing is sent twice.
"""

import math
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from numpy.typing import NDArray


@dataclass(frozen=True)
class LocalShard:
    """Rows of a block, one shard of each sequence, that one or more devices of this process hold."""

    begin: int  # position in Placement.rows, as end is
    end: int
    seq_shard: int  # from 0
    devices: tuple[jax.Device, ...]  # each holds all of this


@dataclass(frozen=True)
class Placement:
    """Rows and columns of each batch [batch_size, seq_len] on each device. Hashable, by its fields."""

    sharding: Sharding
    batch_size: int  # of the global batch
    seq_len: int  # inputs in a row
    num_seq_shards: int  # 1 keeps sequences whole

    @cached_property
    def is_local(self) -> bool:
        """Whether all devices are this process's."""
        return self.sharding.is_fully_addressable

    @property
    def shard_len(self) -> int:
        """Inputs in a shard of a sequence."""
        return self.seq_len // self.num_seq_shards

    @property
    def window_len(self) -> int:
        """Tokens that are gathered at a time: a shard of a sequence and its halo."""
        return self.shard_len + 1

    @property
    def splits_sequence(self) -> bool:
        """Whether mesh axes are named for sequences, of size 1 perhaps."""
        return isinstance(self.sharding, NamedSharding) and self.spec[1] is not None

    @property
    def stacks(self) -> bool:
        """Whether blocks of several steps can be sent as one."""
        return isinstance(self.sharding, (NamedSharding, SingleDeviceSharding))

    @cached_property
    def memory_kind(self) -> str | None:
        """The memory that batches land in, if it is not the one that devices compute in."""
        device: Any = next(iter(self.sharding.addressable_devices))
        kind = self.sharding.memory_kind
        return None if kind == device.default_memory().kind else kind

    @cached_property
    def mesh(self) -> Mesh:
        """A mesh of the sharding's devices."""
        if isinstance(self.sharding, NamedSharding) and isinstance(self.sharding.mesh, Mesh):
            return self.sharding.mesh
        return Mesh(np.array(list(self.sharding.device_set)), ("devices",))

    @property
    def spec(self) -> tuple[Any, Any]:
        """The mesh axes that split rows, and those that split sequences. NamedShardings only."""
        assert isinstance(self.sharding, NamedSharding)
        rows, columns, *_ = (*self.sharding.spec, None, None)
        return rows, columns

    def shardings(self, num_steps: int) -> tuple[Sharding, Sharding]:
        """Returns the shardings of a block [batch_size, columns] and of row counts [batch_size, 1].

        Where num_steps is more than 1, both have one more axis, the first, which is not split.
        """
        return self._shardings_of_one if num_steps == 1 else self._shardings_of_several

    @cached_property
    def _shardings_of_one(self) -> tuple[Sharding, Sharding]:
        if not self.splits_sequence:
            return self.sharding, self.sharding
        return self.sharding, _with_spec(self.sharding, self.spec[0])

    @cached_property
    def _shardings_of_several(self) -> tuple[Sharding, Sharding]:
        if isinstance(self.sharding, SingleDeviceSharding):
            return self.sharding, self.sharding
        rows, columns = self.spec
        return _with_spec(self.sharding, None, rows, columns), _with_spec(self.sharding, None, rows)

    @cached_property
    def local_shards(self) -> tuple[LocalShard, ...]:
        """The shards that this process's devices hold, in the order of rows, then of sequence shards."""
        holders: dict[tuple[int, int, int], list[jax.Device]] = {}
        for device, (rows, columns) in self._local_slices().items():
            begin, end, _ = rows.indices(self.batch_size)
            held = (begin, end, (columns.start or 0) // self.shard_len)
            holders.setdefault(held, []).append(device)
        # The row ranges are equal or disjoint: positions are counted in those that are here.
        ranges = sorted({(begin, end) for begin, end, _ in holders})
        positions = np.cumsum([0, *(end - begin for begin, end in ranges)]).tolist()
        at = dict(zip(ranges, positions[:-1], strict=True))
        return tuple(
            LocalShard(at[begin, end], at[begin, end] + end - begin, shard, tuple(devices))
            for (begin, end, shard), devices in sorted(holders.items(), key=lambda item: item[0])
        )

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Rows of the global batch that this process's devices hold, [n], ascending."""
        ranges = {rows.indices(self.batch_size)[:2] for rows, _ in self._local_slices().values()}
        return np.concatenate([np.arange(*ends, dtype=np.int64) for ends in sorted(ranges)])

    def _local_slices(self) -> dict[jax.Device, tuple[slice, slice]]:
        held = self.sharding.addressable_devices_indices_map((self.batch_size, self.seq_len))
        return {device: (index[0], index[1]) for device, index in held.items() if index}


def resolve_sharding(
    sharding: jax.Device | Sharding | PartitionSpec | None, batch_size: int, seq_len: int
) -> Placement:
    """Returns the placement of batches by a sharding.

    None is JAX's default device now, and a PartitionSpec is over the mesh of jax.set_mesh (other threads
    see neither, so call this on the user's).

    Raises TypeError or ValueError: sharding is none; batch_size or seq_len does not divide over it; or it
    has no devices, splits more than two axes, or has no device of this process.
    """
    sharding = over_context_mesh(sharding)
    if sharding is None:
        sharding = default_device()
        _warn_of_an_idle_accelerator(sharding)
    if isinstance(sharding, jax.Device):
        sharding = SingleDeviceSharding(sharding)
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding is of type {type(sharding).__name__}; expected a jax.Device, a "
            f"jax.sharding.Sharding, or None for the default device"
        )
    if isinstance(sharding, NamedSharding):
        sharding = _over_two_axes(sharding)
    check_processes(sharding, processes_of(sharding), jax.process_index(), jax.process_count())
    num_seq_shards = 1
    if isinstance(sharding, NamedSharding):
        num_seq_shards = _check_axes(sharding, batch_size, seq_len)
    return Placement(sharding, batch_size, seq_len, num_seq_shards)


def over_context_mesh(sharding: Any) -> Any:
    """Returns a sharding over the devices of the mesh of jax.set_mesh, where it has none of its own.

    That is a PartitionSpec, a NamedSharding over an AbstractMesh of the same axes, and None where the mesh
    is one device. Other values are returned as they are.

    Raises TypeError or ValueError: no mesh is set that fits; or a mesh is set, and sharding is None.
    """
    get_mesh = getattr(jax.sharding, "get_mesh", None)  # since jax 0.8.1
    mesh = Mesh(np.empty((), object), ()) if get_mesh is None else get_mesh()
    if sharding is None:
        if mesh.size == 1 and not mesh.empty:
            return NamedSharding(mesh, PartitionSpec())
        if (axes := jax.sharding.get_abstract_mesh()).empty:
            return None
        raise ValueError(
            f"sharding is None under jax.set_mesh, whose mesh has the axes {dict(axes.shape_tuple)}; "
            f"expected sharding=NamedSharding(mesh, PartitionSpec({axes.axis_names[0]!r})) for rows split "
            f"over {axes.axis_names[0]!r}, with PartitionSpec() for copies, or sharding=jax.devices()[0]"
        )
    if isinstance(sharding, PartitionSpec):
        if mesh.empty:
            raise TypeError(
                f"sharding is of type {type(sharding).__name__}; expected a mesh for it: "
                f"sharding=NamedSharding(mesh, {sharding}), or since jax 0.8.1 `with jax.set_mesh(mesh):` "
                f"around this call"
            )
        try:
            return NamedSharding(mesh, sharding)
        except Exception as error:
            message = f"sharding={sharding} does not fit the mesh of jax.set_mesh: {error}"
            raise ValueError(message) from error
    if isinstance(sharding, NamedSharding) and (sharding.mesh.empty or not isinstance(sharding.mesh, Mesh)):
        if mesh.empty or mesh.shape_tuple != sharding.mesh.shape_tuple:
            raise ValueError(
                f"{sharding} is over a {type(sharding.mesh).__name__}, which has no devices; expected a "
                f"Mesh of devices: jax.make_mesh(...), or jax.set_mesh of one with the axes "
                f"{dict(sharding.mesh.shape_tuple)} around this call"
            )
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def default_device() -> jax.Device:
    """Returns the device that JAX puts arrays on now, in this thread, when nothing else is said."""
    return next(iter(jax.device_put(np.zeros((), np.int32)).devices()))


def _with_spec(sharding: Sharding, *spec: Any) -> NamedSharding:
    """Returns a sharding over the same mesh and memory. To keep: jax compares one it has seen faster."""
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def check_processes(sharding: Sharding, there: list[int], here: int, count: int) -> None:
    """Raises ValueError unless a sharding has devices of this process, `here` of `count`."""
    if here not in there:
        raise ValueError(
            f"{sharding} has no device of this process, {here} of {count}, but of "
            f"{processes_in_words(there)}; make the loader in those processes only, or its mesh of all "
            f"jax.devices()"
        )
    if len(there) > 1 and not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"{sharding} has devices of {len(there)} processes and is a {type(sharding).__name__}; "
            f"over several processes, expected a NamedSharding"
        )


def processes_of(sharding: Sharding) -> list[int]:
    """Returns the processes that have devices of a sharding, ascending."""
    devices: set[Any] = sharding.device_set
    return sorted({device.process_index for device in devices})


def members_of(sharding: object) -> list[int]:
    """Returns the processes that make a loader of this sharding together; [] if this one does so alone."""
    if jax.process_count() == 1:
        return []
    try:
        sharding = over_context_mesh(sharding)
    except (TypeError, ValueError):
        return []  # it has no devices, which resolve_sharding says
    if not isinstance(sharding, Sharding):
        return []
    there = processes_of(sharding)
    return there if len(there) > 1 and jax.process_index() in there else []


def processes_in_words(indices: list[int]) -> str:
    """Returns "process 3" or "processes 0, 1": the first eight, where there are many."""
    names = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"process {names}" if len(indices) == 1 else f"processes {names}"


def mesh_context(mesh: Mesh) -> AbstractContextManager[object]:
    """Returns a context for programs over a mesh, where the caller has perhaps set another."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.set_mesh(mesh)


def _over_two_axes(sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding without what its spec has for axes that batches have not, which must be None."""
    spec = sharding.spec
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ValueError(f"{spec} is of sums over mesh axes; expected one that splits batches, or copies")
    if any(entry is not None for entry in spec[2:]):
        raise ValueError(f"{spec} splits {len(spec)} axes; a batch has two, [batch_size, seq_len]")
    return _with_spec(sharding, *spec[:2]) if len(spec) > 2 else sharding


def _check_axes(sharding: NamedSharding, batch_size: int, seq_len: int) -> int:
    """Returns the number of shards of a sequence; ValueError where sizes do not divide."""
    shards = []
    for name, size, entry in zip(
        ("batch_size", "seq_len"), (batch_size, seq_len), (*sharding.spec, None, None), strict=False
    ):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"{sharding.spec} leaves an axis unconstrained; say for {name} which mesh axes split "
                f"it, or None"
            )
        axes = () if entry is None else (entry if isinstance(entry, tuple) else (entry,))
        shards.append(math.prod(int(sharding.mesh.shape[axis]) for axis in axes))
        if size % shards[-1]:
            below = size - size % shards[-1]
            nearest = f"{below} and {below + shards[-1]}" if below else f"{shards[-1]}"
            raise ValueError(
                f"{name}={size} does not divide over the {shards[-1]} shards of mesh axis "
                f"{' and '.join(map(repr, axes))}; the nearest that does: {nearest}"
            )
    _, num_seq_shards = shards
    return num_seq_shards


def _warn_of_an_idle_accelerator(device: jax.Device) -> None:
    if device.platform != "cpu":
        return
    for platform in ("gpu", "tpu"):
        try:
            idle = jax.local_devices(backend=platform)[0]
        except RuntimeError:
            continue
        warnings.warn(
            f"batches will land on {device}, the default device, while {idle} is idle. Pass "
            f'sharding=jax.devices("{platform}")[0] to use it, or sharding=jax.devices("cpu")[0] to '
            f"say that the CPU is meant",
            stacklevel=5,
        )
        return
    if os.path.exists("/dev/nvidia0") and "cpu" not in (getattr(jax.config, "jax_platforms", None) or ""):
        warnings.warn(
            "batches will land on the CPU: this machine has an NVIDIA GPU, which the installed jax does "
            "not use. Install jax for CUDA (https://docs.jax.dev/en/latest/installation.html), or pass "
            'sharding=jax.devices("cpu")[0] to say that the CPU is meant',
            stacklevel=5,
        )
