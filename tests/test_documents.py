"""Documents: keys that agree for equal ones, and duplicates that are exactly equal."""

import numpy as np
import pytest

import tokenloader as tl
from tokenloader._documents import Documents, Example, Keys, duplicates, keys_of, probes, shared


def tokens_of(documents):
    """Documents end to end, without anything between them."""
    ids = [np.asarray(document, np.uint16) for document in documents]
    lengths = np.array([len(one) for one in ids])
    starts = np.append(0, lengths.cumsum()[:-1])
    tokens = tl.open_tokens(np.concatenate(ids))
    xors = np.array([np.bitwise_xor.reduce(one) for one in ids])
    keys = keys_of(tokens[:][probes(starts, lengths)], lengths, xors)
    return tokens, Documents(keys, starts, lengths.astype(np.uint32))


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


def test_duplicates_are_counted_beyond_the_first():
    a, b, c = long(1), long(2, 20), long(3, 5)
    tokens, documents = tokens_of([a, b, a, c, b, b, changed(a, 500)])
    found = duplicates(tokens, documents)
    assert (found.documents, found.tokens) == (3, 1000 + 2 * 20)
    assert found.examples == (Example(3, 1000, 20), Example(2, 0, 1000))


def test_documents_whose_keys_agree_are_still_compared():
    a = long(1)
    # Two tokens between the probes, exchanged: length, probes and exclusive or stay the same.
    b = changed(changed(a, 3, a[4]), 4, a[3])
    tokens, documents = tokens_of([a, b, a])
    assert len(set(documents.keys.tolist())) == 1
    assert duplicates(tokens, documents).documents == 1
    tokens, documents = tokens_of([a, b])
    assert duplicates(tokens, documents).documents == 0


def test_no_document_and_one_have_no_duplicates():
    tokens, documents = tokens_of([long(1)])
    assert duplicates(tokens, documents).documents == 0
    none = documents[np.array([], np.int64)]
    assert duplicates(tokens, none).examples == ()
    assert shared(tokens, none, tokens, documents).documents == 0
    assert shared(tokens, documents, tokens, none).documents == 0


def test_shared_documents_are_those_the_other_tokens_have():
    a, b, c = long(1), long(2, 20), long(3, 5)
    left, left_documents = tokens_of([a, b, c, b])
    right, right_documents = tokens_of([changed(a, 3), c, long(4), b, b])
    found = shared(left, left_documents, right, right_documents)
    assert (found.documents, found.tokens) == (3, 45)
    assert found.examples == (Example(2, 1000, 20, 2005), Example(1, 1020, 5, 1000))


def test_documents_are_compared_across_dtypes():
    a = long(1)
    left, left_documents = tokens_of([a])
    wide = tl.open_tokens(left[:].astype(np.uint32))
    assert shared(left, left_documents, wide, left_documents).documents == 1


def test_at_most_three_examples_are_given():
    repeated = [long(seed, 10 + seed) for seed in range(10)] * 2
    found = duplicates(*tokens_of(repeated))
    assert found.documents == 10
    assert [one.length for one in found.examples] == [19, 18, 17]


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
