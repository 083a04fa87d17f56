"""Contestants: ways to feed JAX, each an endless stream of batches.

Every contestant takes windows of T + 1 uint16 tokens in its library's own random order and yields int32
inputs and targets [B, T], jax arrays on the default device. Each is set up as its own documentation
advises for this work; of several such set-ups, the one that was fastest here was taken. So Grain, PyTorch
and get_slice send uint16 blocks and widen them under our jit, as we do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from numpy.lib.stride_tricks import as_strided

import tokenloader as tl
from benchmarks.measure import say

Pair = tuple[jax.Array, jax.Array]
Stream = Callable[[], Iterator[Any]]


def all_for(path: Path, B: int, T: int) -> dict[str, Stream]:
    """Every contestant that is installed; a missing one is skipped aloud."""
    found: dict[str, Stream] = {
        "tokenloader, mmap": partial(ours, path, B, T, "mmap"),
        "tokenloader, ram": partial(ours, path, B, T, "ram"),
        "tokenloader, ram, prefetch 8": partial(ours, path, B, T, "ram", 8),
        "bare parts in a loop": partial(bare_parts, path, B, T),
        "nanoGPT's way": partial(nanogpt, path, B, T),
        "CPU jax.Array, indexed": partial(committed_array, path, B, T),
        "safetensors get_slice": partial(get_slice, path, B, T),
    }
    optional: dict[str, tuple[str, Stream]] = {
        "Grain": ("grain", partial(grain_map_dataset, path, B, T)),
        "PyTorch DataLoader, 0 workers": ("torch", partial(torch_loader, path, B, T, 0)),
        "PyTorch DataLoader, 2 workers": ("torch", partial(torch_loader, path, B, T, 2)),
        "LitData TokensLoader": ("litdata", partial(litdata_tokens, path, B, T)),
    }
    for name, (package, stream) in optional.items():
        try:
            __import__(package)
        except ImportError as error:
            say(f"skipped: {name} ({error})")
        else:
            found[name] = stream
    return found


def ours(
    path: Path, B: int, T: int, residency: Literal["mmap", "ram"], prefetch: int = 2
) -> Iterator[tl.Batch]:
    """TokenLoader with its defaults, or with another prefetch."""
    tokens = tl.open_tokens(path, residency=residency)
    tokens.wait_until_loaded()
    return tl.TokenLoader(tokens, B, T, plan=tl.ShuffledEpochs(0), prefetch=prefetch)


def bare_parts(path: Path, B: int, T: int) -> Iterator[Pair]:
    """The parts of the pipeline in one loop and nothing else: no thread, plan, state or check.

    One numpy call gathers, one device_put transfers, one jit shifts and widens; the starts were drawn
    beforehand.
    """
    tokens = np.fromfile(path, np.uint16, offset=_data_offset(path))
    records = as_strided(tokens.view(np.uint8), (len(tokens) - T, 2 * (T + 1)), (2, 1))
    records = records.view(f"V{2 * (T + 1)}")[:, 0]
    starts = np.random.default_rng(0).integers(0, len(tokens) - T, (1000, B))
    device, make_batch = jax.devices()[0], jax.jit(tl.next_token)
    while True:
        for rows in starts:
            block = records[rows].view(np.uint16).reshape(B, T + 1)
            yield make_batch(jax.device_put(block, device))


def nanogpt(path: Path, B: int, T: int, seed: int = 0) -> Iterator[Pair]:
    """The get_batch of nanoGPT in JAX: a memmap, a loop over rows, stack, device_put.

    Faster than the original, which opens the memmap anew for every batch (against the growth of
    resident memory) and widens to int64.
    """
    data = _memmap(path)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - T, B)
        inputs = np.stack([data[i : i + T].astype(np.int32) for i in starts])
        targets = np.stack([data[i + 1 : i + 1 + T].astype(np.int32) for i in starts])
        yield jax.device_put((inputs, targets))


def committed_array(path: Path, B: int, T: int) -> Iterator[Pair]:
    """All tokens in a jax.Array that is committed to the CPU device.

    Windows are sliced out of the array under one jit on the CPU, and sent to the default device.
    """
    cpu = jax.devices("cpu")[0]
    data = jax.device_put(np.fromfile(path, np.uint16, offset=_data_offset(path)), cpu)

    @jax.jit
    def gather(data: jax.Array, starts: jax.Array) -> Pair:
        window = jax.vmap(lambda start: jax.lax.dynamic_slice(data, (start,), (T + 1,)))
        block = window(starts).astype(np.int32)
        return block[:, :-1], block[:, 1:]

    rng, device = np.random.default_rng(0), jax.devices()[0]
    while True:
        starts = jax.device_put(rng.integers(0, len(data) - T, B, dtype=np.int32), cpu)
        yield jax.device_put(gather(data, starts), device)


def get_slice(path: Path, B: int, T: int) -> Iterator[Pair]:
    """The lazy reading of the safetensors library, a slice for each window."""
    from safetensors import safe_open

    device, make_batch = jax.devices()[0], jax.jit(tl.next_token)
    rng = np.random.default_rng(0)
    with safe_open(path, framework="numpy") as file:
        tokens = file.get_slice("tokens")
        (num_tokens,) = tokens.get_shape()
        while True:
            starts = rng.integers(0, num_tokens - T, B).tolist()
            block = np.stack([tokens[start : start + T + 1] for start in starts])
            yield make_batch(jax.device_put(block, device))


def grain_map_dataset(path: Path, B: int, T: int) -> Iterator[Pair]:
    """Grain's MapDataset over the memmap, and Grain's device_put with prefetch."""
    import grain

    # One read thread was the fastest of 1, 2, 4 and 16 on 2 cores: the work holds the GIL.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    dataset = grain.MapDataset.source(_Windows(path, T)).shuffle(seed=0).repeat().batch(B)
    blocks = grain.experimental.device_put(
        dataset.to_iter_dataset(options), jax.devices()[0], cpu_buffer_size=2, device_buffer_size=2
    )
    return map(jax.jit(tl.next_token), blocks)


def torch_loader(path: Path, B: int, T: int, workers: int) -> Iterator[Pair]:
    """PyTorch's DataLoader over the memmap, collated by numpy, and device_put."""
    from torch.utils.data import DataLoader, RandomSampler

    windows = _Windows(path, T)
    loader = DataLoader(
        windows,
        batch_size=B,
        sampler=RandomSampler(windows, replacement=True, num_samples=10**9),
        collate_fn=np.stack,
        num_workers=workers,
        # A fork would copy jax's locks, and one that was held would stay locked for ever.
        multiprocessing_context="forkserver" if workers else None,
        persistent_workers=bool(workers),
    )
    device, make_batch = jax.devices()[0], jax.jit(tl.next_token)
    for block in loader:
        yield make_batch(jax.device_put(block, device))


def litdata_tokens(path: Path, B: int, T: int) -> Iterator[Pair]:
    """LitData's StreamingDataset with its TokensLoader, over a copy of the tokens in its format."""
    import litdata
    import torch

    folder = path.parent / f"litdata-{T}"
    if not folder.exists():
        tokens = torch.from_numpy(np.array(_memmap(path)).astype(np.int32))
        litdata.optimize(
            fn=_identity,
            inputs=[tokens],
            output_dir=str(folder),
            chunk_bytes="64MB",
            item_loader=litdata.TokensLoader(block_size=T + 1),
            num_workers=1,
        )
    dataset = litdata.StreamingDataset(
        str(folder), item_loader=litdata.TokensLoader(block_size=T + 1), shuffle=True
    )
    loader = litdata.StreamingDataLoader(dataset, batch_size=B, num_workers=0)
    while True:
        for block in loader:
            wide = block.numpy()
            yield jax.device_put((wide[:, :-1], wide[:, 1:]))


class _Windows:
    """A random-access source of windows, for Grain and PyTorch."""

    def __init__(self, path: Path, T: int) -> None:
        self._path, self._T = path, T

    @cached_property  # each worker process opens the file for itself
    def _data(self) -> np.ndarray:
        return _memmap(self._path).view(np.ndarray)  # np.memmap itself is slower to index

    def __len__(self) -> int:
        return (len(self._data) - 1) // self._T

    def __getitem__(self, i: int) -> np.ndarray:
        return self._data[i * self._T : (i + 1) * self._T + 1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_T": self._T}


def _identity(tokens: Any) -> Iterator[Any]:
    yield tokens


def _memmap(path: Path) -> np.memmap:
    return np.memmap(path, np.uint16, "r", offset=_data_offset(path))


def _data_offset(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
