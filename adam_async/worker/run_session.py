"""One worker's part in one run: what is made for it, trains while it lasts, and goes with it.

Journey of a group here: the data client holds it ahead; it is admitted when a training context is
free and no server owes too many answers; a compute thread trains it (`training.py`); its gradients are
pushed and values come back (`steps.py`, `pulls.py`); its report goes to the data server when the push is
acknowledged. In a run that trains in place the thread itself applies the rule to the servers' memory
(`in_place.py`), and what is pushed is a record of that (`records.py`).
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from math import prod
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.data_server.client import DataClient
from adam_async.errors import ConfigError
from adam_async.messages import Block, Finished, Greet, Lease
from adam_async.model.context import Context
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network as Model
from adam_async.model.partition.joint import JointNetwork
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.client import ParameterClient, SessionIdentity
from adam_async.parameter_server.storage import ShardStorage
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config, Waits, default_in_flight, replica_in_flight
from adam_async.run.group_limits import GroupLimits
from adam_async.run.partition import run_table
from adam_async.run.shard_table import holders, part_table
from adam_async.runtime.machine import pinned_cpus, usable_cores
from adam_async.runtime.timeline import Timeline
from adam_async.runtime.traffic import Traffic
from adam_async.worker.copy_mode import Copied
from adam_async.worker.in_place_mode import Aliased
from adam_async.worker.kernel_change import KernelChange
from adam_async.worker.partition_mode import Parted
from adam_async.worker.peer_workers import Neighbours
from adam_async.worker.training_mode import Gate, TrainingMode
from dataflow import ComputePool, Engine, EngineClosed, MakePool, Tag, TokenError, WaitTimedOut
from transport import BufferPool, Identity, Network, RemoteProtocolError

COMPILE_S = 120.0
"""Seconds for which the end of a run waits for a compute thread, which may be compiling."""

LEAD = 2
"""Groups that a worker may be ahead of one that it sends to, per group in flight: enough for that one to find
its input there, whatever it begins."""


class Participation:
    """One worker's part in one run: everything that is made for it and goes with it.

    `prepared` is set when the first pull has landed; `run` then trains until it is cancelled. With the
    `storage` of its servers it trains in place, without it on a copy. With a `timeline` it notes there what
    becomes of each group. Its compute threads keep to a `pace`.
    """

    def __init__(
        self,
        *,
        network: Network,
        identity: Identity,
        cluster: ClusterMap,
        replica: int,
        part: int,
        session: int,
        waits: Waits,
        buffers: BufferPool,
        threads: int,
        in_flight: int,
        traffic: Traffic,
        pace: float = 1.0,
        pool: ComputePool | None = None,
        make_pool: MakePool = ComputePool,
        storage: ShardStorage | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        timeline: Timeline | None = None,
    ) -> None:
        run = cluster.run
        assert run is not None
        replica_generation = cluster.replica_generation(replica)
        config = msgspec.convert(run.config, Config)
        self._identity = identity
        self._run, self._session = run.id, session
        self._timeline = timeline
        self._waits = waits
        self._threads = threads * cluster.partitions if run.together else threads
        self._pace = pace
        self._group_images = config.images_per_group
        # Where nobody waits for clocks, whoever begins later than it was ready has to look what came since:
        # after a warm start, or when the other workers of a replica were ready, too.
        waits_to_begin = config.warm_start > 0 or (cluster.partitions > 1 and not run.together)
        self._pulls_to_begin = storage is None and config.slack is None and waits_to_begin
        first = replica * self._threads
        self._cpus = pinned_cpus(threads=self._threads, first=first) if config.pin_threads else None
        self.prepared = asyncio.Event()
        spec = ModelSpec.from_dict(run.spec)
        self._model = Model(spec, dtype=config.dtype, kernels=config.kernels, layers=layers)
        table = run_table(run, self._model)
        plan = PartitionPlan.from_dict(run.plan) if run.plan is not None else None
        partition = joint = None
        if plan is not None and run.together:
            joint = JointNetwork(self._model, plan)
        elif plan is not None:
            partition = Partition(self._model, plan, part)
            table = part_table(table, partition.network.parameters)
        same = plan is not None or config.synchronous or config.record
        self._kernels = KernelChange(self._model, joint or self._model, waits=same, cores=usable_cores())
        rows = None if partition is None else partition.image_rows
        self._limits = self._new_limits(config, spec, rows)
        self._limits.map_changed(cluster)
        pushing = SessionIdentity(
            run=run.id,
            session=session,
            incarnation=replica_generation,
            replica=replica,
            generation=cluster.generation,
        )
        reach: dict[str, Any] = {"network": network, "identity": identity, "waits": waits, "traffic": traffic}
        addresses = {server: cluster.nodes[server].address for server in holders(table, cluster.buckets)}
        self._client = ParameterClient(session=pushing, addresses=addresses, **reach)
        common: dict[str, Any] = {
            "config": config,
            "table": table,
            "buckets": cluster.buckets,
            "client": self._client,
        }
        self._way: TrainingMode
        self._early_limit = 0
        """Tokens that may come before their groups are begun here."""
        self.neighbours: Neighbours | None = None
        """The other workers of the replica, in a run whose model is cut."""
        if partition is not None:
            members = [cluster.nodes[name].info for name in cluster.members(replica)]
            self._in_flight = replica_in_flight(members, cluster.partitions)
            self._early_limit = LEAD * self._in_flight * max(1, len(partition.incoming))
            self.neighbours = self._new_neighbours(cluster, replica, partition, reach)
            self._way = Parted(
                partition=partition,
                put=self.neighbours.put,
                session=pushing,
                buffers=buffers,
                in_flight=self._in_flight,
                **common,
            )
        elif storage is None:
            if config.record and threads > 1:
                raise ConfigError(
                    f"record needs one compute thread per worker, for a replay has to know in which order "
                    f"groups were trained; this worker has threads={threads}: set threads to 1"
                )
            self._in_flight = in_flight or default_in_flight(threads, cluster.partitions)
            self._way = Copied(
                model=joint or self._model,
                session=pushing,
                buffers=buffers,
                in_flight=self._in_flight,
                **common,
            )
        else:
            clock = None if timeline is None else timeline.clock
            aliased = Aliased(model=self._model, storage=storage, threads=threads, clock=clock, **common)
            self._in_flight = in_flight or aliased.in_flight
            self._way = aliased
        self._cluster = cluster
        self._data = DataClient(
            address=lambda attempt: self._cluster.ledger_leader_for(replica, attempt),
            run=run.id,
            replica=replica,
            replica_generation=replica_generation,
            partition=part,
            rows=rows,
            limits=self._limits,
            ahead=max(config.groups_ahead(prod(spec.input_shape)), self._in_flight),
            **reach,
        )
        self._shared, self._make_pool = pool, make_pool
        self._pool: ComputePool | None = None
        self._engine: Engine | None = None
        self._filling = False

    def _new_limits(self, config: Config, spec: ModelSpec, rows: tuple[int, int] | None) -> GroupLimits:
        pixels = prod(spec.input_shape)
        if rows is not None:
            pixels = pixels // spec.input_shape[1] * (rows[1] - rows[0])
        return GroupLimits(
            images=config.images_per_group,
            pixels=pixels,
            classes=prod(self._model.layers[-1].input_shapes[0]),
            epochs=config.epochs,
            validation=config.validation,
        )

    def _new_neighbours(
        self, cluster: ClusterMap, replica: int, partition: Partition, reach: Mapping[str, Any]
    ) -> Neighbours:
        self._ports = {crossing.number: f"in-{crossing.number}" for crossing in partition.incoming}
        greet = Greet(
            run=self._run,
            replica=replica,
            replica_generation=cluster.replica_generation(replica),
            partition=partition.worker,
            received=0,
            begun=0,
        )
        return Neighbours(
            greet=greet,
            cluster=cluster,
            partition=partition,
            group_images=self._limits.images_of,
            lead=LEAD * self._in_flight,
            on_blocks=self._on_blocks,
            **reach,
        )

    def look(self, cluster: ClusterMap) -> None:
        """The cluster map has changed: another data server may have to be asked."""
        self._cluster = cluster
        self._limits.map_changed(cluster)
        self._data.look()

    async def run(self) -> None:
        """Prepare, then train until cancelled."""
        node = self._identity.node
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(self._client.run(), name=f"{node}/parameters").cancel)
            if self.neighbours is not None:
                stack.callback(group.create_task(self.neighbours.run(), name=f"{node}/neighbours").cancel)
            self._pool = self._shared
            if self._pool is None:
                with self._enough_memory():
                    self._pool = await stack.enter_async_context(self._new_pool())
            await self._kernels.prepare(self._pool)
            # Not before: who joins a training that goes on would begin with values from before the compiling.
            await self._way.prepare()
            timeline = self._timeline
            if timeline is None:
                self._way.begin(self._data.finished)
            else:
                self._way.begin(partial(self._finished, timeline), partial(self._stepped, timeline))
            stack.callback(group.create_task(self._data.run(), name=f"{node}/data").cancel)
            self._engine = await stack.enter_async_context(
                Engine(
                    self._way.graph(self._landed, self._deliver),
                    pool=self._pool,
                    in_flight=self._in_flight,
                    contexts=await self._new_contexts(self._pool),
                    on_room=self._fill,
                    trace=None if timeline is None else partial(timeline.fired, node, self._run),
                    early_limit=self._early_limit,
                    wait_timeout_s=self._waits.patience_s,
                )
            )
            stack.callback(group.create_task(self._change_kernels(), name=f"{node}/kernels").cancel)
            self.prepared.set()
            if self._pulls_to_begin:
                while not self._data.has_group:
                    await self._data.wait_group()
                if self.neighbours is not None:
                    await self.neighbours.wait_linked()
                await self._way.prepare()
            await self._feed(self._engine)

    def _new_pool(self) -> ComputePool:
        return self._make_pool(
            threads=self._threads,
            name=self._identity.node,
            contexts=self._way.new_scratch,
            affinity=[(cpu,) for cpu in self._cpus] if self._cpus is not None else None,
            pace=self._pace,
            close_timeout_s=COMPILE_S,
        )

    async def _new_contexts(self, pool: ComputePool) -> list[Context | None]:
        """Make a context for each group in flight, and a spare one, on compute threads in turn.

        Memory lies with the cores of the thread that first writes it. Contexts go from thread to thread, so
        with several memory nodes none is near to all its users; but they spread over the nodes, and do not
        crowd the one that the event loop is on. Large push buffers are written first by who first fills them.
        """
        with self._enough_memory():
            return [await pool.run(self._way.new_context, cost="context") for _ in range(self._in_flight + 1)]

    @contextmanager
    def _enough_memory(self) -> Iterator[None]:
        """Name what was asked for where there is not enough memory for it."""
        try:
            yield
        except MemoryError as error:
            raise ConfigError(
                f"not enough memory for {self._in_flight} groups in flight of {self._group_images} images "
                f"each, with {self._threads} threads ({error}); lower in_flight, images_per_group or threads"
            ) from None

    async def _change_kernels(self) -> None:
        engine, pool = self._engine, self._pool
        assert engine is not None
        assert pool is not None
        await self._kernels.run(pool, lambda: engine.statistics().finished)

    async def _feed(self, engine: Engine) -> None:
        """Keep the engine full.

        While groups are there and servers keep up, `_fill` does it within the engine's own turns; this task
        only waits for whatever else it may lack.
        """
        gate = self._way.gate
        while True:
            if not self._data.has_group:
                if self._data.exhausted:
                    if gate is None:
                        await engine.drain()
                    self._flush(gate)
                await self._data.wait_group()
            elif not self._client.may_push:
                await self._client.admit()
            elif not engine.has_room:
                await self._wait_room(engine)
            elif gate is not None and not gate.opens_for(self._data.first):
                await gate.wait()
            elif self.neighbours is not None and not self.neighbours.keep_up:
                await self.neighbours.wait_progress()
            self._fill()

    async def _wait_room(self, engine: Engine) -> None:
        """Wait for room that `_fill` leaves. That may be long; no group trained for `patience_s` is too long.

        Raises:
            WaitTimedOut: No group was trained in that time.
        """
        while True:
            trained = engine.statistics().finished
            try:
                await engine.wait_room()
                return
            except WaitTimedOut:
                if engine.statistics().finished == trained:
                    raise

    def _fill(self) -> None:
        """Admit groups, while there are some, there is room, and servers and others keep up. Never waits."""
        engine, data, client, timeline = self._engine, self._data, self._client, self._timeline
        gate, neighbours = self._way.gate, self.neighbours
        assert engine is not None
        if self._filling:
            return  # the engine asks within a turn that an admission of ours began: groups stay in order
        self._filling = True
        while data.has_group and engine.has_room and client.may_push:
            if gate is not None and not gate.opens_for(data.first):
                break
            if neighbours is not None:
                if not neighbours.keep_up:
                    break
                neighbours.begin()
            begin = timeline.clock() if timeline is not None else 0.0
            group = data.take()
            tag = Tag(group.lease.epoch, group.lease.number, group.lease.attempt)
            engine.admit_nowait(tag)
            engine.deliver("group", tag, group if gate is None else gate.admit(group))
            if timeline is not None:
                timeline.delivered(self._identity.node, self._run, tag, begin)
        self._filling = False

    def _flush(self, gate: Gate | None) -> None:
        """Nothing more waits for us: what was collected leaves."""
        begin = self._timeline.clock() if self._timeline is not None else 0.0
        if gate is None:
            self._way.flush()
        else:
            gate.meet(self._data.end)
        if self._timeline is not None:
            self._timeline.flushed(self._identity.node, begin)

    def _finished(self, timeline: Timeline, report: Finished) -> None:
        begin = timeline.clock()
        self._data.finished(report)
        timeline.reported(self._identity.node, self._run, report, begin)

    def _stepped(self, timeline: Timeline, clock: int, leases: Sequence[Lease]) -> None:
        timeline.stepped(self._identity.node, self._run, self._session, clock, leases)

    def _deliver(self, port: str, tag: Tag, value: Any) -> None:
        assert self._engine is not None
        self._engine.deliver_threadsafe(port, tag, value)

    def _on_blocks(self, arrived: Sequence[tuple[Block, NDArray[Any]]]) -> None:
        """Something of some groups came from another worker of the replica."""
        hand_over(self._engine, self._ports, arrived)

    def _landed(self, tag: Tag) -> None:
        assert self._engine is not None
        with suppress(EngineClosed):  # the run is over: answers still come until its links are closed
            self._engine.deliver("landed", tag, None)

    def record(self, run: str) -> bytes | bytearray:
        """What was noted for a replay of a run; empty if nothing is. It grows while the run lasts."""
        return self._way.record if run == self._run else b""

    def statistics(self) -> dict[str, Any]:
        """Counts of this run on this worker."""
        engine = self._engine.statistics() if self._engine is not None else None
        return {
            **self._way.statistics(),
            "kernels": self._kernels.statistics(engine.finished if engine is not None else 0),
            "cpus": self._cpus,
            "parameters": self._client.statistics(),
            "data": self._data.statistics(),
            "neighbours": self.neighbours.statistics() if self.neighbours is not None else {},
            "pool": self._pool.statistics() if self._pool is not None else None,
            "engine": engine,
        }


def hand_over(
    engine: Engine | None, ports: Mapping[int, str], arrived: Sequence[tuple[Block, NDArray[Any]]]
) -> None:
    """Deliver blocks of another worker, by the number of the crossing that each came over.

    Raises:
        RemoteProtocolError: No worker sends these now: groups have not begun, or a block came before.
    """
    if engine is None:
        raise RemoteProtocolError("blocks", "the replica is not ready, and no group has begun")
    tokens = [
        (ports[block.crossing], Tag(block.epoch, block.number, block.attempt), tensor)
        for block, tensor in arrived
    ]
    try:
        with suppress(EngineClosed):  # the run is over: other workers still talk until they hear of it
            engine.deliver_all(tokens)
    except TokenError as error:
        raise RemoteProtocolError("blocks", str(error)) from None
