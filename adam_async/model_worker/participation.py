"""One worker's part in one run: what is made for it, trains while it lasts, and goes with it.

Journey of a group here: the data client holds it ahead; it is admitted when a training context is
free and no server owes too many answers; a compute thread trains it (`training.py`); its gradients are
pushed and values come back (`steps.py`, `pulls.py`); its report goes to the data server when the push is
acknowledged.
"""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec

from adam_async.cluster_map import ClusterMap
from adam_async.config import Config, Waits
from adam_async.data_server.client import DataClient
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
from transport import BufferPool, Identity, Network


class Participation:
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
        config = msgspec.convert(run.config, Config)
        self._identity = identity
        self._waits = waits
        self._threads = threads
        self._in_flight = in_flight
        self._group_images = config.images_per_group
        self._push_every = config.push_every
        self._pull_every = config.pull_every
        self._rate = config.rate
        self._background = in_flight > 1
        self.prepared = asyncio.Event()
        self._model = Model(ModelSpec.from_dict(run.spec), dtype=config.dtype)
        item_bytes = self._model.dtype.itemsize
        table = shard_table(self._model.parameters, shard_bytes=config.shard_bytes, item_bytes=item_bytes)
        self._table = table
        self.plan = plan_pushes(
            self._model,
            table,
            cluster.buckets,
            images=self._group_images * self._push_every,
            wanted=config.protocol,
        )
        self.weights = WorkerWeights()
        pushing = SessionIdentity(
            run=run.id,
            session=session,
            incarnation=identity.incarnation,
            replica=replica,
            generation=cluster.generation,
        )
        reach: dict[str, Any] = {"network": network, "identity": identity, "waits": waits, "traffic": traffic}
        addresses = {server: cluster.nodes[server].address for server in sorted(set(cluster.buckets))}
        self.client = ParameterClient(session=pushing, addresses=addresses, **reach)
        self._puller = Puller(
            network=self._model,
            table=table,
            buckets=cluster.buckets,
            client=self.client,
            weights=self.weights,
            buffers=buffers,
        )
        self._trainer = self._make_trainer(config.rule)
        self.data = DataClient(
            address=cluster.nodes[cluster.live("data")[0]].address,
            run=run.id,
            replica=replica,
            ahead=config.read_ahead,
            **reach,
        )
        self._pool: ComputePool | None = None
        self._engine: Engine | None = None

    def _make_trainer(self, rule: str) -> GroupTrainer:
        # A local step fills the steps between two pulls. With a pull at every step there are none: the
        # values that follow a push contain it, and arrive before a local step would have paid for itself.
        local = rule == "sgd" and self._pull_every > 1
        return GroupTrainer(
            network=self._model,
            weights=self.weights,
            plan=self.plan,
            rate=self._rate if local else 0.0,
            group_images=self._group_images,
            push_every=self._push_every,
            buffers=self._in_flight + 2,
        )

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
            "push_buffers": self._trainer.buffers_made,
        }


def _nothing() -> None:
    """A pull in the background has landed: nobody waits for it."""
