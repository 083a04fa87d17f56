"""The ways to feed JAX that are compared, each an endless stream of finished work.

All do the same: random windows of T + 1 uint16 tokens, to int32 inputs and targets [B, T] as jax
arrays on the default device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.lib.stride_tricks import as_strided

import tokenloader as tl

Pair = tuple[jax.Array, jax.Array]


def ours(path: Path, B: int, T: int, residency: str) -> Iterator[tl.Batch]:
    """TokenLoader with its defaults."""
    return tl.TokenLoader(
        tl.open_tokens(path, residency=residency), B, T, plan=tl.ShuffledEpochs(0)
    )


def nanogpt(path: Path, B: int, T: int) -> Iterator[Pair]:
    """The get_batch of nanoGPT over to JAX: a memmap, a loop over rows, stack, device_put.

    Kinder to it than the original, which opens the memmap anew for every batch (against the growth
    of resident memory) and widens to int64.
    """
    data = np.memmap(path, np.uint16, "r", offset=_data_offset(path))
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(data) - T, B)
        inputs = np.stack([data[i : i + T].astype(np.int32) for i in starts])
        targets = np.stack([data[i + 1 : i + 1 + T].astype(np.int32) for i in starts])
        yield jax.device_put((inputs, targets))


def bare_parts(path: Path, B: int, T: int) -> Iterator[Any]:
    """The floor: the parts of the pipeline in one loop, and nothing else.

    One numpy call gathers, one device_put transfers, one jit shifts and widens; the starts were drawn
    beforehand. No thread, no plan, no state, no check.
    """
    tokens = tl.open_tokens(path, residency="ram")[:]
    records = as_strided(tokens.view(np.uint8), (len(tokens) - T, 2 * (T + 1)), (2, 1))
    records = records.view(f"V{2 * (T + 1)}")[:, 0]
    starts = np.random.default_rng(0).integers(0, len(tokens) - T, (1000, B))
    device, make_batch = jax.devices()[0], jax.jit(tl.next_token)
    while True:
        for rows in starts:
            block = records[rows].view(np.uint16).reshape(B, T + 1)
            yield make_batch(jax.device_put(block, device))


def _data_offset(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
