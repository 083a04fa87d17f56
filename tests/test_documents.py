"""Documents: where they lie, and keys that agree for equal ones."""

import numpy as np
import pytest

import tokenloader as tl
from tokenloader._documents import Documents, Keys, keys_of, probes
from tokenloader._repeats import duplicates


def tokens_of(documents):
    """Documents end to end, without anything between them."""
    ids = [np.asarray(document, np.uint16) for document in documents]
    lengths = np.array([len(one) for one in ids])
    starts = np.append(0, lengths.cumsum()[:-1])
    tokens = tl.open_tokens(np.concatenate(ids))
    xors = np.array([np.bitwise_xor.reduce(one) for one in ids])
    keys = keys_of(tokens[:][probes(starts, lengths)], lengths, xors)
    return tokens, Documents(keys, starts, lengths, np.full(len(keys), -1))


def long(seed, length=1000):
    return np.random.default_rng(seed).integers(0, 50_000, length)


def changed(document, at, to=50_001):
    document = document.copy()
    document[at] = to
    return document


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 1000, 2**31, 2**33])
def test_probes_go_from_the_first_token_to_the_last(length):
    at = probes(np.array([10]), np.array([length]))[0]
    assert at.shape == (32,)
    assert (at[0], at[-1]) == (10, 10 + length - 1)
    assert (np.diff(at) >= 0).all()
    if length <= 32:
        assert set(at.tolist()) == set(range(10, 10 + length))


def test_equal_documents_have_equal_keys_and_others_hardly_ever():
    base = long(0)
    others = [changed(base, at) for at in range(1000)]
    _, documents = tokens_of([base, base, base[:-1], base[1:], base[::-1], *others])
    assert documents.keys[0] == documents.keys[1]
    # Of copies with one token changed, a few agree in the 16 bits of the exclusive or.
    assert len(set(documents.keys.tolist())) > len(documents.keys) - 50


def test_ids_beyond_16_bits_and_below_zero_have_keys_too():
    ids = np.array([[-1] * 32, [2**40] * 32])
    assert len(set(keys_of(ids, np.array([5, 5]), ids[:, 0]).tolist())) == 2


def test_past_the_bound_a_sample_is_kept_that_treats_equal_documents_alike():
    documents = [long(seed, 10) for seed in range(500)]
    tokens, all_of = tokens_of(documents * 2)
    keys = Keys(most=200)
    for at in range(0, 1000, 7):
        keys.append(all_of[np.arange(at, min(at + 7, 1000))])
    kept = keys.documents()
    assert keys.num_seen == 1000
    assert keys.one_in == 8
    assert 0 < len(kept.keys) <= 200
    assert (kept.keys % 8 == 0).all()
    assert (np.diff(kept.starts) > 0).all()
    assert duplicates(tokens, kept).documents == len(kept.keys) // 2
