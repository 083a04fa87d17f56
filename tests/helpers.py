"""What tests of several packages share: naive references, waiting, meshes, tokens that are watched."""

import sys
import threading
import time
import weakref

import jax
import numpy as np
from jax.sharding import AxisType

import tokenloader as tl


def random_tokens(num_tokens=997):
    """uint16 [num_tokens], the same at every call."""
    return np.random.default_rng(0).integers(0, 2**16, num_tokens).astype(np.uint16)


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


def planned_rows(array, plan, first, count, seq_len):
    """The windows of a plan's samples from `first` on, [count, seq_len + 1] of a 1-D array."""
    starts = plan.bind(len(array), seq_len).window_starts(np.arange(first, first + count))
    return naive_gather(array, starts, seq_len + 1)


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


def interrupted(function, point, within="tokenloader"):
    """Whether function() was interrupted at a point: a bytecode, counted from 0 over its calls.

    A KeyboardInterrupt is raised before that bytecode of the package `within`, as by Ctrl-C: Python
    delivers that between two bytecodes. False: there are fewer, and the function ran to its end.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        module, caller = (
            each.f_globals.get("__name__", "") if each else "" for each in (frame, frame.f_back)
        )
        # What a finalizer raises never arrives: Python prints it.
        if not f"{module}.".startswith(f"{within}.") or caller == "weakref":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == point:
                raise KeyboardInterrupt
            count += 1
        return trace

    def calls():  # a generator has the error in hand to itself: none is left behind in the caller's
        yield function()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        next(calls())
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
