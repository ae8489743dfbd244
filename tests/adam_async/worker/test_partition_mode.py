"""Workers that train a cut model together begin and end as one replica; none gets far ahead of the others."""

import asyncio
import threading

import msgspec
import pytest

from adam_async.controller.role import Role
from adam_async.driver import preparation
from adam_async.model.named import digits
from adam_async.worker.partition_trainer import PartitionTrainer
from adam_async.worker.run_session import LEAD
from adam_async.worker.service import ModelWorker
from tests.adam_async.cluster.test_elastic import FixedDice, in_the_middle, joiner, trained
from tests.adam_async.cluster.test_local import QUICK, config_of
from tests.adam_async.runs import NETWORKS, cluster_of, tiny_dataset, turns, until, with_frozen
from tests.transport.testing import Faults, FaultyNetwork

pytestmark = pytest.mark.thorough

IMAGES = 120
ALONE = msgspec.structs.replace(QUICK, replica_s=30.0)
"""Waits for a single replica, which no other one replaces while it lacks a worker."""
MODES = {"asp": {}, "ssp": {"consistency": "ssp:1"}, "bsp": {"consistency": "bsp", "push_every": 2}}


def cut(network="local", **options):
    """Two replicas of two workers each, over links so slow that one can die in the middle of an epoch."""
    plain = {"partitions": 2, "replicas": 2, "images_per_group": 2, "weights": "copy", "waits": QUICK}
    slow = FaultyNetwork(NETWORKS[network](), FixedDice(), Faults(delay=1.0, delay_s=0.001))
    config = config_of(**{**plain, **options})
    return cluster_of(config, slow, dataset=tiny_dataset(train=IMAGES))


def replica_of(cluster, node):
    return cluster.controller.map.nodes[node].replica


def replica_generations_of(cluster):
    return cluster.controller.map.replica_generations()


@pytest.mark.parametrize(
    ("mode", "network", "goodbye"),
    [("asp", "tcp", False), ("ssp", "local", True), ("bsp", "local", False), ("bsp", "tcp", True)],
)
async def test_when_one_worker_goes_the_other_replica_trains_what_both_had_before_them(
    mode, network, goodbye, monkeypatch
):
    if not goodbye:
        monkeypatch.setattr(ModelWorker, "_goodbye", Role._goodbye)
    cluster = cut(network, read_ahead=4, **MODES[mode])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(in_the_middle(cluster))
        replica_generation = replica_generations_of(cluster)[0]
        await cluster.workers[3].__aexit__(None, None, None)
        result = await training
        assert replica_of(cluster, "worker-2") == 1
        assert replica_generations_of(cluster).keys() <= {0}, "half a replica is none"
        cluster.data.state.check_invariants()
        cluster.controller.replicated_state.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 2
    assert result.statistics["data-0"].returned > 0
    assert replica_generation
    how = "left" if goodbye else "died"
    assert [event["event"] for event in result.events] == [f"worker-3 {how}"]


@pytest.mark.parametrize(
    ("mode", "victim", "network"),
    [("asp", 2, "local"), ("asp", 3, "tcp"), ("ssp", 3, "local"), ("bsp", 2, "tcp")],
)
async def test_with_another_worker_in_its_place_the_survivor_begins_a_new_generation(mode, victim, network):
    cluster = cut(network, epochs=4, **MODES[mode])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(in_the_middle(cluster))
        before, other = replica_generations_of(cluster), cluster.workers[0]._run_session
        survivor = cluster.workers[5 - victim]
        old = survivor._run_session
        await cluster.workers[victim].__aexit__(None, None, None)
        async with joiner(cluster, "worker-9") as worker:
            await until(lambda: training.done() or trained(worker) > 3)
            after = replica_generations_of(cluster)
            assert replica_of(cluster, "worker-9") == 1
            assert after[1] not in (before[1], 0)
            assert after[0] == before[0]
            assert cluster.workers[0]._run_session is other, "the other replica never stopped"
            assert survivor._run_session is not old
            result = await training
        cluster.data.state.check_invariants()
        cluster.controller.replicated_state.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 4


async def test_a_spare_worker_takes_the_place_of_one_that_dies(monkeypatch):
    monkeypatch.setattr(ModelWorker, "_goodbye", Role._goodbye)
    cluster = cut(epochs=4, replicas=1, waits=ALONE)
    async with cluster, joiner(cluster, "worker-9") as spare, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(in_the_middle(cluster))
        assert replica_of(cluster, "worker-9") == -1
        assert spare._run_session is None
        await cluster.workers[0].__aexit__(None, None, None)
        result = await training
        place = cluster.controller.map.nodes["worker-9"]
        assert (place.replica, place.partition) == (0, 0)
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 4
    assert trained(spare) > 0


class Held:
    """Lets no compute thread run a segment of one part, until it is opened."""

    def __init__(self, monkeypatch, part):
        self._opened, self._part, self._run = threading.Event(), part, PartitionTrainer.run
        held = self

        def run(trainer, *args):
            return held.run(trainer, *args)

        monkeypatch.setattr(PartitionTrainer, "run", run)

    def run(self, trainer, *args):
        if trainer._partition.worker == self._part:
            self._opened.wait()
        return self._run(trainer, *args)

    def open(self):
        self._opened.set()


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_worker_that_gets_nothing_back_does_not_run_away_from_a_slower_one(network, monkeypatch):
    # The convolution is frozen: the first worker sends activations, and needs no error gradients.
    # The plan goes by estimates: measured times of so small layers may put the cut elsewhere.
    monkeypatch.setattr(preparation, "calibrate", lambda *_arguments, **_options: None)
    # Two groups of the second one hold two of the four threads that both share.
    waits = msgspec.structs.replace(QUICK, patience_s=50.0)
    flow = {"images_per_group": 1, "in_flight": 2, "threads": 2, "epochs": 1, "waits": waits}
    config = config_of(partitions=2, plan="layers", **flow)
    cluster = cluster_of(
        config, NETWORKS[network](), dataset=tiny_dataset(200, 10), spec=with_frozen(digits(), "conv2d")
    )
    held = Held(monkeypatch, 1)
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        first, second = cluster.workers
        try:

            def finished(worker):
                engine = worker.statistics().engine
                return 0 if not engine else engine.finished

            def early(worker):
                engine = worker.statistics().engine
                return 0 if not engine else engine.early_tokens

            most, waiting = (LEAD + 1) * config.in_flight, LEAD * config.in_flight
            # Blocks of the first one may still be on their way when it has finished its groups.
            await until(lambda: finished(first) == most and early(second) == waiting)
            await turns(500)
            assert finished(first) == most
            assert (finished(second), early(second)) == (0, waiting)
            assert first.statistics().part.wires <= most
        finally:
            held.open()
        result = await training
    assert [epoch.images for epoch in result.epochs] == [200]


def buffer_pools_of(worker):
    return worker._run_session._mode._partition_trainer._buffer_pools.values()


@pytest.mark.parametrize(("halo", "network"), [("exchange", "local"), ("recompute", "tcp")])
async def test_send_buffers_go_round_and_none_is_lost(halo, network):
    options = {"partitions": 3, "halo": halo, "images_per_group": 2, "epochs": 1, "waits": QUICK}
    cluster = cluster_of(
        config_of(in_flight=4, **options), NETWORKS[network](), dataset=tiny_dataset(600, 10)
    )
    async with cluster, asyncio.TaskGroup() as group:

        def made():
            return [worker.statistics().part.wires for worker in cluster.workers]

        def groups():
            return cluster.data.state.statistics().finished

        training = group.create_task(cluster.train(), name="train")
        await until(lambda: groups() >= 100)
        before = made()
        await until(training.done)
        # A burst in which all are under way may come late; two hundred groups need a thousand.
        assert sum(made()) <= 1.25 * sum(before)

        def kept():
            """Buffers that are free, or wait for the confirmation of their blocks."""
            unconfirmed = [
                counts.blocks_unconfirmed
                for worker in cluster.workers
                for counts in worker.statistics().neighbours.values()
            ]
            return sum(
                len(buffer_pool._free)
                for worker in cluster.workers
                for buffer_pool in buffer_pools_of(worker)
            ) + sum(unconfirmed)

        await until(lambda: kept() == sum(made()))
        for worker in cluster.workers:
            for buffer_pool in buffer_pools_of(worker):
                assert len({id(flat) for flat in buffer_pool._free}) == len(buffer_pool._free)
