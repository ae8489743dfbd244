"""Each push of a store is applied exactly once, whichever links fail and whichever callers give up."""

import asyncio
import random
from contextlib import AsyncExitStack, suppress

import msgspec
import numpy as np
import pytest

from adam_async.errors import StoreError
from adam_async.model.rules import Sgd
from adam_async.run.config import Waits
from adam_async.store.arrays import Factors
from adam_async.store.store import ParameterStore
from tests.adam_async.store.servers import faulty_clients, store_servers
from tests.transport.testing import Faults

CLIENTS = 8
WINDOW = 12
"""Pushes of a client that are open at once; more than a server may owe answers to."""

WAITS = msgspec.structs.replace(Waits(), answer_s=0.2, call_s=2.0)
FAULTS = Faults(drop=0.001, delay=0.002, cut=0.001, drop_reply=0.001, delay_s=0.005)
ARRAYS = {"total": np.zeros(192), "matrix": np.zeros((3, 8))}
SHARD_BYTES = 512


class Oracle:
    """The sums of the numbers that pushes added, which float64 holds exactly."""

    def __init__(self):
        self.called = self.acknowledged = self.pushes = self.cancelled = 0
        self.slowest_s = 0.0


async def push(store, oracle, number, *, cancels_after):
    """Add a number to all values; `cancels_after` turns of the loop the caller gives up, if not None."""
    gradients = {
        "total": np.full(192, -float(number)),
        "matrix": Factors(np.ones((2, 8)), np.full((2, 3), -number / 2)),
    }
    loop = asyncio.get_running_loop()
    begin = loop.time()
    oracle.called += number
    oracle.pushes += 1
    pushing = asyncio.create_task(store.push(gradients))
    if cancels_after is not None:
        for _ in range(cancels_after):
            await asyncio.sleep(0)
        pushing.cancel()
        with suppress(asyncio.CancelledError):
            await pushing
        oracle.cancelled += pushing.cancelled()
    if not pushing.cancelled():
        outcome = await pushing
        assert outcome.refused == ()
        oracle.acknowledged += number
        oracle.slowest_s = max(oracle.slowest_s, loop.time() - begin)


async def check_pull(store, oracle):
    """Compare a pull in between: all that was acknowledged is there, and nothing that was not called."""
    least = oracle.acknowledged
    values = await store.pull()
    for array in values.values():
        assert least <= array.min()
        assert array.max() <= oracle.called


async def work(store, oracle, pushes, seed):
    dice, left = random.Random(seed), pushes
    async with asyncio.TaskGroup() as group:
        open_ = set()
        while left:
            if len(open_) >= WINDOW:
                _, open_ = await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
            cancels_after = dice.choice((1, 2, 5, 50)) if dice.random() < 0.05 else None
            open_.add(group.create_task(push(store, oracle, dice.randint(1, 9), cancels_after=cancels_after)))
            left -= 1
            if not left % 50:
                await check_pull(store, oracle)
    await store.settled()


@pytest.mark.parametrize(
    "pushes",
    [480, pytest.param(3_000, marks=pytest.mark.thorough), pytest.param(10_000, marks=pytest.mark.slow)],
)
async def test_pushes_over_links_that_fail_are_applied_exactly_once(monkeypatch, pushes):
    networks = faulty_clients(monkeypatch)
    oracle = Oracle()
    async with store_servers(waits=WAITS) as cluster, AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(
                ParameterStore.open(
                    cluster.address,
                    ARRAYS,
                    name="model",
                    rule=Sgd(rate=1.0),
                    shard_bytes=SHARD_BYTES,
                    waits=WAITS,
                )
            )
            for _ in range(CLIENTS)
        ]
        for network in networks:
            network.faults = FAULTS
        async with asyncio.TaskGroup() as group:
            for client, store in enumerate(stores):
                group.create_task(work(store, oracle, pushes // CLIENTS, client))
        assert oracle.pushes == pushes
        for network in networks:
            network.faults = Faults()
        values = await stores[0].pull()
        for array in values.values():
            np.testing.assert_array_equal(array, np.full(array.shape, float(oracle.called)))
        shards = [shard for state in cluster.states() for shard in state.shards.values()]
        assert [shard.version for shard in shards] == [pushes] * len(shards)
        assert {len(state.shards) > 0 for state in cluster.states()} == {True}
        assert oracle.slowest_s < WAITS.patience_s
        assert oracle.cancelled > 0 < sum([shard.tables.duplicates for shard in shards])
        assert sum([len(network.links) for network in networks]) > 4 * CLIENTS, "links were dialled again"


async def test_pushes_that_are_cancelled_before_their_turn_are_sent_in_the_order_of_the_calls():
    async with ParameterStore.open("local", {"w": np.zeros(4)}, rule=Sgd(rate=1.0)) as store:
        calls = [asyncio.create_task(store.push({"w": np.full(4, -1.0)})) for _ in range(3 * WINDOW)]
        calls.append(asyncio.create_task(store.assign({"w": np.full(4, 100.0)})))
        calls += [asyncio.create_task(store.push_pull({"w": np.full(4, -1.0)})) for _ in range(WINDOW)]
        pulling = asyncio.create_task(store.pull())
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        values = await pulling
        np.testing.assert_array_equal(values["w"], np.full(4, 100.0 + WINDOW))
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        await store.settled()
        outcome = await store.push({"w": np.zeros(4)})
        assert outcome.versions == {"w": 4 * WINDOW + 2}


async def test_a_closed_store_ends_the_pushes_that_wait_for_their_turn():
    async with store_servers(1) as cluster:
        store = await ParameterStore.open(
            cluster.address, {"w": np.zeros(4)}, name="model", rule=Sgd(rate=1.0)
        )
        calls = [asyncio.create_task(store.push({"w": np.ones(4)})) for _ in range(3 * WINDOW)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*calls)
        with pytest.raises(StoreError, match="is closed: open it again"):
            await store.push({"w": np.ones(4)})
