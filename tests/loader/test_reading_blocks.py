"""Loaders whose plan reads blocks: batches as of any plan, whatever happens to disk, tokens and plan."""

import gc
import itertools
import os
import threading
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import eventually, make_mesh, planned_rows, random_tokens, run_python
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from token_files import fill_with, write_npy

import tokenloader as tl
from tokenloader.loader import token_loader
from tokenloader.loader.prefetch import Prefetcher
from tokenloader.storage.kernel_advice import KernelAdvice
from tokenloader.storage.ram import RamFill, read_exactly
from tokenloader.tokens.opening import join

pytestmark = pytest.mark.timeout(60)

N, B, T = 200_000, 8, 99
TOKENS = random_tokens(N)
BLOCKS = tl.ShuffledBlocks(seed=1, block_tokens=10_000, open_blocks=16)  # 99 windows each, of 20 in all
IN_ORDER = tl.SequentialWindows()
MIXED = tl.Mixture({range(7, 90_000): 2, range(90_000, N): 1}, BLOCKS)
rows_of = partial(planned_rows, TOKENS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """TOKENS in a file."""
    return write_npy(tmp_path_factory.mktemp("tokens") / "t.npy", TOKENS)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """TOKENS in files whose ends are those of no block or window."""
    folder = tmp_path_factory.mktemp("shards")
    parts = enumerate(np.split(TOKENS, [3, 12_345, 12_350, 99_999]))
    return [write_npy(folder / f"{i}.npy", part) for i, part in parts]


class Disk(KernelAdvice):
    """Advice as it is given, where what is announced in large requests may hang."""

    def __init__(self):
        super().__init__()
        self.hangs, self.going, self.loads = False, threading.Event(), []

    def start_reading(self, ranges, *most_bytes):
        if most_bytes:
            self.loads.append(int(ranges[:, 1].sum()))
            if self.hangs:
                assert self.going.wait(30)
        super().start_reading(ranges, *most_bytes)


@pytest.fixture
def disk():
    made = Disk()
    yield made
    made.going.set()


def on(disk, *paths):
    """Files on a disk, opened."""
    return join(tl.open_tokens(list(paths)).extents, "mmap", kernel=disk)


def assert_batches(loader, plan, num_steps, first=0):
    for step in range(first, first + num_steps):
        expected = rows_of(plan, B * step, B, T)
        np.testing.assert_array_equal(next(loader), expected)


@pytest.mark.parametrize(
    "plan", [BLOCKS, IN_ORDER, tl.Mixture({range(7, 90_000): 2, range(90_000, N): 1}, BLOCKS)]
)
@pytest.mark.parametrize("prefetch", [1, 8])
def test_batches_of_blocks_that_lie_in_several_files_are_those_of_an_array(paths, disk, plan, prefetch):
    with tl.TokenLoader(on(disk, *paths), B, T, plan=plan, prefetch=prefetch, transform=None) as loader:
        assert_batches(loader, plan, 250)
        read = sum(disk.loads)
        assert read >= 2 * N  # bytes: at least once
        assert loader.stats.batches == 250
        assert loader.stats.gather_seconds > 0


def test_a_run_goes_on_in_mid_run_where_a_state_says(path, disk):
    with tl.TokenLoader(on(disk, path), B, T, plan=BLOCKS, transform=None) as loader:
        assert_batches(loader, BLOCKS, 5)
        state = loader.get_state()
        assert_batches(loader, BLOCKS, 100, first=5)
        loader.set_state(state)
        assert_batches(loader, BLOCKS, 20, first=5)


def test_a_plan_with_an_end_may_be_gone_through_again(path, disk):
    plan = tl.ShuffledBlocks(seed=1, block_tokens=10_000, open_blocks=16, num_epochs=1)
    with tl.TokenLoader(on(disk, path), B, T, plan=plan, transform=None) as loader:
        passes = [[np.asarray(block) for block in loader] for _ in range(2)]
    assert len(passes[0]) == ((N - 1) // T - 1) // B  # an epoch has a window less than its phase leaves
    np.testing.assert_array_equal(passes[0], passes[1])


def test_each_block_is_read_once_an_epoch(path, disk):
    plan = tl.ShuffledBlocks(seed=1, block_tokens=10_000, open_blocks=16, num_epochs=1)
    with tl.TokenLoader(on(disk, path), B, T, plan=plan, transform=None) as loader:
        for _ in loader:
            pass
    pages = 2 * os.sysconf("SC_PAGE_SIZE")  # that a block shares with its neighbours
    assert 2 * N - 4 * T < sum(disk.loads) < 2 * N + len(disk.loads) * pages


@pytest.mark.parametrize("axes", [P("a"), P(None, "a"), P("a", "b")])
def test_shardings_of_rows_and_of_sequences_read_the_same_blocks(path, axes):
    where = NamedSharding(make_mesh(*([4, 2] if "b" in axes else [2])), axes)
    loads = []
    for sharding in (None, where):
        disk = Disk()
        with tl.TokenLoader(on(disk, path), B, T + 1, plan=IN_ORDER, sharding=sharding) as loader:
            batches = [jax.device_get(batch.inputs) for batch in loader]
        loads.append((disk.loads, batches))
    np.testing.assert_array_equal(loads[0][1], loads[1][1])
    assert loads[0][0] == loads[1][0]


def test_tokens_that_come_to_be_in_ram_in_mid_run_are_read_from_there(path, own_threads):
    go_on = threading.Event()

    def read(*chunk):
        assert go_on.wait(20)
        read_exactly(*chunk)

    tokens = fill_with(partial(RamFill, read=read), path)
    with tl.TokenLoader(tokens, B, T, plan=BLOCKS, transform=None) as loader:
        assert_batches(loader, BLOCKS, 3)
        go_on.set()
        tokens.wait_until_loaded()
        assert_batches(loader, BLOCKS, 300, first=3)


def test_an_array_is_read_by_no_further_thread(own_threads):
    with tl.TokenLoader(tl.open_tokens(TOKENS), B, T, plan=BLOCKS, transform=None) as loader:
        assert_batches(loader, BLOCKS, 30)
        assert [thread.name for thread in own_threads()] == ["tokenloader"]


def test_tokens_that_are_closed_in_mid_run_are_an_error_at_next(path, disk, own_threads):
    tokens = on(disk, path)
    with tl.TokenLoader(tokens, B, T, plan=BLOCKS) as loader:
        next(loader)
        tokens.close()
        with pytest.raises(ValueError, match="it was closed"):
            list(itertools.islice(loader, 10))
        assert loader.step <= 5
    assert eventually(lambda: own_threads() == [])


# Its threads


@pytest.mark.parametrize("end", ["close", "abandon", "exhaust"])
def test_loaders_leave_no_thread_and_no_file_open(path, own_threads, end):
    def open_files():
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    def use():
        loader = tl.TokenLoader(tokens, 64, 999, plan=IN_ORDER, transform=None)
        next(loader)
        if end == "close":
            loader.close()
        if end == "exhaust":
            for _ in loader:
                pass

    with tl.open_tokens(path) as tokens:
        use()
        assert eventually(lambda: own_threads() == [])
        gc.collect()
        before = open_files()
        for _ in range(100):
            use()
        assert eventually(lambda: own_threads() == [])
        assert open_files() == before


def test_close_while_the_disk_hangs_returns_and_the_threads_end_later(path, disk, monkeypatch, own_threads):
    impatient = partial(Prefetcher, join_seconds=0.1)
    monkeypatch.setattr("tokenloader.loader.token_loader.Prefetcher", impatient)
    disk.hangs = True
    loader = tl.TokenLoader(on(disk, path), B, T, plan=BLOCKS)
    told = []

    def wait():
        try:
            next(loader)
        except ValueError as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert eventually(lambda: disk.loads)
    with tl.TokenLoader(tl.open_tokens(path), B, T, plan=BLOCKS, transform=None) as other:
        assert_batches(other, BLOCKS, 30)  # which another disk's do not keep
    loader.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert told == ["this TokenLoader was closed; make another, and set_state() to go on"]
    assert {thread.name for thread in own_threads()} == {"tokenloader", "tokenloader-read"}
    disk.going.set()
    assert eventually(lambda: own_threads() == [])


def test_a_wait_for_a_disk_that_hangs_is_logged_with_step_file_and_byte(path, disk, monkeypatch, caplog):
    monkeypatch.setattr(token_loader, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(token_loader, "_SLICE_SECONDS", 0.01)
    monkeypatch.setattr(disk, "is_cached", lambda _: False)
    disk.hangs = True
    with tl.TokenLoader(on(disk, path), B, T, plan=IN_ORDER, transform=None) as loader:
        timer = threading.Timer(0.3, disk.going.set)
        timer.start()
        next(loader)
    told = "the background thread is reading step 0, and waits for byte 128 of"
    (message,) = [text for text in caplog.messages if "step 0" in text]
    assert f"{told} {path}; is its disk slow, or stuck?" in message


def test_a_thread_that_the_system_does_not_give_is_an_error_at_next_and_the_next_call_tries_again(
    path, disk, monkeypatch
):
    start, failures = threading.Thread.start, iter([True])

    def refuse_once(thread):
        if thread.name == "tokenloader-read" and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with tl.TokenLoader(on(disk, path), B, T, plan=BLOCKS, transform=None) as loader:
        with pytest.raises(RuntimeError, match=r"raise the limit on processes \(ulimit -u"):
            next(loader)
        assert loader.step == 0
        assert_batches(loader, BLOCKS, 3)


@pytest.mark.parametrize("is_over_a_network", [False, True])
def test_a_program_that_ends_in_mid_run_ends_at_once_and_says_nothing(path, is_over_a_network):
    printed = run_python(f"""
import threading
import tokenloader as tl
from tokenloader.storage import mapped
mapped.is_over_a_network = lambda name: {is_over_a_network}
plan = tl.ShuffledBlocks(seed=1, block_tokens=10_000, open_blocks=16)
loader = tl.TokenLoader(tl.open_tokens({str(path)!r}), 8, 99, plan=plan)
next(loader)
print(sum(thread.name == "tokenloader-read" for thread in threading.enumerate()))
""")
    assert printed == ("16\n" if is_over_a_network else "1\n")


# Errors of the plan


class Wrong(tl.Plan):
    """A plan whose reads are what a function gives for its samples, from a sample on."""

    def __init__(self, wrong, first_sample):
        self.wrong, self.first_sample = wrong, first_sample

    def bind(self, num_tokens, seq_len):
        return BoundWrong(self)


class BoundWrong(tl.BoundPlan):
    num_samples = None

    def __init__(self, plan):
        self.plan = plan

    def __repr__(self):
        return "Wrong()"

    def window_starts(self, samples):
        return samples % 1000 * 100

    def reads(self, samples):
        if (samples >= self.plan.first_sample).any():
            return self.plan.wrong(samples)
        return np.stack([self.window_starts(samples), self.window_starts(samples) + 100], axis=1)

    def key(self, until_sample):
        return "Wrong()"


def reads_that(start, stop, at=5):
    """Reads of [0, 100), and of one sample another."""
    return lambda samples: np.where((samples % 16384 == at)[:, None], [start, stop], [0, 100])


@pytest.mark.parametrize("transform", [None, tl.next_token])  # one by one, and in groups
@pytest.mark.parametrize("first_sample", [0, 16384 * 3])  # planned at once, and in mid-run
@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        (lambda samples: samples, ValueError, r"Wrong\(\): reads returned int64\[16384\] for 16384"),
        (lambda samples: samples * 0.5, ValueError, r"Wrong\(\): reads returned float64\[16384\]"),
        (lambda samples: 1 // 0, ZeroDivisionError, "integer division"),
        (reads_that(-1, 10), ValueError, r"Wrong\(\): reads returned \[-1, 10\) for sample (5|49157);"),
        (reads_that(7, 7), ValueError, r"reads returned \[7, 7\) for sample"),
        (reads_that(7, N + 1), ValueError, r"\[7, 200,001\) for sample \d+; .* <= 200,000"),
    ],
)
def test_wrong_reads_of_a_plan_are_an_error_at_next_that_names_it(
    path, wrong, error, named, first_sample, transform
):
    with tl.TokenLoader(
        tl.open_tokens(path), 512, T, plan=Wrong(wrong, first_sample), transform=transform
    ) as loader:
        for _ in range(2):
            with pytest.raises(error, match=named):
                list(itertools.islice(loader, first_sample // 512 + 1))
            assert loader.step == loader.stats.batches <= first_sample // 512
