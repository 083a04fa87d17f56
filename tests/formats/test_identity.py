"""File identities: what counts as a change, and what the error says."""

import errno
import os
from contextlib import contextmanager

import pytest

from tokenloader.formats.identity import FileIdentity, check_unchanged, naming

MODIFIED_NS = 1_700_000_000_123_456_789  # 2023-11-14T22:13:20.123456789


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(5000))
    os.utime(path, ns=(0, MODIFIED_NS))
    return path


@contextmanager
def watched(path):
    """Looks, at the end, whether a file that is held open was changed."""
    with path.open("rb") as file:
        before = FileIdentity.of(file.fileno())
        check_unchanged(file.fileno(), path, before)
        yield
        check_unchanged(file.fileno(), path, before)


def error_after(path, change):
    """The error that a change makes, of a file that is held open."""
    with pytest.raises(OSError, match=r".") as raised, watched(path):
        change(path)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    return raised.value.strerror


def rewrite(path, data=b"\1" * 5000):
    with path.open("r+b") as file:
        file.write(data)


REMEDY = "; was it truncated or written to? Open the tokens again, and write new data under a new name"


def test_a_file_of_another_size_is_named_with_both_sizes(path):
    def grow_at_the_same_time(path):
        with path.open("ab") as file:
            file.write(b"1")
        os.utime(path, ns=(0, MODIFIED_NS))

    said = "has changed since it was opened: it has 5,001 bytes and had 5,000"
    assert error_after(path, grow_at_the_same_time) == said + REMEDY
    assert "it has 7 bytes and had 5,001, it was modified at 20" in error_after(
        path, lambda path: os.truncate(path, 7)
    )


def test_a_file_that_was_rewritten_at_the_same_size_is_named_with_both_times(path):
    message = error_after(path, rewrite)
    assert message.startswith("has changed since it was opened: it was modified at 20")
    assert message.endswith(" and before at 2023-11-14T22:13:20.123456789 (UTC)" + REMEDY)


@pytest.mark.parametrize(
    "harmless",
    [
        lambda path: path.chmod(0o400),
        lambda path: path.read_bytes(),
        lambda path: path.rename(path.with_name("other")),
        lambda path: path.unlink(),
        lambda path: os.link(path, path.with_name("link")),
        lambda path: path.with_name("new").replace(path) if path.with_name("new").write_bytes(b"1") else 0,
    ],
    ids=["mode", "read", "renamed", "deleted", "linked", "another file at its path"],
)
def test_what_does_not_change_the_contents_is_no_change(path, harmless):
    with watched(path):
        harmless(path)


@pytest.mark.parametrize(("year", "seconds"), [(2400, 13_569_465_600), (-1199, -(10**11))])
def test_a_year_past_the_nanoseconds_of_numpy_is_named(path, year, seconds):
    def touch(path):
        os.utime(path, ns=(0, seconds * 10**9 + 7))
        if path.stat().st_mtime_ns != seconds * 10**9 + 7:
            pytest.skip("the file system holds no such years")

    assert f"it was modified at {year}-" in (said := error_after(path, touch))
    assert "00.000000007" in said or "20.000000007" in said


def test_another_file_is_told_from_a_changed_one(path, tmp_path):
    (tmp_path / "other").write_bytes(bytes(5000))
    with path.open("rb") as file, (tmp_path / "other").open("rb") as other:
        expected, found = (FileIdentity.of(one.fileno()) for one in (file, other))
        with pytest.raises(OSError, match=f"inode {found.inode}, was {expected.inode}"):
            check_unchanged(other.fileno(), path, expected)


def test_a_file_that_the_system_cannot_tell_about_is_named(path):
    with path.open("rb") as file:
        identity = FileIdentity.of(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        check_unchanged(-1, path, identity)
    assert (raised.value.errno, raised.value.filename) == (errno.EBADF, str(path))


def test_errors_of_reading_are_given_the_name_of_the_file():
    for error, named in [
        (OSError(errno.EIO, "Input/output error"), (errno.EIO, "Input/output error", "t.bin")),
        (OSError("odd"), (None, "odd", "t.bin")),
        (FileNotFoundError(2, "none", "another"), (2, "none", "another")),
    ]:
        with pytest.raises(OSError, match=r".") as raised, naming("t.bin"):
            raise error
        assert (raised.value.errno, raised.value.strerror, raised.value.filename) == named
    with pytest.raises(ValueError, match="kept"), naming("t.bin"):
        raise ValueError("kept")
