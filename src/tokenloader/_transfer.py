"""Transfer: a host block to a sharded jax.Array.

Who owns which bytes: on CPU jax uses an aligned host block in place, on accelerators the copy goes
on after `device_put` has returned. Either way the host bytes must never be written again, so every
block is fresh from `TokenArray.gather`, is handed to jax once, and nobody keeps it. A view of the
mapped file is never handed over.

The sharding is resolved once, on the caller's thread, because `jax.default_device` is not
inherited by the thread that transfers; that thread runs no jit and no collective.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from numpy.typing import NDArray


def resolve_sharding(sharding: jax.Device | Sharding | None, batch_size: int) -> Sharding:
    """Where batches go. A NamedSharding must keep sequences whole, and its shards be of equal size.

    Args:
        sharding: a device, a sharding of [batch_size, anything], or None for JAX's default device.

    Raises:
        TypeError: it is something else.
        ValueError: batch_size does not divide over it, it splits the sequence, or it has devices of
            other processes.
    """
    if sharding is None:
        device = next(iter(jax.device_put(np.zeros((), np.int32)).devices()))
        _warn_of_an_idle_accelerator(device)
        return SingleDeviceSharding(device)
    if isinstance(sharding, jax.Device):
        return SingleDeviceSharding(sharding)
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding is of type {type(sharding).__name__}; needed is a jax.Device, a "
            f"jax.sharding.Sharding, or None for the default device"
        )
    if not sharding.is_fully_addressable:
        raise ValueError(
            f"{sharding} has devices of other processes; needed is a sharding over the devices of "
            f"this one: make the mesh of jax.local_devices()"
        )
    if isinstance(sharding, NamedSharding):
        _check_named_sharding(sharding, batch_size)
    return sharding


def mesh_of(sharding: Sharding) -> Mesh:
    """A mesh of the sharding's devices."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return Mesh(np.array(list(sharding.device_set)), ("devices",))


def put(
    block: NDArray[Any], new_targets: NDArray[np.int32] | None, sharding: Sharding
) -> tuple[jax.Array, jax.Array | None]:
    """Hands a fresh block [B, T + 1] and, if any, its row counts [B, 1] to jax; does not wait.

    Raises:
        ValueError: an id does not fit in the int32 that jax will hold it in.
    """
    if block.dtype.itemsize >= 4 and block.dtype != np.int32:
        limits = np.iinfo(np.int32)
        lowest, highest = int(block.min()), int(block.max())
        if lowest < limits.min or highest > limits.max:
            outside = highest if highest > limits.max else lowest
            raise ValueError(
                f"token id {outside} does not fit in int32, in which batches hold ids; "
                f"are the dtype and byte order of the file right?"
            )
        if block.dtype.itemsize == 8:  # jax itself would narrow it, without a check
            block = block.astype(np.int32)
    if new_targets is None:
        return jax.device_put(block, sharding), None
    on_device: tuple[jax.Array, jax.Array] = jax.device_put((block, new_targets), sharding)
    return on_device


def _check_named_sharding(sharding: NamedSharding, batch_size: int) -> None:
    spec = (*sharding.spec, None, None)
    if len(sharding.spec) > 2 or spec[1] is not None:
        raise ValueError(
            f"{sharding.spec} splits more than the batch axis; a batch is [batch_size, seq_len] and its "
            f"sequences must be whole on each device: use P({spec[0]!r})"
        )
    axes = () if spec[0] is None else (spec[0] if isinstance(spec[0], tuple) else (spec[0],))
    shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if batch_size % shards:
        below, above = batch_size - batch_size % shards, batch_size + shards - batch_size % shards
        nearest = f"{below} and {above}" if below else f"{above}"
        raise ValueError(
            f"batch_size={batch_size} does not divide over the {shards} shards of mesh axis "
            f"{' and '.join(map(repr, axes))}; the nearest that does: {nearest}"
        )


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
            stacklevel=4,
        )
        return
    if os.path.exists("/dev/nvidia0") and "cpu" not in (
        getattr(jax.config, "jax_platforms", None) or ""
    ):
        warnings.warn(
            "batches will land on the CPU: this machine has an NVIDIA GPU, which the installed jax does "
            "not use. Install jax for CUDA (https://docs.jax.dev/en/latest/installation.html), or pass "
            'sharding=jax.devices("cpu")[0] to say that the CPU is meant',
            stacklevel=4,
        )
