"""Workers of several processes train in place: the same bits, and no step lost or doubled when one ends."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from adam_async.cluster.processes import ProcessCluster
from adam_async.errors import LOST_SHARDS, ConfigError
from adam_async.run.option_sources import make_config
from tests.processes.commands import RUN_S, Command, children_of, run, until, watched

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

TRAIN = ("train", "--data", "digits", "--seed", "7", "--threads", "1")
ALONE = (*TRAIN, "--in-flight", "1", "--epochs", "4")
SEVERAL = ("--processes", "--weights", "aliased")
TWO = (*TRAIN, *SEVERAL, "--replicas", "2", "--epoch-fraction", "1")
GROUPS = 90
"""Number of groups of an epoch of the digits, with 16 images each."""


def report_of(file: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["config"]["weights"] == "aliased"
    return report


def check_counts(file: Path, *, killed: int = 0) -> int:
    """Check that each shard has counted each group once, and return the steps of this command."""
    report = report_of(file)
    (server,), epochs = report["servers"], report["epochs"]
    groups = GROUPS * len(epochs)
    assert [epoch["images"] for epoch in epochs] == [1437] * len(epochs)
    assert set(server["versions"].values()) == {groups}
    assert server["steps_cut"] <= killed
    steps: int = server["steps_in_place"] + server["steps_cut"]
    assert steps <= groups
    return steps


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("rule", [("--momentum", "0.5"), ("--rule", "adam"), ("--kernels", "numpy")], ids=str)
def test_a_worker_of_another_process_trains_the_bits_of_one_process(
    rule: tuple[str, ...], tmp_path: Path
) -> None:
    for name, where in (("one", ()), ("several", SEVERAL)):
        run(*ALONE, *rule, *where, "--out", str(tmp_path / name))
    one, several = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "several"))
    assert one == several


def test_workers_train_in_place_by_default_and_each_group_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run(
        *TRAIN,
        "--processes",
        "--replicas",
        "2",
        "--epoch-fraction",
        "1",
        "--epochs",
        "6",
        "--report",
        str(file),
    )
    check_counts(file)
    report = report_of(file)
    assert report["servers"][0]["steps_in_place"] == 6 * GROUPS
    assert {row["chosen"] for row in report["protocols"]} == {"in place"}


def test_killed_workers_lose_and_double_no_group_and_leave_no_descriptor(tmp_path: Path) -> None:
    dice, file, kills = random.Random(3), tmp_path / "report.json", 4
    with Command(*TWO, "--epochs", "200", "--report", str(file)) as command:
        command.wait_for("epoch 2/200")
        server = command.child("ps-0")
        before = descriptors(server)
        for number in range(kills):
            node = f"worker-{number % 2}"
            for _ in range(dice.randrange(20)):
                victim = command.child(node)
            os.kill(victim, signal.SIGKILL)
            command.wait_for(f"{node} died: killed by signal 9; starting it again")
            command.wait_for(f"{node} came back as a new incarnation")
        until(lambda: descriptors(server) <= before, "the descriptors of lost workers to be closed")
        command.ends(0, seconds=RUN_S)
    assert check_counts(file, killed=kills) == 200 * GROUPS


def test_a_frozen_worker_is_ended_before_others_train_its_groups(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with Command(*TWO, "--epochs", "200", "--report", str(file)) as command:
        command.wait_for("epoch 2/200")
        os.kill(command.child("worker-1"), signal.SIGSTOP)
        command.wait_for("worker-1 died: killed by signal 9; starting it again")
        command.ends(0, seconds=RUN_S)
    check_counts(file, killed=1)


def test_a_worker_that_cannot_map_the_memory_refuses_the_run_alone(tmp_path: Path) -> None:
    token, file = tmp_path / "token", tmp_path / "report.json"
    token.write_text("a token of tests for workers in place")
    token.chmod(0o600)
    with Command(*TWO, "--epochs", "200", "--token-file", str(token), "--report", str(file)) as command:
        meet = command.wait_for("adam-async status --controller ").partition("--controller ")[2].split()[0]
        command.wait_for("epoch 2/200")
        words = ("--id", "far", "--threads", "1", "--link", "tcp", "--token-file", str(token))
        with Command("worker", *words, "--join", meet) as worker:
            line = worker.wait_for("far refuses run")
            assert "their link has no shared memory: run it with weights=copy" in line
            command.ends(0, seconds=RUN_S)
    check_counts(file)


def test_a_killed_server_ends_the_run_with_its_name() -> None:
    with Command(*TWO, "--epochs", "1000") as command:
        command.wait_for("epoch 1/1000")
        os.kill(command.child("ps-0"), signal.SIGKILL)
        command.ends(4)
    assert command.output.rstrip().endswith(f"adam-async: ps-0 died: killed by signal 9; {LOST_SHARDS}")


async def test_a_run_in_place_goes_on_with_more_and_with_fewer_workers() -> None:
    config = make_config(
        {
            "data": "digits",
            "replicas": 2,
            "threads": 1,
            "epoch_fraction": 1.0,
            "epochs": 40,
            "processes": True,
        }
    )
    async with ProcessCluster(config) as cluster:
        counts = iter([3, 1, 2])

        async def scale(_: object) -> None:
            if (workers := next(counts, 0)) > 0:
                await cluster.scale(workers)

        result = await cluster.train(scale)
    server = result.statistics["ps-0"]
    assert [epoch.images for epoch in result.epochs] == [1437] * 40
    assert (set(server.versions.values()), server.steps_cut) == ({40 * GROUPS}, 0)
    assert server.steps_in_place == 40 * GROUPS


def test_an_interrupted_run_in_place_ends_in_order_and_a_resumed_one_trains_no_group_twice(
    tmp_path: Path,
) -> None:
    words, file = (*TWO, "--store", str(tmp_path / "store")), tmp_path / "report.json"
    with Command(*words, "--epochs", "1000") as command:
        command.wait_for("epoch 3/1000")
        with watched(list(children_of(command.pid))) as all_end:
            command.signal(signal.SIGINT)
            command.ends(130, seconds=RUN_S)
            all_end(RUN_S)
    assert "died" not in command.output
    assert "Traceback" not in command.output
    ended = command.output.count("/1000: loss")
    run(*words, "--epochs", str(ended + 3), "--report", str(file))
    assert check_counts(file) <= 3 * GROUPS


@pytest.mark.parametrize("by", ["checkpoint", "store"])
def test_a_run_in_place_that_is_killed_goes_on_with_the_model_of_a_whole_one(by: str, tmp_path: Path) -> None:
    folder, words = tmp_path / by, (*ALONE[:-2], *SEVERAL, "--schedule", "constant")
    every = ("--checkpoint-every", "40") if by == "checkpoint" else ()
    with Command(*words, "--epochs", "1000", f"--{by}", str(folder), *every) as command:
        command.wait_for("epoch 3/1000")
        command.signal(signal.SIGKILL)
        command.finish()
    resumed_by = (
        ("train", "--resume", str(folder)) if by == "checkpoint" else (*words, "--store", str(folder))
    )
    for name, how in (("whole", words), ("resumed", resumed_by)):
        run(*how, "--epochs", "30", "--out", str(tmp_path / name))
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"servers": 2}, "2 servers have one each: give --servers 1"),
        ({"link": "tcp"}, "--link tcp shares none: give --link auto"),
        ({"slow": ("worker-0~ps-0:5ms",)}, "a slow link is about pushes"),
    ],
    ids=str,
)
def test_training_in_place_that_is_wanted_and_impossible_is_an_error(
    options: dict[str, Any], reason: str
) -> None:
    assert ProcessCluster(make_config({"processes": True, **options})).config.weights == "copy"
    with pytest.raises(ConfigError, match=f"weights=aliased needs the memory of the servers, and {reason}"):
        ProcessCluster(make_config({"processes": True, "weights": "aliased", **options}))
