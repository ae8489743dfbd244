"""What is said of the machine and the process is true of them."""

import mmap
import os
import platform
import subprocess
import sys

import pytest

from adam_async.machine import (
    blas_threads,
    cache_kb,
    describe_machine,
    installed_version,
    memory_mb,
    peak_rss_mb,
    process_memory,
    usable_cores,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel says")


@linux
def test_the_peak_grows_with_memory_that_was_touched_and_stays() -> None:
    before = peak_rss_mb()
    size = int(before + 64) << 20
    with mmap.mmap(-1, size) as memory:
        memory[:] = bytes(size)
    after = peak_rss_mb()

    assert after > before + 60


@linux
@pytest.mark.slow
def test_a_child_does_not_report_its_parents_peak() -> None:
    with mmap.mmap(-1, 400 << 20) as memory:
        memory[:] = bytes(400 << 20)
    program = "from adam_async.machine import peak_rss_mb; print(peak_rss_mb())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert peak_rss_mb() > 400
    assert 5 < float(told) < 200


def test_a_process_says_which_one_it_is() -> None:
    memory = process_memory()

    assert (memory.host, memory.pid) == (platform.node(), os.getpid())
    assert memory.peak_rss_mb > 5


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
