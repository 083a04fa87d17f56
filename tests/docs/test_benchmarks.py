"""The benchmarks: a comparison of revisions matches every row, or lists it; limits on a disk; an answer."""

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def compare(import_benchmark):
    return import_benchmark("compare")


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


@pytest.fixture
def disk_limits(import_benchmark):
    return import_benchmark("disk_limits")


def test_limits_are_written_as_each_version_of_control_groups_has_them(disk_limits):
    limits = disk_limits.DiskLimits(3000, 125_000_000, memory_bytes=2**30)
    assert disk_limits.settings_of(limits, "8:0", "ours", unified=False) == {
        "blkio/ours/blkio.throttle.read_iops_device": "8:0 3000",
        "blkio/ours/blkio.throttle.read_bps_device": "8:0 125000000",
        "memory/ours/memory.limit_in_bytes": "1073741824",
    }
    assert disk_limits.settings_of(limits, "8:0", "ours", unified=True) == {
        "ours/io.max": "8:0 riops=3000 rbps=125000000",
        "ours/memory.max": "1073741824",
    }


def test_what_is_not_limited_is_counted_all_the_same(disk_limits):
    nothing = disk_limits.DiskLimits()
    assert disk_limits.settings_of(nothing, "8:0", "ours", unified=False) == {
        "blkio/ours/blkio.throttle.read_iops_device": "8:0 0",
        "blkio/ours/blkio.throttle.read_bps_device": "8:0 0",
    }
    unified = disk_limits.settings_of(nothing, "8:0", "ours", unified=True)
    assert unified == {"ours/io.max": "8:0 riops=max rbps=max"}


@pytest.mark.parametrize(
    "counters",
    [
        {
            "blkio.throttle.io_serviced": "8:16 Read 99\n8:0 Read 3\n8:0 Write 7\nTotal 109\n",
            "blkio.throttle.io_service_bytes": "8:16 Read 98\n8:0 Read 4096\n8:0 Write 7\nTotal 4201\n",
        },
        {"io.stat": "8:16 rbytes=98 wbytes=1 rios=99 wios=1\n8:0 rbytes=4096 wbytes=7 rios=3 wios=7\n"},
    ],
    ids=["version 1", "version 2"],
)
def test_the_reads_of_one_disk_are_counted(disk_limits, counters):
    assert disk_limits.parse_reads(counters, "8:0") == (3, 4096)
    assert disk_limits.parse_reads(counters, "8:32") == (0, 0)


def test_limits_are_on_the_whole_disk_of_a_partition(disk_limits, tmp_path):
    partition = tmp_path / "block/sda/sda1"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (partition / "dev").write_text("8:1\n")
    (partition.parent / "dev").write_text("8:0\n")
    (tmp_path / "8:1").symlink_to(partition)
    (tmp_path / "8:0").symlink_to(partition.parent)
    assert disk_limits.whole_disk(os.makedev(8, 1), tmp_path) == "8:0"
    assert disk_limits.whole_disk(os.makedev(8, 0), tmp_path) == "8:0"
    with pytest.raises(OSError, match="device 0:45 is not a disk; expected a file on one"):
        disk_limits.whole_disk(os.makedev(0, 45), tmp_path)


def test_a_group_counts_the_reads_of_a_process_that_joined_and_is_removed_after_it(disk_limits, tmp_path):
    if reason := disk_limits.why_not(tmp_path):
        pytest.skip(reason)
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    spawn = multiprocessing.get_context("spawn")
    limits = disk_limits.DiskLimits(reads_per_second=10**6, memory_bytes=2**30)
    with disk_limits.limited(path, limits) as group, ProcessPoolExecutor(1, spawn) as pool:
        pool.submit(group.join).result()
        before = group.reads()
        assert len(pool.submit(path.read_bytes).result()) == 1 << 20
        assert group.reads().num_bytes - before.num_bytes >= 1 << 20
        assert group.reads().num_requests > before.num_requests
    assert not any(folder.exists() for folder in group.folders)


def test_a_group_is_removed_after_an_error(disk_limits, tmp_path):
    if reason := disk_limits.why_not(tmp_path):
        pytest.skip(reason)
    with suppress(KeyError), disk_limits.limited(tmp_path, disk_limits.DiskLimits(1)) as group:
        assert all(folder.exists() for folder in group.folders)
        raise KeyError
    assert not any(folder.exists() for folder in group.folders)


@pytest.mark.parametrize(("fio", "told"), [(True, "0.93 of fio"), (False, "0.95 of SequentialWindows")])
def test_the_answer_of_slow_is_a_line_of_the_readme(import_benchmark, fio, told):
    report = import_benchmark("report")
    times = {"ShuffledEpochs": 18.04, "SequentialWindows": 0.951}
    times |= {"fio, 1 MiB, depth 8": 0.932} if fio else {}
    ours = {"windows_per_second": 57_012.3, "is_times": times}
    rows = [{"limits": "unlimited", "contestants": {"ShuffledBlocks": ours}}]
    environment = {"processor": "Z80", "cores": 1, "memory_gib": 0.1, "platform": "cpu"}
    environment |= {"versions": {"jax": "0.9"}, "date": "1976-07-01"}
    slow = {"environment": environment, "gib": 19.09, "rows": rows}
    section = report.results_section({"slow": slow})
    question = "| `ShuffledBlocks` on 19.09 GiB, page cache dropped, the disk held to a rate"
    line = f"unlimited: 57,012 windows/s, {told} in file order, 18.0 times `ShuffledEpochs` |"
    assert f"\n{question} | {line}\n" in section
    assert "\nZ80, 1 cores, 0 GiB, jax 0.9 on cpu, 1976-07-01: slow.\n" in section
