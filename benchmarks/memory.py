"""memory: how much anonymous memory does a loader take beyond jax's own, in each residency?

Each residency runs in a process of its own, which first runs the same transfers and the same jit on
a small array: what it holds then is jax's. Anonymous memory (RssAnon) is what the process itself
holds; mapped pages of the file are not among it, the system takes them back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import measure, token_file

_BATCHES = 2000
_SHAPE = (32, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, help="size of the file (default: the full 19.09)")
    parser.add_argument("--file", type=Path, help="use this token file and do not write one")
    parser.add_argument("--residency", choices=["mmap", "ram"], help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.residency:
        print(json.dumps(_measure(options.file, options.residency)))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = options.file
        if path is None:
            path = Path(directory) / "train.safetensors"
            measure.say("writing the token file")
            token_file.write(path, token_file.size_option(options.gib))
        rows = {residency: _in_a_process(path, residency) for residency in ("mmap", "ram")}
    result = {"question": (__doc__ or "").splitlines()[0], "batches": _BATCHES, "shape": _SHAPE}
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
    with tl.TokenLoader(tokens, *_SHAPE) as loader:
        for i in range(_BATCHES):
            jax.block_until_ready(next(loader))
            if i % 20 == 0:
                highest = max(highest, _anonymous_bytes())
    return {
        "data_bytes": tokens.nbytes,
        "jax_anonymous_mib": round(before / 2**20, 1),
        "added_anonymous_mib": round((highest - before) / 2**20, 1),
        "added_share_of_data": round((highest - before) / tokens.nbytes, 4),
    }


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon: this program needs Linux 4.5 or newer")
