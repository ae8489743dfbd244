"""Runs in bsp that lose all processes at any moment have the bits of an undisturbed run."""

import asyncio
import random
import shutil
from contextlib import suppress

import msgspec
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.model.named import digits
from adam_async.run.config import Config
from tests.adam_async.runs import PATIENT, SHARDED, entropy_of, tiny_dataset, turns

pytestmark = pytest.mark.thorough

LOSSES = 4
"""Number of moments at which a run loses all its processes."""

LONG = 10_000
"""Epochs of a run that is lost, however late the first cut is on a slow disk."""


def config_of(**options):
    fixed = {"consistency": "bsp", "replicas": 2, "schedule": "constant", "kernels": "numpy", "threads": 1}
    tuned = {"rate": 0.05, "images_per_group": 4, "flush_s": 0.02, "waits": PATIENT}
    return Config(**{**fixed, **tuned, **options})


def cluster_in(folder, config, start):
    """The cluster of one start of a command; each start has identities of its own."""
    entropy = entropy_of(f"start {start}")
    return LocalCluster(config, entropy=entropy, store=folder, dataset=tiny_dataset(), spec=digits())


async def trained(folder, config, start):
    """Train to the end; return the values and rule state of all shards by number, and the epochs."""
    async with cluster_in(folder, config, start) as cluster:
        result = await cluster.train()
        shards = {
            int(shard.spec.id): (shard.values.tobytes(), *(a.tobytes() for a in shard.rule_state.values()))
            for server in cluster.servers
            for state in [served.state for served in server.served.values() if served.complete]
            for shard in state.shards.values()
        }
    events = [event["event"] for event in result.events]
    return shards, result, any("goes on from the disks of its servers" in event for event in events)


async def copied(folder, target):
    """Copy the folder as a loss of power leaves it; again if a server removes a file meanwhile."""
    while True:
        shutil.rmtree(target, ignore_errors=True)
        with suppress(OSError, shutil.Error):
            return shutil.copytree(folder, target)
        await turns()


async def lost_within(folder, target, config, start, dice):
    """Train, and copy the folder at a drawn clock after the store was whole on the disks.

    Returns the number of epochs that had ended.
    """
    long = msgspec.structs.replace(config, epochs=LONG)
    async with cluster_in(folder, long, start) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")

        def clock():
            states = [server.state for server in cluster.servers if server.state]
            return max([s.applied_clock() for each in states for s in each.shards.values()], default=0)

        def is_whole():
            disks = [disk for server in cluster.servers for disk in server._saved._disk]
            return disks and all(disk.is_complete and disk.cuts is not None for disk in disks)

        while not is_whole():
            await turns()
        until = clock() + dice.randrange(1, 9)
        while clock() < until:
            await turns()
        await copied(folder, target)
        ended = cluster.driver.map.ended
        training.cancel()
    return ended


SETUPS = {
    "several servers": SHARDED,
    "adam": {"rule": "adam", "rate": 0.001, **SHARDED},
    "several copies": {"controllers": 3, "servers": 3, "copies": 2, "shard_bytes": 16 << 10},
}


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_run_that_loses_all_processes_again_and_again_has_the_bits_of_an_undisturbed_one(
    setup, tmp_path
):
    config = config_of(**SETUPS[setup])
    dice, ended = random.Random(setup), 0
    for number in range(LOSSES):
        folders = tmp_path / f"store-{number}", tmp_path / f"store-{number + 1}"
        ended = await lost_within(*folders, config, number + 1, dice)
    config = msgspec.structs.replace(config, epochs=ended + 4)
    shards, again, goes_on = await trained(tmp_path / f"store-{LOSSES}", config, 99)
    assert goes_on
    undisturbed, result, _ = await trained(tmp_path / "undisturbed", config, 0)
    assert shards == undisturbed
    assert [each.images for each in again.epochs] == [each.images for each in result.epochs]
    assert [each.train_loss for each in again.epochs] == [each.train_loss for each in result.epochs]


async def test_a_run_has_the_same_bits_on_another_number_of_servers(tmp_path):
    config = config_of(**SHARDED)
    ended = await lost_within(tmp_path / "a", tmp_path / "b", config, 1, random.Random("servers"))
    config = msgspec.structs.replace(config, epochs=ended + 4)
    undisturbed, _, _ = await trained(tmp_path / "undisturbed", config, 0)
    shards, _, goes_on = await trained(tmp_path / "b", msgspec.structs.replace(config, servers=4), 99)
    assert goes_on
    assert shards == undisturbed
