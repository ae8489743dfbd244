"""Two replicas of two processes each, and a watcher that follows them while workers are killed.

The watcher is a member of the cluster like any driver: it receives every change of the map, and queries the
counts of roles. No wait depends on time.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from adam_async.cluster.launcher import RestartPolicy
from adam_async.cluster.networks import cluster_network
from adam_async.cluster.processes import ProcessCluster
from adam_async.controller.client import Membership
from adam_async.driver.role_queries import RoleQueries
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.option_sources import make_config
from adam_async.run.result import EpochResult
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.runs import until
from tests.processes.commands import command_line
from transport import BufferPool, Identity, Network, TransportError

WORKERS = 4
POLICY = RestartPolicy()
IMAGES = 1437
"""Of the digits."""

PATIENCE_S = 90.0
"""Deadline in seconds of events that take seconds on an idle machine."""


class CutRun:
    """A cluster of processes that trains the partitioned digits, with the actions of a test.

    Args:
        cluster: The processes, all of them started.
        lines: Events of the cluster.
        network: Links of the watcher to the roles.
        identity: Identity of the watcher.
        membership: Membership of the watcher.
    """

    def __init__(
        self,
        cluster: ProcessCluster,
        lines: list[str],
        network: Network,
        identity: Identity,
        membership: Membership,
    ) -> None:
        self.cluster, self.lines, self.network = cluster, lines, network
        self.epochs: list[EpochResult] = []
        self.pids = {child.pid or 0 for child in cluster.children.values()}
        self._joined_membership = membership
        self._asks = RoleQueries(Endpoint(network, identity), waits=cluster.config.waits)

    @property
    def map(self) -> ClusterMap:
        return self._joined_membership.map

    async def see(self, predicate: Callable[[ClusterMap], bool], what: str) -> ClusterMap:
        """Wait until the map fulfils a predicate."""
        return await self._joined_membership.wait_for(predicate, what, PATIENCE_S)

    async def both_live(self) -> dict[int, int]:
        """Wait until both replicas train; returns their generations."""
        return (
            await self.see(lambda m: len(m.replica_generations()) == 2, "both replicas")
        ).replica_generations()

    async def begun(self, epoch: int) -> None:
        """Wait until an epoch has begun."""
        await self.see(lambda m: m.epoch is not None and m.epoch.number >= epoch, f"epoch {epoch}")

    async def ask(self, node: str) -> Any:
        """The counts of a node."""
        return await self._asks.statistics(self.map.nodes[node].address, "")

    async def trained(self, replica: int) -> int | None:
        """Return the number of groups that a replica generation has trained; None if it does not answer."""
        with suppress(TransportError, AttributeError, IndexError):
            return int((await self.ask(self.map.members(replica)[0])).engine.finished)
        return None

    def pid(self, worker: int) -> int:
        """The process of a worker; there must be one."""
        return self.cluster.children[f"worker-{worker}"].pid or 0

    async def kill(self, worker: int) -> None:
        """Kill the process of a worker as soon as it runs; fails if the process does not die."""
        node = f"worker-{worker}"
        await until(lambda: command_line(self.pid(worker)) != "" and not self._children[node].ended.is_set())
        child, pid = self._children[node], self.pid(worker)
        self.pids.add(pid)
        os.kill(pid, signal.SIGKILL)
        await child.ended.wait()
        await until(lambda: self._children[node] is not child)
        assert f"{node} died: killed by signal 9; starting it again" in self.lines

    @property
    def _children(self) -> dict[str, Any]:
        return self.cluster.children

    def deaths(self) -> int:
        """Workers that died by a kill and were started again."""
        return sum("died: killed by signal 9; starting it again" in line for line in self.lines)

    def replica_of(self, worker: int) -> int:
        return self.map.nodes[f"worker-{worker}"].replica


@asynccontextmanager
async def cut_run(*, restarts: RestartPolicy = POLICY, **options: Any) -> AsyncIterator[CutRun]:
    """Start the processes, and check that all of them have ended with the block."""
    config = make_config(
        {"data": "digits", "replicas": 2, "partitions": 2, "processes": True, "threads": 1, **options}
    )
    lines: list[str] = []
    drawn: list[bytes] = []

    def entropy(count: int) -> bytes:
        drawn.append(os.urandom(count))
        return drawn[-1]

    async with ProcessCluster(config, on_line=lines.append, entropy=entropy, restarts=restarts) as cluster:
        network = cluster_network(drawn[0].hex(), entropy=os.urandom, buffers=BufferPool())
        identity = Identity(role="driver", node="watcher", incarnation=1)
        controller = await cluster.children["controller"].address
        membership = Membership(
            network=network,
            controller=controller,
            identity=identity,
            record=NodeRecord(role="driver", address="", incarnation=1),
            waits=config.waits,
            traffic=Traffic("watcher"),
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(membership.run(), name="watcher/membership")
            run = CutRun(cluster, lines, network, identity, membership)
            try:
                await run.see(lambda m: len(m.live("worker")) == WORKERS, "all workers")
                yield run
            finally:
                task.cancel()
        run.pids |= {child.pid or 0 for child in cluster.children.values()}
    assert [pid for pid in run.pids if command_line(pid)] == []


@asynccontextmanager
async def training(run: CutRun) -> AsyncIterator["asyncio.Task[Any]"]:
    """Train during the block; the end of the block cancels the training."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run.cluster.train(run.epochs.append), name="watched/train")
        yield task
        task.cancel()
