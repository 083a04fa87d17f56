"""memory: how much anonymous memory does a loader take beyond jax's own, in each residency?

Each residency runs in a process of its own, which first runs the same transfers and the same jit on a
small array; its memory then is counted as jax's. Anonymous memory (RssAnon) leaves out mapped pages of
the file, which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import measure, token_file
from tokenloader.storage.memory_limits import available_bytes

_BATCHES = 2000
_SHAPE = (32, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    token_file.add_arguments(parser)
    parser.add_argument("--residency", choices=["mmap", "ram"], help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.residency:
        print(json.dumps(_measure(options.file, options.residency)))
        return
    room = available_bytes()
    with token_file.made(options) as path:
        rows = {}
        for residency in ("mmap", "ram"):
            if residency == "ram" and room is not None and room < token_file.size_of(options):
                measure.say("skipped: ram (there is less memory than data; see --gib)")
            else:
                rows[residency] = _in_a_process(path, residency)
    result = {"question": (__doc__ or "").splitlines()[0], "cache": "as found"}
    result |= {"batches": _BATCHES, "shape": _SHAPE}
    measure.write_result("memory", {**result, "residencies": rows})


def _in_a_process(path: Path, residency: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "memory", "--file", str(path)]
    finished = subprocess.run(
        [*command, "--residency", residency], stdout=subprocess.PIPE, check=True, text=True
    )
    row: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    measure.say(f"{residency}: {row}")
    return row


def _measure(path: Path, residency: str) -> dict[str, Any]:
    import jax
    import numpy as np

    import tokenloader as tl

    small = tl.open_tokens(np.zeros(1 << 20, np.uint16))
    with tl.TokenLoader(small, *_SHAPE) as loader:
        for _ in range(_BATCHES):
            jax.block_until_ready(next(loader))
    before = highest = _anonymous_bytes()
    tokens = tl.open_tokens(path, residency=residency)
    on_device = []
    with tl.TokenLoader(tokens, *_SHAPE) as loader:
        before_device = measure.device_bytes()
        for i in range(_BATCHES):
            if i == _BATCHES // 2:
                tokens.wait_until_loaded()  # half while it is being filled, half from RAM
            batch = jax.block_until_ready(next(loader))
            if i % 20 == 0:
                highest = max(highest, _anonymous_bytes())
                handed_out = sum(x.nbytes for x in jax.tree.leaves(batch))
                on_device.append(measure.device_bytes() - before_device - handed_out)
    batch_bytes = 2 * 4 * _SHAPE[0] * _SHAPE[1]
    block_bytes = 2 * _SHAPE[0] * (_SHAPE[1] + 1)
    return {
        "data_bytes": tokens.nbytes,
        "jax_anonymous_mib": round(before / 2**20, 1),
        "added_anonymous_mib": round((highest - before) / 2**20, 1),
        "added_share_of_data": round((highest - before) / tokens.nbytes, 4),
        "prefetch": loader.prefetch,
        "block_bytes": block_bytes,
        "batch_bytes": batch_bytes,
        "device_bytes_in_flight": max(on_device),
        "device_bytes_allowed": (loader.prefetch + 1) * (block_bytes + batch_bytes),
    }


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon: this program needs Linux 4.5 or newer")
