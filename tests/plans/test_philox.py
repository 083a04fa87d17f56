"""Philox against its authors' vectors and against plain Python integers; the streams made of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloader.plans.philox import philox4x32, random_bits

words = st.integers(0, 2**32 - 1)

# Random123, tests/kat_vectors, the lines "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def python_philox4x32(counter, key):
    """The paper's definition, one round after the other, in Python's own integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def python_random_bits(seed, purpose, index, block=0):
    counter = index % 2**32, index // 2**32, block, purpose
    w = python_philox4x32(counter, (seed % 2**32, seed // 2**32))
    return w[0] + (w[1] << 32), w[2] + (w[3] << 32)


def as_ints(arrays):
    return tuple(int(array) for array in arrays)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS, ids=["0", "f", "pi"])
def test_gives_the_known_answers_of_random123(counter, key, output):
    assert as_ints(philox4x32(counter, key)) == output


@settings(deadline=None)
@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_agrees_with_python_integers(counter, key):
    assert as_ints(philox4x32(counter, key)) == python_philox4x32(counter, key)


def test_a_call_for_many_counters_agrees_with_a_call_for_each():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (4, 300), dtype=np.uint64)
    key = 0xDEADBEEF, 0x12345678
    together = np.array(philox4x32(tuple(counters), key))
    assert together.dtype == np.uint64
    one_by_one = [python_philox4x32(tuple(map(int, counter)), key) for counter in counters.T]
    np.testing.assert_array_equal(together.T, np.array(one_by_one, np.uint64))


def test_counter_words_broadcast_against_each_other():
    first = np.arange(5, dtype=np.uint64)
    third = np.arange(3, dtype=np.uint64)[:, None]
    outputs = philox4x32((first, 7, third, 1), (2, 3))
    assert all(output.shape == (3, 5) for output in outputs)
    assert [int(w[2, 4]) for w in outputs] == list(python_philox4x32((4, 7, 2, 1), (2, 3)))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    purpose=words,
    indices=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
    block=words,
)
def test_random_bits_are_a_function_of_seed_purpose_index_and_block(seed, purpose, indices, block):
    low, high = random_bits(seed, purpose, np.array(indices, np.uint64), block)
    assert low.dtype == high.dtype == np.uint64
    expected = [python_random_bits(seed, purpose, index, block) for index in indices]
    assert list(zip(low.tolist(), high.tolist(), strict=True)) == expected


def test_random_bits_of_several_blocks_are_those_of_each_block():
    index = np.array([0, 1, 2**40], np.uint64)
    blocks = np.arange(4, dtype=np.uint64)[:, None]
    low, high = random_bits(5, 1, index, blocks)
    assert low.shape == high.shape == (4, 3)
    for block in range(4):
        alone = random_bits(5, 1, index, block)
        np.testing.assert_array_equal((low[block], high[block]), alone)


def test_no_word_is_shared_between_purposes_seeds_blocks_and_indices():
    # 2**16 words of 64 bits: the chance of any two being equal is 2**-33.
    index = np.concatenate([np.arange(512), 2**32 * np.arange(1, 513)]).astype(np.uint64)
    seeds = 0, 1, 2**32, 2**64 - 1
    words = np.array(
        [
            random_bits(seed, purpose, index, block)
            for seed in seeds
            for purpose in (0, 1)
            for block in (0, 1, 2, 3)
        ]
    )
    assert np.unique(words).size == words.size == 2**16


def test_every_bit_of_the_seed_and_of_the_index_changes_about_half_the_output():
    index = np.arange(64, dtype=np.uint64)
    base = np.array(random_bits(0, 0, index))
    flips = np.uint64(1) << np.arange(64, dtype=np.uint64)
    by_seed = [np.array(random_bits(int(flip), 0, index)) ^ base for flip in flips]
    by_index = [np.array(random_bits(0, 0, index ^ flip)) ^ base for flip in flips]
    for changes in (*by_seed, *by_index):
        changed = int(np.bitwise_count(changes).sum())
        # 64 indices x 128 bits, each flipped with probability 1/2: 6 standard errors.
        assert abs(changed - 4096) < 6 * (8192 / 4) ** 0.5
