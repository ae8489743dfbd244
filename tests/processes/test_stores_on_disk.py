"""Runs and stores on disk, whose servers are all killed: the same command goes on."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from adam_async.checkpoint.run_notes import NAME, RunNotes
from adam_async.report.report import Report
from tests.processes.commands import Command, run, started_by_hand, until
from tests.processes.test_lost_servers import accuracy_of, kill

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TRAIN = ("train", "--data", "digits", "--processes", "--servers", "2", "--replicas", "2", "--flush-s", "0.2")


def place_in(folder: Path) -> tuple[int, int]:
    """Epoch and groups of the newest point of a run that is on the disks."""
    file = folder / NAME
    if not file.exists():
        return 0, 0
    newest = msgspec.json.decode(file.read_bytes(), type=RunNotes).notes[0]
    return (newest.manifest.epoch, newest.manifest.groups) if newest.is_on_disk else (0, 0)


def test_the_same_command_goes_on_after_kill_9_of_all_servers(tmp_path: Path) -> None:
    folder, report = tmp_path / "store", tmp_path / "report.json"
    options = (*TRAIN, "--store", str(folder), "--report", str(report))
    with Command(*options, "--epochs", "40") as command:
        until(lambda: place_in(folder) >= (3, 1), "a point of epoch 3 on the disks", seconds=60.0)
        for node in ("ps-0", "ps-1"):
            kill(command, node)
        code = command.finish()
    assert code == 4, command.output
    assert f"the same command goes on from the shards in {folder}" in command.output
    epoch, _ = place_in(folder)

    code, output = run(*options, "--epochs", "40")
    assert code == 0, output
    found = re.search(
        r"goes on from the disks of its servers, as of .*: the updates of its last (\S+) s", output
    )
    assert found is not None, output
    assert float(found[1]) < 5.0
    assert accuracy_of(output) > 95
    written = msgspec.json.decode(report.read_bytes(), type=Report)
    assert [each.epoch for each in written.epochs] == list(range(1, 41))
    assert all(each.images == 1437 for each in written.epochs[: epoch - 1])
    for server in written.servers:
        assert server.disk is not None
        assert server.disk.writes <= server.disk.updates
        assert server.disk.amplification <= 2.0
        assert server.disk.age_s == 0.0
    assert "Traceback" not in output


def test_a_run_in_one_process_goes_on_after_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    options = ("train", "--data", "digits", "--store", str(folder), "--flush-s", "0.2", "--epochs", "300")
    with Command(*options) as command:
        until(lambda: place_in(folder) >= (3, 1), "a point of epoch 3 on the disks", seconds=60.0)
        command.signal(signal.SIGKILL)
        command.finish()
    code, output = run(*options[:-1], "300")
    assert code == 0, output
    assert "goes on from the disks of its servers" in output
    assert accuracy_of(output) > 95


def test_a_run_whose_server_has_lost_its_folder_names_the_shards(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    options = (*TRAIN, "--store", str(folder), "--epochs", "100")
    with Command(*options) as command:
        until(lambda: place_in(folder) >= (2, 1), "a point of epoch 2 on the disks", seconds=60.0)
        for node in ("ps-0", "ps-1"):
            kill(command, node)
        command.finish()
    shutil.rmtree(folder / "ps-1")
    code, output = run(*options)
    assert code == 2, output
    assert re.search(
        r"the shards of ps-1 of run \S+ are not on the disks of ps-0, ps-1: start all servers", output
    )


async def test_a_store_of_servers_started_by_hand_comes_back_by_its_name(tmp_path: Path) -> None:
    arrays = {"w": np.zeros(3), "m": np.zeros((300, 1000))}
    names = ("ps-0", "ps-1")
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        servers = [
            start("ps", "--id", node, "--dir", str(tmp_path / node), "--flush-s", "0.1", "--controller")
            for node in names
        ]
        async with ParameterStore.open(where, arrays, name="mine", rule=Sgd(rate=1.0)) as store:
            for _ in range(20):
                await store.push({"w": np.ones(3)})
        for server in servers:
            server.signal(signal.SIGTERM)
            assert server.finish() == 143, server.output
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        for node in names:
            start("ps", "--id", node, "--dir", str(tmp_path / node), "--controller")
        async with ParameterStore.open(where, arrays, name="mine", rule=Sgd(rate=1.0)) as store:
            assert (await store.pull())["w"].tolist() == [-20, -20, -20]


async def test_kill_9_loses_no_acknowledged_push_of_a_durable_store(tmp_path: Path) -> None:
    """Rounds of pieces come too late: the pushes are in the log of entries."""
    arrays = {"w": np.zeros(3), "m": np.zeros((300, 1000))}
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        server = start("ps", "--dir", str(tmp_path), "--flush-s", "0.5", "--controller")
        async with ParameterStore.open(
            where, arrays, name="model", rule=Sgd(rate=1.0), durable=True
        ) as store:
            for _ in range(50):
                await store.push({"w": np.ones(3)})
            server.signal(signal.SIGKILL)
            server.finish()
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        start("ps", "--dir", str(tmp_path), "--controller")
        async with ParameterStore.open(where, name="model") as store:
            assert (await store.pull())["w"].tolist() == [-50, -50, -50]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system with little room."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(words, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_no_training_and_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with small_disk(folder / "ps-0", "128k"):  # the values have 199 KiB
        options = ("--processes", "--model", "mlp", "--store", str(folder), "--epochs", "2")
        code, output = run("train", "--data", "digits", *options)
    assert code == 0, output
    assert "the end of the run was not on the disks for lack of space" in output
    assert re.search(r"the disk of \S+ is full: ", output), output
    assert "Traceback" not in output


@contextmanager
def failing_disk(folder: Path, image: Path) -> Iterator[Callable[[], None]]:
    """A file system on a disk of 16 MiB. The yielded function cuts it short: writes then fail with EIO."""
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(16 << 20)
    make = ["mkfs.ext4", "-q", "-O", "^has_journal", str(image)]
    for words in (make, ["mount", "-o", "loop", str(image), str(folder)]):
        try:
            made = subprocess.run(words, check=False, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"no file system can be made here: {words[0]} is missing")
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")

    def shorten() -> None:
        listed = ["losetup", "--noheadings", "--output", "NAME", "--associated", str(image)]
        device = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.strip()
        sectors = Path("/sys/block", Path(device).name, "size")
        while int(sectors.read_text()) * 512 > 64 << 10:
            # A write between these two lines makes the image as large as before.
            os.truncate(image, 64 << 10)
            subprocess.run(["losetup", "--set-capacity", device], check=True)

    try:
        yield shorten
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_server_whose_disk_fails_ends_with_its_error_and_other_copies_go_on(tmp_path: Path) -> None:
    arrays, names = {"w": np.zeros(3)}, ("ps-0", "ps-1", "ps-2")
    with ExitStack() as stack:
        fail = stack.enter_context(failing_disk(tmp_path / "ps-0", tmp_path / "image"))
        where, start = started_by_hand(stack)
        servers = [
            start("ps", "--id", node, "--dir", str(tmp_path / node), "--flush-s", "0.1", "--controller")
            for node in names
        ]
        async with ParameterStore.open(
            where, arrays, name="model", rule=Sgd(rate=1.0), copies=3, servers=3
        ) as store:
            for _ in range(20):
                await store.push({"w": np.ones(3)})
            fail()
            await store.push({"w": np.ones(3)})
            code = await asyncio.to_thread(servers[0].finish)
            for _ in range(20):
                await store.push({"w": np.ones(3)})
            assert (await store.pull())["w"].tolist() == [-41, -41, -41]

    output = servers[0].output
    assert code == 3, output
    assert re.search(r"ps-0/store-\w+/\S+ cannot be written: Input/output error; repair the disk", output)
    assert "other copies and the states on disk go on" in output
    assert "Traceback" not in output


def test_a_folder_that_another_server_uses_is_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        start("ps", "--dir", str(tmp_path), "--controller")
        code, output = run("ps", "--dir", str(tmp_path), "--controller", where)
    assert code == 2, output
    assert "is that of a server that is running; give this one another" in output
