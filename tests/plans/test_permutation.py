"""The keyed permutation is a bijection of every [0, n), and cannot be told from a random one.

The statistics have fixed seeds. Each bound is where a truly random permutation would fall outside
once in a thousand runs of the test, Bonferroni-corrected for the number of comparisons in it.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest
from helpers import python_permute, python_sides
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc  # jax depends on scipy

from tokenloader.plans.permutation import NUM_ROUNDS, permute
from tokenloader.plans.philox import random_bits

FALSE_ALARMS = 1e-3
LARGEST = 2**62 - 1
AROUND_POWERS_OF_TWO = sorted({2**k + d for k in range(1, 21) for d in (-1, 0, 1)})


def keys(seed, *shape):
    rng = np.random.default_rng([seed, 1])  # not the stream of default_rng(seed), which draws indices
    return rng.integers(0, 2**64, (NUM_ROUNDS, *shape), dtype=np.uint64)


def indices(n):
    return np.arange(n, dtype=np.uint64)


def standard_errors(num_comparisons):
    """How many of them a normal variable exceeds, either way, at the rate of FALSE_ALARMS."""
    return NormalDist().inv_cdf(1 - FALSE_ALARMS / num_comparisons / 2)


def test_is_a_bijection_for_every_size_up_to_4096():
    two_keys = keys(0), keys(1)
    for n in range(1, 4097):
        index = indices(n)
        for key in two_keys:
            # In range, or bincount is longer than n; each once, or a count is not 1.
            counts = np.bincount(permute(index, n, key).astype(np.int64), minlength=n)
            assert counts.size == n, n
            assert (counts == 1).all(), n


@pytest.mark.parametrize("n", [n for n in AROUND_POWERS_OF_TWO if n > 4096])
def test_is_a_bijection_around_powers_of_two(n):
    counts = np.bincount(permute(indices(n), n, keys(n)).astype(np.int64), minlength=n)
    assert counts.size == n
    assert (counts == 1).all()


@pytest.mark.parametrize("n", [*range(1, 70), *(n for n in AROUND_POWERS_OF_TWO if n > 70)])
def test_with_a_key_for_each_index_gives_what_each_key_gives_for_all(n):
    index = indices(n)[:5000]
    three = keys(n, 3)
    alone = [permute(index, n, three[:, i]) for i in range(3)]
    which = np.arange(3 * index.size) % 3  # the keys interleaved
    together = permute(index.repeat(3), n, three[:, which])
    np.testing.assert_array_equal(together.reshape(-1, 3).T, alone)


def test_with_a_size_for_each_index_gives_what_each_size_gives_for_all():
    sizes = np.array([*range(1, 200), 4095, 4096, 4097, 2**20 - 1, 2**20 + 1, 2**32 - 1], np.uint64)
    which = np.repeat(np.arange(sizes.size), 40)
    n = sizes[which]
    index = np.random.default_rng(0).integers(0, n, dtype=np.uint64)
    for key in (keys(0), keys(0, n.size)):
        together = permute(index, n, key)
        for i, size in enumerate(sizes):
            own = which == i
            alone = permute(index[own], int(size), key if key.ndim == 1 else key[:, own])
            np.testing.assert_array_equal(together[own], alone)


def test_with_a_size_for_each_index_is_a_bijection_of_every_size():
    sizes = np.arange(1, 130, dtype=np.uint64)
    n = np.repeat(sizes, sizes.astype(np.int64))
    index = np.concatenate([indices(size) for size in sizes])
    order = np.random.default_rng(1).permutation(n.size)  # sizes interleaved
    out = permute(index[order], n[order], keys(3))
    for size in sizes:
        assert sorted(out[n[order] == size]) == list(range(size))


@settings(deadline=None)
@given(
    n=st.one_of(
        st.integers(1, 2**50 - 1),
        st.integers(1, 25).flatmap(lambda k: st.sampled_from([4**k - 1, 4**k - 2**k, 4**k - 2**k + 1])),
        st.tuples(st.integers(1, 2**25 - 1), st.integers(0, 2)).map(lambda pair: pair[0] ** 2 + pair[1]),
    ),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_size_for_each_index_agrees_with_the_definition_up_to_2_to_the_50(n, seed, data):
    index = data.draw(st.sampled_from([0, n - 1]) | st.integers(0, n - 1))
    key = keys(seed)
    expected = python_permute(index, n, [int(word) for word in key])
    assert permute(np.array([index], np.uint64), np.array([n], np.uint64), key).tolist() == [expected]


def test_the_result_for_an_index_does_not_depend_on_the_others():
    n, key = 1000, keys(2)
    whole = permute(indices(n), n, key)
    order = np.random.default_rng(3).permutation(n)
    np.testing.assert_array_equal(permute(indices(n)[order], n, key), whole[order])
    for i in range(n):
        assert permute(np.array([i], np.uint64), n, key) == whole[i]


def test_leaves_its_arguments_as_they_were():
    for key in (keys(4), keys(4, 50)):
        index, key_before = indices(50), key.copy()
        permute(index, 51, key)
        np.testing.assert_array_equal(index, indices(50))
        np.testing.assert_array_equal(key, key_before)


def test_no_index_gives_no_result():
    for key in (keys(5), keys(5, 0)):
        out = permute(indices(0), 10, key)
        assert out.shape == (0,)
        assert out.dtype == np.uint64


@settings(deadline=None)
@given(
    n=st.one_of(
        st.integers(1, 10**4),
        st.integers(1, LARGEST),
        st.integers(1, 61).flatmap(lambda k: st.sampled_from([2**k - 1, 2**k, 2**k + 1])),
    ),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_agrees_with_the_definition_in_python_integers(n, data, seed):
    some = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4))
    row = n // python_sides(n)[1] * python_sides(n)[1]  # where a row of the rectangle begins
    some += [0, n - 1, min(row, n - 1), max(row - 1, 0)]
    key = keys(seed)
    expected = [python_permute(i, n, [int(word) for word in key]) for i in some]
    assert permute(np.array(some, np.uint64), n, key).tolist() == expected


@pytest.mark.parametrize("n", [2**32 - 1, 2**32 + 1, 2**40 + 3, 2**61 - 1, 2**61 + 1, LARGEST])
def test_large_domains_stay_in_range_and_no_two_samples_meet(n):
    rng = np.random.default_rng(n)
    sample = np.unique(
        np.concatenate(
            [
                indices(20_000),
                n - 1 - indices(20_000),
                rng.integers(0, n, 20_000, dtype=np.uint64),
            ]
        )
    )
    out = permute(sample, n, keys(n))
    assert out.dtype == np.uint64
    assert int(out.max()) < n
    assert np.unique(out).size == sample.size
    # All of the range is used: 64 bins, and the lowest 6 bits.
    for bins in (out // np.uint64(-(-n // 64)), out % np.uint64(64)):
        assert_uniform(np.bincount(bins.astype(np.int64), minlength=64))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_few_appears_equally_often(n):
    num_keys = 1000 * math.factorial(n)
    key = keys(n, num_keys)
    places = np.array([permute(np.full(num_keys, i, np.uint64), n, key) for i in range(n)])
    orders = (places.astype(np.int64) * n ** np.arange(n)[:, None]).sum(axis=0)
    found, counts = np.unique(orders, return_counts=True)
    assert len(found) == math.factorial(n)
    assert_uniform(counts)


@pytest.mark.parametrize("n", [5, 6, 7, 9, 16, 31])
def test_every_index_goes_to_every_place_equally_often(n):
    num_keys = 2000 * n
    key = keys(n, num_keys)
    for i in range(n):
        places = permute(np.full(num_keys, i, np.uint64), n, key).astype(np.int64)
        assert_uniform(np.bincount(places, minlength=n))


@pytest.mark.parametrize("num_bits", range(4, 34))
def test_flipping_an_input_bit_flips_each_output_bit_as_in_a_random_permutation(num_bits):
    # Two different indices of n have two different images, so of the n - 1 equally likely
    # differences n / 2 have a given bit: it flips with probability (n / 2) / (n - 1).
    n = 2**num_bits
    num_trials = 2 ** (20 if num_bits <= 6 else 18) // num_bits
    rng = np.random.default_rng(num_bits)
    key = keys(num_bits, num_trials)
    index = rng.integers(0, n, num_trials, dtype=np.uint64)
    out = permute(index, n, key)
    flips = np.array(
        [bit_counts(permute(index ^ np.uint64(1 << i), n, key) ^ out, num_bits) for i in range(num_bits)]
    )
    assert_flipped(flips, num_trials, (n / 2) / (n - 1), num_tests=30)


def test_flipping_a_seed_bit_flips_each_output_bit_half_of_the_time():
    # Orders of different seeds are independent: a bit of an index's image differs half of the time.
    rng = np.random.default_rng(0)
    blocks = indices(NUM_ROUNDS // 2)[:, None]
    epoch = np.array([0], np.uint64)

    def key_of(seed):
        return np.stack(random_bits(seed, 1, epoch, blocks), axis=1).reshape(NUM_ROUNDS)

    num_trials = 100
    seeds = [int(seed) for seed in rng.integers(0, 2**64, num_trials, dtype=np.uint64)]
    base = np.stack([key_of(seed) for seed in seeds], axis=1)
    flipped = np.stack([key_of(seed ^ 1 << i) for i in range(64) for seed in seeds], axis=1)
    for num_bits in range(4, 34):
        n = 2**num_bits
        index = rng.integers(0, n, num_trials, dtype=np.uint64)
        change = permute(np.tile(index, 64), n, flipped) ^ np.tile(permute(index, n, base), 64)
        flips = np.array([bit_counts(row, num_bits) for row in change.reshape(64, num_trials)])
        assert_flipped(flips, num_trials, 1 / 2, num_tests=30)


@pytest.mark.parametrize("n", [5, 16, 100, 1000, 65_536, 65_537, 10_008_663, 2**33])
def test_neighbours_are_as_far_apart_as_in_random_permutations(n):
    # In a random permutation P(|p(i+1) - p(i)| = d) = 2 (n - d) / (n (n - 1)): a triangle.
    num_trials = 50_000
    index = np.random.default_rng(n).integers(0, n - 1, num_trials, dtype=np.uint64)
    key = keys(n, num_trials)
    assert_triangular(permute(index, n, key), permute(index + np.uint64(1), n, key), n)


@pytest.mark.parametrize("n", [65_536, 100_003])
def test_neighbours_of_one_order_are_as_far_apart_as_in_a_random_permutation(n):
    out = permute(indices(n), n, keys(n))
    assert_triangular(out[0 : n - 1 : 2], out[1:n:2], n)  # pairs without a common index


def bit_counts(values, num_bits):
    """How many values have each bit."""
    return [np.count_nonzero(values & np.uint64(1 << j)) for j in range(num_bits)]


def assert_flipped(flips, num_trials, probability, num_tests):
    """flips[i, j]: how often output bit j changed in num_trials. Tests the mean and the worst pair."""
    error = (probability * (1 - probability) / num_trials) ** 0.5
    off = flips / num_trials - probability
    num_comparisons = num_tests * (off.size + 1)
    assert abs(off).max() < error * standard_errors(num_comparisons)
    assert abs(off.mean()) < error / off.size**0.5 * standard_errors(num_comparisons)


def assert_triangular(one, other, n):
    distance = np.maximum(one, other) - np.minimum(one, other)
    assert distance.min() >= 1
    num_bins = min(n - 1, 24)
    # P(distance <= d) = d (2n - 1 - d) / (n (n - 1)), cut at distances that make equal bins.
    edges = [
        round(n - n * math.sqrt(1 - i / num_bins)) if n - 1 > num_bins else i for i in range(num_bins + 1)
    ]
    edges[-1] = n - 1
    below = np.array([d * (2 * n - 1 - d) / (n * (n - 1)) for d in edges])
    bins = np.searchsorted(np.array(edges[1:], np.uint64), distance)  # (edge, next edge]
    assert_frequencies(np.bincount(bins, minlength=num_bins), np.diff(below))


def assert_uniform(counts):
    assert_frequencies(counts, np.full(len(counts), 1 / len(counts)))


def assert_frequencies(counts, probabilities):
    expected = counts.sum() * probabilities
    assert expected.min() > 5  # where chi-square holds
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # No test makes more than 100 of these comparisons.
    assert chdtrc(len(counts) - 1, chi_square) > FALSE_ALARMS / 100, counts
