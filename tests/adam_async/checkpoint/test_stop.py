"""A run with checkpoints stops with one of that moment, and a resumed run continues there."""

import asyncio

import pytest

from adam_async.checkpoint.files import load_checkpoint
from adam_async.driver.role_counts import RoleCounts
from adam_async.run.config import Config
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.test_resume import MODES, config_of, same_bits
from tests.adam_async.runs import SHARDED, cluster_of, train, until

pytestmark = pytest.mark.thorough

GROUPS = 60
"""Groups of an epoch, one of each image of the small data set."""

STOPPED = {name: options for name, options in MODES.items() if name != "bsp-lag"}
"""Modes in which a stop changes no bit. With a lag a stop lets the values catch up."""


def small_groups(**options) -> Config:
    """Options with many groups, of which few are in flight."""
    return config_of(images_per_group=1, read_ahead=1, **options)


async def stop_in(config, folder, epoch):
    """Train, and stop after the first groups of an epoch; return the checkpoint and the result."""
    async with cluster_of(config, checkpoint=folder) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        (server,) = cluster.data_servers

        def begun():
            counts = server.state.statistics()
            return counts.epoch == epoch and counts.finished > 0

        await until(begun)
        cluster.stop()
        result = await training
    async with Disk() as disk:
        return await load_checkpoint(folder, disk), result


@pytest.mark.parametrize("mode", STOPPED)
async def test_a_run_resumed_from_its_stop_has_the_bits_of_one_that_never_stopped(mode, tmp_path):
    config = small_groups(**MODES[mode])
    whole = await train(config)
    stopped, result = await stop_in(config, tmp_path, 2)
    resumed = await train(config, resume=tmp_path)

    assert stopped.manifest.epoch == 2
    assert 0 < stopped.manifest.groups < GROUPS
    assert result.epochs[-1].images == stopped.manifest.groups
    assert max([each.losses[2].images for each in stopped.states if each.losses]) == stopped.manifest.groups
    assert [epoch.images for epoch in resumed.epochs] == [GROUPS] * len(whole.epochs)
    same_bits(resumed.weights, whole.weights)


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 3},
        {"replicas": 2, "epoch_rule": "images"},
        {"replicas": 2, "consistency": "ssp:2"},
        {"replicas": 2, "consistency": "bsp", "lag": 1},
        {"partitions": 2, **SHARDED},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
async def test_a_stop_loses_no_trained_image_and_trains_none_twice(options, tmp_path):
    config = small_groups(epoch_fraction=1.0, **options)
    stopped, result = await stop_in(config, tmp_path, 1)
    resumed = await train(config, resume=tmp_path)

    assert (stopped.manifest.epoch, result.epochs[-1].images) == (1, stopped.manifest.groups)
    assert [epoch.images for epoch in resumed.epochs] == [GROUPS] * 3


async def test_a_stop_without_counts_of_the_data_server_keeps_its_checkpoint_and_the_weights(
    tmp_path, monkeypatch
):
    ask, asked = RoleCounts.dealer, []

    async def silent(counts, *, ranges=False, clock=0):
        if not ranges:  # the question after the last checkpoint was begun
            asked.append(counts)
            raise TimeoutError
        return await ask(counts, ranges=ranges, clock=clock)

    monkeypatch.setattr(RoleCounts, "dealer", silent)
    stopped, result = await stop_in(small_groups(**MODES["serial"]), tmp_path, 2)
    assert asked
    assert stopped.manifest.groups > 0
    assert result.weights
    assert [epoch.epoch for epoch in result.epochs] == [1]
