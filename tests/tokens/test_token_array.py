"""A TokenArray: slices, hints, fingerprints, more than 2**32 tokens."""

import copy
import mmap
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import naive_gather
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import (
    FILES,
    RecordingKernel,
    random_tokens,
    sharded,
    write_npy,
    write_raw,
    write_safetensors_at_odd_offset,
)

from tokenloader import TokenArray, open_tokens, write_tokens
from tokenloader.storage.kernel_advice import KernelAdvice
from tokenloader.storage.mapped import map_read_only
from tokenloader.tokens.opening import join
from tokenloader.tokens.part import Part
from tokenloader.tokens.store import Memory


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Six files as one axis, mapped, and what they hold."""
    expected = random_tokens()
    files, _ = sharded(tmp_path_factory.mktemp("shards"), expected)
    with open_tokens(files) as tokens:
        yield tokens, expected


@settings(deadline=None)
@given(
    st.builds(
        slice,
        st.none() | st.integers(-2500, 2500),
        st.none() | st.integers(-2500, 2500),
        st.none() | st.integers(-50, 50).filter(bool),
    )
)
def test_any_slice_is_numpys(shards, bounds):
    tokens, expected = shards
    np.testing.assert_array_equal(tokens[bounds], expected[bounds])


@pytest.mark.parametrize("stride_tokens", [1, 3, 100, 1999, 2000])
def test_a_long_slice_is_copied_in_strides(shards, stride_tokens):
    tokens, expected = shards
    parts = ((extent, *map_read_only(extent)) for extent in tokens.extents)
    memory = Memory([Part(array, "mapped", extent, file) for extent, array, file in parts])
    for begin, end in ((0, 2000), (2, 1991), (899, 906)):
        out = np.empty(end - begin, np.uint16)
        memory.copy(begin, out, stride_tokens)
        np.testing.assert_array_equal(out, expected[begin:end])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells, others do not")
def test_hints_name_exactly_the_pages_of_the_windows_in_each_shard(tmp_path):
    expected = random_tokens(500_000)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, part in zip(paths, np.split(expected, [200_000]), strict=True):
        write_safetensors_at_odd_offset(path, part)
    kernel = RecordingKernel()
    with join(open_tokens(paths).extents, "mmap", kernel=kernel) as tokens:
        tokens.gather([0, 199_000], 2000)
        tokens.prefetch([], 10)
        assert not kernel.announced  # nothing is read ahead for being opened, or for being read
        tokens.prefetch([100, 150_000, 499_990], 10)
        tokens.prefetch([150_010], 200_000)
        maps = Path("/proc/self/maps").read_text()
    named = set()
    for address, length in kernel.announced:
        assert address % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
        named.update(range(address, address + length, mmap.PAGESIZE))
    wanted = set()
    for path, first, num_tokens in ((paths[0], 0, 200_000), (paths[1], 200_000, 300_000)):
        header = path.stat().st_size - 2 * num_tokens
        address = int(re.search(rf"^([0-9a-f]+)-.*{path}$", maps, re.MULTILINE)[1], 16)
        for window in ((100, 110), (150_000, 350_010), (499_990, 500_000)):
            begin, end = (min(max(token - first, 0), num_tokens) for token in window)
            if begin < end:
                from_page = (header + 2 * begin) // mmap.PAGESIZE
                to_page = (header + 2 * end - 1) // mmap.PAGESIZE + 1
                pages = range(from_page, to_page)
                wanted |= {address + page * mmap.PAGESIZE for page in pages}
    assert named == wanted


def test_tokens_in_ram_are_not_hinted_at(tmp_path):
    class NoAdvice(KernelAdvice):
        def start_reading(self, ranges):
            raise AssertionError("advice on RAM")

        copy = is_cached = start_reading

    extents = open_tokens(write_npy(tmp_path / "t.npy", random_tokens())).extents
    in_ram = join(extents, "ram", kernel=NoAdvice())
    in_ram.wait_until_loaded()
    for tokens in (in_ram, join([random_tokens()], "mmap", kernel=NoAdvice())):
        tokens.prefetch([0, 5], 100)
        assert tokens.locate([7], 100).is_cached()
        np.testing.assert_array_equal(tokens[:], random_tokens())


def test_located_windows_tell_whether_they_are_in_memory(tmp_path):
    path = write_raw(tmp_path / "t.bin", random_tokens())
    tokens = open_tokens(path, dtype="uint16")
    assert tokens.gather([1999], 1).shape == (1, 1)
    assert tokens.locate([1999], 1).is_cached()
    assert open_tokens(random_tokens()).locate([0], 1).is_cached()


# Fingerprints


def test_the_fingerprint_of_tokens_stays_what_it_was():
    # Saved runs compare it.
    tokens = np.arange(100_000, dtype=np.uint32)
    assert open_tokens(tokens).fingerprint() == "uint32:100000:0c758b1bd05ff25f"
    assert open_tokens(tokens[:100].astype("u2")).fingerprint() == "uint16:100:b1380fb3b9ccb1ae"


def test_equal_tokens_have_one_fingerprint_however_they_are_held(tmp_path):
    expected = random_tokens(70_000)
    opened = [open_tokens(expected), open_tokens(np.repeat(expected, 2)[::2])]
    for number, (make, residency) in enumerate(
        (make, residency) for make in FILES for residency in ("mmap", "ram")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        source, arguments = make(folder, expected)
        opened.append(open_tokens(source, residency=residency, **arguments))
    halves = [
        write_raw(tmp_path / "a", expected[:35_000]),
        write_raw(tmp_path / "b", expected[35_000:]),
    ]
    opened.append(open_tokens(halves, dtype="uint16"))
    fingerprints = {tokens.fingerprint() for tokens in opened}
    assert len(opened) == 19
    assert len(fingerprints) == 1
    assert re.fullmatch(r"uint16:70000:[0-9a-f]{16}", fingerprints.pop())


@pytest.mark.parametrize("num_tokens", [1, 2, 511, 512, 513, 3000, 10**6])
def test_other_tokens_have_another_fingerprint(num_tokens):
    tokens = random_tokens(num_tokens)
    first, last = tokens.copy(), tokens.copy()
    first[0] ^= 1
    last[-1] ^= 1
    longer = np.append(tokens, tokens[-1:])
    several = [tokens, first, longer, tokens.astype(np.uint32), tokens.astype(np.int32)]
    several += [last] if num_tokens > 1 else []
    several += [tokens[:-1], tokens[::-1]] if num_tokens > 2 else []
    assert len({open_tokens(one).fingerprint() for one in several}) == len(several)


def test_the_order_of_the_files_is_part_of_the_fingerprint(tmp_path):
    a = write_raw(tmp_path / "a", random_tokens(100, seed=1))
    b = write_raw(tmp_path / "b", random_tokens(100, seed=2))
    prints = [open_tokens(files, dtype="uint16").fingerprint() for files in ([a, b], [b, a])]
    assert prints[0] != prints[1]


# More than 2**32 tokens


@pytest.fixture(scope="module")
def past_32_bits(tmp_path_factory):
    """A sparse file of 2**33 + 1000 uint16 tokens: 16 GiB that take a few KiB of disk."""
    path = tmp_path_factory.mktemp("sparse") / "tokens.bin"
    num_tokens = 2**33 + 1000
    islands = {
        at: random_tokens(600, seed=number) | 1  # no zeros: told apart from the hole
        for number, at in enumerate([0, 2**31 - 300, 2**32 - 300, 2**33 - 300, num_tokens - 600])
    }
    try:
        with path.open("wb") as file:
            file.truncate(2 * num_tokens)
            for at, tokens in islands.items():
                file.seek(2 * at)
                file.write(tokens.tobytes())
    except OSError as error:  # no sparse files, or no files of this size
        path.unlink()
        pytest.skip(str(error))
    if path.stat().st_blocks * 512 > 2**24:
        path.unlink()
        pytest.skip("no sparse files here")
    yield path, num_tokens, islands
    blocks = path.stat().st_blocks
    path.unlink()
    assert blocks * 512 < 2**24  # still almost no disk


def test_windows_past_32_bits_are_found(past_32_bits):
    path, num_tokens, islands = past_32_bits
    with open_tokens(path, dtype="uint16") as tokens:
        assert len(tokens) == num_tokens
        assert tokens.nbytes == 2 * num_tokens
        assert "16.00 GiB" in repr(tokens)
        starts = [at + shift for at in islands for shift in (0, 100, 299, 300)]
        expected = [islands[at][shift : shift + 300] for at in islands for shift in (0, 100, 299, 300)]
        tokens.prefetch(starts, 300)
        np.testing.assert_array_equal(tokens.gather(starts, 300), expected)
        np.testing.assert_array_equal(tokens.gather([2**30, 2**32 + 2**31], 50), np.zeros((2, 50)))
        for at, island in islands.items():
            np.testing.assert_array_equal(tokens[at : at + 600], island)
            np.testing.assert_array_equal(tokens[at + 590 : at + 10 : -7], island[590:10:-7])
            assert tokens[at + 5] == island[5]
        assert tokens[-1] == islands[num_tokens - 600][-1]
        np.testing.assert_array_equal(tokens[-600:], islands[num_tokens - 600])
        with pytest.raises(IndexError, match=r"\[8,589,935,493, 8,589,935,593\) does not lie within"):
            tokens.gather([num_tokens - 99], 100)


def test_a_shard_after_2_to_the_33_tokens_continues_the_axis(past_32_bits, tmp_path):
    path, num_tokens, islands = past_32_bits
    after = random_tokens(500, seed=9)
    joined = np.concatenate([islands[num_tokens - 600], after])
    files = [path, write_raw(tmp_path / "after.bin", after), path]
    with open_tokens(files, dtype="uint16") as tokens:
        assert len(tokens) == 2 * num_tokens + 500
        starts = np.arange(0, 800, 50)
        np.testing.assert_array_equal(
            tokens.gather(num_tokens - 600 + starts, 300), naive_gather(joined, starts, 300)
        )
        np.testing.assert_array_equal(tokens[num_tokens - 600 : num_tokens + 500], joined)
        again = num_tokens + 500 + 2**32 - 300
        np.testing.assert_array_equal(tokens.gather([again], 600)[0], islands[2**32 - 300])


def test_a_token_changed_at_the_far_end_changes_the_fingerprint(past_32_bits):
    path, num_tokens, islands = past_32_bits
    with open_tokens(path, dtype="uint16") as tokens:
        before = tokens.fingerprint()
        assert before.startswith(f"uint16:{num_tokens}:")
        with path.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write((islands[num_tokens - 600][-1] ^ 2).tobytes())
    with open_tokens(path, dtype="uint16") as tokens:
        after = tokens.fingerprint()
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(islands[num_tokens - 600][-1].tobytes())
    assert after != before


# What it says of itself


def test_a_repr_names_the_files_their_size_and_the_state(tmp_path):
    files, _ = sharded(tmp_path, random_tokens())
    tokens = open_tokens(files)
    name = f"TokenArray({files[0]} and 5 more: 2,000 uint16 tokens, 4,000 bytes"
    assert repr(tokens) == f"{name}, mmap)"
    tokens.close()
    assert repr(tokens) == f"{name}, closed)"
    assert repr(open_tokens(files, residency="ram")) == f"{name}, ram)"
    assert repr(open_tokens(files[4])).startswith(f"TokenArray({files[4]}: 1,085 uint16")
    assert repr(open_tokens(random_tokens(3))) == "TokenArray(array: 3 uint16 tokens, 6 bytes, ram)"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_token_array_is_not_copied_with_its_addresses(tmp_path, copied):
    tokens = open_tokens(write_npy(tmp_path / "t.npy", random_tokens()))
    with pytest.raises(TypeError, match=r"t\.npy.* cannot be copied or pickled; open the tokens again"):
        copied(tokens)


@pytest.mark.parametrize("kind", [np.uint16, np.int8, np.int64])
def test_the_length_may_be_an_integer_of_numpy(kind):
    expected = random_tokens(60_000)
    tokens = open_tokens(expected)
    tokens.prefetch([0], kind(100))
    np.testing.assert_array_equal(
        tokens.gather([3, 50_000], kind(100)), naive_gather(expected, [3, 50_000], 100)
    )


def test_the_module_that_is_named_is_the_package():
    assert repr(TokenArray) == "<class 'tokenloader.TokenArray'>"
    assert open_tokens.__module__ == write_tokens.__module__ == "tokenloader"
    assert pickle.loads(pickle.dumps(TokenArray)) is TokenArray
