"""A run with three copies of each shard loses servers one after the other, or all of them at once."""

import asyncio
import re

import pytest

from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.controller.role import RoleSettings
from adam_async.errors import RoleDied, first_cause
from adam_async.parameter_server.served_store import ServedStore
from adam_async.parameter_server.service import ParameterServer
from tests.adam_async.checkpoint.test_resume import latest, same_bits
from tests.adam_async.cluster.test_elastic import joiner, trained
from tests.adam_async.cluster.test_local import QUICK, config_of
from tests.adam_async.runs import (
    NETWORKS,
    address_of,
    check_replay,
    cluster_of,
    entropy_of,
    tiny_dataset,
    until,
)
from transport import Identity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

IMAGES = 60
NODES = ("ps-0", "ps-1", "ps-2")
MODES = {"asp": {}, "ssp": {"consistency": "ssp:2"}, "bsp": {"consistency": "bsp"}}


def replicated(*, checkpoint=None, resume=None, network=None, **options):
    options = {"servers": 3, "copies": 3, "replicas": 2, "shard_bytes": 4096, "waits": QUICK, **options}
    return cluster_of(
        config_of(weights="copy", **options),
        network,
        dataset=tiny_dataset(train=IMAGES),
        checkpoint=checkpoint,
        resume=resume,
    )


def starting_again(cluster, node):
    """Return a server of the same name, of a later incarnation."""
    entropy = entropy_of(f"{node} again")
    return ParameterServer(
        RoleSettings(
            network=cluster.network,
            address=address_of(cluster.network),
            identity=Identity(role="ps", node=node, incarnation=int.from_bytes(entropy(7), "little")),
            waits=cluster.config.waits,
            controller=cluster.controller.address,
        ),
        buffers=cluster.buffers,
    )


def in_sync(cluster):
    """Return the servers in sync of each bundle, by home."""
    bundles = cluster.controller.map.bundles
    return {key.rpartition("/")[2]: [node for node, _ in each.in_sync] for key, each in bundles.items()}


async def lose(cluster, *nodes):
    """End servers, each after the controllers have struck out the one before."""
    for node in nodes:
        await cluster.servers[NODES.index(node)].__aexit__(None, None, None)
        await until(lambda node=node: all(node not in members for members in in_sync(cluster).values()))


async def trains_with_three_copies(cluster):
    """Wait until the run trains and all bundles have all copies."""
    await until(lambda: bool(cluster.controller.map.results))
    await until(lambda: all(len(members) == 3 for members in in_sync(cluster).values()))


def pushed(cluster):
    """Return the number of pushes that the last server has applied as a primary."""
    served = [each for each in cluster.servers[2].served.values() if each.is_primary]
    return sum(int(shard.version) for each in served for shard in each.state.shards.values())


@pytest.mark.parametrize("mode", MODES)
async def test_with_min_in_sync_1_training_goes_on_with_the_last_of_three_servers(mode):
    cluster = replicated(epochs=100, min_in_sync=1, **MODES[mode])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await trains_with_three_copies(cluster)
        await lose(cluster, "ps-0", "ps-1")
        before = pushed(cluster)
        await until(lambda: training.done() or pushed(cluster) > before + 100)
        result = await training
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 100
    assert not [each for each in result.events if "wait" in each["event"]]


@pytest.mark.parametrize("mode", MODES)
async def test_by_default_pushes_wait_by_name_until_a_server_is_back(mode):
    cluster = replicated(epochs=100, **MODES[mode])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await trains_with_three_copies(cluster)
        await lose(cluster, "ps-0", "ps-1")
        last = [each.copy for each in cluster.servers[2].served.values()]
        await until(lambda: any(copy.is_stuck for copy in last))
        before = pushed(cluster)
        await cluster.driver.look()
        assert pushed(cluster) == before
        assert {len(each.in_sync) for each in cluster.driver.progress.copies.lagging} == {1}
        assert not training.done()
        async with starting_again(cluster, "ps-0"):
            result = await training
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 100
    events = [each["event"] for each in result.events]
    for node in NODES:
        waits = f"pushes to the shards of {node} wait: 1 in sync, 2 needed (min_in_sync)"
        assert events.index(waits) < events.index(f"pushes to the shards of {node} go on: 2 in sync")


KINDS = {
    "partitions": {"partitions": 2, "replicas": 1},
    "deltas": {"protocol": "delta"},
    "factors": {"protocol": "factors"},
    "steps": {"push_every": 2, "pull_every": 2},
    "momentum": {"momentum": 0.9, "rate": 0.01},
    "adagrad": {"rule": "adagrad"},
    "adam": {"rule": "adam", "rate": 0.001},
    "adamw": {"rule": "adamw", "rate": 0.001},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_run_trains_all_images_though_it_loses_a_primary(kind):
    cluster = replicated(epochs=100, **KINDS[kind])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await trains_with_three_copies(cluster)
        await lose(cluster, "ps-0")
        assert not training.done()
        result = await training
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 100
    assert any("moved from ps-0 to ps-" in each["event"] for each in result.events)


@pytest.mark.parametrize("kind", [*MODES.values(), {"push_every": 2, "pull_every": 2}], ids=str)
async def test_a_recorded_run_is_replayed_from_the_log_of_a_server_that_joined_it(kind):
    cluster = replicated(epochs=80, record=True, min_in_sync=1, **kind)
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await trains_with_three_copies(cluster)
        await lose(cluster, "ps-0")
        async with starting_again(cluster, "ps-0"):
            await until(lambda: all(len(members) == 3 for members in in_sync(cluster).values()))
            await lose(cluster, "ps-1", "ps-2")
            assert in_sync(cluster) == {node: ["ps-0"] for node in NODES}
            assert not training.done()
            async with joiner(cluster, "worker-9"):
                await cluster.workers[0].__aexit__(None, None, None)
                result = await training
    assert isinstance(result.record, bytes), result.record

    check_replay(result.record, cluster.dataset)


async def test_a_bsp_run_across_a_failover_has_the_weights_of_one_without_to_the_last_bit():
    async def weights_of(*lost):
        cluster = replicated(epochs=60, consistency="bsp")
        async with cluster, asyncio.TaskGroup() as group:
            training = group.create_task(cluster.train(), name="train")
            await trains_with_three_copies(cluster)
            await lose(cluster, *lost)
            assert not training.done()
            return {name: values.tobytes() for name, values in (await training).weights.items()}

    assert await weights_of("ps-0") == await weights_of()


@pytest.mark.parametrize("network", ["local", "tcp"])
async def test_a_run_goes_on_though_it_loses_a_server_while_its_values_are_loaded(monkeypatch, network):
    cluster = replicated(epochs=2, network=NETWORKS[network]())
    load, loading = ServedStore._load, asyncio.Event()

    def answers_not(served, request, body):
        if served.store.id == cluster.driver._run and served._host.node == "ps-1" and not loading.is_set():
            loading.set()
        elif not loading.is_set() or cluster.servers[1]._identity.incarnation != served._host.me[1]:
            load(served, request, body)

    monkeypatch.setattr(ServedStore, "_load", answers_not)
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await loading.wait()
        await cluster.servers[1].__aexit__(None, None, None)
        async with starting_again(cluster, "ps-1"):
            result = await training
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 2
    events = [each["event"] for each in result.events]
    assert "ps-1 was lost before training began: the run is placed anew" in events


def lose_within_a_checkpoint(monkeypatch, cluster):
    """End ps-0 as soon as a checkpoint reads it while all copies are in sync; returns a list of that loss."""
    read, lost = ShardCopies._read, []

    async def read_and_lose(self, link, *rest):
        whole = all(len(members) == 3 for members in in_sync(cluster).values())
        if link.peer.node == "ps-0" and whole and not lost:
            lost.append(link.peer.node)
            await cluster.servers[0].__aexit__(None, None, None)
        return await read(self, link, *rest)

    monkeypatch.setattr(ShardCopies, "_read", read_and_lose)
    return lost


@pytest.mark.parametrize("every", [0, 4], ids=["at-the-end", "within"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_checkpoint_that_loses_a_primary_while_it_is_read_resumes_the_run(
    mode, every, tmp_path, monkeypatch
):
    options = {"epochs": 8, "checkpoint_every": every, **MODES[mode]}
    cluster = replicated(checkpoint=tmp_path, **options)
    lost = lose_within_a_checkpoint(monkeypatch, cluster)
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(lambda: bool(lost) or training.done())
        before = latest(tmp_path)
        await until(lambda: latest(tmp_path) > before or training.done())
        assert not training.done(), "it was over before the checkpoint was seen"
        training.cancel()
    assert lost == ["ps-0"]
    async with replicated(resume=tmp_path, **options) as again:
        resumed = await again.train()
    assert [epoch.images for epoch in resumed.epochs] == [IMAGES] * 8
    if mode == "bsp":
        async with replicated(**{**options, "checkpoint_every": 0}) as unharmed:
            same_bits((await unharmed.train()).weights, resumed.weights)


@pytest.mark.parametrize("mode", MODES)
async def test_a_checkpoint_after_a_failover_resumes_the_run(mode, tmp_path):
    options = {"epochs": 25, **MODES[mode]}
    async with replicated(checkpoint=tmp_path, **options) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await trains_with_three_copies(cluster)
        await lose(cluster, "ps-0")
        before = latest(tmp_path)
        await until(lambda: latest(tmp_path) > before or training.done())
        assert not training.done(), "it was over before the checkpoint was seen"
        training.cancel()
    async with replicated(resume=tmp_path, **options) as again:
        resumed = await again.train()
    assert [epoch.images for epoch in resumed.epochs] == [IMAGES] * 25
    if mode == "bsp":
        async with replicated(**options) as unharmed:
            same_bits((await unharmed.train()).weights, resumed.weights)


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_that_joins_and_one_that_leaves_amid_a_failover_cost_no_image(mode):
    cluster = replicated(epochs=60, **MODES[mode])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await trains_with_three_copies(cluster)
        await cluster.servers[0].__aexit__(None, None, None)
        assert not training.done()
        async with joiner(cluster, "worker-9") as late:
            await cluster.workers[1].__aexit__(None, None, None)
            await until(lambda: training.done() or trained(late) > 3)
            await until(lambda: training.done() or "ps-0" not in str(in_sync(cluster).values()))
            groups = trained(late)
            result = await training
    assert groups > 3
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 60
    events = [each["event"] for each in result.events]
    assert "worker-1 left" in events
    assert any("moved from ps-0 to ps-" in event for event in events)


async def test_the_loss_of_all_servers_ends_the_run_with_its_shards_and_a_checkpoint_resumes_it(tmp_path):
    cluster = replicated(epochs=10_000, checkpoint=tmp_path)

    async def train():
        async with cluster, asyncio.TaskGroup() as group:
            training = group.create_task(cluster.train(), name="train")
            await trains_with_three_copies(cluster)
            await until(lambda: bool(cluster.driver.progress.checkpoint))
            for server in cluster.servers:
                await server.__aexit__(None, None, None)
            await training

    begin = asyncio.get_running_loop().time()
    with pytest.raises(ExceptionGroup) as failure:
        await train()
    assert asyncio.get_running_loop().time() - begin < QUICK.patience_s - 1
    cause = first_cause(failure.value)
    assert isinstance(cause, RoleDied)
    assert re.search(
        r"died: the last copy of the shards of .*ps-\d in store '.+' is lost; --resume DIR", str(cause)
    )
    epochs = cluster.driver.progress.epoch + 2
    async with replicated(epochs=epochs, checkpoint=tmp_path, resume=tmp_path) as again:
        result = await again.train()
    assert [(each.epoch, each.images) for each in result.epochs] == [(n + 1, IMAGES) for n in range(epochs)]
    assert "resumed from checkpoint-" in result.events[0]["event"]
