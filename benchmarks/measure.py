"""Measurement side by side: in each round the contestants take turns.

Machines are shared and noisy, so two contestants are compared by the median over rounds of their ratio
within a round, and never by times from different minutes.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

_DROP = Path("/proc/sys/vm/drop_caches")
RESULTS = Path(__file__).parent / "results"


def alternate(
    contestants: Mapping[str, Callable[[], Iterator[Any]]],
    *,
    rounds: int,
    seconds: float,
) -> dict[str, list[float]]:
    """Finished batches per second of each contestant in each round.

    A batch is finished when its arrays are ready on the device. Every contestant is made once. In each
    round it makes a few batches that do not count, then batches for `seconds`; the order rotates.
    """
    streams = {name: make() for name, make in contestants.items()}
    rates: dict[str, list[float]] = {name: [] for name in streams}
    names = list(streams)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            stream = streams[name]
            for _ in range(5):
                jax.block_until_ready(next(stream))
            batches, began = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - began) < seconds:
                jax.block_until_ready(next(stream))
                batches += 1
            rates[name].append(batches / elapsed)
    return rates


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def environment() -> dict[str, Any]:
    """The hardware, system, versions and commit that figures depend on."""
    return {
        "device": str(jax.devices()[0].device_kind),
        "platform": jax.devices()[0].platform,
        "num_devices": jax.device_count(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy")},
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def device_bytes() -> int:
    """Bytes of all jax arrays that are alive."""
    return sum(x.nbytes for x in jax.live_arrays())


def can_drop_page_cache() -> bool:
    """Whether drop_page_cache() is permitted: on Linux, as root."""
    return os.access(_DROP, os.W_OK)


def drop_page_cache() -> None:
    """Makes the kernel forget the cached pages of all files."""
    os.sync()
    _DROP.write_text("1")


def write_result(name: str, result: dict[str, Any]) -> None:
    """Writes benchmarks/results/NAME.json, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / f"{name}.json", result)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result and its environment to a file, whole or not at all."""
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
    temporary.replace(path)
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def say(text: str) -> None:
    """Prints a line of progress at once."""
    print(text, file=sys.stderr, flush=True)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")


def _commit() -> str:
    """The commit of the code, marked dirty if the code has changed since; results do not count."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
