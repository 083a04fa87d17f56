"""Memory limits: how much memory this process may still take, of the machine and of its control groups.

Sources: proc_meminfo(5); the kernel's Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class MemoryLimit(NamedTuple):
    """A limit on the memory of the processes of a machine, or of a control group."""

    path: Path  # the file that states it, the same for all processes under the limit
    left_bytes: int  # what they can take without swapping or being killed


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Returns the limits on this process's memory, the machine's first; none where they are unknown.

    Page cache counts as left, in a control group too: the kernel gives it up when asked.
    """
    meminfo, mount = root / "proc/meminfo", root / "sys/fs/cgroup"
    limits = [
        MemoryLimit(meminfo, int(line.split()[1]) * 1024)
        for line in _lines(meminfo)
        if line.startswith("MemAvailable:")
    ]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _groups(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1 of control groups
            files = "memory.limit_in_bytes", "memory.usage_in_bytes"
            limits += _groups(mount / "memory", path, *files, "total_inactive_file")
    return limits


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process can take under all its limits; None if unknown."""
    return min((limit.left_bytes for limit in memory_limits(root)), default=None)


def _groups(mount: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[MemoryLimit]:
    """Yields the limits of a control group and of each group above it."""
    group = mount / path.lstrip("/")
    if not group.is_dir():  # in a container the path may be the host's, of which only the top is mounted
        group = mount
    for one in (group, *group.parents):
        if one.is_relative_to(mount):
            with suppress(OSError, ValueError):  # "max" is no number: no limit
                most, used = (int((one / name).read_text()) for name in (limit, usage))
                stat = dict(line.split() for line in _lines(one / "memory.stat"))
                yield MemoryLimit(one / limit, max(0, most - used + int(stat.get(cache, 0))))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
