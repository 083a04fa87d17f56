"""Tokenizing: the ids, their order, the end of documents, and what a tokenizer file must have."""

import json
import re
import sys
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

import tokenloader as tl
from tokenloader.prepare.tokenize import Tokenizer, decoder, split_document, tokenize

TEXTS = ["def one():\n    return 1\n", "for x in y:\n    print(x)", "日本 ünï", "a" * 100]


def save(path, *, special=("<|endoftext|>",), vocab_size=400, edit=None):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    if edit:
        edit(library)
    library.save(str(path))
    return library


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "tokenizer.json")
    return tmp_path


def json_lines(path, documents):
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return path


def run(folder, *files, **kwargs):
    out = folder / "out.safetensors"
    done = tokenize(list(files), out, Tokenizer(folder / "tokenizer.json"), **kwargs)
    return done, tl.open_tokens(out)[:]


def test_documents_come_back_with_an_end_of_text_after_each(folder):
    done, ids = run(folder, json_lines(folder / "a.jsonl", TEXTS))
    library = Library.from_file(str(folder / "tokenizer.json"))
    assert done.eos_id == 0
    ends = np.flatnonzero(ids == 0)
    assert len(ends) == 4
    assert ends[-1] == len(ids) - 1
    parts = np.split(ids, ends + 1)[:-1]
    assert [library.decode(part[:-1].tolist()) for part in parts] == TEXTS


def test_it_tells_what_it_wrote(folder):
    done, ids = run(folder, json_lines(folder / "a.jsonl", TEXTS))
    assert (done.num_documents, done.num_tokens, done.dtype) == (4, len(ids), "uint16")
    assert done.text_bytes == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("characters", [1, 50, 10_000])
def test_the_order_is_that_of_the_files_however_they_are_batched(folder, characters):
    documents = [f"document {i} " * (i % 5 + 1) for i in range(200)]
    files = [json_lines(folder / f"{i}.jsonl", documents[i::3]) for i in range(3)]
    _, ids = run(folder, *files, batch_characters=characters)
    library = Library.from_file(str(folder / "tokenizer.json"))
    ordered = [one for i in range(3) for one in documents[i::3]]
    expected = [id for one in ordered for id in (*library.encode(one).ids, 0)]
    assert ids.tolist() == expected


def test_a_long_document_is_encoded_in_chunks_to_the_same_ids(folder):
    text = "def f(x):\n    return x\n\n\n" * 200 + "\n\n  \n" + "x = 1\ny = 2\n" * 200
    whole = Tokenizer(folder / "tokenizer.json").encode([text, "b"])
    chunks = split_document(text, 100)
    assert len(chunks) > 20
    assert "".join(chunks) == text
    in_chunks = Tokenizer(folder / "tokenizer.json", chunk_characters=100).encode([text, "b"])
    np.testing.assert_array_equal(whole, in_chunks)


def test_a_long_document_without_line_ends_stays_whole():
    assert split_document("a" * 1000, 100) == ["a" * 1000]


def test_an_end_of_text_spelled_out_in_a_document_is_text(folder):
    _, ids = run(folder, json_lines(folder / "a.jsonl", ["a<|endoftext|>b"]))
    assert np.flatnonzero(ids == 0).tolist() == [len(ids) - 1]
    assert Library.from_file(str(folder / "tokenizer.json")).decode(ids[:-1].tolist()) == (
        "a<|endoftext|>b"
    )


def test_in_plain_text_it_stands_between_documents(folder):
    (folder / "a.txt").write_text("one\n<|endoftext|>\ntwo")
    done, _ = run(folder, folder / "a.txt")
    assert done.num_documents == 2


def test_padding_and_truncation_of_the_file_are_not_used(tmp_path):
    def edit(library):
        library.enable_truncation(3)
        library.enable_padding(length=50)

    save(tmp_path / "tokenizer.json", edit=edit)
    encoded = Tokenizer(tmp_path / "tokenizer.json").encode(["abcdefghij" * 3])
    assert 10 < len(encoded) < 50
    assert (encoded == 0).sum() == 1


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_known_ends_of_text_are_found(tmp_path, token):
    save(tmp_path / "tokenizer.json", special=("<pad>", token))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.eos_token, tokenizer.eos_id) == (token, 1)


def test_another_can_be_said(tmp_path):
    save(tmp_path / "tokenizer.json", special=("<|endoftext|>", "[SEP]"))
    assert Tokenizer(tmp_path / "tokenizer.json", "[SEP]").eos_id == 1


def test_without_one_the_special_tokens_are_listed(tmp_path):
    save(tmp_path / "tokenizer.json", special=("[CLS]", "[SEP]"))
    with pytest.raises(ValueError, match=re.escape("no token <|endoftext|> or <|end_of_text|>")) as e:
        Tokenizer(tmp_path / "tokenizer.json")
    assert "pass --eos-token with one of its special tokens: [CLS], [SEP]" in str(e.value)
    with pytest.raises(ValueError, match="no token <end> to end documents with"):
        Tokenizer(tmp_path / "tokenizer.json", "<end>")


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_a_vocabulary_of_65_536_is_written_as_uint16_and_a_larger_one_as_uint32(tmp_path, size, dtype):
    words = {f"token{i}": i for i in range(size - 1)} | {"<|endoftext|>": size - 1}
    library = Library(models.WordLevel(words, unk_token="token0"))
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.dtype == dtype
    assert tokenizer.encode([f"token{size - 2}"]).tolist() == [size - 2, size - 1]


def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"model": 5}')
    with pytest.raises(ValueError, match=r"a.json: not a tokenizer.json of the tokenizers library \("):
        Tokenizer(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError, match=r"none.json"):
        Tokenizer(tmp_path / "none.json")


def edited(path, **parts):
    """A tokenizer.json with other parts in the place of some."""
    save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return path


def test_a_tokenizer_that_makes_the_library_panic_is_named_and_nothing_more_is_printed(tmp_path, capfd):
    damaged = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path = edited(tmp_path / "a.json", normalizer=damaged)
    for load in (Tokenizer, decoder):
        with pytest.raises(ValueError, match=r"a.json: not a tokenizer.json .*\(Precompiled: Error"):
            load(path)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_that_cannot_encode_is_named(tmp_path):
    vocabulary = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
    tokenizer = Tokenizer(edited(tmp_path / "a.json", model=vocabulary))
    with pytest.raises(ValueError, match=r"a.json: cannot encode these documents \(WordLevel error"):
        tokenizer.encode(["b"])


def test_a_byte_order_mark_before_a_tokenizer_is_left_out(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert Tokenizer(path).eos_id == 0


def test_an_end_of_text_that_is_empty_is_refused(folder):
    with pytest.raises(ValueError, match="--eos-token is empty; expected a token of the vocabulary"):
        Tokenizer(folder / "tokenizer.json", "")


def test_special_tokens_are_listed_without_what_a_terminal_obeys_and_not_all(tmp_path):
    save(tmp_path / "a.json", special=["\x1b[2J", *map(str, range(30))])
    with pytest.raises(ValueError, match=r"special tokens: \\x1b\[2J, 0, 1, 2, .* and 21 more"):
        Tokenizer(tmp_path / "a.json")


def test_without_the_library_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizing needs tokenizers.*tokenloader\[tokenize\]"):
        Tokenizer(folder / "tokenizer.json")


def test_a_failure_in_a_later_file_leaves_nothing(folder):
    good = json_lines(folder / "a.jsonl", TEXTS)
    (folder / "b.jsonl").write_text("broken\n")
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: not JSON"):
        run(folder, good, folder / "b.jsonl")
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.jsonl",
        "b.jsonl",
        "tokenizer.json",
    ]


def test_what_is_not_utf_8_is_replaced_if_asked(folder):
    (folder / "a.jsonl").write_bytes(b'{"text": "a\\ud83d"}')
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: field 'text' has half of a surrogate pair"):
        run(folder, folder / "a.jsonl")
    _, ids = run(folder, folder / "a.jsonl", replace_invalid=True)
    library = Library.from_file(str(folder / "tokenizer.json"))
    assert library.decode(ids[:-1].tolist()) == "a\ufffd"


def test_a_file_that_exists_is_replaced_only_by_force(folder):
    documents = json_lines(folder / "a.jsonl", TEXTS)
    (folder / "out.safetensors").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"out.safetensors exists by now"):
        run(folder, documents)
    assert (folder / "out.safetensors").read_bytes() == b"precious"
    assert run(folder, documents, force=True)[0].num_documents == 4


def test_documents_are_encoded_on_a_thread_lest_a_signal_waits_for_the_library(folder):
    class Watched(Tokenizer):
        def encode(self, documents):
            threads.append(threading.current_thread())
            return super().encode(documents)

    threads = []
    documents = json_lines(folder / "a.jsonl", TEXTS)
    tokenize([documents], folder / "out.safetensors", Watched(folder / "tokenizer.json"))
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_the_bar_counts_the_bytes_of_text(folder, capfd):
    run(folder, json_lines(folder / "a.jsonl", TEXTS), progress=True)
    err = capfd.readouterr().err
    assert "tokenizing: " in err
    assert "B/s]" in err


def test_files_without_a_document_are_refused(folder):
    (folder / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"out.safetensors: there are no tokens to write"):
        run(folder, folder / "empty.txt")
