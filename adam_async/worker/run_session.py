"""One worker's part in one run: training from the first pull to the end, and all objects for it.

Path of a group: the data client receives it in advance. `_fill` admits it when the engine has a slot, no
server has too many unanswered pushes, and the admission gate is open. The engine runs the group through the
training mode's graph: a compute thread trains it (`training.py`), the stepper sends its step (`stepper.py`),
and the puller installs the returned values (`puller.py`). `GroupEvents` returns the results: the end of a
group's graph frees the slot, and an acknowledged push sends the group's report to the data server. In a run
in place the compute thread applies the rule to the servers' memory (`training.py`), and the worker pushes
only a report of the step (`in_place_mode.py`).
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient, SessionIdentity
from adam_async.data_server.client import DataClient, WorkerSlot
from adam_async.data_server.group_reader import GroupLimits
from adam_async.errors import ConfigError, DeadlineExceeded
from adam_async.messages import Block, Finished, Greet, Lease
from adam_async.model.context import Context
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.storage import ShardStorage
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits, default_in_flight, replica_in_flight
from adam_async.run.counts import WorkerCounts
from adam_async.run.partition import table_of
from adam_async.run.shard_table import ShardTable, holders, part_table
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.train_step import StepSpec, TrainStep
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.channel import Endpoint, StackedTaskGroup
from adam_async.runtime.machine import pinned_cpus, usable_cores
from adam_async.runtime.timeline import Timeline
from adam_async.worker.copy_mode import CopyMode, PartitionMode
from adam_async.worker.in_place_mode import InPlaceMode, groups_in_flight
from adam_async.worker.kernel_change import KernelChange
from adam_async.worker.peer_workers import PeerWorkers
from adam_async.worker.training import GroupEvents, ModeSetup, Trained
from dataflow import (
    ComputePool,
    Engine,
    EngineClosed,
    EngineSettings,
    MakePool,
    Tag,
    TokenError,
    WaitTimedOut,
)
from transport import BufferPool, RemoteProtocolError

COMPILE_S = 120.0
"""Maximum time in seconds for which a run's end waits for a compute thread, which may be compiling."""

LEAD = 2
"""Number of groups, per group in flight, by which a worker may be ahead of a receiver of its blocks: enough
to have the receiver's input ready for any group."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputeSettings:
    """The compute threads of a worker.

    Attributes:
        threads: Number of compute threads.
        in_flight: Number of groups in flight; 0 means twice the threads of the worker's replica, or in place
            as many groups as keep the threads busy. All workers of a replica use the smallest of their
            numbers.
        pace: Share of a core's time that each thread may use; see `ComputePool`.
        pool: Pool that a replica's workers share, made with a `WeakKeyDictionary` for each thread; None if
            the worker has a separate pool.
        make_pool: Makes the worker's own pool.
    """

    threads: int
    in_flight: int
    pace: float = 1.0
    pool: ComputePool | None = None
    make_pool: MakePool = ComputePool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionSetup:
    """The arguments of one worker's part in one run: the run, the worker's slot, and its resources."""

    endpoint: Endpoint
    cluster: ClusterMap
    """Cluster map at the start of the session; it has a run."""
    program: TrainingProgram
    """Training program of the run."""
    replica: int
    part: int
    """Slot of the worker in its replica."""
    session: int
    """Id of the worker's push session."""
    waits: Waits
    buffers: BufferPool
    """Memory for pulled values."""
    compute: ComputeSettings
    storage: ShardStorage | None = None
    """Memory of the servers, for a run in place."""
    layers: Mapping[str, type[Layer]] = field(default_factory=lambda: BUILTIN_LAYERS)
    step: TrainStep | None = None
    """Step of a run that trains no network; None if it trains a network."""
    timeline: Timeline | None = None
    """Timeline that notes the events of each group."""


class _Share(NamedTuple):
    """The share of the model that a worker trains, with its shards."""

    table: ShardTable
    partition: Partition | None = None
    """The worker's partition of a cut model; None if the model is not cut."""


class RunSession:
    """One worker's part in one run.

    `prepared` is set when the worker is ready to train; `run` then trains until it is cancelled.
    """

    def __init__(self, setup: SessionSetup) -> None:
        self._setup, self._cluster = setup, setup.cluster
        program = self._program = setup.program
        config = self._config = program.config
        self._threads = setup.compute.threads
        self._model = self._new_model()
        self._share = self._new_share()
        self._kernels = self._new_kernels()
        self._limits = self._new_limits()
        self._push_identity = SessionIdentity(
            store=self._run_id,
            session=setup.session,
            incarnation=self._replica_generation,
            replica=setup.replica,
            generation=self._cluster.generation,
        )
        self._client = self._new_client()
        self._in_flight = self._groups_in_flight()
        self._ports: Mapping[int, str] = {}
        """Port of the graph for each crossing towards this worker."""
        self.peer_workers = self._new_peer_workers()
        """The replica's other workers, in a run whose model is cut."""
        self._data = self._new_data_client()
        self._mode = self._new_mode()
        self.prepared = asyncio.Event()
        self._pool: ComputePool | None = None
        self._engine: Engine | None = None
        self._filling = False
        first = (setup.replica * self._cluster.partitions + setup.part) * self._threads
        self._cpus = pinned_cpus(threads=self._threads, first=first) if config.pin_threads else None

    # --- construction ------------------------------------------------------------------------

    @property
    def _run_id(self) -> str:
        run = self._cluster.run
        assert run is not None
        return run.id

    def _new_model(self) -> RunModel:
        setup, config = self._setup, self._config
        step = StepSpec.from_dict(self._program.spec)
        if step is not None:
            assert setup.step is not None, "the worker has the step of its run"
            return StepModel(setup.step, step, keep_going=config.keep_going)
        spec = ModelSpec.from_dict(self._program.spec)
        return Network(spec, dtype=config.dtype, kernels=config.kernels, layers=setup.layers)

    @property
    def _network(self) -> Network:
        """The model of a run that trains a network."""
        assert isinstance(self._model, Network), "a step has no network"
        return self._model

    @property
    def _replica_generation(self) -> int:
        return self._setup.cluster.replica_generation(self._setup.replica)

    @property
    def _image_rows(self) -> tuple[int, int] | None:
        """Rows of each image that the worker reads; None: all."""
        return None if self._share.partition is None else self._share.partition.image_rows

    def _new_share(self) -> _Share:
        table = table_of(self._model, shard_bytes=self._config.shard_bytes, plan=self._program.plan)
        if self._program.plan is None:
            return _Share(table)
        plan = PartitionPlan.from_dict(self._program.plan)
        partition = Partition(self._network, plan, self._setup.part)
        return _Share(part_table(table, partition.network.parameters), partition=partition)

    def _new_kernels(self) -> KernelChange | None:
        if isinstance(self._model, StepModel):
            return None
        # In runs that wait, bits must not depend on the moment at which compiled kernels are ready.
        waits = self._program.plan is not None or self._config.synchronous or self._config.record
        return KernelChange(self._model, waits=waits, cores=usable_cores())

    def _new_limits(self) -> GroupLimits:
        config, shape, rows = self._config, self._model.input_shape, self._image_rows
        if rows is not None:
            shape = (shape[0], rows[1] - rows[0], *shape[2:])
        limits = GroupLimits(
            images=config.images_per_group,
            shape=shape,
            classes=self._classes,
            epochs=config.epochs,
            validation=config.validation,
        )
        limits.map_changed(self._cluster)
        return limits

    @property
    def _classes(self) -> int:
        """Number of classes among the labels."""
        if isinstance(self._model, StepModel):
            return self._model.spec.classes
        return prod(self._model.layers[-1].input_shapes[0])

    def _new_client(self) -> ParameterClient:
        cluster = self._cluster
        return ParameterClient(
            self._setup.endpoint,
            self._push_identity,
            homes=holders(self._share.table, cluster.buckets),
            cluster=cluster,
            waits=self._setup.waits,
        )

    def _groups_in_flight(self) -> int:
        setup, compute, cluster = self._setup, self._setup.compute, self._cluster
        if self._share.partition is not None:
            # All workers of a replica use the smallest number of any: a group is in flight on all of them.
            members = [cluster.nodes[name].info for name in cluster.members(setup.replica)]
            return replica_in_flight(members, cluster.partitions)
        if wanted := compute.in_flight or self._config.in_flight:
            return wanted
        if setup.storage is not None:
            return groups_in_flight(compute.threads, self._config.images_per_group)
        return default_in_flight(compute.threads, cluster.partitions)

    def _new_peer_workers(self) -> PeerWorkers | None:
        setup, partition = self._setup, self._share.partition
        if partition is None:
            return None
        self._ports = {crossing.number: f"in-{crossing.number}" for crossing in partition.incoming}
        greet = Greet(
            run=self._run_id,
            replica=setup.replica,
            replica_generation=self._replica_generation,
            partition=partition.worker,
            received=0,
            begun=0,
        )
        return PeerWorkers(
            setup.endpoint,
            greet=greet,
            cluster=self._cluster,
            partition=partition,
            group_images=self._limits.images_of,
            lead=LEAD * self._in_flight,
            on_blocks=self._on_blocks,
            waits=setup.waits,
        )

    def _new_data_client(self) -> DataClient:
        setup = self._setup
        slot = WorkerSlot(self._run_id, setup.replica, self._replica_generation, setup.part)
        return DataClient(
            setup.endpoint,
            slot,
            address=lambda: self._cluster.dealer_address,
            servers=lambda: self._cluster.data_servers_for(setup.replica),
            rows=self._image_rows,
            limits=self._limits,
            ahead=max(self._config.groups_ahead(prod(self._model.input_shape)), self._in_flight),
            first_piece=max(self._in_flight, self._config.push_every) if self._config.pooled else None,
            waits=setup.waits,
        )

    def _new_mode(self) -> CopyMode | InPlaceMode:
        setup, share, timeline = self._setup, self._share, self._setup.timeline
        mode = ModeSetup(
            config=self._config,
            table=share.table,
            buckets=self._cluster.buckets,
            client=self._client,
            events=GroupEvents(
                # Without a timeline the data client gets a report without an extra call.
                finished=self._data.finished if timeline is None else partial(self._finished, timeline),
                landed=self._landed,
                section_done=self._section_done,
                stepped=None if timeline is None else partial(self._stepped, timeline),
            ),
        )
        if share.partition is not None:
            assert self.peer_workers is not None
            return PartitionMode(
                mode,
                partition=share.partition,
                send_block=self.peer_workers.put,
                session=self._push_identity,
                buffers=setup.buffers,
                in_flight=self._in_flight,
            )
        if setup.storage is not None:
            clock = None if timeline is None else timeline.clock
            return InPlaceMode(
                mode, model=self._network, storage=setup.storage, threads=setup.compute.threads, clock=clock
            )
        if self._config.record and setup.compute.threads > 1:
            raise ConfigError(
                f"record needs one compute thread per worker, because a replay must know the order in which "
                f"groups were trained; this worker has threads={setup.compute.threads}: set threads to 1"
            )
        return CopyMode(
            mode,
            model=self._model,
            session=self._push_identity,
            buffers=setup.buffers,
            in_flight=self._in_flight,
        )

    # --- the run -----------------------------------------------------------------------------

    def map_changed(self, cluster: ClusterMap) -> None:
        """Take up a newer cluster map, which may name another data server or other primaries."""
        self._cluster = cluster
        self._limits.map_changed(cluster)
        self._data.map_changed()
        self._client.map_changed(cluster)

    async def run(self) -> None:
        """Prepare, then train until cancelled."""
        node, timeline = self._setup.endpoint.identity.node, self._setup.timeline
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(StackedTaskGroup())
            stack.callback(group.create_task(self._client.run(), name=f"{node}/parameters").cancel)
            if self.peer_workers is not None:
                stack.callback(group.create_task(self.peer_workers.run(), name=f"{node}/peer-workers").cancel)
            self._pool = self._setup.compute.pool
            if self._pool is None:
                with self._enough_memory():
                    self._pool = await stack.enter_async_context(self._new_pool())
            if self._kernels is not None:
                await self._kernels.prepare(self._pool)
            # Do this after compiling, because a worker that joins a run in progress would begin with old
            # values.
            await self._mode.prepare()
            stack.callback(group.create_task(self._data.run(), name=f"{node}/data").cancel)
            self._engine = await stack.enter_async_context(
                Engine(
                    self._mode.graph(),
                    pool=self._pool,
                    in_flight=self._in_flight,
                    contexts=await self._new_contexts(self._pool),
                    on_room=self._fill,
                    trace=None if timeline is None else partial(timeline.fired, node, self._run_id),
                    settings=EngineSettings(
                        early_limit=self._early_limit, wait_timeout_s=self._setup.waits.patience_s
                    ),
                )
            )
            if self._kernels is not None:
                change = self._change_kernels(self._kernels)
                stack.callback(group.create_task(change, name=f"{node}/kernels").cancel)
            self.prepared.set()
            if self._pulls_to_begin:
                while not self._data.has_group:
                    await self._data.wait_group()
                if self.peer_workers is not None:
                    await self.peer_workers.wait_linked()
                await self._mode.refresh()
            if isinstance(self._mode, InPlaceMode):
                stack.enter_context(self._mode.counting())
            await self._feed(self._engine)

    @property
    def _early_limit(self) -> int:
        """Maximum number of tokens that may arrive before their groups begin here."""
        partition = self._share.partition
        return 0 if partition is None else LEAD * self._in_flight * max(1, len(partition.incoming))

    @property
    def _pulls_to_begin(self) -> bool:
        """Whether the copy may be old at the first group, without a clock that shows it.

        After a warm start, or if other workers of a replica were ready later, other replicas have pushed
        since the first pull.
        """
        late = self._config.warm_start > 0 or self._cluster.partitions > 1
        return self._setup.storage is None and self._config.slack is None and late

    def _new_pool(self) -> ComputePool:
        return self._setup.compute.make_pool(
            threads=self._threads,
            name=self._setup.endpoint.identity.node,
            contexts=self._mode.new_scratch,
            affinity=[(cpu,) for cpu in self._cpus] if self._cpus is not None else None,
            pace=self._setup.compute.pace,
            close_timeout_s=COMPILE_S,
        )

    async def _new_contexts(self, pool: ComputePool) -> list[Context | None]:
        """Make a context for each group in flight, and a spare one, on compute threads in turn.

        Only groups of a cut model have contexts; otherwise each thread has one, and these are None. Memory is
        on the NUMA node of the thread that first writes it. Contexts move between threads, so no
        context stays near all its users. Making the contexts on the threads in turn spreads them over the
        memory nodes. The thread that fills a large push buffer writes it first.
        """
        with self._enough_memory():
            return [
                await pool.run(self._mode.new_context, cost="context") for _ in range(self._in_flight + 1)
            ]

    @contextmanager
    def _enough_memory(self) -> Iterator[None]:
        """Turn a lack of memory into an error that names the options to lower."""
        try:
            yield
        except MemoryError as error:
            images = self._config.images_per_group
            raise ConfigError(
                f"not enough memory for {self._in_flight} groups in flight of {images} images each, with "
                f"{self._threads} threads ({error}); lower in_flight, images_per_group or threads"
            ) from None

    async def _change_kernels(self, kernels: KernelChange) -> None:
        engine, pool = self._engine, self._pool
        assert engine is not None
        assert pool is not None
        await kernels.run(pool, lambda: engine.statistics().finished)

    async def _feed(self, engine: Engine) -> None:
        """Keep the engine full.

        While groups are available and servers keep up, `_fill` does the admission within the engine's own
        iterations. This task waits for the missing condition.
        """
        gate = self._mode.gate
        while True:
            if not self._data.has_group:
                if self._data.exhausted:
                    if gate is None:
                        await engine.drain()
                    self._flush()
                await self._data.wait_group()
            elif not self._client.may_push:
                await self._client.admit()
            elif not engine.has_room:
                await self._wait_room(engine)
            elif gate is not None and not gate.opens_for(self._data.first):
                await gate.wait()
            elif self.peer_workers is not None and not self.peer_workers.keep_up:
                await self._wait_for_peers(self.peer_workers)
            self._fill()

    async def _wait_for_peers(self, peer_workers: PeerWorkers) -> None:
        """Wait for other workers of the replica, without a deadline while pushes wait for copies on servers.

        Raises:
            DeadlineExceeded: See `PeerWorkers.wait_progress`.
        """
        try:
            await peer_workers.wait_progress()
        except DeadlineExceeded:
            if not self._client.lacks_copies:
                raise

    async def _wait_room(self, engine: Engine) -> None:
        """Wait for room that `_fill` lacks, as long as a group is trained within each `patience_s`.

        Raises:
            WaitTimedOut: No group was trained in that time, although no pushes wait for copies.
        """
        while True:
            trained = engine.statistics().finished
            try:
                await engine.wait_room()
                return
            except WaitTimedOut:
                if engine.statistics().finished == trained and not self._client.lacks_copies:
                    raise

    def _fill(self) -> None:
        """Admit groups while some are available, the engine has room, and servers and peers keep up.

        Never waits.
        """
        engine, data, client, timeline = self._engine, self._data, self._client, self._setup.timeline
        gate, peer_workers = self._mode.gate, self.peer_workers
        assert engine is not None
        if self._filling:
            return  # an admission begins an iteration, in which the engine asks again: groups stay in order
        self._filling = True
        while data.has_group and engine.has_room and client.may_push:
            if gate is not None and not gate.opens_for(data.first):
                break
            if peer_workers is not None:
                if not peer_workers.keep_up:
                    break
                peer_workers.begin()
            begin = timeline.clock() if timeline is not None else 0.0
            group = data.take()
            tag = Tag(group.lease.epoch, group.lease.number, group.lease.attempt)
            engine.admit_nowait(tag)
            engine.deliver("group", tag, group if gate is None else gate.admit(group))
            if timeline is not None:
                timeline.delivered(self._setup.endpoint.identity.node, self._run_id, tag, begin)
        self._filling = False

    def _flush(self) -> None:
        """Send the collected steps: no more groups come for now."""
        timeline = self._setup.timeline
        begin = timeline.clock() if timeline is not None else 0.0
        self._mode.flush(self._data.end)
        if timeline is not None:
            timeline.flushed(self._setup.endpoint.identity.node, begin)

    # --- events of groups --------------------------------------------------------------------

    def _finished(self, timeline: Timeline, report: Finished) -> None:
        begin = timeline.clock()
        self._data.finished(report)
        timeline.reported(self._setup.endpoint.identity.node, self._run_id, report, begin)

    def _stepped(self, timeline: Timeline, clock: int, leases: Sequence[Lease]) -> None:
        timeline.stepped(self._setup.endpoint.identity.node, self._run_id, self._setup.session, clock, leases)

    def _section_done(self, section: int, tag: Tag, trained: Trained | None) -> None:
        assert self._engine is not None
        self._engine.deliver_threadsafe(f"ahead-{section}", tag, trained)

    def _on_blocks(self, arrived: Sequence[tuple[Block, NDArray[Any]]]) -> None:
        """Take blocks of some groups from another worker of the replica."""
        hand_over(self._engine, self._ports, arrived)

    def _landed(self, tag: Tag) -> None:
        assert self._engine is not None
        with suppress(EngineClosed):  # the run has ended; answers still arrive until its links are closed
            self._engine.deliver("landed", tag, None)

    def statistics(self) -> WorkerCounts:
        engine = self._engine.statistics() if self._engine is not None else None
        counts = self._mode.statistics()
        if self._kernels is not None:
            counts.kernels = self._kernels.statistics(engine.finished if engine is not None else 0)
        counts.cpus = self._cpus
        counts.parameters = self._client.statistics()
        counts.data = self._data.statistics()
        counts.neighbours = self.peer_workers.statistics() if self.peer_workers is not None else {}
        counts.pool = self._pool.statistics() if self._pool is not None else None
        counts.engine = engine
        return counts


def hand_over(
    engine: Engine | None, ports: Mapping[int, str], arrived: Sequence[tuple[Block, NDArray[Any]]]
) -> None:
    """Deliver each block of another worker to the port of its crossing.

    Raises:
        RemoteProtocolError: No group has begun, or a block has arrived before.
    """
    if engine is None:
        raise RemoteProtocolError("blocks", "the replica is not ready, and no group has begun")
    tokens = [
        (ports[block.crossing], Tag(block.epoch, block.number, block.attempt), tensor)
        for block, tensor in arrived
    ]
    try:
        with suppress(EngineClosed):  # the run has ended; other workers may not know it yet
            engine.deliver_all(tokens)
    except TokenError as error:
        raise RemoteProtocolError("blocks", str(error)) from None
