"""How much one announcement has read, by the settings of made-up disks, and of one here."""

import os

import pytest

from tokenloader.storage.request_size import announced_bytes

COMMON_KIB = 128


@pytest.fixture
def name(tmp_path):
    """What Linux calls the device of a file below tmp_path: its numbers."""
    device = tmp_path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


@pytest.fixture
def announced_kib(tmp_path, name):
    """What is announced of a file at a time, KiB, where /sys says some things of its device."""

    def announced_kib(disk="devices/pci0/sdb", **settings):
        (tmp_path / disk).mkdir(parents=True)
        (tmp_path / "dev/block").mkdir(parents=True)
        (tmp_path / "dev/block" / name).symlink_to(tmp_path / disk)
        for folder, texts in settings.items():
            path = {"bdi": f"class/bdi/{name}", "whole": "devices/pci0/sdb/queue"}[folder]
            (tmp_path / path).mkdir(parents=True)
            for setting, text in texts.items():
                (tmp_path / path / setting).write_text(text)
        with (tmp_path / "file").open("wb") as file:
            return announced_bytes(file.fileno(), tmp_path) / 1024

    return announced_kib


@pytest.mark.parametrize("disk", ["devices/pci0/sdb", "devices/pci0/sdb/sdb1"])  # a whole one, a partition
@pytest.mark.parametrize(
    ("largest_request", "read_ahead", "expected"), [(1280, 128, 1280), (256, 4096, 4096), (64, 0, 128)]
)
def test_the_greater_of_a_disks_largest_request_and_read_ahead_window_is_announced(
    announced_kib, disk, largest_request, read_ahead, expected
):
    queue = {"max_sectors_kb": f"{largest_request}\n", "read_ahead_kb": f"{read_ahead}\n"}
    assert announced_kib(disk, whole=queue) == expected


def test_a_file_system_without_a_disk_has_a_read_ahead_window(announced_kib):
    assert announced_kib(bdi={"read_ahead_kb": "15360\n"}) == 15360  # as of NFS, or FUSE


@pytest.mark.parametrize("text", ["", "unknown\n"])
def test_what_is_not_told_or_no_number_is_taken_for_what_is_common(announced_kib, text):
    assert announced_kib(bdi={"read_ahead_kb": text}) == COMMON_KIB


def test_a_system_that_tells_nothing_has_what_is_common(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        assert announced_bytes(file.fileno(), tmp_path / "none") == COMMON_KIB << 10


def test_a_file_here_has_what_is_common_or_more(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        assert announced_bytes(file.fileno()) >= COMMON_KIB << 10
