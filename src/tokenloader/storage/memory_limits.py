"""Memory limits: how much memory this process may still take, of the machine and of its control groups.

Sources: proc_meminfo(5) for MemAvailable; the kernel's Documentation/admin-guide/cgroup-v2.rst, and
cgroup-v1/memory.rst.
"""

from __future__ import annotations

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping or being killed; None where the system does not tell.

    Page cache counts as available, in the control group too: the kernel gives it up when asked.
    """
    limits = [_machine_bytes(root), *_control_group_bytes(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _machine_bytes(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _control_group_bytes(root: Path) -> list[int | None]:
    """Bytes left in the process's control group and in each group above it, versions 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, usage, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        mount = root / "sys/fs/cgroup" / top
        # In a container the path may be the host's, of which only the top is mounted here.
        group = mount / path.lstrip("/")
        groups = [group, *group.parents] if group.is_dir() else [mount]
        left += [_group_bytes(one, limit, usage, cache) for one in groups if one.is_relative_to(mount)]
    return left


def _group_bytes(group: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = int((group / limit).read_text())  # "max" is no number: no limit
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, most - used + int(stat.get(cache, 0)))
