"""Writing tokens: what arrives in the file, what is refused, and that nothing half-done is left."""

import io
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

import tokenloader as tl
from tokenloader import write_tokens
from tokenloader.tokens.writing import WRITE_CHUNK_TOKENS, atomic_file, write_all

DTYPES = "uint8", "uint16", "uint32", "int32", "int64"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.safetensors"


def only_file(path):
    return os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_real_library_reads_what_was_written(path, dtype):
    assert write_tokens(path, [np.arange(5), np.arange(100, 120)], dtype) == 25
    tensors = load_file(path)
    assert list(tensors) == ["tokens"]
    assert tensors["tokens"].dtype == dtype
    assert tensors["tokens"].tolist() == [*range(5), *range(100, 120)]


def test_the_dtype_is_uint16_unless_another_is_said(path):
    write_tokens(path, np.array([65_535]))
    assert tl.open_tokens(path).dtype == np.uint16


@pytest.mark.parametrize(
    "arrays",
    [
        np.arange(7, dtype=np.int64),
        np.arange(7, dtype=">u4"),
        np.arange(14, dtype=np.uint16)[::2] // 2,
        [np.arange(3), np.array([], np.int64), [], np.arange(3, 7, dtype=np.uint8)],
        (np.arange(i, i + 1) for i in range(7)),
        [[0, 1, 2], [3, 4, 5, 6]],
    ],
    ids=["one", "big-endian", "strided", "several", "generator", "lists"],
)
def test_one_array_or_any_iterable_of_them(path, arrays):
    assert write_tokens(path, arrays) == 7
    assert tl.open_tokens(path)[:].tolist() == list(range(7))


def test_an_open_token_array_is_written_too(path, tmp_path):
    np.arange(3 * WRITE_CHUNK_TOKENS // 2, dtype=np.uint32).tofile(tmp_path / "a.bin")
    with tl.open_tokens(tmp_path / "a.bin", dtype="uint32") as tokens:
        assert write_tokens(path, tokens, "uint32") == len(tokens)
    np.testing.assert_array_equal(tl.open_tokens(path)[:], np.arange(3 * WRITE_CHUNK_TOKENS // 2))


def test_arrays_longer_than_a_chunk_are_written_whole(path):
    ids = np.arange(2 * WRITE_CHUNK_TOKENS + 5) % 60_000
    write_tokens(path, ids)
    np.testing.assert_array_equal(tl.open_tokens(path)[:], ids)


@pytest.mark.parametrize(
    ("bad", "dtype", "holds"),
    [(65_536, "uint16", "0 to 65535"), (-1, "uint16", "0 to 65535"), (256, "uint8", "0 to 255")],
)
def test_an_id_that_does_not_fit_is_refused_with_its_position(path, bad, dtype, holds):
    ids = np.zeros(WRITE_CHUNK_TOKENS + 10, np.int64)
    ids[WRITE_CHUNK_TOKENS + 7] = bad
    with pytest.raises(ValueError, match=f"token 1,048,586 is {bad}, which {dtype} cannot hold") as e:
        write_tokens(path, [np.zeros(3, np.uint8), ids], dtype)
    assert holds in str(e.value)
    assert os.listdir(path.parent) == []


def test_the_largest_ids_of_unsigned_integers_are_compared_exactly(path):
    with pytest.raises(ValueError, match="token 0 is 18446744073709551615, which int64 cannot hold"):
        write_tokens(path, np.array([2**64 - 1], np.uint64), "int64")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([1, 2, 3], r"arrays\[0\] is the single id 1; expected a 1-D array of integers"),
        ([np.zeros(2, int), np.zeros((2, 3), int)], r"arrays\[1\] is int64\[2, 3\]"),
        ([np.zeros(2)], r"arrays\[0\] is float64\[2\]"),
        ([np.array([True])], r"arrays\[0\] is bool\[1\]"),
    ],
)
def test_what_is_no_array_of_integers_is_refused(path, arrays, message):
    with pytest.raises(ValueError, match=message):
        write_tokens(path, arrays)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(("arrays", "kind"), [("abc", "str"), (5, "int"), ({1: 2}, "dict")])
def test_what_is_no_iterable_of_arrays_is_refused(path, arrays, kind):
    with pytest.raises(TypeError, match=f"arrays is of type {kind}; expected 1-D arrays"):
        write_tokens(path, arrays)


@pytest.mark.parametrize("arrays", [[], [[]], np.array([], np.uint16)])
def test_no_tokens_at_all_are_refused(path, arrays):
    with pytest.raises(ValueError, match=re.escape(f"{path}: there are no tokens to write")):
        write_tokens(path, arrays)
    assert os.listdir(path.parent) == []


def test_a_dtype_that_holds_no_tokens_is_refused(path):
    with pytest.raises(
        ValueError,
        match=r"dtype=float32, which cannot hold token ids here; expected one of .* int64$",
    ):
        write_tokens(path, [], "float32")


def test_a_failure_on_the_way_leaves_what_was_there(path):
    write_tokens(path, np.arange(5))
    before = path.read_bytes()

    def failing():
        yield np.arange(10)
        raise RuntimeError("the source failed")

    for arrays in (failing(), [np.array([70_000])], []):
        with pytest.raises((RuntimeError, ValueError)):
            write_tokens(path, arrays)
        assert path.read_bytes() == before
        assert only_file(path)


def test_a_file_that_exists_is_replaced_when_the_new_one_is_complete(path):
    write_tokens(path, np.arange(5))

    def arrays():
        yield np.arange(3)
        assert len(tl.open_tokens(path)) == 5

    write_tokens(path, arrays())
    assert len(tl.open_tokens(path)) == 3
    assert only_file(path)


def test_ctrl_c_leaves_nothing(path):
    code = f"""if True:
        import numpy as np, itertools, signal, tokenloader as tl
        # A shell starts what runs in the background with SIGINT ignored, and that is inherited.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def arrays():
            for _ in itertools.count():
                yield np.arange(1000)
                print("writing", flush=True)
        tl.write_tokens({str(path)!r}, arrays())
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode != 0
    assert os.listdir(path.parent) == []


def test_the_file_has_the_permissions_that_files_get(path):
    write_tokens(path, np.arange(5))
    (path.parent / "other").touch()
    assert path.stat().st_mode == (path.parent / "other").stat().st_mode


def test_through_a_link_the_file_it_points_to_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "t.safetensors", tmp_path / "link.safetensors"
    write_tokens(target, np.arange(5))
    link.symlink_to(target)
    write_tokens(link, np.arange(8))
    assert link.is_symlink()
    assert len(tl.open_tokens(target)) == 8


def test_names_may_be_long_and_of_any_letters(tmp_path):
    for name in ("ä" * 120 + ".safetensors", "日本 語.safetensors"):
        write_tokens(tmp_path / name, np.arange(5))
        assert len(load_file(tmp_path / name)["tokens"]) == 5


def test_a_directory_a_pipe_or_no_directory_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=re.escape(f"{tmp_path} is a directory; tokens are written")):
        write_tokens(tmp_path, np.arange(5))
    with pytest.raises(OSError, match="pipe is not a regular file; tokens are written to a file"):
        write_tokens(tmp_path / "pipe", np.arange(5))
    with pytest.raises(FileNotFoundError, match=r"its directory .*none does not exist; make it"):
        write_tokens(tmp_path / "none" / "t.safetensors", np.arange(5))


class ShortWrites(io.BytesIO):
    def write(self, data):
        return super().write(data[:3])


def test_a_write_that_takes_less_than_it_is_given_is_continued():
    file = ShortWrites()
    write_all(file, np.arange(10, dtype=np.uint16))
    assert file.getvalue() == np.arange(10, dtype="<u2").tobytes()


def test_all_that_is_on_disk_before_the_rename_is_the_whole_file(tmp_path, monkeypatch):
    sizes = []
    replace = os.replace

    def seen(source, target):
        sizes.append(os.path.getsize(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    with atomic_file(tmp_path / "a") as file:
        file.write(b"12345")
        assert not (tmp_path / "a").exists()
    assert sizes == [5]


def test_memory_does_not_grow_with_the_file(path):
    code = f"""if True:
        import numpy as np, resource, sys, tokenloader as tl
        tl.write_tokens({str(path)!r}, np.arange(10))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        block = np.zeros(1 << 20, np.uint16)
        tl.write_tokens({str(path)!r}, (block for _ in range(64)))
        unit = 1 if sys.platform == "darwin" else 1024
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert path.stat().st_size > 128 << 20
    assert int(done.stdout) < 32 << 20


def test_a_single_id_and_ragged_lists_are_refused_with_their_number(tmp_path):
    with pytest.raises(ValueError, match=r"arrays\[0\] is the single id 7; .* pass np.array\(ids\)"):
        tl.write_tokens(tmp_path / "a.safetensors", [7, 8])
    with pytest.raises(ValueError, match=r"arrays\[1\] is no array \(.*expected a 1-D array"):
        tl.write_tokens(tmp_path / "a.safetensors", [[7], [1, [2]]])
    assert not list(tmp_path.iterdir())
