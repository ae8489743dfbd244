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
from adam_async.checkpoint.saved_shards import stores_of_runs
from adam_async.messages import read_state_tables
from adam_async.parameter_server.server_disk import opened_disk
from adam_async.report.report import Report
from adam_async.run.group_ranges import GroupSets
from adam_async.runtime.disk import Disk
from tests.processes.commands import Command, accuracy_of, run, started_by_hand, until
from tests.processes.test_lost_servers import kill

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

GROUPS = 90
"""Number of groups of an epoch: 1,437 images, 16 in a group."""

TRAIN = ("train", "--data", "digits", "--processes", "--servers", "2", "--replicas", "2", "--flush-s", "0.2")


def ended_in(folder: Path) -> int:
    """Number of epochs in the newest record of the run on the disks; 0 before its shards are whole there."""

    async def read() -> int:
        async with Disk() as disk:
            runs = [store.run for store in await stores_of_runs(folder, disk)]
        return max([run.ended for run in runs if run is not None and run.is_whole], default=0)

    return asyncio.run(read())


async def tables_in(folder: Path) -> list[tuple[GroupSets, int]]:
    """Sets of groups and number of pushes of each shard in the folders of two servers."""
    found = []
    for node in ("ps-0", "ps-1"):
        async with opened_disk(folder / node, flush_s=1.0) as disk:
            (store,) = disk
            for piece in store.saved().pieces:
                for spec in store.specs_of(piece.home, piece.piece):
                    _, tensors = await store.read(piece.home, piece.piece, [int(spec.id)])
                    (state,), _ = read_state_tables(tensors, most_shards=1)
                    found.append((state.groups, state.version))
    return found


@pytest.mark.parametrize("everything", [False, True], ids=["servers", "everything"])
def test_the_same_command_goes_on_after_kill_9_and_each_group_counts_once(
    everything: bool, tmp_path: Path
) -> None:
    folder, report = tmp_path / "store", tmp_path / "report.json"
    options = (*TRAIN, "--store", str(folder), "--report", str(report), "--epochs", "40")
    with Command(*options) as command:
        until(lambda: ended_in(folder) >= 3, "three epochs on the disks", seconds=60.0)
        if everything:
            command.signal(signal.SIGKILL)  # the roles end with it
            command.finish()
        else:
            for node in ("ps-0", "ps-1"):
                kill(command, node)
            command.ends(4)
            assert f"the same command goes on from the shards in {folder}" in command.output
    assert sorted(each.name for each in folder.iterdir()) == ["ps-0", "ps-1"], "the driver keeps no file"

    output = run(*options)
    found = re.search(r"goes on from the disks of its servers, in epoch (\d+)", output)
    assert found is not None, output
    assert int(found[1]) > 1
    assert accuracy_of(output) > 95
    written = msgspec.json.decode(report.read_bytes(), type=Report)
    assert [each.epoch for each in written.epochs] == list(range(1, 41))
    assert all(each.images == 1437 for each in written.epochs)
    for server in written.servers:
        assert server.disk is not None
        assert server.disk.writes <= server.disk.updates
        assert server.disk.amplification <= 2.0
    assert "Traceback" not in output
    tables = asyncio.run(tables_in(folder))
    assert tables
    for sets, version in tables:
        assert sets[40] == sets[39] == (0, GROUPS)
        assert version == 40 * GROUPS, "each push of a group was applied once"


def test_a_run_in_one_process_goes_on_after_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    options = ("train", "--data", "digits", "--store", str(folder), "--flush-s", "0.2", "--epochs", "300")
    with Command(*options) as command:
        until(lambda: ended_in(folder) >= 3, "three epochs on the disks", seconds=60.0)
        command.signal(signal.SIGKILL)
        command.finish()
    output = run(*options)
    assert "goes on from the disks of its servers" in output
    assert accuracy_of(output) > 95


def test_a_cluster_started_by_hand_goes_on_from_its_disks_with_another_driver(tmp_path: Path) -> None:
    """All roles are killed. The driver learns program and results from the servers."""
    train = ("--servers", "2", "--replicas", "2", "--epochs", "30")

    def started(stack: ExitStack) -> tuple[str, list[Command]]:
        where, start = started_by_hand(stack)
        roles = [
            start("ps", "--id", node, "--dir", str(tmp_path / node), "--flush-s", "0.2", "--controller")
            for node in ("ps-0", "ps-1")
        ]
        roles.append(start("data", "--data", "digits", "--controller"))
        roles += [start("worker", "--join") for _ in range(2)]
        return where, roles

    with ExitStack() as stack:
        where, roles = started(stack)
        driver = stack.enter_context(Command("train", "--controller", where, *train))
        until(lambda: ended_in(tmp_path) >= 3, "three epochs on the disks", seconds=60.0)
        for each in (driver, *roles):
            each.signal(signal.SIGKILL)
            each.finish()
    with ExitStack() as stack:
        where, _ = started(stack)
        output = run("train", "--controller", where, "--attach")
        assert "goes on from the disks of its servers, in epoch" in output
        assert accuracy_of(output) > 95
        assert "30 epochs" in output


def test_a_run_whose_server_has_lost_its_folder_names_the_shards(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    options = (*TRAIN, "--store", str(folder), "--epochs", "100")
    with Command(*options) as command:
        until(lambda: ended_in(folder) >= 1, "an epoch on the disks", seconds=60.0)
        for node in ("ps-0", "ps-1"):
            kill(command, node)
        command.finish()
    shutil.rmtree(folder / "ps-1")
    output = run(*options, code=2)
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
        output = run("train", "--data", "digits", *options)
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
        output = run("ps", "--dir", str(tmp_path), "--controller", where, code=2)
    assert "is in use by a running server: end that server, or give another folder" in output
