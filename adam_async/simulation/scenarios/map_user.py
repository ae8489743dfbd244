"""A client of the controllers that asks random questions and records the answers.

The user speaks the protocol itself, so its record is exact. The user sends one question at a time, numbered
within a session, to the leader, until an answer or the time limit. The user is also a member of the cluster:
the controllers count a silent user as lost.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from adam_async.messages import (
    NOT_LEADER,
    SESSION_OVER,
    UNKNOWN,
    Body,
    CompareAndSet,
    GetMap,
    MapChanges,
    MapState,
    OpenSession,
    SessionOpened,
    WatchMap,
    pack,
    read_text_tensor,
    text_tensor,
    unpack,
    unpack_any,
)
from adam_async.messages.bounds import MOST_MAP_TEXT_BYTES
from adam_async.model.named import mlp
from adam_async.run.cluster_map import ClusterMap, NodeRecord, ready_word
from adam_async.run.config import Config
from adam_async.run.map_changes import Change, changed
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation import linearizability as lin
from adam_async.simulation.checkers.histories import check_kept
from adam_async.simulation.nodes import Node
from adam_async.simulation.scenario import Ledger, Violation
from adam_async.simulation.scenarios.controller_group import ControllerGroup, network_of
from transport import Identity, Link, Message, RemoteError, RetrySchedule, TransportError

KEYS = ("nodes/a", "nodes/b", "nodes/c")
"""Keys that clients alone set: records of nodes that are not live."""

DIAL_S = 1.0
"""Time limit of a dial, in seconds."""

CALL_S = 1.5
"""Time limit of an answer of one controller, in seconds."""

PAUSE_S = 0.3
"""Pause after a controller that gave no answer, in seconds."""

SHORT = 0.3
"""Factor of half of the pauses; the factor of the others is 2 - `SHORT`, so the mean stays equal. More faults
affect questions that are close together."""

WATCH_S = 4.0
"""Wait of a watch for news, in seconds."""

RETRY = RetrySchedule(first_s=0.1, longest_s=0.5)


RUN = TrainingProgram(
    config=Config(images_per_group=10, servers=1, replicas=1),
    spec=mlp((4, 2), input_shape=(1, 2, 2)).to_dict(),
)
"""The program of all runs."""


class SessionOver(Exception):
    """The session is over; the outcome of its last question stays unknown."""


@dataclass(eq=False, kw_only=True)
class User:
    """One client, over all its incarnations."""

    name: str
    group: ControllerGroup
    ledger: Ledger
    role: str = "worker"
    """Role of the user's record."""
    watches: bool
    submits: bool = False
    """Whether the user submits runs; the other users then become ready for them."""
    pause_s: float
    """Mean pause between two questions, in seconds."""
    patience_s: float
    """Time limit of a question, in seconds; it may change at any time."""
    working: bool = True
    """Whether the user sends questions."""
    acknowledged: int = 0
    """Number of the user's last acknowledged write to its own record."""
    _written: int = 0

    async def run(self, node: Node) -> None:
        """Send questions and watch the map, as the program of one incarnation."""
        state = _State(self, node, self.group, self.ledger)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask(state), name=f"{self.name}/asks")
            if self.watches:
                group.create_task(state.watch(), name=f"{self.name}/watches")

    async def _ask(self, state: "_State") -> None:
        dice = state.dice
        while True:
            await asyncio.sleep(dice.around(self.pause_s) * (SHORT if dice.chance(0.5) else 2.0 - SHORT))
            if not self.working:
                continue
            self.group.progress.begin(self.name)
            record, run = state.map.nodes.get(self.name), state.map.run
            joined = record is not None and record.live and record.incarnation == state.node.incarnation
            if not joined or record is None or record.ready != self._ready(state, record) or dice.chance(0.1):
                answered = await self._join(state)
            elif self.submits and (run is None or run.phase in ("failed", "finished")):
                answered = await self._submit(state)
            elif dice.chance(0.45):
                answered = await self._get(state)
            else:
                answered = await self._set(state, dice.choose(KEYS))
            self.group.progress.end(self.name, answered=answered)
            self.ledger.operations += answered

    async def _join(self, state: "_State") -> bool:
        self._written += 1
        number, old = self._written, state.map.nodes.get(self.name)
        value = {
            "role": self.role,
            "address": f"tcp://{self.name}:1",
            "incarnation": state.node.incarnation,
            "ready": self._ready(state, old) if old is not None else "",
            "info": {"n": number, "train_images": 20},
        }
        expected = old.changed if old is not None else 0
        answer = await state.set(f"nodes/{self.name}", expected, value)
        if answer is not None and answer.done:
            self.acknowledged = number
        return answer is not None

    def _ready(self, state: "_State", record: NodeRecord) -> str:
        """Return the value of `ready` that the user's record needs."""
        run = state.map.run
        if run is None or run.phase in ("failed", "finished"):
            return record.ready
        return (
            ready_word(run.id, state.map.replica_generation(record.replica))
            if self.role == "worker"
            else run.id
        )

    async def _submit(self, state: "_State") -> bool:
        old = state.map.run
        value = RUN.record(f"run-{state.map.version}", (self.name, state.node.incarnation))
        answer = await state.set("run", old.changed if old is not None else 0, value)
        self.ledger.counts["runs"] += answer is not None and answer.done
        return answer is not None

    async def _get(self, state: "_State") -> bool:
        handles = self.group.histories.begin_reads(self.name, KEYS)
        if not await state.get():
            return False
        self.group.histories.end_reads(handles, state.map)
        return True

    async def _set(self, state: "_State", key: str) -> bool:
        operations, record = self.group.histories.operations, state.map.nodes.get(key.removeprefix("nodes/"))
        expected = record.changed if record is not None else 0
        if state.dice.chance(0.1):
            expected = state.dice.below(expected + 1)
        self.ledger.counts["values"] += 1
        number = self.ledger.counts["values"]
        value = {"role": "worker", "address": "", "incarnation": 1, "live": False, "info": {"n": number}}
        asked = lin.CompareAndSet(expected=expected, value=str(number))
        handle = operations.begin(self.name, key, asked)
        answer = await state.set(key, expected, value)
        if answer is None:
            operations.unknown(handle)
            return False
        if answer.done:
            operations.end(handle, lin.Done(version=answer.at))
        else:
            operations.end(handle, lin.Conflict(version=answer.at))
        return True

    def check_kept(self, cluster: ClusterMap) -> None:
        """Check that a map has the user's acknowledged writes. Raises Violation."""
        check_kept(cluster, self.name, self.acknowledged)


class _State:
    """State of a client in one incarnation."""

    def __init__(self, user: User, node: Node, group: ControllerGroup, ledger: Ledger) -> None:
        self.node = node
        self.dice: RandomStream = group.world.dice.fork(f"{user.name}/{node.incarnation}")
        self.map = ClusterMap()
        self._user = user
        self._group = group
        self._ledger = ledger
        self._identity = Identity(role=user.role, node=user.name, incarnation=node.incarnation)
        self._network = network_of(node)
        self._addresses = list(group.addresses.values())
        self.dice.shuffle(self._addresses)
        self._link: Link | None = None
        self._dialling = asyncio.Lock()
        self._session = 0
        self._number = 0

    # --- questions ---------------------------------------------------------------------------

    async def get(self) -> bool:
        """Read the whole map; False after the time limit."""
        reply = await self._answer(GetMap(), begun=self._now())
        if reply is None:
            return False
        self.map = self._show(reply, self.map, "asks")
        return True

    async def set(self, key: str, expected: int, value: Any) -> MapState | MapChanges | None:
        """Set a key; None if the outcome is unknown."""
        begun = self._now()
        while not self._session:
            reply = await self._answer(OpenSession(), begun=begun)
            if reply is None:
                return None
            self._session, self._number = unpack(reply, SessionOpened).session, 0
        self._number += 1
        body = CompareAndSet(
            key=key,
            expected=expected,
            session=self._session,
            number=self._number,
            after=self.map.version,
            group=self._group.histories.group,
        )
        try:
            reply = await self._answer(body, text_tensor(value), begun=begun)
        except SessionOver:
            self._session = 0
            self._ledger.counts["sessions over"] += 1
            return None
        if reply is None:
            return None
        answer = unpack_any(reply)
        assert isinstance(answer, MapState | MapChanges)
        self.map = self._show(reply, self.map, "asks")
        return answer

    async def watch(self) -> None:
        """Watch every version of the map, until the end of the incarnation."""
        seen, group = ClusterMap(), ""
        while True:
            body = WatchMap(after=seen.version if group else -1, group=group, wait_s=WATCH_S)
            reply = await self._ask_once(body, timeout_s=WATCH_S + CALL_S)
            if reply is not None:
                seen = self._show(reply, seen, "watches")
                group = self._group.histories.group

    def _show(self, reply: Message, seen: ClusterMap, what: str) -> ClusterMap:
        """Apply a controller's answer to the map, and record its versions."""
        body, histories = unpack_any(reply), self._group.histories
        watcher = f"{self._user.name}/{self.node.incarnation}/{what}"
        if isinstance(body, MapState):
            seen = msgspec.convert(read_text_tensor(reply, dict[str, Any], MOST_MAP_TEXT_BYTES), ClusterMap)
            histories.shown(watcher, body.group, seen, whole=True)
        elif isinstance(body, MapChanges):
            for change in read_text_tensor(reply, list[Change], MOST_MAP_TEXT_BYTES):
                seen = changed(seen, change)
                histories.shown(watcher, body.group, seen, whole=False)
        return seen

    # --- answers -----------------------------------------------------------------------------

    def _now(self) -> float:
        return self._group.world.now

    async def _answer(self, body: Body, *tensors: Any, begun: float) -> Message | None:
        """Ask until an answer arrives; None after the time limit.

        Raises:
            SessionOver: The controllers do not know the session.
        """
        while self._now() < begun + self._user.patience_s:
            reply = await self._ask_once(body, *tensors, timeout_s=CALL_S)
            if reply is not None:
                return reply
        return None

    async def _ask_once(self, body: Body, *tensors: Any, timeout_s: float) -> Message | None:
        """Ask the presumed leader; None without an answer."""
        link = await self._linked()
        if link is None:
            await asyncio.sleep(PAUSE_S)
            return None
        try:
            return await link.call(pack(body, list(tensors)), timeout_s=timeout_s)
        except RemoteError as error:
            if error.code == SESSION_OVER:
                raise SessionOver from None
            if error.code == NOT_LEADER:
                self._leave(link, error.text)
            elif error.code not in (UNKNOWN, "busy", "taken"):
                raise Violation("protocol", f"{self._user.name} asked {body} and got {error}") from None
            await asyncio.sleep(PAUSE_S)
        except TransportError:
            self._leave(link, "")
        return None

    async def _linked(self) -> Link | None:
        """Return the link to the presumed leader; None if it cannot be reached."""
        async with self._dialling:
            if self._link is None or self._link.closed:
                self._link = None
                try:
                    self._link = await self._network.dial(
                        self._addresses[0],
                        self._identity,
                        timeout_s=DIAL_S,
                        retry=RETRY,
                        peer_role="controller",
                    )
                except TransportError:
                    self._addresses.append(self._addresses.pop(0))
            return self._link

    def _leave(self, link: Link, hint: str) -> None:
        """Choose the next controller: the controller at the address in `hint`, or the next in turn."""
        if self._link is not link:
            return
        link.abort()
        self._link = None
        if hint:
            self._addresses.remove(hint)
            self._addresses.insert(0, hint)
        else:
            self._addresses.append(self._addresses.pop(0))
