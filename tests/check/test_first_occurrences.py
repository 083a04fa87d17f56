"""First occurrences: copies are found as they pass by, and never something that is not one."""

import numpy as np
from helpers import changed, open_documents, random_ids

from tokenloader.check.first_occurrences import FirstOccurrences
from tokenloader.check.repeats import duplicates
from tokenloader.tokens.reader import Reader


def found(tokens, documents, **kwargs):
    """First occurrences of documents that come one at a time, and of all in a second pass."""
    with Reader(tokens) as reader:
        firsts = FirstOccurrences(reader, **kwargs)
        each = [
            firsts.find(tokens[:], 0, documents.take(np.array([i]))) for i in range(len(documents.keys))
        ]
        return np.concatenate(each).tolist(), firsts.find(tokens[:], 0, documents).tolist()


def test_the_first_occurrence_of_what_has_come_before_is_named():
    a, b = random_ids(1), random_ids(2, 20)
    each, again = found(*open_documents([a, b, a, b, b, changed(a, 500)]))
    assert each == [-1, -1, 0, 1000, 1000, -1]
    assert again == [0, 1000, 0, 1000, 1000, 2060]


def test_all_tokens_of_documents_whose_keys_agree_are_compared():
    a = random_ids(1, 300_000)  # compared in several parts
    b = changed(changed(a, 299_998, a[299_997]), 299_997, a[299_998])
    tokens, documents = open_documents([a, b, a])
    assert len(set(documents.keys.tolist())) == 1
    assert found(tokens, documents)[0] == [-1, -1, 0]


def test_of_neighbours_that_repeat_neighbours_only_the_equal_ones_are_copies():
    a, b, c = random_ids(1), random_ids(2), random_ids(3)
    near = changed(changed(b, 3, b[4]), 4, b[3])
    tokens, documents = open_documents([a, b, c, a, near, c])
    with Reader(tokens) as reader:
        firsts = FirstOccurrences(reader)
        firsts.find(tokens[:3000], 0, documents.take(np.arange(3)))
        again = firsts.find(tokens[3000:], 3000, documents.take(np.arange(3, 6)))
    assert again.tolist() == [0, -1, 2000]


def test_without_slots_fewer_copies_are_known_and_duplicates_are_the_same():
    a, b = random_ids(1), random_ids(2, 20)
    tokens, documents = open_documents([a, b, a, b, b])
    each, _ = found(tokens, documents, num_slots=1)
    assert each == [-1, -1, 0, -1, -1]
    known = documents._replace(copy_of=np.array(each))
    assert duplicates(tokens, known) == duplicates(tokens, documents)
