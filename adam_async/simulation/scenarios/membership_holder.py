"""A member with the shipped `Membership`: it writes to its record, loses its membership and joins again.

After the loss the member takes another incarnation and continues, as the supervisor of a role would.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from adam_async.controller.client import Membership
from adam_async.controller.map_client import MapClient
from adam_async.driver.submission import submit, update_program
from adam_async.errors import DeadlineExceeded, RoleDied, RunFailed
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.config import Waits
from adam_async.runtime.random_streams import RandomStream
from adam_async.runtime.traffic import Traffic
from adam_async.simulation.checkers.histories import check_kept
from adam_async.simulation.nodes import Node
from adam_async.simulation.scenario import Ledger
from adam_async.simulation.scenarios.controller_group import ControllerGroup, network_of
from adam_async.simulation.scenarios.map_user import RUN
from transport import Identity, LinkClosed

AGAIN_S = 0.3
"""Pause before a program that gave up starts again, in seconds."""

INCARNATIONS = 1000
"""Number of incarnations reserved for each start of a machine; a program that starts again takes the next one
of them."""

LINGERS_S = 1.0
"""Time for which a hanging process keeps its link, in seconds."""

NEWS_S = 1.0
"""Time limit of a wait for a newer map, in seconds."""


@dataclass(eq=False, kw_only=True)
class Member:
    """Joins by `Membership` and writes numbers to its record, over all incarnations of its machine."""

    name: str
    group: ControllerGroup
    ledger: Ledger
    controllers: Sequence[str]
    """Addresses of controllers that the member has at its start."""
    waits: Waits
    pause_s: float
    """Mean pause between two operations, in seconds."""
    other: str
    """Node whose death the member sometimes reports."""
    working: bool = True
    """Whether the member does more than keep its membership."""
    membership: Membership | None = None
    acknowledged: int = 0
    """Highest acknowledged number."""
    _written: int = 0

    async def run(self, node: Node) -> None:
        """Run a member, as the program of one incarnation."""
        async with asyncio.TaskGroup() as group:
            for incarnation in itertools.count(node.incarnation * INCARNATIONS):
                self.membership = membership = self._new_membership(node, incarnation)
                try:
                    async with asyncio.TaskGroup() as membership_group:
                        membership_group.create_task(membership.run(), name=f"{self.name}/membership")
                        membership_group.create_task(
                            self._watch(membership, incarnation), name=f"{self.name}/watches"
                        )
                        membership_group.create_task(
                            self._work(membership, incarnation), name=f"{self.name}/works"
                        )
                except* _Hangs:
                    group.create_task(self._linger(node, incarnation), name=f"{self.name}/lingers")
                except* (RunFailed, RoleDied, DeadlineExceeded, LinkClosed, _Left):
                    self.ledger.counts["memberships given up"] += 1
                await asyncio.sleep(AGAIN_S)

    def _new_membership(self, node: Node, incarnation: int) -> Membership:
        return Membership(
            network=network_of(node),
            controller=",".join(self.controllers),
            identity=Identity(role="worker", node=self.name, incarnation=incarnation),
            record=NodeRecord(
                role="worker",
                address=f"tcp://{self.name}:1",
                incarnation=incarnation,
                info={"number": self._written},
            ),
            waits=self.waits,
            traffic=Traffic(self.name),
        )

    async def _watch(self, membership: Membership, incarnation: int) -> None:
        """Record the maps of a membership: versions only rise, and equal versions have equal maps."""
        async for newest in membership.changes():
            histories = self.group.histories
            if newest.version:
                histories.shown(f"{self.name}/{incarnation}/membership", histories.group, newest, whole=True)

    async def _work(self, membership: Membership, incarnation: int) -> None:
        dice = self.group.world.dice.fork(f"{self.name}/{incarnation}")
        await membership.wait_for(lambda _: membership.joined, "its membership", self.waits.patience_s)
        while True:
            await asyncio.sleep(dice.around(self.pause_s))
            if not self.working:
                continue
            chance = dice.random()
            try:
                if chance < 0.06:
                    await membership.report_death(self.other)
                elif chance < 0.12:
                    await self._run(membership, dice)
                elif chance < 0.15:
                    version = membership.map.version
                    await membership.wait_for(lambda newest, v=version: newest.version > v, "news", NEWS_S)  # type: ignore[misc]
                elif chance < 0.18:
                    raise _Hangs
                elif chance < 0.20:
                    await membership.leave()
                    raise _Left
                else:
                    await self._write(membership)
            except DeadlineExceeded:
                continue  # the outcome is unknown
            self.ledger.operations += 1

    async def _linger(self, node: Node, incarnation: int) -> None:
        """Keep a link open as a hanging process would; this link keeps the next incarnation from joining."""
        client = MapClient(
            network=network_of(node),
            controllers=",".join(self.controllers),
            identity=Identity(role="worker", node=self.name, incarnation=incarnation),
            waits=self.waits,
            traffic=Traffic(self.name),
        )
        try:
            with contextlib.suppress(DeadlineExceeded, RoleDied):
                await client.get(timeout_s=LINGERS_S)
                await asyncio.sleep(LINGERS_S)
        finally:
            client.close()

    async def _write(self, membership: Membership) -> None:
        self._written += 1
        number = self._written
        await membership.set_node(info={"number": number})
        self.acknowledged = max(self.acknowledged, number)

    async def _run(self, membership: Membership, dice: RandomStream) -> None:
        """Submit a run for which no role becomes ready, or end it; the run has no epoch and no ledger."""
        run = membership.map.run
        if run is None or run.phase in ("failed", "finished"):
            record = RUN.record(f"{self.name}-{dice.below(1 << 20)}", membership.member)
            with contextlib.suppress(RunFailed):  # the other member was first
                await submit(membership, record)
            return
        await update_program(membership, lambda newest: msgspec.structs.replace(newest, phase="finished"))
        await membership.update("epoch", lambda newest: newest.epoch)
        await membership.update("lending", lambda newest: newest.ledger_record)

    def check_kept(self, cluster: ClusterMap) -> None:
        """Check that a map has the member's acknowledged writes. Raises Violation."""
        check_kept(cluster, self.name, self.acknowledged, field="number")

    def check_joined(self, cluster: ClusterMap) -> str:
        """Return why the member has not joined with the newest map; empty if it has."""
        if self.membership is None or not self.membership.joined:
            return f"{self.name} has not joined"
        if self.membership.map.version != cluster.version:
            own = self.membership.map.version
            return f"{self.name} has version {own} of the map; the newest is {cluster.version}"
        return ""


class _Left(Exception):
    """A member left."""


class _Hangs(Exception):
    """A member ends, but keeps a link for a while."""
