"""Transfer: a host block to a sharded jax.Array.

Who owns which bytes: on CPU jax uses an aligned host block in place, on accelerators the copy goes
on after `device_put` has returned. Either way the host bytes must never be written again, so every
block is fresh from `TokenArray.gather`, is handed to jax once, and nobody keeps it. A view of the
mapped file is never handed over.

It runs on the background thread, which runs no jit and no collective.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from tokenloader.loader.sharding import Placement


def put(
    windows: NDArray[Any],
    new_targets: NDArray[np.int32] | None,
    placement: Placement,
    num_steps: int = 1,
) -> tuple[jax.Array, jax.Array | None]:
    """Hands a fresh block to jax; does not wait.

    Args:
        windows: [m, placement.window], in the order of `placement.windows`.
        new_targets: how many targets count in each row that is here, [num_steps, n, 1]; or None.
        placement: where to.
        num_steps: that are sent as one.

    Returns:
        The block, [batch_size, columns], and new_targets, [batch_size, 1]; with a first axis of
        num_steps where that is more than 1.

    Raises:
        ValueError: an id does not fit in the int32 that jax will hold it in.
    """
    windows = _narrowed(windows)
    steps = () if num_steps == 1 else (num_steps,)
    shape = (*steps, placement.batch_size, placement.num_cuts * placement.window)
    row_shape = (*steps, placement.batch_size, 1)
    of_block, of_rows = placement.shardings(num_steps)
    if placement.sharding.is_fully_addressable:
        block = windows.reshape(shape)
        if new_targets is None:
            return jax.device_put(block, of_block), None
        counts = new_targets.reshape(row_shape)
        on_device: tuple[jax.Array, jax.Array] = jax.device_put(
            (block, counts), (of_block, of_rows)
        )
        return on_device

    # device_put onto a sharding over several processes is a collective; of pieces it is none.
    parts, counts_parts, devices, at = [], [], [], 0
    for piece in placement.pieces:
        rows = piece.end - piece.begin
        part = windows[at : at + num_steps * rows].reshape(*steps, rows, placement.window)
        at += num_steps * rows
        for device in piece.devices:
            devices.append(device)
            parts.append(part)
            if new_targets is not None:
                of_piece = new_targets[:, piece.begin : piece.end]
                counts_parts.append(of_piece.reshape(*steps, rows, 1))
    tokens = _assembled(shape, of_block, parts, devices)
    if new_targets is None:
        return tokens, None
    return tokens, _assembled(row_shape, of_rows, counts_parts, devices)


def _assembled(
    shape: tuple[int, ...],
    sharding: Sharding,
    parts: list[NDArray[Any]],
    devices: list[jax.Device],
) -> jax.Array:
    on_device = jax.device_put(parts, devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, on_device)


def _narrowed(windows: NDArray[Any]) -> NDArray[Any]:
    """In a dtype that jax holds as it is: uint8, uint16, uint32 or int32."""
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
