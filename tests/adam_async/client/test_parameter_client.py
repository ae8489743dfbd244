"""Requests of a client to real servers, over links of both kinds and over links that fail."""

import asyncio
from functools import partial

import msgspec
import numpy as np
import pytest

from adam_async.client.connection import MAX_UNACKNOWLEDGED
from adam_async.errors import ShardUnavailable
from adam_async.messages import Part, StepReport, role_table
from adam_async.parameter_server.events import PushArrived, Refuse, ReplicasChanged
from adam_async.run.ids import ShardId
from tests.adam_async.runs import (
    IMPATIENT,
    NETWORKS,
    PATIENT,
    SHARDED,
    Call,
    Rough,
    entropy_of,
    servers_of,
    turns,
    until,
)
from tests.transport.testing import Faults
from transport import LinkConfig, TcpNetwork

SHORT = msgspec.structs.replace(PATIENT, patience_s=0.05, answer_s=0.01)
"""For tests in which nobody ever answers."""


def shards_of(servers, name):
    return tuple(ShardId(s.id) for s in servers.table.shards if servers.map.buckets[s.bucket] == name)


def steps_of(first, count, **fields):
    return tuple(
        StepReport(**{"clock": clock, "weight": 4, "staleness": 1, **fields})
        for clock in range(first, first + count)
    )


class Recording:
    """Records steps on every server and remembers what was answered."""

    def __init__(self, servers, client):
        self.client, self.clock, self.answered = client, 0, []
        self.shards = {name: shards_of(servers, name) for name in sorted(set(servers.map.buckets))}

    def record(self, count, **fields):
        for name, shards in self.shards.items():
            said = (name, self.clock + 1)
            steps = steps_of(self.clock + 1, count, **fields)
            self.client.connections[name].report_steps(
                shards, steps, lambda said=said: self.answered.append(said)
            )
        self.clock += count


def check_counted(servers, steps):
    for shard in servers.shards().values():
        shard.check_invariants()
        assert (shard.version, dict(shard.staleness), shard.tables.refused) == (steps, {1: steps}, 0)
        assert list(shard.last_number.values()) == [steps]
        assert list(shard.clocks.values()) == [steps]


@pytest.mark.parametrize("network", NETWORKS)
async def test_steps_are_recorded_under_the_next_numbers_and_each_record_is_answered_once(network):
    async with servers_of(NETWORKS[network](), weights="aliased", waits=PATIENT, **SHARDED) as servers:
        recording = Recording(servers, servers.client().client)
        for count in (1, 4, 2):
            recording.record(count)
        await recording.client.flush()
        check_counted(servers, 7)
        assert sorted(recording.answered) == [(name, at) for name in recording.shards for at in (1, 2, 6)]
        told = recording.client.statistics()
        assert (told.acknowledged, told.refused, told.resent) == (7 * len(servers.shards()), 0, 0)


@pytest.mark.parametrize(
    "faults",
    [Faults(drop_reply=0.3), Faults(drop=0.1, delay=0.1, cut=0.05, drop_reply=0.1, delay_s=0.002)],
    ids=["lost-answers", "everything"],
)
@pytest.mark.parametrize("network", NETWORKS)
async def test_every_recorded_step_is_counted_exactly_once_over_links_that_fail(network, faults):
    rough = Rough(NETWORKS[network](), faults)
    async with servers_of(rough, weights="aliased", waits=IMPATIENT, **SHARDED) as servers:
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        recording = Recording(servers, servers.client().client)
        for _ in range(20):
            await recording.client.admit()
            recording.record(3)
        await recording.client.flush()
        check_counted(servers, 60)
        assert len(set(recording.answered)) == len(recording.answered) == 20 * len(recording.shards)
        assert recording.client.statistics().resent > 0
        for number, shard in servers.shards().items():
            np.testing.assert_array_equal(shard.values, before[number])


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_record_whose_answer_is_lost_is_answered_again_and_counted_once(network):
    rough = Rough(NETWORKS[network](), Faults())
    async with servers_of(rough, weights="aliased", waits=PATIENT) as servers:
        recording = Recording(servers, servers.client().client)
        recording.record(1)
        await recording.client.flush()
        rough.faults = Faults(drop_reply=1.0)
        recording.record(2)
        await until(lambda: all(shard.version == 3 for shard in servers.shards().values()))
        assert len(recording.answered) == 1
        rough.faults = Faults()
        rough.cut_all()
        await recording.client.flush()
        check_counted(servers, 3)
        assert [at for _, at in recording.answered] == [1, 2]
        assert {shard.tables.duplicates for shard in servers.shards().values()} == {2}


async def test_refused_steps_are_counted_by_the_client_as_by_the_servers():
    async with servers_of(NETWORKS["local"](), weights="aliased") as servers:
        recording = Recording(servers, servers.client().client)
        recording.record(2, refused=(0, 3))
        await recording.client.flush()
        assert sum(shard.tables.refused for shard in servers.shards().values()) == 4
        assert recording.client.statistics().refused == 4


async def test_records_count_against_admission_as_pushes_do():
    rough = Rough(NETWORKS["local"](), Faults(drop=1.0))
    async with servers_of(rough, weights="aliased", waits=IMPATIENT) as servers:
        recording = Recording(servers, servers.client().client)
        for _ in range(MAX_UNACKNOWLEDGED):
            assert recording.client.may_push
            recording.record(1)
        assert not recording.client.may_push
        rough.faults = Faults()
        await recording.client.admit()
        assert recording.client.may_push
        await recording.client.flush()
        check_counted(servers, MAX_UNACKNOWLEDGED)


class DamagingTransport:
    """Flips one bit of the first large buffer that is written, and passes everything on."""

    def __init__(self, inner):
        self.inner, self.damaged = inner, False

    def write(self, data):
        if not self.damaged and len(data) > 1000:
            self.damaged = True
            data = bytearray(data)
            data[-1] ^= 1
        self.inner.write(data)

    def writelines(self, buffers):
        for buffer in buffers:
            self.write(buffer)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class CheckingNetwork(TcpNetwork):
    """Checksums also on loopback; remembers the links of its listeners."""

    def __init__(self):
        config = LinkConfig(checksum="on")
        super().__init__(token=bytes(16), entropy=entropy_of("tcp"), rules=role_table(), config=config)
        self.served = []

    def listen(self, address, identity, on_link):
        async def note(link):
            self.served.append(link)
            await on_link(link)

        return super().listen(address, identity, note)


@pytest.mark.parametrize("way", ["push", "answer"])
async def test_a_payload_damaged_on_the_way_is_sent_again_and_counts_once(way, caplog):
    network = CheckingNetwork()
    async with servers_of(network, waits=PATIENT) as servers:
        client = servers.client()
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        client.push(0.5)
        await client.client.flush()
        near = client.client.connections["ps-0"].channel.link
        (far,) = [
            link for link in network.served if (link.identity.node, link.peer.role) == ("ps-0", "worker")
        ]
        speaker = near if way == "push" else far
        damaging = speaker._transport = DamagingTransport(speaker._transport)
        speaker._descriptor = -1

        client.push(0.25)
        pulled = await client.pull()

        assert damaging.damaged
        assert near.closed
        assert far.closed
        assert "payload-checksum" in caplog.text
        for number, shard in servers.shards().items():
            shard.check_invariants()
            np.testing.assert_array_equal(shard.values, before[number] - 0.5 - 0.25)
            assert (shard.version, list(shard.last_number.values())) == (2, [2])
        assert client.client.connections["ps-0"].reconnects == 1
        assert client.freed == 2 * len(client.plan.messages)
        flat = np.concatenate([shard.values for shard in servers.shards().values()])
        assert sum(array.sum() for array in pulled.values()) == pytest.approx(flat.sum(), rel=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_tick_moves_the_clocks_of_its_shards_only(network):
    async with servers_of(NETWORKS[network]()) as servers:
        client = servers.client().client
        client.connections["ps-0"].tick((ShardId(1), ShardId(2)), 5)
        await client.flush()
        assert [shard.tables.slowest_clock() for shard in servers.shards().values()][:4] == [0, 5, 5, 0]


@pytest.mark.parametrize("network", NETWORKS)
async def test_values_land_where_they_are_wanted(network):
    async with servers_of(NETWORKS[network]()) as servers:
        client, told = servers.client().client, []
        sizes = [servers.table.shards[number].size for number in (0, 2)]
        room = np.zeros(sum(sizes), np.float32)
        client.connections["ps-0"].pull(
            (ShardId(0), ShardId(2)), Call(lambda values, _: told.append(values)), into=room
        )
        await client.flush()
        shards = servers.shards()
        np.testing.assert_array_equal(room, np.concatenate([shards[0].values, shards[2].values]))
        assert room.any()
        assert [(values.versions, values.clock) for values in told] == [(0, 0)]


async def test_a_server_that_answers_nothing_is_named_when_patience_ends():
    rough = Rough(NETWORKS["local"](), Faults())
    with pytest.raises(ShardUnavailable, match=r"ps-0 at local://.*, the primary of bundle ps-0"):
        async with servers_of(rough) as servers:
            client = servers.client(waits=SHORT)
            rough.faults = Faults(drop=1.0)
            client.push(1.0)
            await asyncio.Event().wait()


async def test_a_wait_for_missing_answers_ends_with_an_error_that_names_the_server():
    rough = Rough(NETWORKS["local"](), Faults(drop=1.0))
    async with servers_of(rough) as servers:
        client = servers.client().client
        client._waits = SHORT  # the waiter loses patience, its channels do not
        client.connections["ps-0"].tick((ShardId(0),), 1)
        with pytest.raises(ShardUnavailable, match=r"answers of ps-0 at .*, the primary of bundle ps-0"):
            await client.flush()


async def test_a_cancelled_wait_loses_nothing():
    rough = Rough(NETWORKS["local"](), Faults(drop=1.0))
    async with servers_of(rough, waits=IMPATIENT) as servers:
        client = servers.client()
        client.push(1.0)
        waiting = asyncio.create_task(client.client.flush(), name="flush")
        await turns(3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        rough.faults = Faults()
        await client.client.flush()
        assert {shard.version for shard in servers.shards().values()} == {1}


# --- clocks ----------------------------------------------------------------------------------


def take_part(servers, *clients):
    """Have the servers hear that these clients' replicas are live, as the map would say it."""
    live = {client._session.replica: client._session.incarnation for client in clients}
    for server in servers.servers:
        served = server.store("run")
        served._follow_up(served.state.handle(ReplicasChanged(live)))


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_pull_for_a_clock_is_asked_again_until_it_comes_and_lands_where_it_is_wanted(network):
    async with servers_of(NETWORKS[network](), consistency="ssp:0", waits=IMPATIENT) as servers:
        client, other = (servers.client(replica).client for replica in (0, 1))
        take_part(servers, client, other)
        room, told, behind = np.zeros(servers.table.shards[0].size, np.float32), [], []
        client.connections["ps-0"].tick((ShardId(0),), 2)
        client.connections["ps-0"].pull(
            (ShardId(0),),
            Call(lambda values, flat: told.append((values, flat)), behind=behind.append),
            clock=1,
            into=room,
        )
        await until(lambda: len(behind) > 2)
        assert not told
        assert {(values.clock, values.behind) for values in behind} == {(0, (1,))}
        other.connections["ps-0"].tick((ShardId(0),), 1)
        await client.flush()
        ((values, flat),) = told
        assert (values.clock, values.versions) == (1, 0)
        assert np.shares_memory(flat, room)
        np.testing.assert_array_equal(room, servers.shards()[0].values)


@pytest.mark.thorough
async def test_a_wait_for_a_clock_loses_patience_with_silent_servers_only():
    async with servers_of(NETWORKS["local"](), consistency="ssp:0", waits=IMPATIENT) as servers:
        client, other = servers.client(0).client, servers.client(1).client
        take_part(servers, client, other)
        client._waits = msgspec.structs.replace(IMPATIENT, patience_s=0.5)
        behind, loop = [], asyncio.get_running_loop()
        client.connections["ps-0"].pull((ShardId(0),), Call(behind=behind.append), clock=1)
        begin, flushing = loop.time(), asyncio.create_task(client.flush(), name="flush")
        await until(lambda: loop.time() > begin + 0.7)
        assert behind
        assert not flushing.done()
        other.connections["ps-0"].tick((ShardId(0),), 1)
        client.connections["ps-0"].tick((ShardId(0),), 1)
        await flushing


@pytest.mark.parametrize("consistency", ["asp", "ssp:3", "bsp"])
async def test_a_client_of_an_ended_replica_generation_is_ignored_and_holds_no_replica_up(consistency):
    async with servers_of(NETWORKS["local"](), consistency=consistency, waits=IMPATIENT) as servers:
        pushing, other = servers.client(0), servers.client(1)
        take_part(servers, pushing.client, other.client)
        pushing.push(1.0)
        await pushing.client.flush()
        take_part(servers, other.client)
        before = {number: dict(shard.last_number) for number, shard in servers.shards().items()}
        freed = pushing.freed
        pushing.push(1.0)
        pushing.client.connections["ps-0"].tick((ShardId(0),), 9)
        await until(lambda: pushing.client.statistics().reconnects > 2)
        assert pushing.freed == freed, "what is refused is not acknowledged"
        assert {number: shard.last_number for number, shard in servers.shards().items()} == before
        other.push(1.0)
        await other.client.flush()


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_push_that_pulls_brings_back_the_clock_of_its_values(network):
    async with servers_of(NETWORKS[network](), consistency="ssp:3") as servers:
        client, told = servers.client().client, []
        take_part(servers, client)
        spec = servers.table.shards[0]
        client.connections["ps-0"].push(
            (np.ones(spec.size, np.float32),),
            Call(lambda *values: told.append(values)),
            parts=(Part(False, 1),),
            shards=(ShardId(0),),
            versions=0,
            own_applied=0,
            clock=4,
            weight=1,
            rate=1.0,
            pull=True,
        )
        await client.flush()
        ((answer, flat),) = told
        assert (answer.versions, answer.clock) == (1, 4)
        np.testing.assert_array_equal(flat, servers.shards()[0].values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [Faults(drop_reply=0.3), Faults(drop=0.1, delay=0.1, cut=0.05, drop_reply=0.1, delay_s=0.002)],
    ids=["lost-answers", "everything"],
)
@pytest.mark.parametrize("network", NETWORKS)
async def test_every_contribution_is_in_its_sum_once_over_links_that_fail(network, faults):
    """Each replica pushes on some shards, ticks the others and waits for the sum, step after step."""
    rough = Rough(NETWORKS[network](), faults)
    options = {"consistency": "bsp", "images_per_group": 1, "dtype": "float64", "waits": IMPATIENT, **SHARDED}
    async with servers_of(rough, **options) as servers:
        clients = [servers.client(replica).client for replica in range(2)]
        take_part(servers, *clients)
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        async with asyncio.TaskGroup() as group:
            for replica, client in enumerate(clients):
                group.create_task(steps_in_lockstep(servers, replica, client), name=f"replica-{replica}")
        for number, shard in servers.shards().items():
            shard.check_invariants()
            assert (shard.version, shard.tables.refused, shard.applied_clock()) == (STEPS, 0, STEPS)
            expected = before[number]
            for clock in range(1, STEPS + 1):
                who = [replica for replica in range(2) if contributes(replica, number, clock)]
                expected = expected - sum(float(replica + clock) for replica in who) * (1 / len(who))
            np.testing.assert_allclose(shard.values, expected, rtol=1e-12, atol=1e-12)
        assert sum(client.statistics().resent for client in clients) > 0


STEPS = 6


def contributes(replica, number, clock):
    """Replica 0 pushes every shard at every step, replica 1 only every other one; the rest it ticks."""
    return replica == 0 or (number + clock) % 2 == 0


def land(arrived, values, flat):
    assert len(flat)
    arrived.append(values.clock)


async def steps_in_lockstep(servers, replica, client):
    for clock in range(1, STEPS + 1):
        arrived: list[int] = []
        landed = Call(partial(land, arrived))
        for server in sorted(set(servers.map.buckets)):
            shards, connection = shards_of(servers, server), client.connections[server]
            mine = tuple(number for number in shards if contributes(replica, number, clock))
            rest = tuple(number for number in shards if number not in mine)
            if mine:
                sizes = sum(servers.table.shards[number].size for number in mine)
                connection.push(
                    (np.full(sizes, float(replica + clock)),),
                    Call(),
                    parts=(Part(False, len(mine)),),
                    shards=mine,
                    versions=clock - 1,
                    own_applied=0,
                    clock=clock,
                    weight=1,
                    rate=1.0,
                )
            if rest:
                connection.tick(rest, clock)
            connection.pull(shards, landed, clock=clock)
        await client.flush()
        assert set(arrived) == {clock}


async def test_a_link_on_which_something_was_refused_is_followed_by_a_pause(monkeypatch):
    pauses = []

    class Counted:
        longest_s = 0.0

        def waits(self):
            while True:
                pauses.append(0.0)
                yield 0.0

    async with servers_of(NETWORKS["local"](), waits=PATIENT) as servers:
        (server,) = servers.servers
        handle, left = server.state.handle, [3]

        def busy_at_first(event):
            if isinstance(event, PushArrived) and left[0]:
                left[0] -= 1
                return [Refuse(event.request, "busy", "say it again")]
            return handle(event)

        server.state.handle = busy_at_first
        client = servers.client()
        channel = client.client.connections["ps-0"].channel
        monkeypatch.setattr(channel, "_schedule", Counted())
        channel.progressed()
        client.client.connections["ps-0"].tick(
            (ShardId(0),), 1
        )  # it is answered on the first link, and the push is not
        client.push(1.0)
        await client.client.flush()
        assert client.client.connections["ps-0"].reconnects == len(pauses) > 0
