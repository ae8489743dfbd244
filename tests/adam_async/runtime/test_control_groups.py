"""The smallest limit on the path of the process's groups counts, in both versions."""

import pytest

from adam_async.runtime.control_groups import (
    cores_of_quota,
    group_folders,
    left_in_group,
    memory_left,
    quota_cores,
)

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@pytest.mark.parametrize(
    ("groups", "mounts", "controller", "folders"),
    [
        ("0::/\n", V2, "memory", ["/sys/fs/cgroup"]),
        (
            "0::/system.slice/job.service\n",
            V2,
            "cpu",
            ["/sys/fs/cgroup/system.slice/job.service", "/sys/fs/cgroup/system.slice", "/sys/fs/cgroup"],
        ),
        (
            "5:memory:/slurm/uid_1/job_2\n4:cpuacct,cpu:/\n1:name=systemd:/init\n",
            V1,
            "memory",
            [f"/sys/fs/cgroup/memory{end}" for end in ("/slurm/uid_1/job_2", "/slurm/uid_1", "/slurm", "")],
        ),
        ("4:cpuacct,cpu:/a:b\n", V1, "cpu", ["/sys/fs/cgroup/cpu,cpuacct/a:b", "/sys/fs/cgroup/cpu,cpuacct"]),
        # Both versions at once: the controllers of version 1, and a mount of version 2 without any.
        ("4:cpu:/in\n0::/other\n", V1 + V2, "memory", ["/sys/fs/cgroup/other", "/sys/fs/cgroup"]),
        # A container of Docker without a namespace of its own: its mount shows only its group.
        (
            "0::/docker/abc/inner\n",
            V2.replace(" / ", " /docker/abc ", 1),
            "cpu",
            ["/sys/fs/cgroup/inner", "/sys/fs/cgroup"],
        ),
        ("0::/docker/abc\n", V2.replace(" / ", " /docker/abc ", 1), "cpu", ["/sys/fs/cgroup"]),
        # The process is outside of the namespace's root.
        ("0::/../other\n", V2, "cpu", ["/sys/fs/cgroup"]),
        ("0::/docker/other\n", V2.replace(" / ", " /docker/abc ", 1), "cpu", ["/sys/fs/cgroup"]),
        ("", V2, "cpu", []),
        ("0::/\n", "", "cpu", []),
        ("nonsense\n::\n", "nonsense\n - \n30 - cgroup2\n", "cpu", []),
    ],
)
def test_the_groups_are_those_on_the_way_to_the_process(
    groups: str, mounts: str, controller: str, folders: list[str]
) -> None:
    assert group_folders(groups, mounts, controller) == folders


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"/a/b/cpu.max": "150000 100000", "/a/cpu.max": "400000 100000"}, 2),
        ({"/a/b/cpu.max": "max 100000", "/a/cpu.max": "400000 100000"}, 4),
        ({"/a/b/cpu.max": "max 100000"}, 0),
        ({"/a/b/cpu.cfs_quota_us": "250000\n", "/a/b/cpu.cfs_period_us": "100000\n"}, 3),
        ({"/a/b/cpu.cfs_quota_us": "-1\n", "/a/b/cpu.cfs_period_us": "100000\n"}, 0),
        ({"/a/cpu.cfs_quota_us": "50000\n", "/a/cpu.cfs_period_us": "100000\n"}, 1),
        ({"/a/cpu.cfs_quota_us": "50000\n"}, 0),
        ({}, 0),
    ],
)
def test_the_smallest_quota_counts(files: dict[str, str], cores: int) -> None:
    assert quota_cores(["/a/b", "/a"], lambda path: files.get(path, "")) == cores


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"/a/b/memory.max": "1000", "/a/b/memory.current": "400", "/a/memory.max": "5000"}, 600),
        ({"/a/b/memory.max": "max", "/a/memory.max": "5000", "/a/memory.current": "1"}, 4999),
        ({"/a/b/memory.limit_in_bytes": "1000", "/a/b/memory.usage_in_bytes": "400"}, 600),
        ({"/a/memory.limit_in_bytes": "1000", "/a/b/memory.limit_in_bytes": "9223372036854771712"}, 1000),
        ({"/a/b/memory.max": "max"}, None),
        ({}, None),
    ],
)
def test_the_smallest_rest_of_memory_counts(files: dict[str, str], left: int | None) -> None:
    assert memory_left(["/a/b", "/a"], lambda path: files.get(path, "")) == left


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", 0),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("", 0),
        ("200000", 0),
        ("-1 100000", 0),
        ("200000 0", 0),
    ],
)
def test_the_quota_of_a_control_group_is_a_number_of_cores(text: str, cores: int) -> None:
    assert cores_of_quota(text) == cores


@pytest.mark.parametrize(
    ("limit", "used", "stat", "left"),
    [
        ("max", "100", "", None),
        ("", "", "", None),
        ("1000\n", "300\n", "anon 100\ninactive_file 50\n", 750),
        ("1000", "300", "inactive_file 50\ntotal_inactive_file 200", 900),
        ("1000", "300", "", 700),
        ("1000", "", "inactive_file x", 1000),
        ("1000", "300", "inactive_file 400", 1000),
        ("1000", "1200", "", 0),
    ],
)
def test_a_control_group_leaves_its_limit_less_its_use(
    limit: str, used: str, stat: str, left: int | None
) -> None:
    assert left_in_group(limit, used, stat) == left
