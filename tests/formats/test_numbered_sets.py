"""Numbered sets: which numbers make one complete, and what is said of others."""

from pathlib import Path

import pytest

from tokenloader.formats.numbered_sets import find_wrong_sets, set_name


def files(*numbers, count="00004", name="train-{}-of-{}.npy"):
    return [Path("data", name.format(f"{number:05}", count)) for number in numbers]


def said(there):
    return [str(error) for error in find_wrong_sets(there).values()]


@pytest.mark.parametrize(
    ("numbers", "count"),
    [
        ((1, 2, 3, 4), "4"),
        ((0, 1, 2, 3), "00004"),
        ((0, 1, 2, 3, 4), "4"),
        ((0,), "1"),
        ((1,), "1"),
        ((0, 1), "1"),
    ],
)
def test_sets_may_count_from_0_or_1_and_to_n_or_one_less(numbers, count):
    assert find_wrong_sets(files(*numbers, count=count)) == {}


@pytest.mark.parametrize(
    ("numbers", "missing", "expected"),
    [
        ((1, 2, 4), "00003", 4),
        ((0, 1, 3), "00002", 4),
        ((0, 1, 3, 4), "00002", 5),  # as many as there are of 4
        ((0, 4), "00001-of-00004.npy, train-00002-of-00004.npy, train-00003", 5),
        ((1, 2, 3), "00004", 4),
        ((4,), "00001-of-00004.npy, train-00002-of-00004.npy, train-00003", 4),
    ],
)
def test_files_that_are_missing_are_named(numbers, missing, expected):
    assert said(files(*numbers)) == [
        f"has {len(numbers)} of the {expected} files train-*-of-*.npy; is the download complete? Missing: "
        f"train-{missing}-of-00004.npy"
    ]


def test_a_shard_missing_from_the_twelve_of_pythia_is_named():
    numbers = [*range(5), *range(6, 12)]
    there = files(*numbers, count="00011", name="document-{}-of-{}.bin")
    assert "has 11 of the 12 files document-*-of-*.bin; " in said(there)[0]
    assert said(there)[0].endswith("Missing: document-00005-of-00011.bin")


def test_a_file_that_is_there_twice_or_past_the_end_is_named():
    twice = [*files(1, 2, 3, 4), Path("data/train-2-of-4.npy")]
    assert said(twice) == [
        "has a file of train-*-of-*.npy twice: train-00002-of-00004.npy, train-2-of-4.npy",
    ]
    assert said(files(1, 2, 3, 4, 7)) == [
        "has files of train-*-of-*.npy with numbers past 4: train-00007-of-00004.npy",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "{}-of-{}.bin",
        "a.{}-of-{}.bin",
        "v2-{}-of-{}",
        "shard_{}_of_{}.npy",
        "a.{}.of.{}.tar.npy",
        "-{}-of-{}.ds",
    ],
)
def test_names_of_many_styles_are_numbered(name):
    assert find_wrong_sets(files(1, 2, 3, 4, name=name)) == {}
    assert f"Missing: {name.format('00003', '00004')}" in said(files(1, 2, 4, name=name))[0]


@pytest.mark.parametrize(
    "name", ["top10of100.npy", "a-of-4.npy", "1-of-.npy", "train-1-of-4-extra.npy", "x.npy"]
)
def test_other_names_are_not_numbered(name):
    assert set_name(Path(name)) is None


def test_sets_of_different_names_directories_and_counts_are_different():
    there = [*files(1, 2, 3, 4), *files(0, 1, 2, 3, name="b-{}-of-{}.npy"), *files(1, 2, count="2")]
    there += [Path("other", file.name) for file in files(1, 2)]
    ((name, error),) = find_wrong_sets(there).items()
    assert name[0] == Path("other")
    assert isinstance(error, FileNotFoundError)


def test_a_name_that_promises_more_files_than_can_be_is_answered_at_once():
    (message,) = said([Path("a-1-of-999999999999999999999.npy")])
    assert "has 1 of the 999,999,999,999,999,999,999 files a-*-of-*.npy" in message
    assert message.endswith("a-11-of-999999999999999999999.npy, and 999,999,999,999,999,999,988 more")
