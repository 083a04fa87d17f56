"""Checking: each thing that may be wrong with tokens, and what is counted, against a naive reference."""

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

import tokenloader as tl
from tokenloader.check import check as _check
from tokenloader.check.check import Report, check
from tokenloader.check.repeats import Firsts
from tokenloader.check.scan import Reader

END = 50_256


def text(num_tokens, seed=0):
    """Ids of Zipf's distribution, as those of text are; below 20,000."""
    ids = np.random.default_rng(seed).zipf(1.2, 3 * num_tokens) - 1
    return ids[ids < 20_000][:num_tokens].astype(np.uint16)


def joined(documents, end=END):
    return np.concatenate([part for one in documents for part in (one, [end])]).astype(np.uint16)


def many(lengths, seed=0):
    ids = text(sum(lengths), seed)
    return np.split(ids, np.cumsum(lengths)[:-1])


def checked(ids, **kwargs):
    return check(tl.open_tokens(np.asarray(ids)), **kwargs)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 100 tokens, so that borders fall everywhere."""
    scan = _check.scan
    monkeypatch.setattr(_check, "scan", lambda tokens, look: scan(tokens, look, 100))


LENGTHS = np.random.default_rng(1).integers(1, 400, 300).tolist()


def test_tokens_as_they_should_be_have_no_problem():
    ids = joined(many(LENGTHS))
    report = checked(ids, vocab_size=50_257)
    assert (report.problems, report.notes) == ([], [])
    assert (report.num_tokens, report.dtype) == (len(ids), "uint16")
    assert (report.lowest_id, report.highest_id) == (0, END)
    assert report.eos_id == END
    assert report.num_eos == report.num_documents == 300
    assert (report.num_empty, report.num_runs, report.num_other_eos) == (0, 0, 0)
    assert report.repeated.documents == 0
    assert report.shared is None


@pytest.mark.parametrize("where", ["after", "before", "cut"])
def test_documents_are_counted_wherever_the_end_of_text_stands(small_blocks, where):
    ids = joined(many(LENGTHS))
    if where == "before":  # as llm.c writes it
        ids = np.roll(ids, 1)
    elif where == "cut":
        ids = ids[: np.flatnonzero(ids == END)[-1]]
    report = checked(ids)
    assert report.num_documents == 300
    assert report.num_empty == 0
    assert report.num_eos == 300 - (where == "cut")
    assert report.longest_length == max(LENGTHS)
    assert report.median_length == int(np.median(LENGTHS))
    by_bits = np.bincount(np.floor(np.log2(LENGTHS)).astype(int)).tolist()
    assert report.lengths == by_bits


def test_a_document_longer_than_many_blocks_is_one(small_blocks):
    report = checked(joined(many([5, 1000, 1, 99, 100, 101])))
    assert (report.num_documents, report.longest_length) == (6, 1000)
    assert report.lengths == [1, 0, 1, 0, 0, 0, 3, 0, 0, 1]


def test_empty_documents_are_counted_and_no_documents(small_blocks):
    documents = [part for one in many([30] * 40) for part in (one, [], [])]
    report = checked(joined(documents))
    assert (report.num_documents, report.num_empty) == (40, 80)


def test_duplicates_are_found_across_block_borders(small_blocks):
    documents = many(LENGTHS)
    ids = joined(documents[:-1] + documents[17:19] + documents[-1:])
    report = checked(ids)
    assert report.repeated.documents == 2
    assert report.repeated.tokens == LENGTHS[17] + LENGTHS[18]
    starts = {one.start for one in report.repeated.examples}
    ends = np.flatnonzero(ids == END)
    assert starts == {ends[16] + 1, ends[17] + 1}
    assert report.problems == []


def test_many_duplicates_are_a_problem():
    documents = many([50] * 100)
    assert checked(joined(documents + documents[:1])).problems == []
    report = checked(joined(documents + documents[:2]))
    assert report.problems == ["2.0% of the documents repeat an earlier one"]


def test_shared_documents_are_a_problem(small_blocks):
    documents, others = many(LENGTHS), many(LENGTHS, seed=5)
    against = tl.open_tokens(joined([*others[:50], documents[3], *others[50:], documents[9]]))
    report = checked(joined(documents), against=against)
    total = LENGTHS[3] + LENGTHS[9]
    assert report.problems == [f"2 documents of {total} tokens are in the other tokens too"]
    assert report.shared.documents == 2
    start = report.shared.examples[0].other_start
    length = report.shared.examples[0].length
    assert against[start : start + length].tolist() in (
        documents[3].tolist(),
        documents[9].tolist(),
    )
    clean = checked(joined(documents), against=tl.open_tokens(joined(others)))
    assert clean.shared.documents == 0
    assert clean.problems == []


def test_one_shared_document_is_said_in_the_singular():
    documents = many([50] * 100)
    report = checked(joined(documents), against=tl.open_tokens(joined(documents[:1])))
    assert report.problems == ["1 document of 50 tokens is in the other tokens too"]


def test_ids_past_the_vocabulary_are_counted_with_the_first_position(small_blocks):
    ids = joined(many(LENGTHS))
    ids[[777, 1234, 5000]] = 50_300
    report = checked(ids, vocab_size=50_257)
    assert report.problems == [
        "3 ids of 50,257 or more, the first at token 777, the highest 50,300: the vocabulary ends at "
        "50,256"
    ]
    assert (report.num_past, report.first_past) == (3, 777)
    assert checked(ids).problems == []


def test_negative_ids_are_a_problem():
    ids = joined(many(LENGTHS)).astype(np.int32)
    ids[5] = -7
    assert "the lowest id is -7; ids are 0 or more" in checked(ids).problems


def test_the_wrong_byte_order_is_a_problem():
    report = checked(joined(many(LENGTHS)).byteswap())
    assert "the byte order looks wrong" in report.problems[0]


def test_a_hole_is_a_problem_and_a_shorter_run_is_counted():
    ids = joined(many(LENGTHS))
    ids[1000:1100] = 220
    report = checked(ids)
    assert (report.num_runs, report.run_tokens, report.problems) == (1, 100, [])
    hole = np.concatenate([ids, np.zeros(70_000, np.uint16)])
    (problem,) = checked(hole).problems
    assert f"token 0 fills 70,000 positions from {len(ids):,} on" in problem


@pytest.mark.parametrize("end", [50_256, 50_257, 100_257, 128_001, 151_643, 199_999])
def test_the_end_of_text_of_known_tokenizers_is_found(end):
    ids = joined(many(LENGTHS)).astype(np.uint32)
    ids[ids == END] = end
    report = checked(ids)
    assert (report.eos_id, report.num_documents) == (end, 300)


def test_50257_in_the_place_of_50256_is_a_problem():
    (problem,) = checked(joined(many(LENGTHS), 50_257)).problems
    assert "50257 ends documents, which is one past GPT-2's end-of-text 50256" in problem


def test_both_of_them_are_a_problem():
    ids = joined(many(LENGTHS))
    ids[[100, 200]] = 50_257
    (problem,) = checked(ids).problems
    assert "50256 ends documents, and 50257 is there 2 times too" in problem


def test_an_end_of_text_that_is_said_and_not_there_is_a_problem():
    report = checked(joined(many(LENGTHS)), eos_id=40_000)
    assert report.problems == ["there is no end-of-text id 40000 in these tokens"]
    assert report.num_documents == 0


def test_an_end_of_text_that_is_not_known_may_be_said():
    ids = joined(many(LENGTHS), 20_001)
    assert checked(ids, eos_id=20_001).num_documents == 300
    (note,) = checked(ids).notes
    assert note.startswith("no end-of-text id was found (looked for 50256, 50257, 100257,")


def test_without_documents_there_is_nothing_to_compare():
    report = checked(text(1000), against=tl.open_tokens(text(1000)))
    assert report.problems == [
        "without an end-of-text id or a document index there are no documents to compare"
    ]


def test_an_end_of_text_that_the_dtype_cannot_hold_is_not_there():
    report = checked(np.zeros(10, np.uint8), eos_id=300)
    assert report.problems == ["there is no end-of-text id 300 in these tokens"]


def test_a_sample_of_documents_is_said_to_be_one(monkeypatch):
    monkeypatch.setattr(_check, "Keys", lambda: _keys(most=100))
    report = checked(joined(many(LENGTHS)))
    assert report.compared_one_in == 4
    assert report.notes == ["documents were compared by a sample, 1 in 4: multiply by it"]
    assert report.num_documents == 300


_keys = _check.Keys


@pytest.mark.parametrize("ids", [[7], [END], [END, END], [1, END], [END, 1]])
def test_the_smallest_of_tokens_can_be_checked(ids):
    report = checked(np.array(ids, np.uint16), vocab_size=50_257)
    assert report.problems == []
    assert report.num_documents == (1 in ids)


def test_a_report_is_json():
    ids = joined(many(LENGTHS))
    ids[1000:1100] = 220
    report = checked(ids, against=tl.open_tokens(ids), vocab_size=100)
    assert json.loads(json.dumps(asdict(report)))["num_tokens"] == len(ids)


def test_a_file_and_its_parts_give_one_report(tmp_path):
    ids = joined(many(LENGTHS))
    for i, part in enumerate(np.split(ids, [1, 100, 20_000])):
        np.save(tmp_path / f"{i}.npy", part)
    report = check(tl.open_tokens(sorted(tmp_path.glob("*.npy"))))
    assert report == checked(ids)


def test_a_document_past_2_32_tokens_has_its_length(tmp_path):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(2**32 + 100)
    report = Report(2**32 + 100, "uint8")
    with Reader(tl.open_tokens(tmp_path / "sparse.bin", dtype="uint8")) as reader:
        counter = _check._DocumentCounter(reader, report)
        block = _check._look(
            np.array([0, 0, 200], np.uint8), 2**32 + 50, 200, None, None, Firsts(reader)
        )
        counter.append(block)
        counter.finish()
    assert (report.num_documents, report.longest_length) == (2, 2**32 + 52)
    assert report.lengths[32:] == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ru_maxrss is in bytes")
def test_checking_takes_hardly_any_memory(tmp_path):
    """Of the process's own: what is read stays in the page cache, and is not mapped."""
    ids = joined(many([20_000] * 100))
    tl.write_tokens(tmp_path / "a.safetensors", [ids] * 50)
    code = f"""if True:
        import resource
        import tokenloader as tl
        from tokenloader.check import check as _check
        scan = _check.scan
        _check.scan = lambda tokens, look: scan(tokens, look, 20_000)  # so that all documents straddle
        with tl.open_tokens({str(tmp_path / "a.safetensors")!r}) as tokens:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            _check.check(tokens)
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
def test_without_an_end_of_text_id_documents_are_those_of_the_index(tmp_path, small_blocks, empty):
    documents = many(LENGTHS)
    documents = documents[:-1] + documents[17:19] + documents[-1:]
    for at in empty:
        documents.insert(at % (len(documents) + 1), documents[0][:0])
    report = check(indexed(tmp_path, documents))
    assert (report.has_index, report.eos_id, report.num_eos) == (True, None, 0)
    assert (report.num_documents, report.num_empty) == (302, len(empty))
    assert report.longest_length == max(LENGTHS)
    assert report.repeated.documents == 2
    assert report.repeated.tokens == LENGTHS[17] + LENGTHS[18]
    assert report.problems == []
    (note,) = report.notes
    assert note.endswith("so documents are those of the index; --eos-id says which it is")


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
    assert report.problems == [
        "the other tokens have no document index, so no documents to compare"
    ]
    report = checked(joined(documents), against=other)
    assert report.problems == [
        "the other tokens have no end-of-text id 50256, so no documents to compare"
    ]


def test_where_an_end_of_text_id_is_found_it_and_not_the_index_ends_documents(tmp_path):
    ids = joined(many(LENGTHS))
    report = check(indexed(tmp_path, [ids]))
    assert (report.has_index, report.eos_id, report.num_documents) == (False, END, 300)
