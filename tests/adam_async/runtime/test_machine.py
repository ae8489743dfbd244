"""The description of machine and process is true of them."""

import mmap
import os
import platform
import subprocess
import sys

import pytest

from adam_async.runtime import machine
from adam_async.runtime.machine import (
    available_bytes,
    blas_threads,
    cache_kb,
    cores_of_quota,
    count_listed,
    describe_machine,
    group_folders,
    installed_version,
    left_in_group,
    memory_left,
    memory_mb,
    memory_nodes,
    peak_rss_mb,
    pinned_cpus,
    process_memory,
    quota_cores,
    usable_cores,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel says")


@linux
@pytest.mark.thorough
def test_the_peak_grows_with_memory_that_was_touched_and_stays() -> None:
    before = peak_rss_mb()
    size = int(before + 64) << 20
    with mmap.mmap(-1, size) as memory:
        memory[:: mmap.PAGESIZE] = bytes(-(-size // mmap.PAGESIZE))  # a byte of every page
    after = peak_rss_mb()

    assert after > before + 60


@linux
@pytest.mark.slow
def test_a_child_does_not_report_its_parents_peak() -> None:
    with mmap.mmap(-1, 400 << 20) as memory:
        memory[:] = bytes(400 << 20)
    program = "from adam_async.runtime.machine import peak_rss_mb; print(peak_rss_mb())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert peak_rss_mb() > 400
    assert 5 < float(told) < 200


def test_a_process_says_which_one_it_is() -> None:
    memory = process_memory()

    assert (memory.host, memory.pid) == (platform.node(), os.getpid())
    assert memory.peak_rss_mb > 5
    assert 0 <= memory.age_s <= process_memory().age_s < 86400


@linux
def test_cores_memory_and_caches_are_plausible() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert (memory_mb() or 0) > 100
    level_2 = cache_kb(2)
    assert level_2 is None or 64 <= level_2 <= 1 << 20
    assert cache_kb(9) is None


def test_fewer_cores_for_the_process_are_noticed() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity here")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_threads_of_workers_go_round_the_cores_of_the_process() -> None:
    usable = sorted(os.sched_getaffinity(0))
    workers = [pinned_cpus(threads=3, first=3 * number) for number in range(len(usable))]

    assert [cpu for cpus in workers for cpu in cpus or ()] == usable * 3
    assert pinned_cpus(threads=1, first=len(usable) - 1) == (usable[-1],)


def test_without_affinity_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)

    assert pinned_cpus(threads=2, first=0) is None


@pytest.mark.parametrize(
    ("text", "count"), [("0\n", 1), ("0-1\n", 2), ("0-3,8,10-11\n", 7), ("", 0), ("\n", 0)]
)
def test_lists_of_the_kernel_are_counted(text: str, count: int) -> None:
    assert count_listed(text) == count


def test_there_is_a_memory_node_everywhere() -> None:
    assert 1 <= memory_nodes() <= 1024


def test_installed_packages_have_a_version_and_others_none() -> None:
    assert installed_version("numpy") == describe_machine(loop="asyncio.unix_events").numpy
    assert installed_version("no-such-package-here") is None


def test_several_blas_threads_are_warned_of() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    if usable_cores() < 2:
        pytest.skip("BLAS has one thread on one core")
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        assert blas_threads() == 2
        assert "OPENBLAS_NUM_THREADS=1" in describe_machine(loop="uvloop").warnings[0]
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        assert describe_machine(loop="uvloop").warnings == []


def test_the_loop_is_named_by_its_package() -> None:
    assert describe_machine(loop="asyncio.unix_events").loop == "asyncio"


MOUNTS = {
    "/proc/self/cgroup": "0::/job\n",
    "/proc/self/mountinfo": "30 23 0:26 / /groups rw - cgroup2 cgroup2 rw\n",
}
"""A process in an inner group, of version 2."""


def test_the_limit_of_a_control_group_is_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**MOUNTS, "/proc/meminfo": "MemAvailable: 8 kB", "/groups/job/memory.current": "1000"}
    monkeypatch.setattr(machine, "_text", lambda path: files.get(path, ""))
    assert available_bytes() == 8192
    files["/groups/job/memory.max"] = "5000"
    assert available_bytes() == 4000


def test_a_quota_below_the_affinity_limits_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = usable_cores()
    files = {**MOUNTS, "/groups/job/cpu.max": "50000 100000"}
    monkeypatch.setattr(machine, "_text", lambda path: files.get(path, ""))
    assert usable_cores() == 1 <= everything


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
