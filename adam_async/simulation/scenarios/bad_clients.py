"""Machines that have no part in a run, and what they say to those that have: every word has its answer.

A *visitor* holds the token of the cluster. It speaks as a worker, as a driver and as the other part of a
replica, and gets everything wrong: the run, the generation, numbers, shapes, the life it speaks for. Each of
these is refused under its name and leaves the shards as they are. Where the servers take plain pushes it also
reports steps as a worker that trains in place, twice under the same numbers; they are counted once.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ShardUnavailable
from adam_async.messages import (
    DUPLICATE,
    GAP,
    NOT_PRIMARY,
    REFUSED,
    Body,
    GetRecord,
    Greet,
    LoadShards,
    Part,
    Pull,
    Push,
    Pushed,
    ReadShards,
    Record,
    StepRecord,
    Tick,
    pack,
    unpack,
)
from adam_async.parameter_server.client import ParameterClient, SessionIdentity
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.state import ServerState
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config, Waits
from adam_async.runtime.traffic import Traffic
from adam_async.simulation.faults import check_noticed, is_running
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Violation
from transport import Identity, Link, Network, RemoteError, TransportError

BAD_CLIENT = "visitor"

REPLICA = 99
"""That it speaks for; no run has it."""

ANSWER_S, ATTEMPT_S, STEP_S = 2.0, 30.0, 0.1
"""So long one answer may take, and a visit at most; so long it waits before it begins anew."""

CALM_S = 12.0
"""Where nobody is disturbed for so long, every word of a visit has had its answer, also one said again."""

WAITS = Waits(dial_s=20.0, call_s=5.0, answer_s=0.5, patience_s=10.0)
"""Of what reports steps."""

OTHER = "another"
"""A run that no server has."""

PUSHED = pack(Pushed(versions=(), problems=())).type

STEPS = (StepRecord(0, 1, 0), StepRecord(0, 1, 2, refused=(0,)), StepRecord(0, 1, 1))
"""Steps in place that it reports; of one the first shard refused its part."""


change = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Word:
    """Something that is said to a server."""

    role: str
    """As whom."""
    body: Body
    code: str
    """Of the refusal that comes back; empty where it is answered."""
    tensors: Sequence[NDArray[Any]] = ()
    problems: Sequence[int] = ()
    """That the acknowledgement of a push names."""


class BadClients:
    """Visits servers and workers.

    Args:
        cluster: Gives the newest cluster map.
        servers: Those that run, by name.
        network_of: Makes the network of a machine.
        config: Of the run.
    """

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterMap],
        servers: Mapping[str, ParameterServer],
        network_of: Callable[[Node], Network],
        config: Config,
    ) -> None:
        self._cluster = cluster
        self._servers = servers
        self._network_of = network_of
        self._one = asyncio.Lock()
        self._asked = ""
        """What a visit waits for; an error says it."""
        self._reports_steps = config.slack is None and not config.record

    async def strike(self, world: World, fault: Fault) -> None:
        """Visit the server that a fault is for, and a worker; begin anew where links break meanwhile.

        Raises:
            Missed: The visit did not end, and was disturbed again and again.
            Violation: It did not end although nobody was disturbed: somebody is silent.
        """
        (server,) = fault.targets
        async with self._one:
            self._asked = "no word was said"
            node = world.node(BAD_CLIENT)
            node.start(partial(self._visit, server=server))
            try:
                check_noticed(await self._ends(world, node, server))
            finally:
                node.kill()

    async def _ends(self, world: World, node: Node, server: str) -> bool:
        """Wait for the end of a visit. Returns whether it came."""
        assert node.task is not None
        begun = calm_since = world.now
        scene = self._scene(world, server)
        while world.now < begun + ATTEMPT_S:
            done, _ = await asyncio.wait([node.task], timeout=STEP_S)
            if done:
                return True
            before, scene = scene, self._scene(world, server)
            if scene is None or scene != before:
                calm_since = world.now
            elif world.now >= calm_since + CALM_S:
                text = f"nothing disturbed {server} and the workers for {CALM_S:g} s, and {self._asked}"
                raise Violation("every word has its answer", text)
        return False

    def _scene(self, world: World, server: str) -> tuple[object, ...] | None:
        """What a visit takes for given; None while somebody to whom it speaks is disturbed."""
        state, workers = self._state(server), self._cluster().live("worker")
        if state is None:
            return None
        for name in (server, *workers):
            node, ways = world.nodes[name], ((name, BAD_CLIENT), (BAD_CLIENT, name))
            if not is_running(node) or node.host.frozen:
                return None
            if any(world.network.wire(*way).cut for way in ways):
                return None
        replica_generations = tuple(self._cluster().nodes[name] for name in workers)
        return (state.run, state.generation, replica_generations)

    async def _visit(self, node: Node, *, server: str) -> None:
        network = self._network_of(node)
        while True:
            await asyncio.sleep(STEP_S)
            state = self._state(server)
            if state is None:
                continue
            visit = _Attempt(node, network, self._cluster(), server, state, on_word=self._ask)
            try:
                await visit.say_to_server()
                if self._reports_steps:
                    await visit.report_steps()
                await visit.greet_workers()
                return
            except (TransportError, TimeoutError):
                continue  # a link broke
            except Violation:
                if self._state(server) is state:
                    raise
                # Another run was taken up meanwhile: there other answers are right.

    def _ask(self, asked: str) -> None:
        self._asked = asked

    def _state(self, server: str) -> ServerState | None:
        found = self._servers.get(server)
        return found.state if found is not None and server in self._cluster().buckets else None


class _Attempt:
    """One attempt."""

    def __init__(
        self,
        node: Node,
        network: Network,
        cluster: ClusterMap,
        server: str,
        state: ServerState,
        *,
        on_word: Callable[[str], None],
    ) -> None:
        self._node = node
        self._network = network
        self._cluster = cluster
        self._server = server
        self._state = state
        self._on_word = on_word
        self._session = int.from_bytes(node.entropy(7), "little")

    def _identity(self, role: str) -> Identity:
        return Identity(role=role, node=BAD_CLIENT, incarnation=self._session)

    async def say_to_server(self) -> None:
        """Say what is refused, as each role that may say it."""
        spoken = words(self._state, self._session)
        for role in dict.fromkeys(word.role for word in spoken):
            address = self._cluster.nodes[self._server].address
            async with self._network.connect(address, self._identity(role), timeout_s=ANSWER_S) as link:
                for word in spoken:
                    if word.role == role:
                        await self._say(link, word)

    async def _say(self, link: Link, word: Word) -> None:
        self._on_word(f"{self._server} did not answer {word.body}")
        code, problems = "", set()
        try:
            answer = await link.call(pack(word.body, word.tensors), timeout_s=ANSWER_S)
            if answer.type == PUSHED:
                problems = {problem.status for problem in unpack(answer, Pushed).problems}
        except RemoteError as error:
            code = error.code
        if (code, problems) != (word.code, set(word.problems)):
            text = f"{word.body} had {code or problems}, not {word.code or word.problems}"
            raise Violation("what is wrong is refused", text)

    async def report_steps(self) -> None:
        """Report steps in place, twice under the same numbers."""
        state, shards = self._state, self._state.shards
        session = self._session + 1  # of its own: what was said before has numbers, too
        client = ParameterClient(
            network=self._network,
            identity=self._identity("worker"),
            session=SessionIdentity(
                run=state.run,
                session=session,
                incarnation=1,
                replica=REPLICA,
                generation=state.generation,
            ),
            addresses={self._server: self._cluster.nodes[self._server].address},
            waits=WAITS,
            traffic=Traffic(BAD_CLIENT),
        )
        self._on_word(f"{self._server} did not count steps in place")
        reported = False
        try:
            async with asyncio.TaskGroup() as group:
                runs = group.create_task(client.run(), name=f"{BAD_CLIENT}/reports")
                for _ in range(2):
                    client.record(self._server, tuple(shards), STEPS, on_answer=_counted)
                await client.flush()
                reported = True
                runs.cancel()
        except* ShardUnavailable:
            reported = False
        if not reported:
            raise TimeoutError(f"{self._server} did not answer to a report of steps")
        again = _record(state, session, number=len(STEPS) + 1)
        address = self._cluster.nodes[self._server].address
        async with self._network.connect(address, self._identity("worker"), timeout_s=ANSWER_S) as link:
            await self._say(link, Word("worker", again, ""))
        for shard in shards.values():
            number = shard.last_number[session, 1]
            if number != 2 * len(STEPS):
                raise Violation("I2", f"{shard!r}: of {2 * len(STEPS)} steps {number} were counted")

    async def greet_workers(self) -> None:
        """Greet each worker for a life that nobody has, and with more blocks than were ever sent."""
        for name in self._cluster.live("worker"):
            record = self._cluster.nodes[name]
            replica_generation = self._cluster.replica_generation(record.replica)
            for greet in (
                Greet(run=OTHER, replica=REPLICA, replica_generation=1, partition=0, received=0, begun=0),
                Greet(
                    run=self._state.run,
                    replica=record.replica,
                    replica_generation=replica_generation,
                    partition=1 - record.partition,
                    received=1 << 40,
                    begun=0,
                ),
            ):
                self._on_word(f"{name} did not hang up after {greet}")
                await self._greet(record.address, greet)

    async def _greet(self, address: str, greet: Greet) -> None:
        """Greet; the worker hangs up, at the latest when it has said its own greeting."""
        async with self._network.connect(address, self._identity("worker"), timeout_s=ANSWER_S) as link:
            link.send_nowait(pack(greet))
            with suppress(TransportError):
                async with asyncio.timeout(ANSWER_S):
                    await link.wait_closed()


def _counted() -> None:
    """Steps were counted; the table of the server shows how often."""


def words(state: ServerState, session: int) -> list[Word]:
    """What a server on a run refuses, or answers without doing it; to each role that in this order.

    Args:
        state: The server's.
        session: Of the visitor; no gradient of it is applied.
    """
    push = _push(state, session)
    said = [*_wrong_pushes(state, push), *_wrong_words(state, session), *_words_of_a_driver(state)]
    if state.log is None:  # what is recorded is repeated later, and knows of no visitors
        said += _pushes_not_finite(state, push)
    return said


def _first(state: ServerState) -> Shard:
    return next(iter(state.shards.values()))


def _unknown(state: ServerState) -> int:
    """A shard that no server has."""
    return max(state.shards) + 1_000


def _push(state: ServerState, session: int) -> Push:
    """A push to the first shard that is right, but for a number that comes too early."""
    return Push(
        run=state.run,
        session=session,
        incarnation=1,
        replica=REPLICA,
        clock=0,
        images=1,
        rate=0.0,
        generation=state.generation,
        parts=(Part(factors=False, count=1),),
        shards=(_first(state).spec.id,),
        numbers=(5,),
        versions=(0,),
        own_applied=(0,),
    )


def _tick(state: ServerState, session: int) -> Tick:
    return Tick(
        run=state.run,
        session=session,
        incarnation=1,
        replica=REPLICA,
        clock=0,
        generation=state.generation,
        shards=(_first(state).spec.id,),
        numbers=(1,),
    )


def _wrong_pushes(state: ServerState, push: Push) -> list[Word]:
    shard = _first(state)
    right = np.zeros(shard.spec.size, shard.values.dtype)
    short, flat = right[1:], right[:1]
    return [
        Word("worker", change(push, run=OTHER), "wrong-run", (right,)),
        Word("worker", change(push, numbers=()), "malformed", (right,)),
        Word("worker", change(push, images=0), "malformed", (right,)),
        Word("worker", change(push, shards=(_unknown(state),)), "malformed", (right,)),
        Word("worker", push, "malformed", ()),
        Word("worker", push, "malformed", (right, right)),
        Word("worker", push, "malformed", (short,)),
        Word("worker", change(push, parts=(Part(factors=True, count=1),)), "malformed", (flat, flat)),
        Word("worker", change(push, generation=state.generation - 1), "", (right,), (NOT_PRIMARY,)),
        Word("worker", push, "", (right,), (GAP,)),
    ]


def _wrong_words(state: ServerState, session: int) -> list[Word]:
    """What a worker says beside its pushes."""
    none = (_unknown(state),)
    tick, record = _tick(state, session), _record(state, session, number=1)
    pull = Pull(run=state.run, generation=state.generation, shards=tick.shards)
    return [
        Word("worker", change(tick, run=OTHER), "wrong-run"),
        Word("worker", change(tick, numbers=(1, 2)), "malformed"),
        Word("worker", tick, "gap"),
        Word("worker", change(pull, run=OTHER), "wrong-run"),
        Word("worker", change(pull, shards=none), "not-primary"),
        Word("worker", change(record, run=OTHER), "wrong-run"),
        Word("worker", change(record, shards=none), "not-primary"),
        Word("worker", change(record, number=7), "gap"),
    ]


def _words_of_a_driver(state: ServerState) -> list[Word]:
    read = ReadShards(run=state.run, generation=state.generation, shards=(_first(state).spec.id,))
    load = LoadShards(run=OTHER, generation=state.generation, arrays=())
    return [
        Word("driver", change(read, generation=state.generation - 1), "wrong-run"),
        Word("driver", change(read, shards=(_unknown(state),)), "not-primary"),
        Word("driver", load, "wrong-run"),
        Word("driver", GetRecord(run=OTHER, start=0, stop=1), "no-record"),
    ]


def _pushes_not_finite(state: ServerState, push: Push) -> list[Word]:
    """Pushes in their order that are counted and not applied, and a tick before one of them."""
    shard = _first(state)
    dtype = shard.values.dtype
    broken, first = np.full(shard.spec.size, np.nan, dtype), change(push, numbers=(1,))
    said = [
        Word("worker", first, "", (broken,), (REFUSED,)),
        Word("worker", first, "", (broken,), (DUPLICATE,)),
        Word("worker", change(_tick(state, push.session), numbers=(2,)), "gap"),
    ]
    ordered = 1
    if len(state.shards) > 1:
        behind = list(state.shards.values())[1]
        both = change(
            push,
            parts=(Part(factors=False, count=2),),
            shards=(shard.spec.id, behind.spec.id),
            numbers=(2, 9),
            versions=(0, 0),
            own_applied=(0, 0),
        )
        flat = np.full(shard.spec.size + behind.spec.size, np.nan, dtype)
        said.append(Word("worker", both, "", (flat,), (REFUSED, GAP)))
        ordered = 2
    factored = next((s for s in state.shards.values() if s.spec.whole_rows and s.spec.row_size > 1), None)
    if factored is not None:
        row = factored.spec.row_size
        pieces = [np.full((n, 1), np.nan, dtype) for n in (row, factored.spec.size // row)]
        product = change(
            push,
            parts=(Part(factors=True, count=1),),
            shards=(factored.spec.id,),
            numbers=(ordered + 1 if factored is shard else 1,),
        )
        said.append(Word("worker", product, "", pieces, (REFUSED,)))
    return said


def _record(state: ServerState, session: int, *, number: int) -> Record:
    return Record(
        run=state.run,
        session=session,
        incarnation=1,
        replica=REPLICA,
        generation=state.generation,
        shards=tuple(state.shards),
        number=number,
        steps=STEPS,
    )
