"""Memory and core limits from control groups, on file trees like those of real machines."""

from pathlib import Path

import pytest

from octavo.platforms.cgroups import ControlGroups
from tests.platforms.trees import GIB, v2, write


def test_version_2_in_a_container(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon {GIB}\nactive_file {GIB // 2}\ninactive_file {GIB}\nfile {2 * GIB}\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    groups = ControlGroups.of_this_process(write(tmp_path, v2() | files))
    assert groups.memory() == (4 * GIB, 4 * GIB - (3 * GIB - GIB * 3 // 2))  # file pages can be given up
    assert groups.cores() == 1.5


def test_the_tightest_level_counts_whichever_it_is(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/a.slice"
    files = {
        f"{base}/memory.max": f"{2 * GIB}\n",
        f"{base}/memory.current": f"{GIB}\n",
        f"{base}/cpu.max": "max 100000\n",
        f"{base}/b.scope/memory.max": "max\n",
        f"{base}/b.scope/memory.current": f"{GIB // 4}\n",
        f"{base}/b.scope/cpu.max": "400000 100000\n",
    }
    groups = ControlGroups.of_this_process(write(tmp_path, v2("/a.slice/b.scope") | files))
    assert groups.memory() == (2 * GIB, GIB)
    assert groups.cores() == 4.0


def test_a_mount_that_shows_a_part_of_the_tree(tmp_path: Path) -> None:
    files = v2("/docker/abc/inner", mount_root="/docker/abc") | {
        "sys/fs/cgroup/inner/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/inner/memory.current": "0\n",
    }
    assert ControlGroups.of_this_process(write(tmp_path, files)).memory() == (GIB, GIB)


@pytest.mark.parametrize("group", ["/elsewhere", "/../.."])
def test_a_group_outside_of_what_is_mounted_falls_back_to_the_mount(tmp_path: Path, group: str) -> None:
    files = v2(group, mount_root="/docker/abc" if group == "/elsewhere" else "/") | {
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    }
    assert ControlGroups.of_this_process(write(tmp_path, files)).memory() == (GIB, GIB)


def test_version_1_and_its_way_to_write_unlimited(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
        "proc/self/mountinfo": (
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        ),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB // 2}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB // 4}\ninactive_file 7\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    }
    groups = ControlGroups.of_this_process(write(tmp_path, files))
    assert groups.memory() == (GIB, GIB - GIB // 4)
    assert groups.cores() == 2.5


def test_no_control_groups_is_no_limit(tmp_path: Path) -> None:
    groups = ControlGroups.of_this_process(tmp_path)
    assert groups.memory() == (None, None)
    assert groups.cores() is None
