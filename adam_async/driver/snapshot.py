"""A copied snapshot of all parameters, for evaluation and for saving."""

import asyncio
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from adam_async.model.network import Network
from adam_async.parameter_server.client import ParameterClient
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.shard_table import ShardTable
from adam_async.worker.puller import Landing, Puller
from adam_async.worker.weights import WorkerWeights
from transport import BufferPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSnapshot:
    """A copy of all parameters."""

    weights: dict[str, NDArray[Any]]
    """By tensor, in its shape."""
    versions: tuple[int, ...]
    """Version of each shard, in the order of the table."""


async def pull_snapshot(
    network: Network, table: ShardTable, cluster: ClusterMap, client: ParameterClient, *, clock: int = 0
) -> ModelSnapshot:
    """Pull every tensor once. Each shard is one version; different shards may be of different moments.

    Cancelling it loses nothing.

    Args:
        network: The model.
        table: Its shards.
        cluster: Where they are.
        client: How to reach them.
        clock: Wait for values in which all pushes of live replicas up to this clock are; those of frozen
            tensors are as they are.

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
    frozen = [shard for shard in table.shards if shard.tensor in network.frozen]
    trained = [shard for shard in table.shards if shard.tensor not in network.frozen]
    questions = [(0, *question) for question in puller.questions(frozen)]
    questions += [(clock, *question) for question in puller.questions(trained)]
    landing = Landing(puller, len(questions), landed.set)
    for bound, server, shards in questions:
        puller.ask(landing, server, shards, clock=bound)
    await client.flush()
    await landed.wait()
    copies = weights.snapshot().copies
    return ModelSnapshot(
        weights={name: copy.array.copy() for name, copy in copies.items()},
        versions=tuple(version for name in table.by_tensor for version in copies[name].versions),
    )
