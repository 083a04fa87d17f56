"""Documents: where they lie, and keys that agree for equal ones."""

import numpy as np
import pytest

from tokenloader.check.documents import Documents, Keys, keys_of, probes


def key_of(document):
    lengths, xors = np.array([len(document)]), np.array([np.bitwise_xor.reduce(document)])
    return int(keys_of(document[probes(np.array([0]), lengths)], lengths, xors)[0])


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 1000, 2**31, 2**33])
def test_probes_go_from_the_first_token_to_the_last(length):
    at = probes(np.array([10]), np.array([length]))[0]
    assert at.shape == (32,)
    assert (at[0], at[-1]) == (10, 10 + length - 1)
    assert (np.diff(at) >= 0).all()
    if length <= 32:
        assert set(at.tolist()) == set(range(10, 10 + length))


def test_equal_documents_have_equal_keys_and_others_hardly_ever():
    base = np.random.default_rng(0).integers(0, 50_000, 1000)
    others = [base[:-1], base[1:], base[::-1]]
    for at in range(1000):
        others.append(base.copy())
        others[-1][at] = 50_001
    assert key_of(base) == key_of(base.copy())
    # Of copies with one token changed, a few agree in the 16 bits of the exclusive or.
    assert len({key_of(document) for document in [base, *others]}) > len(others) - 50


def test_ids_beyond_16_bits_and_below_zero_have_keys_too():
    ids = np.array([[-1] * 32, [2**40] * 32])
    assert len(set(keys_of(ids, np.array([5, 5]), ids[:, 0]).tolist())) == 2


def test_past_the_bound_a_sample_is_kept_that_treats_equal_documents_alike():
    twice = np.tile(np.random.default_rng(0).integers(0, 2**64, 500, np.uint64), 2)
    all_of = Documents(twice, 10 * np.arange(1000), np.full(1000, 10), np.full(1000, -1))
    keys = Keys(most=200)
    for at in range(0, 1000, 7):
        keys.append(all_of[np.arange(at, min(at + 7, 1000))])
    kept = keys.documents()
    assert keys.num_seen == 1000
    assert keys.one_in == 8
    assert 0 < len(kept.keys) <= 200
    assert (kept.keys % 8 == 0).all()
    assert (np.diff(kept.starts) > 0).all()
    assert set(np.unique(kept.keys, return_counts=True)[1].tolist()) == {2}
