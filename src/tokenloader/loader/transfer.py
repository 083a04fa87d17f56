"""Transfer: a host block to a sharded jax.Array, and the order in which its windows are gathered.

Who owns which bytes: on CPU jax uses an aligned host block in place, on accelerators the copy goes
on after `device_put` has returned. Either way the host bytes must never be written again, so every
block is fresh from `LocatedWindows.copy`, is handed to jax once, and nobody keeps it. A view of the
mapped file is never handed over.

Only this module knows the order of the windows in a host block. For two steps of four rows:

    all devices in one process      several processes, of which this one holds
                                    two shards: rows 0-1 and rows 2-3
    step 0  row 0                   shard 0  step 0  row 0
            row 1                                    row 1
            row 2                            step 1  row 0
            row 3                                    row 1
    step 1  row 0                   shard 1  step 0  row 2
            row 1                                    row 3
            row 2                            step 1  row 2
            row 3                                    row 3

In one process jax cuts the block into the devices' shards; a row whose sequence is split into n shards
is n windows, one after the other. In several processes `device_put` of a whole block would be a
collective, so the block is cut here: the windows of a shard lie together, and each is one shard long.

Transfers run on the background thread, which runs no jit and no collective.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from tokenloader.loader.sharding import Placement


def gather_starts(window_starts: NDArray[np.int64], placement: Placement) -> NDArray[np.int64]:
    """Returns where the windows of a host block begin, in the order drawn above: int64 [m].

    Args:
        window_starts: int64 [num_steps, n], where the rows that this process holds begin.
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
        valid_targets: int32 [num_steps, n, 1], targets that count in each row of this process; or None.

    Returns the block, [batch_size, columns], and valid_targets, [batch_size, 1]; both with a first axis of
    num_steps where that is more than 1. Raises ValueError if an id does not fit in int32.
    """
    windows = _narrowed(windows)
    steps = () if num_steps == 1 else (num_steps,)
    shape = (*steps, placement.batch_size, placement.num_seq_shards * placement.window_len)
    row_shape = (*steps, placement.batch_size, 1)
    block_sharding, row_sharding = placement.shardings(num_steps)
    if placement.is_local:
        host_block = windows.reshape(shape)
        if valid_targets is None:
            return jax.device_put(host_block, block_sharding), None
        host = host_block, valid_targets.reshape(row_shape)
        both: tuple[jax.Array, jax.Array] = jax.device_put(host, (block_sharding, row_sharding))
        return both

    parts, at = [], 0
    for shard in placement.local_shards:
        rows = shard.end - shard.begin
        parts.append(windows[at : at + num_steps * rows].reshape(*steps, rows, placement.window_len))
        at += num_steps * rows
    block = _assembled(parts, placement, shape, block_sharding)
    if valid_targets is None:
        return block, None
    counts_parts = [
        valid_targets[:, shard.begin : shard.end].reshape(*steps, -1, 1) for shard in placement.local_shards
    ]
    return block, _assembled(counts_parts, placement, row_shape, row_sharding)


def _assembled(
    parts: list[NDArray[Any]], placement: Placement, shape: tuple[int, ...], sharding: Sharding
) -> jax.Array:
    """Sends a part for each of the local shards to the shard's devices; returns the array of all."""
    kind = placement.memory_kind
    copies, devices = [], []
    for part, shard in zip(parts, placement.local_shards, strict=True):
        for device in shard.devices:
            copies.append(part)
            devices.append(SingleDeviceSharding(device, memory_kind=kind) if kind else device)
    return jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(copies, devices))


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
    # jax itself would narrow int64 without a check.
    return windows.astype(np.int32) if windows.dtype.itemsize == 8 else windows
