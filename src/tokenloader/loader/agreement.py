"""Agreement: all processes of a run learn at once when one of them was given something else.

Each process describes what it was given. One small collective on the caller's thread gathers a hash of each
description; only where hashes differ the descriptions are gathered too, so that every process raises the
same error.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from tokenloader.loader.sharding import mesh_context, processes_in_words


@contextmanager
def check_same_across_processes(what: str, enabled: bool) -> Iterator[dict[str, Any]]:
    """Compares what the processes were given: at the end of the block each waits until all are there.

    An error in the block is compared too: what one process alone refuses must not leave the others waiting.

    Yields a dict to fill with the values to compare, by name; JSON can hold each. `what` names them all in
    the error. Where it is not enabled, they are this process's own affair.

    Raises:
        ValueError: on every process, if one has another value or an error: each difference, and whose.
        Exception: the block's own error, if it raised one in every process.
    """
    given: dict[str, Any] = {}
    if not enabled:
        yield given
        return
    raised: Exception | None = None
    try:
        yield given
    except Exception as error:
        raised, given = error, {"error": f"{type(error).__name__}: {error}"}
    try:
        _compare(given, what, raised)
    finally:
        del raised  # the error holds this frame; without the cycle both are freed at once


def _compare(given: dict[str, Any], what: str, raised: Exception | None) -> None:
    text = json.dumps(given, sort_keys=True).encode()
    size_and_hash = len(text).to_bytes(8, "little") + hashlib.blake2b(text, digest_size=16).digest()
    hashes = _gather(np.frombuffer(size_and_hash, np.uint8))
    if not (hashes == hashes[0]).all():
        longest = int(hashes[:, :8].copy().view("<u8").max())
        padded = np.frombuffer(text.ljust(longest), np.uint8)
        described = [json.loads(bytes(row)) for row in _gather(padded)]
        if not all("error" in each for each in described):
            raise ValueError(differences_in_words(described, what)) from raised
    if raised is not None:
        raise raised


def differences_in_words(described: list[dict[str, Any]], what: str) -> str:
    """Returns the error's text: for each name that differs, which processes have which value."""
    lines = []
    failed = any("error" in given for given in described)
    for name in ["error"] if failed else described[0]:
        holders: dict[str, list[int]] = {}
        for process, given in enumerate(described):
            holders.setdefault(str(given.get(name, "none")), []).append(process)
        if len(holders) > 1:
            lines.append(
                f"  {name}: "
                + "; ".join(f"{value} on {processes_in_words(found)}" for value, found in holders.items())
            )
    return f"the processes of this run have different {what}:\n" + "\n".join(lines)


def _gather(row: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the row of every process: uint8 [num_processes, n]."""
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
    with mesh_context(mesh):
        gathered = _replicated(mesh)(rows)
    found: NDArray[np.uint8] = jax.device_get(gathered.addressable_data(0))
    return found


@lru_cache(maxsize=1)
def _replicated(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
