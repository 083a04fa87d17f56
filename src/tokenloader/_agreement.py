"""Agreement: the processes of a run find out at once, all of them, when they were not given the same.

Each describes what it was given. A hash of that is gathered from all, in one small collective on the
caller's thread; only where hashes differ the descriptions are gathered too, so that every process
raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from tokenloader._placement import processes_in_words, under


def check_all_have(given: Mapping[str, Any], what: str) -> None:
    """Waits until every process of the program calls this, and compares.

    Args:
        given: what this process has, JSON-able, by name.
        what: that is, in words, for the error.

    Raises:
        ValueError: on every process, if one has something else: which differ, and in what.
    """
    text = json.dumps(given, sort_keys=True, default=str).encode()
    size_and_hash = len(text).to_bytes(8, "little") + hashlib.blake2b(text, digest_size=16).digest()
    of_all = _gather(np.frombuffer(size_and_hash, np.uint8))
    if (of_all == of_all[0]).all():
        return
    longest = int(of_all[:, :8].copy().view("<u8").max())
    padded = np.frombuffer(text.ljust(longest), np.uint8)
    raise ValueError(_differences([json.loads(bytes(row)) for row in _gather(padded)], what))


def _differences(of_all: list[dict[str, Any]], what: str) -> str:
    lines = []
    for name in of_all[0]:
        holders: dict[str, list[int]] = {}
        for process, given in enumerate(of_all):
            holders.setdefault(str(given.get(name)), []).append(process)
        if len(holders) > 1:
            lines.append(
                f"  {name}: "
                + "; ".join(
                    f"{value} on {processes_in_words(found)}" for value, found in holders.items()
                )
            )
    return f"the processes of this run have different {what}:\n" + "\n".join(lines)


def _gather(row: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The row of every process: uint8 [num_processes, n]."""
    # A mesh of its own, which does not depend on what the processes may differ in.
    first: dict[int, Any] = {}
    devices: list[Any] = jax.devices()
    for device in sorted(devices, key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("process",))
    mine = jax.device_put(row[None], first[jax.process_index()])
    shape = (len(first), len(row))
    split = NamedSharding(mesh, PartitionSpec("process"))
    rows = jax.make_array_from_single_device_arrays(shape, split, [mine])
    with under(mesh):
        gathered = _replicated(mesh)(rows)
    found: NDArray[np.uint8] = jax.device_get(gathered.addressable_data(0))
    return found


@lru_cache(maxsize=1)
def _replicated(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
