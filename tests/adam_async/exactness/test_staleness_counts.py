"""Two replicas, driven by hand in a fixed order, give exactly the staleness written here."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from adam_async.data_server.client import ImageGroup
from adam_async.messages import Lease
from adam_async.worker.puller import Puller, WorkerWeights
from adam_async.worker.push_plan import plan_pushes
from adam_async.worker.pusher import Pusher
from adam_async.worker.stepper import ReplicaClock, Stepper
from adam_async.worker.training import GroupTrainer, ThreadScratch
from tests.adam_async.runs import NETWORKS, SHARDED, servers_of, tiny_dataset
from transport import BufferPool

GROUP = 4


def histogram_of(servers):
    """The histogram that every shard has; they must not differ."""
    shards = list(servers.shards().values())
    for shard in shards:
        shard.check_invariants()
        assert shard.staleness == shards[0].staleness
    return dict(sorted(shards[0].staleness.items()))


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_staleness_is_what_was_applied_since_the_version_read_less_what_was_in_the_copy(
    network, sharding
):
    async with servers_of(NETWORKS[network](), **sharding) as servers:
        one, other = servers.client(0), servers.client(1)
        for client, read, own_applied in (
            (one, 0, 0),  # at version 0: 0
            (other, 0, 0),  # at version 1: 1
            (one, 1, 0),  # at version 2: 1
            (one, 1, 1),  # at version 3, with one of its own in the copy: 1
            (other, 2, 0),  # at version 4: 2
            (one, 0, 2),  # at version 5: 3
            (other, 6, 0),  # at version 6: 0
            (other, 7, 3),  # more of its own than is new counts as none: 0
        ):
            client.push(0.5, read=read, own_applied=own_applied)
            await client.client.flush()
        assert histogram_of(servers) == {0: 3, 1: 3, 2: 1, 3: 1}
        assert {shard.version for shard in servers.shards().values()} == {8}
        assert {tuple(shard.clocks.values()) for shard in servers.shards().values()} == {(4, 4)}


class HandReplica:
    """A worker without its engine: the test trains each group."""

    def __init__(self, servers, replica, *, push_every, pull_every):
        self.client = servers.client(replica, is_live=True).client
        model, table, buckets = servers.model, servers.table, servers.map.buckets
        self.weights = WorkerWeights()
        self.puller = Puller(
            network=model,
            table=table,
            buckets=buckets,
            client=self.client,
            weights=self.weights,
            buffers=BufferPool(),
        )
        plan = plan_pushes(model, table, buckets, images=GROUP * push_every)
        config = msgspec.structs.replace(
            servers.config, images_per_group=GROUP, push_every=push_every, pull_every=pull_every
        )
        self.trainer = GroupTrainer(model, config, weights=self.weights, plan=plan, buffers=2)
        self.finished = []
        pusher = Pusher(
            config,
            plan=plan,
            client=self.client,
            puller=self.puller,
            trainer=self.trainer,
            on_finished=self.finished.append,
        )
        clock = ReplicaClock(push_every=push_every, pull_every=pull_every)
        self.stepper = Stepper(clock, pusher, landed=lambda landed: landed.set())
        self._dataset = tiny_dataset()
        self._firing = SimpleNamespace(scratch=ThreadScratch(model, model.context(GROUP)))
        self._number = 0
        self._first = 1000 * replica
        """First of its groups: each group counts once."""

    async def first_pull(self):
        landed = asyncio.Event()
        self.puller.pull(landed.set)
        await self.client.flush()
        assert landed.is_set()

    async def train(self, groups=1, attempt=1):
        """Train groups, and wait until everything that follows from them has happened."""
        for _ in range(groups):
            chosen = slice(self._number * GROUP, (self._number + 1) * GROUP)
            self._number += 1
            lease = Lease(1, self._first + self._number, attempt, GROUP)
            images, labels = self._dataset.train_images[chosen], self._dataset.train_labels[chosen]
            trained = self.trainer.train(self._firing, ImageGroup(lease, images, labels))
            landed = asyncio.Event()
            self.stepper.add(SimpleNamespace(tag=landed), trained)
            await self.client.flush()
            assert landed.is_set()


async def two_replicas(servers, **cadence):
    replicas = [HandReplica(servers, number, **cadence) for number in (0, 1)]
    for replica in replicas:
        await replica.first_pull()
    return replicas


@pytest.mark.parametrize("network", NETWORKS)
async def test_with_a_pull_at_every_step_two_that_alternate_are_one_apart(network):
    async with servers_of(NETWORKS[network](), rate=0.01, **SHARDED) as servers:
        one, other = await two_replicas(servers, push_every=1, pull_every=1)
        for _ in range(4):
            await one.train()
            await other.train()
        # The first finds nothing before it; each later one finds the other's last step, pulled too early.
        assert histogram_of(servers) == {0: 1, 1: 7}
        assert [done.number for done in one.finished] == [1, 2, 3, 4]


@pytest.mark.parametrize("network", NETWORKS)
async def test_own_local_steps_do_not_count_as_stale(network):
    async with servers_of(NETWORKS[network](), rate=0.01, **SHARDED) as servers:
        one, other = await two_replicas(servers, push_every=1, pull_every=3)
        for _ in range(4):
            await one.train()
            await other.train()
        # one:   0, 2-1, 4-2 (then it pulls version 5), 6-5
        # other: 1, 3-1, 5-2 (then it pulls version 6), 7-6
        assert histogram_of(servers) == {0: 1, 1: 4, 2: 2, 3: 1}


async def test_a_step_of_two_groups_is_one_own_push_in_the_copy():
    async with servers_of(NETWORKS["local"](), rate=0.01) as servers:
        one, other = await two_replicas(servers, push_every=2, pull_every=2)
        for _ in range(2):
            await one.train(groups=2)
            await other.train(groups=2)
        # one: 0, 2-1; other: 1, 3-1
        assert histogram_of(servers) == {0: 1, 1: 2, 2: 1}


async def test_a_local_step_is_in_the_copy_at_once_and_the_server_agrees_with_it():
    async with servers_of(NETWORKS["local"](), rate=0.01, dtype="float64") as servers:
        replica = HandReplica(servers, 0, push_every=1, pull_every=4)
        await replica.first_pull()
        before = replica.weights.snapshot().arrays
        start = {name: values.copy() for name, values in before.items()}
        for _ in range(3):
            await replica.train()
        mine = {name: values.copy() for name, values in replica.weights.snapshot().arrays.items()}
        assert any(np.abs(mine[name] - start[name]).max() > 0 for name in start)
        await replica.first_pull()
        for name, values in replica.weights.snapshot().arrays.items():
            np.testing.assert_allclose(values, mine[name], rtol=1e-12, atol=1e-12)


async def test_a_short_step_is_pushed_when_there_are_no_more_groups():
    async with servers_of(NETWORKS["local"](), rate=0.01) as servers:
        replica = HandReplica(servers, 0, push_every=3, pull_every=1)
        await replica.first_pull()
        await replica.train(groups=4)
        assert {shard.version for shard in servers.shards().values()} == {1}
        assert len(replica.finished) == 3
        replica.stepper.close()
        await replica.client.flush()
        assert {shard.version for shard in servers.shards().values()} == {2}
        assert [done.number for done in replica.finished] == [1, 2, 3, 4]
        replica.stepper.close()
        assert replica.stepper.sent == 2
