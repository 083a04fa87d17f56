"""Repeats: duplicates and shared documents are exactly the equal ones, however they are found."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import tokenloader as tl
from tokenloader.check import check as _check
from tokenloader.check.check import check
from tokenloader.check.documents import Documents, keys_of, probes
from tokenloader.check.repeats import Example, Firsts, duplicates, shared
from tokenloader.check.scan import Reader, scan


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


def copied(tokens, documents, **kwargs):
    """What Firsts says of documents that come one at a time, and of all in a second pass."""
    with Reader(tokens) as reader:
        firsts = Firsts(reader, **kwargs)
        each = [
            firsts.copied(tokens[:], 0, documents[np.array([i])])
            for i in range(len(documents.keys))
        ]
        return np.concatenate(each).tolist(), firsts.copied(tokens[:], 0, documents).tolist()


def test_firsts_names_the_first_copy_of_what_has_come_before():
    a, b = long(1), long(2, 20)
    each, again = copied(*tokens_of([a, b, a, b, b, changed(a, 500)]))
    assert each == [-1, -1, 0, 1000, 1000, -1]
    assert again == [0, 1000, 0, 1000, 1000, 2060]


def test_firsts_compares_all_tokens_of_documents_whose_keys_agree():
    a = long(1, 300_000)  # compared in several pieces
    b = changed(changed(a, 299_998, a[299_997]), 299_997, a[299_998])
    tokens, documents = tokens_of([a, b, a])
    assert len(set(documents.keys.tolist())) == 1
    assert copied(tokens, documents)[0] == [-1, -1, 0]


def test_of_neighbours_that_repeat_neighbours_only_the_equal_ones_are_copies():
    a, b, c = long(1), long(2), long(3)
    near = changed(changed(b, 3, b[4]), 4, b[3])
    tokens, documents = tokens_of([a, b, c, a, near, c])
    with Reader(tokens) as reader:
        firsts = Firsts(reader)
        firsts.copied(tokens[:3000], 0, documents[np.arange(3)])
        assert firsts.copied(tokens[3000:], 3000, documents[np.arange(3, 6)]).tolist() == [
            0,
            -1,
            2000,
        ]


def test_without_room_firsts_knows_fewer_copies_and_duplicates_are_the_same():
    a, b = long(1), long(2, 20)
    tokens, documents = tokens_of([a, b, a, b, b])
    each, _ = copied(tokens, documents, room=1)
    assert each == [-1, -1, 0, -1, -1]
    known = replace(documents, copied=np.array(each))
    assert duplicates(tokens, known) == duplicates(tokens, documents)


def test_a_copy_that_a_thread_met_before_the_first_is_still_counted_from_the_first():
    a = long(1)
    tokens, documents = tokens_of([a, long(2), a])
    known = replace(documents, copied=np.array([2000, -1, -1]))
    assert duplicates(tokens, known).examples == (Example(2, 0, 1000),)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("room", [1, 8, 1 << 22])
@pytest.mark.parametrize("seed", range(4))
def test_repeats_are_those_of_a_naive_reference(monkeypatch, room, seed, dtype):
    rng = np.random.default_rng(seed)
    kinds = [rng.integers(0, 9, rng.integers(1, 90)).tolist() for _ in range(60)]
    ours, theirs = ([kinds[k] for k in rng.integers(at, at + 40, 700)] for at in (0, 20))
    monkeypatch.setattr(_check, "scan", lambda tokens, look: scan(tokens, look, 1000))
    monkeypatch.setattr(_check, "Firsts", partial(Firsts, room=room))
    report = check(written(ours, "uint16"), eos_id=9, against=written(theirs, dtype))
    distinct = {tuple(one) for one in ours}
    assert report.repeated.documents == len(ours) - len(distinct)
    assert report.repeated.tokens == sum(map(len, ours)) - sum(map(len, distinct))
    there = {tuple(one) for one in theirs}
    in_both = [one for one in ours if tuple(one) in there]
    assert (report.shared.documents, report.shared.tokens) == (len(in_both), sum(map(len, in_both)))
    best = report.shared.examples[0]
    starts, other_starts = starts_of(ours), starts_of(theirs)
    content = ours[starts.index(best.start)]
    assert (best.count, best.length) == (ours.count(content), len(content))
    assert starts.index(best.start) == ours.index(content)
    assert other_starts.index(best.other_start) == theirs.index(content)


def written(documents, dtype):
    return tl.open_tokens(np.concatenate([[*one, 9] for one in documents]).astype(dtype))


def starts_of(documents):
    return np.append(0, np.cumsum([len(one) + 1 for one in documents])).tolist()
