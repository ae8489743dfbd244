"""Stopped and resumed runs: same bits in synchronous runs, and any number of roles in every mode."""

import asyncio
import errno
import logging
import os
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint import writer
from adam_async.checkpoint.checkpoint import CheckpointError, resumed_options
from adam_async.checkpoint.files import CheckpointFolder, load_checkpoint
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.errors import DeadlineExceeded, RunFailed
from adam_async.model.named import mlp
from adam_async.parameter_server import kept_shards, piece_states
from adam_async.report.report import _totals
from adam_async.run.config import Config, Waits
from adam_async.run.counts import ServerCounts
from adam_async.run.option_sources import make_config
from adam_async.run.training_program import read_training
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import FILES, checkpoint_of, written
from tests.adam_async.cluster.test_elastic import IMAGES, elastic, joiner
from tests.adam_async.cluster.test_elastic import MODES as ELASTIC
from tests.adam_async.runs import (
    NETWORKS,
    SHARDED,
    TALLIED,
    TALLIED_IMAGES,
    TALLY_LAYERS,
    TALLY_OPTIONS,
    cluster_of,
    tallied_dataset,
    tally_of,
    tiny_dataset,
    train,
    turns,
    until,
)

pytestmark = pytest.mark.thorough


def config_of(**options):
    return Config(**{"epochs": 3, "threads": 1, "rate": 0.05, "images_per_group": 4, **options})


async def newest(path):
    async with Disk() as disk:
        return await load_checkpoint(path, disk)


def latest(path):
    """Epoch and groups of the newest checkpoint; nothing before there is one."""
    file = path / "latest"
    return tuple(map(int, file.read_text().split("-")[1:])) if file.exists() else (0, 0)


async def stopped_from(config, path, place, **options):
    """Train until there is a checkpoint at this place or later, then end at once, as Ctrl-C does."""
    async with cluster_of(config, checkpoint=path, **options) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(lambda: latest(path) >= place or training.done())
        assert not training.done(), "it was over before the checkpoint was seen"
        training.cancel()
    return await newest(path)


def same_bits(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(other[name], values, err_msg=name)


MODES = {
    "bsp": {"consistency": "bsp", "replicas": 2},
    "bsp-lag": {"consistency": "bsp", "replicas": 2, "lag": 1},
    "bsp-steps": {"consistency": "bsp", "replicas": 2, "push_every": 2, **SHARDED},
    "bsp-momentum": {"consistency": "bsp", "replicas": 2, "momentum": 0.9, "rate": 0.01},
    "bsp-adagrad": {"consistency": "bsp", "replicas": 3, "rule": "adagrad", "rate": 0.01, **SHARDED},
    "bsp-adam": {"consistency": "bsp", "replicas": 2, "rule": "adam", "rate": 0.001},
    "bsp-warm": {"consistency": "bsp", "replicas": 2, "warm_start": 5},
    "bsp-constant": {"consistency": "bsp", "replicas": 2, "schedule": "constant"},
    "bsp-rate-left-open": {"consistency": "bsp", "replicas": 2, "rate": 0.0},
    "bsp-epochs-left-open": {"consistency": "bsp", "replicas": 2, "epochs": 0},
    "bsp-vertical": {"consistency": "bsp", "partitions": 2, **SHARDED},
    "bsp-layers": {"consistency": "bsp", "replicas": 2, "partitions": 3, "plan": "layers"},
    "bsp-augment": {"consistency": "bsp", "augment": True},
    "serial": {"in_flight": 1, "weights": "copy"},
    "serial-in-place": {"in_flight": 1, "rule": "adam", "rate": 0.001},
}


LONG = {"bsp-epochs-left-open"}
"""Modes that train a hundred epochs, for the slow tier."""


def modes(names, *, slow):
    """Parameters of modes, some of them for the slow tier."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


async def test_a_run_on_copies_that_sent_sums_may_go_on_in_place(tmp_path):
    found = await stopped_from(config_of(weights="copy"), tmp_path, (1, 15))
    assert read_training(found.record.program).config.protocol == "delta"
    in_place = make_config(resumed_options(found.manifest), {"weights": "aliased"})
    assert (await train(in_place, resume=tmp_path)).epochs[-1].epoch == 3


@pytest.mark.parametrize("mode", modes(MODES, slow=LONG))
async def test_a_run_resumed_at_the_end_of_an_epoch_has_the_bits_of_one_that_never_stopped(mode, tmp_path):
    config = config_of(**MODES[mode])
    whole = await train(config)
    found = await stopped_from(config, tmp_path, (1, 15))
    assert found.manifest.groups == 15
    resumed = await train(config, resume=tmp_path)
    same_bits(whole.weights, resumed.weights)
    assert resumed.epochs[0] == found.manifest.epochs[0]
    for ours, theirs in zip(resumed.epochs, whole.epochs, strict=True):
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-12)
        assert (ours.images, ours.test_accuracy) == (theirs.images, theirs.test_accuracy)


async def test_a_run_continues_an_older_checkpoint_by_its_name_with_the_same_bits(tmp_path):
    config = config_of(consistency="bsp", replicas=2, epochs=4, keep=3)
    async with cluster_of(config, checkpoint=tmp_path) as cluster:
        whole = await cluster.train()
    kept = [f"checkpoint-000{epoch}-000015" for epoch in (2, 3, 4)]
    assert sorted(file.name for file in tmp_path.glob("checkpoint-*")) == kept
    resumed = await train(config, resume=tmp_path / kept[0])
    same_bits(whole.weights, resumed.weights)
    assert [each.name for each in resumed.checkpoints] == kept[1:]
    assert sorted(file.name for file in tmp_path.glob("checkpoint-*")) == kept
    newer = ", ".join(kept[1:])
    assert events_of(resumed)[0] == (
        f"newer checkpoints in {tmp_path} ({newer}) are removed after the run's first checkpoint"
    )


EXACT = [mode for mode in MODES if mode.startswith("bsp") and mode != "bsp-lag"]
"""Modes with exact checkpoints within an epoch. With a lag a resumed run begins with newer values."""

MORE = 150
"""Training images of the runs with checkpoints within an epoch, each of which takes time to be written."""


ALIKE = {"bsp-momentum", "bsp-adagrad", "bsp-constant", "bsp-warm", "bsp-rate-left-open"}
"""Modes whose checkpoint within an epoch has no more state than that at its end, for the slow tier."""


@pytest.mark.parametrize("mode", modes(EXACT, slow=LONG | ALIKE))
async def test_a_run_resumed_within_an_epoch_has_the_bits_of_one_that_never_stopped(mode, tmp_path):
    config = config_of(**{"epochs": 2, "checkpoint_every": 10, "images_per_group": 1, **MODES[mode]})
    whole = await train(config, dataset=tiny_dataset(MORE))
    found = await stopped_from(config, tmp_path, (1, 1), dataset=tiny_dataset(MORE))
    assert found.manifest.epoch == 1
    assert found.manifest.groups < MORE
    resumed = await train(config, dataset=tiny_dataset(MORE), resume=tmp_path)
    same_bits(whole.weights, resumed.weights)
    assert {epoch.images for epoch in resumed.epochs} == {MORE}
    assert resumed.epochs[0].train_loss == whole.epochs[0].train_loss


async def test_an_exact_checkpoint_has_the_groups_of_whole_steps_and_no_other_updates(tmp_path):
    config = config_of(checkpoint_every=10, images_per_group=1, **MODES["bsp"])
    found = await stopped_from(config, tmp_path, (1, 1), dataset=tiny_dataset(MORE))
    clock = found.manifest.resume.clock
    for state in found.states:
        assert state.groups == {1: (0, 2 * clock)}
        assert state.losses[1].images == 2 * clock
        assert {state.version, *state.clocks.values()} == {clock}


async def test_a_reader_without_room_for_its_copies_slows_training_down_and_gets_the_exact_shards(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(kept_shards, "COPIES_BYTES", 1)
    monkeypatch.setattr(kept_shards, "ROUND_BYTES", 1)
    monkeypatch.setattr(piece_states, "PART_BYTES", 1)
    read = ShardCopies._read

    async def read_late(*args):
        await turns(20)
        return await read(*args)

    monkeypatch.setattr(ShardCopies, "_read", read_late)
    config = config_of(epochs=2, checkpoint_every=10, images_per_group=1, **MODES["bsp-steps"])
    whole = await train(config, dataset=tiny_dataset(MORE))
    found = await stopped_from(config, tmp_path, (1, 1), dataset=tiny_dataset(MORE))
    assert found.manifest.groups < MORE
    resumed = await train(config, dataset=tiny_dataset(MORE), resume=tmp_path)
    same_bits(whole.weights, resumed.weights)


async def test_a_checkpoint_keeps_the_epochs_and_the_schedule_that_its_run_decided(tmp_path):
    await train(config_of(epochs=0, rate=0.0), checkpoint=tmp_path)
    options = (await newest(tmp_path)).manifest.config
    assert (options["epochs"], options["schedule"], options["warm_up"]) == (100, "cosine", 0.1)
    assert options["rate"] == 0.0, "that depends on how many replicas there are"


ASYNCHRONOUS = {
    "in-place": {"threads": 2},
    "copy": {"weights": "copy", "replicas": 2},
    "steps": {"weights": "copy", "replicas": 2, "push_every": 2, "pull_every": 2},
    "ssp": {"consistency": "ssp:2", "replicas": 2},
    "ssp-adam": {"consistency": "ssp:0", "replicas": 3, "rule": "adam", "rate": 0.001, **SHARDED},
}


async def resumed_once(config, path, *, groups=60):
    """Resume a run of so many images per epoch; each shard has each group and its loss exactly once."""
    async with cluster_of(config, resume=path, dataset=tiny_dataset(groups)) as cluster:
        result = await cluster.train()
        for shard in [shard for server in cluster.servers for shard in server.state.shards.values()]:
            assert shard.tables.groups == dict.fromkeys(range(1, config.epochs + 1), (0, groups))
            assert {losses.images for losses in shard.tables.losses.values()} == {groups}
            if config.push_every == 1 and config.weights == "copy" and not config.synchronous:
                assert shard.version + shard.tables.refused == groups * config.epochs
    assert [epoch.images for epoch in result.epochs] == [groups] * config.epochs
    assert np.isfinite([epoch.train_loss for epoch in result.epochs]).all()
    return result


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
async def test_a_run_killed_within_an_epoch_and_resumed_has_every_group_once_on_every_shard(mode, tmp_path):
    config = config_of(checkpoint_every=10, images_per_group=1, **ASYNCHRONOUS[mode])
    found = await stopped_from(config, tmp_path, (2, 1))
    for state in found.states:
        ranges = state.groups[2]
        counted = 60 + sum(stop - start for start, stop in zip(ranges[::2], ranges[1::2], strict=True))
        # One version for each push of up to so many groups.
        assert state.version >= counted / config.push_every
        assert config.push_every > 1 or config.weights != "copy" or state.version == counted
    resumed = await resumed_once(config, tmp_path)
    assert resumed.epochs[0] == found.manifest.epochs[0]


@pytest.mark.parametrize("servers", [1, 2])
async def test_in_place_each_image_counts_once_in_a_checkpoint_and_in_the_run_that_resumes_it(
    servers, tmp_path
):
    config = config_of(
        **TALLY_OPTIONS, epochs=2, threads=2, checkpoint_every=10, keep=9, servers=servers, shard_bytes=256
    )
    inputs = {"spec": TALLIED, "layers": TALLY_LAYERS, "dataset": tallied_dataset()}
    async with cluster_of(config, checkpoint=tmp_path, **inputs) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(lambda: 0 < latest(tmp_path)[1] < TALLIED_IMAGES or training.done())
        path = tmp_path / (tmp_path / "latest").read_text().strip()
        training.cancel()
    found = await newest(path)
    assert 0 < found.manifest.groups < TALLIED_IMAGES
    (tally,) = {state.groups[found.manifest.epoch] for state in found.states if state.groups}
    trained = (found.manifest.epoch - 1) * TALLIED_IMAGES + sum(tally[1::2]) - sum(tally[::2])
    assert sum(tally_of(found.weights)) == trained
    resumed = await train(config, resume=path, **inputs)
    assert tally_of(resumed.weights) == [2] * TALLIED_IMAGES


@pytest.mark.parametrize("mode", ["copy", "steps", "ssp"])
async def test_shards_that_were_read_at_different_times_get_the_groups_that_each_lacks(
    mode, tmp_path, monkeypatch
):
    monkeypatch.setattr(piece_states, "PART_BYTES", 1)
    read = ShardCopies._read

    groups = 8 * MORE
    seen: list[dict[int, tuple[int, ...]]] = []

    async def read_apart(*args):
        """Read a shard again until it has other groups than the one before, or the epoch is over."""
        numbers, bundle = args[4:6]
        while True:
            await read(*args)
            found = bundle.shards[numbers[0]].tables.groups
            if not found or found not in seen[-1:] or found.get(1) == (0, groups):
                break
        seen.append(dict(found))

    monkeypatch.setattr(ShardCopies, "_read", read_apart)
    options = {"epochs": 2, "checkpoint_every": 10, "images_per_group": 1, **SHARDED, **ASYNCHRONOUS[mode]}
    found = await stopped_from(config_of(**options), tmp_path, (1, 1), dataset=tiny_dataset(groups))
    assert found.manifest.groups < groups
    assert len({tuple(state.groups.items()) for state in found.states}) > 1
    await resumed_once(config_of(**{**options, "servers": 2}), tmp_path, groups=groups)


def servers_of(result):
    return [each for each in result.statistics.values() if isinstance(each, ServerCounts)]


OTHERS = {
    "more-replicas": {"replicas": 4, "epoch_fraction": 1.0},
    "one-replica": {"replicas": 1},
    "more-servers": {"servers": 5},
    "one-server": {"servers": 1},
    "copy-instead-of-in-place": {"weights": "copy", "servers": 2},
}


@pytest.mark.parametrize(
    "consistency", ["bsp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("asp", "ssp:1"))]
)
@pytest.mark.parametrize("change", OTHERS)
async def test_a_run_is_resumed_by_other_numbers_of_roles(change, consistency, tmp_path):
    config = config_of(
        consistency=consistency,
        checkpoint_every=10,
        images_per_group=1,
        replicas=2,
        rule="adam",
        rate=0.001,
        **SHARDED,
    )
    found = await stopped_from(config, tmp_path, (2, 1))
    other = msgspec.structs.replace(config, **OTHERS[change])
    resumed = await resumed_once(other, tmp_path)
    assert len(servers_of(resumed)) == other.servers
    again = await newest(tmp_path)
    assert (again.manifest.epoch, again.manifest.groups) == (3, 60)
    assert again.manifest.run != found.manifest.run
    same_bits(resumed.weights, again.weights)


@pytest.mark.parametrize("network", NETWORKS)
async def test_loaded_shards_equal_the_read_ones_with_rule_state_versions_and_clocks(network, tmp_path):
    config = config_of(rule="adam", rate=0.001, weights="copy", replicas=2, **SHARDED)
    found = await stopped_from(config, tmp_path, (1, 15))
    async with cluster_of(config, NETWORKS[network](), resume=tmp_path) as cluster:
        async with asyncio.TaskGroup() as group:
            training = group.create_task(cluster.train(), name="train")
            # In this iteration of the loop no worker can know that training begins.
            await until(lambda: all(server.state is not None for server in cluster.servers))
            shards = {n: shard for server in cluster.servers for n, shard in server.state.shards.items()}
            for state in found.states:
                shard = shards[state.shard]
                part = slice(shard.spec.start, shard.spec.stop)
                values = found.weights[shard.spec.tensor].reshape(-1)[part]
                np.testing.assert_array_equal(shard.values, values)
                for name in ("mean", "square"):
                    array = found.state[f"{name}/{shard.spec.tensor}"].reshape(-1)[part]
                    np.testing.assert_array_equal(shard.rule_state[name], array)
                assert shard.rule_state["steps"][0] == shard.version == state.version
            training.cancel()
    assert sum(state.version for state in found.states) == 15 * len(found.states)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asp", "ssp", "bsp", "bsp-lag"])
async def test_checkpoints_are_taken_while_replicas_come_and_go(mode, tmp_path):
    cluster = elastic(epochs=4, checkpoint_every=6, replicas=2, checkpoint=tmp_path, **ELASTIC[mode])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(lambda: latest(tmp_path) >= (1, 6))
        async with joiner(cluster, "worker-9"):
            while latest(tmp_path) < (2, 12):
                await turns()
        await until(lambda: latest(tmp_path) >= (3, 12) or training.done())
        assert not training.done()
        training.cancel()
    found = await newest(tmp_path)
    config = msgspec.structs.replace(cluster.config, replicas=3, epochs=4)
    resumed = await train(config, dataset=tiny_dataset(train=IMAGES), resume=tmp_path)
    assert [epoch.images for epoch in resumed.epochs] == [IMAGES] * 4
    assert resumed.epochs[:2] == found.manifest.epochs[:2]


# --- errors ----------------------------------------------------------------------------------


class PoorDisk(CheckpointFolder):
    """A folder on a disk that takes some checkpoints and then fails, or never answers."""

    def __init__(self, folder, good, *, hangs=False, number=errno.ENOSPC) -> None:
        super().__init__(folder.path, folder._disk)
        self.good, self.hangs, self.number = good, hangs, number

    async def write(self, checkpoint, *, keep):
        self.good -= 1
        if self.good >= 0:
            return await super().write(checkpoint, keep=keep)
        if self.hangs:
            await asyncio.Event().wait()
        raise OSError(self.number, os.strerror(self.number))


def spoil_disk(cluster, writes, **options):
    """Give the driver of a cluster a disk with room for a number of checkpoints."""
    inputs = cluster.driver._inputs
    folder = PoorDisk(inputs.checkpoints, writes, **options)
    cluster.driver._inputs = replace(inputs, checkpoints=folder)


def events_of(result):
    return [event["event"] for event in result.events]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_or_quota_costs_checkpoints_and_not_the_run(number, tmp_path):
    config = config_of()
    async with cluster_of(config, checkpoint=tmp_path) as cluster:
        spoil_disk(cluster, 1, number=number)
        result = await cluster.train()
    assert len(result.epochs) == 3
    assert [each.name for each in result.checkpoints] == ["checkpoint-0001-000015"]
    assert sorted(events_of(result)) == [
        *(
            f"a checkpoint could not be written: {os.strerror(number)}; training goes on without it{often}"
            for often in ("", ", 2 failed in a row")
        )
    ]
    assert (await newest(tmp_path)).manifest.epoch == 1


async def test_checkpoints_that_fail_in_a_row_are_logged_and_end_the_run_by_name(tmp_path, caplog):
    config = config_of(epochs=6, checkpoint_misses=2)
    with pytest.raises(RunFailed) as failure:
        async with cluster_of(config, checkpoint=tmp_path) as cluster:
            spoil_disk(cluster, 1)
            await cluster.train()
    why = "could not be written: No space left on device"
    assert str(failure.value) == (
        f"2 checkpoints in a row failed, the last one: a checkpoint {why}; "
        "the newest: checkpoint-0001-000015; with --checkpoint-misses 0 a run goes on without checkpoints"
    )
    news = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(news) == [f"a checkpoint {why}; training goes on without it"]


async def test_a_run_may_train_on_without_checkpoints(tmp_path):
    config = config_of(epochs=5, checkpoint_misses=0)
    async with cluster_of(config, checkpoint=tmp_path) as cluster:
        spoil_disk(cluster, 1)
        result = await cluster.train()
        assert cluster.driver.progress.checkpoint == "checkpoint-0001-000015"
    assert len(result.epochs) == 5
    assert _totals(result).checkpoint_age_epochs == 4


@pytest.mark.parametrize("most_bytes", [1, 1 << 30])
async def test_a_disk_that_does_not_answer_is_waited_for_by_name_and_then_given_up(
    tmp_path, monkeypatch, most_bytes
):
    monkeypatch.setattr(writer, "MOST_BYTES", most_bytes)  # the reading waits, or the next checkpoint
    config = config_of(epochs=2, **SHARDED, waits=Waits(checkpoint_s=0.05))
    async with cluster_of(config, checkpoint=tmp_path) as cluster:
        spoil_disk(cluster, 0, hangs=True)
        result = await cluster.train()
    assert len(result.epochs) == 2
    write = "a checkpoint was not written within 0.05 s and is given up; training goes on without it"
    assert sorted(events_of(result)) == [write, f"{write}, 2 failed in a row"]


async def test_a_disk_that_does_not_answer_at_the_beginning_is_named(tmp_path):
    config = config_of(waits=Waits(checkpoint_s=0.05))
    async with cluster_of(config, checkpoint=tmp_path) as cluster:
        answered = threading.Event()
        disk = cluster.driver._inputs.checkpoints._disk
        async with asyncio.TaskGroup() as group:
            group.create_task(disk.run(answered.wait), name="hung disk")
            with pytest.raises(
                DeadlineExceeded, match=rf"waited 0.05 s for the disk to make {tmp_path} ready"
            ):
                await cluster.driver.train()
            answered.set()


async def test_a_checkpoint_that_is_damaged_after_its_choice_is_named_and_nothing_trains(tmp_path):
    await stopped_from(config_of(**SHARDED), tmp_path, (1, 15))
    async with cluster_of(config_of(**SHARDED), resume=tmp_path) as cluster:
        (path,) = tmp_path.glob("checkpoint-*/states-00000001.segment")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{path} is damaged at byte \d+"):
            await cluster.train()
        assert cluster.driver.map.epoch is None
        assert cluster.driver.map.run.over


async def test_a_damaged_checkpoint_is_noted_and_the_one_before_is_resumed(tmp_path):
    config = config_of()
    await stopped_from(config, tmp_path, (2, 15))
    damaged = tmp_path / "checkpoint-0002-000015" / FILES[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    resumed = await train(config, resume=tmp_path)
    assert [epoch.images for epoch in resumed.epochs] == [60, 60, 60]
    first, second, third = events_of(resumed)[:3]
    assert first.startswith(f"an older checkpoint is resumed: {damaged} is damaged: it has ")
    assert second.endswith("(checkpoint-0002-000015) are removed after the run's first checkpoint")
    assert third == "resumed from checkpoint-0001-000015"
    assert (await newest(tmp_path)).problems == ()


async def test_events_name_a_newer_checkpoint_of_another_run_and_its_new_name(tmp_path):
    config, path = config_of(epochs=2), tmp_path / "own"
    await train(msgspec.structs.replace(config, epochs=1), checkpoint=path)
    other = "checkpoint-0002-000015"
    async with Disk() as disk:
        await (await written(disk, tmp_path / "other")).write(checkpoint_of(15, run="another"))
    (tmp_path / "other" / other).rename(path / other)
    events = events_of(await train(config, resume=path))
    assert events[0] == f"newer checkpoints in {path} ({other}) are of another run or damaged, and stay"
    assert f"a {other} of another run or damaged is renamed to {other}.kept" in events


async def test_other_data_and_another_model_are_refused(tmp_path):
    config = config_of()
    await train(msgspec.structs.replace(config, epochs=1), checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="data whose train_images is 60, but here it is 50"):
        await train(config, dataset=tiny_dataset(50), resume=tmp_path)
    with pytest.raises(CheckpointError, match="leave the model out"):
        await train(config, spec=mlp(), resume=tmp_path)
    with pytest.raises(CheckpointError, match=r"these differ: images_per_group=5 \(there 4\)"):
        await train(msgspec.structs.replace(config, images_per_group=5), resume=tmp_path)


async def test_checkpoints_of_another_run_are_not_overwritten(tmp_path):
    config = config_of(epochs=1)
    async with cluster_of(config, checkpoint=tmp_path) as cluster:
        await cluster.train()
        with pytest.raises(CheckpointError, match=f"continue that one with --resume {tmp_path}"):
            await cluster.train()
    before = await newest(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoints of another run"):
        await train(config, checkpoint=tmp_path)
    assert (await newest(tmp_path)).manifest == before.manifest


async def test_a_resumed_run_may_write_elsewhere(tmp_path):
    config = config_of(epochs=1)
    await train(config, checkpoint=tmp_path / "old")
    before = await newest(tmp_path / "old")
    more = msgspec.structs.replace(config, epochs=2)
    await train(more, checkpoint=tmp_path / "new", resume=tmp_path / "old")
    assert (await newest(tmp_path / "old")).manifest == before.manifest
    assert (await newest(tmp_path / "new")).manifest.epoch == 2


async def test_a_run_that_is_over_is_not_resumed_without_more_epochs(tmp_path):
    config = config_of(epochs=1)
    await train(config, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="to train on, give --epochs 2 or more"):
        await train(config, resume=tmp_path)


async def test_evaluation_beside_training_leaves_no_time_for_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="evaluation=concurrent does not pause"):
        await train(config_of(evaluation="concurrent"), checkpoint=tmp_path)


async def test_without_a_folder_no_checkpoint_is_taken(tmp_path):
    result = await train(config_of(checkpoint_every=4))
    assert (len(result.epochs), result.checkpoints) == (3, ())


async def test_a_state_without_a_finite_loss_does_not_replace_one_that_has(tmp_path):
    config = config_of(epochs=2, rate=1e30, checkpoint_every=4, keep_going=True)
    async with cluster_of(config, checkpoint=tmp_path) as cluster:
        result = await cluster.train()
    assert not np.isfinite(result.epochs[-1].train_loss)
    assert not any(each.name == "checkpoint-0002-000015" for each in result.checkpoints)
    assert any("is not finite" in event for event in events_of(result))


async def test_a_cluster_that_cannot_resume_fails_before_it_starts(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path} can be read: train --checkpoint"):
        async with cluster_of(config_of(), resume=tmp_path):
            raise AssertionError("entered")


async def test_a_run_is_not_resumed_twice_and_the_next_one_needs_another_folder(tmp_path):
    config = config_of(epochs=1)
    await train(config, checkpoint=tmp_path)
    async with cluster_of(msgspec.structs.replace(config, epochs=2), resume=tmp_path) as cluster:
        await cluster.train()
        with pytest.raises(CheckpointError, match="checkpoints of another run"):
            await cluster.train()
