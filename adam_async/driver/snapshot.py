"""A copied snapshot of all parameters, for evaluation and for saving."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient, SessionIdentity
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.shard_table import ShardTable, holders
from adam_async.run.step_model import RunModel
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from adam_async.worker.puller import Landing, Puller
from adam_async.worker.weights import WorkerWeights
from transport import BufferPool, Identity, Network


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSnapshot:
    """A copy of all parameters."""

    weights: dict[str, NDArray[Any]]
    """Values by tensor, each in its shape."""
    versions: tuple[int, ...]
    """Version of each shard, in the order of the table."""


def reading_client(
    cluster: ClusterMap,
    table: ShardTable,
    *,
    network: Network,
    identity: Identity,
    waits: Waits,
    traffic: Traffic,
) -> ParameterClient:
    """Make a client of the bundles of a run's store, for a driver; the client pushes nothing."""
    run = cluster.run
    assert run is not None, "a run has shards"
    session = SessionIdentity(
        store=run.id, session=0, incarnation=identity.incarnation, replica=-1, generation=cluster.generation
    )
    return ParameterClient(
        Endpoint(network, identity, traffic),
        session,
        homes=holders(table, cluster.buckets),
        cluster=cluster,
        waits=waits,
    )


async def follow_primaries(client: ParameterClient, changes: AsyncIterator[ClusterMap]) -> None:
    """Pass each cluster map to a client, until cancelled."""
    async for cluster in changes:
        client.map_changed(cluster)


@asynccontextmanager
async def running(
    client: ParameterClient, changes: AsyncIterator[ClusterMap], *, node: str
) -> AsyncIterator[None]:
    """Run a client, which follows the primaries, until the end of the block."""
    async with asyncio.TaskGroup() as group:
        works = (client.run(), follow_primaries(client, changes))
        tasks = [group.create_task(work, name=f"{node}/rescue") for work in works]
        yield
        for task in tasks:
            task.cancel()


async def pull_snapshot(
    network: RunModel, table: ShardTable, cluster: ClusterMap, client: ParameterClient, *, clock: int = 0
) -> ModelSnapshot:
    """Pull every tensor once. Each shard has one version; different shards may be from different moments.

    Cancellation loses nothing.

    Args:
        clock: Clock up to which the values contain all pushes of live replicas; frozen tensors have no
            pushes.

    Raises:
        ShardUnavailable: The primary of a bundle did not answer in time.
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
    landing = Landing(puller, [layout for _, _, layout in questions], len(questions), landed.set)
    for number, (bound, server, _) in enumerate(questions):
        puller.ask(landing, server, number, clock=bound)
    await client.flush()
    await landed.wait()
    copies = weights.snapshot().copies
    return ModelSnapshot(
        weights={name: copy.array.copy() for name, copy in copies.items()},
        versions=tuple(version for name in table.by_tensor for version in copies[name].versions),
    )
