"""Runs in place: chosen if possible, named in the report, with only records on the links."""

import asyncio

import msgspec
import numpy as np
import pytest

from adam_async.errors import ConfigError
from adam_async.messages import Finished, Lease
from adam_async.run.config import Config
from adam_async.run.ids import ShardId
from adam_async.worker import push_plan
from adam_async.worker.in_place_mode import STEPS, InPlaceMode, StepReports
from adam_async.worker.training import TrainedInPlace
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, Rough, cluster_of, servers_of, turns, until
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
        with pytest.raises(
            ConfigError, match=r"weights=aliased needs the memory of the servers, and the links .* not local"
        ):
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


ALIASED = {"weights": "aliased", "waits": PATIENT}


def trained(number, *, staleness=0, refused=()):
    return TrainedInPlace(Lease(1, number, 1, 4), number / 8, staleness, refused)


def recorder_of(servers, *, clock=0):
    finished = []
    client = servers.client().client
    recorder = StepReports(
        table=servers.table, buckets=servers.map.buckets, client=client, on_finished=finished.append
    )
    recorder.start(clock)
    return recorder, client, finished


def versions(servers):
    return {int(shard.version) for shard in servers.shards().values()}


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_every_step_is_counted_on_every_shard_and_its_group_finished(network, sharding):
    async with servers_of(NETWORKS[network](), **ALIASED, **sharding) as servers:
        recorder, client, finished = recorder_of(servers, clock=10)
        for number in range(2 * STEPS):
            recorder.add(trained(number, staleness=number % 3))
        await client.flush()
        assert finished == [
            Finished(1, number, 1, 4, number / 8, clock=11 + number) for number in range(2 * STEPS)
        ]
        assert recorder.clock == 10 + 2 * STEPS
        for shard in servers.shards().values():
            shard.check_invariants()
            assert shard.version == shard.last_number[100, client._session.incarnation] == 2 * STEPS
            assert shard.staleness == {at: len(range(at, 2 * STEPS, 3)) for at in range(3)}
            assert shard.clocks == {0: 10 + 2 * STEPS}
            assert shard.tables.groups == {1: (0, 2 * STEPS)}


async def test_steps_travel_a_few_at_a_time_and_the_rest_when_nothing_more_waits():
    async with servers_of(NETWORKS["local"](), **ALIASED) as servers:
        recorder, client, finished = recorder_of(servers)
        for number in range(STEPS - 1):
            recorder.add(trained(number))
        await client.flush()
        assert (versions(servers), finished) == ({0}, [])
        recorder.close()
        await client.flush()
        assert (versions(servers), len(finished)) == ({STEPS - 1}, STEPS - 1)
        recorder.close()
        await client.flush()
        assert versions(servers) == {STEPS - 1}, "nothing to say, nothing said"


async def test_a_group_is_not_finished_while_one_server_has_not_counted_it():
    rough = Rough(NETWORKS["local"](), Faults())
    async with servers_of(rough, **ALIASED, **SHARDED) as servers:
        recorder, client, finished = recorder_of(servers)
        await until(lambda: all(channel.channel.link is not None for channel in client.connections.values()))
        channels = client.connections
        channels["ps-1"].channel.link.abort()
        recorder.add(trained(1))
        recorder.close()
        while any(channels[name].open for name in ("ps-0", "ps-2")):
            await turns()
            assert not finished or not channels["ps-1"].open
        await client.flush()
        assert [report.number for report in finished] == [1]
        assert versions(servers) == {1}


async def test_refused_tensors_are_refused_in_each_of_their_shards_and_no_others():
    async with servers_of(NETWORKS["local"](), **ALIASED, **SHARDED) as servers:
        recorder, client, finished = recorder_of(servers)
        recorder.add(trained(1, refused=("fc1.weight", "fc2.bias")))
        recorder.add(trained(2))
        recorder.close()
        await client.flush()
        assert len(finished) == 2
        for shard in servers.shards().values():
            bad = shard.spec.tensor in ("fc1.weight", "fc2.bias")
            assert (shard.version, shard.tables.refused) == ((1, 1) if bad else (2, 0))
            assert shard.clocks == {0: 2}
        assert len(servers.table.by_tensor["fc1.weight"]) > 1


async def test_shards_that_are_too_many_for_one_message_go_in_several(monkeypatch):
    monkeypatch.setattr(push_plan, "MESSAGE_SHARDS", 5)
    async with servers_of(NETWORKS["local"](), **ALIASED, servers=2, shard_bytes=1 << 10) as servers:
        recorder, client, finished = recorder_of(servers)
        recorder.add(trained(1))
        recorder.add(trained(2, refused=("fc1.weight",)))
        recorder.close()
        await client.flush()
        assert [report.number for report in finished] == [1, 2]
        for shard in servers.shards().values():
            assert shard.version == (1 if shard.spec.tensor == "fc1.weight" else 2)
