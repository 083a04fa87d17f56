"""The log of the examples' runs: what it has after a kill, a full disk, and a resume."""

import errno
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SPEC = spec_from_file_location("run_log", EXAMPLES / "run_log.py")
run_log = module_from_spec(SPEC)
SPEC.loader.exec_module(run_log)

ROWS = [{"step": step, "loss": step / 8, "val_loss": 5e-324} for step in range(1, 6)]


@pytest.fixture
def path(tmp_path):
    for row in ROWS:
        run_log.append(tmp_path / "metrics.jsonl", row)
    return tmp_path / "metrics.jsonl"


def test_rows_are_a_json_object_a_line(path):
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    assert run_log.read(path) == ROWS


def test_a_last_line_that_was_cut_anywhere_is_dropped_with_a_word(path, capsys):
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(last + 1):
        path.write_bytes(whole[: len(whole) - cut])
        rows = ROWS if cut <= 1 else ROWS[:-1]  # only its end is missing, or nothing
        run_log.drop_after(path, 9)
        assert capsys.readouterr().out == (
            f"{path}: dropped line 5, the last, which was cut off\n" if 1 < cut < last else ""
        )
        run_log.append(path, {"step": 6})
        assert run_log.read(path) == [*rows, {"step": 6}]
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\xff\xfe", b'{"step": 6, "loss": "\xc3'])
def test_a_last_line_of_anything_else_is_dropped(path, tail):
    path.write_bytes(path.read_bytes() + tail)
    run_log.drop_after(path, 4)
    assert run_log.read(path) == ROWS[:4]


def test_a_damaged_line_before_the_last_is_named(path):
    path.write_bytes(path.read_bytes().replace(b'{"step": 2', b'{"step'))
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is not JSON; remove it$"):
        run_log.drop_after(path, 4)


def test_no_file_is_no_rows(tmp_path):
    assert run_log.read(tmp_path / "metrics.jsonl") == []
    run_log.drop_after(tmp_path / "metrics.jsonl", 0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_what_a_killed_run_left_is_replaced(path):
    path.with_suffix(".tmp").write_text('{"step": 1')
    run_log.drop_after(path, 2)
    assert run_log.read(path) == ROWS[:2]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is full")
def test_a_full_disk_is_an_error_that_names_the_file_and_loses_nothing(path):
    full = path.parent / "full.jsonl"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match=str(full)) as raised:
        run_log.append(full, ROWS[0])
    assert raised.value.errno == errno.ENOSPC
    before = path.read_bytes()
    path.with_suffix(".tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=str(path.with_suffix(".tmp"))) as raised:
        run_log.drop_after(path, 2)
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert not path.with_suffix(".tmp").is_symlink()
