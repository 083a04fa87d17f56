"""What tests of several packages share: naive references, waiting, meshes, tokens that are watched."""

import io
import itertools
import math
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import tokenloader as tl
from tokenloader import open_tokens
from tokenloader.check.documents import Documents, document_keys
from tokenloader.formats.detect import locate
from tokenloader.loader.sharding import Placement
from tokenloader.plans.permutation import NUM_ROUNDS

DTYPES = "uint8", "uint16", "uint32", "int32", "int64"
SOURCES = ["array", "mmap", "ram", "sharded mmap", "sharded ram"]  # of the loader's fixture `sources`
PLANS = [
    tl.RandomWindows(seed=1),
    tl.ShuffledEpochs(seed=1),
    tl.ShuffledEpochs(seed=2, num_epochs=3),
    tl.ShuffledBlocks(seed=1, block_tokens=100, open_blocks=8, num_epochs=2),
    tl.SequentialWindows(),
]
NAMED_PLANS = [
    tl.RandomWindows(seed=2**64 - 1),
    tl.ShuffledEpochs(seed=1),
    tl.ShuffledEpochs(seed=2, num_epochs=30),
    tl.ShuffledBlocks(seed=1),
    tl.ShuffledBlocks(seed=3, block_tokens=100, open_blocks=4, num_epochs=30),
    tl.SequentialWindows(),
    tl.Mixture({range(300): 0.7, range(400, 997): 0.3}, tl.ShuffledEpochs(seed=4, num_epochs=30)),
    tl.Mixture({range(100, 900): 1}, tl.SequentialWindows()),
    tl.Mixture({range(300): 3, range(400, 997): 2}, tl.ShuffledBlocks(4, 70, 2)),
    tl.Mixture({range(10, 900): 1}, tl.Mixture({range(80): 1, range(80, 400): 3}, tl.RandomWindows(3))),
]  # over 997 tokens: each plan that a key names, with its arguments at their limits


def random_tokens(num_tokens=997):
    """uint16 [num_tokens], the same at every call."""
    return np.random.default_rng(0).integers(0, 2**16, num_tokens).astype(np.uint16)


def naive_gather(tokens, starts, length):
    """Windows [n, length] of a 1-D array, the three-line reference for every gather."""
    return np.stack([tokens[start : start + length] for start in np.asarray(starts).tolist()])


def python_permute(index, n, key):
    """Black and Rogaway's generalised Feistel cipher with cycle walking, in Python integers."""
    a, b = python_sides(n)
    while True:
        high, low = divmod(index, b)
        for i in range(0, NUM_ROUNDS, 2):
            high = (high + python_hash(low, key[i]) * a // 2**32) % a
            low = (low + python_hash(high, key[i + 1]) * b // 2**32) % b
        index = high * b + low
        if index < n:
            return index


def python_sides(n):
    a = next(a for a in itertools.count(max(1, math.isqrt(n) - 1)) if a * a >= n)
    return a, (n + a - 1) // a


def python_hash(x, key):
    h = (x ^ key) * 0xFF51AFD7ED558CCD % 2**64
    return (h ^ h >> 32) * 0xC4CEB9FE1A85EC53 % 2**64 >> 32


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


def npy_bytes(array, version=None):
    """The bytes of an .npy file, as numpy writes them."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def llm_c_bytes(tokens, magic=20240520, version=1, count=None):
    """The bytes of an llm.c file by its dev/data/data_common.py: 256 int32, then the tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


def tokens_at(extent):
    """The tokens of an extent, read plainly."""
    data = extent.path.read_bytes()[extent.offset_bytes : extent.offset_bytes + extent.nbytes]
    return np.frombuffer(data, extent.dtype)


def assert_raises(call, *named, error=ValueError):
    """A call fails with a message that has everything named."""
    with pytest.raises(error) as raised:
        call()
    for part in named:
        assert part in str(raised.value)


def assert_refused(path, *named, error=ValueError, key="tokens", dtype=None):
    """locate and open_tokens fail with a message that has the path and everything named."""
    for opening in (locate, open_tokens):
        assert_raises(
            lambda opening=opening: opening(path, key=key, dtype=dtype),
            str(path),
            *named,
            error=error,
        )


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


def run_python(code):
    """Runs code in a process of its own, warnings being errors; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def assert_same_batches(sharded, single, where):
    """Batches over many devices are those of one device, and each device holds its part of them."""
    for many, one in zip(sharded, single, strict=True):
        assert jax.tree.structure(many) == jax.tree.structure(one)
        for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            assert a.sharding.is_equivalent_to(where, 2)
            np.testing.assert_array_equal(a, b, strict=True)
            for shard in a.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(b)[shard.index])


def run_cli(*arguments, **kwargs):
    """Runs the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tokenloader", *arguments],
        text=True,
        timeout=60,
        check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs},
    )


def in_threads(*calls):
    """Calls all at once, each on a thread of its own, and waits for them."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def planned_rows(array, plan, first, count, seq_len):
    """The windows of a plan's samples from `first` on, [count, seq_len + 1] of a 1-D array."""
    starts = plan.bind(len(array), seq_len).window_starts(np.arange(first, first + count))
    return naive_gather(array, starts, seq_len + 1)


class WatchedWindows:
    """Located windows that call `before` whenever a thread other than the main one copies them."""

    def __init__(self, windows, before):
        self.windows, self.before = windows, before
        self.is_cached, self.prefetch = windows.is_cached, windows.prefetch
        self.first_not_cached, self.load = windows.first_not_cached, windows.load
        self.is_mapped, self.is_over_a_network = windows.is_mapped, windows.is_over_a_network

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
    """Tokens, and a log of all prefetches, loads and gathers of their windows: (kind, starts, length).

    Where `cached` is given, all windows say that they are in memory, or that none is.
    """

    def __init__(self, source, cached=None):
        self.tokens, self.log, self.cached = tl.open_tokens(source), [], cached
        locate = self.tokens.locate
        self.tokens.locate = lambda starts, length: RecordedWindows(
            self, locate(starts, length), np.asarray(starts).tolist(), length
        )

    def asked(self, kind):
        """(starts, length) of all that was prefetched, loaded, or gathered."""
        return [windows for asked, *windows in self.log if asked == kind]


class RecordedWindows:
    def __init__(self, recorded, windows, starts, length):
        self.recorded, self.windows, self.starts, self.length = recorded, windows, starts, length

    @property
    def is_mapped(self):
        return self.windows.is_mapped

    @property
    def is_over_a_network(self):
        return self.windows.is_over_a_network

    def load(self):
        self.recorded.log.append(("load", self.starts, self.length))
        self.windows.load()

    def is_cached(self):
        cached = self.recorded.cached
        return self.windows.is_cached() if cached is None else cached

    def prefetch(self):
        self.recorded.log.append(("prefetch", self.starts, self.length))
        self.windows.prefetch()

    def copy(self):
        self.recorded.log.append(("gather", self.starts, self.length))
        return self.windows.copy()


class KeyValueStore:
    """What jax's coordination service is to its clients, for processes that are threads of a test."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values, f"ALREADY_EXISTS: {key}"
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_dir_get(self, key):
        with self.changed:
            return [item for item in self.values.items() if item[0].startswith(key)]

    def key_value_delete(self, key):
        with self.changed:
            for name in [name for name in self.values if f"{name}/".startswith(f"{key}/")]:
                del self.values[name]


class OverProcesses(Placement):
    """The placement of a loader whose batches lie on other processes' devices, too."""

    is_local = False


def interrupted(function, point, within="tokenloader", instead=None):
    """Whether function() was interrupted at a point: a bytecode, counted from 0 over its calls.

    A KeyboardInterrupt is raised before that bytecode of the package `within`, as by Ctrl-C: Python
    delivers that between two bytecodes. False: there are fewer, and the function ran to its end.
    Where `instead` is given it is called there, as a signal handler is.
    """
    count, was_called = 0, False

    def trace(frame, event, _):
        nonlocal count, was_called
        module, caller = (
            each.f_globals.get("__name__", "") if each else "" for each in (frame, frame.f_back)
        )
        # What a finalizer raises never arrives: Python prints it.
        if not f"{module}.".startswith(f"{within}.") or caller == "weakref":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == point and instead is None:
                raise KeyboardInterrupt
            if count == point:
                count, was_called = count + 1, True
                sys.settrace(before)
                instead()
                sys.settrace(trace)
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
    return was_called


@dataclass(frozen=True)
class Listed(tl.Plan):
    """Windows at given places, named by its repr."""

    starts: np.ndarray
    more: object = None

    def bind(self, num_tokens, seq_len):
        return BoundListed(self)


@dataclass(frozen=True)
class BoundListed(tl.BoundPlan):
    plan: Listed
    num_samples = None

    def window_starts(self, samples):
        return self.plan.starts[samples % len(self.plan.starts)]

    def key(self, until_sample):
        return repr(self.plan)
