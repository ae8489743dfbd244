"""Runs in place: chosen if possible, named in the report, with only records on the links."""

import asyncio

import msgspec
import numpy as np
import pytest

from adam_async.errors import ConfigError
from adam_async.messages import Lease
from adam_async.run.config import Config
from adam_async.run.ids import ShardId
from adam_async.worker.in_place_mode import InPlaceMode
from adam_async.worker.training import TrainedInPlace
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, Rough, cluster_of, servers_of, turns
from tests.adam_async.worker.setups import mode_setup
from tests.transport.testing import Faults


def config_of(**options):
    return Config(**{"epochs": 1, "threads": 1, "rate": 0.05, "images_per_group": 4, **options})


def sent(result, kind):
    rows = [row for node in result.statistics.values() for row in node.traffic if row.type == kind]
    return sum(row.messages for row in rows), sum(row.payload_bytes for row in rows)


@pytest.mark.parametrize("options", [{}, {"replicas": 2, **SHARDED}], ids=["one", "replicas-and-servers"])
async def test_records_travel_and_no_gradient_does(options):
    async with cluster_of(config_of(epochs=2, **options)) as cluster:
        assert cluster.config.weights == "aliased"
        result = await cluster.train()
        model = result.model.num_parameters * 4
    assert sent(result, "Push") == sent(result, "Pushed") == (0, 0)
    messages, payload = sent(result, "ReportSteps")
    assert messages > 0
    assert payload == 0
    # The driver pulls to evaluate; a worker asks each server for one shard, to learn the clocks.
    values = sent(result, "Values")[1]
    assert 2 * model <= values < 2 * model + options.get("replicas", 1) * model
    for name in ("worker-0", "worker-1")[: options.get("replicas", 1)]:
        counts = result.statistics[name]
        assert {choice.chosen for choice in counts.protocols} == {"in place"}
        assert {choice.tensor for choice in counts.protocols} == set(result.weights)
        assert counts.push_buffers == 0


async def test_all_replicas_of_a_process_train_the_memory_of_its_servers():
    async with cluster_of(config_of(replicas=2, **SHARDED)) as cluster:
        result = await cluster.train()
        storages = {id(worker._run_session._mode._trainer._storage) for worker in cluster.workers}
        assert len(storages) == 1
        weights = cluster.workers[0]._run_session._mode._trainer._storage.weights
        for server in cluster.servers:
            for shard in server.state.shards.values():
                assert np.shares_memory(shard.values, weights[shard.spec.tensor])
        for name, values in result.weights.items():
            np.testing.assert_array_equal(values, weights[name])
            assert not np.shares_memory(values, weights[name]), "what is handed out is a copy"


@pytest.mark.parametrize("cadence", [{"push_every": 2}, {"pull_every": 2}, {"protocol": "delta"}], ids=str)
async def test_a_cadence_that_needs_a_copy_gets_one(cadence):
    assert cluster_of(config_of(**cadence)).config.weights == "copy"


async def test_links_that_are_not_local_need_a_copy_and_refuse_to_go_without():
    for network in (NETWORKS["tcp"], lambda: Rough(NETWORKS["local"](), Faults())):
        assert cluster_of(config_of(), network()).config.weights == "copy"
        with pytest.raises(ConfigError, match="weights=aliased needs all roles in one process"):
            cluster_of(config_of(weights="aliased"), network())


async def test_a_replica_goes_on_where_the_slowest_clock_of_its_servers_stands():
    async with servers_of(NETWORKS["local"](), weights="aliased", waits=PATIENT, **SHARDED) as servers:
        client, finished = servers.client().client, []
        for name, clock in (("ps-0", 7), ("ps-1", 5), ("ps-2", 6)):
            ours = [s.id for s in servers.table.shards if servers.map.buckets[s.bucket] == name]
            client.connections[name].tick(tuple(ShardId(number) for number in ours), clock)
        storage = servers.servers[0].store("run")._storage
        config = msgspec.structs.replace(servers.config, images_per_group=4)
        setup = mode_setup(servers, client, config, finished=finished.append)
        mode = InPlaceMode(setup, model=servers.model, storage=storage, threads=1)
        await mode.prepare()
        mode._trainer.trained.append(TrainedInPlace(Lease(1, 3, 1, 4), 0.5, 0, ()))
        mode._take_trained()
        assert finished == []
        mode.flush(0)
        await client.flush()
        assert [report.number for report in finished] == [3]
        assert {shard.clocks[0] for shard in servers.shards().values()} == {7, 6}


async def test_a_reading_waits_for_no_steps_of_a_worker_that_has_ended():
    async with servers_of(NETWORKS["local"](), weights="aliased", waits=PATIENT) as servers:
        client, storage = servers.client().client, servers.servers[0].store("run")._storage
        for connection in client.connections.values():
            connection.report_steps = lambda *_: None
        mode = InPlaceMode(
            mode_setup(servers, client, servers.config), model=servers.model, storage=storage, threads=1
        )

        async def read():
            async with storage.still():
                pass

        async with asyncio.TaskGroup() as group:
            with mode.counting():
                mode._trainer.trained.append(TrainedInPlace(Lease(1, 3, 1, 4), 0.5, 0, ()))
                readings = [group.create_task(read()) for _ in range(2)]
                await turns(5)
                assert not any(reading.done() for reading in readings)
            await asyncio.wait(readings)


async def test_no_group_in_place_waits_for_a_pull():
    async with cluster_of(config_of(in_flight=1)) as cluster:
        await cluster.train()
        assert cluster.workers[0]._run_session._mode.graph().inputs == ("group",)
