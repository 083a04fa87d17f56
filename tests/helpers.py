"""What tests of several packages share: naive references, waiting, meshes."""

import threading
import time

import jax
import numpy as np
from jax.sharding import AxisType


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


def in_threads(*calls):
    """Calls all at once, each on a thread of its own, and waits for them."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
