"""Every push takes effect exactly once, whatever the links do. The workload counts: each push adds one."""

import asyncio

import numpy as np
import pytest

from tests.adam_async.runs import IMPATIENT, NETWORKS, PATIENT, SHARDED, Rough, servers_of, until
from tests.transport.testing import Faults

PUSHES = 30

LOST_ANSWERS = Faults(drop_reply=0.3)
EVERYTHING = Faults(drop=0.03, delay=0.1, cut=0.03, drop_reply=0.1, delay_s=0.002)
CUTS = Faults(cut=0.04)


class Strikes:
    """Random numbers that give the fault to the next `count` messages only."""

    def __init__(self, count):
        self.left = count

    def random(self):
        self.left -= 1
        return 0.0 if self.left >= 0 else 0.99


async def push_many(client, count):
    """Push `count` steps of ones, as fast as admission lets."""
    for _ in range(count):
        await client.client.admit()
        client.push(-1.0)
    await client.client.flush()


def check_counted(servers, before, pushes, replicas):
    for number, shard in servers.shards().items():
        shard.check_invariants()
        assert shard.version == pushes
        assert shard.staleness.total() == pushes
        assert shard.tables.refused == 0
        assert sorted(shard.last_number.values()) == [pushes // replicas] * replicas
        np.testing.assert_allclose(shard.values, before[number] + pushes, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "faults", [LOST_ANSWERS, EVERYTHING, CUTS], ids=["lost-answers", "everything", "cuts"]
)
@pytest.mark.parametrize("network", NETWORKS)
async def test_every_push_is_applied_exactly_once_over_links_that_fail(network, faults):
    rough = Rough(NETWORKS[network](), faults)
    async with servers_of(rough, dtype="float64", waits=IMPATIENT, **SHARDED) as servers:
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        clients = [servers.client(0), servers.client(1)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(push_many(client, PUSHES))
        check_counted(servers, before, 2 * PUSHES, 2)
        told = [client.client.statistics() for client in clients]
        shards = len(servers.shards())
        assert sum(one.acknowledged for one in told) == 2 * PUSHES * shards
        assert min(one.resent for one in told) > 0
        assert min(one.reconnects for one in told) > 0
        # A delayed sending may still hold its tensors when the last answer is in.
        await until(lambda: all(client.freed == PUSHES * len(client.plan.messages) for client in clients))


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_retried_push_is_applied_once_and_answered_as_a_duplicate(network):
    rough = Rough(NETWORKS[network](), Faults())
    async with servers_of(rough, dtype="float64", waits=PATIENT) as servers:
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        client = servers.client()
        await push_many(client, 1)
        rough.dice = Strikes(len(client.plan.messages))
        rough.faults = Faults(drop_reply=0.5)
        client.push(-1.0)
        await until(lambda: all(shard.version == 2 for shard in servers.shards().values()))
        rough.cut_all()  # with the answer on its way
        await client.client.flush()
        check_counted(servers, before, 2, 1)
        told = client.client.statistics()
        assert told.duplicates == len(servers.shards())


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_pull_after_a_push_contains_it_even_on_a_new_link(network):
    rough = Rough(NETWORKS[network](), Faults())
    async with servers_of(rough, dtype="float64", waits=PATIENT, **SHARDED) as servers:
        client = servers.client()
        before = {name: values.copy() for name, values in (await client.pull()).items()}
        client.push(-1.0)
        rough.cut_all()
        after = await client.pull()
        for name, values in before.items():
            np.testing.assert_allclose(after[name], values + 1.0, rtol=0, atol=1e-9)
        assert client.client.statistics().reconnects == 3


async def test_admission_waits_while_a_server_owes_eight_answers_and_is_counted():
    rough = Rough(NETWORKS["local"](), Faults(drop=1.0))
    async with servers_of(rough, dtype="float64", waits=IMPATIENT) as servers:
        client = servers.client()
        pushed = 0
        while client.client.may_push:
            client.push(-1.0)
            pushed += 1
        messages = len(client.plan.messages)
        assert pushed * messages >= 8
        waiting = asyncio.create_task(client.client.admit(), name="admission")
        await asyncio.sleep(0)
        assert not waiting.done()
        rough.faults = Faults()
        await waiting
        assert client.client.statistics().admission_waits == 1
        await client.client.flush()
        assert {shard.version for shard in servers.shards().values()} == {pushed}
