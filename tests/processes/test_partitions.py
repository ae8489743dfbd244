"""Replicas partitioned over several processes train, and survive the loss of workers at any moment."""

import asyncio
import json
import os
import random
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from adam_async.cluster.launcher import RestartPolicy
from adam_async.cluster.processes import ProcessCluster
from adam_async.messages import Finished, Greet, Reported, ReportGroups, pack, unpack
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.option_sources import make_config
from adam_async.run.result import RunResult
from tests.adam_async.runs import until
from tests.processes.commands import Command, started_by_hand
from tests.processes.cut_runs import IMAGES, WORKERS, CutRun, cut_run, training
from transport import Identity, LinkBroken, LinkClosed

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

ENDLESS = 100_000
"""Epochs of a run that the test gives up when it has seen enough."""

PLANS = ("vertical", "layers")


def all_images(run: CutRun) -> bool:
    """Whether each epoch so far has trained or skipped every image."""
    return all(epoch.images + epoch.skipped == IMAGES for epoch in run.epochs)


@pytest.mark.parametrize("plan", PLANS)
def test_a_partitioned_model_trains_and_the_report_has_its_traffic(plan: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    cut = ("--replicas", "2", "--partitions", "2", "--processes", "--plan", plan)
    with Command("train", "--data", "digits", "--epochs", "8", *cut, "--report", str(path)) as command:
        code, output = command.finish(seconds=90), command.output
    report = json.loads(path.read_text())
    blocks = {(row["from"], row["to"]) for row in report["traffic"] if row["type"] == "Blocks"}

    assert code == 0, output
    assert [worker["node"] for worker in report["workers"]] == [f"worker-{n}" for n in range(WORKERS)]
    # Over every cut something crosses both ways, and never from replica to replica.
    first, second = ("worker-0", "worker-1"), ("worker-2", "worker-3")
    assert blocks == {first, first[::-1], second, second[::-1]}
    assert report["events"] == []
    assert [epoch["images"] + epoch["skipped"] for epoch in report["epochs"]] == [IMAGES] * 8
    assert report["totals"]["test_accuracy"] > 0.5, output


def test_a_spare_worker_that_joined_by_hand_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with ExitStack() as stack:
        meet, start = started_by_hand(stack)
        start("ps", "--controller")
        start("data", "--data", "digits", "--controller")
        start("worker", "--id", "stays", "--threads", "1", "--join")
        goes = start("worker", "--id", "goes", "--threads", "1", "--join")
        start("worker", "--id", "spare", "--threads", "1", "--join")
        words = ("train", "--partitions", "2", "--epochs", "30", "--report", str(path), "--controller", meet)
        train = stack.enter_context(Command(*words))
        train.wait_for("epoch 1/30")
        goes.signal(signal.SIGKILL)
        assert train.finish(seconds=120) == 0, train.output
    report = json.loads(path.read_text())

    died, taken = (event["event"] for event in report["events"])
    assert died == "goes died"
    assert re.fullmatch(r"(stays|spare) takes part [01] of replica 0", taken)
    assert {worker["node"] for worker in report["workers"]} == {"stays", "spare"}
    assert all(worker["data"]["groups"] > 0 for worker in report["workers"])
    assert [epoch["images"] for epoch in report["epochs"]] == [IMAGES] * 30


# --- one death -----------------------------------------------------------------------------------


async def is_refused(run: CutRun, node: str, greet: Greet) -> bool:
    """Return whether a worker closes a link after this greeting."""
    identity = Identity(role="worker", node="ghost", incarnation=1)
    async with run.network.connect(run.map.nodes[node].address, identity, timeout_s=20.0) as link:
        link.send_nowait(pack(greet))
        try:
            await link.receive()
        except (LinkBroken, LinkClosed):
            return True
    return False


async def report_of(run: CutRun, replica: int, generation: int) -> None:
    """Report a finished group to the data server in the name of a replica generation."""
    assert run.map.run is not None
    identity = Identity(role="worker", node="ghost", incarnation=1)
    report = Finished(epoch=run.map.run.epoch, number=0, attempt=1, images=16, loss=0.0)
    body = ReportGroups(
        run=run.map.run.id, replica=replica, replica_generation=generation, partition=0, finished=(report,)
    )
    async with run.network.connect(run.map.nodes["data-0"].address, identity, timeout_s=20.0) as link:
        unpack(await link.call(pack(body), timeout_s=20.0), Reported)


@pytest.mark.parametrize("plan", PLANS)
async def test_a_replica_that_lost_a_worker_begins_anew_as_a_unit_and_the_other_one_goes_on(
    plan: str,
) -> None:
    async with cut_run(epochs=ENDLESS, plan=plan) as run, training(run):
        before = await run.both_live()
        hit, other = run.replica_of(1), run.replica_of(3)
        at_first, survivor = await run.trained(other), run.pid(0)
        await run.kill(1)
        # The cluster knew it from the kill itself, and waited for no grace.
        await run.see(lambda m: hit not in m.replica_generations(), "the replica to be missed")
        after = await run.both_live()
        at_last = await run.trained(other)

        assert after[hit] != before[hit]
        assert after[other] == before[other]
        assert run.map.members(hit) == ("worker-0", "worker-1")
        assert run.pid(0) == survivor, "the survivor is the same process"
        assert at_first is not None
        assert at_last is not None
        assert at_last > at_first
        await run.begun(len(run.epochs) + 3)
        assert all_images(run)


async def test_messages_of_an_ended_replica_generation_are_refused_or_change_nothing() -> None:
    async with cut_run(epochs=ENDLESS) as run, training(run):
        before = await run.both_live()
        hit = run.replica_of(1)
        await run.kill(1)
        await run.see(
            lambda m: m.replica_generations().get(hit, before[hit]) != before[hit], "another generation"
        )
        assert run.map.run is not None
        old = Greet(
            run=run.map.run.id, replica=hit, replica_generation=before[hit], partition=1, received=0, begun=0
        )
        late = (await run.ask("data-0"))["late_reports"]
        refused = (await run.ask("worker-0"))["refused_greets"]

        assert await is_refused(run, "worker-0", old)
        assert (await run.ask("worker-0"))["refused_greets"] == refused + 1
        await report_of(run, hit, before[hit])
        assert (await run.ask("data-0"))["late_reports"] == late + 1
        await run.begun(len(run.epochs) + 3)
        assert all_images(run)


async def test_both_workers_of_a_replica_may_die_at_once() -> None:
    async with cut_run(epochs=ENDLESS) as run, training(run):
        before = await run.both_live()
        hit, other = run.replica_of(0), run.replica_of(2)
        await asyncio.gather(run.kill(0), run.kill(1))
        await run.see(lambda m: hit not in m.replica_generations(), "the replica to be missed")
        after = await run.both_live()

        assert after[hit] != before[hit]
        assert after[other] == before[other]
        await run.begun(len(run.epochs) + 3)
        assert all_images(run)


async def test_a_worker_of_each_replica_may_die_at_once() -> None:
    async with cut_run(epochs=ENDLESS) as run, training(run):
        before = await run.both_live()
        await asyncio.gather(run.kill(0), run.kill(3))
        await run.see(lambda m: not m.replica_generations(), "both replicas to be missed")
        after = await run.both_live()

        assert not set(after.values()) & set(before.values())
        await run.begun(len(run.epochs) + 3)
        assert all_images(run)


async def test_a_worker_that_is_stopped_counts_as_dead_and_takes_a_place_again_when_it_goes_on() -> None:
    async with cut_run(epochs=ENDLESS) as run, training(run):
        before = await run.both_live()
        hit, other, stopped = run.replica_of(1), run.replica_of(3), run.pid(1)
        os.kill(stopped, signal.SIGSTOP)
        try:
            # Its links are silent for 15 s, and then the grace.
            await run.see(lambda m: hit not in m.replica_generations(), "the silent worker to be missed")
            at_first = await run.trained(other)
            await run.begun(len(run.epochs) + 3)
            at_last = await run.trained(other)
        finally:
            os.kill(stopped, signal.SIGCONT)
        after = await run.both_live()

        assert at_first is not None
        assert at_last is not None
        assert at_last > at_first, "the other replica has the epochs to itself"
        assert after[hit] != before[hit]
        assert after[other] == before[other]
        assert run.pid(1) == stopped
        assert not any("died" in line for line in run.lines), run.lines
        await run.begun(len(run.epochs) + 3)
        assert all_images(run)


# --- deaths at awkward moments -------------------------------------------------------------------


async def test_workers_may_die_before_the_first_group() -> None:
    async with cut_run(epochs=3) as run:
        await run.kill(2)
        async with training(run) as task:
            await run.see(lambda m: m.run is not None, "the run")
            assert run.map.run is not None
            assert run.map.run.phase == "preparing"
            await run.kill(1)
            await task

        assert run.deaths() == 2
        assert [epoch.images for epoch in run.epochs] == [IMAGES] * 3


async def test_a_worker_may_die_while_other_roles_are_still_starting() -> None:
    config = make_config({"data": "digits", "epochs": 2, "partitions": 2, "processes": True, "threads": 1})
    lines: list[str] = []
    cluster = ProcessCluster(config, on_line=lines.append)

    async def kill() -> None:
        await until(lambda: "worker-0" in cluster.children)
        child = cluster.children["worker-0"]
        await child.address
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await child.ended.wait()

    async with asyncio.TaskGroup() as group:
        killer = group.create_task(kill(), name="killer")
        async with cluster:
            await killer
            result = await cluster.train()

    assert lines[0] == "worker-0 died: killed by signal 9; starting it again"
    # If it was a member before it died, the map reports its return, and perhaps the death again.
    assert set(lines[1:]) <= {"worker-0 came back as a new incarnation", "worker-0 died"}
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 2


async def test_workers_may_die_between_epochs() -> None:
    async with cut_run(epochs=6) as run:
        pids = []

        def on_epoch(epoch: object) -> None:
            if len(pids) < 2:  # now nothing is leased: the driver has just evaluated
                pids.append(run.pid(3 * len(pids)))
                os.kill(pids[-1], signal.SIGKILL)

        result = await run.cluster.train(on_epoch)

    assert len(pids) == run.deaths() == 2
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 6


async def test_a_worker_that_was_well_uses_up_no_restarts() -> None:
    policy = RestartPolicy(most=2, sound_s=0.001)
    times = policy.most + 2
    async with cut_run(epochs=ENDLESS, restarts=policy) as run, training(run):
        for _ in range(times):
            await run.both_live()
            await run.kill(1)
            await run.see(lambda m: len(m.replica_generations()) < 2, "the replica to be missed")
        await run.both_live()

        assert run.deaths() == times
        assert all_images(run)


# --- many deaths ---------------------------------------------------------------------------------

EPOCHS, KILLS = 120, 9


async def outage(run: CutRun, hit: int, other: int) -> int | None:
    """Groups that the other replica trains while one is out; None if it was out itself meanwhile."""
    generations = run.map.replica_generations()
    first = await run.trained(other) if other in generations else None
    if first is None:
        return None

    def over(cluster: ClusterMap) -> bool:
        now = cluster.replica_generations()
        back = now.get(hit) not in (None, generations.get(hit))
        ended = cluster.run is None or cluster.run.phase == "finished"
        return back or ended or now.get(other) != generations[other]

    await run.see(over, "the end of an outage")
    last = await run.trained(other)
    return (
        last - first
        if last is not None and run.map.replica_generations().get(other) == generations[other]
        else None
    )


async def kill_at_random(run: CutRun, dice: random.Random) -> list[int]:
    """Kill workers at random moments of the first epochs; returns the groups of the others in the outages."""
    moments = sorted(dice.uniform(1, 0.8 * EPOCHS) for _ in range(KILLS))
    watches = []
    async with asyncio.TaskGroup() as group:
        for moment in moments:
            await run.begun(int(moment))
            while True:
                counts = await run.ask("data-0")
                if counts.epoch > int(moment) or counts.finished >= moment % 1 * counts.groups:
                    break
            worker = dice.randrange(WORKERS)
            hit = run.replica_of(worker)
            watch = outage(run, hit, other=1 - hit) if hit >= 0 else None
            if watch is not None:
                watches.append(group.create_task(watch, name=f"outage-{len(watches)}"))
            await run.kill(worker)
    return [groups for watch in watches if (groups := watch.result()) is not None]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "plan"), [(1, "layers"), (2, "vertical"), (3, "layers")])
async def test_workers_that_are_killed_at_random_moments_cost_no_image_and_stop_no_other_replica(
    seed: int, plan: str
) -> None:
    async with cut_run(epochs=EPOCHS, plan=plan, seed=seed) as run:
        async with training(run) as task:
            await run.both_live()
            outages = await kill_at_random(run, random.Random(seed))
            assert not task.done(), "every kill was one of a run in progress"
            result: RunResult = await task
        data = result.statistics["data-0"]

    assert run.deaths() == KILLS == sum(" died: " in line for line in run.lines), run.lines
    assert outages, "no replica was ever alone"
    assert min(outages) > 0, outages
    assert all_images(run)
    skipped = sum(epoch.skipped for epoch in result.epochs)
    # Every leased group was finished or returned.
    groups = EPOCHS * -(-IMAGES // 16)
    assert groups - skipped <= data.leased - data.returned <= groups
    assert data.returned > 0
    assert result.epochs[-1].test_accuracy > 0.9
    assert sum(bool(re.search(r"worker-\d died: killed", event["event"])) for event in result.events) == KILLS


# --- accuracy ------------------------------------------------------------------------------------

MNIST = os.environ.get("ADAM_DATA_DIR", "")


@pytest.mark.convergence
@pytest.mark.skipif(not MNIST, reason="ADAM_DATA_DIR names no folder with MNIST")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", PLANS)
def test_cut_replicas_learn_mnist_in_three_epochs_though_a_worker_is_killed(plan: str) -> None:
    cut = ("--replicas", "2", "--partitions", "2", "--processes", "--plan", plan)
    with Command("train", "--data", MNIST, "--epochs", "3", "--seed", "1", *cut) as command:
        command.wait_for("epoch 1/3")
        os.kill(command.child("worker-2"), signal.SIGKILL)
        command.wait_for("worker-2 died: killed by signal 9; starting it again")
        code, output = command.finish(seconds=580), command.output
    accuracy = re.search(r"test accuracy (\d+\.\d+)% after 3 epochs", output)

    assert code == 0, output
    assert re.findall(r"epoch \d/3: .* ([\d,]+) images in", output) == ["60,000"] * 3, output
    assert accuracy is not None
    assert float(accuracy[1]) >= 98.7, output
