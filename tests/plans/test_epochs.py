"""Epochs: how many windows one has, which epoch a sample is of, and the random words of each."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloader.plans.epochs import Epochs, checked_num_epochs, epoch_words
from tokenloader.plans.philox import random_bits


@given(
    seq_len=st.integers(1, 8192),
    num_tokens=st.integers(1, 2**44),
    num_epochs=st.integers(1, 2**10) | st.none(),
)
def test_the_windows_of_an_epoch_fit_with_fewer_than_two_windows_of_tokens_left_out(
    seq_len, num_tokens, num_epochs
):
    num_tokens += seq_len
    epochs = Epochs.over(num_tokens, seq_len, num_epochs)
    n = epochs.num_windows
    assert n >= 1
    assert 0 <= num_tokens - (n * seq_len + 1) < 2 * seq_len
    assert epochs.num_samples == (None if num_epochs is None else num_epochs * n)
    # The last window ends within the tokens for the last phase, and the first starts at 0 for the first.
    room = num_tokens - n * seq_len
    ends = epochs.starts(np.array([0, n - 1], np.uint64), np.array([0, room - 1], np.uint64))
    assert ends.dtype == np.int64
    assert ends.tolist() == [0, num_tokens - seq_len - 1]


def test_a_sample_is_located_in_its_epoch_and_refused_past_the_last_one():
    epochs = Epochs.over(96, 10, 3)
    epoch, index = epochs.locate([0, 7, 8, 23])
    assert (epoch.tolist(), index.tolist()) == ([0, 0, 1, 2], [0, 7, 0, 7])
    with pytest.raises(ValueError, match=r"^sample 24 is past the end: 3 epochs of 8 windows$"):
        epochs.locate([24, 3])
    assert [part.size for part in epochs.locate([])] == [0, 0]
    epoch, index = Epochs.over(96, 10, None).locate([2**63 - 1])
    assert int(epoch[0]) * 8 + int(index[0]) == 2**63 - 1


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    epochs=st.lists(st.integers(0, 2**63) | st.integers(0, 3), min_size=1, max_size=10),
    num_words=st.integers(1, 9),
)
def test_the_words_of_an_epoch_do_not_depend_on_the_others(seed, epochs, num_words):
    found = epoch_words(seed, 7, np.array(epochs, np.uint64), num_words)
    alone = [epoch_words(seed, 7, np.array([epoch], np.uint64), num_words) for epoch in epochs]
    assert {words.shape for words in alone} == {(num_words,)}
    if len(set(epochs)) == 1:
        np.testing.assert_array_equal(found, alone[0])
    else:
        np.testing.assert_array_equal(found, np.stack(alone, axis=1))


def test_the_words_of_an_epoch_are_its_random_bits_two_by_two():
    found = epoch_words(5, 7, np.array([9, 9], np.uint64), 5)
    expected = [word for block in range(3) for word in random_bits(5, 7, np.array(9, np.uint64), block)]
    assert found.tolist() == [int(word) for word in expected[:5]]


def test_no_samples_have_no_words():
    assert epoch_words(0, 1, np.empty(0, np.uint64), 3).shape == (3, 0)


@pytest.mark.parametrize("num_epochs", [None, 1, np.uint8(200), 2**70])
def test_a_number_of_epochs_becomes_a_python_integer(num_epochs):
    found = checked_num_epochs("Mine", num_epochs)
    assert found == num_epochs
    assert type(found) in (int, type(None))


@pytest.mark.parametrize(
    ("num_epochs", "error", "told"),
    [
        (0, ValueError, "Mine: num_epochs=0; expected 1 or more, or None for no end"),
        (-3, ValueError, "Mine: num_epochs=-3; expected 1 or more, or None for no end"),
        (1.5, TypeError, "Mine: num_epochs=1.5; expected an integer, or None"),
        ("2", TypeError, "Mine: num_epochs='2'; expected an integer, or None"),
    ],
)
def test_what_is_no_number_of_epochs_is_refused_with_the_plans_name(num_epochs, error, told):
    with pytest.raises(error, match=f"^{re.escape(told)}$"):
        checked_num_epochs("Mine", num_epochs)
