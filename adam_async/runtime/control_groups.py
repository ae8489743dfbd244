"""The limits of this process's control groups (cgroups): processor time and memory, of versions 1 and 2.

A limit of any group on the path from the root to the process binds: container engines set limits on an outer
group, Slurm and systemd on inner ones.
"""

from collections.abc import Callable
from pathlib import PurePosixPath

MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a group with limit and use of its memory; versions 2 and 1."""


def group_folders(groups: str, mounts: str, controller: str) -> list[str]:
    """Return the folders of the groups of a process for one controller, with all outer groups.

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
        read: Returns the content of a file; empty for an absent one.
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
    """Return the memory that all groups still permit, in bytes; None without a limit.

    For arguments see `quota_cores`.
    """
    found = [
        left_in_group(read(f"{folder}/{limit}"), read(f"{folder}/{used}"), read(f"{folder}/memory.stat"))
        for folder in folders
        for limit, used in MEMORY_FILES
    ]
    return min([left for left in found if left is not None], default=None)


def left_in_group(limit: str, used: str, stat: str) -> int | None:
    """Return the memory that a control group may still use, in bytes; None without a limit.

    Args:
        limit: Content of ``memory.max``: bytes, or ``max``.
        used: Content of ``memory.current``: bytes, the cached pages of files included.
        stat: Content of ``memory.stat``; the kernel takes its ``inactive_file`` bytes back on demand.
    """
    if not limit.strip().isdecimal():
        return None
    counts = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    in_use = int(used) if used.strip().isdecimal() else 0
    # In version 1 only the former counts inner groups, as the use of memory does.
    cached = counts.get("total_inactive_file", counts.get("inactive_file", ""))
    reclaimable = int(cached) if cached.strip().isdecimal() else 0
    return max(int(limit) - max(in_use - reclaimable, 0), 0)
