"""Views and splits: ranges of tokens that share the bytes, and nothing else."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_files import random_tokens, sharded, write_npy, write_raw

from tokenloader import TokenArray, open_tokens
from tokenloader.tokens.opening import join

TOKENS = random_tokens()


@pytest.fixture
def files(tmp_path):
    return sharded(tmp_path, TOKENS)[0]


# What a view holds


@given(st.integers(1, 1999), st.booleans())
def test_a_split_is_the_tokens_before_a_position_and_those_after(at, from_the_end):
    tokens = open_tokens(TOKENS)
    first, second = tokens.split(at - 2000 if from_the_end else at)
    assert type(first) is type(second) is TokenArray
    assert (len(first), len(second)) == (at, 2000 - at)
    np.testing.assert_array_equal(first[:], TOKENS[:at])
    np.testing.assert_array_equal(second[:], TOKENS[at:])


@given(st.integers(-2000, 1999), st.integers(-1999, 2000))
def test_a_view_is_the_slice_of_the_same_bounds(start, stop):
    expected = TOKENS[start:stop]
    if not len(expected):
        return
    view = open_tokens(TOKENS).view(start, stop)
    np.testing.assert_array_equal(view[:], expected)
    assert view[0] == expected[0]
    assert view[-1] == expected[-1]
    assert view.nbytes == expected.nbytes


def test_a_view_of_a_view_counts_from_the_view(files):
    tokens = open_tokens(files)
    inner = tokens.view(100, 1995).view(800, -5)
    np.testing.assert_array_equal(inner[:], TOKENS[900:1990])
    first, second = inner.split(-90)
    np.testing.assert_array_equal(first[:], TOKENS[900:1900])
    np.testing.assert_array_equal(second.gather([0, 80], 10), [TOKENS[1900:1910], TOKENS[1980:1990]])


def test_numbers_of_numpy_are_positions_too():
    tokens = open_tokens(TOKENS)
    first, _ = tokens.split(np.int64(7))
    np.testing.assert_array_equal(first[:], tokens.view(np.uint8(0), np.int32(7))[:])


def test_a_window_of_a_view_does_not_reach_beyond_it(files):
    view = open_tokens(files).view(100, 200)
    for starts, window in (([91], r"\[91, 101\)"), ([-1], r"\[-1, 9\)")):
        with pytest.raises(IndexError, match=f"window {window} does not lie within TokenArray"):
            view.gather(starts, 10)
    with pytest.raises(IndexError, match="token 100 of"):
        view[100]
    assert view[50:1000].shape == (50,)


@pytest.mark.parametrize("n", [0, 2000, -2000, 2001, -2001, 10**20])
def test_a_split_that_leaves_a_part_empty_is_refused_with_what_is_possible(n):
    tokens = open_tokens(TOKENS)
    message = (
        f"split({n}) leaves one of two parts of {tokens!r} empty; expected 1 to 1,999 tokens for the "
        f"first part, or the negative of those for the second"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tokens.split(n)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (5, 5), (7, 3), (0, 2001), (-2001, 5), (2000, 2000), (-3, -3)]
)
def test_a_view_that_is_empty_or_goes_beyond_the_tokens_is_refused(start, stop):
    tokens = open_tokens(TOKENS)
    message = (
        f"view({start}, {stop}) is empty or not within {tokens!r}; expected 0 <= start < stop <= 2,000, "
        f"where negative ones count from the end"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tokens.view(start, stop)


def test_one_token_cannot_be_split():
    with pytest.raises(ValueError, match=r"split\(1\) leaves one of two parts .* empty"):
        open_tokens(TOKENS[:1]).split(1)


@pytest.mark.parametrize("n", [0.5, "1", None])
def test_a_position_that_is_no_integer_is_a_type_error(n):
    tokens = open_tokens(TOKENS)
    for use in (lambda: tokens.split(n), lambda: tokens.view(n, 5), lambda: tokens.view(0, n)):
        with pytest.raises(TypeError):
            use()


def test_a_split_may_lie_past_32_bits(tmp_path):
    path, num_tokens = tmp_path / "sparse.bin", 2**33 + 1000
    with path.open("wb") as file:
        file.truncate(2 * num_tokens)
        file.seek(2 * (num_tokens - 400))
        file.write(TOKENS[:400].tobytes())
    with open_tokens(path, dtype="uint16") as tokens:
        first, second = tokens.split(-300)
        assert len(first) == num_tokens - 300
        np.testing.assert_array_equal(first[-100:], TOKENS[:100])
        np.testing.assert_array_equal(second[:], TOKENS[100:400])
        np.testing.assert_array_equal(second.gather([0, 290], 10), [TOKENS[100:110], TOKENS[390:400]])
        assert second.extents[0].offset_bytes == 2 * (num_tokens - 300)


# What a view says of itself


def test_a_repr_tells_the_range_and_its_size(files):
    tokens = open_tokens(files)
    view = tokens.view(1000, 1500)
    name = f"{files[0]} and 5 more[1_000:1_500]: 500 uint16 tokens, 1,000 bytes"
    assert repr(view) == f"TokenArray({name}, mmap)"
    assert "[1_100:1_110]: 10 uint16 tokens" in repr(view.view(100, 110))
    assert repr(tokens.view(0, 2000)) == repr(tokens)
    view.close()
    assert repr(view) == f"TokenArray({name}, closed)"


def test_the_fingerprint_of_a_view_is_that_of_its_tokens(files):
    tokens = open_tokens(files)
    tokens.fingerprint()
    for view in (*tokens.split(901), tokens.view(10, 1999), tokens.view(0, 2000)):
        assert view.fingerprint() == open_tokens(view[:]).fingerprint()
    assert tokens.view(0, 100).fingerprint() != tokens.view(1, 101).fingerprint()


def test_the_residency_is_of_the_tokens_in_the_range(tmp_path):
    path = write_npy(tmp_path / "a.npy", TOKENS)
    tokens = open_tokens([TOKENS, path])
    first, second = tokens.split(2000)
    assert [one.residency for one in (tokens, first, second)] == ["mmap", "ram", "mmap"]
    both = open_tokens([path, open_tokens(path)], residency="ram")
    assert [one.residency for one in (both, *both.split(2000))] == ["mmap", "ram", "mmap"]


def test_the_extents_are_the_bytes_of_the_files_that_hold_the_range(files):
    tokens = open_tokens(files)
    for view in (tokens, *tokens.split(1000), tokens.view(902, 903)):
        found = b"".join(
            extent.path.read_bytes()[extent.offset_bytes :][: extent.nbytes] for extent in view.extents
        )
        assert found == view[:].tobytes()
    assert [extent.path.name for extent in tokens.view(900, 1990).extents] == ["3", "4"]
    assert [extent.path.name for extent in tokens.extents] == list("012345")


def test_extents_are_told_of_files_in_ram_and_not_of_arrays(files):
    in_ram = open_tokens(files, residency="ram")
    in_ram.wait_until_loaded()
    assert in_ram.extents == open_tokens(files).extents
    assert open_tokens(TOKENS).extents == ()
    assert len(open_tokens([TOKENS, files[3], TOKENS]).extents) == 1


# Documents

ENDS = [0, 0, 3, 3, 10, 12, 12]  # as boundaries: 0, 0, 0, 3, 3, 10, 12, 12


@pytest.fixture
def documented(tmp_path):
    path = write_raw(tmp_path / "a.ds", TOKENS[:12])
    path.with_name("a.ds.index").write_bytes(np.array(ENDS, "<u8").tobytes())
    return path


@pytest.mark.parametrize(
    ("start", "stop", "documents"),
    [
        (0, 12, [0, 0, 0, 3, 3, 10, 12, 12]),
        (0, 2, [0, 0, 0, 2]),  # cut
        (2, 12, [0, 1, 1, 8, 10, 10]),
        (0, 3, [0, 0, 0, 3]),  # the empty document at 3 belongs to what follows
        (3, 12, [0, 0, 7, 9, 9]),
        (4, 6, [0, 2]),
        (10, 12, [0, 2, 2]),
        (11, 12, [0, 1, 1]),
    ],
)
def test_documents_of_a_view_are_clipped_to_it(documented, start, stop, documents):
    found = open_tokens(documented).view(start, stop).documents
    assert found.tolist() == documents
    assert found.dtype == np.int64
    assert not found.flags.writeable


@pytest.mark.parametrize("at", range(1, 12))
def test_a_document_that_a_split_cuts_is_two_and_no_other_is_lost(documented, at):
    tokens = open_tokens(documented)
    first, second = tokens.split(at)
    cuts = at not in ENDS
    num_documents = sum(len(one.documents) - 1 for one in (first, second))
    assert num_documents == len(ENDS) + cuts
    joined = open_tokens([first, second])
    assert joined.documents.tolist() == sorted([0, *ENDS, *[at] * cuts])
    np.testing.assert_array_equal(joined[:], TOKENS[:12])


def test_documents_of_a_view_over_files_with_and_without_an_index(documented, tmp_path):
    plain = write_npy(tmp_path / "plain.npy", TOKENS[:5])
    tokens = open_tokens([documented, plain, documented])
    assert tokens.documents is None
    assert tokens.view(3, 12).documents.tolist() == [0, 0, 7, 9, 9]
    assert tokens.view(3, 13).documents is None
    assert tokens.view(17, 20).documents.tolist() == [0, 0, 0, 3]


# Whose the bytes are


def test_a_view_copies_nothing():
    source = TOKENS.copy()
    view = open_tokens(source).view(100, 200)
    source[150] ^= 1
    assert view[50] == source[150]


@pytest.mark.parametrize("residency", ["mmap", "ram"])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_bytes_end_with_the_last_that_is_closed(tmp_path, residency, last):
    files = sharded(tmp_path, TOKENS)[0]
    tokens = open_tokens(files, residency=residency)
    tokens.wait_until_loaded()
    three = [tokens, *tokens.split(1000)]
    expected = [TOKENS, TOKENS[:1000], TOKENS[1000:]]
    for one in three[:last] + three[last + 1 :]:
        one.close()
        with pytest.raises(ValueError, match="it was closed; open the tokens again"):
            one[0]
    np.testing.assert_array_equal(three[last][:], expected[last])
    three[last].close()
    if Path("/proc/self/maps").exists():
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_views_are_read_into_ram_with_the_tokens(files):
    tokens = open_tokens(files, residency="ram")
    first, second = tokens.split(950)
    first.wait_until_loaded()
    for path in files:
        os.truncate(path, 0)
    np.testing.assert_array_equal(second[:], TOKENS[950:])
    np.testing.assert_array_equal(second.gather([0, 1000], 50), [TOKENS[950:1000], TOKENS[1950:]])


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_views_and_arrays_are_joined_without_copying(files, residency):
    source = TOKENS.copy()
    tokens = open_tokens(files, residency=residency)
    joined = open_tokens([tokens.view(2, 1000), source, open_tokens(source).view(5, 10)])
    assert joined.residency == residency
    tokens.close()
    source[7] ^= 1
    expected = np.concatenate([TOKENS[2:1000], source, source[5:10]])
    np.testing.assert_array_equal(joined[:], expected)
    starts = np.arange(0, len(expected) - 30, 11)
    np.testing.assert_array_equal(joined.gather(starts, 30), [expected[s : s + 30] for s in starts])
    assert "[2:1_000] and 2 more: 3,003 uint16 tokens" in repr(joined)


def test_the_name_of_a_lost_file_and_the_offset_in_it_are_told_of_views_too(tmp_path):
    path = write_raw(tmp_path / "t.bin", random_tokens(100_000))
    view = open_tokens(path, dtype="uint16").view(50_000, 90_000)
    joined = join([TOKENS, view.view(10_000, 30_000)], "mmap")
    os.truncate(path, 4096)
    for tokens in (view, joined):  # where the kernel does not copy, reading ends there
        with pytest.raises(OSError, match=re.escape(str(path))) as raised:
            tokens.gather([len(tokens) - 1], 1)
        offset = int(re.search(r"byte ([\d,]+)", str(raised.value))[1].replace(",", ""))
        last = 2 * (90_000 if tokens is view else 80_000) - 2
        assert last - 4096 * 16 < offset <= last
