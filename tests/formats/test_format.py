"""Reading headers and indexes: from disks that fail, and files that end early."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from token_files import (
    aligned,
    at_odd_offset,
    datatrove,
    in_a_directory,
    llm_c,
    megatron,
    npy,
    random_tokens,
    raw,
    watch_reads,
    write_raw,
    write_safetensors,
)

from tokenloader import open_tokens
from tokenloader.formats.format import read_array, read_bytes


def with_json(folder, tokens):
    (folder / "t.bin.json").write_text(json.dumps({"dtype": tokens.dtype.name}))
    return write_raw(folder / "t.bin", tokens), {}


def with_metadata(folder, tokens):
    (folder / "t.ds.metadata").write_text(f"tokenizer\n{len(tokens)}\n")
    return write_raw(folder / "t.ds", tokens), {}


def by_an_index(folder, tokens):
    write_safetensors(folder / "t.safetensors", tokens)
    index = folder / "t.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"tokens": "t.safetensors"}}))
    return index, {}


WAYS = [
    aligned,
    at_odd_offset,
    by_an_index,
    datatrove,
    in_a_directory,
    llm_c,
    megatron,
    npy,
    raw,
    with_json,
    with_metadata,
]


@pytest.mark.parametrize("make", WAYS)
def test_a_disk_that_fails_at_any_read_of_a_header_or_index_is_an_error_that_names_the_file(
    tmp_path, monkeypatch, make
):
    source, arguments = make(tmp_path, random_tokens())
    files = {str(path) for path in tmp_path.iterdir()}

    def opened(fails_at):
        reads = watch_reads(monkeypatch, fails_at)
        with open_tokens(source, **arguments) as tokens:
            return tokens.documents, len(reads)

    _, num_reads = opened(None)
    assert num_reads
    for number in range(num_reads):
        with pytest.raises(OSError, match="Input/output error") as raised:
            opened(number)
        assert raised.value.errno == errno.EIO
        assert raised.value.filename in files


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that cannot be read is Linux's")
@pytest.mark.parametrize("name", ["t.bin", "t.bin.json", "t.json", "t.idx", "t.ds.metadata"])
def test_a_file_that_the_system_cannot_read_is_named(tmp_path, name):
    path = write_raw(tmp_path / ("t.ds" if ".ds" in name else "t.bin"), random_tokens())
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/proc/self/mem")  # byte 0 of a process's memory is an EIO
    with pytest.raises(OSError, match=re.escape(str(tmp_path / name))) as raised:
        open_tokens(path)
    assert raised.value.errno == errno.EIO


def test_what_ends_early_is_an_error_that_says_where(tmp_path):
    path = tmp_path / "t.idx"
    path.write_bytes(bytes(1500))
    assert read_bytes(path) == read_bytes(path, 1500) == read_bytes(path, 9999) == bytes(1500)
    assert read_array(path, "<i4", 25, 1400).tolist() == [0] * 25
    with pytest.raises(OSError, match=r"ended at byte 1,500, expected 1,504; is it being") as raised:
        read_array(path, "<i4", 26, 1400)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))


def replaced(index):
    index.with_name("new").write_bytes(index.read_bytes())
    index.with_name("new").replace(index)


def rewritten(index):
    os.utime(index, ns=(0, 0))


def made_a_pipe(index):
    index.unlink()
    os.mkfifo(index)


@pytest.mark.parametrize("changed", [replaced, rewritten, made_a_pipe])
@pytest.mark.parametrize(("way", "suffix"), [(megatron, ".idx"), (datatrove, ".ds.index")])
def test_an_index_that_is_another_than_at_opening_is_an_error_and_no_other_documents(
    tmp_path, way, suffix, changed
):
    path, arguments = way(tmp_path, random_tokens())
    with open_tokens(path, **arguments) as tokens:
        changed(index := path.with_suffix(suffix))
        with pytest.raises(OSError, match="has changed since it was opened") as raised:
            _ = tokens.documents
        assert raised.value.filename == str(index)
