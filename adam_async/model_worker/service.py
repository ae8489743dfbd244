"""The model-worker role: trains one replica's partition with T compute threads.

Journey of a group here: the data client holds it ahead; it is admitted when a training context is
free and no server owes too many answers; a compute thread trains it (`training.py`); its gradients are
pushed and values pulled (`steps.py`, `pulls.py`); its report goes back to the data server when the
push is acknowledged.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec

from adam_async.cluster_map import ClusterMap, NodeRecord
from adam_async.config import Waits
from adam_async.controller.client import Membership
from adam_async.data_server.client import DataClient
from adam_async.loop_lag import LoopLag
from adam_async.machine import process_memory
from adam_async.messages import GetStatistics, Statistics, pack, text_tensor, unpack_any
from adam_async.model.network import Network as Model
from adam_async.model.spec import ModelSpec
from adam_async.model_worker.pulls import Puller
from adam_async.model_worker.steps import Stepper
from adam_async.model_worker.training import GroupTrainer, ThreadScratch, Trained, replica_graph
from adam_async.model_worker.updates import plan_pushes
from adam_async.model_worker.weights import WorkerWeights
from adam_async.parameter_server.client import ParameterClient, SessionIdentity
from adam_async.placement import shard_table
from adam_async.traffic import Traffic
from dataflow import ComputePool, Engine, Firing, Tag
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
        self._stack = AsyncExitStack()
        self._lag = LoopLag()
        self._traffic = Traffic(identity.node)
        self._training: Training | None = None
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
            done = run.id
            await self._train(cluster, node.replica)

    async def _train(self, cluster: ClusterMap, replica: int) -> None:
        """Train one run until it ends."""
        run = cluster.run
        assert run is not None
        training = Training(
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
        )
        self._training = training
        async with asyncio.TaskGroup() as group:
            task = group.create_task(training.run(), name=f"{self._identity.node}/train-{run.id}")
            await training.prepared.wait()
            await self._membership.set_node(ready=run.id)
            await self._run_over(run.id)
            task.cancel()
        logger.info("%s is done with run %s", self._identity.node, run.id)

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
        else:
            request.fail("unexpected", f"a worker does not answer {request.message.type}")

    def statistics(self) -> dict[str, Any]:
        """Protocols, pushes, waits, pool and loop lag of the run in progress or just ended."""
        training = self._training
        return {
            "lag_s": self._lag.percentiles(),
            "buffers": self._buffers.statistics(),
            "traffic": self._traffic.rows(),
            "process": process_memory(),
            **(training.statistics() if training is not None else {}),
        }

    def __repr__(self) -> str:
        return f"<ModelWorker {self._identity.node} at {self.address} {self._threads} threads>"


class Training:
    """One worker's part in one run: everything that is made for it and goes with it.

    `prepared` is set when the first pull has landed; `run` then trains until it is cancelled.
    """

    def __init__(
        self,
        *,
        network: Network,
        identity: Identity,
        cluster: ClusterMap,
        replica: int,
        session: int,
        waits: Waits,
        buffers: BufferPool,
        threads: int,
        in_flight: int,
        traffic: Traffic,
    ) -> None:
        run = cluster.run
        assert run is not None
        config = run.config
        self._identity = identity
        self._waits = waits
        self._threads = threads
        self._in_flight = in_flight
        self._group_images = int(config["images_per_group"])
        self._push_every = int(config["push_every"])
        self._pull_every = int(config["pull_every"])
        self._rate = float(config["rate"])
        self._background = in_flight > 1
        self.prepared = asyncio.Event()
        self._model = Model(ModelSpec.from_dict(run.spec), dtype=str(config["dtype"]))
        table = shard_table(
            self._model.parameters,
            shard_bytes=int(config["shard_bytes"]),
            item_bytes=self._model.dtype.itemsize,
        )
        self._table = table
        self.plan = plan_pushes(
            self._model,
            table,
            cluster.buckets,
            images=self._group_images * self._push_every,
            wanted=msgspec.convert(config["protocol"], type=Any),
        )
        self.weights = WorkerWeights()
        self.client = ParameterClient(
            network=network,
            identity=identity,
            session=SessionIdentity(
                run=run.id,
                session=session,
                incarnation=identity.incarnation,
                replica=replica,
                generation=cluster.generation,
            ),
            addresses={server: cluster.nodes[server].address for server in sorted(set(cluster.buckets))},
            waits=waits,
            traffic=traffic,
        )
        self._puller = Puller(
            network=self._model,
            table=table,
            buckets=cluster.buckets,
            client=self.client,
            weights=self.weights,
            buffers=buffers,
        )
        # A local step fills the steps between two pulls. With a pull at every step there are none: the
        # values that follow a push contain it, and arrive before a local step would have paid for itself.
        local = config["rule"] == "sgd" and self._pull_every > 1
        self._trainer = GroupTrainer(
            network=self._model,
            weights=self.weights,
            plan=self.plan,
            rate=self._rate if local else 0.0,
            group_images=self._group_images,
            push_every=self._push_every,
            buffers=in_flight + 2,
        )
        self.data = DataClient(
            network=network,
            address=cluster.nodes[cluster.live("data")[0]].address,
            identity=identity,
            run=run.id,
            replica=replica,
            ahead=int(config["read_ahead"]),
            waits=waits,
            traffic=traffic,
        )
        self._pool: ComputePool | None = None
        self._engine: Engine | None = None

    async def run(self) -> None:
        """Pull, then train until cancelled."""
        node = self._identity.node
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(self.client.run(), name=f"{node}/parameters").cancel)
            await self._pull_first()
            self._stepper = Stepper(
                table=self._table,
                plan=self.plan,
                client=self.client,
                puller=self._puller,
                trainer=self._trainer,
                weights=self.weights,
                rate=self._rate,
                push_every=self._push_every,
                pull_every=self._pull_every,
                clock=self._puller.clock,
                on_finished=self.data.finished,
            )
            stack.callback(group.create_task(self.data.run(), name=f"{node}/data").cancel)
            self._pool = await stack.enter_async_context(
                ComputePool(
                    threads=self._threads,
                    name=node,
                    contexts=[ThreadScratch(self._model) for _ in range(self._threads)],
                )
            )
            self._engine = await stack.enter_async_context(
                Engine(
                    replica_graph(
                        self._trainer,
                        self._on_trained,
                        land=None if self._background else self._on_landed,
                    ),
                    pool=self._pool,
                    in_flight=self._in_flight,
                    contexts=[self._model.context(self._group_images) for _ in range(self._in_flight + 1)],
                    wait_timeout_s=self._waits.patience_s,
                )
            )
            self.prepared.set()
            await self._feed(self._engine)

    async def _pull_first(self) -> None:
        landed = asyncio.Event()
        self._puller.pull(landed.set)
        await self.client.flush()
        await landed.wait()

    async def _feed(self, engine: Engine) -> None:
        while True:
            if self.data.exhausted:
                await engine.drain()
                self._stepper.close(_nothing)
            group = await self.data.next_group()
            await self.client.admit()
            tag = Tag(group.lease.epoch, group.lease.number, group.lease.attempt)
            await engine.admit(tag)
            engine.deliver("group", tag, group)

    def _on_trained(self, firing: Firing, trained: Trained) -> None:
        if self._background:
            self._stepper.add(trained, _nothing)
            return
        engine = self._engine
        assert engine is not None
        self._stepper.add(trained, partial(engine.deliver, "landed", firing.tag, None))

    def _on_landed(self, firing: Firing, token: None) -> None:
        """The tag is complete; the engine frees its slot and context."""

    def statistics(self) -> dict[str, Any]:
        """Counts of this run on this worker."""
        return {
            "protocols": [msgspec.to_builtins(choice) for choice in self.plan.protocols.values()],
            "parameters": self.client.statistics(),
            "data": self.data.statistics(),
            "pool": self._pool.statistics() if self._pool is not None else None,
            "engine": self._engine.statistics() if self._engine is not None else None,
            "push_buffers": self._trainer.group_buffers.made + self._trainer.step_buffers.made,
        }


def _nothing() -> None:
    """A pull in the background has landed: nobody waits for it."""


def _primaries_ready(cluster: ClusterMap) -> bool:
    run = cluster.run
    return (
        run is not None
        and bool(cluster.buckets)
        and bool(cluster.live("data"))
        and all(cluster.nodes[server].ready == run.id for server in set(cluster.buckets))
    )
