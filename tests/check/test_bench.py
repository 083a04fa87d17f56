"""The bench: what it measures, how it gets a cold file, and what it says the limit is."""

import os
import sys
import time
from itertools import count

import numpy as np
import pytest
from helpers import watched_tokens

import tokenloader as tl
from tokenloader.check.bench import bench, drop_from_cache, find_limit, why_still_cached
from tokenloader.check.info import cached_share
from tokenloader.loader.stats import LoaderStats

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs posix_fadvise")


@pytest.fixture
def path(tmp_path):
    tl.write_tokens(tmp_path / "t.safetensors", np.arange(1_000_000) % 50_000)
    return tmp_path / "t.safetensors"


def measured(path, **kwargs):
    kwargs = {"batch_size": 4, "seq_len": 100, "seconds": 0.1} | kwargs
    return bench(lambda: tl.open_tokens(path), **kwargs)


@pytest.mark.parametrize("cold", [True, False])
def test_speed_is_tokens_over_seconds(path, cold):
    found = measured(path, drop_from_cache=lambda extents: None if cold else "it is so")
    assert (found.cold is not None, found.why_not_cold) == (cold, None if cold else "it is so")
    for speed in filter(None, (found.cold, found.warm)):
        assert speed.tokens_per_second == pytest.approx(speed.batches * 400 / speed.seconds)
        assert 0 < speed.wait_seconds < speed.seconds
        assert speed.limit
    assert found.warm.seconds > 0.01
    assert (found.batch_size, found.seq_len) == (4, 100)
    assert "0" in found.device


def test_of_a_small_file_half_is_read_cold(path):
    found = measured(path, seconds=0.3, seq_len=124_999, drop_from_cache=lambda extents: None)
    assert found.cold.batches == 1
    found = measured(path, seconds=0.5, seq_len=12_499, drop_from_cache=lambda extents: None)
    assert found.cold.batches <= 1_000_000 // (8 * 12_500)


BLOCKS = tl.ShuffledBlocks(0, block_tokens=2000, open_blocks=16)  # of 20 windows each


def test_shuffled_blocks_are_measured_after_their_first_are_open(path):
    found = measured(path, drop_from_cache=lambda extents: None, shuffled=BLOCKS)
    speed = found.shuffled_blocks
    assert speed.tokens_per_second == pytest.approx(speed.batches * 400 / speed.seconds)
    assert 0 < speed.wait_seconds < speed.seconds
    assert found.why_not_shuffled_blocks is None
    assert found.opening_seconds > 0


def test_no_block_is_measured_twice(path):
    blocks = tl.ShuffledBlocks(0, block_tokens=20_000, open_blocks=8)  # of 2 windows
    shape = {"seq_len": 10_000, "seconds": 0.5}  # 99 windows, in 24 batches of 4 and one that is not full
    found = measured(path, drop_from_cache=lambda extents: None, shuffled=blocks, **shape)
    assert 0 < found.shuffled_blocks.batches <= 24 - 2


def test_the_file_is_dropped_before_each_cold_measurement_and_opened_after(path):
    log = []

    def open_again():
        log.append("open")
        return tl.open_tokens(path)

    shape = {"batch_size": 4, "seq_len": 100, "seconds": 0.1}
    bench(open_again, drop_from_cache=lambda extents: log.append("drop"), shuffled=BLOCKS, **shape)
    assert log == ["open", "drop", "open", "drop", "open"]


@pytest.mark.parametrize("dropped", [0, 1])
def test_shuffled_blocks_are_not_measured_where_the_file_stays_in_the_cache(path, dropped):
    answers = iter([None, "it is so"][1 - dropped :])
    found = measured(path, drop_from_cache=lambda extents: next(answers), shuffled=BLOCKS)
    assert (found.cold is None) == (dropped == 0)
    assert (found.shuffled_blocks, found.why_not_shuffled_blocks) == (None, "it is so")


@pytest.mark.parametrize(
    ("seq_len", "why"),
    [
        (100, "the file is too small to tell: it has 4 blocks of 262,144 tokens; expected 2,048, "),
        (200_000, "blocks of 262,144 tokens hold fewer than two windows of 200,000"),
    ],
)
def test_a_file_of_fewer_blocks_than_are_open_tells_nothing_of_shuffled_blocks(path, seq_len, why):
    found = measured(path, batch_size=1, seq_len=seq_len, drop_from_cache=lambda extents: None)
    assert found.cold is not None
    assert (found.shuffled_blocks, found.opening_seconds) == (None, None)
    assert found.why_not_shuffled_blocks.startswith(why)


@pytest.mark.parametrize(("open_blocks", "is_told"), [(250, True), (251, False)])
def test_the_speed_is_told_of_twice_as_many_blocks_as_are_open(path, open_blocks, is_told):
    blocks = tl.ShuffledBlocks(0, block_tokens=2000, open_blocks=open_blocks)  # there are 500
    # Few batches open them all, in time on a busy machine too.
    found = measured(path, batch_size=125, drop_from_cache=lambda extents: None, shuffled=blocks)
    assert (found.shuffled_blocks is not None) == is_told


def test_first_blocks_that_take_too_long_are_not_waited_for():
    opened = count()

    def open_slowly():
        last = next(opened) == 2
        return watched_tokens(lambda: last and time.sleep(0.3), np.zeros(1_000_000, np.uint16))

    blocks = tl.ShuffledBlocks(0, block_tokens=2000, open_blocks=100)
    found = bench(
        open_slowly,
        batch_size=4,
        seq_len=100,
        seconds=0.1,
        drop_from_cache=lambda extents: None,
        shuffled=blocks,
    )
    assert found.shuffled_blocks is None
    assert found.opening_seconds >= 1.0
    assert "batches were read of the 25 that open its first blocks" in found.why_not_shuffled_blocks


def test_tokens_fewer_than_a_window_are_refused(path):
    with pytest.raises(ValueError, match="1,000,000 tokens are fewer than one window"):
        measured(path, seq_len=1_000_000)


@linux
def test_a_file_is_dropped_from_the_page_cache_and_no_other(path, tmp_path):
    other = tmp_path / "other.npy"
    np.save(other, np.zeros(100_000, np.uint16))
    for one in (path, other):
        with open(one, "rb+") as file:
            os.fsync(file.fileno())
    extents = [tl.open_tokens(one).extents for one in (path, other)]
    why_not = drop_from_cache(extents[0])
    if why_not is None:  # on a disk, and not in memory
        assert cached_share(extents[0])[0] < 0.05
    assert cached_share(extents[1])[0] == 1.0


@linux
def test_what_stays_in_the_cache_is_told(path, monkeypatch):
    extents = tl.open_tokens(path).extents
    assert why_still_cached(0.5).startswith("50% of the file stay in the page cache: another")
    assert why_still_cached(None).startswith("the system does not tell whether")
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: None)
    assert drop_from_cache(extents).startswith("100% of the file stay in the page cache")
    monkeypatch.delattr(os, "posix_fadvise")
    assert drop_from_cache(extents).startswith("this system has no call that drops")


@pytest.mark.parametrize(
    ("wait", "gather", "transfer", "cold", "told"),
    [
        (0.9, 0.8, 0.1, False, "memory: 80% of the time went into gathering"),
        (0.9, 0.8, 0.1, True, "the disk: the loop waited for data 90% of the time, and transfers took 10%"),
        (0.9, 0.2, 0.7, True, "the transfer: 70% of the time went into handing blocks"),
        (0.2, 0.3, 0.3, False, "the device: the loop waited for data 20% of the time"),
        (0.6, 0.21, 0.26, False, "the hand-over between threads: gathering took 21%"),
        (0.6, 0.21, 0.26, True, "the disk: the loop waited for data 60%"),
    ],
)  # fmt: skip
def test_the_limit_is_where_the_time_went(wait, gather, transfer, cold, told):
    stats = LoaderStats(10, 1000, wait * 2, gather * 2, transfer * 2, 0)
    assert find_limit(stats, 2.0, cold=cold).startswith(told)
