"""Disks with a limit of bytes per second and a delay of each sync, for the processes of a benchmark.

Each disk is an image with ext4, mounted by a loop device of its own. The kernel limits the bytes per second
that the processes of a control group write to the device (`blkio` of version 1 of control groups, `io` of
version 2). A library in front of libc (`LD_PRELOAD`) sleeps before each `fdatasync` and `fsync`. Needs root,
`mkfs.ext4` and `gcc`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

IMAGE_BYTES = 1 << 30
"""Size of the image of a disk, in bytes; it has holes."""

GROUPS = Path("/sys/fs/cgroup")

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
static int delayed(const char *name, int file) {
    const char *text = getenv("SYNC_MS");
    long ms = text ? atol(text) : 0;
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(file);
}
int fdatasync(int file) { return delayed("fdatasync", file); }
int fsync(int file) { return delayed("fsync", file); }
"""

PROBE = """
import json, os, sys, time
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
times = []
for nbytes in (1, 1, 1, 20_000_000):
    begin = time.perf_counter()
    os.write(file, bytes(nbytes))
    os.fdatasync(file)
    times.append(time.perf_counter() - begin)
os.unlink(sys.argv[1])
sync_s = sorted(times[:3])[1]
print(json.dumps({"sync_ms": round(1e3 * sync_s, 1), "mb_per_s": round(20 / (times[3] - sync_s), 1)}))
"""
"""Program that measures a disk: a sync of one byte, and the rate of a large write with its sync."""


def measured(folder: Path, within: Sequence[str] = ()) -> dict[str, Any]:
    """Return the time of a sync and the rate of writes on a disk, as a process sees them."""
    words = [*within, sys.executable, "-c", PROBE, str(folder / "probe")]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def slow_disks(
    folder: Path, names: Sequence[str], *, bytes_per_s: int, sync_ms: int
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Mount slow disks for a block.

    Args:
        folder: Empty folder for the images, on a disk with room.
        names: Names of the disks.

    Yields the folder with the disks as folders, and the words in front of a command for which they are slow.

    Raises:
        SystemExit: The system has no such disks; the text names the missing part.
    """
    disks = folder / "disks"
    with ExitStack() as stack:
        for name in names:
            _mount(folder / f"{name}.image", disks / name)
            stack.callback(_run, "umount", str(disks / name))
        procs = stack.enter_context(_group([os.stat(disks / name).st_dev for name in names], bytes_per_s))
        library = folder / "delay.so"
        (folder / "delay.c").write_text(SHIM)
        _run("gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(folder / "delay.c"), "-ldl")
        join = 'echo $$ > "$1" && shift && exec env "$@"'
        yield disks, ("sh", "-c", join, "sh", str(procs), f"LD_PRELOAD={library}", f"SYNC_MS={sync_ms}")


def _mount(image: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    _run("mkfs.ext4", "-q", "-F", str(image))
    _run("mount", "-o", "loop", str(image), str(folder))


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"slow disks need root, mkfs.ext4, mount and gcc: {error}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(words)}: {error.stderr.strip()}") from None


@contextmanager
def _group(devices: Sequence[int], bytes_per_s: int) -> Iterator[Path]:
    """Make a control group with a limit of writes for a block; yields the file for its processes."""
    numbers = [f"{os.major(device)}:{os.minor(device)}" for device in devices]
    is_old = (GROUPS / "blkio" / "blkio.throttle.write_bps_device").exists()
    group = (GROUPS / "blkio" if is_old else GROUPS) / f"adam-async-{os.getpid()}"
    limits = group / ("blkio.throttle.write_bps_device" if is_old else "io.max")
    try:
        if not is_old:
            (GROUPS / "cgroup.subtree_control").write_text("+io")
        group.mkdir()
        for number in numbers:
            limits.write_text(f"{number} {bytes_per_s}" if is_old else f"{number} wbps={bytes_per_s}")
    except OSError as error:
        raise SystemExit(f"no control group limits writes here: {error}") from None
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()
