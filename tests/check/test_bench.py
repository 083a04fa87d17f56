"""The bench: what it measures, how it gets a cold file, and what it says the limit is."""

import os
import sys

import numpy as np
import pytest

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
