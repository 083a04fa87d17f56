"""Windows as records, and as a source for the Grain that is installed."""

import copy
import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenloader as tl

grain = pytest.importorskip("grain", reason="Grain has no wheel for this platform")

TOKENS = np.random.default_rng(0).integers(0, 2**16, 1000).astype(np.uint16)


def naive(array, seq_len):
    return [array[i : i + seq_len + 1] for i in range(0, len(array) - seq_len, seq_len)]


@pytest.fixture
def windows():
    return tl.Windows(tl.open_tokens(TOKENS), 30)


@given(num_tokens=st.integers(2, 200), seq_len=st.integers(1, 60))
def test_every_window_is_a_record_and_no_target_comes_twice(num_tokens, seq_len):
    if num_tokens < seq_len + 1:
        return
    windows = tl.Windows(tl.open_tokens(TOKENS[:num_tokens]), seq_len)
    expected = naive(TOKENS[:num_tokens], seq_len)
    assert len(windows) == len(expected)
    np.testing.assert_array_equal(list(windows), expected, strict=True)
    targets = np.concatenate([window[1:] for window in windows])
    np.testing.assert_array_equal(targets, TOKENS[1 : len(targets) + 1])
    assert num_tokens - 1 - len(targets) < seq_len


def test_windows_past_32_bits_are_found(tmp_path):
    path, num_tokens = tmp_path / "sparse.bin", 2**32 + 1000
    with path.open("wb") as file:
        file.truncate(2 * num_tokens)
        file.seek(2 * (num_tokens - 11))
        np.arange(1, 12, dtype=np.uint16).tofile(file)
    windows = tl.Windows(tl.open_tokens(path, dtype="uint16"), 5)
    assert len(windows) == (num_tokens - 1) // 5
    assert windows[-1].tolist() == windows[np.int64(len(windows) - 1)].tolist() == [6, *range(7, 12)]


@pytest.mark.parametrize("index", [33, -34, 10**20])
def test_a_window_there_is_not_is_an_index_error_that_shows_what_there_is(windows, index):
    message = f"window {index} of {windows!r}; there are 0 to 32"
    with pytest.raises(IndexError, match=re.escape(message)):
        windows[index]


@pytest.mark.parametrize("index", [slice(3), 1.0, "1"])
def test_an_index_that_is_no_integer_is_a_type_error(windows, index):
    with pytest.raises(TypeError, match=type(index).__name__):
        windows[index]


def test_a_window_belongs_to_the_caller(windows):
    windows[0][:] = 0
    np.testing.assert_array_equal(windows[0], TOKENS[:31])


@pytest.mark.parametrize("wrong", [TOKENS, "train.bin", None])
def test_what_is_no_token_array_is_a_type_error(wrong):
    with pytest.raises(TypeError, match=f"tokens is of type {type(wrong).__name__}; expected"):
        tl.Windows(wrong, 4)


def test_tokens_shorter_than_a_window_are_an_error():
    with pytest.raises(ValueError, match=r"1,000 tokens are fewer than one window .* = 1,001"):
        tl.Windows(tl.open_tokens(TOKENS), 1000)
    with pytest.raises(ValueError, match="seq_len=0; expected 1 or more"):
        tl.Windows(tl.open_tokens(TOKENS), 0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_pickling_is_refused_with_what_to_do(windows, copied):
    with pytest.raises(TypeError, match=r"Windows\(.* cannot be copied or pickled.*in threads"):
        copied(windows)


# Grain


def test_grain_takes_windows_as_a_source(windows):
    dataset = grain.MapDataset.source(windows)
    assert len(dataset) == len(windows)
    np.testing.assert_array_equal([dataset[i] for i in range(33)], naive(TOKENS, 30), strict=True)


def test_grain_shuffles_batches_and_reads_windows_in_threads(windows):
    dataset = grain.MapDataset.source(windows).shuffle(seed=1).batch(3)
    threads = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
    rows = np.concatenate(list(dataset.to_iter_dataset(threads)))
    assert rows.dtype == np.uint16
    assert not np.array_equal(rows, naive(TOKENS, 30))
    assert sorted(rows.tolist()) == sorted(row.tolist() for row in naive(TOKENS, 30))


def test_grain_resumes_over_windows(windows):
    dataset = grain.MapDataset.source(windows).shuffle(seed=1).repeat().to_iter_dataset()
    whole = [row for row, _ in zip(dataset, range(50), strict=False)]
    iterator = iter(dataset)
    for _ in range(20):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = iter(dataset)
    resumed.set_state(state)
    np.testing.assert_array_equal([next(resumed) for _ in range(30)], whole[20:])


def test_grains_data_loader_samples_windows(windows):
    sampler = grain.samplers.SequentialSampler(len(windows), grain.sharding.NoSharding())
    loader = grain.DataLoader(data_source=windows, sampler=sampler, worker_count=0)
    np.testing.assert_array_equal(list(loader), naive(TOKENS, 30))


def test_windows_are_read_from_many_threads(windows):
    expected = naive(TOKENS, 30)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(windows.__getitem__, list(range(33)) * 30))
    np.testing.assert_array_equal(rows, expected * 30)
