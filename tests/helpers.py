"""What tests of several packages share: naive references, waiting, meshes, tokens that are watched."""

import threading
import time
import weakref

import jax
import numpy as np
from jax.sharding import AxisType

import tokenloader as tl
from tokenloader.loader.sharding import Placement


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


class WatchedWindows:
    """Located windows that call `before` whenever a thread other than the main one copies them."""

    def __init__(self, windows, before):
        self.windows, self.before = windows, before
        self.is_cached, self.prefetch = windows.is_cached, windows.prefetch

    def copy(self):
        if threading.current_thread() is not threading.main_thread():
            self.before()
        return self.windows.copy()


def watched_tokens(before, array):
    """Tokens that call `before` whenever a loader's background thread copies windows of them."""
    tokens = tl.open_tokens(array)
    alive = weakref.ref(tokens)  # what they refer to must not keep them

    def locate(starts, length):
        return WatchedWindows(type(alive()).locate(alive(), starts, length), before)

    tokens.locate = locate
    return tokens


class RecordedTokens:
    """Tokens, and a log of all prefetches and gathers of their windows: (kind, starts, length).

    Where `cached` is given, all windows say that they are in memory, or that none is.
    """

    def __init__(self, array, cached=None):
        self.tokens, self.log, self.cached = tl.open_tokens(array), [], cached
        locate = self.tokens.locate
        self.tokens.locate = lambda starts, length: RecordedWindows(
            self, locate(starts, length), np.asarray(starts).tolist(), length
        )

    def asked(self, kind):
        """(starts, length) of all that was prefetched, or gathered."""
        return [windows for asked, *windows in self.log if asked == kind]


class RecordedWindows:
    def __init__(self, recorded, windows, starts, length):
        self.recorded, self.windows, self.starts, self.length = recorded, windows, starts, length

    def is_cached(self):
        cached = self.recorded.cached
        return self.windows.is_cached() if cached is None else cached

    def prefetch(self):
        self.recorded.log.append(("prefetch", self.starts, self.length))
        self.windows.prefetch()

    def copy(self):
        self.recorded.log.append(("gather", self.starts, self.length))
        return self.windows.copy()


class OverProcesses(Placement):
    """The placement of a loader whose batches lie on other processes' devices, too."""

    is_local = False
