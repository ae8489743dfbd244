"""Payloads equal the formulas: delta M N values, factors K (S M + N)."""

import pytest

from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from tests.adam_async.runs import NETWORKS, SHARDED, cluster_of

IMAGES, STEPS, ITEM = 6, 10, 4
FACTORABLE = {"fc1.weight": (256, 64), "fc2.weight": (64, 10)}
"""Inputs and outputs of the dense layers of `digits`."""


async def run(protocol, network, sharding):
    config = Config(
        epochs=1,
        threads=1,
        in_flight=1,
        images_per_group=IMAGES,
        protocol=protocol,
        rate=0.01,
        weights="copy",
        **sharding,
    )
    table = table_of(Network(digits()), shard_bytes=config.shard_bytes)
    async with cluster_of(config, NETWORKS[network]()) as cluster:
        result = await cluster.train()
        servers_of_tensor = {
            name: len({cluster.controller.map.buckets[shard.bucket] for shard in shards})
            for name, shards in table.by_tensor.items()
        }
    return result, servers_of_tensor


def sent(statistics, node, kind):
    rows = [row for row in statistics[node].traffic if row.type == kind]
    return sum(row.payload_bytes for row in rows), sum(row.messages for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sharding", [pytest.param({}, marks=pytest.mark.thorough), SHARDED], ids=["whole", "sharded"]
)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("protocol", ["delta", "factors", "auto"])
async def test_the_bytes_of_pushes_and_values_equal_the_formulas(protocol, network, sharding):
    result, servers = await run(protocol, network, sharding)
    expected = 0
    for parameter in Network(digits()).parameters:
        cost = parameter.size * ITEM
        if parameter.name in FACTORABLE:
            inputs, outputs = FACTORABLE[parameter.name]
            assert cost == inputs * outputs * ITEM
            factors = IMAGES * (servers[parameter.name] * inputs + outputs) * ITEM
            # In one process fewer bytes gain nothing.
            fewest = cost if network == "local" else min(cost, factors)
            cost = {"delta": cost, "factors": factors, "auto": fewest}[protocol]
        expected += cost
    statistics = result.statistics
    pushed, _ = sent(statistics, "worker-0", "Push")
    assert pushed == STEPS * expected
    if sharding:
        assert servers["fc1.weight"] > 1
    model = Network(digits()).num_parameters * ITEM
    values = sum(sent(statistics, node, kind)[0] for node in statistics for kind in ("Pushed", "Values"))
    # A pull to prepare, one at every step, and the driver's own for the evaluation.
    assert values == (STEPS + 2) * model


@pytest.mark.parametrize("network", NETWORKS)
async def test_the_report_of_protocols_states_both_costs_and_the_fewer_bytes_win_between_processes(network):
    result, servers = await run("auto", network, SHARDED)
    for choice in result.statistics["worker-0"].protocols:
        if choice.tensor not in FACTORABLE:
            assert (choice.factor_bytes, choice.chosen) == (None, "delta")
            continue
        inputs, outputs = FACTORABLE[choice.tensor]
        factors = IMAGES * (servers[choice.tensor] * inputs + outputs) * ITEM
        assert choice.delta_bytes == inputs * outputs * ITEM
        assert choice.factor_bytes == factors
        are_fewer = network != "local" and factors < choice.delta_bytes
        assert choice.chosen == ("factors" if are_fewer else "delta")
