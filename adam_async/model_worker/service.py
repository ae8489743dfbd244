"""The model-worker role: joins a cluster and takes part in one run after the other with T threads."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from adam_async.cluster_map import ClusterMap, NodeRecord, RunRecord
from adam_async.config import Waits
from adam_async.controller.client import Membership
from adam_async.errors import RunFailed
from adam_async.loop_lag import LoopLag
from adam_async.machine import process_memory
from adam_async.messages import GetProfile, GetStatistics, Statistics, pack, text_tensor, unpack_any
from adam_async.model_worker.participation import Participation
from adam_async.shard_storage import ShardStorage, StorageShelf
from adam_async.timeline import Timeline, answer_profile
from adam_async.traffic import Traffic
from transport import BufferPool, Identity, Link, Network, ProtocolError, Request

logger = logging.getLogger(__name__)


class ModelWorker:
    """One model worker, from `async with` to its end.

    Args:
        network: Where it listens and how it reaches the others.
        address: What it binds.
        controller: The controller's address.
        identity: Its role, node id and incarnation.
        waits: Deadlines.
        buffers: Memory for pulled values.
        threads: Compute threads.
        in_flight: Groups in flight; 0 is twice the threads.
        entropy: Dice for the session id.
        shelf: Memory of the servers of this process, for runs that train in place.
        timeline: Where the journey of each group, and messages, are noted.

    Cancelling the block ends it after the jobs that compute threads are in; pushes on their way may or
    may not take effect, once at most, and the data server leases their groups again.
    """

    def __init__(
        self,
        *,
        network: Network,
        address: str,
        controller: str,
        identity: Identity,
        waits: Waits,
        buffers: BufferPool,
        threads: int,
        in_flight: int,
        entropy: Callable[[int], bytes],
        shelf: StorageShelf | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._network = network
        self._bind = address
        self._controller = controller
        self._identity = identity
        self._waits = waits
        self._buffers = buffers
        self._threads = threads
        self._in_flight = in_flight or 2 * threads
        self._entropy = entropy
        self._shelf = shelf or StorageShelf()
        self._stack = AsyncExitStack()
        self._lag = LoopLag()
        self._timeline = timeline
        self._traffic = Traffic(identity.node, timeline=timeline)
        self._part: Participation | None = None
        self.address = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            listener = await stack.enter_async_context(
                self._network.listen(self._bind, self._identity, self._on_link)
            )
            self.address = listener.address
            self._membership = Membership(
                network=self._network,
                controller=self._controller,
                identity=self._identity,
                record=NodeRecord(
                    role="worker", address=self.address, incarnation=self._identity.incarnation
                ),
                waits=self._waits,
                traffic=self._traffic,
            )
            node = self._identity.node
            for name, work in (
                ("membership", self._membership.run()),
                ("lag", self._lag.run()),
                ("work", self._work()),
            ):
                stack.callback(group.create_task(work, name=f"{node}/{name}").cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    # --- the run -----------------------------------------------------------------------------

    async def _work(self) -> None:
        """Train each run that gives us a replica, one after the other."""
        done = ""
        async for cluster in self._membership.changes():
            run = cluster.run
            node = cluster.nodes.get(self._identity.node)
            if run is None or run.id == done or run.phase in ("finished", "failed") or node is None:
                continue
            if node.replica < 0 or not _primaries_ready(cluster):
                continue
            in_place = run.config["weights"] == "aliased"
            storage = self._storage(run) if in_place else None
            if in_place and storage is None:
                continue  # its servers have gone on to a newer run, of which we hear next
            done = run.id
            await self._train(cluster, node.replica, storage)

    async def _train(self, cluster: ClusterMap, replica: int, storage: ShardStorage | None) -> None:
        """Train one run until it ends."""
        run = cluster.run
        assert run is not None
        part = Participation(
            network=self._network,
            identity=self._identity,
            cluster=cluster,
            replica=replica,
            session=int.from_bytes(self._entropy(7), "little"),
            waits=self._waits,
            buffers=self._buffers,
            threads=self._threads,
            in_flight=self._in_flight,
            traffic=self._traffic,
            storage=storage,
            timeline=self._timeline,
        )
        self._part = part
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(part.run(), name=f"{self._identity.node}/train-{run.id}"),
                group.create_task(self._say_ready(part, run.id), name=f"{self._identity.node}/ready"),
            ]
            await self._run_over(run.id)  # also if it is over before we are ready
            for task in tasks:
                task.cancel()
        logger.info("%s is done with run %s", self._identity.node, run.id)

    def _storage(self, run: RunRecord) -> ShardStorage | None:
        """The servers' memory, for a run that trains in place; None if they have already left the run.

        Raises:
            RunFailed: There are no servers in this process.
        """
        if not self._shelf.has_servers:
            raise RunFailed(
                f"run {run.id} trains in place (weights=aliased), and its servers are not in the process of "
                f"{self._identity.node}: run it with weights=copy"
            )
        return self._shelf.find(run.id)

    async def _say_ready(self, part: Participation, run: str) -> None:
        await part.prepared.wait()
        await self._membership.set_node(ready=run)

    async def _run_over(self, run: str) -> None:
        async for cluster in self._membership.changes():
            now = cluster.run
            if now is None or now.id != run or now.phase in ("finished", "failed"):
                return

    # --- links -------------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        self._traffic.watch(link)
        link.serve(self._on_request)
        try:
            await link.wait_closed()
        finally:
            self._traffic.gone(link)

    def _on_request(self, request: Request) -> None:
        try:
            body = unpack_any(request.message)
        except ProtocolError as error:
            request.fail("malformed", str(error))
            return
        if isinstance(body, GetStatistics):
            statistics = Statistics(node=self._identity.node, role="worker")
            request.reply(pack(statistics, [text_tensor(self.statistics())]))
        elif isinstance(body, GetProfile):
            answer_profile(request, body, self._timeline)
        else:
            request.fail("unexpected", f"a worker does not answer {request.message.type}")

    def statistics(self) -> dict[str, Any]:
        """Protocols, pushes, waits, pool and loop lag of the run in progress or just ended."""
        part = self._part
        return {
            "lag_s": self._lag.percentiles(),
            "buffers": self._buffers.statistics(),
            "traffic": self._traffic.rows(),
            "process": process_memory(),
            **(part.statistics() if part is not None else {}),
        }

    def __repr__(self) -> str:
        return f"<ModelWorker {self._identity.node} at {self.address} {self._threads} threads>"


def _primaries_ready(cluster: ClusterMap) -> bool:
    run = cluster.run
    return (
        run is not None
        and bool(cluster.buckets)
        and bool(cluster.live("data"))
        and all(cluster.nodes[server].ready == run.id for server in set(cluster.buckets))
    )
