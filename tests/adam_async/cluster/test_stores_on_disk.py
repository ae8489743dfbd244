"""Runs and stores whose servers keep their shards on disk: they end, and go on from there."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import numpy as np
import pytest

from adam_async import Adam, ParameterStore, Sgd
from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.saved_shards import stores_of_runs
from adam_async.cluster.local import LocalCluster
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.data_server.epoch import EpochOrders
from adam_async.driver.driver import Driver
from adam_async.driver.settings import DriverSettings, RunInputs
from adam_async.driver.takeover import Attach
from adam_async.errors import ConfigError, RunFailed, StoreError
from adam_async.messages.group_sets import KEPT_EPOCHS
from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits
from adam_async.parameter_server.piece_states import RUN
from adam_async.parameter_server.server_disk import opened_disk
from adam_async.parameter_server.service import ParameterServer
from adam_async.persistence.records import LEADING, FlushSettings, StateRecord
from adam_async.persistence.scan import scan
from adam_async.run.config import Config
from adam_async.run.counts import skipped_groups
from adam_async.run.training_program import read_training
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import apply_numerics
from tests.adam_async.runs import (
    SHARDED,
    TALLIED,
    TALLIED_IMAGES,
    TALLY_LAYERS,
    TALLY_OPTIONS,
    entropy_of,
    tallied_dataset,
    tally_of,
    tiny_dataset,
    turns,
    until,
)
from transport import Identity

pytestmark = pytest.mark.thorough

FLUSH_S = 0.02


def config_of(**options):
    return Config(
        **{
            "epochs": 3,
            "schedule": "constant",
            "kernels": "numpy",
            "threads": 1,
            "rate": 0.05,
            "images_per_group": 4,
            "flush_s": FLUSH_S,
            **options,
        }
    )


def cluster_in(folder, config, number=1, **options):
    """The cluster of one start of a command; each start has identities of its own."""
    inputs = {"dataset": tiny_dataset(), "spec": digits(), **options}
    return LocalCluster(config, entropy=entropy_of(f"start {number}"), store=folder, **inputs)


def place(cluster):
    """Number of whole epochs on the disks, by the records of all servers; 0 before the shards are whole."""
    disks = [server._saved._disk for server in cluster.servers]
    records = [each.run for disk in disks for each in disk if each.run is not None and each.run.is_whole]
    return max([record.ended for record in records], default=0)


async def stopped_at(folder, config, epochs, **options):
    """Train until the disks have this many epochs and groups of the next one, then end at once.

    Returns the values at the end, and the number of ended epochs.
    """
    config = msgspec.structs.replace(config, epochs=100_000)
    async with cluster_in(folder, config, **options) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        while not training.done() and not (place(cluster) >= epochs and groups_in(cluster)):
            await turns()
        assert not training.done(), "it was over before its epochs were on the disks"
        training.cancel()
    return values_of(cluster.servers), place(cluster)


def groups_in(cluster):
    """Whether shards have groups of an epoch that is not over."""
    ended = cluster.driver.map.ended
    states = [server.state for server in cluster.servers if server.state]
    return any(
        max(shard.tables.groups, default=0) > ended for each in states for shard in each.shards.values()
    )


def sets_of(servers):
    """Tables of all shards."""
    return [shard.tables for server in servers if server.state for shard in server.state.shards.values()]


def values_of(servers):
    """Values of all shards in memory, by number."""
    shards = [shard for server in servers if server.state for shard in server.state.shards.values()]
    return {int(shard.spec.id): shard.values.copy() for shard in shards}


async def values_on_disk(folder, servers):
    """Values of all shards in the folders of some servers, by number."""
    found = {}
    for number in range(servers):
        async with opened_disk(folder / f"ps-{number}", flush_s=1.0) as disk:
            for store in disk:
                table = store.catalogue.record, store.catalogue.arrays
                assert table
                for name in store._segments.recovery.states:
                    if name.home == LEADING or not name.shard:
                        continue
                    for shard in store.specs_of(name.home, name.shard):
                        _, tensors = await store.read(name.home, name.shard, [int(shard.id)])
                        found[int(shard.id)] = tensors[2]  # after the tables
    return found


MODES = {
    "in place": {},
    "copies of the weights": {"weights": "copy", "servers": 2, "shard_bytes": 4 << 10},
    "adam": {"rule": "adam", "rate": 0.001, **SHARDED},
    "momentum": {"momentum": 0.9, "rate": 0.01, "weights": "copy"},
    "ssp": {"consistency": "ssp:2", "replicas": 2, **SHARDED},
    "bsp": {"consistency": "bsp", "replicas": 2, **SHARDED},
    "several copies": {"controllers": 3, "servers": 3, "copies": 2, "shard_bytes": 16 << 10},
    "durable": {"ack": "durable", "servers": 2, "shard_bytes": 4 << 10},
    "durable copies": {"ack": "durable", "controllers": 3, "servers": 2, "copies": 2},
}


@pytest.mark.parametrize("mode", MODES)
async def test_a_run_goes_on_from_the_disks_of_its_servers_and_counts_each_group_once(mode, tmp_path):
    config = config_of(**MODES[mode])
    _, epoch = await stopped_at(tmp_path, config, 1)
    config = msgspec.structs.replace(config, epochs=epoch + 2)
    async with cluster_in(tmp_path, config, number=2) as cluster:
        result = await cluster.train()
        found = sets_of(cluster.servers)
    assert [each.epoch for each in result.epochs] == list(range(1, epoch + 3))
    assert {each.images for each in result.epochs} == {60}
    events = [event["event"] for event in result.events]
    assert any("goes on from the disks of its servers" in event for event in events), events
    assert np.isfinite([each.train_loss for each in result.epochs]).all()
    for tables in found:
        assert tables.groups[epoch + 2] == tables.groups[epoch + 1] == (0, 15)
        assert tables.losses[epoch + 2].images == tables.losses[epoch + 1].images == 60
        if config.consistency == "asp" and config.weights == "copy":
            assert tables.version == 15 * (epoch + 2)
    async with Disk() as disk:
        record = (await stores_of_runs(tmp_path, disk))[0].run
    assert (record.ended, record.program.phase) == (epoch + 2, "finished")
    assert [each.epoch for each in record.evaluated] == list(range(1, epoch + 3))
    assert len(record.results) == epoch + 2


async def test_in_place_each_image_counts_once_in_runs_from_copies_of_the_folder_at_any_moment(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("adam_async.parameter_server.shard_pieces.PIECE_BYTES", 256)
    settings = partial(FlushSettings, batch_bytes=1)  # each piece is written before the next one is copied
    monkeypatch.setattr("adam_async.parameter_server.server_disk.FlushSettings", settings)
    inputs = {"spec": TALLIED, "layers": TALLY_LAYERS, "dataset": tallied_dataset()}
    options = {**TALLY_OPTIONS, "threads": 2, "shard_bytes": 256}
    folder = tmp_path / "store"
    config = config_of(**options, epochs=100_000)
    copies = []
    async with cluster_in(folder, config, **inputs) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(lambda: place(cluster) >= 1 or training.done())
        (disk,) = cluster.servers[0]._saved._disk
        while len(copies) < 3 and not training.done():
            writes = disk.statistics().writes
            while disk.statistics().writes == writes or not groups_in(cluster):
                await turns()
            copies.append(shutil.copytree(folder, tmp_path / f"copy-{len(copies)}"))
        epochs = cluster.driver.map.ended + 2
        training.cancel()
    config = config_of(**options, epochs=epochs)
    for copy in copies:
        async with cluster_in(copy, config, number=2, **inputs) as cluster:
            result = await cluster.train()
        assert set(tally_of(result.weights)) == {epochs}


async def test_a_run_goes_on_whose_evaluation_was_many_epochs_behind(tmp_path):
    """The shards have dropped the sets of the epoch with which it goes on: they have all groups of it."""
    config = config_of(evaluation="concurrent", weights="copy", epochs=100_000)

    async def stay(_):
        await asyncio.Event().wait()

    async with cluster_in(tmp_path, config) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(on_epoch=stay), name="train")
        await until(lambda: place(cluster) > KEPT_EPOCHS + 2)
        training.cancel()
    epoch = place(cluster)
    config = msgspec.structs.replace(config, epochs=epoch + 2)
    async with cluster_in(tmp_path, config, number=2) as cluster:
        result = await cluster.train()
        found = sets_of(cluster.servers)
    assert [each.epoch for each in result.epochs] == list(range(1, epoch + 3))
    assert {each.images for each in result.epochs} == {60}
    assert np.isnan(result.epochs[1].train_loss)  # no shard has the losses of a dropped set
    for tables in found:
        assert tables.groups[epoch + 2] == (0, 15)
        assert tables.version == 15 * (epoch + 2)


def counts_after(results, seed, images_per_group):
    """How often each image counts in epochs with these results."""
    orders = EpochOrders(Dice(seed), num_images=TALLIED_IMAGES, images_per_group=images_per_group)
    counts, skipped = np.zeros(TALLIED_IMAGES), skipped_groups(results)
    for epoch, ranges in enumerate(skipped, start=1):
        order = orders.order(epoch, skipped[: epoch - 1])
        for number in {*range(order.num_groups)}.difference(*(range(*each) for each in ranges)):
            counts[order.group(number)] += 1
    return counts.tolist()


@pytest.mark.parametrize("rule", ["replicas", "images"])
async def test_an_epoch_that_ended_early_ends_with_the_same_groups_in_a_run_that_goes_on(rule, tmp_path):
    """The disk of one server has shards from before the end of an epoch, the other one from after it."""
    inputs = {"spec": TALLIED, "layers": TALLY_LAYERS, "dataset": tallied_dataset()}
    options = {**TALLY_OPTIONS, "images_per_group": 4, "weights": "copy", "servers": 2, "shard_bytes": 256}
    options |= {"replicas": 3, "slow": ("worker-2:0.05",), "epoch_fraction": 0.6, "epoch_rule": rule}
    folder, torn = tmp_path / "store", tmp_path / "torn"
    async with (
        cluster_in(folder, config_of(**options, epochs=100_000), **inputs) as cluster,
        asyncio.TaskGroup() as group,
    ):
        training = group.create_task(cluster.train(), name="train")
        await until(lambda: place(cluster) >= 1 or training.done())
        disks = [next(iter(server._saved._disk)) for server in cluster.servers]
        ended, is_within = 0, False
        # A slow disk may end its rounds only in a later epoch: then both copies are made again.
        while not training.done() and not (is_within and cluster.driver.map.ended == ended):
            shutil.rmtree(torn, ignore_errors=True)
            ended, rounds = cluster.driver.map.ended, disks[1].statistics().rounds
            while disks[1].statistics().rounds == rounds or not groups_in(cluster):
                await turns()
            shutil.copytree(folder / "ps-1", torn / "ps-1")
            is_within = cluster.driver.map.ended == ended
            while cluster.driver.map.ended == ended:
                await turns()
            ended += 1
            is_within = is_within and bool(cluster.driver.map.results[-1].skipped_groups)
            rounds = disks[0].statistics().rounds
            while is_within and (disks[0].statistics().rounds < rounds + 2 or not groups_in(cluster)):
                await turns()
        shutil.copytree(folder / "ps-0", torn / "ps-0")
        first = [*cluster.driver.map.results]
        training.cancel()
    config = config_of(**options, epochs=ended + 2)
    async with cluster_in(torn, config, number=2, **inputs) as cluster:
        result = await cluster.train()
        run = cluster.driver.map.run
        results = [*read_training(run).resumed.results, *cluster.driver.map.results]
    assert skipped_groups(results[:ended]) == skipped_groups(first)
    assert {each.images + each.skipped for each in result.epochs} == {TALLIED_IMAGES}
    assert tally_of(result.weights) == counts_after(results, config.seed, 4)


def driver_of(cluster, number, **inputs):
    """A driver of a cluster whose roles other commands have started."""
    settings = DriverSettings(
        network=cluster.network,
        controller=cluster.controllers[0].address,
        identity=Identity(role="driver", node=f"driver-{number}", incarnation=number),
        threads=1,
    )
    return Driver(cluster.config, settings, RunInputs(spec=digits(), **inputs))


async def test_a_new_run_begins_in_the_place_of_one_that_waits_on_the_disks_only_on_request(tmp_path):
    config = config_of(weights="copy", epochs=100_000)
    async with cluster_in(tmp_path / "lost", config) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(lambda: place(cluster) >= 1)
        folder = shutil.copytree(tmp_path / "lost", tmp_path / "store")
        run = cluster.driver.map.run.id
        training.cancel()
    config = msgspec.structs.replace(config, epochs=1)
    async with cluster_in(folder, config, number=2) as cluster:
        async with driver_of(cluster, 1) as driver:
            with pytest.raises(RunFailed, match=f"run {run} waits on the disks of its servers: --attach"):
                await driver.train()
        assert cluster.driver.map.run is None
        async with driver_of(cluster, 2, replace=True) as driver:
            result = await driver.train()
        assert [each.epoch for each in result.epochs] == [1]
    # The second run has ended.
    async with cluster_in(folder, config, number=3) as cluster, driver_of(cluster, 1) as driver:
        assert [each.epoch for each in (await driver.train()).epochs] == [1]


async def test_a_driver_that_attaches_waits_for_servers_that_start_later(tmp_path):
    config = config_of(weights="copy")
    _, epoch = await stopped_at(tmp_path / "run", config, 1)
    config = msgspec.structs.replace(config, epochs=epoch + 1)
    attach = Attach(given=frozenset({"epochs"}))
    async with (
        AsyncExitStack() as stack,
        cluster_in(tmp_path / "empty", config, number=2) as cluster,
        driver_of(cluster, 1, attach=attach) as driver,
        asyncio.TaskGroup() as group,
    ):
        training = group.create_task(driver.train(), name="train")
        await until(lambda: driver.progress.phase == "looking for the shards of a run")
        disk = await stack.enter_async_context(opened_disk(tmp_path / "run" / "ps-0", flush_s=FLUSH_S))
        settings = cluster._settings("ps", "ps-1", cluster.network, cluster.controllers[0].address)
        later = ParameterServer(settings, buffers=cluster.buffers, numerics=apply_numerics(), disk=disk)
        await stack.enter_async_context(later)
        result = await training
    assert [each.epoch for each in result.epochs] == list(range(1, epoch + 2))


async def test_a_part_of_a_run_on_the_disks_gives_way_to_a_new_one_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr("adam_async.checkpoint.saved_shards.SEARCH_S", 0.0)
    config = config_of(weights="copy", servers=2, shard_bytes=4 << 10)
    await stopped_at(tmp_path, config, 1)
    shutil.rmtree(tmp_path / "ps-1")
    async with cluster_in(tmp_path, config, number=2) as cluster, driver_of(cluster, 1) as driver:
        with pytest.raises(RunFailed, match=r"the shards of ps-1 of run .*; or --replace begins a new run"):
            await driver.train()


def damage_records(folder):
    """Flip a bit in each record of the run in the folder of a server; returns their number."""
    damaged = 0
    for file in folder.glob("store-*/states-*.segment"):
        data = bytearray(file.read_bytes())
        found = scan(file.name, bytes(data), None)
        for each in found.records:
            if isinstance(each.record, StateRecord) and each.record.key.name == RUN:
                data[each.content] ^= 1
                damaged += 1
        file.write_bytes(data)
    return damaged


async def test_a_run_goes_on_if_one_of_two_servers_has_lost_its_record(tmp_path):
    config = config_of(weights="copy", servers=2, shard_bytes=4 << 10)
    _, epoch = await stopped_at(tmp_path, config, 1)
    assert damage_records(tmp_path / "ps-0")
    config = msgspec.structs.replace(config, epochs=epoch + 1)
    async with cluster_in(tmp_path, config, number=2) as cluster:
        result = await cluster.train()
    assert [each.epoch for each in result.epochs] == list(range(1, epoch + 2))


async def test_a_run_whose_record_is_on_no_disk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("adam_async.checkpoint.saved_shards.SEARCH_S", 0.0)
    config = config_of()
    await stopped_at(tmp_path, config, 1)
    assert damage_records(tmp_path / "ps-0")
    async with cluster_in(tmp_path, config, number=2) as cluster:
        with pytest.raises(CheckpointError, match=r"the record of run \S+ is not on the disks of ps-0"):
            await cluster.train()


async def test_an_orderly_end_leaves_the_last_values_on_the_disks(tmp_path):
    config = config_of(**SHARDED, weights="copy")
    values, _ = await stopped_at(tmp_path, config, 1)
    found = await values_on_disk(tmp_path, servers=3)
    assert found.keys() == values.keys()
    for number, array in values.items():
        np.testing.assert_array_equal(found[number], array)


async def test_a_finished_run_asks_for_more_epochs(tmp_path):
    config = config_of()
    async with cluster_in(tmp_path, config) as cluster:
        await cluster.train()
    async with cluster_in(tmp_path, config, number=2) as cluster:
        with pytest.raises(CheckpointError, match="has trained 3 epochs, and epochs=3 asks for no more"):
            await cluster.train()
    async with cluster_in(tmp_path, msgspec.structs.replace(config, epochs=4), number=3) as cluster:
        result = await cluster.train()
    assert [each.epoch for each in result.epochs] == [1, 2, 3, 4]


async def test_a_second_training_after_one_that_did_not_begin_goes_on_with_the_run_on_the_disks(tmp_path):
    config = config_of()
    _, epoch = await stopped_at(tmp_path, config, 1)
    config = msgspec.structs.replace(config, epochs=epoch + 1)
    async with cluster_in(tmp_path, config, number=2) as cluster:
        progress = cluster.driver.progress
        for phase in ("looking for the shards", "reading the shards", "loading run"):
            async with asyncio.TaskGroup() as group:
                training = group.create_task(cluster.train(), name="train")
                await until(lambda at=phase, t=training: t.done() or progress.phase.startswith(at))
                training.cancel()
        result = await cluster.train()
        again = await cluster.train()
    assert [each.epoch for each in result.epochs] == list(range(1, epoch + 2))
    assert "goes on from the disks of its servers" in str(result.events)
    assert "goes on from the disks of its servers" not in str(again.events)


async def test_a_run_goes_on_with_more_servers_and_not_with_fewer(tmp_path, monkeypatch):
    monkeypatch.setattr("adam_async.checkpoint.saved_shards.SEARCH_S", 0.0)
    config = config_of(weights="copy", servers=2, shard_bytes=4 << 10)
    _, epoch = await stopped_at(tmp_path, config, 1)
    one = msgspec.structs.replace(config, servers=1, epochs=100_000)
    async with cluster_in(tmp_path, one, number=2) as cluster:
        with pytest.raises(
            CheckpointError,
            match=r"the shards of ps-1 of run \S+ are not on the disks of ps-0: .* before \(--servers 2\)",
        ):
            await cluster.train()
    three = msgspec.structs.replace(config, servers=3, epochs=epoch + 1)
    async with cluster_in(tmp_path, three, number=3) as cluster:
        result = await cluster.train()
    assert [each.epoch for each in result.epochs] == list(range(1, epoch + 2))


async def test_a_run_that_goes_on_keeps_its_checkpoints(tmp_path):
    store, folder = tmp_path / "store", tmp_path / "checkpoints"
    config = config_of()
    _, epoch = await stopped_at(store, config, 1, checkpoint=folder)
    config = msgspec.structs.replace(config, epochs=epoch + 1)
    async with cluster_in(store, config, number=2, checkpoint=folder) as cluster:
        await cluster.train()
    assert (folder / "latest").read_text() == f"checkpoint-{epoch + 1:04}-000015"


async def test_only_the_newest_run_stays_on_the_disks(tmp_path):
    config = config_of()
    _, epoch = await stopped_at(tmp_path, config, 1)
    config = msgspec.structs.replace(config, epochs=epoch + 1)
    async with cluster_in(tmp_path, config, number=2) as cluster:
        await cluster.train()
        disk = cluster.servers[0]._saved._disk
        await until(lambda: [store.id for store in disk] == [cluster.driver.map.run.id])


async def test_two_clusters_cannot_share_a_folder(tmp_path):
    async with cluster_in(tmp_path, config_of()):
        with pytest.raises(ConfigError, match="is in use by a running server"):
            async with cluster_in(tmp_path, config_of(), number=2):
                pass


# --- stores by name ------------------------------------------------------------------------------


ARRAYS = {"w": np.zeros((40, 3), np.float32), "b": np.zeros(5)}
RULES = {"w": Sgd(rate=1.0, momentum=0.5), "b": Adam(rate=0.1)}


def gradients(seed):
    dice = np.random.default_rng(seed)
    return {name: dice.standard_normal(array.shape).astype(array.dtype) for name, array in ARRAYS.items()}


async def pushed(store, seeds):
    for seed in seeds:
        await store.push(gradients(seed))
        await store.tick()
    return dict(await store.pull())


async def test_a_store_comes_back_by_its_name_with_the_state_of_its_rules(tmp_path):
    async with ParameterStore.open("local", ARRAYS, rule=RULES) as whole:
        expected = await pushed(whole, range(10))
    async with ParameterStore.open("local", ARRAYS, rule=RULES, name="mine", dir=tmp_path) as store:
        await pushed(store, range(5))
    async with ParameterStore.open("local", ARRAYS, rule=RULES, name="mine", dir=tmp_path) as store:
        values = await pushed(store, range(5, 10))
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array)


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
async def test_acknowledged_pushes_of_a_durable_store_come_back_without_a_round(
    consistency, tmp_path, monkeypatch
):
    """The disk gets one round of pieces, and all pushes after it as entries."""
    options = {"rule": RULES, "consistency": consistency, "replicas": 1}
    async with ParameterStore.open("local", ARRAYS, name="model", **options) as whole:
        expected = await pushed(whole, range(10))
    with monkeypatch.context() as without_rounds:
        slow = partial(parameter_server, flush_s=1e3)
        without_rounds.setattr("adam_async.store.opening.parameter_server", slow)
        without_rounds.setattr("adam_async.parameter_server.store_disk.StoreDisk._flush", nothing)
        async with ParameterStore.open(
            "local", ARRAYS, name="model", durable=True, dir=tmp_path, **options
        ) as store:
            await pushed(store, range(7))
    async with ParameterStore.open(
        "local", ARRAYS, name="model", durable=True, dir=tmp_path, **options
    ) as store:
        values = await pushed(store, range(7, 10))
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array)


async def nothing(_):
    """Write nothing at the end."""


async def test_a_store_comes_back_without_arrays(tmp_path):
    async with ParameterStore.open("local", ARRAYS, name="model", rule=RULES, dir=tmp_path) as store:
        expected = await pushed(store, range(3))
    async with ParameterStore.open("local", name="model", dir=tmp_path) as store:
        values = await store.pull()
        assert store.rules["w"] == RULES["w"]
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array)


async def test_create_new_gives_the_values_on_disk_up(tmp_path):
    for _ in range(2):
        async with ParameterStore.open(
            "local", ARRAYS, name="model", rule=RULES, create="new", dir=tmp_path
        ) as store:
            assert not (await store.pull())["w"].any()
            await pushed(store, range(3))


async def test_a_deleted_store_does_not_come_back(tmp_path):
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ParameterStore.open("local", ARRAYS, name="other", dir=tmp_path))
        store = await ParameterStore.open("local", ARRAYS, name="model", rule=RULES, dir=tmp_path)
        await pushed(store, range(3))
        await store.delete()
    async with ParameterStore.open("local", ARRAYS, name="model", rule=RULES, dir=tmp_path) as store:
        assert not (await store.pull())["w"].any()


async def test_a_store_with_other_arrays_is_refused_by_name(tmp_path):
    async with ParameterStore.open("local", ARRAYS, name="model", rule=RULES, dir=tmp_path) as store:
        await pushed(store, range(3))
    other = {**ARRAYS, "w": np.zeros((41, 3), np.float32)}
    with pytest.raises(StoreError, match=r"array 'w' is float32\(40, 3\) in store 'model'"):
        await ParameterStore.open("local", other, name="model", rule=RULES, dir=tmp_path)


async def test_a_folder_is_for_local_servers_only(tmp_path):
    with pytest.raises(ConfigError, match="adam-async ps --dir"):
        ParameterStore.open("tcp://127.0.0.1:1", ARRAYS, name="model", dir=tmp_path)
