"""Delimiters: which id is between documents, and on which side of each, as writers of files put it."""

import numpy as np
import pytest
from helpers import llm_c_bytes

import tokenloader as tl
from tokenloader.check.delimiters import find_delimiter, find_side


def stream(before=(), after=(), num_documents=40):
    """Documents of ids 1,000 to 9,999 with ids before and after each."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1000, 10_000, rng.integers(5, 50)) for _ in range(num_documents)]
    ids = np.concatenate([part for one in documents for part in (before, one, after)])
    return ids.astype(np.uint32)


@pytest.mark.parametrize(
    ("before", "after", "found", "side"),
    [
        ([], [50_256], 50_256, "after"),  # nanoGPT
        ([50_256], [], 50_256, "before"),  # llm.c, build-nanogpt
        ([128_000], [], 128_000, "before"),  # llm.c with Llama 3's tokenizer
        ([], [128_001], 128_001, "after"),
        ([128_000], [128_001], 128_001, "after"),
        ([200_000], [200_001], 200_001, "after"),
        ([1], [2], 2, "after"),  # Llama 2, Mistral
        ([2], [1], 1, "after"),  # Gemma
        ([], [151_643], 151_643, "after"),
        ([], [0], None, None),  # Pythia: not to be told from a common id
        ([1], [], None, None),
    ],
)
def test_the_ids_of_common_tokenizers_are_found_with_their_side(before, after, found, side):
    ids = stream(before, after)
    assert find_delimiter(ids) == found
    if found is not None:
        assert find_side(tl.open_tokens(ids), found) == side


def test_common_ids_that_happen_to_follow_each_other_are_no_delimiters():
    assert find_delimiter(np.arange(1, 5000) % 10) is None  # after 1 always 2, but the first id is neither
    ids = stream()
    ids[::7], ids[1::14] = 1, 2
    assert find_delimiter(ids) is None


def test_a_few_ids_of_the_other_kind_do_not_hide_a_begin_of_text():
    ids = stream([128_000])
    ids[3] = 128_001
    assert find_delimiter(ids) == 128_000


@pytest.mark.parametrize(("before", "after"), [([], [7]), ([7], [])])
def test_most_files_say_where_it_stands(tmp_path, before, after):
    for i in range(5):
        np.save(tmp_path / f"{i}.npy", stream(before, after)[: -1 if i == 2 else None])
    cut = stream(before, after)[3:-3]
    np.save(tmp_path / "9.npy", (np.append(cut, 7) if before else np.append(7, cut)).astype(np.uint32))
    assert find_side(tl.open_tokens(tmp_path), 7) == ("before" if before else "after")


def test_where_documents_are_cut_at_both_ends_only_llm_c_or_the_id_tells(tmp_path):
    ids = stream([50_256])[3:-3]
    np.save(tmp_path / "cut.npy", ids)
    (tmp_path / "cut.bin").write_bytes(llm_c_bytes(ids, 20240801, 7))
    assert find_side(tl.open_tokens(tmp_path / "cut.npy"), 50_256) is None
    assert find_side(tl.open_tokens(tmp_path / "cut.bin"), 50_256) == "before"
    assert find_side(tl.open_tokens(tmp_path / "cut.bin"), 128_001) == "after"
    assert find_side(tl.open_tokens(ids), 128_000) == "before"
    assert find_side(tl.open_tokens(ids), 128_001) == "after"


def test_files_that_were_joined_with_arrays_are_looked_at_as_one(tmp_path):
    np.save(tmp_path / "a.npy", stream([7]))
    assert find_side(tl.open_tokens([tmp_path / "a.npy", stream([7])]), 7) == "before"
