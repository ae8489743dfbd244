"""The memory of a run's server, mapped by a worker in another process of the host.

The worker trains there as in the server's process (`in_place_mode.py`). The worker notes each step before its
first write and after the last (`StepNotes`), in memory that the server reads once this process has ended. A
separate link is the right to write: the server kills this process if the link ends before the worker has left
in order. On this link the server asks the worker to keep the values still.
"""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from numpy.typing import NDArray

from adam_async.errors import RunFailed
from adam_async.messages import KeepStill, MapShards, Settled, ShardsMapped, UnmapShards, pack, unpack
from adam_async.model.rules import rule_of
from adam_async.parameter_server.storage import ShardStorage, StepNotes, storage_bytes
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config, Waits
from adam_async.run.run_copies import primary_of
from adam_async.run.store_record import StoreRecord, joined_arrays
from adam_async.runtime.channel import Endpoint, StackedTaskGroup
from adam_async.worker.in_place_mode import STEPS, groups_in_flight, groups_of_a_job
from transport import Link, ProtocolError, Region, Request, TransportError

_CURE = "run it with weights=copy"


class _Stills:
    """Keeps the values still for the server, whenever it asks."""

    def __init__(self, link: Link, storage: ShardStorage) -> None:
        self._storage = storage
        self._asked: asyncio.Queue[tuple[Request, asyncio.Event]] = asyncio.Queue()
        self._moves = asyncio.Event()
        """Event of the end of the newest wish."""
        link.serve(self._on_request, receives=False)

    def _on_request(self, request: Request) -> None:
        try:
            body = unpack(request.message, KeepStill)
        except ProtocolError as error:
            request.fail("malformed", str(error))
            return
        if body.is_still:
            self._moves = asyncio.Event()
            self._asked.put_nowait((request, self._moves))
        else:
            self._moves.set()
            request.reply(pack(Settled()))

    async def run(self) -> None:
        """Answer the server until cancelled."""
        while True:
            request, moves = await self._asked.get()
            async with self._storage.still():
                request.reply(pack(Settled()))
                await moves.wait()


async def _watch(link: Link, grace_s: float) -> None:
    """Wait for the loss of the link.

    Raises:
        RunFailed: The link has ended, and after `grace_s` the worker still trains.
    """
    await link.wait_closed()
    await asyncio.sleep(grace_s)
    raise RunFailed(f"{link.peer.node}, in whose memory this worker trains, has gone")


@asynccontextmanager
async def mapped_memory(
    endpoint: Endpoint,
    cluster: ClusterMap,
    config: Config,
    *,
    replica: int,
    session: int,
    threads: int,
    in_flight: int,
    waits: Waits,
) -> AsyncIterator[ShardStorage]:
    """Map the memory of a run's server for a block; when it ends, no thread may write there any more.

    Args:
        session: Id of the worker's push session.
        in_flight: Number of groups in flight; 0 means as many as keep the threads busy.

    Raises:
        RunFailed: The memory cannot be mapped from here; the error has the reason and the cure.
    """
    gc.collect()  # see `StoragePool.provide`
    store, node = cluster.run_store, endpoint.identity.node
    assert store is not None
    groups = groups_of_a_job(config.images_per_group)
    in_flight = in_flight or config.in_flight or groups_in_flight(threads, config.images_per_group)
    # More than the unanswered reports, and the groups in flight of a thread that had few in each job.
    jobs = 16 * STEPS + 2 * -(-in_flight // threads)
    async with endpoint.connected(_server_of(cluster, store), timeout_s=waits.dial_s) as link:
        if not link.shares:
            raise RunFailed(
                f"{node} trains in place (weights=aliased) on the memory of "
                f"{link.peer.node}, and their link has no shared memory: {_CURE}"
            )
        try:
            try:
                notes = Region.allocate(StepNotes.nbytes(threads, jobs, groups))
                asked = MapShards(
                    store=store.id,
                    generation=store.generation,
                    session=session,
                    incarnation=cluster.replica_generation(replica),
                    replica=replica,
                    threads=threads,
                    notes=link.hand_over(notes),
                    jobs=jobs,
                    groups=groups,
                )
                # Not `call_s`: the answer waits for a reading in progress.
                answer = unpack(await link.call(pack(asked), timeout_s=waits.prepare_s), ShardsMapped)
                storage = _storage_in(link.region(answer.region, is_common=True), cluster, config)
                storage.notes.extend(StepNotes.of_worker(notes, threads, jobs, groups))
            except (TransportError, OSError, ValueError) as error:
                text = f"{node} cannot map the memory of {link.peer.node}: {error}; {_CURE}"
                raise RunFailed(text) from None
            stills = _Stills(link, storage)
            async with StackedTaskGroup() as group:
                # Until no thread is left: a gate that opens earlier would let them write for a reader.
                work = {"stills": stills.run(), "memory": _watch(link, waits.grace_s)}
                tasks = [group.create_task(each, name=f"{node}/{name}") for name, each in work.items()]
                yield storage
                for task in tasks:
                    task.cancel()
        finally:
            # Even without the memory: otherwise a server that has answered would end this process.
            with suppress(TransportError):  # the server has gone, or ends this process
                await link.call(pack(UnmapShards(store=store.id)), timeout_s=waits.call_s)


def _storage_in(region: NDArray[Any], cluster: ClusterMap, config: Config) -> ShardStorage:
    """Return the storage of the run in a region of the server.

    Raises:
        ValueError: The region has another size.
    """
    store, rule = cluster.run_store, rule_of(config)
    assert store is not None
    name = next(name for name, record in cluster.stores.items() if record.id == store.id)
    arrays = joined_arrays(name, store, cluster.arrays)
    dtype, size = arrays[0].dtype, storage_bytes(arrays, rule, arrays[0].dtype)
    if region.nbytes != size:
        raise ValueError(f"it has {region.nbytes} bytes, and the arrays and the rule of the run take {size}")
    return ShardStorage(arrays, rule, dtype, in_place=True, region=region, is_new=False)


def _server_of(cluster: ClusterMap, store: StoreRecord) -> str:
    """Return the address of the server with all shards of a run.

    Raises:
        RunFailed: There are several servers.
    """
    homes = sorted(set(store.buckets))
    primary = primary_of(cluster, store.id, homes[0])
    if len(homes) > 1 or primary is None:
        raise RunFailed(
            f"run {store.program} trains in place (weights=aliased) on the memory of one server, and its "
            f"shards are on {', '.join(homes)}: give --servers 1, or {_CURE}"
        )
    return primary.address
