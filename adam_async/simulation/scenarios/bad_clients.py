"""Bad clients: machines outside of a run that send wrong requests; every request has its answer.

A bad client holds the token of the cluster. It sends requests as a worker, as a driver and as the other
partition of a replica, each with something wrong: the run, the generation, numbers, shapes, the replica
generation. Servers refuse each with its own code and leave their shards unchanged. If the servers take plain
pushes, it also reports steps as a worker that trains in place, twice under the same numbers; servers count
them once.
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
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from adam_async.simulation.faults import check_noticed, is_running
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Violation
from transport import Identity, Link, Network, RemoteError, TransportError

BAD_CLIENT = "visitor"
"""Machine of the bad client."""

REPLICA = 99
"""Number of a replica that no run has."""

ANSWER_S, ATTEMPT_S, STEP_S = 2.0, 30.0, 0.1
"""Time limits of an answer and of all requests of a fault, and the pause between two attempts, in seconds."""

CALM_S = 12.0
"""Time without disturbance after which every request has its answer, repetitions included, in seconds."""

WAITS = Waits(dial_s=20.0, call_s=5.0, answer_s=0.5, patience_s=10.0)
"""Time limits of the client that reports steps."""

OTHER = "another"
"""A run that no server has."""

PUSHED = pack(Pushed(versions=(), problems=())).type
"""Type of the acknowledgement of a push."""

STEPS = (StepRecord(0, 1, 0), StepRecord(0, 1, 2, refused=(0,)), StepRecord(0, 1, 1))
"""Reported steps in place; the first shard refused its part of the second."""


change = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request to a server, and its expected answer."""

    role: str
    """Role of the sender."""
    body: Body
    code: str
    """Code of the refusal; empty if the request is answered."""
    tensors: Sequence[NDArray[Any]] = ()
    problems: Sequence[int] = ()
    """Statuses in the acknowledgement of a push."""


class BadClients:
    """Sends wrong requests to servers and workers.

    Args:
        cluster: Returns the newest cluster map.
        servers: Running servers, by name.
        network_of: Makes the network of a machine.
        config: Options of the run.
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
        """Description of the missing answer, for errors."""
        self._reports_steps = config.slack is None and not config.record

    async def strike(self, world: World, fault: Fault) -> None:
        """Send all requests to the target of a fault and to the workers; start again after a broken link.

        Raises:
            Missed: Other faults kept interrupting the requests.
            Violation: A request had no answer although no fault interrupted it.
        """
        (server,) = fault.targets
        async with self._one:
            self._asked = "no request was sent"
            node = world.node(BAD_CLIENT)
            node.start(partial(self._send_all, server=server))
            try:
                check_noticed(await self._ends(world, node, server))
            finally:
                node.kill()

    async def _ends(self, world: World, node: Node, server: str) -> bool:
        """Wait for the end of all requests. Returns whether it came."""
        assert node.task is not None
        begun = calm_since = world.now
        conditions = self._conditions(world, server)
        while world.now < begun + ATTEMPT_S:
            done, _ = await asyncio.wait([node.task], timeout=STEP_S)
            if done:
                return True
            before, conditions = conditions, self._conditions(world, server)
            if conditions is None or conditions != before:
                calm_since = world.now
            elif world.now >= calm_since + CALM_S:
                text = f"nothing disturbed {server} and the workers for {CALM_S:g} s, and {self._asked}"
                raise Violation("every word has its answer", text)
        return False

    def _conditions(self, world: World, server: str) -> tuple[object, ...] | None:
        """Return the state that the requests rely on; None while a fault is at one of their receivers."""
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

    async def _send_all(self, node: Node, *, server: str) -> None:
        network = self._network_of(node)
        while True:
            await asyncio.sleep(STEP_S)
            state = self._state(server)
            if state is None:
                continue
            attempt = _Attempt(node, network, self._cluster(), server, state, on_request=self._note)
            try:
                await attempt.send_to_server()
                if self._reports_steps:
                    await attempt.report_steps()
                await attempt.greet_workers()
                return
            except (TransportError, TimeoutError):
                continue  # a link broke
            except Violation:
                if self._state(server) is state:
                    raise
                # Another run began meanwhile, which has other right answers.

    def _note(self, asked: str) -> None:
        self._asked = asked

    def _state(self, server: str) -> ServerState | None:
        found = self._servers.get(server)
        return found.state if found is not None and server in self._cluster().buckets else None


class _Attempt:
    """One attempt to send all requests."""

    def __init__(
        self,
        node: Node,
        network: Network,
        cluster: ClusterMap,
        server: str,
        state: ServerState,
        *,
        on_request: Callable[[str], None],
    ) -> None:
        self._node = node
        self._network = network
        self._cluster = cluster
        self._server = server
        self._state = state
        self._on_request = on_request
        self._session = int.from_bytes(node.entropy(7), "little")

    def _identity(self, role: str) -> Identity:
        return Identity(role=role, node=BAD_CLIENT, incarnation=self._session)

    async def send_to_server(self) -> None:
        """Send all bad requests to the server, over one link for each role."""
        requests = bad_requests(self._state, self._session)
        for role in dict.fromkeys(request.role for request in requests):
            address = self._cluster.nodes[self._server].address
            async with self._network.connect(address, self._identity(role), timeout_s=ANSWER_S) as link:
                for request in requests:
                    if request.role == role:
                        await self._send(link, request)

    async def _send(self, link: Link, request: BadRequest) -> None:
        self._on_request(f"{self._server} did not answer {request.body}")
        code, problems = "", set()
        try:
            answer = await link.call(pack(request.body, request.tensors), timeout_s=ANSWER_S)
            if answer.type == PUSHED:
                problems = {problem.status for problem in unpack(answer, Pushed).problems}
        except RemoteError as error:
            code = error.code
        if (code, problems) != (request.code, set(request.problems)):
            text = f"{request.body} had {code or problems}, not {request.code or request.problems}"
            raise Violation("what is wrong is refused", text)

    async def report_steps(self) -> None:
        """Report steps in place, twice under the same numbers."""
        state, shards = self._state, self._state.shards
        session = self._session + 1  # the earlier requests have numbers in the first session
        client = ParameterClient(
            Endpoint(self._network, self._identity("worker"), Traffic(BAD_CLIENT)),
            SessionIdentity(
                run=state.run,
                session=session,
                incarnation=1,
                replica=REPLICA,
                generation=state.generation,
            ),
            addresses={self._server: self._cluster.nodes[self._server].address},
            waits=WAITS,
        )
        self._on_request(f"{self._server} did not count steps in place")
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
            await self._send(link, BadRequest("worker", again, ""))
        for shard in shards.values():
            number = shard.last_number[session, 1]
            if number != 2 * len(STEPS):
                raise Violation("I2", f"{shard!r}: of {2 * len(STEPS)} steps {number} were counted")

    async def greet_workers(self) -> None:
        """Greet each worker with an unknown replica, and with more blocks than it ever sent."""
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
                self._on_request(f"{name} did not close the link after {greet}")
                await self._greet(record.address, greet)

    async def _greet(self, address: str, greet: Greet) -> None:
        """Greet a worker, which closes the link after its own greeting at the latest."""
        async with self._network.connect(address, self._identity("worker"), timeout_s=ANSWER_S) as link:
            link.send_nowait(pack(greet))
            with suppress(TransportError):
                async with asyncio.timeout(ANSWER_S):
                    await link.wait_closed()


def _counted() -> None:
    """Ignore the answer: the server's table shows the count."""


def bad_requests(state: ServerState, session: int) -> list[BadRequest]:
    """Return requests that a server on a run refuses or answers without an effect, in order for each role.

    Args:
        state: State of the server.
        session: Push session of the bad client; the server applies none of its gradients.
    """
    push = _push(state, session)
    requests = [*_wrong_pushes(state, push), *_wrong_requests(state, session), *_driver_requests(state)]
    if state.log is None:  # a record that is replayed later must not contain a bad client's pushes
        requests += _pushes_not_finite(state, push)
    return requests


def _first(state: ServerState) -> Shard:
    return next(iter(state.shards.values()))


def _unknown(state: ServerState) -> int:
    """A shard that no server has."""
    return max(state.shards) + 1_000


def _push(state: ServerState, session: int) -> Push:
    """Return a push to the first shard that is valid except for its number, which comes too early."""
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


def _wrong_pushes(state: ServerState, push: Push) -> list[BadRequest]:
    shard = _first(state)
    right = np.zeros(shard.spec.size, shard.values.dtype)
    short, flat = right[1:], right[:1]
    return [
        BadRequest("worker", change(push, run=OTHER), "wrong-run", (right,)),
        BadRequest("worker", change(push, numbers=()), "malformed", (right,)),
        BadRequest("worker", change(push, images=0), "malformed", (right,)),
        BadRequest("worker", change(push, shards=(_unknown(state),)), "malformed", (right,)),
        BadRequest("worker", push, "malformed", ()),
        BadRequest("worker", push, "malformed", (right, right)),
        BadRequest("worker", push, "malformed", (short,)),
        BadRequest("worker", change(push, parts=(Part(factors=True, count=1),)), "malformed", (flat, flat)),
        BadRequest("worker", change(push, generation=state.generation - 1), "", (right,), (NOT_PRIMARY,)),
        BadRequest("worker", push, "", (right,), (GAP,)),
    ]


def _wrong_requests(state: ServerState, session: int) -> list[BadRequest]:
    """Return wrong requests of a worker other than pushes."""
    none = (_unknown(state),)
    tick, record = _tick(state, session), _record(state, session, number=1)
    pull = Pull(run=state.run, generation=state.generation, shards=tick.shards)
    return [
        BadRequest("worker", change(tick, run=OTHER), "wrong-run"),
        BadRequest("worker", change(tick, numbers=(1, 2)), "malformed"),
        BadRequest("worker", tick, "gap"),
        BadRequest("worker", change(pull, run=OTHER), "wrong-run"),
        BadRequest("worker", change(pull, shards=none), "not-primary"),
        BadRequest("worker", change(record, run=OTHER), "wrong-run"),
        BadRequest("worker", change(record, shards=none), "not-primary"),
        BadRequest("worker", change(record, number=7), "gap"),
    ]


def _driver_requests(state: ServerState) -> list[BadRequest]:
    read = ReadShards(run=state.run, generation=state.generation, shards=(_first(state).spec.id,))
    load = LoadShards(run=OTHER, generation=state.generation, arrays=())
    return [
        BadRequest("driver", change(read, generation=state.generation - 1), "wrong-run"),
        BadRequest("driver", change(read, shards=(_unknown(state),)), "not-primary"),
        BadRequest("driver", load, "wrong-run"),
        BadRequest("driver", GetRecord(run=OTHER, start=0, stop=1), "no-record"),
    ]


def _pushes_not_finite(state: ServerState, push: Push) -> list[BadRequest]:
    """Return pushes in order that are counted but not applied, and a tick before one of them."""
    shard = _first(state)
    dtype = shard.values.dtype
    broken, first = np.full(shard.spec.size, np.nan, dtype), change(push, numbers=(1,))
    requests = [
        BadRequest("worker", first, "", (broken,), (REFUSED,)),
        BadRequest("worker", first, "", (broken,), (DUPLICATE,)),
        BadRequest("worker", change(_tick(state, push.session), numbers=(2,)), "gap"),
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
        requests.append(BadRequest("worker", both, "", (flat,), (REFUSED, GAP)))
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
        requests.append(BadRequest("worker", product, "", pieces, (REFUSED,)))
    return requests


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
