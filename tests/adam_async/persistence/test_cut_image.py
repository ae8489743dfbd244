"""Power cuts over a real file system: the image of a mounted disk, copied in the middle of writes."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adam_async.runtime.disk import Disk
from tests.adam_async.persistence.killed_server import HOME, history, position_in
from tests.adam_async.persistence.owners import SMALL, Owner, store_of

CUTS = 100
ROOT = Path(__file__).resolve().parents[3]
IMAGE_BYTES = 48 << 20


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """Mount an image for a block."""
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


@contextmanager
def serving(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for a block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.adam_async.persistence.killed_server", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def unread(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the positions that a stopped server has reported, without waiting for more."""
    os.set_blocking(process.stdout.fileno(), False)
    lines = process.stdout.read() or b""
    os.set_blocking(process.stdout.fileno(), True)
    return [int(line) for line in lines.split()]


async def reopened(folder: Path) -> int:
    """Open a store on a folder that a power cut left; return the position that it has."""
    owner = Owner(HOME)
    owner.bundles[HOME].history = history()
    before = position_in(folder, owner)
    async with Disk() as disk:
        async with store_of(disk, owner, path=folder).opened() as store:
            assert store.recovery.damages == ()
            assert store.recovery.lost == ()
    assert position_in(folder, owner) == before
    return before


def have_loop_devices(folder: Path) -> bool:
    image = folder / "probe"
    image.write_bytes(bytes(4 << 20))
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
        with mounted(image, folder / "probe.mounted"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path):
    if not have_loop_devices(tmp_path):
        pytest.skip("no file system can be made and mounted here: this needs root and loop devices")
    image, copy = tmp_path / "image", tmp_path / "copy"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    dice = random.Random(11)
    acknowledged, found = 0, []
    with mounted(image, tmp_path / "disk") as disk, serving(disk / "ps-0") as process:
        for _ in range(CUTS):
            for _ in range(dice.randrange(1, 30)):
                acknowledged = int(process.stdout.readline())
            process.send_signal(signal.SIGSTOP)
            acknowledged = max([acknowledged, *unread(process)])
            shutil.copyfile(image, copy)
            process.send_signal(signal.SIGCONT)
            with mounted(copy, tmp_path / "cut") as cut:
                found.append(asyncio.run(reopened(cut / "ps-0")))
            assert found[-1] >= acknowledged
    assert found[-1] > 5 * CUTS
    assert len(set(found)) > CUTS // 2
    assert SMALL.segment_bytes < 10_000  # so files begin and end between the cuts
