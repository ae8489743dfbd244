"""A program that reads, sets and watches the map by the shipped `MapClient`, and records all answers.

The user is a member of the cluster with its own record, so the controllers count a silent user as lost. The
user sends one question at a time. If the client stops waiting, the user makes another client and continues,
as a role's supervisor would.

A member with the shipped `Membership`: it writes to its record, loses its membership and joins again.

After the loss the member takes another incarnation and continues, as a role's supervisor would.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from adam_async.controller.client import TAKEN, Membership
from adam_async.controller.map_client import MapClient, MapUpdate, Outcome
from adam_async.driver.takeover import submit, update_program
from adam_async.errors import DeadlineExceeded, RoleDied, RunFailed
from adam_async.model.named import mlp
from adam_async.run.cluster_map import ClusterMap, NodeRecord, ready_word
from adam_async.run.config import Config, Waits
from adam_async.run.map_changes import changed
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.traffic import Traffic
from tests.simulation import linearizability as lin
from tests.simulation.checkers.histories import check_kept
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Violation
from tests.simulation.scenarios.controller_group import ControllerGroup, network_of
from transport import Identity, LinkClosed, Network, RemoteError

KEYS = ("nodes/a", "nodes/b", "nodes/c")
"""Keys that only clients set: records of nodes that are not live."""

WAITS = Waits(dial_s=10.0, call_s=2.0, patience_s=30.0, grace_s=1.0)

PATIENT_S = 1000.0
"""Time limit in seconds of a question that a user asks until it is answered: longer than any run."""

SHORT = 0.3
"""Factor of half of the pauses; the others have the factor 2 - `SHORT`, so the mean stays equal. More faults
affect questions that are close together."""

INVALID = "invalid"
"""Code that refuses a value which is not a record."""

ANOTHER = "another group"
"""Name of another group of controllers; a question with that group's versions has no effect here."""

RUN = TrainingProgram(
    config=Config(images_per_group=10, servers=1, replicas=1),
    spec=mlp((4, 2), input_shape=(1, 2, 2)).to_dict(),
)
"""The program of all runs."""


@dataclass(eq=False, kw_only=True)
class User:
    """One client, over all its incarnations."""

    name: str
    group: ControllerGroup
    ledger: Ledger
    controllers: Sequence[str]
    """Addresses of controllers that the user has at its start."""
    role: str = "worker"
    """Role of the user's record."""
    waits: Waits = WAITS
    watches: bool
    """Whether the user watches the map over the same client, too."""
    submits: bool = False
    """Whether the user submits runs; the other users then become ready for them."""
    pause_s: float
    """Mean pause between two questions, in seconds."""
    patience_s: float
    """Time limit of a question, in seconds; it may change at any time."""
    working: bool = True
    """Whether the user sends questions."""
    answered: int = 0
    acknowledged: int = 0
    """Number of the user's last acknowledged write to its own record."""
    _written: int = 0
    _has_question: bool = False

    async def run(self, node: Node) -> None:
        """Send questions and watch the map, as the program of one incarnation."""
        state = _State(self.name, node, self.group)
        while True:
            client = MapClient(
                network=network_of(node),
                controllers=",".join(self.controllers),
                identity=Identity(role=self.role, node=self.name, incarnation=node.incarnation),
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
            await asyncio.sleep(dice.around(self.pause_s) * (SHORT if dice.chance(0.5) else 2.0 - SHORT))
            if not self.working:
                continue
            if dice.chance(0.02):
                client.close()  # open questions and watches fail, and `run` makes another client
            if not self._has_question:  # a question stays open after a give-up or a restart
                progress.begin(self.name)
                self._has_question = True
            try:
                await self._question(client, state)
            except DeadlineExceeded:
                self.ledger.counts["given up"] += 1
                continue
            progress.end(self.name, answered=True)
            self._has_question = False
            self.answered += 1
            self.ledger.operations += 1

    async def _question(self, client: MapClient, state: "_State") -> None:
        """Send one question, and record its answer."""
        dice, record, run = state.dice, state.map.nodes.get(self.name), state.map.run
        joined = record is not None and record.live and record.incarnation == state.node.incarnation
        if not joined or record is None or record.ready != self._ready(state, record) or dice.chance(0.1):
            await self._join(client, state)
        elif self.submits and (run is None or run.over):
            await self._submit(client, state)
        elif dice.chance(0.45):
            await self._get(client, state)
        else:
            await self._set_number(client, state, dice.choose(KEYS))

    async def _join(self, client: MapClient, state: "_State") -> None:
        self._written += 1
        number, old = self._written, state.map.nodes.get(self.name)
        value = {
            "role": self.role,
            "address": f"tcp://{self.name}:1",
            "incarnation": state.node.incarnation,
            "ready": self._ready(state, old) if old is not None else "",
            "info": {"n": number, "train_images": 20},
        }
        key = f"nodes/{self.name}"
        try:
            outcome = await self._set(client, state, key, state.map.version_of(key), value)
        except RemoteError as error:
            if error.code != TAKEN:
                raise Violation("protocol", f"{self.name} asked to join and got {error}") from None
            return  # an earlier link of this user is still open
        if outcome.done:
            self.acknowledged = number

    def _ready(self, state: "_State", record: NodeRecord) -> str:
        """Return the value of `ready` that the user's record needs."""
        run = state.map.run
        if run is None or run.over:
            return record.ready
        generation = state.map.replica_generation(record.replica)
        return ready_word(run.id, generation) if self.role == "worker" else run.id

    async def _submit(self, client: MapClient, state: "_State") -> None:
        value = RUN.record(f"run-{state.map.version}", (self.name, state.node.incarnation))
        outcome = await self._set(client, state, "run", state.map.version_of("run"), value)
        self.ledger.counts["runs"] += outcome.done is True

    async def _get(self, client: MapClient, state: "_State") -> None:
        handles = self.group.histories.begin_reads(self.name, KEYS)
        state.map = state.show(await client.get(timeout_s=self.patience_s), state.map, "asks")
        self.group.histories.end_reads(handles, state.map)

    async def _set_number(self, client: MapClient, state: "_State", key: str) -> None:
        operations, dice = self.group.histories.operations, state.dice
        expected = state.map.version_of(key)
        if dice.chance(0.1):
            expected = dice.below(expected + 1)
        self.ledger.counts["values"] += 1
        number = self.ledger.counts["values"]
        value = {
            "role": "worker",
            "address": "",
            "incarnation": "none" if dice.chance(0.03) else 1,  # "none" is invalid
            "live": False,
            "info": {"n": number},
        }
        handle = operations.begin(self.name, key, lin.CompareAndSet(expected=expected, value=str(number)))
        is_foreign = dice.chance(0.015)
        try:
            outcome = await self._set(client, state, key, expected, value, is_foreign=is_foreign)
        except RemoteError as error:
            if error.code != INVALID:
                text = f"{self.name} asked to set {key} and got {error}"
                raise Violation("protocol", text) from None
            operations.refused(handle)
            return
        if is_foreign and outcome.done is False:
            operations.refused(handle)
        elif outcome.done is None:
            operations.unknown(handle)
        elif outcome.done:
            operations.end(handle, lin.Done(version=outcome.at))
        else:
            operations.end(handle, lin.Conflict(version=outcome.at))

    async def _set(
        self,
        client: MapClient,
        state: "_State",
        key: str,
        expected: int,
        value: Any,
        *,
        is_foreign: bool = False,
    ) -> Outcome:
        """Set a key, sometimes without the version that the user has, or with another group's version."""
        knows = state.group != "" and not is_foreign and state.dice.chance(0.7)
        outcome = await client.compare_and_set(
            key,
            expected,
            value,
            after=state.map.version if knows else -1,
            group=state.group if knows else ANOTHER if is_foreign else "",
            timeout_s=self.patience_s,
        )
        for news in outcome.updates:
            state.map = state.show(news, state.map, "asks")
        self.ledger.counts["unknown outcomes"] += outcome.done is None
        return outcome

    def check_kept(self, cluster: ClusterMap) -> None:
        """Check that a map has the user's acknowledged writes. Raises Violation."""
        check_kept(cluster, self.name, self.acknowledged)


class _State:
    """State of one incarnation, over all its clients."""

    def __init__(self, name: str, node: Node, group: ControllerGroup) -> None:
        self.node = node
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


AGAIN_S = 0.3
"""Pause before a program that gave up starts again, in seconds."""

INCARNATIONS = 1000
"""Number of incarnations reserved per machine start; a program that starts again takes the next one."""

LINGERS_S = 1.0
"""Time in seconds for which a hanging process keeps its link."""

NEWS_S = 1.0
"""Time limit of a wait for a newer map, in seconds."""


def new_membership(
    network: Network, controllers: str, identity: Identity, waits: Waits, *, info: Mapping[str, Any] = {}
) -> Membership:
    """Make the membership of one incarnation of a role."""
    record = NodeRecord(
        role=identity.role,
        address=f"tcp://{identity.node}:1",
        incarnation=identity.incarnation,
        info=dict(info),
    )
    return Membership(
        network=network,
        controller=controllers,
        identity=identity,
        record=record,
        waits=waits,
        traffic=Traffic(identity.node),
    )


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
        identity = Identity(role="worker", node=self.name, incarnation=incarnation)
        controllers, info = ",".join(self.controllers), {"number": self._written}
        return new_membership(network_of(node), controllers, identity, self.waits, info=info)

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
                    await membership.report_death(self.other, self.group.world.now)
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
        """Submit a run that no server becomes ready for, or end it; the run has no epoch."""
        run = membership.map.run
        if run is None or run.phase in ("failed", "finished"):
            record = RUN.record(f"{self.name}-{dice.below(1 << 20)}", membership.member)
            with contextlib.suppress(RunFailed):  # the other member was first
                await submit(membership, record)
            return
        await update_program(membership, lambda newest: msgspec.structs.replace(newest, phase="finished"))
        await membership.update("epoch", lambda newest: newest.epoch)

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
