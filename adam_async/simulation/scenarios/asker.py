"""What asks the controllers for the map by the shipped `MapClient` in a run, sets keys of it and watches it.

All that a client is told is written down; whether it all fits together is checked elsewhere (`Histories`).
A program whose client gave up makes another one and goes on, as whoever supervises a role would do it.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from adam_async.controller.map_client import MapClient, MapUpdate, version_of
from adam_async.controller.map_history import changed
from adam_async.errors import DeadlineExceeded, RoleDied
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.random_streams import Dice
from adam_async.runtime.traffic import Traffic
from adam_async.simulation import linearizability as told
from adam_async.simulation.nodes import Node
from adam_async.simulation.scenario import Ledger, Violation
from adam_async.simulation.scenarios.controller_group import ControllerGroup, network_of
from adam_async.simulation.scenarios.map_user import KEYS
from transport import Identity, LinkClosed, RemoteError

INVALID = "invalid"
"""Refusal of a value that is no record."""

ANOTHER = "another group"
"""Of which a version is none of this one: nothing is done."""


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
        for news in outcome.updates:
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

    def show(self, news: MapUpdate, seen: ClusterMap, what: str) -> ClusterMap:
        """Take what a client says of the map, and write down what it shows."""
        if news.whole is not None:
            seen = news.whole
        elif news.change is not None:
            seen = changed(seen, news.change)
        self.group = news.group
        self._histories.shown(f"{self._name}/{what}", news.group, seen, whole=news.whole is not None)
        return seen
