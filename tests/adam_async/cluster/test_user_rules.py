"""Whole runs with a rule of the user: in one process and several, recorded, resumed, and refused by name."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.cluster.local import LocalCluster
from adam_async.cluster.networks import cluster_network
from adam_async.cluster.processes import ProcessCluster
from adam_async.driver.replay.decode import read_recording
from adam_async.driver.replay.run import Replay
from adam_async.errors import AdamError, ConfigError
from adam_async.run.config import Config
from adam_async.run.user_rules import RuleSource, allow_rules, with_rule
from adam_async.runtime.clock import system_entropy
from adam_async.store.store import ParameterStore
from tests.adam_async.rules import Means
from tests.adam_async.runs import NETWORKS, SHARDED, cluster_of, tiny_dataset, train
from transport import BufferPool, TransportError

MEANS = "tests.adam_async.rules:Means"


def config_of(**options):
    return Config(**{"epochs": 2, "threads": 1, "rule": MEANS, "rate": 0.05, "kernels": "numpy", **options})


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2},
        {"replicas": 2, "consistency": "bsp"},
        {"servers": 3, "copies": 3, "in_flight": 1},
        {"scale_by_staleness": True},
    ],
    ids=["asp", "bsp", "copies", "scaled"],
)
async def test_a_run_learns_with_a_rule_of_the_user_in_every_mode(network, options):
    args = '{"share": 0.5, "first": 0.0}'
    config = config_of(epochs=6, rate=0.02, rule_args=args, **SHARDED | options)
    result = await train(config, NETWORKS[network]())
    assert len(result.epochs) == 6
    assert result.epochs[-1].train_loss < result.epochs[0].train_loss


async def test_a_run_in_bsp_has_the_same_bits_in_processes() -> None:
    config = config_of(replicas=2, consistency="bsp", epochs=1, data="digits", images_per_group=240)
    async with LocalCluster(config) as cluster:
        local = await cluster.train()
    async with ProcessCluster(msgspec.structs.replace(config, processes=True)) as processes:
        result = await processes.train()
    for name, values in local.weights.items():
        np.testing.assert_array_equal(result.weights[name], values)


@pytest.mark.parametrize("options", [{}, {"servers": 2, "copies": 2}], ids=["one copy", "copies"])
async def test_a_record_replays_to_the_last_bit_if_the_rule_is_allowed(options):
    result = await train(config_of(record=True, **options))
    recording = read_recording(result.record, origin="it")
    with pytest.raises(ConfigError, match=rf"does not allow rule {MEANS}"):
        Replay(recording, tiny_dataset())
    replay = Replay(recording, tiny_dataset(), rules=allow_rules([MEANS]))
    for epoch in replay.header.epochs:
        for _ in replay.steps(epoch):
            pass
    for _ in replay.steps():
        pass
    replay.check()


async def test_a_checkpoint_keeps_the_state_and_goes_on_with_the_same_rule_and_file_only(tmp_path: Path):
    options = {"in_flight": 1, "schedule": "constant"}
    whole = await train(config_of(epochs=3, **options))
    await train(config_of(epochs=2, **options), checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=rf"applies rule {MEANS}: if you trust it, give --rule {MEANS}"):
        await train(Config(epochs=3), resume=tmp_path)
    with pytest.raises(CheckpointError, match="if you trust it, give --rule"):
        await train(config_of(epochs=3, rule_args='{"share": 0.5}', **options), resume=tmp_path)
    other = with_rule(config_of(epochs=3, **options))
    digest = RuleSource([Means])._allowed[MEANS][1]
    record = other.rule_record.replace(digest, "0" * 64)
    with pytest.raises(CheckpointError, match=r"\(file .*, and here is .* \(file 000000000000\): go on with"):
        await train(msgspec.structs.replace(other, rule_record=record), resume=tmp_path)
    resumed = await train(config_of(epochs=3, **options), resume=tmp_path)
    for name, values in whole.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], values)


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_server_that_does_not_allow_the_rule_fails_the_run_by_name(servers):
    config = config_of(servers=servers, waits={"prepare_s": 5.0})
    async with cluster_of(config) as cluster:
        cluster.servers[-1]._rules._allowed.clear()
        with pytest.raises((AdamError, TransportError), match=rf"does not allow rule {MEANS}"):
            await cluster.train()


async def test_the_servers_of_a_run_apply_further_rules_for_stores_of_clients():
    network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
    async with cluster_of(Config(), network, allow_rules=[MEANS]) as cluster:
        values = {"w": np.zeros(3)}
        address = cluster.controller.address
        async with ParameterStore.open(address, values, name="m", rule=Means(first=0.0)) as store:
            await asyncio.gather(*(store.push({"w": np.ones(3)}) for _ in range(3)))
            assert ((await store.pull())["w"] < 0).all()
