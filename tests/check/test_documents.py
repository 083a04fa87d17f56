"""Documents: where they lie, and keys that agree for equal ones."""

import numpy as np
import pytest

import tokenloader as tl
from tokenloader.check.documents import (
    KEY_TOKENS,
    DocumentCounter,
    Documents,
    KeptDocuments,
    document_keys,
    join,
)
from tokenloader.tokens.reader import Reader


def key_of(document, length=None):
    length = len(document) if length is None else length
    return int(document_keys(document, np.array([0]), np.array([length]))[0])


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 1000, KEY_TOKENS])
def test_the_first_token_and_the_last_are_in_the_key_even_where_the_exclusive_or_is_equal(length):
    base = np.random.default_rng(0).integers(0, 50_000, length)
    turned = base.copy()
    turned[[0, -1]] ^= 1
    assert length == 1 or key_of(turned) != key_of(base)
    if length <= 32:
        for at in range(length):
            changed = base.copy()
            changed[at] += 1
            assert key_of(changed) != key_of(base)


def test_the_key_of_a_long_document_is_made_of_its_first_tokens_and_its_length():
    base = np.random.default_rng(0).integers(0, 50_000, KEY_TOKENS)
    more = np.append(base, [1, 2, 3])
    assert key_of(more) == key_of(base, KEY_TOKENS + 3) != key_of(base)
    assert key_of(base, 2**31) != key_of(base, 2**33)


def test_keys_are_of_documents_and_not_of_what_lies_between_them():
    ids = np.random.default_rng(0).integers(0, 50_000, 1000)
    starts, lengths = np.array([5, 105, 200, 999]), np.array([100, 94, 700, 1])
    expected = [key_of(ids[a : a + n]) for a, n in zip(starts, lengths, strict=True)]
    assert document_keys(ids, starts, lengths).tolist() == expected


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
    ids = np.repeat([-1, 2**40], 32)
    assert len(set(document_keys(ids, np.array([0, 32]), np.array([32, 32])).tolist())) == 2


def test_past_the_bound_a_sample_is_kept_that_treats_equal_documents_alike():
    twice = np.tile(np.random.default_rng(0).integers(0, 2**64, 500, np.uint64), 2)
    every = Documents(twice, 10 * np.arange(1000), np.full(1000, 10), np.full(1000, -1))
    kept_documents = KeptDocuments(most=200)
    for at in range(0, 1000, 7):
        kept_documents.append(every.take(np.arange(at, min(at + 7, 1000))))
    kept = kept_documents.documents()
    assert kept_documents.one_in == 8
    assert 0 < len(kept.keys) <= 200
    assert (kept.keys % 8 == 0).all()
    assert (np.diff(kept.starts) > 0).all()
    assert set(np.unique(kept.keys, return_counts=True)[1].tolist()) == {2}


def test_a_document_past_2_32_tokens_has_its_length(tmp_path):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(2**32 + 100)
    with Reader(tl.open_tokens(tmp_path / "sparse.bin", dtype="uint8")) as reader:
        counter = DocumentCounter(reader, gap_tokens=1)
        counter.append(np.array([2**32 + 52]), join([]))
        counter.finish(2**32 + 100)
    assert (counter.num_documents, counter.longest_length) == (2, 2**32 + 52)
    assert counter.lengths[32:] == [1]
