"""Three controllers in processes of their own: any may be killed, and their state is never lost."""

import asyncio
import os
import random
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from adam_async.cluster import launcher as launching
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.processes import ProcessCluster
from adam_async.run.counts import ControllerCounts
from adam_async.run.option_sources import make_config
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.clock import system_entropy
from tests.adam_async.runs import until
from tests.processes.commands import PATIENCE_S, Command, children_of, run, watched
from transport import BufferPool, Identity, TransportError

pytestmark = pytest.mark.processes


async def free_addresses(count: int) -> list[str]:
    """Free addresses of this machine."""
    network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
    identity = Identity(role="controller", node="test", incarnation=1)

    async def refuse(link: Any) -> None:
        link.abort()

    async with asyncio.timeout(10):
        async with (
            network.listen(LOOPBACK, identity, refuse) as one,
            network.listen(LOOPBACK, identity, refuse) as two,
            network.listen(LOOPBACK, identity, refuse) as three,
        ):
            return [one.address, two.address, three.address][:count]


@pytest.mark.slow
def test_controllers_started_by_hand_bear_the_loss_of_any_one(tmp_path: Path) -> None:
    addresses = asyncio.run(free_addresses(3))
    peers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, 1))
    meet = ",".join(addresses)

    with ExitStack() as stack:

        def controller(number: int) -> Command:
            where = ("--peers", peers, "--dir", str(tmp_path / str(number)))
            started = stack.enter_context(Command("controller", "--id", str(number), *where))
            line = started.wait_for(" listens on ")
            assert line == (
                f"controller-{number} listens on {addresses[number - 1]}; "
                f"join it with: adam-async ps --controller {meet}"
            )
            return started

        group = {number: controller(number) for number in (1, 2, 3)}
        for words in (("ps",), ("data", "--data", "digits"), ("worker", "--threads", "1")):
            stack.enter_context(Command(*words, "--controller", meet)).wait_for(" listens on ")
        for number in (1, 2, 3):  # the leader is among them
            group[number].signal(signal.SIGKILL)
            group[number].finish()
            output = run("train", "--epochs", "2", "--seed", str(number), "--controller", meet)
            assert "after 2 epochs" in output
            group[number] = controller(number)
        for number in (3, 2, 1):
            group[number].signal(signal.SIGINT)
            assert group[number].finish() == 130
            assert "Traceback" not in group[number].output


def test_three_controllers_started_by_hand_log_the_changes_of_their_group(tmp_path: Path) -> None:
    addresses = asyncio.run(free_addresses(3))
    peers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, 1))

    with ExitStack() as stack:

        def controller(number: int, peers: str) -> Command:
            words = ("--id", str(number), "--peers", peers, "--dir", str(tmp_path / str(number)))
            return stack.enter_context(Command("controller", *words))

        group = {number: controller(number, peers) for number in (1, 2, 3)}
        for number, command in group.items():
            command.wait_for(f"controller-{number} the group is founded, with 3 of 3 controllers")
        led = {command.wait_for(" leads now (term 2)") for command in group.values()}
        leader = int(min(led, key=len).split()[2].removeprefix("controller-"))
        group[leader].signal(signal.SIGKILL)
        left = sorted({1, 2, 3} - {leader})
        news = {number: group[number].wait_for(" leads now (term ") for number in left}
        successor = min(left, key=lambda number: len(news[number]))
        group[successor].wait_for(f"controller-{leader} is lost: nothing was heard of it for 2 s; 2 of 3")
        (third,) = set(left) - {successor}
        group[successor].signal(signal.SIGKILL)
        both = ", ".join(f"controller-{number}" for number in sorted((leader, successor)))
        group[third].wait_for(f"controller-{third} has no majority: nothing was heard of {both} for ")

        again = controller(leader, peers)
        again.wait_for(f"controller-{leader} the group is there again, with 2 of 3 controllers")
        again.wait_for(" leads now (term ")
        group[third].wait_for(" leads now (term ")

        alone = controller(successor, f"{successor}={addresses[successor - 1]}")
        alone.wait_for("name them all in --peers")
        line = alone.wait_for(" listens on ")
        assert line == f"controller-{successor} listens on {addresses[successor - 1]}"
        for command in (alone, again, group[third]):
            command.signal(signal.SIGINT)
            assert command.finish() == 130
            assert "Traceback" not in command.output


async def group_views(cluster: ProcessCluster) -> dict[str, ControllerCounts]:
    """The views of their group that the reachable controllers have, by node id."""
    answers = {}
    for address in cluster.driver.controllers:
        try:
            statistics = await cluster.driver._counts.statistics(address, "", dial_s=1.0)
        except TransportError:
            continue
        assert isinstance(statistics, ControllerCounts)
        answers[statistics.node] = statistics
    return answers


async def test_training_goes_on_whichever_controllers_are_killed(tmp_path: Path) -> None:
    lines: list[str] = []
    epochs: asyncio.Queue[int] = asyncio.Queue()
    options = {"data": "digits", "epochs": 36, "threads": 1, "replicas": 2, "servers": 2}
    config = make_config({**options, "processes": True, "controllers": 3})
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    async def passed(number: int) -> None:
        while await epochs.get() < number:
            pass

    async with (
        ProcessCluster(config, on_line=lines.append, environment=environment) as cluster,
        asyncio.TaskGroup() as group,
    ):
        training = group.create_task(cluster.train(lambda epoch: epochs.put_nowait(epoch.epoch)))
        await passed(2)
        before = await group_views(cluster)
        leader = next(node for node, values in before.items() if values.role == "leader")
        followers = sorted(set(before) - {leader})
        killed = [(leader,), (followers[0],), (followers[1],), (leader, followers[0])]
        for number, nodes in enumerate(killed):
            for node in nodes:
                os.kill(cluster.children[node].pid or 0, signal.SIGKILL)
            await passed(10 + 8 * number)
        result = await training
        after = await group_views(cluster)

    assert [epoch.images for epoch in result.epochs] == [1437] * 36
    died = [event["event"] for event in result.events if "died" in event["event"]]
    assert sorted(died) == sorted(
        f"{node} died: killed by signal 9; starting it again" for nodes in killed for node in nodes
    )
    assert set(died) <= set(lines)
    # A restarted controller has its folder: no controller had to join the group anew.
    assert {tuple(values.voters) for values in after.values()} == {tuple(before[leader].voters)}
    assert os.listdir(tmp_path) == []


async def test_an_epoch_is_trained_while_the_controllers_have_no_majority(tmp_path: Path) -> None:
    options = {
        "data": "digits",
        "epochs": 2,
        "threads": 1,
        "replicas": 2,
        "servers": 2,
        "images_per_group": 4,
    }
    slow = [f"worker-{number}:0.02" for number in (0, 1)]
    config = make_config({**options, "processes": True, "controllers": 3, "slow": slow})
    async with (
        asyncio.timeout(3 * PATIENCE_S),
        ProcessCluster(config, environment={**os.environ, "TMPDIR": str(tmp_path)}) as cluster,
        asyncio.TaskGroup() as group,
    ):
        progress = cluster.driver.progress
        training = group.create_task(cluster.train())
        await until(lambda: progress.epoch == 1 and progress.images > 0)
        frozen = list(await group_views(cluster))[:2]
        for node in frozen:
            os.kill(cluster.children[node].pid or 0, signal.SIGSTOP)
        try:
            before = progress.images
            await until(lambda: progress.images > before + 100)
            assert progress.epoch == 1
            assert not training.done()
        finally:
            for node in frozen:
                os.kill(cluster.children[node].pid or 0, signal.SIGCONT)
        result = await training
    assert [epoch.images for epoch in result.epochs] == [1437] * 2
    assert len(frozen) == 2


MOMENTS: dict[str, Callable[[ChildProcess, Path], bool]] = {
    "is a process": lambda child, folder: child.pid is not None,
    "has a folder": lambda child, folder: folder.exists(),
    "has a log": lambda child, folder: (folder / "controller.log").exists(),
    "listens": lambda child, folder: child.serves,
}


@pytest.mark.parametrize(
    ("node", "moment"),
    [
        ("controller-1", "is a process"),
        pytest.param("controller-3", "has a folder", marks=pytest.mark.slow),
        ("controller-1", "has a log"),
        pytest.param("controller-2", "listens", marks=pytest.mark.slow),
    ],
)
async def test_a_controller_that_is_killed_before_there_is_a_group_is_started_again(
    tmp_path: Path, node: str, moment: str
) -> None:
    lines: list[str] = []
    config = make_config({"data": "digits", "epochs": 2, "threads": 1, "processes": True, "controllers": 3})
    cluster = ProcessCluster(
        config, on_line=lines.append, environment={**os.environ, "TMPDIR": str(tmp_path)}
    )

    def has_come() -> bool:
        child, folder = cluster.children.get(node), next(tmp_path.glob("*"), tmp_path) / node
        return child is not None and child.pid is not None and MOMENTS[moment](child, folder)

    async def kill() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await until(has_come)
        os.kill(cluster.children[node].pid or 0, signal.SIGKILL)

    async with asyncio.TaskGroup() as group:
        group.create_task(kill())
        async with cluster:
            result = await cluster.train()

    assert [epoch.images for epoch in result.epochs] == [1437] * 2
    assert lines.count(f"{node} died: killed by signal 9; starting it again") == 1
    assert os.listdir(tmp_path) == []


def test_the_next_command_removes_the_folder_of_a_killed_one_and_not_that_of_a_running_one(
    tmp_path: Path,
) -> None:
    words = ("train", "--data", "digits", "--processes", "--controllers", "3", "--epochs")
    environment = {"TMPDIR": str(tmp_path)}
    (tmp_path / "adam-async-controllers-of-somebody").mkdir()  # without a lock
    with (
        Command(*words, "9999", environment=environment) as killed,
        Command(*words, "9999", environment=environment) as running,
    ):
        killed.wait_for("epoch 1/9999")
        running.wait_for("epoch 1/9999")
        with watched(list(children_of(killed.pid))) as all_end:
            killed.signal(signal.SIGKILL)
            killed.finish()
            all_end(PATIENCE_S)
        assert len(os.listdir(tmp_path)) == 3

        run(*words, "1", environment=environment)
        assert len(os.listdir(tmp_path)) == 2
        running.signal(signal.SIGINT)
        assert running.finish() == 130
    assert os.listdir(tmp_path) == ["adam-async-controllers-of-somebody"]


def test_a_command_trains_with_three_controllers_and_names_the_one_that_died() -> None:
    words = ("train", "--data", "digits", "--processes", "--controllers", "3", "--epochs", "12")
    with Command(*words) as command:
        command.wait_for("epoch 1/12")
        os.kill(command.child("controller-1"), signal.SIGKILL)
        command.wait_for("controller-1 died: killed by signal 9; starting it again")
        command.ends(0, seconds=60)

    epochs = re.findall(r"epoch \d+/12: .* (\S+) images in", command.output)
    assert epochs == ["1,437"] * 12, command.output
    assert "Traceback" not in command.output


async def test_ports_that_another_process_took_are_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    choose, chosen = launching.free_addresses, []
    config = make_config({"data": "digits", "epochs": 1, "processes": True, "controllers": 3})

    async def refuse(link: Any) -> None:
        link.abort()

    async def first_a_taken_one(network: Any, driver: Identity, bind: str, *, count: int) -> list[str]:
        chosen.append(await choose(network, driver, bind, count=count))
        if len(chosen) == 1:
            chosen[0][1] = taken.address
        return chosen[-1]

    monkeypatch.setattr(launching, "free_addresses", first_a_taken_one)
    network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
    identity = Identity(role="data", node="other", incarnation=1)
    async with (
        network.listen(LOOPBACK, identity, refuse) as taken,
        ProcessCluster(config, on_line=lines.append) as cluster,
    ):
        result = await cluster.train()

    assert [epoch.images for epoch in result.epochs] == [1437]
    assert len(chosen) == 2
    assert "controller-2 died: ended with exit code 7" in lines


@pytest.mark.parametrize(
    ("words", "claim"),
    [
        (
            ("controller", "--peers", "1=tcp://127.0.0.1:1"),
            "--peers names the controllers 1: give --id of this one",
        ),
        (("controller", "--id", "2", "--peers", "1=tcp://127.0.0.1:1"), "--id 2 is none of the controllers"),
        (
            ("controller", "--id", "1", "--peers", "tcp://127.0.0.1:1"),
            "is not of the form ID=tcp://HOST:PORT",
        ),
        (("ps", "--controller", "tcp://127.0.0.1:1,tcp://127.0.0.1:1"), "tcp://127.0.0.1:1 is named twice"),
        (("train", "--controllers", "4"), "controllers must be 1, 3 or 5"),
    ],
)
def test_controllers_that_cannot_form_a_group_end_with_code_2(words: tuple[str, ...], claim: str) -> None:
    output = run(*words, code=2)
    assert claim in output
    assert output.count("\n") == 1, output


def test_a_folder_has_one_controller_at_a_time(tmp_path: Path) -> None:
    kept = ("controller", "--bind", LOOPBACK, "--dir", str(tmp_path))
    with Command(*kept) as first:
        first.wait_for(" listens on ")
        output = run(*kept, code=2)
    assert f"{tmp_path} is that of a controller that is running; give this one another" in output


def test_a_folder_that_cannot_be_used_is_an_error_before_a_word(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    output = run("controller", "--bind", LOOPBACK, "--dir", str(tmp_path / "file"), code=2)
    assert output.startswith("adam-async: "), output
    assert f"--dir: {tmp_path / 'file'} cannot be made: it exists and is no folder" in output


def test_a_log_of_random_bytes_is_refused_with_code_3_and_left_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    log.write_bytes(random.Random(1).randbytes(3000))
    output = run("controller", "--bind", LOOPBACK, "--dir", str(tmp_path), code=3)
    assert output.startswith(f"adam-async: {log} is damaged at byte 0, in record 1: its 3000 bytes"), output
    assert output.count("\n") == 1, output
    assert log.read_bytes() == random.Random(1).randbytes(3000)


def test_a_restarted_controller_removes_the_leftovers_of_a_kill_within_a_snapshot(tmp_path: Path) -> None:
    kept = ("controller", "--bind", LOOPBACK, "--dir", str(tmp_path))
    (tmp_path / "controller.log.4711.aside").write_bytes(b"half of a snapshot")
    with Command(*kept) as command:
        command.wait_for("controller listens on ")
        assert sorted(os.listdir(tmp_path)) == ["controller.log", "lock"]
