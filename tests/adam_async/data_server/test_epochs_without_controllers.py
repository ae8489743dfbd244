"""Within an epoch no image waits for a controller, on simulated machines.

Replicas of a pool ask seldom, and an epoch keeps its rate while controllers are killed or have no majority.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest

from adam_async.data_server.questions import Questions
from adam_async.data_server.service import DataServer
from adam_async.messages import LeaseGroups, ReportGroups
from adam_async.run.config import Config
from adam_async.run.result import RunResult
from tests.simulation.pool import JOB_S, SimulatedPool
from tests.simulation.scenario import Ledger, Node, World, simulate
from tests.simulation.scenarios.cluster import CONTROLLERS, WAITS
from tests.simulation.scenarios.training_cluster import TrainingCluster, images
from tests.simulation.scenarios.training_setups import Setup, setup_of
from transport import Request

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(900)]

BEGIN_S, END_S = 1.5, 2.5
"""Periods at the begin and the end of the epoch in which pieces are smaller, in seconds."""

LOOK_S = 0.02
"""Interval between two looks at the map, in seconds."""

LEAST_RATE = 0.98
"""Least rate within an epoch, in parts of the undisturbed rate."""

Disturb = Callable[[World], Coroutine[None, None, None]]
"""Strikes controllers, from the first question for groups on."""


@dataclass(frozen=True)
class Epoch:
    """An epoch of groups of one image."""

    replicas: int
    groups: int
    """Number of groups in an equal share."""
    group_s: float
    """Mean work of a group, in seconds."""
    rule: str = "images"
    step: int = 1


@dataclass
class Seen:
    """Observations during the epoch."""

    asked: list[tuple[float, int]] = field(default_factory=list)
    """Time and replica of each question for groups."""
    reports: int = 0
    versions: set[int] = field(default_factory=set)
    """Versions of the map."""
    ended: float = 0.0


class ManyWorkers(TrainingCluster):
    """A training cluster with any number of workers, whose images are those of the digits again and again."""

    def __init__(self, world: World, setup: Setup, count: int) -> None:
        self._count = count
        super().__init__(world, setup, Ledger(lambda: world.now))
        for number in range(2, setup.config.replicas):
            world.node(f"worker-{number}").start(self._run_worker)

    async def _run_data_server(self, node: Node) -> None:
        digits, count = images(), self._count
        many = np.resize(np.asarray(digits.train_images), (count, *digits.train_images.shape[1:]))
        dataset = replace(digits, train_images=many, train_labels=np.resize(digits.train_labels, count))
        while True:
            server = DataServer(
                self._member("data", node), dataset, make_pool=SimulatedPool, available_bytes=lambda: 1 << 30
            )
            await self._supervise(node, server)


def train(epoch: Epoch, disturb: Disturb | None = None) -> tuple[Seen, RunResult]:
    """Train one epoch; return what was seen, and the result."""
    seen, ask = Seen(), Questions.ask
    config = Config(
        epochs=1,
        replicas=epoch.replicas,
        servers=2,
        data_servers=2,
        images_per_group=1,
        push_every=epoch.step,
        threads=1,
        epoch_rule=epoch.rule,
        epoch_fraction=1.0,
        rate=0.01,
        kernels="numpy",
        waits=WAITS,
    )

    async def run(world: World) -> RunResult:
        cluster = ManyWorkers(world, setup_of({}, config), epoch.replicas * epoch.groups)

        def noted(self: Questions, request: Request, body: LeaseGroups | ReportGroups) -> None:
            if isinstance(body, ReportGroups):
                seen.reports += 1
            elif body.count and not seen.ended:
                seen.asked.append((world.now, body.replica))
            ask(self, request, body)

        patched.setattr(Questions, "ask", noted)
        strikes: asyncio.Task[None] | None = None
        while not cluster.is_over:
            await asyncio.sleep(LOOK_S)
            found = cluster.map.epoch
            if found is not None and found.ended:
                seen.ended = seen.ended or world.now
            elif found is not None and seen.asked:
                seen.versions.add(cluster.map.version)
                if disturb is not None and strikes is None:
                    strikes = asyncio.create_task(disturb(world), name="strikes")
        if strikes is not None:
            strikes.cancel()
        assert cluster.driver.task is not None
        result = cluster.driver.task.result()
        assert isinstance(result, RunResult)
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Setup, "pace", property(lambda _: JOB_S / epoch.group_s))
        result = simulate(run, seed=1).result
    assert [each.images for each in result.epochs] == [epoch.replicas * epoch.groups]
    return seen, result


def test_each_of_64_replicas_of_a_pool_asks_twice_a_second_and_no_question_changes_the_map() -> None:
    seen, _ = train(Epoch(replicas=64, groups=600, group_s=0.01, step=10))
    assert len(seen.versions) == 1, seen.versions
    began = seen.asked[0][0]
    took_s = seen.ended - began
    usual = [at for at, _ in seen.asked if began + BEGIN_S < at < seen.ended - END_S]
    assert len(usual) <= 2 * 64 * (took_s - BEGIN_S - END_S)
    of_replica = Counter(replica for _, replica in seen.asked)
    assert len(of_replica) == 64
    assert max(of_replica.values()) <= 2 * took_s + 14
    assert seen.reports <= 1.5 * len(seen.asked)


# --- the rate while controllers are lost ---------------------------------------------------------

LONG = Epoch(replicas=8, groups=650, group_s=0.04)
"""An epoch of 26 seconds."""


async def kill_in_turn(world: World) -> None:
    """Kill a controller every four seconds, which starts again after half a second."""
    while True:
        for name in CONTROLLERS:
            await asyncio.sleep(3.5)
            world.node(name).kill()
            await asyncio.sleep(0.5)
            world.node(name).restart()


async def take_the_majority(world: World) -> None:
    """Stop two controllers for 20 s."""
    await asyncio.sleep(2.0)
    lost = [world.node(name) for name in list(CONTROLLERS)[:2]]
    for node in lost:
        node.kill()
    await asyncio.sleep(20.0)
    for node in lost:
        node.restart()


@cache
def undisturbed(epoch: Epoch) -> float:
    """Return the length of an undisturbed epoch, in seconds."""
    return train(epoch)[1].epochs[0].train_s


@pytest.mark.parametrize("disturb", [kill_in_turn, take_the_majority])
@pytest.mark.parametrize("rule", ["images", "replicas"])
def test_an_epoch_has_its_rate_while_controllers_are_lost(rule: str, disturb: Disturb) -> None:
    epoch = replace(LONG, rule=rule)
    seen, result = train(epoch, disturb)
    assert seen.ended - seen.asked[0][0] > 22, "the strikes are within the epoch"
    assert undisturbed(epoch) / result.epochs[0].train_s >= LEAST_RATE
