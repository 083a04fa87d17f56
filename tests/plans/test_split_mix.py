"""SplitMix64 gives the words of its published generator, each by its index alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenloader.plans.split_mix import split_mix

words = st.integers(0, 2**64 - 1)


def python_split_mix(seed, index):
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_gives_the_published_words():
    # The first outputs of Vigna's splitmix64.c from the state 1234567.
    assert split_mix(np.full(5, 1234567, np.uint64), np.arange(5, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(seed=words, index=words)
def test_agrees_with_the_definition_in_python_integers(seed, index):
    found = split_mix(np.array([seed], np.uint64), np.array([index], np.uint64))
    assert found.tolist() == [python_split_mix(seed, index)]


def test_seeds_and_indices_broadcast_and_stay_what_they_were():
    seeds, index = np.array([[3], [2**64 - 1]], np.uint64), np.arange(4, dtype=np.uint64)
    seeds.flags.writeable = index.flags.writeable = False
    found = split_mix(seeds, index)
    assert found.dtype == np.uint64
    assert found.tolist() == [[python_split_mix(seed, i) for i in range(4)] for seed in (3, 2**64 - 1)]
