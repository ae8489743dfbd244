"""A program that reads, sets and watches the map by the shipped `MapClient`.

The user records all answers, which `Histories` checks. If its client stops waiting, the user makes another
client and continues, as the supervisor of a role would.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adam_async.controller.map_client import MapClient, MapUpdate
from adam_async.errors import DeadlineExceeded, RoleDied
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.map_changes import changed
from adam_async.runtime.random_streams import RandomStream
from adam_async.runtime.traffic import Traffic
from adam_async.simulation import linearizability as lin
from adam_async.simulation.nodes import Node
from adam_async.simulation.scenario import Ledger, Violation
from adam_async.simulation.scenarios.controller_group import ControllerGroup, network_of
from adam_async.simulation.scenarios.map_user import KEYS
from transport import Identity, LinkClosed, RemoteError

INVALID = "invalid"
"""Code of the refusal of a value that is no record."""

ANOTHER = "another group"
"""Name of another group of controllers; a question with versions of that group has no effect here."""


@dataclass(eq=False, kw_only=True)
class MapClientUser:
    """Reads and sets keys by `MapClient`, one question at a time, over all incarnations of its machine."""

    name: str
    group: ControllerGroup
    ledger: Ledger
    controllers: Sequence[str]
    """Addresses of controllers that the user has at its start."""
    waits: Waits
    patience_s: float
    """Time limit of a question, in seconds."""
    pause_s: float
    """Mean pause between two questions, in seconds."""
    watches: bool
    """Whether the user watches the map over the same client, too."""
    working: bool = True
    """Whether the user sends questions."""
    answered: int = 0
    _has_question: bool = False

    async def run(self, node: Node) -> None:
        """Send questions and watch the map, as the program of one incarnation."""
        state = _State(self.name, node, self.group)
        while True:
            client = MapClient(
                network=network_of(node),
                controllers=",".join(self.controllers),
                identity=Identity(role="worker", node=self.name, incarnation=node.incarnation),
                waits=self.waits,
                traffic=Traffic(self.name),
            )
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._ask(client, state), name=f"{self.name}/asks")
                    if self.watches:
                        group.create_task(state.watch(client), name=f"{self.name}/watches")
            except* (RoleDied, LinkClosed):
                self.ledger.counts["clients made anew"] += 1
            finally:
                client.close()

    async def _ask(self, client: MapClient, state: "_State") -> None:
        dice, progress = state.dice, self.group.progress
        while True:
            await asyncio.sleep(dice.around(self.pause_s))
            if not self.working:
                continue
            if dice.chance(0.02):
                client.close()  # open questions and watches fail, and `run` makes another client
            if not self._has_question:  # a question stays open after a give-up or a restart
                progress.begin(self.name)
                self._has_question = True
            asks = (
                self._get(client, state) if dice.chance(0.4) else self._set(client, state, dice.choose(KEYS))
            )
            try:
                await asks
            except DeadlineExceeded:
                self.ledger.counts["given up"] += 1
                continue
            progress.end(self.name, answered=True)
            self._has_question = False
            self.answered += 1
            self.ledger.operations += 1

    async def _get(self, client: MapClient, state: "_State") -> None:
        handles = self.group.histories.begin_reads(self.name, KEYS)
        state.map = state.show(await client.get(timeout_s=self.patience_s), state.map, "asks")
        self.group.histories.end_reads(handles, state.map)

    async def _set(self, client: MapClient, state: "_State", key: str) -> None:
        operations, dice = self.group.histories.operations, state.dice
        expected = state.map.version_of(key)
        if dice.chance(0.1):
            expected = dice.below(expected + 1)
        self.ledger.counts["values"] += 1
        number = self.ledger.counts["values"]
        value: dict[str, Any] = {
            "role": "worker",
            "address": "",
            "incarnation": "none" if dice.chance(0.03) else 1,  # "none" is invalid
            "live": False,
            "info": {"n": number},
        }
        knows = state.group != "" and dice.chance(0.7)
        group = state.group if knows else ANOTHER if dice.chance(0.05) else ""
        handle = operations.begin(self.name, key, lin.CompareAndSet(expected=expected, value=str(number)))
        try:
            outcome = await client.compare_and_set(
                key,
                expected,
                value,
                after=state.map.version if knows else -1,
                group=group,
                timeout_s=self.patience_s,
            )
        except RemoteError as error:
            if error.code != INVALID:
                text = f"{self.name} asked to set {key} and got {error}"
                raise Violation("protocol", text) from None
            operations.refused(handle)
            return
        for news in outcome.updates:
            state.map = state.show(news, state.map, "asks")
        if group == ANOTHER and outcome.done is False:
            operations.refused(handle)
        elif outcome.done is None:
            self.ledger.counts["unknown outcomes"] += 1
            operations.unknown(handle)
        elif outcome.done:
            operations.end(handle, lin.Done(version=outcome.at))
        else:
            operations.end(handle, lin.Conflict(version=outcome.at))


class _State:
    """State of one incarnation, over all its clients."""

    def __init__(self, name: str, node: Node, group: ControllerGroup) -> None:
        self.dice: RandomStream = group.world.dice.fork(f"{name}/{node.incarnation}")
        self.map = ClusterMap()
        self.group = ""
        self._name = f"{name}/{node.incarnation}"
        self._histories = group.histories
        self._watched = ClusterMap()

    async def watch(self, client: MapClient) -> None:
        """Watch every version of the map; interrupt the watch at random, and continue it."""
        while True:
            after = self._watched.version if self.group else -1
            async with contextlib.aclosing(client.changes(after, self.group)) as all_news:
                async for news in all_news:
                    self._watched = self.show(news, self._watched, "watches")
                    if self.dice.chance(0.02):
                        break

    def show(self, news: MapUpdate, seen: ClusterMap, what: str) -> ClusterMap:
        """Apply an answer of the client to the map, and record its version."""
        if news.whole is not None:
            seen = news.whole
        elif news.change is not None:
            seen = changed(seen, news.change)
        self.group = news.group
        self._histories.shown(f"{self._name}/{what}", news.group, seen, whole=news.whole is not None)
        return seen
