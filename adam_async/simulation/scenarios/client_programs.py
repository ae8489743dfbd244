"""What uses the shipped clients of the controllers in a run: askers of the map, and members with seats.

All that a client is told is written down; whether it all fits together is checked elsewhere (`Histories`).
A program whose client gave up makes another one and goes on, as whoever supervises a role would do it.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from adam_async.cluster_map import ClusterMap, NodeRecord, RunRecord
from adam_async.config import Waits
from adam_async.controller.changes import changed
from adam_async.controller.client import Membership
from adam_async.controller.map_client import MapClient, News, version_of
from adam_async.errors import DeadlineExceeded, RoleDied, RunFailed
from adam_async.simulation import linearizability as told
from adam_async.simulation.dice import Dice
from adam_async.simulation.nodes import Node
from adam_async.simulation.scenario import Ledger, Violation
from adam_async.simulation.scenarios.controller_group import ControllerGroup, network_of
from adam_async.simulation.scenarios.map_user import KEYS, RUN
from adam_async.traffic import Traffic
from transport import Identity, LinkClosed, RemoteError

INVALID = "invalid"
"""Refusal of a value that is no record."""

AGAIN_S = 0.3
"""Before a program that gave up begins anew."""

LIVES = 1000
"""A program that begins anew takes the next incarnation; a machine's lives are so far apart."""

LINGERS_S = 1.0
"""So long a process that hangs at its end is heard."""

ANOTHER = "another group"
"""Of which a version is none of this one: nothing is done."""

NEWS_S = 1.0
"""So long a member waits for a newer map."""


class Asker:
    """Reads and sets keys by `MapClient`, one question at a time, over all lives of its machine.

    Args:
        name: Of its machine.
        group: Whom it asks.
        ledger: Counts its operations.
        controllers: The addresses that it is given.
        waits: Of its client.
        patience_s: After this long it gives a question up.
        pause_s: Between two questions, in the mean.
        watches: Whether it watches the map as well, over the same client.

    Attributes:
        working: Whether it asks.
        answered: How often it was.
    """

    def __init__(
        self,
        name: str,
        group: ControllerGroup,
        ledger: Ledger,
        *,
        controllers: Sequence[str],
        waits: Waits,
        patience_s: float,
        pause_s: float,
        watches: bool,
    ) -> None:
        self.name = name
        self.working = True
        self.answered = 0
        self._group = group
        self._ledger = ledger
        self._controllers = ",".join(controllers)
        self._waits = waits
        self._patience_s = patience_s
        self._pause_s = pause_s
        self._watches = watches
        self._owed = False

    async def live(self, node: Node) -> None:
        """Ask, and watch, as the program of one life."""
        life = _Life(self.name, node, self._group)
        while True:
            client = MapClient(
                network=network_of(node),
                controllers=self._controllers,
                identity=Identity(role="worker", node=self.name, incarnation=node.life),
                waits=self._waits,
                traffic=Traffic(self.name),
            )
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._ask(client, life), name=f"{self.name}/asks")
                    if self._watches:
                        group.create_task(life.watch(client), name=f"{self.name}/watches")
            except* (RoleDied, LinkClosed):
                self._ledger.counts["clients made anew"] += 1
            finally:
                client.close()

    async def _ask(self, client: MapClient, life: "_Life") -> None:
        dice, progress = life.dice, self._group.progress
        while True:
            await asyncio.sleep(dice.around(self._pause_s))
            if not self.working:
                continue
            if dice.chance(0.02):
                client.close()  # who asks or watches is told, and another client takes its place
            if not self._owed:  # to the machine: giving up, or another life, does not make it less
                progress.owe(self.name)
                self._owed = True
            asks = self._get(client, life) if dice.chance(0.4) else self._set(client, life, dice.choose(KEYS))
            try:
                await asks
            except DeadlineExceeded:
                self._ledger.counts["given up"] += 1
                continue
            progress.pay(self.name, answered=True)
            self._owed = False
            self.answered += 1
            self._ledger.operations += 1

    async def _get(self, client: MapClient, life: "_Life") -> None:
        operations = self._group.histories.operations
        handles = {key: operations.begin(self.name, key, told.Get()) for key in KEYS}
        life.map = life.show(await client.get(timeout_s=self._patience_s), life.map, "asks")
        for key, handle in handles.items():
            record = life.map.nodes.get(key.removeprefix("nodes/"))
            if record is None:
                operations.end(handle, told.Read(version=0, value=None))
            else:
                operations.end(handle, told.Read(version=record.changed, value=str(record.info["n"])))

    async def _set(self, client: MapClient, life: "_Life", key: str) -> None:
        operations, dice = self._group.histories.operations, life.dice
        expected = version_of(life.map, key)
        if dice.chance(0.1):
            expected = dice.below(expected + 1)
        self._ledger.counts["values"] += 1
        number = self._ledger.counts["values"]
        value: dict[str, Any] = {
            "role": "worker",
            "address": "",
            "incarnation": "none" if dice.chance(0.03) else 1,  # which is invalid
            "live": False,
            "info": {"n": number},
        }
        knows = life.group != "" and dice.chance(0.7)
        group = life.group if knows else ANOTHER if dice.chance(0.05) else ""
        handle = operations.begin(self.name, key, told.CompareAndSet(expected=expected, value=str(number)))
        try:
            outcome = await client.compare_and_set(
                key,
                expected,
                value,
                after=life.map.version if knows else -1,
                group=group,
                timeout_s=self._patience_s,
            )
        except RemoteError as error:
            if error.code != INVALID:
                text = f"{self.name} asked to set {key} and was told {error}"
                raise Violation("protocol", text) from None
            operations.refused(handle)
            return
        for news in outcome.news:
            life.map = life.show(news, life.map, "asks")
        if group == ANOTHER and outcome.done is False:
            operations.refused(handle)
        elif outcome.done is None:
            self._ledger.counts["unknown outcomes"] += 1
            operations.unknown(handle)
        elif outcome.done:
            operations.end(handle, told.Done(version=outcome.at))
        else:
            operations.end(handle, told.Conflict(version=outcome.at))


class _Life:
    """What an asker knows in one life, whichever client it has."""

    def __init__(self, name: str, node: Node, group: ControllerGroup) -> None:
        self.dice: Dice = group.world.dice.fork(f"{name}/{node.life}")
        self.map = ClusterMap()
        self.group = ""
        self._name = f"{name}/{node.life}"
        self._histories = group.histories
        self._watched = ClusterMap()

    async def watch(self, client: MapClient) -> None:
        """See every version of the map, and break off now and then to go on from there."""
        while True:
            after = self._watched.version if self.group else -1
            async with contextlib.aclosing(client.changes(after, self.group)) as all_news:
                async for news in all_news:
                    self._watched = self.show(news, self._watched, "watches")
                    if self.dice.chance(0.02):
                        break

    def show(self, news: News, seen: ClusterMap, what: str) -> ClusterMap:
        """Take what a client says of the map, and write down what it shows."""
        if news.whole is not None:
            seen = news.whole
        elif news.change is not None:
            seen = changed(seen, news.change)
        self.group = news.group
        self._histories.shown(f"{self._name}/{what}", news.group, seen, whole=news.whole is not None)
        return seen


class Member:
    """Has a seat by `Membership`, and writes numbers into its record, over all lives of its machine.

    Args:
        name: Of its machine.
        group: Of which controllers it is a member.
        ledger: Counts its operations.
        controllers: The addresses that it is given.
        waits: Of its seat.
        pause_s: Between two things that it does, in the mean.
        other: Of whom it says at times that it has died.

    Attributes:
        working: Whether it does anything but keep its seat.
        seat: The newest.
        acknowledged: The highest number of which it was told that it is written.
    """

    def __init__(
        self,
        name: str,
        group: ControllerGroup,
        ledger: Ledger,
        *,
        controllers: Sequence[str],
        waits: Waits,
        pause_s: float,
        other: str,
    ) -> None:
        self.name = name
        self.working = True
        self.seat: Membership | None = None
        self.acknowledged = 0
        self._group = group
        self._ledger = ledger
        self._controllers = ",".join(controllers)
        self._waits = waits
        self._pause_s = pause_s
        self._other = other
        self._written = 0

    async def live(self, node: Node) -> None:
        """Be a member, as the program of one life."""
        async with asyncio.TaskGroup() as group:
            for incarnation in itertools.count(node.life * LIVES):
                self.seat = seat = self._new_seat(node, incarnation)
                try:
                    async with asyncio.TaskGroup() as seat_group:
                        seat_group.create_task(seat.run(), name=f"{self.name}/seat")
                        seat_group.create_task(self._watch(seat, incarnation), name=f"{self.name}/watches")
                        seat_group.create_task(self._work(seat, incarnation), name=f"{self.name}/works")
                except* _Hangs:
                    group.create_task(self._linger(node, incarnation), name=f"{self.name}/lingers")
                except* (RunFailed, RoleDied, DeadlineExceeded, LinkClosed, _Left):
                    self._ledger.counts["seats given up"] += 1
                await asyncio.sleep(AGAIN_S)

    def _new_seat(self, node: Node, incarnation: int) -> Membership:
        return Membership(
            network=network_of(node),
            controller=self._controllers,
            identity=Identity(role="worker", node=self.name, incarnation=incarnation),
            record=NodeRecord(
                role="worker",
                address=f"tcp://{self.name}:1",
                incarnation=incarnation,
                info={"number": self._written},
            ),
            waits=self._waits,
            traffic=Traffic(self.name),
        )

    async def _watch(self, seat: Membership, incarnation: int) -> None:
        """Write down the maps of a seat: none may be older than the one before, or unlike another's."""
        async for newest in seat.changes():
            histories = self._group.histories
            if newest.version:
                histories.shown(f"{self.name}/{incarnation}/seat", histories.group, newest, whole=True)

    async def _work(self, seat: Membership, incarnation: int) -> None:
        dice = self._group.world.dice.fork(f"{self.name}/{incarnation}")
        await seat.wait_for(lambda _: seat.seated, "a seat", self._waits.patience_s)
        while True:
            await asyncio.sleep(dice.around(self._pause_s))
            if not self.working:
                continue
            chance = dice.random()
            try:
                if chance < 0.06:
                    await seat.report_death(self._other)
                elif chance < 0.12:
                    await self._run(seat, dice)
                elif chance < 0.15:
                    version = seat.map.version
                    await seat.wait_for(lambda newest, v=version: newest.version > v, "news", NEWS_S)  # type: ignore[misc]
                elif chance < 0.18:
                    raise _Hangs
                elif chance < 0.20:
                    await seat.leave()
                    raise _Left
                else:
                    await self._write(seat)
            except DeadlineExceeded:
                continue  # whether it was done is unknown
            self._ledger.operations += 1

    async def _linger(self, node: Node, incarnation: int) -> None:
        """Be a process that is not quite gone: while it is heard the next one has to wait for its seat."""
        client = MapClient(
            network=network_of(node),
            controllers=self._controllers,
            identity=Identity(role="worker", node=self.name, incarnation=incarnation),
            waits=self._waits,
            traffic=Traffic(self.name),
        )
        try:
            with contextlib.suppress(DeadlineExceeded, RoleDied):
                await client.get(timeout_s=LINGERS_S)
                await asyncio.sleep(LINGERS_S)
        finally:
            client.close()

    async def _write(self, seat: Membership) -> None:
        self._written += 1
        number = self._written
        await seat.set_node(info={"number": number})
        self.acknowledged = max(self.acknowledged, number)

    async def _run(self, seat: Membership, dice: Dice) -> None:
        """Submit a run for which nobody is ready, or end it; it has no epoch, and nobody lends."""
        run = seat.map.run
        if run is None or run.phase in ("failed", "finished"):
            record = RunRecord(id=f"{self.name}-{dice.below(1 << 20)}", driver=self.name, **RUN)
            with contextlib.suppress(RunFailed):  # the other one was first
                await seat.submit_run(record)
            return
        await seat.update_run(lambda newest: msgspec.structs.replace(newest, phase="finished"))
        await seat.update_epoch(lambda newest: newest)
        await seat.update_lending(lambda newest: newest)

    def check_kept(self, cluster: ClusterMap) -> None:
        """See that a map has what was acknowledged. Raises Violation."""
        record = cluster.nodes.get(self.name)
        held = record.info["number"] if record is not None else 0
        if held < self.acknowledged:
            text = f"{self.name} was told that {self.acknowledged} is written; the map holds {held}"
            raise Violation("I6", text)

    def check_seated(self, cluster: ClusterMap) -> str:
        """Say what its seat lacks; nothing if the newest map has it, and it has the newest map."""
        if self.seat is None or not self.seat.seated:
            return f"{self.name} has no seat"
        if self.seat.map.version != cluster.version:
            return (
                f"{self.name} has version {self.seat.map.version} of the map; the newest is {cluster.version}"
            )
        return ""


class _Left(Exception):
    """A member said goodbye."""


class _Hangs(Exception):
    """A member ends, and is heard for a while all the same."""
