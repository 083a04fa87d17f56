"""gpu: what the accelerator changes: transfer speed, step overhead with GPT-2 124M, bytes on the bus.

The program needs no network, no root, and only the packages that tokenloader needs:
PYTHONPATH=src python -m benchmarks gpu.
On a machine without an accelerator it runs on the CPU, to test the program, and writes no result.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tokenloader as tl
from benchmarks import contestants, measure, token_file, train, warm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=2.0, help="size of the token file (default 2)")
    parser.add_argument("--rounds", type=int, default=7)


def run(options: argparse.Namespace) -> None:
    on_accelerator = jax.default_backend() != "cpu"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "train.safetensors"
        token_file.write(path, int(options.gib * 2**30) // 2)
        path.read_bytes()  # into the page cache
        result = {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "warm",
            "large_copy_gb_per_second": _large_copy(options.rounds),
            "throughput": [_throughput(path, B, T, options.rounds) for B, T in warm.SHAPES],
            "bytes_on_the_bus_per_token": _bytes_per_token(path),
            "device_bytes_in_flight": _device_bytes(path),
            "train": train.measure_step(path, options.rounds, 20 if on_accelerator else 2),
        }
    if on_accelerator:
        measure.write_result("gpu", result)
    else:
        measure.say(f"no accelerator: nothing written; it would be {result}")


def _large_copy(rounds: int) -> float:
    """The bus's rate: GB/s of a device_put of 512 MiB."""
    block = np.ones(512 << 20, np.uint8)
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(block, jax.devices()[0]))
        seconds.append(time.perf_counter() - began)
    rate = block.nbytes / statistics.median(seconds[1:]) / 1e9
    measure.say(f"large copy: {rate:.2f} GB/s")
    return round(rate, 2)


def _throughput(path: Path, B: int, T: int, rounds: int) -> dict[str, Any]:
    """Rates of finished batches: tokenloader, the bare parts, and nanoGPT's way."""
    everyone = contestants.all_for(path, B, T)
    peers = ("bare parts in a loop", "nanoGPT's way")
    some = {n: make for n, make in everyone.items() if n.startswith("tokenloader") or n in peers}
    rates = measure.alternate(some, rounds=rounds, seconds=0.4)
    row = {
        name: {
            "microseconds_per_batch": round(1e6 / statistics.median(rate), 1),
            "million_tokens_per_second": round(statistics.median(rate) * B * T / 1e6, 1),
            "h2d_gb_per_second": round(statistics.median(rate) * 2 * B * (T + 1) / 1e9, 3),
            "ram_is_times_this": round(measure.median_ratio(rates["tokenloader, ram"], rate), 3),
        }
        for name, rate in rates.items()
    }
    measure.say(f"{B}x{T}: {row}")
    return {"batch_size": B, "seq_len": T, "contestants": row}


def _bytes_per_token(path: Path) -> float:
    """Bytes sent to the device for a batch of 32x1024, per input token."""
    loader = tl.TokenLoader(tl.open_tokens(path), 32, 1024, transform=None)
    with loader:
        return round(next(loader).nbytes / (32 * 1024), 4)


def _device_bytes(path: Path) -> dict[str, int]:
    """The most bytes that a loader holds on the device beyond the batch handed out."""
    B, T = 32, 1024
    before, most = measure.device_bytes(), 0
    with tl.TokenLoader(tl.open_tokens(path), B, T) as loader:
        for _ in range(200):
            batch = jax.block_until_ready(next(loader))
            held = sum(x.nbytes for x in jax.tree.leaves(batch))
            most = max(most, measure.device_bytes() - before - held)
    block, made = 2 * B * (T + 1), 2 * 4 * B * T
    return {"most": most, "allowed": (loader.prefetch + 1) * (block + made)}
