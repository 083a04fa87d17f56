"""first: how many seconds from opening the file to the first finished batch, cold?

Each way runs in a process of its own, with the page cache dropped where that is permitted (root). The
clock starts after jax has started and the transform is compiled, so it measures what the data costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import measure, token_file

SHAPE = (32, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    token_file.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.way:
        print(json.dumps(_seconds(options.file, options.way)))
        return
    cold = measure.can_drop_page_cache()
    with token_file.made(options) as path:
        rows = {
            name: _in_processes(path, name, options.rounds if name != "load_file" else 1, cold)
            for name in WAYS
        }
    measure.write_result(
        "first",
        {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "dropped before each process" if cold else "warm: dropping it needs root",
            "gib": round(token_file.size_of(options) / 2**30, 2),
            "shape": SHAPE,
            "seconds": rows,
        },
    )


def _in_processes(path: Path, way: str, rounds: int, cold: bool) -> float | None:
    seconds = []
    for _ in range(rounds):
        if cold:
            measure.drop_page_cache()
        command = [sys.executable, "-m", "benchmarks", "first", "--file", str(path), "--way", way]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if finished.returncode:
            measure.say(f"{way}: died with status {finished.returncode}")
            return None
        seconds.append(float(json.loads(finished.stdout.splitlines()[-1])))
        measure.say(f"{way}: {seconds[-1]:.3f} s")
    return round(statistics.median(seconds), 4)


def _seconds(path: Path, way: str) -> float:
    import jax
    import numpy as np

    import tokenloader as tl

    B, T = SHAPE
    with tl.TokenLoader(tl.open_tokens(np.zeros(1 << 20, np.uint16)), B, T) as small:
        jax.block_until_ready(next(small))
    began = time.perf_counter()
    jax.block_until_ready(WAYS[way](path, B, T))
    return time.perf_counter() - began


def _ours(residency: Any) -> Any:
    def first(path: Path, B: int, T: int) -> Any:
        import tokenloader as tl

        loader = tl.TokenLoader(tl.open_tokens(path, residency=residency), B, T)
        return next(loader)

    return first


def _load_file(path: Path, B: int, T: int) -> Any:
    import jax
    import numpy as np
    from safetensors.numpy import load_file

    import tokenloader as tl

    tokens = load_file(path)["tokens"]
    starts = np.random.default_rng(0).integers(0, len(tokens) - T, B)
    block = np.stack([tokens[start : start + T + 1] for start in starts])
    return jax.jit(tl.next_token)(jax.device_put(block))


WAYS: dict[str, Any] = {
    "tokenloader, mmap": _ours("mmap"),
    "tokenloader, ram": _ours("ram"),
    "load_file": _load_file,
}
