"""Checking: each thing that may be wrong with tokens, and what is counted, against a naive reference."""

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

import tokenloader as tl
from tokenloader.check.check import check
from tokenloader.check.counts import Limits
from tokenloader.check.delimiters import KNOWN_BOS_IDS, KNOWN_EOS_IDS

END = 50_256
MISSING = "id {} is nowhere in these tokens; is --eos-id or --bos-id right?"


def text(num_tokens, seed=0):
    """Ids of Zipf's distribution, as those of text are; below 20,000."""
    ids = np.random.default_rng(seed).zipf(1.2, 3 * num_tokens) - 1
    return ids[ids < 20_000][:num_tokens].astype(np.uint16)


def joined(documents, end=END):
    return np.concatenate([part for one in documents for part in (one, [end])]).astype(np.uint16)


def many(lengths, seed=0):
    ids = text(sum(lengths), seed)
    return np.split(ids, np.cumsum(lengths)[:-1])


SMALL_CHUNKS = Limits(chunk_tokens=100)  # so that borders fall everywhere


def checked(ids, **kwargs):
    return check(tl.open_tokens(np.asarray(ids)), **kwargs)


LENGTHS = np.random.default_rng(1).integers(1, 400, 300).tolist()


def test_tokens_as_they_should_be_have_no_problem():
    ids = joined(many(LENGTHS))
    report = checked(ids, vocab_size=50_257)
    assert (report.problems, report.notes) == ([], [])
    assert (report.counts.num_tokens, report.counts.dtype) == (len(ids), "uint16")
    assert (report.counts.lowest_id, report.counts.highest_id) == (0, END)
    assert report.counts.eos_id == END
    assert report.counts.num_eos == report.counts.num_documents == 300
    assert (report.counts.num_empty, report.counts.num_runs, report.counts.num_other_eos) == (
        0,
        0,
        0,
    )
    assert report.repeated.documents == 0
    assert report.shared is None


@pytest.mark.parametrize("where", ["after", "before", "cut"])
def test_documents_are_counted_wherever_the_end_of_text_stands(where):
    ids = joined(many(LENGTHS))
    if where == "before":  # as llm.c writes it
        ids = np.roll(ids, 1)
    elif where == "cut":
        ids = ids[: np.flatnonzero(ids == END)[-1]]
    report = checked(ids, limits=SMALL_CHUNKS)
    assert report.eos_side == {"after": "after", "before": "before", "cut": None}[where]
    assert report.counts.num_documents == 300
    assert report.counts.num_empty == 0
    assert report.counts.num_eos == 300 - (where == "cut")
    assert report.counts.longest_length == max(LENGTHS)
    assert report.counts.median_length == int(np.median(LENGTHS))
    by_bits = np.bincount(np.floor(np.log2(LENGTHS)).astype(int)).tolist()
    assert report.counts.lengths == by_bits


def test_a_document_longer_than_many_chunks_is_one():
    report = checked(joined(many([5, 1000, 1, 99, 100, 101])), limits=SMALL_CHUNKS)
    assert (report.counts.num_documents, report.counts.longest_length) == (6, 1000)
    assert report.counts.lengths == [1, 0, 1, 0, 0, 0, 3, 0, 0, 1]


def test_empty_documents_are_counted_and_no_documents():
    documents = [part for one in many([30] * 40) for part in (one, [], [])]
    report = checked(joined(documents), limits=SMALL_CHUNKS)
    assert (report.counts.num_documents, report.counts.num_empty) == (40, 80)


def test_duplicates_are_found_across_chunk_borders():
    documents = many(LENGTHS)
    ids = joined(documents[:-1] + documents[17:19] + documents[-1:])
    report = checked(ids, limits=SMALL_CHUNKS)
    assert report.repeated.documents == 2
    assert report.repeated.tokens == LENGTHS[17] + LENGTHS[18]
    starts = {one.start for one in report.repeated.examples}
    ends = np.flatnonzero(ids == END)
    assert starts == {ends[16] + 1, ends[17] + 1}
    assert report.problems == []


@pytest.mark.parametrize("chunk_tokens", [100, 90_000, 1_000_000])
def test_duplicates_of_any_length_are_found_inside_chunks_and_across_their_borders(chunk_tokens):
    a, b, c = many([70_000, 65_536, 9])
    near = b.copy()
    near[65_000] += 1
    report = checked(joined([a, b, c, b, near, c, a, c]), limits=Limits(chunk_tokens=chunk_tokens))
    assert (report.repeated.documents, report.repeated.tokens) == (4, 70_000 + 65_536 + 2 * 9)
    changed = a.copy()
    changed[69_999] += 1  # past what its key is made of
    report = checked(joined([a, changed]), limits=Limits(chunk_tokens=chunk_tokens))
    assert report.repeated.documents == 0


def test_many_duplicates_are_a_problem():
    documents = many([50] * 100)
    assert checked(joined(documents + documents[:1])).problems == []
    report = checked(joined(documents + documents[:2]))
    assert report.problems == ["2.0% of the documents repeat an earlier one"]


def test_shared_documents_are_a_problem():
    documents, others = many(LENGTHS), many(LENGTHS, seed=5)
    against = tl.open_tokens(joined([*others[:50], documents[3], *others[50:], documents[9]]))
    report = checked(joined(documents), against=against, limits=SMALL_CHUNKS)
    total = LENGTHS[3] + LENGTHS[9]
    assert report.problems == [f"2 documents of {total} tokens are in the other tokens too"]
    assert report.shared.documents == 2
    start = report.shared.examples[0].other_start
    length = report.shared.examples[0].length
    assert against[start : start + length].tolist() in (
        documents[3].tolist(),
        documents[9].tolist(),
    )
    clean = checked(joined(documents), against=tl.open_tokens(joined(others)), limits=SMALL_CHUNKS)
    assert clean.shared.documents == 0
    assert clean.problems == []


def test_one_shared_document_is_said_in_the_singular():
    documents = many([50] * 100)
    report = checked(joined(documents), against=tl.open_tokens(joined(documents[:1])))
    assert report.problems == ["1 document of 50 tokens is in the other tokens too"]


def test_ids_past_the_vocabulary_are_counted_with_the_first_position():
    ids = joined(many(LENGTHS))
    ids[[777, 1234, 5000]] = 50_300
    report = checked(ids, vocab_size=50_257, limits=SMALL_CHUNKS)
    assert report.problems == [
        "3 ids of 50,257 or more, the first at token 777, the highest 50,300; expected ids below "
        "--vocab-size 50257"
    ]
    assert (report.counts.num_out_of_vocab, report.counts.first_out_of_vocab) == (3, 777)
    assert checked(ids, limits=SMALL_CHUNKS).problems == []


def test_negative_ids_are_a_problem():
    ids = joined(many(LENGTHS)).astype(np.int32)
    ids[5] = -7
    assert "the lowest id is -7; expected 0 or more" in checked(ids).problems


def test_the_wrong_byte_order_is_a_problem():
    report = checked(joined(many(LENGTHS)).byteswap())
    assert "the byte order looks wrong" in report.problems[0]


def test_a_hole_is_a_problem_and_a_shorter_run_is_counted():
    ids = joined(many(LENGTHS))
    ids[1000:1100] = 220
    report = checked(ids)
    assert (report.counts.num_runs, report.counts.run_tokens, report.problems) == (1, 100, [])
    hole = np.concatenate([ids, np.zeros(70_000, np.uint16)])
    (problem,) = checked(hole).problems
    assert f"id 0 fills 70,000 positions from token {len(ids):,} on; is a part" in problem


@pytest.mark.parametrize("end", [*KNOWN_EOS_IDS, *KNOWN_BOS_IDS])
def test_the_end_of_text_of_known_tokenizers_is_found(end):
    ids = joined(many(LENGTHS)).astype(np.uint32)
    ids[ids == END] = end
    report = checked(ids)
    assert (report.counts.eos_id, report.counts.num_documents) == (end, 300)


def test_50257_in_the_place_of_50256_is_a_problem():
    (problem,) = checked(joined(many(LENGTHS), 50_257)).problems
    assert "50257 ends documents, one past GPT-2's end-of-text 50256" in problem


def test_both_of_them_are_a_problem():
    ids = joined(many(LENGTHS))
    ids[[100, 200]] = 50_257
    (problem,) = checked(ids).problems
    assert "50256 ends documents, and 50257 is there 2 times too" in problem


def test_an_end_of_text_that_is_said_and_not_there_is_a_problem():
    report = checked(joined(many(LENGTHS)), eos_id=40_000)
    assert report.problems == [MISSING.format(40000)]
    assert report.counts.num_documents == 0


def test_a_begin_of_text_may_be_said():
    ids = np.roll(joined(many(LENGTHS), 20_001), 1)
    report = checked(ids, bos_id=20_001)
    assert (report.counts.eos_id, report.eos_side, report.problems) == (20_001, "before", [])
    assert checked(ids[5:], bos_id=20_001).eos_side == "before"  # which these do not tell
    assert checked(ids[5:], eos_id=20_001).eos_side == "after"
    missing = checked(ids, bos_id=40_000)
    assert missing.problems == [MISSING.format(40000)]
    assert missing.eos_side is None


def test_50257_before_documents_in_the_place_of_50256_is_a_problem():
    (problem,) = checked(np.roll(joined(many(LENGTHS), 50_257), 1)).problems
    assert "50257 begins documents, one past GPT-2's end-of-text 50256" in problem


def test_an_end_of_text_that_is_not_known_may_be_said():
    ids = joined(many(LENGTHS), 20_001)
    assert checked(ids, eos_id=20_001).counts.num_documents == 300
    (note,) = checked(ids).notes
    assert note.startswith("no end-of-text id was found (looked for 50256, 50257, 100257,")
    assert "128000" in note


def test_without_documents_there_is_nothing_to_compare():
    report = checked(text(1000), against=tl.open_tokens(text(1000)))
    assert report.problems == [
        "without an end-of-text id or a document index there are no documents to compare"
    ]


def test_an_end_of_text_that_the_dtype_cannot_hold_is_not_there():
    report = checked(np.zeros(10, np.uint8), eos_id=300)
    assert report.problems == [MISSING.format(300)]


def test_a_sample_of_documents_is_said_to_be_one():
    report = checked(joined(many(LENGTHS)), limits=Limits(most_documents=100))
    assert report.compared_one_in == 4
    assert report.notes == ["documents were compared by a sample, 1 in 4: multiply by it"]
    assert report.counts.num_documents == 300


@pytest.mark.parametrize("ids", [[7], [END], [END, END], [1, END], [END, 1]])
def test_the_smallest_of_tokens_can_be_checked(ids):
    report = checked(np.array(ids, np.uint16), vocab_size=50_257)
    assert report.problems == []
    assert report.counts.num_documents == (1 in ids)


def test_a_report_is_json():
    ids = joined(many(LENGTHS))
    ids[1000:1100] = 220
    report = checked(ids, against=tl.open_tokens(ids), vocab_size=100)
    assert json.loads(json.dumps(asdict(report)))["counts"]["num_tokens"] == len(ids)


def test_a_file_and_its_parts_give_one_report(tmp_path):
    ids = joined(many(LENGTHS))
    for i, part in enumerate(np.split(ids, [1, 100, 20_000])):
        np.save(tmp_path / f"{i}.npy", part)
    report = check(tl.open_tokens(sorted(tmp_path.glob("*.npy"))))
    assert report == checked(ids)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ru_maxrss is in bytes")
def test_checking_takes_hardly_any_memory(tmp_path):
    """Of the process's own: what is read stays in the page cache, and is not mapped."""
    ids = joined(many([20_000] * 100))
    tl.write_tokens(tmp_path / "a.safetensors", [ids] * 50)
    code = f"""if True:
        import resource
        import tokenloader as tl
        from tokenloader.check.check import check
        from tokenloader.check.counts import Limits
        straddling = Limits(chunk_tokens=20_000)  # all documents straddle chunks
        with tl.open_tokens({str(tmp_path / "a.safetensors")!r}) as tokens:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            check(tokens, limits=straddling)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 << 10  # KiB; the file has 190 MiB


def indexed(folder, documents, name="a"):
    """A datatrove file of documents that nothing ends but the index."""
    np.concatenate(documents).astype(np.uint16).tofile(folder / f"{name}.ds")
    np.cumsum([len(one) for one in documents]).astype(np.uint64).tofile(folder / f"{name}.ds.index")
    return tl.open_tokens(folder / f"{name}.ds")


@pytest.mark.parametrize("empty", [[], [0], [0, 1, 7, 7], [-1, -1]])
def test_without_an_end_of_text_id_documents_are_those_of_the_index(tmp_path, empty):
    documents = many(LENGTHS)
    documents = documents[:-1] + documents[17:19] + documents[-1:]
    for at in empty:
        documents.insert(at % (len(documents) + 1), documents[0][:0])
    report = check(indexed(tmp_path, documents), limits=SMALL_CHUNKS)
    assert (report.counts.has_index, report.counts.eos_id, report.counts.num_eos) == (True, None, 0)
    assert (report.counts.num_documents, report.counts.num_empty) == (302, len(empty))
    assert report.counts.longest_length == max(LENGTHS)
    assert report.repeated.documents == 2
    assert report.repeated.tokens == LENGTHS[17] + LENGTHS[18]
    assert report.problems == []
    (note,) = report.notes
    assert note.endswith("so documents are those of the index; --eos-id or --bos-id says which it is")


def test_documents_of_an_index_are_compared_with_others(tmp_path):
    documents = many(LENGTHS)
    report = check(
        indexed(tmp_path, documents),
        against=indexed(tmp_path, [*many([50] * 9, seed=5), documents[3]], "b"),
    )
    assert (report.shared.documents, report.shared.tokens) == (1, LENGTHS[3])
    assert report.shared.examples[0].other_start == 450


def test_other_tokens_without_documents_are_a_problem(tmp_path):
    documents, other = many(LENGTHS), tl.open_tokens(text(1000))
    report = check(indexed(tmp_path, documents), against=other)
    assert report.problems == ["the other tokens have no document index, so no documents to compare"]
    report = checked(joined(documents), against=other)
    assert report.problems == ["the other tokens have no end-of-text id 50256, so no documents to compare"]


def test_where_an_end_of_text_id_is_found_it_and_not_the_index_ends_documents(tmp_path):
    ids = joined(many(LENGTHS))
    report = check(indexed(tmp_path, [ids]))
    assert (report.counts.has_index, report.counts.eos_id, report.counts.num_documents) == (
        False,
        END,
        300,
    )
