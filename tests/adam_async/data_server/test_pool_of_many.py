"""A pool with 64 replicas on simulated machines: no replica asks often, and no controller is on the way."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from adam_async.data_server.questions import Questions
from adam_async.data_server.service import DataServer
from adam_async.messages import LeaseGroups, ReportGroups
from adam_async.run.config import Config
from adam_async.run.result import RunResult
from adam_async.simulation.pool import JOB_S, SimulatedPool
from adam_async.simulation.scenario import Ledger, Node, World, simulate
from tests.simulation.scenarios.cluster import WAITS
from tests.simulation.scenarios.training_cluster import TrainingCluster, images
from tests.simulation.scenarios.training_setups import Setup, setup_of
from transport import Request

REPLICAS = 64
GROUP_S = 0.01
"""Mean work of a group, in seconds."""

PER_REPLICA = 600
"""Number of groups of one image in an equal share: six seconds of work."""

STEP = 10

BEGIN_S, END_S = 1.5, 2.5
"""Periods at the begin and the end of the epoch in which pieces are smaller, in seconds."""

LOOK_S = 0.02
"""Interval between two looks at the map, in seconds."""


@dataclass
class Seen:
    """Observations during the epoch."""

    asked: list[tuple[float, int]] = field(default_factory=list)
    """Time and replica of each question for groups."""
    reports: int = 0
    versions: set[int] = field(default_factory=set)
    """Versions of the map."""
    ended: float = 0.0


class PoolCluster(TrainingCluster):
    """A training cluster with many workers, whose images are those of the digits again and again."""

    def __init__(self, world: World, setup: Setup) -> None:
        super().__init__(world, setup, Ledger(lambda: world.now))
        for number in range(2, setup.config.replicas):
            world.node(f"worker-{number}").start(self._run_worker)

    async def _run_data_server(self, node: Node) -> None:
        digits, count = images(), REPLICAS * PER_REPLICA
        many = np.resize(np.asarray(digits.train_images), (count, *digits.train_images.shape[1:]))
        dataset = replace(digits, train_images=many, train_labels=np.resize(digits.train_labels, count))
        while True:
            server = DataServer(
                self._member("data", node), dataset, make_pool=SimulatedPool, available_bytes=lambda: 1 << 30
            )
            await self._supervise(node, server)


def epoch_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, RunResult]:
    """Train one epoch; return what was seen, and the result."""
    seen, ask = Seen(), Questions.ask
    config = Config(
        epochs=1,
        replicas=REPLICAS,
        servers=2,
        data_servers=2,
        images_per_group=1,
        push_every=STEP,
        threads=1,
        epoch_rule="images",
        epoch_fraction=1.0,
        rate=0.01,
        kernels="numpy",
        waits=WAITS,
    )
    monkeypatch.setattr(Setup, "pace", property(lambda _: JOB_S / GROUP_S))

    async def run(world: World) -> RunResult:
        cluster = PoolCluster(world, setup_of({}, config))

        def noted(self: Questions, request: Request, body: LeaseGroups | ReportGroups) -> None:
            if isinstance(body, ReportGroups):
                seen.reports += 1
            elif body.count and not seen.ended:
                seen.asked.append((world.now, body.replica))
            ask(self, request, body)

        monkeypatch.setattr(Questions, "ask", noted)
        while not cluster.is_over:
            await asyncio.sleep(LOOK_S)
            epoch = cluster.map.epoch
            if epoch is not None and epoch.ended:
                seen.ended = seen.ended or world.now
            elif epoch is not None and seen.asked:
                seen.versions.add(cluster.map.version)
        assert cluster.driver.task is not None
        result = cluster.driver.task.result()
        assert isinstance(result, RunResult)
        return result

    return seen, simulate(run, seed=1).result


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_of_64_replicas_asks_twice_a_second_and_no_question_changes_the_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, result = epoch_of_a_pool(monkeypatch)
    assert [epoch.images for epoch in result.epochs] == [REPLICAS * PER_REPLICA]
    assert len(seen.versions) == 1, seen.versions
    began = seen.asked[0][0]
    took_s = seen.ended - began
    usual = [at for at, _ in seen.asked if began + BEGIN_S < at < seen.ended - END_S]
    assert len(usual) <= 2 * REPLICAS * (took_s - BEGIN_S - END_S)
    of_replica = Counter(replica for _, replica in seen.asked)
    assert len(of_replica) == REPLICAS
    assert max(of_replica.values()) <= 2 * took_s + 14
    assert seen.reports <= 1.5 * len(seen.asked)
