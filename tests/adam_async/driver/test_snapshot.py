"""A snapshot is a copy of everything, at the versions of the moment."""

import numpy as np
import pytest

from adam_async.driver.snapshot import pull_snapshot
from adam_async.model.keyed_random import Dice
from tests.adam_async.runs import NETWORKS, SHARDED, servers_of


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_snapshot_has_the_keyed_initial_values_then_the_pushed_ones(network, sharding):
    async with servers_of(NETWORKS[network](), seed=11, **sharding) as servers:
        client = servers.client()
        initial = servers.model.initial_weights(Dice(11))
        first = await pull_snapshot(servers.model, servers.table, servers.map, client.client)
        assert first.weights.keys() == initial.keys()
        assert first.versions == (0,) * len(servers.table.shards)
        for name, values in initial.items():
            assert first.weights[name].shape == values.shape
            np.testing.assert_array_equal(first.weights[name], values)
        client.push(0.25)
        second = await pull_snapshot(servers.model, servers.table, servers.map, client.client)
        assert second.versions == (1,) * len(servers.table.shards)
        for name, values in initial.items():
            # A copy: later steps do not change it.
            np.testing.assert_array_equal(first.weights[name], values)
            np.testing.assert_array_equal(second.weights[name], values - np.float32(0.25))
