"""Transfer: a host block to a sharded jax.Array, and the order in which its windows are gathered.

Who owns which bytes: on CPU jax uses an aligned host block in place, on accelerators the copy goes
on after `device_put` has returned. Either way the host bytes must never be written again, so every
block is fresh from `LocatedWindows.copy`, is handed to jax once, and nobody keeps it. A view of the
mapped file is never handed over.

The order of the windows in a host block is known here only:

    one process         several processes, each with shards of its own (here two: rows 0-1 and 2-3)
    step 0  row 0       shard 0  step 0  row 0
            row 1                        row 1
            row 2                step 1  row 0
            row 3                        row 1
    step 1  row 0       shard 1  step 0  row 2
            ...                          ...

In one process the host block is the block, and jax cuts it up; a row that is split into n sequence shards
is n windows. In several, `device_put` of the whole would be a collective, so each shard is cut here.

It runs on the background thread, which runs no jit and no collective.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from tokenloader.loader.sharding import Placement


def gather_starts(window_starts: NDArray[np.int64], placement: Placement) -> NDArray[np.int64]:
    """Returns where the windows of a host block begin, placement.window_len tokens each.

    Args:
        window_starts: int64 [num_steps, n], for the placement's rows.

    Returns:
        int64 [m], in the order shown above.
    """
    if not placement.is_local:
        parts = [
            window_starts[:, shard.begin : shard.end] + shard.seq_shard * placement.shard_len
            for shard in placement.local_shards
        ]
        return np.concatenate([part.reshape(-1) for part in parts])
    if placement.num_seq_shards == 1:
        return window_starts.reshape(-1)
    offsets = np.arange(placement.num_seq_shards, dtype=np.int64) * placement.shard_len
    return (window_starts[..., None] + offsets).reshape(-1)


def transfer(
    windows: NDArray[Any],
    valid_targets: NDArray[np.int32] | None,
    placement: Placement,
    num_steps: int = 1,
) -> tuple[jax.Array, jax.Array | None]:
    """Hands a fresh host block to jax; does not wait.

    Args:
        windows: [m, placement.window_len], in the order of `gather_starts`.
        valid_targets: how many targets count in each row that is here, [num_steps, n, 1]; or None.
        placement: where to.
        num_steps: steps that are sent as one.

    Returns:
        The block, [batch_size, columns], and valid_targets, [batch_size, 1]; with a first axis of
        num_steps where that is more than 1.

    Raises:
        ValueError: an id does not fit in the int32 that jax will hold it in.
    """
    windows = _narrowed(windows)
    steps = () if num_steps == 1 else (num_steps,)
    shape = (*steps, placement.batch_size, placement.num_seq_shards * placement.window_len)
    row_shape = (*steps, placement.batch_size, 1)
    block_sharding, row_sharding = placement.shardings(num_steps)
    if placement.is_local:
        block = windows.reshape(shape)
        if valid_targets is None:
            return jax.device_put(block, block_sharding), None
        counts = valid_targets.reshape(row_shape)
        both: tuple[jax.Array, jax.Array] = jax.device_put(
            (block, counts), (block_sharding, row_sharding)
        )
        return both

    parts, counts_parts, devices, at = [], [], [], 0
    for shard in placement.local_shards:
        rows = shard.end - shard.begin
        part = windows[at : at + num_steps * rows].reshape(*steps, rows, placement.window_len)
        at += num_steps * rows
        for device in shard.devices:
            devices.append(device)
            parts.append(part)
            if valid_targets is not None:
                counts = valid_targets[:, shard.begin : shard.end]
                counts_parts.append(counts.reshape(*steps, rows, 1))
    tokens = _assembled(shape, block_sharding, parts, devices)
    if valid_targets is None:
        return tokens, None
    return tokens, _assembled(row_shape, row_sharding, counts_parts, devices)


def _assembled(
    shape: tuple[int, ...],
    sharding: Sharding,
    parts: list[NDArray[Any]],
    devices: list[jax.Device],
) -> jax.Array:
    on_device = jax.device_put(parts, devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, on_device)


def _narrowed(windows: NDArray[Any]) -> NDArray[Any]:
    """Returns the windows in a dtype that jax holds as it is: uint8, uint16, uint32 or int32."""
    if windows.dtype.itemsize < 4 or windows.dtype == np.int32:
        return windows
    limits = np.iinfo(np.int32)
    lowest, highest = int(windows.min()), int(windows.max())
    if lowest < limits.min or highest > limits.max:
        outside = highest if highest > limits.max else lowest
        raise ValueError(
            f"token id {outside} does not fit in int32, in which batches hold ids; "
            f"are the dtype and byte order of the file right?"
        )
    # int64 jax itself would narrow, without a check.
    return windows.astype(np.int32) if windows.dtype.itemsize == 8 else windows
