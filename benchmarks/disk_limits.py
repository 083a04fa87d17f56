"""Disk limits: a control group that holds what its processes read from a disk to a rate, and counts it.

Linux has control groups of two kinds: version 1, where each controller has a tree of its own (blkio,
memory), and version 2, with one tree for all. Reads ahead of use are limited and counted as others are; a
request that is larger than the disk takes counts as several.

Sources: admin-guide/cgroup-v1/blkio-controller.rst and admin-guide/cgroup-v2.rst of the Linux kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_GROUPS, _DEVICES = Path("/sys/fs/cgroup"), Path("/sys/dev/block")
_COUNTERS = ("blkio.throttle.io_serviced", "blkio.throttle.io_service_bytes", "io.stat")


@dataclass(frozen=True)
class DiskLimits:
    """What a group may take; None: whatever there is."""

    reads_per_second: int | None = None
    bytes_per_second: int | None = None
    memory_bytes: int | None = None  # with the pages that its reads put into the page cache


class Reads(NamedTuple):
    """What was read from a disk."""

    num_requests: int
    num_bytes: int


@dataclass(frozen=True)
class ControlGroup:
    """A control group whose reads of one disk are limited. Processes may send it to each other."""

    folders: tuple[Path, ...]
    disk: str  # MAJOR:MINOR

    def join(self) -> None:
        """Moves this process, with its threads, into the group; what it has in memory is not counted."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text("0")

    def reads(self) -> Reads:
        """Returns what the group has asked the disk for since it was made, with what is held back still."""
        files = [folder / name for folder in self.folders for name in _COUNTERS]
        return parse_reads({file.name: file.read_text() for file in files if file.exists()}, self.disk)


@contextmanager
def limited(path: Path, limits: DiskLimits) -> Iterator[ControlGroup]:
    """Makes a group with limits on the disk that a path is on, and removes it again.

    Whoever joined must have ended by then. OSError where the path is on no disk, where the system has no
    such groups, or does not permit to make one.
    """
    disk = whole_disk(path.stat().st_dev)
    controllers = _GROUPS / "cgroup.controllers"
    unified = controllers.exists() and "io" in controllers.read_text().split()
    settings = settings_of(limits, disk, f"tokenloader-{os.getpid()}", unified=unified)
    group = ControlGroup(tuple({(_GROUPS / name).parent: None for name in settings}), disk)
    with ExitStack() as stack:
        if unified:
            (_GROUPS / "cgroup.subtree_control").write_text("+io +memory")
        for folder in group.folders:
            folder.mkdir()
            stack.callback(folder.rmdir)
        for name, text in settings.items():
            (_GROUPS / name).write_text(text)
        yield group


def why_not(path: Path) -> str | None:
    """Returns why reads of a path cannot be limited here; None if they can."""
    try:
        with limited(path, DiskLimits(10**6, 10**12, 2**40)):
            return None
    except OSError as error:
        return f"reads of {path} cannot be limited: {error}"


def settings_of(limits: DiskLimits, disk: str, name: str, *, unified: bool) -> dict[str, str]:
    """Returns what to write into which file for a group of that name; unified: of version 2."""
    reads, num_bytes, memory = limits.reads_per_second, limits.bytes_per_second, limits.memory_bytes
    if unified:
        settings = {f"{name}/io.max": f"{disk} riops={reads or 'max'} rbps={num_bytes or 'max'}"}
        memory_file = f"{name}/memory.max"
    else:
        blkio, memory_file = f"blkio/{name}/blkio.throttle", f"memory/{name}/memory.limit_in_bytes"
        settings = {  # 0: no limit
            f"{blkio}.read_iops_device": f"{disk} {reads or 0}",
            f"{blkio}.read_bps_device": f"{disk} {num_bytes or 0}",
        }
    return settings if memory is None else {**settings, memory_file: str(memory)}


def parse_reads(counters: dict[str, str], disk: str) -> Reads:
    """Finds the reads of a disk in the counters of a group, file names and their texts."""
    lines = {name: [line.split() for line in text.splitlines()] for name, text in counters.items()}
    if "io.stat" in lines:
        fields = [field.split("=") for one, *rest in lines["io.stat"] if one == disk for field in rest]
        number = {"rios": 0, "rbytes": 0, **{key: int(value) for key, value in fields}}
        return Reads(number["rios"], number["rbytes"])
    found = [[int(line[2]) for line in lines[name] if line[:2] == [disk, "Read"]] for name in _COUNTERS[:2]]
    return Reads(sum(found[0]), sum(found[1]))


def whole_disk(device: int, devices: Path = _DEVICES) -> str:
    """Returns MAJOR:MINOR of the disk that a device (as in st_dev) is, or is a partition of."""
    number = f"{os.major(device)}:{os.minor(device)}"
    folder = (devices / number).resolve()
    if not folder.exists():
        raise OSError(f"device {number} is not a disk; expected a file on one (see --file, or TMPDIR)")
    disk = folder.parent if (folder / "partition").exists() else folder
    return (disk / "dev").read_text().strip()
