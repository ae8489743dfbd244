"""Runs and stores with several copies of each shard, whose servers are killed and frozen."""

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from adam_async.report.report import Report
from tests.processes.commands import Command, accuracy_of, run, started_by_hand

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TRAIN = ("train", "--data", "digits", "--processes", "--servers", "3", "--copies", "3", "--controllers", "3")
LONG_S = 120.0
EVENT = r"event  at \d+\.\d s: "


def kill(command: Command, node: str, number: int = signal.SIGKILL) -> None:
    os.kill(command.child(node), number)


@pytest.mark.slow
def test_training_outlives_killed_servers_and_reports_every_failover(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ("--replicas", "2", "--epochs", "150", "--report", str(file))
    with Command(*TRAIN, *options) as command:
        command.wait_for("epoch 1/150")
        for node in ("ps-1", "ps-0"):
            kill(command, node)
            line = command.wait_for(f"{node} died: killed by signal 9")
            command.wait_for(f"{node} came back as a new incarnation")
            command.wait_for(" have 3 copies in sync again")
        command.ends(0, seconds=LONG_S)

    assert line.endswith("; starting it again")
    assert re.search(r"its shards go on with ps-\d and ps-\d; starting it again", command.output)
    assert re.search(rf"{EVENT}primary of the shards of ps-1 moved from ps-1 to ps-\d", command.output)
    assert accuracy_of(command.output) > 95
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert [epoch.images for epoch in report.epochs] == [1437] * 150
    assert report.copies is not None
    assert (report.copies.copies, report.copies.min_in_sync) == (3, 2)
    assert [bundle.home for bundle in report.copies.bundles] == ["ps-0", "ps-1", "ps-2"]
    # Each shard is counted at its primary, once.
    versions = [int(shard) for server in report.servers for shard in server.versions]
    assert sorted(versions) == list(range(6))
    assert "Traceback" not in command.output


@pytest.mark.slow
def test_a_frozen_primary_comes_back_as_a_member_and_not_as_a_second_primary() -> None:
    with Command(*TRAIN, "--epochs", "150") as command:
        command.wait_for("epoch 1/150")
        kill(command, "ps-1", signal.SIGSTOP)
        command.wait_for("primary of the shards of ps-1 moved from ps-1 to ps-")
        kill(command, "ps-1", signal.SIGCONT)
        command.wait_for("the shards of ps-1 have 3 copies in sync again")
        command.ends(0, seconds=LONG_S)

    assert accuracy_of(command.output) > 95
    assert "Traceback" not in command.output


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 2])
def test_after_two_losses_in_a_row_training_goes_on_with_the_last_copy_or_waits_for_a_server(
    least: int,
) -> None:
    with Command(*TRAIN, "--epochs", "150", "--min-in-sync", str(least)) as command:
        command.wait_for("epoch 1/150")
        kill(command, "ps-0")
        next_primary = command.wait_for("primary of the shards of ps-0 moved from ps-0 to ps-")[-4:]
        kill(command, next_primary)
        command.wait_for(f"primary of the shards of ps-0 moved from {next_primary} to ps-")
        if least == 2:
            command.wait_for("pushes to the shards of ps-0 go on: ")
        command.ends(0, seconds=LONG_S)

    waits = "pushes to the shards of ps-0 wait: 1 in sync, 2 needed (min_in_sync)"
    assert (waits in command.output) == (least == 2)
    assert accuracy_of(command.output) > 95


def test_the_loss_of_all_copies_ends_the_run_at_once_and_a_checkpoint_resumes_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    with Command(*TRAIN, "--epochs", "1000", "--checkpoint", folder) as command:
        command.wait_for("epoch 3/1000")
        for node in ("ps-0", "ps-1", "ps-2"):
            kill(command, node)
        command.ends(4)

    last = command.output.rstrip().splitlines()[-1]
    lost = r"the last copy of the shards of ps-\d.* in store '[^']+' is lost"
    assert re.search(rf"died: .*{lost}; --resume DIR picks the run up", last), command.output
    output = run("train", "--resume", folder, "--epochs", "4")
    assert "resumed from checkpoint-" in output


async def test_a_store_of_servers_started_by_hand_outlives_a_killed_primary() -> None:
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        servers = {node: start("ps", "--id", node, "--controller") for node in ("ps-0", "ps-1", "ps-2")}
        async with ParameterStore.open(
            where, {"w": np.zeros(3)}, name="model", rule=Sgd(rate=1.0), copies=3, servers=1
        ) as store:
            for _ in range(20):
                await store.push({"w": np.ones(3)})
            servers["ps-0"].signal(signal.SIGKILL)
            for _ in range(20):
                await store.push({"w": np.ones(3)})
            assert (await store.pull())["w"].tolist() == [-40, -40, -40]
