"""Servers end while clients push: each acknowledged push is applied exactly once, on all copies."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import numpy as np
import pytest

from adam_async.errors import ShardUnavailable
from adam_async.model.rules import Adagrad, Adam, AdamW, Sgd
from adam_async.parameter_server import members_watch
from adam_async.parameter_server.served_store import ServedStore
from adam_async.store.arrays import Factors
from tests.adam_async.runs import until
from tests.adam_async.store.fleets import WAITS, fleet

pytestmark = pytest.mark.slow

CLIENTS = 3
NODES = ("ps-0", "ps-1", "ps-2")
ARRAYS = {"total": np.zeros(192), "matrix": np.zeros((3, 8)), "small": np.zeros(())}
PUSHES = 240
"""Pushes of all clients together."""


def dense(client):
    """Gradients that add 1 to all values."""
    return {name: -np.ones_like(array) for name, array in ARRAYS.items()}


def factors(client):
    return {**dense(client), "matrix": Factors(np.ones((2, 8)), np.full((2, 3), -0.5))}


@pytest.fixture(autouse=True)
def _invites_at_once(monkeypatch):
    monkeypatch.setattr(members_watch, "INVITE_S", 0.3)


async def open_stores(stack, servers, **options):
    options = {"rule": Sgd(rate=1.0), "shard_bytes": 512, **options}
    return [await stack.enter_async_context(servers.open(ARRAYS, **options)) for _ in range(CLIENTS)]


def check_copies(servers):
    """All copies that have applied the same entries have the same bits and numbers."""
    by_home = {}
    for (home, _), served in servers.copies().items():
        bundle = served.state.bundle
        if not bundle.idle:
            continue
        first = by_home.setdefault((home, served.copy._core.log.applied), bundle)
        for number, shard in first.shards.items():
            twin = bundle.shards[number]
            assert twin.values.tobytes() == shard.values.tobytes(), (home, number)
            assert (twin.version, twin.last_number) == (shard.version, shard.last_number)
    assert len(by_home) < len(servers.copies()), "some copies were compared"


async def push_all(servers, stores, push, *, losses, pushes=PUSHES):
    """Let the clients push; before a given number of acknowledgements another server ends."""
    acknowledged, slowest = 0, 0.0
    losses = dict(losses)
    loop = asyncio.get_running_loop()

    async def run(client, store):
        nonlocal acknowledged, slowest
        for _ in range(pushes // CLIENTS):
            begin = loop.time()
            await push(store, client)
            slowest = max(slowest, loop.time() - begin)
            acknowledged += 1
            for at in [at for at in losses if at <= acknowledged]:
                await servers.end(losses.pop(at))

    async with asyncio.TaskGroup() as group:
        for client, store in enumerate(stores):
            group.create_task(run(client, store))
    for store in stores:
        await store.settled()
    assert not losses
    return slowest


@pytest.mark.parametrize("gradients", [dense, factors])
@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("network", ["tcp", "local"])
async def test_no_push_is_lost_or_repeated_when_a_primary_ends_amid_pushes(
    monkeypatch, network, copies, gradients
):
    async with fleet(monkeypatch, *NODES, network=network) as servers, AsyncExitStack() as stack:
        stores = await open_stores(stack, servers, copies=copies)

        async def push(store, client):
            outcome = await store.push(gradients(client))
            assert outcome.refused == ()

        slowest = await push_all(servers, stores, push, losses={PUSHES // 3: "ps-1"})
        values = await stores[0].pull()
        for array in values.values():
            np.testing.assert_array_equal(array, np.full(array.shape, float(PUSHES)))
        assert slowest < WAITS.patience_s / 3
        assert servers.primaries("ps-1")
        versions = [
            shard.version
            for (home, node), served in servers.copies().items()
            if served.is_primary
            for shard in served.state.shards.values()
        ]
        assert versions == [PUSHES] * len(versions)
        check_copies(servers)


@pytest.mark.parametrize("network", ["tcp", "local"])
async def test_a_store_opens_for_all_though_it_loses_a_server_amid_the_load(monkeypatch, network):
    load, loading = ServedStore._load, asyncio.Event()

    def answers_not(served, request, body):
        if served._host.node == "ps-1":
            loading.set()
        else:
            load(served, request, body)

    monkeypatch.setattr(ServedStore, "_load", answers_not)
    async with fleet(monkeypatch, *NODES, network=network) as servers, AsyncExitStack() as stack:
        options = {"rule": Sgd(rate=1.0), "shard_bytes": 512, "copies": 2}
        creating = asyncio.create_task(stack.enter_async_context(servers.open(ARRAYS, **options)))
        await loading.wait()
        waiting = asyncio.create_task(stack.enter_async_context(servers.open(ARRAYS, **options)))
        await until(lambda: sum(node.role == "client" for node in servers.leader.map.nodes.values()) == 2)
        await servers.end("ps-1")
        first, second = await asyncio.gather(creating, waiting)
        await first.push(dense(0))
        await second.push(dense(0))
        for array in (await first.pull()).values():
            np.testing.assert_array_equal(array, np.full(array.shape, 2.0))


async def test_readings_amid_a_failover_have_all_acknowledged_pushes_and_no_other(monkeypatch):
    async with fleet(monkeypatch, *NODES) as servers, AsyncExitStack() as stack:
        stores = await open_stores(stack, servers, copies=3)
        called = acknowledged = 0

        async def push(store, client):
            nonlocal called, acknowledged
            called += 1
            await store.push(dense(client))
            acknowledged += 1

        async def read():
            async with servers.open(None, reader=True) as reader:
                while True:
                    least = acknowledged
                    for array in (await reader.pull()).values():
                        assert least <= array.min()
                        assert array.max() <= called

        async def leave():
            """A client that ends amid its pushes: each of them is applied once or not at all."""
            nonlocal called
            async with servers.open(ARRAYS, shard_bytes=512, copies=3, rule=Sgd(rate=1.0)) as store:
                for _ in range(5):
                    called += 1
                    pushing = asyncio.create_task(store.push(dense(0)))
                await asyncio.sleep(0)
            await asyncio.wait([pushing])

        reading = asyncio.create_task(read())
        leaving = asyncio.create_task(leave())
        await push_all(servers, stores, push, losses={PUSHES // 3: "ps-1"})
        await leaving
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        for array in (await stores[0].pull()).values():
            assert PUSHES <= array.min() <= array.max() <= PUSHES + 5
        check_copies(servers)


@pytest.mark.parametrize("consistency", ["ssp:1", "bsp"])
@pytest.mark.parametrize("network", ["tcp", "local"])
async def test_clients_that_wait_for_one_another_lose_no_step_when_a_primary_ends(
    monkeypatch, network, consistency
):
    async with fleet(monkeypatch, *NODES, network=network) as servers, AsyncExitStack() as stack:
        stores = await open_stores(stack, servers, copies=3, consistency=consistency, replicas=CLIENTS)

        async def push(store, client):
            await store.push_pull(dense(client))

        await push_all(servers, stores, push, losses={PUSHES // 3: "ps-0"})
        values = await stores[0].pull()
        expected = PUSHES if consistency == "ssp:1" else PUSHES // CLIENTS
        for array in values.values():
            np.testing.assert_array_equal(array, np.full(array.shape, float(expected)))


@pytest.mark.parametrize(
    "rule", [Sgd(rate=0.1, momentum=0.9), Adagrad(rate=0.05), Adam(rate=0.01), AdamW(rate=0.01)], ids=repr
)
async def test_bsp_across_a_failover_has_the_bits_of_a_run_without_one(monkeypatch, rule):
    targets = np.random.default_rng(4).normal(size=(CLIENTS, 192))

    async def run(loses):
        async with fleet(monkeypatch, *NODES) as servers, AsyncExitStack() as stack:
            stores = await open_stores(
                stack, servers, copies=3, consistency="bsp", replicas=CLIENTS, rule=rule, shard_bytes=512
            )
            values = {}

            async def step(store, client):
                if client not in values:
                    values[client] = await store.pull()
                gradient = {"total": np.tanh(values[client]["total"] - targets[client])}
                values[client] = await store.push_pull(gradient, read=values[client])

            await push_all(servers, stores, step, losses=loses, pushes=90)
            last = await stores[0].pull()
            return {name: array.tobytes() for name, array in last.items()}

    assert await run({}) == await run({30: "ps-2"})


@pytest.mark.parametrize("network", ["tcp", "local"])
async def test_a_server_that_joins_under_load_replaces_the_others_one_after_the_other(monkeypatch, network):
    async with fleet(monkeypatch, *NODES, network=network) as servers, AsyncExitStack() as stack:
        stores = await open_stores(stack, servers, copies=3)
        pushed, stops = 0, False

        async def run(client, store):
            nonlocal pushed
            while not stops:
                await store.push(factors(client))
                pushed += 1

        async with asyncio.TaskGroup() as group:
            for client, store in enumerate(stores):
                group.create_task(run(client, store))
            for node in NODES:
                await servers.end(node)
                await servers.start(f"{node}-again")
                again = f"{node}-again"
                await servers.until(
                    lambda again=again: all(
                        again in servers.in_sync(home) and len(servers.in_sync(home)) == 3 for home in NODES
                    ),
                    f"{again} is not in sync",
                )
            stops = True
        values = await stores[0].pull()
        for array in values.values():
            np.testing.assert_array_equal(array, np.full(array.shape, float(pushed)))
        assert pushed > 3 * CLIENTS


async def test_a_store_with_one_copy_left_waits_by_name_until_a_server_is_back(monkeypatch):
    waits = msgspec.structs.replace(WAITS, patience_s=4.0, answer_s=0.5)
    async with fleet(monkeypatch, "ps-0", "ps-1", waits=waits) as servers:
        async with servers.open(ARRAYS, copies=2, rule=Sgd(rate=1.0)) as store:
            await store.push(dense(0))
            await servers.end("ps-1")
            with pytest.raises(ShardUnavailable, match=r"1 in sync, 2 needed \(min_in_sync\)"):
                await store.push(dense(0))
        async with servers.open(ARRAYS, copies=2, rule=Sgd(rate=1.0)) as store:
            pushing = asyncio.create_task(store.push(dense(0)))
            await servers.start("ps-2")
            await pushing
            values = await store.pull()
            assert values["total"].min() == values["total"].max() in (2.0, 3.0)
