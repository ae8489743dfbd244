"""Steps trained in place reach every server that holds a shard; a group is finished when all have them."""

import pytest

from adam_async.messages import Finished, Lease
from adam_async.worker import push_plan
from adam_async.worker.step_reports import STEPS, StepReports
from adam_async.worker.training import TrainedInPlace
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, Rough, servers_of, turns, until
from tests.transport.testing import Faults

ALIASED = {"weights": "aliased", "waits": PATIENT}


def trained(number, *, staleness=0, refused=()):
    return TrainedInPlace(Lease(1, number, 1, 4), number / 8, staleness, refused)


def recorder_of(servers, *, clock=0):
    finished = []
    client = servers.client().client
    recorder = StepReports(
        table=servers.table,
        buckets=servers.map.buckets,
        client=client,
        on_finished=finished.append,
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
