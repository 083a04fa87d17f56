"""Converting between formats: every pair, the checks before anything is written, and what they say."""

import errno
import io
import os
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import tokenloader as tl
from tokenloader.formats import headerless, llm_c, npy, safetensors
from tokenloader.prepare.convert import convert, target_format

IDS = np.arange(1000) % 251
SUFFIX = {"safetensors": ".safetensors", "npy": ".npy", "llm.c": ".bin", "raw": ".bin"}
FORMATS = list(SUFFIX)


def opened(path, format, dtype):
    return tl.open_tokens(path, dtype=dtype if format == "raw" else None)


@pytest.fixture
def tokens(tmp_path):
    tl.write_tokens(tmp_path / "source.safetensors", IDS)
    return tl.open_tokens(tmp_path / "source.safetensors")


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_every_format_becomes_every_format(tmp_path, tokens, source, target):
    first, second = tmp_path / f"first{SUFFIX[source]}", tmp_path / f"second{SUFFIX[target]}"
    assert convert(tokens, first, writer=target_format(first, source)) == first.stat().st_size
    with opened(first, source, "uint16") as between:
        convert(between, second, writer=target_format(second, target), dtype=np.dtype("uint32"))
    with opened(second, target, "uint32") as result:
        assert result.dtype == np.uint32
        np.testing.assert_array_equal(result[:], IDS)


def test_several_sources_become_one_file(tmp_path, tokens):
    joined = tl.open_tokens([tmp_path / "source.safetensors"] * 3)
    convert(joined, tmp_path / "three.npy", writer=npy.WRITER)
    np.testing.assert_array_equal(np.load(tmp_path / "three.npy"), np.tile(IDS, 3))


def test_ids_that_do_not_fit_the_narrower_dtype_are_refused(tmp_path):
    tl.write_tokens(tmp_path / "a.safetensors", [np.arange(10), [70_000]], "uint32")
    with (
        tl.open_tokens(tmp_path / "a.safetensors") as tokens,
        pytest.raises(ValueError, match="token 10 is 70000, which uint16 cannot hold"),
    ):
        convert(tokens, tmp_path / "b.npy", writer=npy.WRITER, dtype=np.dtype("uint16"))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path, tokens):
    target = tmp_path / "t.npy"
    target.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=re.escape(f"{target} exists (8 bytes); --force")):
        convert(tokens, target, writer=npy.WRITER)
    assert target.read_bytes() == b"precious"
    convert(tokens, target, writer=npy.WRITER, force=True)
    np.testing.assert_array_equal(np.load(target), IDS)


def test_a_pipe_or_a_device_is_refused_before_the_disk_is_looked_at(tmp_path, tokens):
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match=re.escape(f"{target} is not a regular file")):
            convert(tokens, target, writer=headerless.WRITER, force=True)


@pytest.mark.parametrize("link", ["same", "hard link", "symbolic link"])
def test_a_file_is_not_written_over_what_is_read(tmp_path, tokens, link):
    source = tmp_path / "source.safetensors"
    target = {"same": source}.get(link, tmp_path / "t.safetensors")
    if link == "hard link":
        target.hardlink_to(source)
    elif link == "symbolic link":
        target.symlink_to(source)
    with pytest.raises(ValueError, match=re.escape(f"{target} is the file that is read ({source})")):
        convert(tokens, target, writer=safetensors.WRITER, force=True)


def test_a_disk_that_is_too_full_is_told_before_anything_is_written(tmp_path, tokens, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9999, 9000, 999))
    message = "t.npy takes 2,128 bytes, and 999 are free on this disk"
    with pytest.raises(OSError, match=message):
        convert(tokens, tmp_path / "t.npy", writer=npy.WRITER)
    assert os.listdir(tmp_path) == ["source.safetensors"]


def test_the_bar_counts_the_bytes(tmp_path, tokens, capfd):
    convert(tokens, tmp_path / "t.npy", writer=npy.WRITER, dtype="uint32", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "writing: " in err
    assert "/3.91k [" in err


def test_a_screen_that_fails_does_not_reach_the_file(tmp_path, tokens, monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "the terminal is gone")

    monkeypatch.setattr(sys, "stderr", Broken())
    convert(tokens, tmp_path / "t.npy", writer=npy.WRITER, progress=True)
    np.testing.assert_array_equal(np.load(tmp_path / "t.npy"), IDS)


def test_too_many_tokens_for_llm_c_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(2**32)  # 2**31 tokens, one more than fit
    with (
        tl.open_tokens(tmp_path / "sparse.bin", dtype="uint16") as tokens,
        pytest.raises(ValueError, match="at most 2,147,483,647, and these are 2,147,483,648"),
    ):
        convert(tokens, tmp_path / "t.bin", writer=llm_c.WRITER)
    assert os.listdir(tmp_path) == ["sparse.bin"]


def test_the_suffix_says_the_format_where_it_can(tmp_path):
    assert target_format(tmp_path / "a.npy", None) is npy.WRITER
    assert target_format(tmp_path / "a.safetensors", None) is safetensors.WRITER
    assert target_format(tmp_path / "a.npy", "raw") is headerless.WRITER
    with pytest.raises(ValueError, match=r"a.bin: the suffix .bin may be several formats; say which"):
        target_format(tmp_path / "a.bin", None)
    with pytest.raises(ValueError, match=r"a: no suffix.*--to safetensors, npy, llm.c, raw"):
        target_format(tmp_path / "a", None)
