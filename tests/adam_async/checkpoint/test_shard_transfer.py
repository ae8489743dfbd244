"""Copies of all shards over real links: of one moment, bound to a clock, in messages of any size."""

import asyncio

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint.checkpoint import StoredPieces
from adam_async.checkpoint.shard_transfer import ClockPassed, ShardCopies
from adam_async.errors import DeadlineExceeded, ShardUnavailable
from adam_async.messages.group_sets import MOST_SETS_BOUNDS
from adam_async.messages.shard_states import STATE_BYTES
from adam_async.parameter_server import answers, piece_states
from adam_async.parameter_server.events import ReplicasChanged
from adam_async.parameter_server.piece_states import catalogue_of
from adam_async.parameter_server.statistics import count_server
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.config import Waits
from adam_async.run.store_record import bundle_key
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, address_of, servers_of, until
from transport import DialFailed, Identity, RemoteProtocolError


def copies_of(servers, waits=PATIENT, changes=None):
    identity = servers.identity("driver", 1)
    endpoint = Endpoint(servers.network, identity, Traffic(identity.node))
    return ShardCopies(endpoint, changes=changes or servers.member.changes, waits=waits)


async def read(servers, *, clock=0, waits=PATIENT, changes=None, within_s=None):
    """Read all shards of the servers; return them by number."""
    cluster, shards, names = servers.map, {}, []
    ((name, store),) = cluster.stores.items()
    pieces = StoredPieces(catalogue_of(cluster, name, store, began=0.0))

    async def put(name, bundle):
        names.append(name)
        shards.update(bundle.shards)

    copies = copies_of(servers, waits, changes)
    within_s = waits.clock_s if within_s is None else within_s
    await copies.read(cluster, pieces, put, clock=clock, within_s=within_s)
    assert sorted(names) == sorted(pieces.specs)
    return dict(sorted(shards.items()))


def all_live(servers, *clients):
    """Have the servers know these replicas, and wait for them."""
    live = {number: client.client._session.incarnation for number, client in enumerate(clients)}
    for server in servers.servers:
        server.state.handle(ReplicasChanged(live))


@pytest.mark.parametrize("size", [1, 20_000, 8 << 20])
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_copy_equals_the_shards_for_any_size_of_message(network, size, monkeypatch):
    monkeypatch.setattr(piece_states, "PART_BYTES", size)
    options = {"rule": "adam", "waits": PATIENT, **SHARDED}
    async with servers_of(NETWORKS[network](), **options) as servers:
        client = servers.client()
        client.push(0.25)
        await client.pull()
        found, shards = await read(servers), servers.shards()
        assert list(found) == list(shards)
        for number, shard in found.items():
            np.testing.assert_array_equal(shard.values, shards[number].values)
            for name in ("mean", "square"):
                np.testing.assert_array_equal(shard.rule_state[name], shards[number].rule_state[name])
            assert int(shard.rule_state["steps"][0]) == shard.version == 1


@pytest.mark.parametrize("consistency", ["ssp:3", "bsp"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_copy_bound_to_a_clock_waits_for_the_last_replica(network, consistency):
    options = {"consistency": consistency, "images_per_group": 1, "waits": PATIENT, **SHARDED}
    async with servers_of(NETWORKS[network](), **options) as servers, asyncio.TaskGroup() as group:
        one, other = servers.client(0), servers.client(1)
        all_live(servers, one, other)
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        one.push(1.0)
        reading = group.create_task(read(servers, clock=1), name="read")
        await until(lambda: all(count_server([server.state]).waiting for server in servers.servers))
        assert not reading.done()
        other.push(3.0)
        for number, shard in (await reading).items():
            assert set(shard.clocks.values()) == {1}
            moved = before[number] - shard.values
            np.testing.assert_allclose(moved, 2.0 if consistency == "bsp" else 4.0, rtol=1e-5)


async def test_the_error_of_an_unreached_clock_names_the_replica_behind():
    waits = Waits(clock_s=0.05, answer_s=0.04)
    async with servers_of(NETWORKS["local"](), consistency="ssp:1", waits=waits) as servers:
        one, other = servers.client(0), servers.client(1)
        all_live(servers, one, other)
        one.push(1.0)
        with pytest.raises(
            DeadlineExceeded, match=r"waited 0.03 s for ps-\d to send its shards: .* behind: 1"
        ):
            await read(servers, clock=1, waits=waits, within_s=0.03)


async def test_sums_that_are_never_complete_are_given_up_with_the_names_of_server_and_replica():
    waits = Waits(clock_s=0.05, answer_s=0.04)
    async with servers_of(NETWORKS["local"](), consistency="bsp", images_per_group=1, waits=waits) as servers:
        one, other = servers.client(0), servers.client(1)
        all_live(servers, one, other)
        one.push(1.0)
        await until(
            lambda: any(count_server([server.state]).pending_contributions for server in servers.servers)
        )
        with pytest.raises(
            DeadlineExceeded, match=r"waited 0.05 s for ps-\d to send its shards: .* behind: 1"
        ):
            await read(servers, clock=1, waits=waits)


async def test_a_reading_that_is_cancelled_while_it_fails_is_cancelled():
    """Its caller would otherwise look at the next clock, for ever."""
    async with servers_of(NETWORKS["local"](), **SHARDED) as servers:

        async def fail(link, shards):
            reading.cancel()
            raise ClockPassed(7)

        copies, store = copies_of(servers), servers.map.run_store
        reading = asyncio.create_task(copies.with_primaries(store, servers.table, fail))
        await asyncio.wait([reading])
        assert reading.cancelled()


async def test_a_reading_fails_with_its_cause_if_its_caller_was_once_asked_to_end_and_went_on():
    """A task group leaves such a request before Python 3.13."""
    async with servers_of(NETWORKS["local"](), **SHARDED) as servers:

        async def fail(link, shards):
            raise ClockPassed(7)

        async def go_on_and_read():
            asyncio.current_task().cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(0)
            assert asyncio.current_task().cancelling() == 1
            await copies_of(servers).with_primaries(servers.map.run_store, servers.table, fail)

        reading = asyncio.create_task(go_on_and_read())
        await asyncio.wait([reading])
        assert not reading.cancelled()
        assert isinstance(reading.exception(), ClockPassed)


# --- servers that lie -------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [1, 2, 1 << 40])
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_passed_clock_that_no_replica_can_have_reached_costs_the_link(network, passed):
    """The next clock of its reader would otherwise be so late that no reading ever ends."""
    async with servers_of(NETWORKS[network](), consistency="bsp", waits=PATIENT) as servers:
        for server in servers.servers:
            server.state.bundle.keep_clock = lambda *_: passed
        with pytest.raises(RemoteProtocolError, match=f"ps-0 sent clock {passed} for shards past clock 2"):
            await read(servers, clock=2)


async def test_a_clock_of_a_replica_that_none_can_have_reached_is_not_taken_into_a_checkpoint():
    async with servers_of(NETWORKS["local"](), waits=PATIENT) as servers:
        for shard in servers.shards().values():
            shard.clocks[0] = 1 << 40
        with pytest.raises(RemoteProtocolError, match=f"ps-0 sent clock {1 << 40} of a replica"):
            await read(servers)


@pytest.mark.parametrize("table", [0, 1], ids=["tables", "bounds"])
async def test_longer_tables_than_the_shards_have_are_refused_before_they_are_decoded(monkeypatch, table):
    def padded(shards, rule, read=answers.read_states):
        body, tensors = read(shards, rule)
        length = (STATE_BYTES * (len(shards) + 1), MOST_SETS_BOUNDS + 1)[table]
        tensors[table] = np.zeros(length, tensors[table].dtype)
        return body, tensors

    monkeypatch.setattr(answers, "read_states", padded)
    async with servers_of(NETWORKS["local"](), waits=PATIENT) as servers:
        with pytest.raises(RemoteProtocolError, match=r"have \d+ elements, \d+ are the most"):
            await read(servers)


# --- primaries that move ---------------------------------------------------------------------


class Frozen:
    """A server that takes links and questions, and answers nothing."""

    identity = Identity(role="ps", node="ps-9", incarnation=9)

    def __init__(self):
        self.asked = asyncio.Event()

    async def on_link(self, link):
        link.serve(lambda _: self.asked.set(), receives=False)
        await link.wait_closed()


def moved(cluster, *members, **nodes):
    """The map with these members of bundle ps-0 in sync, and further nodes."""
    key = bundle_key(next(iter(cluster.stores)), "ps-0")
    bundle = msgspec.structs.replace(cluster.bundles[key], in_sync=members)
    return msgspec.structs.replace(
        cluster, bundles={**cluster.bundles, key: bundle}, nodes={**cluster.nodes, **nodes}
    )


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_reading_goes_on_at_the_new_primary_while_the_old_one_is_silent(network):
    network, frozen = NETWORKS[network](), Frozen()
    listening = network.listen(address_of(network), frozen.identity, frozen.on_link)
    async with servers_of(network, waits=PATIENT, **SHARDED) as servers, listening as listener:
        node = NodeRecord(role="ps", address=listener.address, incarnation=9)

        async def changes():
            yield moved(servers.map, ("ps-9", 9), **{"ps-9": node})
            await frozen.asked.wait()
            yield servers.map
            await asyncio.Event().wait()

        found = await read(servers, changes=changes)
        for number, shard in servers.shards().items():
            np.testing.assert_array_equal(found[number].values, shard.values)


async def test_a_reading_waits_for_a_primary_and_goes_on():
    async with servers_of(NETWORKS["local"](), waits=PATIENT, **SHARDED) as servers:

        async def changes():
            yield moved(servers.map)
            await asyncio.sleep(0)
            yield servers.map
            await asyncio.Event().wait()

        assert list(await read(servers, changes=changes)) == list(servers.shards())


async def test_a_bundle_without_a_primary_is_named_when_patience_ends():
    waits = msgspec.structs.replace(PATIENT, patience_s=0.05)
    async with servers_of(NETWORKS["local"](), waits=PATIENT) as servers:

        async def changes():
            yield moved(servers.map)
            await asyncio.Event().wait()

        with pytest.raises(ShardUnavailable, match=r"waited 0.05 s for a primary of bundle ps-0"):
            await read(servers, waits=waits, changes=changes)


async def test_a_reading_of_a_failed_store_ends_at_the_first_failure_and_leaves_its_caller_uncancelled():
    async with servers_of(NETWORKS["local"](), waits=PATIENT) as servers:
        cluster = moved(servers.map)
        ((name, store),) = cluster.stores.items()
        failed = msgspec.structs.replace(store, phase="failed")

        async def changes():
            yield msgspec.structs.replace(cluster, stores={name: failed})
            await asyncio.Event().wait()

        with pytest.raises(ShardUnavailable, match="a primary of bundle ps-0"):
            await read(servers, changes=changes)
        assert asyncio.current_task().cancelling() == 0


def lacking_copies(cluster):
    """The map with a lost primary of bundle ps-0, which also lacks copies."""
    ((name, store),) = cluster.stores.items()
    gone = NodeRecord(role="ps", address="local://nobody", incarnation=9)
    stores = {name: msgspec.structs.replace(store, phase="open", copies=2, min_in_sync=2)}
    return msgspec.structs.replace(moved(cluster, ("ps-9", 9), **{"ps-9": gone}), stores=stores)


async def test_a_reading_waits_for_copies_beyond_patience():
    waits = msgspec.structs.replace(PATIENT, patience_s=0.02, dial_s=0.01)
    async with servers_of(NETWORKS["local"](), waits=PATIENT, **SHARDED) as servers:
        loop = asyncio.get_running_loop()
        begin = loop.time()

        async def changes():
            yield lacking_copies(servers.map)
            await until(lambda: loop.time() > begin + 10 * waits.patience_s)
            yield servers.map
            await asyncio.Event().wait()

        assert list(await read(servers, waits=waits, changes=changes)) == list(servers.shards())


async def test_a_reading_ends_when_copies_are_lacking_for_too_long():
    waits = msgspec.structs.replace(PATIENT, copies_s=0.02, dial_s=0.01)
    async with servers_of(NETWORKS["local"](), waits=PATIENT) as servers:

        async def changes():
            yield lacking_copies(servers.map)
            await asyncio.Event().wait()

        with pytest.raises(DialFailed, match="nobody"):
            await read(servers, waits=waits, changes=changes)
