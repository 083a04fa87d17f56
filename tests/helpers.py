"""What tests of several packages share: naive references, waiting, meshes."""

import subprocess
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType

import tokenloader as tl
from tokenloader.check.documents import Documents, document_keys


def naive_gather(tokens, starts, length):
    """Windows [n, length] of a 1-D array, the three-line reference for every gather."""
    return np.stack([tokens[start : start + length] for start in np.asarray(starts).tolist()])


def eventually(condition, seconds=5.0):
    """Whether a condition becomes true before a generous deadline; returns as soon as it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def make_mesh(*sizes, names="abc", axis_type=AxisType.Auto):
    """A mesh of the first devices, its axes named by the letters of names (or by a sequence of them)."""
    devices = jax.devices()[: int(np.prod(sizes))]
    axis_types = (axis_type,) * len(sizes)
    return jax.make_mesh(sizes, tuple(names[: len(sizes)]), axis_types=axis_types, devices=devices)


def random_ids(seed, length=1000):
    """Ids below 50,000."""
    return np.random.default_rng(seed).integers(0, 50_000, length)


def changed(ids, at, to=50_001):
    """A copy of ids with another one at one place."""
    ids = ids.copy()
    ids[at] = to
    return ids


def open_documents(documents):
    """Tokens of documents end to end, without anything between them, and where they lie."""
    ids = [np.asarray(document, np.uint16) for document in documents]
    lengths = np.array([len(document) for document in ids])
    starts = np.append(0, lengths.cumsum()[:-1])
    tokens = tl.open_tokens(np.concatenate(ids))
    keys = document_keys(tokens[:], starts, lengths)
    return tokens, Documents(keys, starts, lengths, np.full(len(keys), -1))


def run_cli(*arguments, **kwargs):
    """Runs the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tokenloader", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **kwargs,
    )
