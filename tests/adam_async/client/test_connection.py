"""A bundle whose primary moves: its pushes go on at the new primary, each under its number and once."""

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np
import pytest

from adam_async.client.connection import NOT_SERVING
from adam_async.client.parameter_client import ParameterClient, SessionIdentity
from adam_async.errors import ShardUnavailable, first_cause
from adam_async.messages import (
    DUPLICATE,
    GAP,
    NOT_PRIMARY,
    Part,
    Problem,
    Pull,
    Push,
    Pushed,
    Tick,
    Ticked,
    Values,
    pack,
    unpack_any,
)
from adam_async.model.rules import Sgd
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.ids import ShardId
from adam_async.run.store_record import BundleRecord, StoreRecord, bundle_key
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.runs import NETWORKS, PATIENT, Call, address_of, turns, until
from transport import Identity, LocalProtocolError

STORE, HOME, SHARD = "store-1", "ps-0", ShardId(0)
SHORT = msgspec.structs.replace(PATIENT, patience_s=0.05)
WORKER = Identity(role="worker", node="worker-0", incarnation=9)


class Server:
    """A copy of the bundle. All copies share the list of applied numbers.

    It refuses with a code, or answers a number of further questions and applies pushes up to a number.
    It never answers what it ignores.
    """

    def __init__(self, node, applied, *, incarnation=1):
        self.identity = Identity(role="ps", node=node, incarnation=incarnation)
        self.address = "local://away"
        self.applied = applied
        self.refusal = ""
        self.ignores = ()
        self.answers = self.applies = 1_000_000
        self.numbers, self.kinds, self.links = [], [], []

    async def on_link(self, link):
        self.links.append(link)
        link.serve(self._on_request, receives=False)
        await link.wait_closed()

    def _on_request(self, request):
        body = unpack_any(request.message)
        self.kinds.append(type(body))
        if isinstance(body, Push):
            self.numbers.append(body.numbers)
        if isinstance(body, self.ignores):
            return
        if self.refusal and not (self.refusal == "not-primary" and isinstance(body, Push)):
            request.fail(self.refusal, f"{self.identity.node} does not serve the bundle")
            return
        answer = self._answer(body)
        if self.answers:
            self.answers -= 1
            request.reply(answer)

    def _answer(self, body):
        if isinstance(body, Push):
            problems = tuple(Problem(0, *problem) for problem in self._problem_of(body.numbers))
            return pack(Pushed(versions=len(self.applied), problems=problems))
        if isinstance(body, Pull):
            count = len(self.applied)
            return pack(Values(versions=count, clock=0), [np.full(1, count, np.float32)])
        assert isinstance(body, Tick)
        return pack(Ticked())

    def _problem_of(self, number):
        if self.refusal:
            return [(NOT_PRIMARY,)]
        if number <= len(self.applied):
            return [(DUPLICATE,)]
        if number > len(self.applied) + 1:
            return [(GAP, len(self.applied) + 1)]
        if number <= self.applies:
            self.applied.append(number)
        return []


def map_of(primary, *servers, **fields):
    """A map with these servers, and the bundle with this primary, or without one.

    Args:
        fields: Further fields of the store.
    """
    members = () if primary is None else ((primary.identity.node, primary.identity.incarnation),)
    store = StoreRecord(
        id=STORE,
        rules=(Sgd(),),
        arrays=1,
        nbytes=4,
        state_arrays=0,
        pieces=1,
        shard_bytes=4,
        phase="open",
        buckets=(HOME,),
        **fields,
    )
    return ClusterMap(
        nodes={
            server.identity.node: NodeRecord(
                role="ps", address=server.address, incarnation=server.identity.incarnation
            )
            for server in servers
        },
        stores={"main": store},
        bundles={bundle_key("main", HOME): BundleRecord(store=STORE, in_sync=members)},
    )


class Room:
    """Two servers with a copy of one bundle, and a client whose map has the first one as the primary."""

    def __init__(self, first, second, client):
        self.first, self.second, self.client = first, second, client
        self.freed, self.pulled = [], []

    @property
    def connection(self):
        return self.client.connections[HOME]

    def push(self, count=1, *, dtype=np.float32):
        for _ in range(count):
            number = self.connection.numbers.last((SHARD,)) + 1
            self.connection.push(
                (np.ones(1, dtype),),
                Call(freed=lambda number=number: self.freed.append(number)),
                parts=(Part(False, 1),),
                shards=(SHARD,),
                versions=0,
                own_applied=0,
                clock=number,
                weight=1,
                rate=1.0,
            )

    def pull(self):
        self.connection.pull((SHARD,), Call(lambda _, flat: self.pulled.append(float(flat[0]))))

    def move(self, primary):
        self.client.map_changed(map_of(primary, self.first, self.second))

    def acknowledged(self):
        return self.client.statistics().acknowledged


@asynccontextmanager
async def room_of(network, *, waits=PATIENT, there=("ps-0", "ps-2"), primary="ps-0", **fields):
    """Run the servers of `there` and the client; errors leave without their groups."""
    applied = []
    first, second = Server("ps-0", applied), Server("ps-2", applied)
    try:
        async with AsyncExitStack() as stack:
            for server in (first, second):
                if server.identity.node in there:
                    listening = network.listen(address_of(network), server.identity, server.on_link)
                    server.address = (await stack.enter_async_context(listening)).address
            known = {"ps-0": first, "ps-2": second, "": None}[primary]
            client = ParameterClient(
                Endpoint(network, WORKER, Traffic(WORKER.node)),
                SessionIdentity(store=STORE, session=7, incarnation=9, replica=0, generation=1),
                homes=(HOME,),
                cluster=map_of(known, first, second, **fields),
                waits=waits,
            )
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(client.run(), name="client").cancel)
            yield Room(first, second, client)
    except ExceptionGroup as errors:
        raise first_cause(errors) from None


@pytest.mark.parametrize("network", NETWORKS)
async def test_pushes_go_on_at_the_new_primary_in_order_from_the_first_unacknowledged_one(network, caplog):
    caplog.set_level(logging.INFO, logger="adam_async.parameter_server")
    async with room_of(NETWORKS[network]()) as room:
        room.first.answers, room.first.applies = 3, 4  # the acknowledgement of the fourth push is lost
        room.push(6)
        await until(lambda: room.first.numbers == [1, 2, 3, 4, 5, 6] and room.acknowledged() == 3)
        room.move(room.second)
        room.push(2)
        await room.client.flush()
        assert room.second.numbers == [4, 5, 6, 7, 8]
        assert room.first.applied == [1, 2, 3, 4, 5, 6, 7, 8]
        assert sorted(room.freed) == [1, 2, 3, 4, 5, 6, 7, 8]
        counts = room.client.statistics()
        assert (counts.acknowledged, counts.duplicates, counts.resent) == (8, 1, 3)
        assert (counts.moves, counts.primaries) == (1, {"ps-0": "ps-2"})
        assert not caplog.records  # the driver or the controller has a line


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_pull_behind_pushes_stays_behind_them_at_the_new_primary(network):
    async with room_of(NETWORKS[network]()) as room:
        room.first.answers = room.first.applies = 0
        room.push(2)
        room.pull()
        await until(lambda: room.first.kinds == [Push, Push, Pull])
        room.move(room.second)
        await room.client.flush()
        assert room.second.kinds == [Push, Push, Pull]
        assert room.pulled == [2.0]


async def test_a_map_without_another_primary_leaves_the_link_alone():
    async with room_of(NETWORKS["local"]()) as room:
        room.push()
        await room.client.flush()
        room.move(room.first)
        room.push()
        await room.client.flush()
        assert (len(room.first.links), room.client.statistics().moves) == (1, 0)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_bundle_without_a_primary_waits_for_one_and_goes_on(network):
    async with room_of(NETWORKS[network]()) as room:
        room.push(2)
        await room.client.flush()
        room.move(None)
        await until(lambda: all(link.closed for link in room.first.links))
        assert room.client.statistics().primaries == {"ps-0": ""}
        room.push(2)
        await turns(20)
        assert not room.second.links
        assert len(room.first.links) == 1
        room.move(room.second)
        await room.client.flush()
        assert (room.first.numbers, room.second.numbers) == ([1, 2], [3, 4])


async def test_the_first_primary_of_a_bundle_is_no_move():
    async with room_of(NETWORKS["local"](), primary="") as room:
        room.push()
        await turns(20)
        room.move(room.first)
        await room.client.flush()
        assert (room.first.numbers, room.client.statistics().moves) == ([1], 0)


async def test_a_bundle_that_gets_its_last_primary_back_sends_what_was_open():
    async with room_of(NETWORKS["local"]()) as room:
        room.first.answers = 1
        room.push(3)
        await until(lambda: room.first.numbers == [1, 2, 3] and room.acknowledged() == 1)
        room.move(None)
        room.first.answers = 10
        room.move(room.first)
        await room.client.flush()
        assert room.first.numbers == [1, 2, 3, 2, 3]
        assert (room.client.statistics().moves, room.first.applied) == (0, [1, 2, 3])


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_dial_to_a_lost_primary_ends_when_the_primary_moves(network):
    async with room_of(NETWORKS[network](), there=("ps-2",)) as room:
        if network == "tcp":
            room.first.address = "tcp://127.0.0.1:9"
            room.move(None)
            room.move(room.first)
        room.push(2)
        await turns(50)
        assert room.connection.channel.link is None
        room.move(room.second)
        await room.client.flush()
        assert room.second.numbers == [1, 2]


async def test_another_process_at_the_address_of_the_primary_gets_no_push():
    network = NETWORKS["local"]()
    async with room_of(network) as room:
        again = Server("ps-0", room.first.applied, incarnation=2)
        again.address = room.first.address
        room.client.map_changed(map_of(again, again))
        room.push()
        await until(lambda: len(room.first.links) > 2)
        assert not room.first.kinds
        room.move(room.second)
        await room.client.flush()
        assert room.second.numbers == [1]


@pytest.mark.parametrize("code", sorted(NOT_SERVING))
async def test_a_server_that_does_not_serve_the_bundle_is_asked_again_without_a_warning(code, caplog):
    async with room_of(NETWORKS["local"]()) as room:
        room.first.refusal = code
        room.push(2)
        room.pull()
        room.connection.tick((SHARD,), 3)
        await until(lambda: len(room.first.links) > 3)
        assert (room.freed, room.pulled) == ([], [])
        room.first.refusal = ""
        await room.client.flush()
        assert (room.first.applied, room.freed, room.pulled) == ([1, 2], [1, 2], [2.0])
        assert not [record for record in caplog.records if record.levelno >= logging.INFO]


async def test_a_new_primary_ends_the_pause_after_a_refusal():
    async with room_of(NETWORKS["local"]()) as room:
        room.first.refusal = "not-ready"
        channel = room.connection.channel
        room.push()
        await until(lambda: room.first.links and channel.link is None)
        channel._pauses = iter([1000.0])
        await until(lambda: next(channel._pauses, 0.0) == 0.0)
        room.move(room.second)
        await room.client.flush()
        assert room.second.numbers == [1]


async def test_the_error_of_a_bundle_without_a_primary_names_the_bundle_and_its_last_primary():
    with pytest.raises(ShardUnavailable, match=r"waited 0.05 s for a primary of bundle ps-0 after ps-0$"):
        async with room_of(NETWORKS["local"](), waits=SHORT) as room:
            room.push()
            room.move(None)
            await asyncio.Event().wait()


async def test_the_error_of_a_lost_primary_names_the_bundle_the_server_and_its_last_answer():
    with pytest.raises(
        ShardUnavailable,
        match=r"for ps-2 at local://.*, the primary of bundle ps-0; its last answer is not-ready: ps-2 does",
    ):
        async with room_of(NETWORKS["local"](), waits=SHORT) as room:
            room.second.refusal = "not-ready"
            room.push()
            room.move(room.second)
            await asyncio.Event().wait()


async def test_answers_to_other_requests_do_not_prolong_the_patience_for_one_that_is_never_answered():
    waits = msgspec.structs.replace(SHORT, answer_s=0.02)
    with pytest.raises(ShardUnavailable, match=r"waited 0.05 s for ps-0 at .*, the primary of bundle ps-0"):
        async with asyncio.timeout(5), room_of(NETWORKS["local"](), waits=waits) as room:
            room.first.ignores = (Push,)
            room.push()
            while True:
                room.pull()
                await until(lambda: not room.connection.open.keys() - {next(iter(room.connection.open))})


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_request_on_a_link_that_was_idle_for_long_has_the_whole_patience(network):
    now = asyncio.get_running_loop().time
    waits = msgspec.structs.replace(PATIENT, patience_s=0.3)
    async with room_of(NETWORKS[network](), waits=waits) as room:
        await until(lambda: room.first.links)
        ends_at = now() + waits.patience_s
        await until(lambda: now() > ends_at)
        room.first.answers = 0
        room.push()
        await until(lambda: room.first.numbers == [1])
        room.first.answers = 1
        room.first.links[-1].abort()
        await until(lambda: room.acknowledged() == 1)
        assert room.first.numbers == [1, 1]


@pytest.mark.parametrize(("program", "waited_s"), [("run-1", 0.2), ("", 0.05)])
async def test_a_run_waits_for_copies_of_a_bundle_for_longer_than_a_store_of_clients(program, waited_s):
    waits = msgspec.structs.replace(SHORT, copies_s=0.2)
    begin = asyncio.get_running_loop().time()
    with pytest.raises(
        ShardUnavailable, match=f"waited {waited_s} s for ps-0 at .*; its last answer is not-r"
    ):
        async with room_of(NETWORKS["local"](), waits=waits, copies=2, program=program) as room:
            assert room.client.lacks_copies == bool(program)
            room.first.refusal = "not-ready"
            room.push()
            await asyncio.Event().wait()
    assert asyncio.get_running_loop().time() - begin >= waited_s


async def test_the_patience_of_a_run_begins_anew_once_its_bundle_has_enough_copies():
    async with room_of(NETWORKS["local"](), copies=2, program="run-1") as room:
        room.first.refusal = "not-ready"
        room.push()
        room.client._waits = SHORT
        waiting = asyncio.create_task(room.client.flush(), name="flush")
        begin = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > begin + 2 * SHORT.patience_s)
        assert not waiting.done()
        room.first.refusal = ""
        room.client._waits = PATIENT
        room.client.map_changed(
            map_of(room.first, room.first, room.second, copies=2, min_in_sync=1, program="run-1")
        )
        await waiting
        assert not room.client.lacks_copies
        assert room.first.applied == [1]


async def test_a_wait_for_answers_names_the_bundle_without_a_primary():
    async with room_of(NETWORKS["local"]()) as room:
        room.client._waits = SHORT  # the waiter loses patience, the connection does not
        room.move(None)
        room.push()
        with pytest.raises(ShardUnavailable, match="answers of a primary of bundle ps-0 after ps-0"):
            await room.client.flush()


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_wait_that_is_cancelled_while_the_primary_moves_loses_nothing(network):
    async with room_of(NETWORKS[network]()) as room:
        room.first.answers = room.first.applies = 0
        room.push(3)
        await until(lambda: room.first.numbers == [1, 2, 3])
        waiting = asyncio.create_task(room.client.flush(), name="flush")
        await turns()
        room.move(None)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        room.move(room.second)
        await room.client.flush()
        assert (room.second.numbers, sorted(room.freed)) == ([1, 2, 3], [1, 2, 3])


async def test_a_primary_that_moves_time_and_again_while_pushes_go_on_gets_each_number_once_and_in_order():
    async with room_of(NETWORKS["local"]()) as room:
        for number in range(40):
            await room.client.admit()
            room.push()
            if number % 3 == 2:
                room.move((room.second, None, room.first)[number // 3 % 3])
                await turns(number % 7)
                room.move((room.first, room.second)[number // 3 % 2])
        await room.client.flush()
        assert room.first.applied == list(range(1, 41))
        assert sorted(room.freed) == list(range(1, 41))


async def test_a_release_on_another_thread_is_noted_on_the_loop():
    async with room_of(NETWORKS["local"]()) as room:
        room.first.answers = 0
        room.push()
        await until(lambda: room.first.numbers == [1])
        (exchange,) = room.connection.open
        exchange.reading += 1  # as a link on another thread holds the tensors
        room.first.answers = 1
        room.move(None)
        room.move(room.first)
        await room.client.flush()
        assert room.freed == []
        await asyncio.to_thread(exchange.released)
        await until(lambda: room.freed == [1])


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("is_linked", [True, False])
async def test_a_push_that_no_link_can_take_ends_the_client_with_its_own_error(network, is_linked):
    with pytest.raises(LocalProtocolError, match="tensor-dtype"):
        async with room_of(NETWORKS[network]()) as room:
            if is_linked:
                room.push()
                await room.client.flush()
            room.push(dtype=np.complex64)
            await asyncio.get_running_loop().create_future()
    assert len(room.first.links) == 1
