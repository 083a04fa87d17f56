"""Mapped files: the bytes of an extent as an array, and the errors."""

import gc
import mmap
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from token_files import random_tokens, write_npy, written_extent

from tokenloader import open_tokens
from tokenloader.formats.extent import Extent
from tokenloader.storage.file_systems import file_system_type, is_over_a_network
from tokenloader.storage.mapped import map_read_only, open_file
from tokenloader.storage.request_size import announced_bytes
from tokenloader.tokens.opening import join

TOKENS = random_tokens(3000)


@pytest.mark.parametrize("offset_bytes", [0, 1, 7, 64, 4095, 4097])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_a_mapping_holds_the_bytes_of_the_extent_and_no_others(tmp_path, offset_bytes, dtype):
    tokens = TOKENS.astype(dtype)
    extent = written_extent(tmp_path / "t", tokens, offset_bytes, after=b"\xbb" * 11)
    held, _ = map_read_only(extent)
    assert held.dtype == tokens.dtype
    np.testing.assert_array_equal(held, tokens)


def test_the_file_of_a_mapping_is_held_whatever_the_path_is_now(tmp_path):
    extent = written_extent(tmp_path / "t", TOKENS)
    tokens, file = map_read_only(extent)
    os.replace(written_extent(tmp_path / "other", TOKENS[:5]).path, extent.path)
    np.testing.assert_array_equal(
        np.frombuffer(os.pread(file.fileno(), tokens.nbytes, 0), tokens.dtype), TOKENS
    )
    file.check_unchanged()


def test_a_mapping_cannot_be_written_to(tmp_path):
    tokens, _ = map_read_only(written_extent(tmp_path / "t", TOKENS))
    assert not tokens.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        tokens.flags.writeable = True


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells, others do not")
def test_a_mapping_is_private_for_file_systems_that_share_none(tmp_path):
    # FUSE with direct_io, as of gcsfuse and s3fs with some options, refuses MAP_SHARED with ENODEV.
    extent = written_extent(tmp_path / "t", TOKENS)
    tokens, _ = map_read_only(extent)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert [line.split()[1] for line in maps if str(extent.path) in line] == ["r--p"]
    assert len(tokens) == len(TOKENS)


def test_a_held_file_tells_how_it_is_read_as_the_system_tells_of_its_file_system(tmp_path):
    _, file = map_read_only(written_extent(tmp_path / "t", TOKENS))
    assert file.announced_bytes == announced_bytes(file.fileno())
    assert file.is_over_a_network == is_over_a_network(file_system_type(file.fileno()) or "")


@pytest.mark.parametrize(("type_", "expected"), [("nfs4", True), ("ext4", False), (None, False)])
def test_a_held_file_is_over_a_network_by_its_file_system(tmp_path, monkeypatch, type_, expected):
    monkeypatch.setattr("tokenloader.storage.mapped.file_system_type", lambda descriptor: type_)
    _, file = map_read_only(written_extent(tmp_path / "t", TOKENS))
    assert file.is_over_a_network is expected


def test_the_tokens_hold_their_mapping(tmp_path):
    tokens, _ = map_read_only(written_extent(tmp_path / "t", TOKENS))
    gc.collect()
    np.testing.assert_array_equal(tokens, TOKENS)


def test_a_mapping_that_is_let_go_leaves_no_file_open_and_no_warning(tmp_path):
    def open_files():
        return sorted(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else []

    extent = written_extent(tmp_path / "t", TOKENS)
    before = open_files()
    unraisable = []
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tokens, file = map_read_only(extent)
            del tokens, file
            gc.collect()
    finally:
        sys.unraisablehook = hook
    assert not unraisable, unraisable
    assert open_files() == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux tells, others do not")
def test_a_mapped_file_takes_as_many_descriptors_as_the_documentation_says(tmp_path):
    extent = written_extent(tmp_path / "t", TOKENS)
    held = map_read_only(extent)
    names = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert names.count(str(extent.path.resolve())) == (1 if sys.version_info >= (3, 13) else 2)
    assert held


def test_a_file_may_be_deleted_while_it_is_mapped(tmp_path):
    tokens, file = map_read_only(written_extent(tmp_path / "t", TOKENS))
    (tmp_path / "t").unlink()
    file.check_unchanged()
    np.testing.assert_array_equal(tokens, TOKENS)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells, others do not")
def test_a_mapping_is_advised_to_be_read_at_random(tmp_path):
    # Without it a fault on a cold file reads a whole read-ahead window: 15 to 200 times slower.
    extent = written_extent(tmp_path / "t", TOKENS)
    tokens, _ = map_read_only(extent)
    entry = Path("/proc/self/smaps").read_text().split(str(extent.path))[1]
    flags = re.search(r"VmFlags: (.*)", entry)[1].split()
    assert "rr" in flags
    assert len(tokens) == len(TOKENS)


def test_mapping_needs_no_advice_where_the_system_has_none(tmp_path, monkeypatch):
    monkeypatch.delattr(mmap, "MADV_RANDOM", raising=False)
    np.testing.assert_array_equal(map_read_only(written_extent(tmp_path / "t", TOKENS))[0], TOKENS)


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_more_files_than_the_system_lets_open_are_an_error_with_a_remedy(tmp_path, residency):
    script = f"""
import resource, numpy as np, tokenloader as tl
np.zeros(10, np.uint16).tofile({str(tmp_path / "shard")!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
tl.open_tokens([{str(tmp_path / "shard")!r}] * 100, dtype="uint16", residency="{residency}")
"""
    found = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=False)
    last = found.stderr.splitlines()[-1]
    assert last.startswith("OSError: [Errno 24] too many open files")
    assert f"counts as {1 if sys.version_info >= (3, 13) else 2}: raise the limit (ulimit -n)" in last
    assert str(tmp_path / "shard") in last


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_a_file_that_is_replaced_after_its_header_was_read_is_not_taken_for_it(tmp_path, residency):
    path = write_npy(tmp_path / "t.npy", TOKENS)
    extents = open_tokens(path).extents  # what opening knows when it begins to map
    os.replace(write_npy(tmp_path / "new", TOKENS[::-1]), path)
    os.utime(path, ns=(0, extents[0].identity.mtime_ns))
    with pytest.raises(OSError, match=r"it is another file \(inode \d+, was \d+\)") as raised:
        join(extents, residency)
    assert raised.value.filename == str(path)


def test_a_file_that_is_gone_is_an_error_with_its_name(tmp_path):
    extent = Extent(tmp_path / "gone", 0, np.dtype("uint16"), 10, "headerless")
    for use in (map_read_only, open_file):
        with pytest.raises(FileNotFoundError, match=re.escape(str(extent.path))):
            use(extent)
