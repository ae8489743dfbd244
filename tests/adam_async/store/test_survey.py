"""The stores of a cluster, as a member sees them while the primary of a bundle moves."""

from types import SimpleNamespace

import msgspec
import numpy as np

from adam_async.cluster.networks import cluster_network
from adam_async.run.config import Waits
from adam_async.run.store_record import bundle_key
from adam_async.runtime.clock import system_entropy
from adam_async.store.store import ParameterStore
from adam_async.store.survey import join
from tests.adam_async.store.servers import servers
from transport import BufferPool

ARRAYS = {"a": np.ones(8), "b": np.ones(8), "c": np.ones(8)}


def with_primary(cluster, home, *members):
    """The map with these members of a bundle in sync."""
    key = bundle_key("model", home)
    bundle = msgspec.structs.replace(cluster.bundles[key], in_sync=members)
    return msgspec.structs.replace(cluster, bundles={**cluster.bundles, key: bundle})


async def test_each_primary_is_asked_once_and_a_bundle_without_one_is_named():
    network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
    async with (
        servers(2) as where,
        ParameterStore.open(where, ARRAYS, name="model", shard_bytes=64) as store,
        join(network, where, "reader", Waits()) as survey,
    ):
        await store.push({name: np.ones(8) for name in ARRAYS})
        cluster, silent = survey._membership.map, []
        details = await survey.details("model", silent.append)
        assert (details.store.servers, silent) == (("ps-0", "ps-1"), [])
        assert {array.version for array in details.arrays} == {1}

        member = survey._membership
        first = ("ps-0", cluster.nodes["ps-0"].incarnation)
        survey._membership = SimpleNamespace(map=with_primary(cluster, "ps-1", first))
        details = await survey.details("model", silent.append)
        assert (details.store.servers, silent) == (("ps-0",), [])
        assert {array.version for array in details.arrays} == {1, None}

        survey._membership = SimpleNamespace(map=with_primary(cluster, "ps-1"))
        details = await survey.details("model", silent.append)
        assert details.store.servers == ("ps-0",)
        assert silent == ["bundle ps-1 has no primary now, so its counts are missing"]
        survey._membership = member
