"""Groups ahead of need and reports behind, against a data server whose answers the test writes."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from adam_async.data_server.client import DataClient, WorkerSlot
from adam_async.data_server.group_reader import GroupLimits
from adam_async.errors import RoleDied, first_cause
from adam_async.messages import (
    Finished,
    Groups,
    HeldLease,
    Lease,
    LeaseGroups,
    Leases,
    ReadGroups,
    Reported,
    ReportGroups,
    pack,
    unpack_any,
)
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.runs import NETWORKS, PATIENT, address_of, turns, until
from transport import Identity, LocalProtocolError

AHEAD = 4
LIMITS = GroupLimits(images=2, shape=(1, 3, 3), classes=1000, epochs=1, train_images=999)


class Server:
    """Keeps every question for leases until the test answers it, and sends images at once."""

    def __init__(self):
        self.links, self.asked, self.told, self.reported, self.read, self.leased = [], [], [], [], [], 0
        self.settled: int | None = 0
        """Answer to what the client holds; None: no answer."""
        self.wrong = None
        """Tensors of the next answer with images; None: the right ones."""

    async def on_link(self, link):
        self.links.append(link)
        link.serve(self.on_request)
        await link.wait_closed()

    def on_request(self, request):
        body = unpack_any(request.message)
        if isinstance(body, ReportGroups):
            self.reported.append(tuple(done.number for done in body.finished))
            request.reply(pack(Reported()))
        elif isinstance(body, ReadGroups):
            self.read.append(body)
            wrong, self.wrong = self.wrong, None
            count = len(body.numbers)
            request.reply(pack(Groups(count=count), pictures(body) if wrong is None else wrong))
        else:
            assert isinstance(body, LeaseGroups)
            (self.asked if body.count or self.settled is None else self.told).append((body, request))
            if not body.count and self.settled is not None:
                request.reply(pack(Leases(settled=self.settled)))

    async def grant(self, count=None, *, last=False, clock=0, end=0, settled=0):
        """Answer the oldest question, when there is one, with as many groups as it asks for."""
        await until(lambda: bool(self.asked))
        body, request = self.asked.pop(0)
        numbers = range(self.leased, self.leased + (body.count if count is None else count))
        self.leased = numbers.stop
        leases = tuple(Lease(1, number, 1, 2) for number in numbers)
        request.reply(pack(Leases(leases=leases, last=last, clock=clock, end=end, settled=settled)))
        return body


def pictures(body):
    """The images and labels of the groups that a question names."""
    labels = np.repeat(body.numbers, 2)
    images = np.broadcast_to(labels.astype(np.uint8)[:, None, None, None], (len(labels), 1, 3, 3))
    return [labels] if body.rows == (0, 0) else [np.ascontiguousarray(images), labels]


@asynccontextmanager
async def client_of(network, *, waits=PATIENT, ahead=AHEAD, first_piece=None, rows=None):
    """A client at work, and its server."""
    identity = Identity(role="worker", node="worker-0", incarnation=7)
    server = Server()
    far = Identity(role="data", node="data-0", incarnation=1)
    async with network.listen(address_of(network), far, server.on_link) as listener:
        client = DataClient(
            Endpoint(network, identity, Traffic("worker-0")),
            WorkerSlot("run", 3, 5, 1),
            address=lambda: listener.address,
            servers=lambda: (listener.address,),
            ahead=ahead,
            first_piece=first_piece,
            limits=LIMITS,
            rows=rows,
            waits=waits,
        )
        async with asyncio.TaskGroup() as group:
            work = group.create_task(client.run(), name="data")
            yield client, server
            work.cancel()


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


async def take(client, count=1):
    taken = []
    for _ in range(count):
        while not client.has_group:
            await client.wait_group()
        taken.append(client.take())
    return taken


def finished(group):
    lease = group.lease
    return Finished(lease.epoch, lease.number, lease.attempt, lease.images, 0.5)


async def test_groups_come_in_order_with_their_images_and_labels(network):
    async with client_of(network) as (client, server):
        assert not client.has_group
        asked = await server.grant()
        assert (asked.run, asked.replica, asked.replica_generation, asked.partition) == ("run", 3, 5, 1)
        assert (asked.position, asked.count, asked.heard) == (0, AHEAD, -1)
        for number, group in enumerate(await take(client, AHEAD)):
            assert group.lease == Lease(1, number, 1, 2)
            assert (group.images == number).all()
            assert (group.labels == number).all()
        (read,) = server.read
        assert (read.run, read.epoch, read.numbers, read.rows) == ("run", 1, tuple(range(AHEAD)), None)
        assert client.statistics().groups == AHEAD


async def test_it_asks_again_when_half_of_what_it_holds_is_used_up(network):
    async with client_of(network) as (client, server):
        await server.grant()
        await take(client, AHEAD // 2 - 1)
        await turns(20)
        assert server.asked == []
        await take(client)
        await until(lambda: bool(server.asked))
        assert server.asked[0][0].count == AHEAD // 2


async def test_every_request_has_the_number_of_groups_before_it_also_on_a_new_link(network):
    async with client_of(network) as (client, server):
        assert (await server.grant()).position == 0
        await take(client, 2)
        assert (await server.grant(1)).position == AHEAD
        await take(client, 1)
        await until(lambda: bool(server.asked))
        server.asked.pop()[1].link.abort()
        again = await server.grant(1)
        assert (again.position, len(server.links)) == (AHEAD + 1, 3)
        assert [group.lease.number for group in await take(client, 3)] == [3, 4, 5]


async def test_another_data_server_is_told_what_the_client_holds_and_gets_the_reports_again(network):
    async with client_of(network) as (client, server):
        await server.grant(clock=7)
        groups = await take(client, AHEAD)
        await server.grant(1, last=True, end=9, settled=1)
        client.finished(finished(groups[0]))
        client.finished(finished(groups[1]))
        await until(lambda: server.reported == [(0, 1)])
        server.settled = -1
        server.links[0].abort()
        await until(lambda: len(server.told) > 3)
        server.settled = 0
        await until(lambda: len(server.reported) == 2)
        told, _ = server.told[-1]
        assert (told.epoch, told.position, told.heard) == (1, AHEAD + 1, 9)
        held = [HeldLease(number, 1, 7) for number in range(1, AHEAD)]
        assert [*told.held] == [*held, HeldLease(AHEAD, 1, 0)]
        assert server.reported[1] == (1,), "group 0 is settled, and the dealer does not have the other report"


async def test_a_request_repeats_the_known_end_and_its_sync_clock(network):
    async with client_of(network) as (client, server):
        assert (await server.grant(1, last=True, end=3)).heard == -1
        assert (await server.grant(0)).heard == 3
        assert (await server.grant(1)).heard == 3, "an answer that says nothing changes nothing"
        await until(lambda: client.end == 0)
        await take(client, 2)
        assert (await server.grant(0, last=True)).heard == -1
        assert (await server.grant(0, last=True)).heard == 0


@pytest.mark.parametrize("rows", [(0, 2), (0, 0)])
async def test_a_worker_is_given_the_rows_that_it_needs_and_labels_alone_if_it_needs_none(network, rows):
    async with client_of(network, rows=rows) as (client, server):
        await server.grant()
        (group,) = await take(client)
        assert server.read[0].rows == rows
        assert (group.images is None) == (rows == (0, 0))
        assert len(group.labels) == 2


async def test_reports_travel_a_few_at_a_time(network):
    async with client_of(network) as (client, server):
        await server.grant()
        one, two, three = await take(client, 3)
        client.finished(finished(one))
        await turns(20)
        assert server.reported == []
        client.finished(finished(two))
        await until(lambda: server.reported == [(0, 1)])
        client.finished(finished(three))
        await turns(20)
        assert server.reported == [(0, 1)]


async def test_from_a_pool_it_asks_for_the_next_piece_when_it_has_begun_the_newest_one(network):
    async with client_of(network, first_piece=3) as (client, server):
        assert (await server.grant()).count == 3
        assert (await server.grant(2)).position == 3
        await take(client, 2)
        await turns(20)
        assert server.asked == []
        await take(client, 1)
        assert (await server.grant(1)).position == 5
        await take(client, 1)
        await turns(20)
        assert server.asked == [], "the piece of two groups is begun, and the piece of one group is not"


async def test_of_a_large_piece_it_reads_no_more_images_than_it_has_memory_for(network):
    async with client_of(network, first_piece=11) as (client, server):
        await server.grant()
        await until(lambda: len(server.read) == 1)
        await take(client, AHEAD // 2 - 1)
        await turns(20)
        assert len(server.read) == 1
        groups = await take(client, 10)
        assert [group.lease.number for group in groups] == list(range(1, 11))
        assert max(len(body.numbers) for body in server.read) <= AHEAD


async def test_leased_groups_beyond_its_memory_are_read_when_groups_are_taken(network):
    """After its last group a replica may get returned groups while half of its own ones are untaken."""
    async with client_of(network) as (client, server):
        await server.grant(last=True)
        await take(client, AHEAD // 2)
        assert (await server.grant()).count == AHEAD
        await until(lambda: len(server.read) == 2)
        await turns(20)
        assert [len(body.numbers) for body in server.read] == [AHEAD, AHEAD // 2]
        groups = await take(client, AHEAD // 2 + AHEAD)
        assert [group.lease.number for group in groups] == list(range(AHEAD // 2, 2 * AHEAD))


async def test_reports_of_a_pool_travel_piece_by_piece_and_fit_into_a_message(network):
    async with client_of(network, first_piece=260) as (client, server):
        await server.grant()
        await server.grant(200)
        groups = await take(client, 260)
        for group in groups[:199]:
            client.finished(finished(group))
        await turns(20)
        assert server.reported == []
        for group in groups[199:]:
            client.finished(finished(group))
        await until(lambda: bool(server.reported))
        assert len(server.reported[0]) == 256


async def test_a_client_without_groups_ahead_reports_at_once_because_more_may_come_only_then(network):
    async with client_of(network) as (client, server):
        await server.grant()
        one, *_ = await take(client, 4)
        client.finished(finished(one))
        await until(lambda: server.reported == [(0,)])


async def test_a_client_that_waits_with_a_step_half_full_reports_the_steps_before(network):
    async with client_of(network, ahead=8) as (client, server):
        await server.grant(4)
        one, *_ = await take(client, 3)
        client.finished(finished(one))
        await take(client, 1)
        await turns(20)
        assert server.reported == []
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(client.wait_group(), name="wait")
            await turns(20)
            assert server.reported == [(0,)]
            waiting.cancel()


async def test_when_nothing_more_waits_every_report_travels_at_once(network):
    async with client_of(network) as (client, server):
        await server.grant(1, last=True)
        assert not client.exhausted
        (group,) = await take(client)
        assert client.exhausted
        client.finished(finished(group))
        await until(lambda: server.reported == [(0,)])


async def test_reports_that_waited_travel_when_it_turns_out_that_nothing_more_waits(network):
    async with client_of(network) as (client, server):
        await server.grant(1)
        (group,) = await take(client)
        client.finished(finished(group))
        await server.grant(0, last=True)
        await until(lambda: server.reported == [(0,)])


async def test_an_unacknowledged_report_is_sent_again_on_the_next_link(network):
    async with client_of(network) as (client, server):
        await server.grant(2, last=True)
        first, second = await take(client, 2)
        await until(lambda: bool(server.asked))
        server.asked.pop()[1].link.abort()
        client.finished(finished(first))
        client.finished(finished(second))
        await until(lambda: bool(server.reported))
        assert len(server.links) == 3
        assert server.reported[0] == (0, 1)


async def test_waiting_for_a_slow_server_is_counted_and_waiting_for_an_epoch_is_not(network):
    async with client_of(network) as (client, server):
        waiting = asyncio.create_task(take(client), name="take")
        await server.grant(1, last=True)
        await waiting
        assert client.statistics().blocked_fetches == 1
        waiting = asyncio.create_task(take(client), name="take")
        await server.grant(1)
        await waiting
        assert client.statistics().blocked_fetches == 1
        assert client.statistics().groups == 2


async def test_a_wait_ends_with_the_word_that_nothing_more_waits(network):
    async with client_of(network) as (client, server):
        await server.grant(1)
        await take(client)
        assert not client.exhausted
        waiting = asyncio.create_task(client.wait_group(), name="wait")
        await server.grant(0, last=True)
        await waiting
        assert client.exhausted
        assert client.statistics().blocked_fetches <= 1  # the one of the group


async def test_a_cancelled_wait_loses_no_group(network):
    async with client_of(network) as (client, server):
        waiting = asyncio.create_task(client.wait_group(), name="wait")
        await turns(3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await server.grant()
        assert [group.lease.number for group in await take(client, AHEAD)] == list(range(AHEAD))


async def test_a_server_that_answers_nothing_is_given_up_by_name(network):
    impatient = msgspec.structs.replace(PATIENT, call_s=0.01, patience_s=0.05)
    with pytest.raises(RoleDied, match="the data server") as failure:
        try:
            async with client_of(network, waits=impatient) as (_, server):
                server.settled = None
                await asyncio.Event().wait()
        except ExceptionGroup as errors:
            raise first_cause(errors) from None
    assert "did not give an answer for 0.05 s" in str(failure.value)


async def test_a_server_that_is_not_there_is_given_up_by_name(network):
    gone = DataClient(
        Endpoint(network, Identity(role="worker", node="worker-0", incarnation=7), Traffic("worker-0")),
        WorkerSlot("run", 0, 5, 0),
        address=lambda: "local://nobody" if address_of(network) == "local://" else "tcp://127.0.0.1:1",
        servers=tuple,
        ahead=AHEAD,
        limits=LIMITS,
        waits=msgspec.structs.replace(PATIENT, patience_s=0.05),
    )
    with pytest.raises(RoleDied, match="the data server"):
        try:
            await gone.run()
        except ExceptionGroup as errors:
            raise first_cause(errors) from None


async def test_where_groups_begin_and_where_all_meet_comes_with_the_first_of_them(network):
    async with client_of(network) as (client, server):
        await server.grant(3, clock=5)
        groups = await take(client, 3)
        assert [(group.clock, group.sync_clock) for group in groups] == [(5, 0), (0, 0), (0, 0)]
        await server.grant(2, last=True, end=9)
        assert [(group.clock, group.sync_clock) for group in await take(client, 2)] == [(0, 0), (0, 0)]
        assert client.exhausted
        assert client.end == 9
        await server.grant(0)
        await server.grant(2, clock=11)
        assert [(group.clock, group.sync_clock) for group in await take(client, 2)] == [(11, 9), (0, 0)]
        assert client.end == 0


async def test_a_later_meeting_is_heard_by_who_has_nothing_to_do(network):
    async with client_of(network) as (client, server):
        await server.grant(0, last=True, end=4)
        await client.wait_group()
        assert (client.exhausted, client.end) == (True, 4)
        await server.grant(0, last=True, end=6)
        await client.wait_group()
        assert (client.exhausted, client.end) == (True, 6)


LEASE = Lease(1, 0, 1, 2)


@pytest.mark.parametrize(
    "leases",
    [
        (Lease(1, 0, 1, 3),),
        (Lease(1, 0, 1, 0),),
        (Lease(2, 0, 1, 2),),
        (Lease(1, 499, 1, 2),),
        (Lease(1, 500, 1, 2),),
        (LEASE, LEASE),
        tuple(Lease(1, number, 1, 2) for number in range(AHEAD + 1)),
    ],
)
async def test_leases_that_the_run_cannot_have_end_their_link_only(leases):
    async with client_of(NETWORKS["local"]()) as (client, server):
        await until(lambda: bool(server.asked))
        _, request = server.asked.pop(0)
        request.reply(pack(Leases(leases=leases)))
        await server.grant(1)
        (group,) = await take(client)
        assert len(server.links) == 3
        assert group.lease == LEASE
        assert not client.has_group


async def test_a_group_that_is_held_is_not_leased_again():
    async with client_of(NETWORKS["local"]()) as (client, server):
        await server.grant(1)
        server.leased = 0
        await server.grant(1)
        await until(lambda: len(server.links) == 3)
        (group,) = await take(client)
        assert not client.has_group
        client.finished(finished(group))


async def test_groups_are_held_back_until_their_images_are_there(network):
    async with client_of(network) as (client, server):
        server.wrong = [np.zeros(1, np.uint8)]
        await server.grant(2, last=True)
        assert not client.exhausted
        assert [group.lease.number for group in await take(client, 2)] == [0, 1]
        assert [body.numbers for body in server.read] == [(0, 1)] * 2
        assert client.exhausted


async def test_an_answer_waits_for_a_quarter_of_the_groups_ahead(network):
    async with client_of(network, ahead=4 * AHEAD) as (client, server):
        await server.grant()
        await take(client, 2 * AHEAD)
        await server.grant(1)
        await until(lambda: len(server.read) == 2)
        assert [(len(body.numbers), body.least) for body in server.read] == [(4 * AHEAD, AHEAD), (1, 1)]


async def test_a_report_that_no_link_can_take_ends_the_client_with_its_own_error(network):
    with pytest.raises(LocalProtocolError, match="cannot be encoded"):
        try:
            async with client_of(network) as (client, server):
                await server.grant(last=True)
                (group,) = await take(client)
                client.finished(msgspec.structs.replace(finished(group), images=1 << 70))
                await asyncio.get_running_loop().create_future()
        except ExceptionGroup as errors:
            raise first_cause(errors) from None
    assert len(server.links) == 2
