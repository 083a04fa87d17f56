"""How much memory may still be taken, from files as the kernel writes them."""

import pytest

from tokenloader.storage.memory_limits import available_bytes

GIB = 2**30
MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20971520 kB\n"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(path, most, used, cache):
    return {
        f"{path}/memory.max": most,
        f"{path}/memory.current": used,
        f"{path}/memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 7\n",
    }


def test_without_control_groups_it_is_what_the_machine_has_available(tmp_path):
    assert available_bytes(write(tmp_path, {"proc/meminfo": MEMINFO})) == 20 * GIB


def test_where_the_system_does_not_tell_it_is_unknown(tmp_path):
    assert available_bytes(tmp_path) is None
    assert available_bytes(write(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"})) is None


def test_on_this_machine_it_is_some_number_or_unknown():
    found = available_bytes()
    assert found is None or found > 0


@pytest.mark.parametrize("limited", ["sys/fs/cgroup/a", "sys/fs/cgroup/a/b"])
def test_a_control_group_or_one_above_it_may_allow_less(tmp_path, limited):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n"}
    files |= group("sys/fs/cgroup/a", "max\n", "999\n", 0)
    files |= group("sys/fs/cgroup/a/b", "max\n", "999\n", 0)
    files |= group(limited, f"{8 * GIB}\n", f"{3 * GIB}\n", GIB)
    assert available_bytes(write(tmp_path, files)) == 6 * GIB


def test_a_group_that_allows_more_than_the_machine_has_does_not_count(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n"}
    files |= group("sys/fs/cgroup/a", f"{800 * GIB}", "0", 0)
    assert available_bytes(write(tmp_path, files)) == 20 * GIB


def test_in_a_container_only_the_top_of_the_hierarchy_is_seen(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/docker/0123\n"}
    files |= group("sys/fs/cgroup", f"{2 * GIB}", f"{GIB}", 0)
    assert available_bytes(write(tmp_path, files)) == GIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"}
    files |= group("sys/fs/cgroup", "100", "200", 0)
    assert available_bytes(write(tmp_path, files)) == 0


def test_version_1_of_control_groups_counts_too(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/x/memory.stat": f"total_inactive_file {GIB}\n",
    }
    assert available_bytes(write(tmp_path, files)) == 3 * GIB
