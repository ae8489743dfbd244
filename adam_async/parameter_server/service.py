"""The parameter-server role: the stores that the controllers place on this server.

A store is taken up when the cluster map names this server in its buckets, and dropped when it leaves the map.
Its client or its driver loads the values; then the server reports that it serves the store. `ServedStore` has
the shards and answers questions; the stores of a server take turns in rounds of the loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from adam_async.controller.role import STATISTICS_BYTES, Role, RoleSettings, reply_when_room
from adam_async.errors import ConfigError, RunFailed
from adam_async.messages import (
    USERS,
    Body,
    GetRecord,
    GetStatistics,
    LoadShards,
    Pull,
    Push,
    ReadShards,
    ReportSteps,
    Tick,
)
from adam_async.parameter_server.served_store import ServedStore, StoreHost
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import ServerStatistics
from adam_async.parameter_server.storage import StoragePool
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import StoreRecord, joined_arrays, served_word
from adam_async.runtime.clock import Timer
from dataflow import MakePool
from transport import BufferPool, Link, Request

logger = logging.getLogger(__name__)

TURN_WORK = 1 << 20
"""Work after which a round of the loop ends, see `PIECE_WORK`: four gradients for the largest shard."""

STORE_TYPES = (Push, Pull, Tick, ReportSteps, ReadShards, LoadShards, GetRecord)
"""Types of the questions about a store; each names it."""


class ParameterServer(Role):
    """One parameter server, from `async with` to its end.

    Args:
        settings: Its place in the cluster; the timeline notes applied batches and records, too.
        buffers: Memory for copies of values on their way out.
        storage_pool: Memory of the shards, which roles of one process may share.
        make_pool: Makes the pool that compiles kernels of rules; without it, NumPy applies them.
        available_bytes: Returns the memory that shards could use; None: it is not reported, and not checked.

    Cancelling the block ends it between two batches; queued pushes are dropped unacknowledged.
    """

    def __init__(
        self,
        settings: RoleSettings,
        *,
        buffers: BufferPool,
        storage_pool: StoragePool | None = None,
        make_pool: MakePool | None = None,
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        info = {"memory_bytes": available_bytes()} if available_bytes is not None else None
        super().__init__(settings, info=info)
        self._buffers = buffers
        self._make_pool = make_pool
        self._storage_pool = storage_pool or StoragePool()
        self.stores: dict[str, ServedStore] = {}
        """Stores by id."""
        self._busy: deque[ServedStore] = deque()
        """Stores with work for a later round, each once."""
        self._draining = False
        self._loaded = asyncio.Event()
        self._timer = Timer(self._next_deadline, self._due)

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"follow": self._follow(), "timer": self._timer.run(), "ready": self._announce()}

    @property
    def state(self) -> ServerState | None:
        """State of the newest run's store; None before it has values for all shards."""
        of_runs = [each for each in self.stores.values() if each.store.program and each.complete]
        return of_runs[-1].state if of_runs else None

    # --- stores --------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Take up each store that places buckets here, drop those that have left, and follow the others."""
        async for cluster in self._membership.changes():
            for id in [id for id, served in self.stores.items() if not _is_needed(cluster, served.store)]:
                self.stores.pop(id).end()
                self._loaded.set()
            for name, store in cluster.stores.items():
                if self._identity.node not in store.buckets or not _is_needed(cluster, store):
                    continue
                served = self.stores.get(store.id)
                if served is None:
                    served = self._take_up(name, store, cluster)
                    await asyncio.sleep(0)  # heartbeats must not wait for all stores
                if served is not None:
                    served.map_changed(cluster)

    def _take_up(self, name: str, store: StoreRecord, cluster: ClusterMap) -> ServedStore | None:
        """Allocate the shards of the buckets whose primary this server is; None if it cannot hold them.

        Other stores go on: the client of this one waits for it until its deadline.
        """
        pieces = [cluster.arrays.get(f"stores/{name}/{number}") for number in range(store.pieces)]
        host = StoreHost(
            node=self._identity.node,
            waits=self._waits,
            buffers=self._buffers,
            storage_pool=self._storage_pool,
            timeline=self._timeline,
            make_pool=self._make_pool,
            now=self._loop.time,
            spawn=self._spawn,
            drain_soon=self._drain_soon,
            rearm=self._timer.rearm,
            loaded=self._loaded.set,
        )
        try:
            served = ServedStore(store, joined_arrays(store, pieces), host)
        except MemoryError:
            logger.error("%s has no memory for its shards of store %r: delete it", self._identity.node, name)
            return None
        except ConfigError as error:
            logger.error("%s cannot hold its shards of store %r: %s", self._identity.node, name, error)
            return None
        self.stores[store.id] = served
        if served.complete:  # none of its shards is here
            self._loaded.set()
        return served

    async def _announce(self) -> None:
        """Report the stores with values for all their shards here."""
        while True:
            await self._loaded.wait()
            self._loaded.clear()
            serves = tuple(served_word(served.store) for served in self.stores.values() if served.complete)
            try:
                await self._membership.set_node(serves=serves)
            except RunFailed as error:
                logger.error("%s cannot report its %d stores: %s", self._identity.node, len(serves), error)

    # --- questions -----------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        try:
            await super()._on_link(link)
        finally:
            for served in self.stores.values():
                served.link_closed()

    def _answer(self, request: Request, body: Body) -> None:
        if not isinstance(body, STORE_TYPES):
            super()._answer(request, body)
            return
        served = self._store_of(request, body.run if isinstance(body, GetRecord) else body.store)
        if served is not None:
            served.answer(request, body)

    def _report_statistics(self, request: Request, body: GetStatistics) -> None:
        """Answer clients and readers with the counts of the store that they name, and drivers with all."""
        if request.link.peer.role not in USERS:
            super()._report_statistics(request, body)
            return
        served = self._store_of(request, body.run)
        if served is not None:
            state = served.state
            reply_when_room(
                request, STATISTICS_BYTES, lambda: self._pack_statistics(state.store_statistics())
            )

    def _store_of(self, request: Request, id: str) -> ServedStore | None:
        """Return a store; without it refuse the request and return None."""
        served = self.stores.get(id)
        if served is None and self.stores:
            here = ", ".join(sorted(self.stores)[:8])
            request.fail("wrong-run", f"this server has stores {here}, not {id}")
        elif served is None:
            request.fail("not-ready", f"{self._identity.node} has not taken up a store")
        return served

    def _next_deadline(self) -> float | None:
        found = [each.next_deadline() for each in self.stores.values()]
        return min((deadline for deadline in found if deadline is not None), default=None)

    def _due(self) -> None:
        for served in tuple(self.stores.values()):
            served.give_up()

    # --- rounds --------------------------------------------------------------------------------

    def _drain_soon(self, served: ServedStore) -> None:
        if served not in self._busy:
            self._busy.append(served)
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self._callbacks.run, self._drain)

    def _drain(self) -> None:
        """Do one round's work for the store that has waited longest; the next round goes on with others."""
        served = self._busy.popleft()
        self._draining = False
        if self.stores.get(served.store.id) is served and served.apply_some(TURN_WORK):
            self._busy.append(served)
        if self._busy and not self._draining:
            self._draining = True
            self._loop.call_soon(self._callbacks.run, self._drain)

    # --- inspection ----------------------------------------------------------------------------

    def statistics(self) -> ServerStatistics:
        """Counts of the server, and of its shards in the run in progress or just ended."""
        state = self.state
        return self._with_common(state.statistics() if state is not None else ServerStatistics())

    def __repr__(self) -> str:
        return f"<ParameterServer {self._identity.node} at {self.address} with {len(self.stores)} stores>"


def _is_needed(cluster: ClusterMap, store: StoreRecord) -> bool:
    """Whether a server keeps a store: it is in the map as placed, and has not failed.

    A driver reads a failed run. A store that was created again under the same id has another placement.
    """
    now = cluster.store(store.id)
    if now is None or now.generation != store.generation:
        return False
    return now.phase in ("loading", "open") or bool(now.program)
