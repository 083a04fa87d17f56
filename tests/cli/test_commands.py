"""The commands: what each prints, as a screen and as JSON, and its exit status."""

import json
import os
import threading

import numpy as np
import pytest
from helpers import run_cli

import tokenloader as tl
from tokenloader.check.bench import Bench, Speed
from tokenloader.cli.bench import bench_screen

END = 50_256

# info


def test_info_prints_a_table(run):
    status, out, err = run("info", "train.safetensors")
    assert (status, err) == (0, "")
    rows = dict(line.split(None, 1) for line in out.splitlines())
    num_tokens = len(tl.open_tokens("train.safetensors"))
    assert rows["file"] == "train.safetensors"
    assert rows["format"] == "safetensors"
    assert rows["tensors"] == f"tokens U16[{num_tokens}]"
    assert rows["tokens"] == f"{num_tokens:,}"


def test_info_takes_batches_of_any_shape(run):
    _, out, _ = run("info", "--batch-size", 4, "--seq-len", 100, "train.npy")
    windows = len(tl.open_tokens("train.npy")) // 100 - 1
    assert f"{windows:,} an epoch" in out
    assert f"{windows // 4:,} an epoch (batch size 4, sequence length 100)" in out
    _, out, _ = run("info", "--seq-len", 1_000_000, "train.npy")
    assert "none: fewer tokens than a window of 1,000,001" in out


def test_info_in_json(run):
    status, out, _ = run("info", "--json", "--dtype", "uint16", "train.bin")
    found = json.loads(out)
    assert status == 0
    assert found["files"][0]["format"] == "headerless"
    assert found["num_tokens"] * 2 == found["num_bytes"] == os.path.getsize("train.bin")
    assert "devices" not in found


def test_info_lists_devices_when_asked(run):
    _, out, _ = run("info", "--devices", "train.npy")
    assert out.count("<- batches land here") == 1
    _, out, _ = run("info", "--devices", "--json", "train.npy")
    devices = json.loads(out)["devices"]
    assert [device["backend"] for device in devices] == ["cpu"] * 8
    assert [device["default"] for device in devices].count(True) == 1


def test_several_sources_are_one_axis(run):
    _, out, _ = run("info", "--json", "train.npy", "train.safetensors", "train.npy")
    found = json.loads(out)
    assert found["num_tokens"] == 3 * len(tl.open_tokens("train.npy"))
    assert len(found["files"]) == 3
    _, out, _ = run("info", *["train.npy"] * 9)
    assert "and 3 more" in out


def test_the_key_says_which_tensor(run):
    status, _, err = run("info", "--key", "other", "train.safetensors")
    assert status == 2
    assert "'other'" in err


# check


def test_check_of_good_tokens_ends_with_0(run):
    status, out, err = run("check", "--vocab-size", 50_257, "train.safetensors")
    assert (status, err) == (0, "")
    assert out.endswith("nothing wrong found\n")
    assert "id 50256, " in out


def test_check_of_wrong_tokens_ends_with_1(run):
    status, out, _ = run("check", "--vocab-size", 1000, "train.safetensors")
    assert status == 1
    assert "WRONG: " in out
    assert "nothing wrong" not in out


def test_check_against_others(run):
    status, out, _ = run("check", "train.npy", "--against", "train.safetensors")
    assert status == 1
    assert "that the other tokens have too" in " ".join(out.split())


@pytest.mark.parametrize(
    ("ids", "label", "where"),
    [
        ([5, 6, END], "end of text", "after each document: segment_documents(eos_id=50256)"),
        ([END, 5, 6], "begin of text", "before each document: segment_documents(bos_id=50256)"),
        ([5, END, 6], "end of text", "after each document or before it: the files do not tell"),
    ],
)
def test_check_tells_on_which_side_of_documents_their_id_stands(run, ids, label, where):
    np.save("a.npy", np.array(ids * 9, np.uint16))
    _, out, _ = run("check", "a.npy")
    assert f"{label} id 50256, 9 times, one in 3.0 tokens {where} documents" in " ".join(out.split())


@pytest.mark.parametrize("command", [["check"], ["replay", "--step", 0, "state.json"]])
def test_one_of_eos_id_and_bos_id_is_enough(run, command):
    status, _, err = run(*command, "train.npy", "--eos-id", 3, "--bos-id", 4)
    assert status == 2
    assert "--eos-id 3 and --bos-id 4 were given; expected one of the two, for the id after each" in err


def test_check_names_the_file_of_a_directory_that_is_of_another_dtype(run, folder):
    (folder / "shards").mkdir()
    for i, dtype in enumerate(["int32", "int64", *["int32"] * 20]):
        np.load("train.npy").astype(dtype).tofile(folder / f"shards/{i}.bin")
    status, out, _ = run("check", "shards", "--dtype", "int32", "--json")
    assert status == 1
    found = next(problem for problem in json.loads(out)["problems"] if "int64" in problem)
    assert found.startswith(
        "shards/1.bin: every second token is below 4: these look like int64 tokens read as"
    )
    assert found.endswith("(1 of 22 files look wrong)")


def test_check_in_json(run):
    status, out, _ = run("check", "--json", "--vocab-size", 1000, "train.npy")
    report = json.loads(out)
    assert status == 1
    assert report["eos_id"] == END
    assert report["num_out_of_vocab"] > 0
    assert len(report["problems"]) == 1


def test_check_compares_all_tokens_of_two_copies_by_their_fingerprint(run):
    ids = np.load("train.npy")
    np.save("zeroed.npy", np.concatenate([ids[:1000], 0 * ids[1000:1100], ids[1100:]]))
    opened = [tl.open_tokens(name) for name in ("train.npy", "zeroed.npy")]
    assert opened[0].fingerprint() == opened[1].fingerprint()  # a sample of each
    status, right, err = run("check", "--fingerprint", "train.safetensors")
    assert (status, err) == (0, "")
    expect = ("--expect-fingerprint", right.strip())
    assert run("check", "train.npy", *expect) == (0, right, "")
    status, out, _ = run("check", "zeroed.npy", *expect)
    wrong = run("check", "zeroed.npy", "--fingerprint")[1].strip()
    assert status == 1
    told = f"these are not the tokens of {right.strip()}"
    assert out == f"{wrong}\nWRONG: {told}\n"
    status, out, _ = run("check", "zeroed.npy", *expect, "--json")
    assert (status, json.loads(out)) == (1, {"fingerprint": wrong, "problems": [told]})


def test_check_refuses_what_is_no_fingerprint_of_all_tokens(run):
    sampled = tl.open_tokens("train.npy").fingerprint()
    status, _, err = run("check", "train.npy", "--expect-fingerprint", sampled)
    assert status == 2
    assert f"--expect-fingerprint is '{sampled}'; expected what check --fingerprint prints" in err
    status, _, err = run("check", "train.npy", "--fingerprint", "--vocab-size", 50_257)
    assert status == 2
    assert "with --fingerprint tokens are hashed and not checked; give --vocab-size" in err


def test_the_histogram_is_drawn_in_what_the_terminal_can_show(folder):
    bars = {}
    for encoding in ("utf-8", "ascii"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        bars[encoding] = run_cli("check", "train.npy", env=environment, encoding="utf-8").stdout
    assert "█" in bars["utf-8"]
    assert "####" in bars["ascii"]


def test_one_of_anything_is_said_in_the_singular(run):
    np.save("a.npy", np.array([5, 50256] * 3 + [6, 7, 50256], np.uint16))
    _, out, _ = run("check", "a.npy")
    assert "2 documents that repeat an earlier one, 2 tokens" in out
    assert "1 token 3 times, first at token 0" in out
    np.save("b.npy", np.array([5, 50256], np.uint16))
    _, out, _ = run("check", "b.npy", "--against", "a.npy")
    assert "1 document that the other tokens have too, 1 token\n" in out
    assert "id 50256, 1 time, one in 2.0 tokens" in out


# convert


def test_convert_says_what_it_wrote(run):
    status, out, _ = run("convert", "--source-dtype", "uint16", "train.bin", "out.safetensors")
    num_tokens = len(tl.open_tokens("train.npy"))
    assert status == 0
    assert out.startswith(f"out.safetensors: {num_tokens:,} tokens, ")
    assert out.endswith(", safetensors\n")
    np.testing.assert_array_equal(tl.open_tokens("out.safetensors")[:], np.load("train.npy"))


def test_convert_widens_and_joins(run):
    run("convert", "--dtype", "uint32", "--to", "llm.c", "train.npy", "train.npy", "out.bin")
    found = tl.open_tokens("out.bin")
    assert found.dtype == np.uint32
    assert len(found) == 2 * len(np.load("train.npy"))


def test_convert_needs_force_to_replace(run):
    status, _, err = run("convert", "train.safetensors", "train.npy")
    assert (status, "train.npy exists" in err) == (2, True)
    assert run("convert", "--force", "train.safetensors", "train.npy")[0] == 0


def test_convert_of_a_suffix_that_says_nothing_asks(run):
    status, _, err = run("convert", "train.npy", "out.bin")
    assert status == 2
    assert "say which to write: --to safetensors, npy, llm.c, raw" in err


# tokenize


def test_tokenize_makes_a_file_that_check_accepts(run):
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<|endoftext|>"])
    library.save("tokenizer.json")
    with open("a.txt", "w") as file:
        file.write("hello\n<|endoftext|>\nworld!")
    arguments = ("tokenize", "a.txt", "--tokenizer", "tokenizer.json", "--out", "out.safetensors")
    status, out, _ = run(*arguments)
    assert status == 0
    assert "documents       2 (11 bytes of text)" in out
    assert "tokens          13 uint16, 1.00 bytes of text each" in out
    assert "end of text     id 256, after each document" in out
    assert run("check", "--eos-id", 256, "--vocab-size", 257, "out.safetensors")[0] == 0
    assert "out.safetensors exists" in run(*arguments)[2]
    status, out, _ = run(*arguments, "--force", "--json")
    assert json.loads(out)["num_documents"] == 2


def test_tokenize_without_a_thread_is_told_and_leaves_nothing(run, folder, monkeypatch):
    from tokenizers import Tokenizer, models

    def fail(_):
        raise RuntimeError("can't start new thread")

    Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, "a")).save("tokenizer.json")
    (folder / "a.txt").write_text("a")
    before = sorted(os.listdir())
    monkeypatch.setattr(threading.Thread, "start", fail)
    status, _, err = run("tokenize", "a.txt", "--tokenizer", "tokenizer.json", "--out", "out.safetensors")
    assert (status, err) == (2, "tokenloader: can't start new thread\n")
    assert sorted(os.listdir()) == before


def test_tokenize_does_not_write_over_what_it_reads(run, folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "a.txt").write_text("text")
    for out in ("a.txt", "tokenizer.json"):
        status, _, err = run("tokenize", "a.txt", "--tokenizer", "tokenizer.json", "--out", out, "--force")
        assert status == 2
        assert f"{out} is the file that is read" in err


# bench


def test_bench_tells_cold_and_warm(run):
    shape = ("--batch-size", 2, "--seq-len", 64, "--seconds", 0.1)
    status, out, _ = run("bench", "train.npy", *shape)
    assert status == 0
    assert "batches         2 x 64 tokens, random windows, on " in out
    assert "\nShuffledBlocks  not measured: " in out  # the file is too small
    measured = 1 if "cold            not measured: " in out else 2
    assert out.count("million tokens/s (") == out.count("limited by ") == measured
    found = json.loads(run("bench", "train.npy", "--json", *shape)[1])
    assert (found["cold"] is None) == (found["why_not_cold"] is not None)
    assert found["warm"]["tokens_per_second"] > 0


def test_the_bench_screen_says_why_there_is_no_cold_speed():
    speed = Speed(2_500_000, 1, 0.5, 0.4, 0.3, 0.2, "the disk")
    both = bench_screen(Bench("cpu:0", 2, 64, speed, None, speed, None, "too small", None)).splitlines()
    assert both[1:3] == [
        "cold            2.5 million tokens/s (1 batch in 0.5 s)",
        "                limited by the disk",
    ]
    assert both[3].startswith("warm            2.5 million")
    assert both[5:] == ["ShuffledBlocks  not measured: too small"]
    warm = bench_screen(Bench("cpu:0", 2, 64, None, "it is so", speed, None, "it is so", None))
    assert "cold            not measured: it is so\nwarm " in warm


@pytest.mark.parametrize(
    ("rate", "told"),
    [(45.4, "18 times"), (4.51, "1.8 times"), (2.6, "no gain: 1.0 times"), (1.25, "no gain: 0.5 times")],
)
def test_the_bench_screen_says_what_shuffled_blocks_would_gain(rate, told):
    cold = Speed(2_500_000, 1, 0.5, 0.4, 0.3, 0.2, "the disk")
    speed = Speed(rate * 1e6, 7, 2.0, 0.4, 0.3, 0.2, "memory")
    screen = bench_screen(Bench("cpu:0", 2, 64, cold, None, cold, speed, None, 4.21)).splitlines()
    assert screen[5:] == [
        f"ShuffledBlocks  {rate:.1f} million tokens/s cold, {told} random windows",
        "                (7 batches in 2.0 s, after 4.2 s for its first blocks)",
        "                limited by memory",
    ]


@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_a_bench_without_an_end_is_refused(run, seconds):
    status, _, err = run("bench", "train.npy", "--seconds", seconds)
    assert status == 2
    assert f"Invalid value for '--seconds': {seconds} never ends; expected a number of seconds" in err


# replay


@pytest.fixture
def saved(folder):
    tokens = tl.open_tokens("train.safetensors")
    loader = tl.TokenLoader(tokens, 4, 600, plan=tl.ShuffledEpochs(seed=3))
    next(loader)
    (folder / "state.json").write_text(json.dumps(loader.get_state()))
    yield loader
    loader.close()


def test_replay_shows_the_windows_of_a_step(run, saved):
    status, out, _ = run("replay", "state.json", "train.safetensors", "--step", 7)
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "step 7: 4 windows"
    starts = saved.window_starts(7).tolist()
    assert [line.split() for line in lines[3:]] == [
        [str(28 + i), f"{start:,}"] for i, start in enumerate(starts)
    ]


def test_replay_in_json_has_documents_and_text(run, saved):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(END + 1)}, "w0")).save("tokenizer.json")
    arguments = ("replay", "state.json", "train.safetensors", "--step", 0, "--eos-id", END)
    status, out, _ = run(*arguments, "--tokenizer", "tokenizer.json", "--json")
    found = json.loads(out)
    assert (status, found["step"]) == (0, 0)
    for row, start, ids in zip(found["rows"], saved.window_starts(0), saved.window_tokens(0), strict=True):
        assert row["start"] == start
        assert row["documents"][0][0] == start
        assert row["documents"][-1][1] == start + 601
        assert len(row["documents"]) in (2, 3)
        assert row["text"] == " ".join(f"w{id}" for id in ids)
    _, out, _ = run(*arguments, "--tokenizer", "tokenizer.json")
    begun = json.loads(run(*arguments[:-2], "--bos-id", END, "--json")[1])
    for row, other in zip(found["rows"], begun["rows"], strict=True):
        inner = [end - 1 for _, end in row["documents"] if end < row["start"] + 601]
        assert [begin for begin, _ in other["documents"][1:]] == inner
    text = found["rows"][0]["text"]
    assert out.splitlines()[3].split()[3] == text.split()[0]
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_state_that_is_nested_too_deeply_is_told_with_its_name(run, folder, text):
    (folder / "deep.json").write_text(text)
    status, _, err = run("replay", "deep.json", "train.npy", "--step", 0)
    assert status == 2
    assert err.startswith("tokenloader: deep.json: not JSON (maximum recursion depth exceeded")


def test_a_state_may_begin_with_a_byte_order_mark(run, saved, folder):
    state = folder / "state.json"
    state.write_text(state.read_text(), encoding="utf-8-sig")
    assert run("replay", "state.json", "train.safetensors", "--step", 7)[0] == 0


def test_a_small_state_that_asks_for_gigabytes_is_refused(run, saved, folder):
    state = json.loads((folder / "state.json").read_text())
    (folder / "huge.json").write_text(json.dumps(state | {"batch_sizes": f"0:0:4 1:4:{2**30}"}))
    status, _, err = run("replay", "huge.json", "train.safetensors", "--step", 1)
    assert status == 2
    assert "1,073,741,824 windows" in err


def test_text_of_a_replay_does_nothing_to_the_terminal(run, saved):
    from tokenizers import Tokenizer, models

    vocabulary = {f"\x1b[2J\x07\x9b{i}": i for i in range(END + 1)}
    Tokenizer(models.WordLevel(vocabulary, "\x1b[2J\x070")).save("tokenizer.json")
    arguments = ("replay", "state.json", "train.safetensors", "--step", 0, "--tokenizer", "tokenizer.json")
    for out in (run(*arguments)[1], run(*arguments, "--json")[1]):
        assert all(c.isprintable() or c == "\n" for c in out)
    assert r"\x1b[2J\x07\x9b" in run(*arguments)[1]


def test_a_state_with_values_that_a_terminal_obeys_is_told_without_them(run, saved, folder):
    state = json.loads((folder / "state.json").read_text())
    for field in [*state, "\x1b[2J"]:
        (folder / "bad.json").write_text(json.dumps(state | {field: "\x1b[2J\x07" * 10}))
        status, _, err = run("replay", "bad.json", "train.safetensors", "--step", 0)
        assert status == 2
        assert all(c.isprintable() or c == "\n" for c in err)
        assert r"\x1b[2J" in err


def test_replay_of_what_is_no_state_or_of_other_tokens_is_told(run, saved, folder):
    (folder / "bad.json").write_text("{")
    status, _, err = run("replay", "bad.json", "train.npy", "--step", 0)
    assert (status, "bad.json: not JSON (Expecting property name" in err) == (2, True)
    np.save("other.npy", np.arange(5000, dtype=np.uint16))
    status, _, err = run("replay", "state.json", "other.npy", "--step", 0)
    assert (status, "is not what this state was saved with" in err) == (2, True)
