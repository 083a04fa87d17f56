"""Writing tokens: what arrives in the file, what is refused, and that nothing half-done is left."""

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

import tokenloader as tl
from tokenloader import write_tokens
from tokenloader.formats import safetensors
from tokenloader.tokens.writing import WRITE_CHUNK_TOKENS, atomic_file, write_all, write_file

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


def test_a_write_that_takes_less_than_it_is_given_is_continued(path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:3], at))
    with path.open("xb") as file:
        write_all(file.fileno(), path, bytes(range(10)), 0)
        write_all(file.fileno(), path, b"\xff" * 7, 1)
    assert path.read_bytes() == b"\x00" + b"\xff" * 7 + b"\x08\x09"


@pytest.mark.parametrize("replace", [True, False])
def test_all_is_on_disk_before_the_file_has_its_name(tmp_path, monkeypatch, replace):
    sizes = []
    fsync = os.fsync

    def seen(descriptor):
        assert not (tmp_path / "a").exists() or sizes
        sizes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    with atomic_file(tmp_path / "a", replace=replace) as write:
        write(b"12345", 0)
        assert not (tmp_path / "a").exists()
    assert sizes[0] == 5
    assert (tmp_path / "a").read_bytes() == b"12345"
    assert only_file(tmp_path / "a")


@pytest.fixture(params=["with", "without"])
def hard_links(request, monkeypatch):
    if request.param == "without":

        def refused(source, target):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, target)

        monkeypatch.setattr(os, "link", refused)


def write(path, arrays, *, replace):
    return write_file(path, arrays, np.dtype(np.uint16), safetensors.WRITER, replace=replace)


def test_without_replacing_a_file_that_appears_meanwhile_stays(path, hard_links):
    def arrays():
        yield np.arange(5)
        path.write_bytes(b"precious")

    message = f"{path} exists by now, and stays as it is; .* --force replaces it"
    with pytest.raises(FileExistsError, match=message):
        write(path, arrays(), replace=False)
    assert path.read_bytes() == b"precious"
    assert only_file(path)
    assert write(path, arrays(), replace=True) == 5
    assert len(tl.open_tokens(path)) == 5
    assert only_file(path)


def test_without_replacing_a_file_that_is_not_there_is_written(path, hard_links):
    (path.parent / "other").touch()
    assert write(path, [np.arange(5)], replace=False) == 5
    assert len(tl.open_tokens(path)) == 5
    assert path.stat().st_mode == (path.parent / "other").stat().st_mode
    assert sorted(os.listdir(path.parent)) == ["other", path.name]


def test_a_name_that_was_held_is_free_again_if_the_file_cannot_be_moved_there(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=re.escape(f"{os.strerror(errno.EIO)}: {str(path)!r}")):
        write(path, [np.arange(5)], replace=False)
    assert os.listdir(path.parent) == []


def test_a_file_that_another_is_writing_is_refused_at_once(path):
    with atomic_file(path, replace=False) as first:
        (temporary,) = os.listdir(path.parent)
        message = (
            f"{path} is being written by another process \\(into .*{temporary}\\); wait for it, or --force"
        )
        with pytest.raises(FileExistsError, match=message):
            write(path, [np.arange(5)], replace=False)
        assert write(path.with_name("other"), [np.arange(5)], replace=False) == 5
        assert write(path, [np.arange(5)], replace=True) == 5
        first(b"12345", 0)
        path.unlink()
    assert path.read_bytes() == b"12345"


@pytest.mark.parametrize("replace", [True, False])
def test_the_temporary_file_of_a_writer_that_was_killed_is_removed_by_the_next(path, replace):
    code = f"""if True:
        import os, signal, numpy as np, tokenloader as tl
        def arrays():
            yield np.arange(1000)
            os.kill(os.getpid(), signal.SIGKILL)
        tl.write_tokens({str(path)!r}, arrays())
    """
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
        (left,) = os.listdir(path.parent)  # the second removes that of the first
        assert left.startswith(".")
    write(path, [np.arange(5)], replace=replace)
    assert only_file(path)


def test_temporary_files_of_other_files_and_what_is_called_alike_stay(path):
    with atomic_file(path.with_name("other"), replace=True):
        (other,) = os.listdir(path.parent)
        kept = {".tokenloader-a.tmp", "a.tmp", other}
        for name in kept - {other}:
            path.with_name(name).touch()
        write(path, [np.arange(5)], replace=True)
        assert set(os.listdir(path.parent)) == {*kept, path.name}


def test_without_locks_no_temporary_file_is_taken_for_abandoned(path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with atomic_file(path, replace=True) as first:
        write(path, [np.arange(5)], replace=True)
        first(b"12345", 0)
    assert path.read_bytes() == b"12345"
    assert only_file(path)


def test_a_disk_that_takes_no_more_is_told_with_the_name_of_the_file(path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(path))) as raised:
            write_tokens(path, np.zeros(1 << 20, np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_is_told_with_the_name_of_the_file(path, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO), *map(str, _))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=re.escape(str(path))) as raised:
        write_tokens(path, np.arange(5))
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    assert os.listdir(path.parent) == []


def test_an_error_of_what_is_read_keeps_its_own_name(path):
    def arrays():
        yield np.arange(5)
        raise OSError(errno.EIO, os.strerror(errno.EIO), "source.bin")

    with pytest.raises(OSError, match=r"source\.bin"):
        write_tokens(path, arrays())


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
