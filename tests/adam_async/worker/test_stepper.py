"""Training within a bound of other replicas: limits of gradients, waits, sync clocks."""

import asyncio
import threading
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from adam_async.errors import DeadlineExceeded
from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits
from adam_async.run.config import Config
from adam_async.worker.copy_mode import CopyMode
from tests.adam_async.exactness.test_staleness_counts import HandReplica
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, cluster_of, servers_of, until, with_frozen

pytestmark = pytest.mark.thorough

WAITS = msgspec.structs.replace(PATIENT, clock_s=20.0)
BSP = {
    "consistency": "bsp",
    "replicas": 2,
    "threads": 2,
    "images_per_group": 4,
    "epochs": 2,
    "rate": 0.1,
    "waits": WAITS,
}


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "aliased"},
        {"weights": "copy", "pull_every": 2},
        {"consistency": "ssp:0"},
        {"consistency": "bsp"},
        {"consistency": "bsp", "lag": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("frozen", ["conv2d", "dense"])
async def test_frozen_layers_stay_unchanged_and_delay_no_replica(frozen, options):
    spec = with_frozen(digits(), frozen)
    config = Config(**{**BSP, "consistency": "asp", **options}, **SHARDED)
    async with cluster_of(config, spec=spec) as cluster:
        result = await cluster.train()
        shards = [shard for server in cluster.servers for shard in server.state.shards.values()]
    model = result.model
    initial = model.initial_weights(Dice(config.seed))
    assert model.frozen
    for name, values in result.weights.items():
        assert np.array_equal(values, initial[name]) == (name in model.frozen)
    still = [shard for shard in shards if shard.spec.tensor in model.frozen]
    assert {int(shard.version) for shard in still} == {0}
    if config.slack is not None:
        clocks = {shard.applied_clock() for shard in shards}
        assert clocks == {cluster.workers[0].statistics().clock}


class Brake:
    """Holds up the compute threads of one worker until it is released."""

    def __init__(self, trainer):
        self._train, self._released = trainer.train, threading.Event()

    def train(self, firing, admitted):
        self._released.wait(10.0)
        return self._train(firing, admitted)

    def release(self):
        self._released.set()


@asynccontextmanager
async def braked(monkeypatch, **options):
    """A cluster in training whose replica 1 is blocked."""
    brakes = []
    new_graph = CopyMode.graph

    def graph(self):
        if self.gate._replica == 1:
            brake = Brake(self._trainer)
            brakes.append(brake)
            monkeypatch.setattr(self._trainer, "train", brake.train)
        return new_graph(self)

    monkeypatch.setattr(CopyMode, "graph", graph)
    config = Config(**{**BSP, "threads": 1, **options})
    async with cluster_of(config) as cluster:
        try:
            yield cluster, lambda: [brake.release() for brake in brakes]
        finally:
            for brake in brakes:
                brake.release()


def waiting(cluster):
    found = {worker.statistics().waiting_for for worker in cluster.workers}
    return found - {UNSET}


@pytest.mark.parametrize(
    ("options", "clock"),
    [({"consistency": "bsp"}, 1), ({"consistency": "bsp", "lag": 1}, 1), ({"consistency": "ssp:3"}, 4)],
    ids=str,
)
async def test_a_wait_names_the_replicas_behind_and_the_run_goes_on(options, clock, monkeypatch):
    waits = msgspec.structs.replace(WAITS, answer_s=0.1)
    async with braked(monkeypatch, **options, waits=waits) as (cluster, release):
        training = asyncio.create_task(cluster.train(), name="training")
        await until(lambda: "replica 1 at clock 0" in waiting(cluster))
        counts = cluster.workers[0].statistics()
        assert (counts.clock, counts.clock_waits) == (clock, 1)
        release()
        result = await training
        assert [epoch.images for epoch in result.epochs] == [60, 60]
        assert sum(worker.statistics().clock_wait_s for worker in cluster.workers) > 0
        assert waiting(cluster) == {""}


async def test_a_replica_that_never_advances_is_named_when_patience_ends(monkeypatch):
    waits = msgspec.structs.replace(WAITS, answer_s=0.1, clock_s=0.5)
    claim = "waited 0.5 s for replica 1 at clock 0: step 1 needs the values of clock 1"
    with pytest.raises(DeadlineExceeded, match=claim):
        async with braked(monkeypatch, waits=waits) as (cluster, _):
            await cluster.train()


@pytest.mark.parametrize("pull_every", [1, 3])
@pytest.mark.parametrize("push_every", [1, 2])
async def test_bounded_training_ends_with_all_clocks_at_the_sync_clock(push_every, pull_every):
    config = Config(
        push_every=push_every,
        pull_every=pull_every,
        **{**BSP, "consistency": "ssp:1", "replicas": 3, "in_flight": 5},
        **SHARDED,
    )
    async with cluster_of(config) as cluster:
        result = await cluster.train()
        shards = [shard for server in cluster.servers for shard in server.state.shards.values()]
        clocks = {clock for shard in shards for clock in shard.clocks.values()}
    assert clocks == {2 * -(-15 // (3 * push_every))}
    assert [epoch.images for epoch in result.epochs] == [60, 60]


@pytest.mark.parametrize(("when", "left"), [("before", 2), ("after", 0)])
async def test_messages_of_a_section_leave_once_before_their_group_is_trained_and_never_after(when, left):
    async with servers_of(NETWORKS["local"](), rate=0.01, **SHARDED) as servers:
        replica = HandReplica(servers, 0, push_every=1, pull_every=1)
        await replica.first_pull()
        stepper, add = replica.stepper, replica.stepper.add

        def added(firing, trained):
            if when == "before":
                stepper.ahead((1,), firing, trained)
            add(firing, trained)
            stepper.ahead((0,), firing, trained)

        stepper.add = added
        await replica.train(groups=2)
        assert stepper._pusher.left_ahead == left
        assert {shard.version for shard in servers.shards().values()} == {2}
        assert [(done.number, done.clock) for done in replica.finished] == [(1, 1), (2, 2)]


async def test_in_asp_a_complete_step_does_not_wait_for_one_that_began_earlier():
    async with servers_of(NETWORKS["local"](), rate=0.01, **SHARDED) as servers:
        replica = HandReplica(servers, 0, push_every=1, pull_every=1)
        await replica.first_pull()
        stepper, add, late = replica.stepper, replica.stepper.add, []

        def added(firing, trained):
            stepper.ahead((1,), firing, trained)
            late.append(partial(add, firing, trained))
            if len(late) == 1:
                firing.tag.set()  # the test does not wait for the first group
            else:
                late.pop()()

        stepper.add = added
        await replica.train(groups=2)
        assert [(done.number, done.clock) for done in replica.finished] == [(2, 2)]
        late.pop()()
        await replica.client.flush()
        assert [(done.number, done.clock) for done in replica.finished] == [(2, 2), (1, 1)]
        assert {shard.version for shard in servers.shards().values()} == {2}


async def test_a_returned_group_is_a_step_of_its_own():
    async with servers_of(NETWORKS["local"](), rate=0.01, **SHARDED) as servers:
        replica = HandReplica(servers, 0, push_every=3, pull_every=1)
        await replica.first_pull()
        await replica.train(groups=2)
        assert replica.finished == []
        await replica.train(attempt=2)
        assert [(done.number, done.clock) for done in replica.finished] == [(1, 1), (2, 1), (3, 2)]
        await replica.train(attempt=3)
        await replica.train(groups=3)
        done = [(done.number, done.clock) for done in replica.finished[3:]]
        assert done == [(4, 3), (5, 4), (6, 4), (7, 4)]
        assert {shard.version for shard in servers.shards().values()} == {4}
        assert {(*shard.tables.groups[1],) for shard in servers.shards().values()} == {(1, 8)}
