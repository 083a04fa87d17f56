"""Repeats: duplicates and shared documents are exactly the equal ones, however they are found."""

import numpy as np
import pytest
from helpers import changed, open_documents, random_ids

import tokenloader as tl
from tokenloader.check.check import check
from tokenloader.check.counts import Limits
from tokenloader.check.repeats import Example, duplicates, shared


def test_duplicates_are_counted_beyond_the_first():
    a, b, c = random_ids(1), random_ids(2, 20), random_ids(3, 5)
    tokens, documents = open_documents([a, b, a, c, b, b, changed(a, 500)])
    found = duplicates(tokens, documents)
    assert (found.documents, found.tokens) == (3, 1000 + 2 * 20)
    assert found.examples == (Example(3, 1000, 20), Example(2, 0, 1000))


def test_documents_whose_keys_agree_are_still_compared():
    a = random_ids(1)
    # Two tokens between the probes, exchanged: length, probes and exclusive or stay the same.
    b = changed(changed(a, 3, a[4]), 4, a[3])
    tokens, documents = open_documents([a, b, a])
    assert len(set(documents.keys.tolist())) == 1
    assert duplicates(tokens, documents).documents == 1
    tokens, documents = open_documents([a, b])
    assert duplicates(tokens, documents).documents == 0


def test_no_document_and_one_have_no_duplicates():
    tokens, documents = open_documents([random_ids(1)])
    assert duplicates(tokens, documents).documents == 0
    none = documents.take(np.array([], np.int64))
    assert duplicates(tokens, none).examples == ()
    assert shared(tokens, none, tokens, documents).documents == 0
    assert shared(tokens, documents, tokens, none).documents == 0


def test_shared_documents_are_those_the_other_tokens_have():
    a, b, c = random_ids(1), random_ids(2, 20), random_ids(3, 5)
    left, left_documents = open_documents([a, b, c, b])
    right, right_documents = open_documents([changed(a, 3), c, random_ids(4), b, b])
    found = shared(left, left_documents, right, right_documents)
    assert (found.documents, found.tokens) == (3, 45)
    assert found.examples == (Example(2, 1000, 20, 2005), Example(1, 1020, 5, 1000))


def test_documents_are_compared_across_dtypes():
    a = random_ids(1)
    left, left_documents = open_documents([a])
    wide = tl.open_tokens(left[:].astype(np.uint32))
    assert shared(left, left_documents, wide, left_documents).documents == 1


def test_at_most_three_examples_are_given():
    repeated = [random_ids(seed, 10 + seed) for seed in range(10)] * 2
    found = duplicates(*open_documents(repeated))
    assert found.documents == 10
    assert [one.length for one in found.examples] == [19, 18, 17]


def test_a_copy_that_a_thread_met_before_the_first_is_still_counted_from_the_first():
    a = random_ids(1)
    tokens, documents = open_documents([a, random_ids(2), a])
    known = documents._replace(copy_of=np.array([2000, -1, -1]))
    assert duplicates(tokens, known).examples == (Example(2, 0, 1000),)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("room", [1, 8, 1 << 22])
@pytest.mark.parametrize("seed", range(4))
def test_repeats_are_those_of_a_naive_reference(room, seed, dtype):
    rng = np.random.default_rng(seed)
    kinds = [rng.integers(0, 9, rng.integers(1, 90)).tolist() for _ in range(60)]
    ours, theirs = ([kinds[k] for k in rng.integers(at, at + 40, 700)] for at in (0, 20))
    limits = Limits(chunk_tokens=1000, first_occurrences=room)
    against = written(theirs, dtype)
    report = check(written(ours, "uint16"), eos_id=9, against=against, limits=limits)
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
