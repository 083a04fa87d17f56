"""What a directory, a pattern or an index stands for: which files, in which order, and what is refused."""

import json
import os
import random
import re
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from tokenloader import open_tokens
from tokenloader.formats.shards import locate_shards


def write(path, *tokens, dtype="uint16"):
    """One token file; the format by the suffix."""
    tokens = np.array(tokens or [0], dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, tokens)
    elif path.suffix == ".bin":
        header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
        path.write_bytes(header + tokens.tobytes())
    elif path.suffix == ".safetensors":
        save_file({"tokens": tokens}, path)
    else:
        path.write_bytes(tokens.tobytes())
    return path


def names(source, dtype=None):
    return [extent.path.name for extent in locate_shards(source, key="tokens", dtype=dtype)]


def fails(source, *named, error=ValueError, **arguments):
    with pytest.raises(error) as raised:
        open_tokens(source, **arguments)
    for part in named:
        assert part in str(raised.value)
    return str(raised.value)


# Order


NATURAL = [
    "shard_2.npy",
    "shard_10.npy",
    "shard_10a.npy",
    "shard_10a3.npy",
    "shard_10a20.npy",
    "x.npy",
]


@pytest.mark.parametrize("source", ["", "*", "*.npy"])
def test_shards_are_in_natural_order(tmp_path, source):
    for name in random.Random(0).sample(NATURAL, len(NATURAL)):
        write(tmp_path / name, NATURAL.index(name))
    assert names(tmp_path / source) == NATURAL
    assert open_tokens(tmp_path / source)[:].tolist() == list(range(6))


def test_numbers_of_any_length_and_script_are_ordered(tmp_path):
    in_order = [
        "1.npy",
        "01.npy",
        "001.npy",
        "2.npy",
        "99999999999999999999.npy",
        "٣.npy",
        "²a.npy",
    ]
    for name in in_order:
        write(tmp_path / name)
    found = names(tmp_path)
    assert [n for n in found if n[0] in "019"] == ["001.npy", "01.npy", "1.npy", "9" * 20 + ".npy"]
    assert sorted(found) == sorted(in_order)
    assert found.index("2.npy") == 3


def test_directories_count_in_the_order_too(tmp_path):
    for name in ("part10/a.npy", "part2/b.npy", "part2/a.npy", "c.npy"):
        write(tmp_path / name)
    found = locate_shards(tmp_path / "**/*.npy", key="tokens", dtype=None)
    assert [str(extent.path.relative_to(tmp_path)) for extent in found] == [
        "c.npy",
        "part2/a.npy",
        "part2/b.npy",
        "part10/a.npy",
    ]


# Directories


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".bin"])
def test_of_a_directory_side_files_hidden_files_and_directories_are_left_out(tmp_path, suffix):
    write(tmp_path / f"a_1{suffix}", 1, 2)
    write(tmp_path / f"a_2{suffix}", 3)
    for name in (
        "README",
        "README.md",
        "meta.pkl",
        "a.json",
        "prepare.py",
        f".a_3{suffix}",
        "a.txt",
    ):
        (tmp_path / name).write_bytes(b"something else")
    (tmp_path / f"deeper{suffix}").mkdir()
    write(tmp_path / "deeper" / f"a_4{suffix}", 4)
    assert open_tokens(tmp_path)[:].tolist() == [1, 2, 3]


def test_a_directory_of_headerless_files_needs_their_dtype(tmp_path):
    for name, value in (("train_0.ds", 7), ("train_1.ds", 8)):
        write(tmp_path / name, value)
    assert open_tokens(tmp_path, dtype="uint16")[:].tolist() == [7, 8]
    fails(tmp_path, str(tmp_path / "train_0.ds"), "of no known format", 'dtype="uint16"')


def test_a_directory_of_indexed_files_is_one_axis_with_documents(tmp_path):
    for i in (9, 10):
        write(tmp_path / f"{i}.ds", *range(i))
        (tmp_path / f"{i}.ds.index").write_bytes(struct.pack("<2Q", 4, i))
        (tmp_path / f"{i}.ds.metadata").write_text(f"gpt2|2\n{i}\n{i}.0 T")
    for source in (tmp_path, tmp_path / "*", tmp_path / "*.ds"):
        with open_tokens(source) as tokens:
            assert len(tokens) == 19
            assert tokens.documents.tolist() == [0, 4, 9, 13, 19]


def test_a_directory_without_token_files_is_refused_with_what_is_in_it(tmp_path):
    fails(tmp_path, f"{tmp_path}: no file in this directory", "there are: none", error=OSError)
    for name in ("b.parquet", "a.txt"):
        (tmp_path / name).write_bytes(b"x")
    fails(
        tmp_path,
        "is named .safetensors, .npy, .bin or .ds; there are: a.txt, b.parquet. ",
        f"open_tokens('{tmp_path}/*')",
        error=FileNotFoundError,
    )
    write(tmp_path / "deeper/part.npy", 5)
    fails(tmp_path, f"open_tokens('{tmp_path}/**/*')", error=FileNotFoundError)
    assert open_tokens(tmp_path / "**/*.npy")[:].tolist() == [5]


def test_a_mixture_of_formats_is_refused_with_what_was_seen_and_calls_that_open_it(tmp_path):
    write(tmp_path / "b_1.npy", 1)
    write(tmp_path / "b_2.npy", 2)
    write(tmp_path / "a_1.safetensors", 3)
    message = fails(
        tmp_path,
        f"{tmp_path}: has files of several formats (safetensors: a_1.safetensors; "
        f"NumPy .npy: b_1.npy and 1 more)",
    )
    calls = re.findall(r"open_tokens\('([^']*)'\)", message)
    assert calls == [str(tmp_path / "a_*.safetensors"), str(tmp_path / "b_*.npy")]
    assert [open_tokens(call)[:].tolist() for call in calls] == [[3], [1, 2]]
    fails(tmp_path / "*_*", f"{tmp_path}/*_*: has files of several formats")


def test_a_file_of_unknown_format_among_others_is_named(tmp_path):
    write(tmp_path / "a.npy", 1)
    (tmp_path / "b.npy").write_bytes(b"\1\2\3\4")
    fails(tmp_path, "NumPy .npy: a.npy", "unknown or headerless: b.npy")


def test_an_empty_or_damaged_shard_is_refused_and_not_left_out(tmp_path):
    write(tmp_path / "a.npy", 1)
    (tmp_path / "b.npy").write_bytes(b"")
    fails(tmp_path, f"{tmp_path / 'b.npy'}: the file is empty")
    (tmp_path / "b.npy").unlink()
    (tmp_path / "b.npy").symlink_to(tmp_path / "gone.npy")
    fails(tmp_path, f"{tmp_path / 'b.npy'}: no such file", error=FileNotFoundError)


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
        ("train.safetensors", "validation.safetensors"),
        ("train-00000-of-00001.npy", "test-00000-of-00001.npy"),
        ("Train.npy", "VAL.npy"),
        ("train/0.npy", "valid/0.npy"),
        ("0.npy", "eval/0.npy"),
        ("books1.npy", "dev2.npy"),
    ],
)
def test_training_and_held_out_files_are_never_joined(tmp_path, train, held_out):
    write(tmp_path / train, 1)
    write(tmp_path / held_out, 2)
    source = tmp_path / ("**/*.*" if "/" in train + held_out else "")
    message = fails(
        source,
        f"{source}: has held-out files among others, by their names (others: {os.path.basename(train)}; "
        f"held out for evaluation: {os.path.basename(held_out)})",
    )
    calls = re.findall(r"open_tokens\('([^']*)'\)", message)
    assert [open_tokens(call)[:].tolist() for call in calls] == [[1], [2]]
    assert open_tokens([tmp_path / train, tmp_path / held_out])[:].tolist() == [1, 2]  # said so


def test_the_calls_for_headerless_files_have_their_dtype(tmp_path):
    for name in ("train.bin", "val.bin"):  # as nanoGPT writes
        (tmp_path / name).write_bytes(bytes(10))
    message = fails(tmp_path, "held out", dtype=np.uint16)
    assert message.endswith(
        f"open_tokens('{tmp_path}/train.bin', dtype='uint16') or "
        f"open_tokens('{tmp_path}/val.bin', dtype='uint16')"
    )
    fails(tmp_path, "dtype='nonsense' is not a dtype", dtype="nonsense")


def test_a_relative_pattern_of_any_depth_is_opened(tmp_path, monkeypatch):
    write(tmp_path / "a.npy", 1)
    write(tmp_path / "deeper/b.npy", 2)
    monkeypatch.chdir(tmp_path)
    assert open_tokens("**/*.npy")[:].tolist() == [1, 2]
    assert open_tokens("**")[:].tolist() == [1, 2]
    assert open_tokens(".")[:].tolist() == [1]


def test_a_directory_of_held_out_files_alone_is_opened(tmp_path):
    for i in range(3):
        write(tmp_path / f"training/data/val_{i}.npy", i)
        write(tmp_path / f"evaluation/devices_{i}.npy", i)
    assert len(open_tokens(tmp_path / "training/data")) == 3
    assert len(open_tokens(tmp_path / "evaluation")) == 3  # no word of it is "dev"


def test_a_numbered_set_with_files_missing_is_refused_with_their_names(tmp_path):
    for i in (1, 2, 4):
        write(tmp_path / f"train-0000{i}-of-00004.safetensors", i)
    fails(
        tmp_path,
        f"{tmp_path}: has 3 of the 4 files train-*-of-*.safetensors; is the download complete? Missing: "
        f"train-00003-of-00004.safetensors. To open what there is, name each of its files",
        error=FileNotFoundError,
    )
    write(tmp_path / "train-00003-of-00004.safetensors", 3)
    assert open_tokens(tmp_path)[:].tolist() == [1, 2, 3, 4]


def test_a_pattern_that_takes_part_of_a_set_is_refused_unless_the_other_files_are_there(tmp_path):
    for i in (1, 2, 4):
        write(tmp_path / f"train-0000{i}-of-00004.npy", i)
    found = f"{tmp_path}/*.npy: {tmp_path} has 3 of the 4 files train-*-of-*.npy; "
    fails(tmp_path / "*.npy", found, "Missing: train-00003-of-00004.npy. ", error=FileNotFoundError)
    fails(tmp_path / "*[12]-of-*.npy", "Missing: train-00003-of-00004.npy. ", error=FileNotFoundError)
    assert len(open_tokens(sorted(tmp_path.glob("train-*.npy")))) == 3
    (tmp_path / "train-00003-of-00004.npy").mkdir()
    fails(tmp_path / "*.npy", found, error=FileNotFoundError)
    (tmp_path / "train-00003-of-00004.npy").rmdir()
    write(tmp_path / "train-00003-of-00004.npy", 3)
    assert open_tokens(tmp_path / "*[12]-of-*.npy")[:].tolist() == [1, 2]  # left out on purpose


def test_a_set_that_is_there_twice_is_refused_in_a_directory(tmp_path):
    for name in ("a-1-of-2.npy", "a-00001-of-2.npy", "a-2-of-2.npy"):
        write(tmp_path / name)
    fails(tmp_path, f"{tmp_path}: has a file of a-*-of-*.npy twice: ", "a-00001-of-2.npy", "a-1-of-2.npy")


def test_shards_of_different_dtypes_are_refused_and_named(tmp_path):
    write(tmp_path / "a.npy", 1)
    write(tmp_path / "b.npy", 1, dtype="uint32")
    fails(tmp_path, f"{tmp_path / 'b.npy'} holds uint32 tokens and {tmp_path / 'a.npy'} uint16")


# Patterns


def test_a_pattern_leaves_out_hidden_files_directories_and_indexes(tmp_path):
    for i in range(3):
        write(tmp_path / f"train_{i}.bin", i)
        (tmp_path / f"train_{i}.idx").write_bytes(b"not looked at")
    write(tmp_path / ".train_3.bin", 3)
    (tmp_path / "train_4.bin").mkdir()
    (tmp_path / "README").write_text("words")
    for pattern in ("*", "train_*", "train_?.bin", "train_[0-9].*"):
        assert open_tokens(tmp_path / pattern)[:].tolist() == [0, 1, 2]
        assert open_tokens(str(tmp_path / pattern))[:].tolist() == [0, 1, 2]


def test_a_pattern_of_indexes_alone_stands_for_their_data(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i, 0, i, 0]))
        header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
        (tmp_path / f"{i}.idx").write_bytes(header + struct.pack("<iqqq", 2, 0, 0, 1))
    for pattern in ("*.idx", "*.bin", "*"):
        with open_tokens(tmp_path / pattern) as tokens:
            assert tokens[:].tolist() == [0, 0, 1, 1]
            assert tokens.documents.tolist() == [0, 2, 4]


def test_a_relative_pattern_is_looked_for_from_here(tmp_path, monkeypatch):
    write(tmp_path / "data/a.npy", 5)
    monkeypatch.chdir(tmp_path)
    for pattern in ("data/*", "d*/a.npy", "**/a.npy", "./data/[a].npy"):
        assert open_tokens(pattern)[:].tolist() == [5]
    fails("data/*.bin", f"data/*.bin: matches no file (looked from {tmp_path})", error=OSError)


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    pattern = tmp_path / "fineweb_train_*.bin"
    fails(pattern, f"{pattern}: matches no file", error=FileNotFoundError)
    (tmp_path / "fineweb_train_1.bin").mkdir()
    fails(
        pattern,
        f"matches no file but 1 directories, such as {tmp_path / 'fineweb_train_1.bin'}",
        "let it end in /*",
        error=FileNotFoundError,
    )


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path):
    write(tmp_path / "[ab]*?.npy", 1)
    write(tmp_path / "ab.npy", 2)
    (tmp_path / "folder[1]").mkdir()
    write(tmp_path / "folder[1]/part_1.npy", 3)
    assert open_tokens(tmp_path / "[ab]*?.npy")[:].tolist() == [1]
    assert open_tokens(tmp_path / "folder[1]")[:].tolist() == [3]
    write(tmp_path / "folder[1]/val_1.npy", 4)
    message = fails(tmp_path / "folder[1]", "held out")
    calls = re.findall(r"open_tokens\('([^']*)'\)", message)
    assert [open_tokens(call)[:].tolist() for call in calls] == [[3], [4]]


# Links


def test_a_file_that_is_reached_through_linked_directories_is_held_once(tmp_path):
    write(tmp_path / "data/a/1.npy", 1)
    write(tmp_path / "data/2.npy", 2)
    (tmp_path / "data/again").symlink_to("a")
    (tmp_path / "data/a/up").symlink_to("..")
    (tmp_path / "data/a/self").symlink_to(".")
    (tmp_path / "data/a/above").symlink_to(tmp_path)
    for pattern in ("**/*.npy", "**", "**/**/*.npy", "**/[12].npy", "**/a/**/1.npy"):
        found = [1] if "/a/" in pattern else [2, 1]
        assert sorted(open_tokens(tmp_path / "data" / pattern)[:].tolist()) == sorted(found)
    (tmp_path / "data/loop").symlink_to("loop")
    assert names(tmp_path / "data/**/*.npy") == ["2.npy", "1.npy"]
    (extent,) = locate_shards(tmp_path / "data/*/1.npy", key="tokens", dtype=None)
    assert extent.path == tmp_path / "data/a/1.npy"


def test_a_directory_elsewhere_is_entered_through_one_link_to_it(tmp_path):
    write(tmp_path / "disk/part/1.npy", 1)
    (tmp_path / "disk/part/back").symlink_to(tmp_path / "disk")
    (tmp_path / "data").mkdir()
    for name in ("x", "y"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "disk/part")
    assert open_tokens(tmp_path / "data/**/*.npy")[:].tolist() == [1]
    (tmp_path / "all").symlink_to(tmp_path / "data")
    assert open_tokens(tmp_path / "all/**/*.npy")[:].tolist() == [1]


@pytest.mark.parametrize("source", ["", "*", "**/*.npy"])
def test_a_link_to_a_file_that_is_there_itself_is_left_out(tmp_path, source):
    write(tmp_path / "shard_1.npy", 1)
    write(tmp_path / "shard_2.npy", 2)
    (tmp_path / "a_latest.npy").symlink_to("shard_2.npy")
    assert names(tmp_path / source) == ["shard_1.npy", "shard_2.npy"]


@pytest.mark.parametrize("source", ["", "*", "**/*.npy"])
def test_links_into_the_cache_of_the_hub_are_opened_also_those_of_equal_contents(tmp_path, source):
    write(tmp_path / "blobs/0a", 7).rename(tmp_path / "blobs/0b")
    np.save(tmp_path / "blobs/x.npy", np.array([8], np.uint16))
    (tmp_path / "snapshots/main").mkdir(parents=True)
    for i in range(2):
        (tmp_path / f"snapshots/main/part-0000{i}-of-00002.npy").symlink_to("../../blobs/x.npy")
    assert open_tokens(tmp_path / "snapshots/main" / source)[:].tolist() == [8, 8]
    (tmp_path / "snapshots/other").symlink_to("main")
    assert open_tokens(tmp_path / "snapshots/**/*.npy")[:].tolist() == [8, 8]


# Indexes of safetensors


def write_index(folder, weight_map, name="model.safetensors.index.json"):
    path = folder / name
    text = json.dumps({"metadata": {"total_size": 10}, "weight_map": weight_map}, indent=2)
    path.write_text(text)
    return path


def test_an_index_leads_to_the_one_file_that_has_the_tensor(tmp_path):
    for i, key in ((1, "ids"), (2, "tokens"), (3, "weights")):
        save_file({key: np.array([i], np.uint16)}, tmp_path / f"m-0000{i}-of-00003.safetensors")
    weight_map = {"ids": 1, "tokens": 2, "weights": 3}
    index = write_index(tmp_path, {key: f"m-0000{i}-of-00003.safetensors" for key, i in weight_map.items()})
    for key, value in weight_map.items():
        assert open_tokens(index, key=key)[:].tolist() == [value]


@pytest.mark.parametrize("first", [0, 1])
def test_an_index_leads_to_all_shards_that_have_the_tensor_in_natural_order(tmp_path, first):
    # A tensor has one file in the index: of a tensor that every shard has, the last.
    files = [f"train-{i}-of-12.safetensors" for i in range(first, first + 12)]
    for i, file in enumerate(files):
        write(tmp_path / file, i)
    write(tmp_path / "other.safetensors", 99)
    index = write_index(tmp_path, {"tokens": files[-1]})
    assert open_tokens(index)[:].tolist() == list(range(12))
    (tmp_path / files[5]).unlink()
    missing = (
        f"has 11 of the 12 files train-*-of-*.safetensors; is the download complete? Missing: {files[5]}"
    )
    fails(index, missing, error=FileNotFoundError)


def test_an_index_is_known_by_its_contents(tmp_path):
    write(tmp_path / "a", 1)
    save_file({"tokens": np.array([8], np.uint16)}, tmp_path / "data")
    index = write_index(tmp_path, {"tokens": "data"}, "anything")
    assert open_tokens(index)[:].tolist() == [8]


@pytest.mark.parametrize(
    "text",
    ["{}", '{"weight_map": 5}', '{"weight_map": {"tokens": 5}}', "{not json", '{"a":' * 9999],
)
def test_json_that_is_no_index_is_of_no_known_format(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    fails(path, f"{path}: is of no known format", "begins with 7b")
    assert len(open_tokens(path, dtype="uint8")) == len(text)


def test_what_an_index_does_not_lead_to_is_an_error(tmp_path):
    index = write_index(tmp_path, {f"layer{i}": "gone.safetensors" for i in range(12)})
    fails(
        index,
        f"{index}: the index has no tensor 'tokens'; there are: layer0, layer1",
        "layer9 and 2 more. Pass key=",
    )
    fails(
        index,
        f"{tmp_path / 'gone.safetensors'}: no such file",
        "model.safetensors.index.json says that the tensor 'layer3' is in it",
        key="layer3",
        error=FileNotFoundError,
    )
    write(tmp_path / "gone.safetensors", 1)
    fails(index, "no tensor 'layer3'; there are: tokens (U16[1])", key="layer3")


@pytest.mark.parametrize("kind", ["absolute", "above", "link", "linked set"])
def test_an_index_that_leads_out_of_its_directory_is_refused(tmp_path, kind):
    outside = write(tmp_path / "secret-2-of-2.safetensors", 1)
    folder = tmp_path / "data"
    write(folder / "t-1-of-2.safetensors", 1)
    (folder / "t-2-of-2.safetensors").symlink_to(outside)
    named = {
        "absolute": str(outside),
        "above": "../secret-2-of-2.safetensors",
        "link": "t-2-of-2.safetensors",
        "linked set": "t-1-of-2.safetensors",
    }[kind]
    index = write_index(folder, {"tokens": named})
    led_to = folder / ("t-2-of-2.safetensors" if kind == "linked set" else named)
    expected = "outside of its directory; expected files beside the index"
    fails(index, f"{index}: leads to {led_to}, which is {outside}, {expected}")


def test_an_index_may_name_files_in_directories_below_it(tmp_path):
    write(tmp_path / "below/a.safetensors", 1)
    assert open_tokens(write_index(tmp_path, {"tokens": "below/a.safetensors"}))[:].tolist() == [1]
    assert open_tokens(write_index(tmp_path, {"tokens": "below/../below/a.safetensors"}))[:].tolist() == [1]


@pytest.mark.parametrize("below", ["", "data/more/"])
def test_an_index_in_a_snapshot_of_the_hub_leads_to_blobs_and_no_further(tmp_path, below):
    folder = tmp_path / "snapshots/0123" / below
    up = "../" * (2 + below.count("/"))
    write(tmp_path / "t.safetensors", 5)
    folder.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "t.safetensors").rename(tmp_path / "blobs/aa")
    write_index(tmp_path / "blobs", {"tokens": "t.safetensors"}, "bb")
    (folder / "t.safetensors").symlink_to(f"{up}blobs/aa")
    (folder / "model.safetensors.index.json").symlink_to(f"{up}blobs/bb")
    assert open_tokens(folder / "model.safetensors.index.json")[:].tolist() == [5]
    (folder / "t.safetensors").unlink()
    (folder / "t.safetensors").symlink_to(f"{up}blobs/../blobs.safetensors")
    write(tmp_path / "blobs.safetensors", 6)
    fails(folder / "model.safetensors.index.json", "outside of its directory")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 10_000, "\x1b[2J"])
def test_an_index_that_names_what_can_be_no_file_is_refused_in_a_short_line(tmp_path, name):
    index = write_index(tmp_path, {"tokens": name})
    message = fails(index, "no such file, and model.safetensors.index.json says", error=FileNotFoundError)
    assert len(message) < 1000
    assert message.isprintable()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_an_index_that_leads_to_a_pipe_or_a_directory_names_it(tmp_path):
    write(tmp_path / "t-1-of-2.safetensors", 1)
    os.mkfifo(tmp_path / "t-2-of-2.safetensors")
    for named in ("t-1-of-2.safetensors", "t-2-of-2.safetensors"):
        fails(
            write_index(tmp_path, {"tokens": named}),
            f"{tmp_path / 't-2-of-2.safetensors'}: is a pipe or a device",
        )
    (tmp_path / "t-2-of-2.safetensors").unlink()
    (tmp_path / "t-2-of-2.safetensors").mkdir()
    for named in ("t-1-of-2.safetensors", "t-2-of-2.safetensors", ""):
        index = write_index(tmp_path, {"tokens": named})
        where = tmp_path / "t-2-of-2.safetensors" if named else tmp_path
        fails(index, f"is a directory; expected a token file: '{where}'", error=IsADirectoryError)


def test_messages_are_printable_whatever_files_are_called(tmp_path):
    folder = tmp_path / "\x1b[2J\u202e\x9b"
    write(folder / "b\n.npy", 1)
    (folder / "a\x07.npy").write_bytes(b"?!")
    index = write_index(folder, {"x\x1b]52;c;AAAA\x07": "gone"}, "\x1b[2J.safetensors.index.json")
    for source in (
        folder,
        folder / "a\x07.npy",
        folder / "*.npy",
        folder / "gone\r.npy",
        index,
        folder / "\x1b*",
    ):
        with pytest.raises((ValueError, OSError)) as raised:
            open_tokens(source)
        assert str(raised.value).isprintable()
    write(folder / "a\x07.npy", 1, dtype="uint32")
    with pytest.raises(ValueError, match="holds uint16 tokens and ") as raised:
        open_tokens(folder)
    assert str(raised.value).isprintable()
    assert repr(open_tokens(folder / "b\n.npy")).isprintable()
    write(folder / "c\x07.ds", 1, 2)
    (folder / "c\x07.ds.index").write_bytes(struct.pack("<3Q", 2, 1, 2))
    with (
        open_tokens(folder / "c\x07.ds") as tokens,
        pytest.raises(ValueError, match="document 1") as raised,
    ):
        _ = tokens.documents
    assert str(raised.value).isprintable()


def test_a_thousand_shards_are_opened_without_reading_their_tokens(tmp_path):
    for i in range(1000):
        write(tmp_path / f"{i}.bin", i, i)
    with open_tokens(tmp_path) as tokens:
        assert tokens[::2].tolist() == list(range(1000))
