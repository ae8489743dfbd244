"""The machine of a run, for reports and doctor.

Memory and cache sizes come from ``/proc`` and ``/sys``, and are None on systems without these folders. The
small files of the kernel answer at once, so they are read without the disk's thread.

The process's control groups (cgroups, versions 1 and 2) limit its processor time and memory. The limit of any
group between the root and the process binds: container engines limit an outer group, Slurm and systemd inner
ones.
"""

import os
import platform
import resource
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import util
from pathlib import PurePosixPath
from typing import Any

import msgspec

from adam_async.runtime.clock import fine_clock

_BEGAN_S = fine_clock()
"""Time at which this module was imported, soon after the process started, in seconds of `fine_clock`."""


class Blas(msgspec.Struct, frozen=True, kw_only=True):
    """The library behind numpy's matrix products."""

    name: str
    """Name and version, from numpy's build."""
    threads: int | None
    """Number of threads that one matrix product may use; None without threadpoolctl or a BLAS."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine and the software on it. Sizes are in MiB and KiB; None for an unknown fact."""

    host: str
    system: str
    """Operating system and its release."""
    processor: str
    cores: int
    """Number of cores that this process may use."""
    memory_mb: int | None
    l2_kb: int | None
    """Size of one core's second-level cache, in KiB."""
    l3_kb: int | None
    """Size of the third-level cache that core 0 shares with other cores, in KiB."""
    memory_nodes: int
    """Number of memory nodes (NUMA)."""
    python: str
    numpy: str
    blas: Blas
    loop: str
    """Module of the event loop: ``uvloop`` or ``asyncio``."""
    uvloop: str | None
    """Version of uvloop; None if not installed."""
    warnings: list[str]
    """Settings of this machine that make runs slower."""


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a role, its peak memory and its processor time."""

    host: str
    pid: int
    peak_rss_mb: float
    """Largest resident set so far, in MiB."""
    age_s: float = 0.0
    """Time since the import of this module, soon after the start of the process, in seconds."""
    cpu_s: float = 0.0
    """Processor time of the process so far, in seconds."""


def describe_machine(*, loop: str) -> Machine:
    """Describe this machine.

    Args:
        loop: Module of the running event loop's class, such as ``type(loop).__module__``.
    """
    blas = Blas(name=blas_name(), threads=blas_threads())
    return Machine(
        host=platform.node(),
        system=f"{platform.system()} {platform.release()}",
        processor=processor_name(),
        cores=usable_cores(),
        memory_mb=memory_mb(),
        l2_kb=cache_kb(2),
        l3_kb=cache_kb(3),
        memory_nodes=memory_nodes(),
        python=platform.python_version(),
        numpy=installed_version("numpy") or "",
        blas=blas,
        loop=loop.partition(".")[0],
        uvloop=installed_version("uvloop"),
        warnings=_warnings(blas),
    )


def numerics() -> dict[str, str]:
    """Return the facts that last bits of a computation depend on: libraries, BLAS threads, processor."""
    threads = blas_threads()
    return {
        "adam-async": installed_version("adam-async") or "",
        "python": platform.python_version(),
        "numpy": installed_version("numpy") or "",
        "numba": installed_version("numba") or "",
        "blas": blas_name(),
        "blas threads": "" if threads is None else str(threads),
        "processor": processor_name(),
    }


@cache
def apply_numerics() -> Mapping[str, str]:
    """Return the facts that last bits of applied pushes depend on, for `cluster_map.NUMERICS`.

    BLAS forms the products of factors, and libm the powers of Adam. All other arithmetic gives the same bits
    with all kernels and registers.
    """
    facts = numerics()
    libc = " ".join(platform.libc_ver())
    return {name: facts[name] for name in ("adam-async", "numpy", "blas", "blas threads")} | {
        "blas core": blas_core(),
        "libc": libc.strip(),
    }


def process_memory() -> ProcessMemory:
    """Describe this process, its peak memory and its age, for a role's statistics."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessMemory(
        host=platform.node(),
        pid=os.getpid(),
        peak_rss_mb=round(peak_rss_mb(), 1),
        age_s=round(fine_clock() - _BEGAN_S, 3),
        cpu_s=round(used.ru_utime + used.ru_stime, 3),
    )


def peak_rss_mb() -> float:
    """Return the largest resident set of this process so far, in MiB.

    On Linux the figure comes from ``/proc``. There the figure of ``getrusage`` survives ``exec``, so a child
    would report its parent's size.
    """
    kib = _fields("/proc/self/status").get("VmHWM")
    if kib is not None:
        return int(kib.split()[0]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def usable_cores() -> int:
    """Return the number of cores that this process may use by its affinity and quotas; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, quota_cores(_groups("cpu"), _text) or cores)


def pinned_cpus(*, threads: int, first: int) -> tuple[int, ...] | None:
    """Choose a CPU for each of some threads, from the CPUs of this process.

    Args:
        first: Number of threads that have CPUs already, such as other workers' threads on this machine. The
            choice begins after their CPUs, and cycles through all CPUs.

    Returns:
        The CPU of each thread; None if the system cannot pin threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    return tuple(usable[(first + number) % len(usable)] for number in range(threads))


def memory_nodes() -> int:
    """Return the machine's number of memory nodes, at least 1."""
    return count_listed(_text("/sys/devices/system/node/online")) or 1


def count_listed(text: str) -> int:
    """Count the numbers of a list in the kernel's notation, such as ``0-3,8``."""
    total = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            total += (int(last) if last.isdigit() else int(first)) - int(first) + 1
    return total


def memory_mb() -> int | None:
    """Return the machine's memory in MiB; None if unknown."""
    total = _fields("/proc/meminfo").get("MemTotal")
    return int(total.split()[0]) // 1024 if total is not None else None


def available_bytes() -> int:
    """Return the available bytes of the machine's memory, or of a control group's if it has less.

    Without either figure the result is a gibibyte.
    """
    found = _fields("/proc/meminfo").get("MemAvailable")
    sizes = [int(found.split()[0]) << 10] if found is not None else []
    left = memory_left(_groups("memory"), _text)
    if left is not None:
        sizes.append(left)
    return min(sizes, default=1 << 30)


def cache_kb(level: int) -> int | None:
    """Return the size of core 0's cache at one level, in KiB; None if unknown."""
    for index in range(8):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        size = _text(f"{folder}/size").strip()
        if _text(f"{folder}/level").strip() == str(level) and size.endswith("K"):
            return int(size[:-1])
    return None


def processor_name() -> str:
    """Return the name of the processor."""
    return _fields("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine()


def blas_name() -> str:
    """Return name and version of the BLAS that numpy was built with."""
    import numpy as np  # only here: commands count cores before they import NumPy

    built: Mapping[str, Any] = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def blas_threads() -> int | None:
    """Return the maximum number of threads for one matrix product; None without threadpoolctl or a BLAS."""
    if util.find_spec("threadpoolctl") is None:
        return None
    from threadpoolctl import threadpool_info

    counts = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return max(counts, default=None)


def blas_core() -> str:
    """Return the processor kind for which BLAS chose its kernels; empty without threadpoolctl."""
    if util.find_spec("threadpoolctl") is None:
        return ""
    from threadpoolctl import threadpool_info

    cores = {pool.get("architecture") or "" for pool in threadpool_info() if pool["user_api"] == "blas"}
    return ", ".join(sorted(cores))


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    from importlib import metadata  # takes long to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _warnings(blas: Blas) -> list[str]:
    if blas.threads is None or blas.threads == 1:
        return []
    warning = (
        f"BLAS may use {blas.threads} threads per product, which compete with the compute threads; "
        "set OPENBLAS_NUM_THREADS=1 before numpy is imported"
    )
    return [warning]


def _fields(path: str) -> dict[str, str]:
    """Read the lines ``name: value`` of a kernel file; the first of repeated names counts."""
    found: dict[str, str] = {}
    for line in _text(path).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _groups(controller: str) -> list[str]:
    return group_folders(_text("/proc/self/cgroup"), _text("/proc/self/mountinfo"), controller)


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


# --- control groups ------------------------------------------------------------------------------


MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a group with the limit and use of its memory; versions 2 and 1."""


def group_folders(groups: str, mounts: str, controller: str) -> list[str]:
    """Return a process's group folders for one controller, including all outer groups.

    Args:
        groups: Content of ``/proc/self/cgroup``.
        mounts: Content of ``/proc/self/mountinfo``.
        controller: Such as ``memory``.
    """
    paths: dict[str, str] = {}
    for line in groups.splitlines():
        names, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(names.split(","), path))  # version 2 has no names
    found: list[str] = []
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        fields, (system, _, options) = mount.split(), (*kind.split(), "", "", "")[:3]
        name = {"cgroup2": "", "cgroup": controller}.get(system)
        if name not in paths or len(fields) < 5 or (name and name not in options.split(",")):
            continue
        top, own = PurePosixPath(fields[4]), PurePosixPath(paths[name])
        # A container may show only the group that its root is.
        inner = own.relative_to(fields[3]) if own.is_relative_to(fields[3]) and ".." not in own.parts else ""
        folder = top / inner
        found += [str(each) for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return found


def quota_cores(folders: list[str], read: Callable[[str], str]) -> int:
    """Return the number of cores that the smallest quota permits, rounded up; 0 for no quota.

    Args:
        folders: Folders of groups.
        read: Returns a file's content; empty if the file is absent.
    """
    found = []
    for folder in folders:
        quota, period = (read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        found += [cores_of_quota(read(f"{folder}/cpu.max")), cores_of_quota(f"{quota} {period}")]
    return min(filter(None, found), default=0)


def cores_of_quota(text: str) -> int:
    """Return the number of cores that a control group's quota permits, rounded up; 0 for no quota.

    Args:
        text: Content of ``cpu.max``: microseconds of processor time per period, or ``max``, and the period.
    """
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return 0
    return -(-int(words[0]) // int(words[1]))


def memory_left(folders: list[str], read: Callable[[str], str]) -> int | None:
    """Return the memory in bytes that all groups still permit; None without a limit.

    For arguments see `quota_cores`.
    """
    found = [
        left_in_group(read(f"{folder}/{limit}"), read(f"{folder}/{used}"), read(f"{folder}/memory.stat"))
        for folder in folders
        for limit, used in MEMORY_FILES
    ]
    return min([left for left in found if left is not None], default=None)


def left_in_group(limit: str, used: str, stat: str) -> int | None:
    """Return the memory in bytes that a control group may still use; None without a limit.

    Args:
        limit: Content of ``memory.max``: bytes, or ``max``.
        used: Content of ``memory.current``: bytes, the cached pages of files included.
        stat: Content of ``memory.stat``; the kernel frees its ``inactive_file`` bytes on demand.
    """
    if not limit.strip().isdecimal():
        return None
    counts = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    in_use = int(used) if used.strip().isdecimal() else 0
    # In version 1 only the ``total_`` entry counts inner groups, as the memory use does.
    cached = counts.get("total_inactive_file", counts.get("inactive_file", ""))
    reclaimable = int(cached) if cached.strip().isdecimal() else 0
    return max(int(limit) - max(in_use - reclaimable, 0), 0)
