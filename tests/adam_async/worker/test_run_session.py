"""One worker's part in one run: its memory is that of its run, and it ends before the next begins."""

import asyncio
import threading

import numpy as np
import pytest

from adam_async.errors import RoleFailed
from adam_async.messages import Block
from adam_async.parameter_server.storage import StoragePool
from adam_async.run.config import Config
from adam_async.run.counts import WorkerCounts
from adam_async.run.training_program import read_training
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from adam_async.worker.run_session import ComputeSettings, RunSession, SessionSetup, hand_over
from dataflow import ComputePool, Engine, EngineSettings, Graph, Node, Tag
from tests.adam_async.runs import PATIENT, cluster_of, until
from transport import BufferPool, Identity, RemoteProtocolError


def config_of(**options):
    return Config(
        **{"epochs": 1, "threads": 1, "in_flight": 1, "rate": 0.05, "images_per_group": 4, **options},
        waits=PATIENT,
    )


class Gate:
    """Lets no compute thread through that has a gradient to apply, until it is opened."""

    def __init__(self, step):
        self._step, self.reached, self._open = step, threading.Event(), threading.Event()

    def train_groups(self, *args, **options):
        self.reached.set()
        self._open.wait(60.0)
        return self._step.train_groups(*args, **options)

    def new_scratch(self):
        return self._step.new_scratch()

    def open(self):
        self._open.set()


def storage_of(cluster):
    """The memory of the newest store of the first server."""
    stores = list(cluster.servers[0].served.values())
    return stores[-1]._storage if stores else None


async def test_a_thread_still_in_a_cancelled_run_writes_into_the_memory_of_that_run_only():
    async with cluster_of(config_of()) as fresh:
        expected = (await fresh.train()).weights
    async with cluster_of(config_of(epochs=1000)) as cluster:
        old = asyncio.create_task(cluster.train(), name="old")
        await until(lambda: bool(cluster.controller.map.results))
        trainer = cluster.workers[0]._run_session._mode._trainer
        memory = trainer._storage
        gate = trainer._step = Gate(trainer._step)
        try:
            await until(gate.reached.is_set)
            old.cancel()
            with pytest.raises(asyncio.CancelledError):
                await old
            cluster.driver._asked = config_of(weights="aliased")
            new = asyncio.create_task(cluster.train(), name="new")
            await until(lambda: storage_of(cluster) not in (None, memory))
            before = {name: values.copy() for name, values in memory.weights.items()}
        finally:
            gate.open()
        result = await new
        changed = [
            name for name, values in memory.weights.items() if not np.array_equal(values, before[name])
        ]
        assert changed, "the thread finished its step where it had begun it"
        assert cluster.workers[0]._run_session._mode._trainer._storage is storage_of(cluster)
    assert result.weights.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(result.weights[name], values)


async def test_steps_that_the_servers_count_are_the_groups_that_were_trained():
    async with cluster_of(config_of(epochs=3, threads=2, in_flight=5, replicas=2)) as cluster:
        result = await cluster.train()
        storage = storage_of(cluster)
        versions = {int(shard.version) for shard in cluster.servers[0].state.shards.values()}
    groups = 3 * 15
    assert versions == {groups}
    assert storage.steps[0] == groups
    workers = [counts for counts in result.statistics.values() if isinstance(counts, WorkerCounts)]
    assert sum(counts.data.groups for counts in workers) == groups


async def test_a_worker_without_the_memory_of_the_servers_names_the_option_to_change():
    with pytest.raises(RoleFailed, match="has no shared memory: run it with weights=copy"):
        async with cluster_of(config_of(epochs=1000)) as cluster:
            cluster.workers[0]._storage_pool = StoragePool()
            await cluster.train()


async def test_a_worker_whose_servers_have_left_a_run_waits_for_the_next_one():
    async with cluster_of(config_of()) as cluster:
        worker, storage_pool = cluster.workers[0], StoragePool()
        storage_pool.has_servers = True
        worker._storage_pool, shared = storage_pool, worker._storage_pool
        missed = asyncio.create_task(cluster.train(), name="missed")
        await until(lambda: any(n.role == "ps" and n.serves for n in worker._membership.map.nodes.values()))
        assert worker._run_session is None
        missed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await missed
        worker._storage_pool = shared
        result = await cluster.train()
        assert [epoch.images for epoch in result.epochs] == [60]


async def test_a_session_that_has_not_begun_reports_no_counts():
    async with cluster_of(config_of()) as cluster:
        await cluster.train()
        setup = SessionSetup(
            endpoint=Endpoint(
                cluster.network, Identity(role="worker", node="worker-7", incarnation=1), Traffic("worker-7")
            ),
            cluster=cluster.controller.map,
            program=read_training(cluster.controller.map.run),
            replica=0,
            part=0,
            session=1,
            waits=PATIENT,
            buffers=BufferPool(),
            compute=ComputeSettings(threads=1, in_flight=1),
            storage=storage_of(cluster),
        )
        session = RunSession(setup)
        counts = session.statistics()
        assert (counts.pool, counts.engine, counts.parameters.acknowledged) == (None, None, 0)
        assert not session.prepared.is_set()


async def test_blocks_that_no_worker_sends_now_are_refused_and_the_engine_goes_on():
    graph = Graph(inputs=("in-0",), nodes=(Node("take", lambda firing, value: None, inputs=("in-0",)),))
    block = Block(0, 1, 0, 1)
    arrived = [(block, np.zeros(1, np.float32))]
    with pytest.raises(RemoteProtocolError, match="not ready"):
        hand_over(None, {0: "in-0"}, arrived)
    async with (
        ComputePool(threads=1) as pool,
        Engine(graph, pool=pool, in_flight=1, settings=EngineSettings(early_limit=1)) as engine,
    ):
        hand_over(engine, {0: "in-0"}, arrived)
        for again in (block, Block(0, 1, 7, 1)):
            with pytest.raises(RemoteProtocolError):
                hand_over(engine, {0: "in-0"}, [(again, arrived[0][1])])
        engine.admit_nowait(Tag(1, 0, 1))
        await engine.drain()
        assert engine.statistics().finished == 1
