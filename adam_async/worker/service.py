"""The model-worker role: joins a cluster and takes part in one run after the other with T threads."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from adam_async.controller.role import Role, reply_when_room
from adam_async.errors import RunFailed
from adam_async.messages import Body, GetRecord, Greet, RecordPart, pack, part_refusal, unpack
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.parameter_server.storage import ShardStorage, StoragePool
from adam_async.run.cluster_map import ClusterMap, RunRecord, ready_word
from adam_async.run.config import Waits
from adam_async.runtime.clock import LoopLag
from adam_async.runtime.machine import ProcessMemory, process_memory
from adam_async.runtime.timeline import Timeline
from adam_async.worker.run_session import Participation
from dataflow import ComputePool, MakePool
from transport import BufferPool, Identity, Link, Message, Network, Request, TransportError

logger = logging.getLogger(__name__)


class ModelWorker(Role):
    """One model worker, from `async with` to its end.

    Args:
        network: Where it listens and how it reaches the others.
        address: What it binds.
        controller: The controller's address.
        identity: Its role, node id and incarnation.
        waits: Deadlines.
        buffers: Memory for pulled values.
        threads: Compute threads.
        in_flight: Groups in flight; 0 is twice the threads of its replica, or in place as many as keep
            them busy. Workers of one replica all have as many as the one with the fewest.
        entropy: Dice for the session id.
        shelf: Memory of the servers of this process, for runs that train in place.
        timeline: Where the journey of each group, and messages, are noted.
        pace: Share of a core's time that each compute thread may use; see `ComputePool`.
        pool: Where it computes beside the other workers of its replica, made with a `WeakKeyDictionary` for
            each thread; without it, in one of its own.
        make_pool: Makes that one.
        process_memory: See `Role`.

    Leaving the block says goodbye to the controller: others take over at once what is leased to it, and with
    `ssp` and `bsp` wait for it no longer. It ends after the jobs that compute threads are in; pushes on their
    way may or may not take effect, once at most, and the data server leases their groups again.
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
        storage_pool: StoragePool | None = None,
        timeline: Timeline | None = None,
        pace: float = 1.0,
        pool: ComputePool | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        make_pool: MakePool = ComputePool,
        process_memory: Callable[[], ProcessMemory] = process_memory,
    ) -> None:
        super().__init__(
            network=network,
            address=address,
            identity=identity,
            waits=waits,
            controller=controller,
            info={"threads": threads, "in_flight": in_flight},
            timeline=timeline,
            process_memory=process_memory,
        )
        self._buffers = buffers
        self._layers = layers
        self._threads = threads
        self._in_flight = in_flight
        self._pace = pace
        self._pool = pool
        self._make_pool = make_pool
        self._entropy = entropy
        self._storage_pool = storage_pool or StoragePool()
        self._lag = LoopLag()
        self._part: Participation | None = None
        self._refused_greets = 0

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"lag": self._lag.run(), "work": self._work()}

    async def _goodbye(self) -> None:
        await self._membership.leave()

    # --- the run -----------------------------------------------------------------------------

    async def _work(self) -> None:
        """Train each run that gives us a place, one after the other, and in each life of our replica."""
        done = ("", 0)
        async for cluster in self._membership.changes():
            run = cluster.run
            node = cluster.nodes.get(self._identity.node)
            if run is None or run.over or node is None:
                continue
            if not self._membership.joined:
                continue  # the map speaks of an earlier life of ours, whose place is another's by now
            replica_generation = cluster.replica_generation(node.replica)
            if (
                not replica_generation
                or (run.id, replica_generation) == done
                or not _primaries_ready(cluster)
            ):
                continue
            in_place = run.config["weights"] == "aliased"
            storage = self._storage(run) if in_place else None
            if in_place and storage is None:
                continue  # its servers have gone on to a newer run, of which we hear next
            done = (run.id, replica_generation)
            await self._train(cluster, node.replica, storage)

    async def _train(self, cluster: ClusterMap, replica: int, storage: ShardStorage | None) -> None:
        """Train one run until it ends, or until the replica begins another life."""
        run = cluster.run
        assert run is not None
        replica_generation = cluster.replica_generation(replica)
        word = ready_word(run.id, replica_generation)
        place = cluster.nodes[self._identity.node].partition
        if run.together and place > 0:  # the first worker of the replica trains all parts
            await self._membership.set_node(ready=word)
            await self._part_over(run.id, replica, replica_generation)
            return
        part = Participation(
            network=self._network,
            identity=self._identity,
            cluster=cluster,
            replica=replica,
            part=place,
            session=int.from_bytes(self._entropy(7), "little"),
            waits=self._waits,
            buffers=self._buffers,
            threads=self._threads,
            in_flight=self._in_flight,
            pace=self._pace,
            pool=self._pool,
            make_pool=self._make_pool,
            traffic=self._traffic,
            storage=storage,
            layers=self._layers,
            timeline=self._timeline,
        )
        self._part = part
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(part.run(), name=f"{self._identity.node}/train-{run.id}"),
                group.create_task(self._say_ready(part, word), name=f"{self._identity.node}/ready"),
            ]
            # Also if it is over before we are ready.
            await self._part_over(run.id, replica, replica_generation, part.look)
            for task in tasks:
                task.cancel()
        logger.info("%s is done with run %s", self._identity.node, run.id)

    async def _on_link(self, link: Link) -> None:
        if link.peer.role == "worker":
            await self._on_neighbour(link)
        else:
            await super()._on_link(link)

    async def _on_neighbour(self, link: Link) -> None:
        """Another worker of our replica dials; one that speaks for another life of it is not answered."""
        self._traffic.watch(link)
        try:
            async with asyncio.timeout(self._waits.call_s):
                greet = unpack(await link.receive(), Greet)
            neighbours = self._part.neighbours if self._part is not None else None
            if neighbours is not None and neighbours.knows(greet, link.peer):
                await neighbours.welcome(link, greet)
            else:
                self._refused_greets += 1
        except (TransportError, TimeoutError) as error:
            logger.info("%s: %s did not greet: %s", self._identity.node, link.peer.node, error)
        finally:
            link.abort()
            self._traffic.gone(link)

    def _answer(self, request: Request, body: Body) -> None:
        if isinstance(body, GetRecord):
            self._send_record(request, body)
        else:
            super()._answer(request, body)

    def _send_record(self, request: Request, body: GetRecord) -> None:
        data = self._part.record(body.run) if self._part is not None else b""
        if not data:
            request.fail("no-record", f"{self._identity.node} keeps no record of run {body.run}")
            return
        refusal = part_refusal(body, len(data), most_bytes=request.link.max_message_bytes)
        if refusal is not None:
            request.fail(*refusal)
            return
        nbytes = len(range(len(data))[body.start : body.stop])

        def part() -> Message:
            # Copy it, because the log grows while the answer is in transit.
            copy = np.frombuffer(bytes(data[body.start : body.stop]), np.uint8)
            return pack(RecordPart(total=len(data)), [copy])

        reply_when_room(request, nbytes, part)

    def _storage(self, run: RunRecord) -> ShardStorage | None:
        """The servers' memory, for a run that trains in place; None if they have already left the run.

        Raises:
            RunFailed: There are no servers in this process.
        """
        if not self._storage_pool.has_servers:
            raise RunFailed(
                f"run {run.id} trains in place (weights=aliased), and its servers are not in the process of "
                f"{self._identity.node}: run it with weights=copy"
            )
        return self._storage_pool.find(run.id)

    async def _say_ready(self, part: Participation, word: str) -> None:
        await part.prepared.wait()
        await self._membership.set_node(ready=word)

    async def _part_over(
        self,
        run: str,
        replica: int,
        replica_generation: int,
        look: Callable[[ClusterMap], None] = lambda _: None,
    ) -> None:
        """Wait until the run, or this life of our replica, is over; meanwhile have each map looked at."""
        async for cluster in self._membership.changes():
            look(cluster)
            now = cluster.run
            if now is None or now.id != run or now.over:
                return
            if cluster.replica_generation(replica) != replica_generation:
                return

    def statistics(self) -> dict[str, Any]:
        """Protocols, pushes, waits, pool and loop lag of the run in progress or just ended."""
        part = self._part
        return {
            "lag_s": self._lag.percentiles(),
            "buffers": self._buffers.statistics(),
            "refused_greets": self._refused_greets,
            **super().statistics(),
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
