"""Clients that wait for one another: the promises of ssp and bsp, with three clients on three servers."""

import asyncio
import random
from collections import defaultdict
from contextlib import AsyncExitStack

import msgspec
import numpy as np
import pytest

from adam_async.errors import DeadlineExceeded
from adam_async.model.rules import Adam, Sgd
from adam_async.run.config import Waits
from adam_async.store.store import ParameterStore
from tests.adam_async.exactness.serial import rule_step
from tests.adam_async.runs import until
from tests.adam_async.store.servers import store_servers

CLIENTS = 3
SIZE = 6 << 10
"""Values of the array: three shards of float64."""

SHARD_BYTES = 16 << 10
STEPS = 30
START = np.random.default_rng(2).normal(size=SIZE)


def open_store(address, consistency, *, start=None, rule=None, replicas=CLIENTS, waits=None):
    return ParameterStore.open(
        address,
        {"w": np.zeros(SIZE) if start is None else start},
        name="model",
        rule=rule or Sgd(rate=1.0),
        consistency=consistency,
        replicas=replicas,
        shard_bytes=SHARD_BYTES,
        waits=waits or Waits(),
    )


def marks_of(client):
    """A gradient that adds 1 to each third value of every shard, for a rate of 1."""
    marks = np.zeros(SIZE)
    marks[client::CLIENTS] = -1.0
    return {"w": marks}


def counts_of(values, client):
    """The numbers of pushes of a client that are in the values: the least and the largest of all shards."""
    found = values["w"][client::CLIENTS]
    return found.min(), found.max()


async def some_turns(dice):
    """Let others run for a while that differs from step to step."""
    for _ in range(dice.choice((0, 1, 5, 60))):
        await asyncio.sleep(0)


@pytest.mark.parametrize("slack", [0, 1, 3])
async def test_a_pull_of_ssp_has_all_pushes_that_are_older_than_the_slack(slack):
    ended = [0] * CLIENTS

    async def run(address, client):
        dice = random.Random(client)
        async with open_store(address, f"ssp:{slack}") as store:
            for step in range(STEPS):
                values = await store.pull()
                assert store.clock == step
                assert min(ended) >= step - slack, "no client is further ahead than the slack"
                for other in range(CLIENTS):
                    least, most = counts_of(values, other)
                    assert least >= step - slack
                    assert most <= ended[other] + 1
                assert counts_of(values, client) == (step, step), "a client reads its own pushes"
                await some_turns(dice)
                await store.push(marks_of(client), read=values)
                ended[client] += 1
                await store.tick()
            await store.settled()

    async with store_servers() as cluster, asyncio.TaskGroup() as group:
        for client in range(CLIENTS):
            group.create_task(run(cluster.address, client))
    assert ended == [STEPS] * CLIENTS


@pytest.mark.parametrize("consistency", ["ssp:2", "bsp"])
async def test_a_client_that_stops_holds_the_others_back_and_is_named(consistency):
    slack = 2 if consistency == "ssp:2" else 0
    waits = msgspec.structs.replace(Waits(), clock_s=0.4, answer_s=0.2)
    async with store_servers() as cluster, AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(open_store(cluster.address, consistency, waits=waits))
            for _ in range(CLIENTS)
        ]
        for client, store in enumerate(stores[:2]):
            for _ in range(slack):
                await store.push_pull(marks_of(client))
            with pytest.raises(
                DeadlineExceeded, match=r"waited 0.4 s for .*client 2 \(client-[0-9a-f]{14}\).* to end step 1"
            ):
                await store.push_pull(marks_of(client))
        await asyncio.gather(stores[2].push_pull(marks_of(2)), *[store.pull() for store in stores[:2]])
        values = await stores[0].pull()
        assert values.clock >= 1


def loss_gradient(values, targets):
    return np.tanh(values - targets)


TARGETS = np.random.default_rng(4).normal(size=(CLIENTS, SIZE))
WEIGHTS = (1, 5, 2)


async def lockstep(address, rule):
    """Run three clients in bsp, numbered in the order of their opening; return the values of each."""

    async def run(store, client):
        values = await store.pull()
        for step in range(STEPS):
            assert store.clock == step
            gradient = loss_gradient(values["w"], TARGETS[client])
            values = await store.push_pull({"w": gradient}, read=values, weight=WEIGHTS[client])
        return values["w"]

    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(open_store(address, "bsp", start=START, rule=rule))
            for _ in range(CLIENTS)
        ]
        found = await asyncio.gather(*[run(store, client) for client, store in enumerate(stores)])
        await stores[0].delete()
    return found


@pytest.mark.parametrize("rule", [Sgd(rate=0.1, momentum=0.9, nesterov=True), Adam(rate=0.01)], ids=repr)
async def test_bsp_is_the_serial_loop_of_mean_gradients(rule):
    values, memory = START.copy(), {}
    for t in range(1, STEPS + 1):
        parts = [w * loss_gradient(values, TARGETS[c]) for c, w in enumerate(WEIGHTS)]
        values = rule_step(rule, values, sum(parts) / sum(WEIGHTS), memory, t)
    async with store_servers() as cluster:
        runs = [await lockstep(cluster.address, rule) for _ in range(2)]
    for found in (*runs[0], *runs[1]):
        np.testing.assert_allclose(found, values, rtol=1e-12, atol=1e-12)
        assert found.tobytes() == runs[0][0].tobytes(), "the same bits for every client and in every run"


async def test_in_bsp_a_client_that_joins_late_or_leaves_counts_in_the_steps_between():
    contributions = defaultdict(list)

    async def run(store, steps, seed):
        values = await store.pull()
        dice = np.random.default_rng(seed)
        for _ in range(steps):
            gradient = dice.normal(size=SIZE)
            contributions[store.clock + 1].append(gradient)
            before = store.clock
            values = await store.push_pull({"w": gradient}, read=values)
            assert store.clock == before + 1
        return values

    async def visit(address, steps, seed):
        async with open_store(address, "bsp", replicas=2) as store:
            first = store.clock
            await run(store, steps, seed)
        return first

    async def leave(store, steps, seed):
        await run(store, steps, seed)
        await store.close()

    async with store_servers() as cluster, AsyncExitStack() as stack:
        stays = await stack.enter_async_context(open_store(cluster.address, "bsp", replicas=2))
        leaves = await stack.enter_async_context(open_store(cluster.address, "bsp", replicas=2))
        await asyncio.gather(run(stays, 5, 1), run(leaves, 5, 2))
        values, _, joined_at = await asyncio.gather(
            run(stays, 40, 3), leave(leaves, 20, 4), visit(cluster.address, 8, 5)
        )
    assert 5 <= joined_at <= 30
    expected = np.zeros(SIZE)
    for clock in sorted(contributions):
        expected -= np.mean(contributions[clock], axis=0)
    assert max(map(len, contributions.values())) == CLIENTS
    assert min(map(len, contributions.values())) == 1
    np.testing.assert_allclose(values["w"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("consistency", ["ssp:0", "bsp"])
async def test_a_client_that_joins_amid_a_step_of_another_waits_for_no_step_of_its_own(consistency):
    waits = Waits(clock_s=5.0)
    async with store_servers() as cluster, AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            open_store(cluster.address, consistency, replicas=1, waits=waits)
        )
        await first.push_pull(marks_of(0))
        link = first._calls
        begun, *others = link.layout.everything
        assert others
        link.connections[begun.server].tick(begun.shards, 2, 1)
        numbers = {int(shard) for shard in begun.shards}

        def reached():
            return {
                clock
                for state in cluster.states()
                for number, shard in state.shards.items()
                if int(number) in numbers
                for clock in shard.tables.clocks.values()
            }

        await until(lambda: reached() == {2})
        late = await stack.enter_async_context(
            open_store(cluster.address, consistency, replicas=1, waits=waits)
        )
        assert late.clock == 2
        for message in others:
            link.connections[message.server].tick(message.shards, 2, 1)
        values = await late.pull()
    assert counts_of(values, 0) == (1, 1)
