"""A copied snapshot of all parameters, for evaluation and for saving."""

import asyncio
from typing import Any

from numpy.typing import NDArray

from adam_async.cluster_map import ClusterMap
from adam_async.model.network import Network
from adam_async.model_worker.pulls import Puller
from adam_async.model_worker.weights import WorkerWeights
from adam_async.parameter_server.client import ParameterClient
from adam_async.placement import ShardTable
from transport import BufferPool


async def pull_snapshot(
    network: Network, table: ShardTable, cluster: ClusterMap, client: ParameterClient
) -> dict[str, NDArray[Any]]:
    """Pull every tensor once. Each shard is one version; different shards may be of different moments.

    Cancelling it loses nothing.

    Raises:
        ShardUnavailable: A server did not answer in time.
    """
    weights = WorkerWeights()
    landed = asyncio.Event()
    puller = Puller(
        network=network,
        table=table,
        buckets=cluster.buckets,
        client=client,
        weights=weights,
        buffers=BufferPool(),
    )
    puller.pull(landed.set)
    await client.flush()
    await landed.wait()
    return {name: array.copy() for name, array in weights.snapshot().arrays.items()}
