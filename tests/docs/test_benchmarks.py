"""The benchmarks: a comparison of revisions matches every row, or lists it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import compare

    return compare


def test_a_row_is_compared_by_the_median_of_its_ratios_within_rounds(compare):
    row = ("scale", "open")
    costs = [(10.0, 11.0), (20.0, 18.0), (10.0, 30.0)]
    rounds = [{row: {"before": before, "now": now}} for before, now in costs]
    rows, not_compared = compare.match(rounds)
    assert not_compared == []
    assert [(row["before"], row["now"], row["now_over_before"]) for row in rows] == [(10, 18, 1.1)]
    assert rows[0]["ratios"] == [1.1, 0.9, 3.0]
    screen = compare.table(rows, not_compared)
    assert "1.100 (0.900 to 3.000)" in screen
    assert "slower by more than 5%: 1 of 1 rows" in screen


def test_a_row_of_one_side_or_without_a_figure_is_listed(compare):
    rounds = [
        {
            ("warm", "ours"): {"before": 1.0},
            ("warm", "ours, renamed"): {"now": 1.0},
            ("first", "load_file"): {"before": None, "now": None},
        }
    ]
    rows, not_compared = compare.match(rounds)
    assert rows == []
    screen = compare.table(rows, not_compared)
    assert "warm: ours: only before" in screen
    assert "warm: ours, renamed: only now" in screen
    assert "first: load_file: no ratio of [(None, None)]" in screen


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the revisions")
def test_the_code_is_compared_with_a_revision(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "compare", "HEAD", "scale", "--tiny"]
    command += ["--rounds", "1", "--gib", "0.001", "--json", str(tmp_path / "compare.json")]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert finished.returncode == 0, finished.stderr[-3000:]
    result = json.loads((tmp_path / "compare.json").read_text())
    assert "open, 1 GiB" in [row["row"] for row in result["rows"]]
    assert result["rounds"] == 1
