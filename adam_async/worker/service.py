"""The model-worker role: joins a cluster and trains one run after the other on its compute threads."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

from adam_async.controller.role import Role, RoleSettings
from adam_async.errors import AdamError, DeadlineExceeded, RunFailed, StepFailed, first_cause
from adam_async.messages import Greet, unpack
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.parameter_server.storage import ShardStorage, StoragePool
from adam_async.run.cluster_map import ClusterMap, failed_word, ready_word
from adam_async.run.counts import Lag, WorkerCounts
from adam_async.run.step_model import StepModel
from adam_async.run.store_record import joined_arrays
from adam_async.run.train_step import StepSpec, TrainStep
from adam_async.run.training_program import ProgramRecord, TrainingProgram, read_training
from adam_async.run.user_code import StepSource
from adam_async.runtime.clock import LoopLag
from adam_async.worker.mapped_memory import mapped_memory
from adam_async.worker.run_session import ComputeSettings, RunSession, SessionSetup
from dataflow import ComputePool
from transport import BufferPool, Link, TransportError

logger = logging.getLogger(__name__)


class ModelWorker(Role):
    """One model worker, for the duration of its `async with`.

    Args:
        settings: The worker's place in its cluster; its timeline also notes each group's events.
        compute: Settings of the worker's compute threads.
        buffers: Memory for pulled values.
        entropy: Source of random bytes for the session id.
        storage_pool: Memory of this process's servers, for runs in place.
        layers: Kinds of layers that a model may use.
        steps: Steps of the user that runs may use.

    When the `async with` block ends, it reports to the controller that the worker leaves. Other replicas then
    get the worker's leases at once, and with `ssp` and `bsp` stop waiting for the worker. The block ends
    after the compute threads' jobs; pushes in transit are applied at most once, and the data server leases
    their groups again.
    """

    def __init__(
        self,
        settings: RoleSettings,
        compute: ComputeSettings,
        *,
        buffers: BufferPool,
        entropy: Callable[[int], bytes],
        storage_pool: StoragePool | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        steps: StepSource | None = None,
    ) -> None:
        super().__init__(settings, info={"threads": compute.threads, "in_flight": compute.in_flight})
        self._buffers = buffers
        self._layers = layers
        self._steps = steps or StepSource()
        self._compute = compute
        self._entropy = entropy
        self._storage_pool = storage_pool or StoragePool()
        self._lag = LoopLag()
        self._run_session: RunSession | None = None
        """Session of the run in progress or just ended."""
        self._refused_greets = 0

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"lag": self._lag.run(), "work": self._work()}

    async def _goodbye(self) -> None:
        await self._membership.leave()

    # --- the run -----------------------------------------------------------------------------

    async def _work(self) -> None:
        """Train each run with a slot for this worker, once per generation of its replica."""
        done = ("", 0)
        async for cluster in self._membership.changes():
            run = cluster.run
            node = cluster.nodes.get(self._identity.node)
            if run is None or run.over or node is None:
                continue
            if not self._membership.joined:
                continue  # the map names an earlier membership of this node, whose slot another worker has
            replica_generation = cluster.replica_generation(node.replica)
            if (
                not replica_generation
                or (run.id, replica_generation) == done
                or not _primaries_ready(cluster)
            ):
                continue
            try:
                program = read_training(run)
                step = await self._step_of(program, cluster)
            except AdamError as error:  # the worker stays for the runs that it may train
                done = (run.id, replica_generation)
                logger.warning("%s refuses run %s: %s", self._identity.node, run.id, error)
                await self._report_failed(run, error)
                continue
            in_place = program.config.weights == "aliased"
            has_servers = self._storage_pool.has_servers
            storage = self._storage_pool.find(run.id) if in_place and has_servers else None
            if in_place and has_servers and storage is None:
                continue  # the servers have left this run for a newer one, which a later map will name
            done = (run.id, replica_generation)
            try:
                await self._train(cluster, program, node.replica, storage, step)
            except ExceptionGroup as errors:
                failure = first_cause(errors).__cause__  # of the node of the graph that ran the step
                if not isinstance(failure, StepFailed):
                    raise
                await self._report_failed(run, failure)
                raise failure from failure.__cause__

    async def _step_of(self, program: TrainingProgram, cluster: ClusterMap) -> TrainStep | None:
        """Make the step of a run; None for a run that trains a network.

        Raises:
            ConfigError: The worker may not import the step or cannot make it, or the step's arrays or
                constants differ from the run's.
            StepFailed: The step's `arrays` raised.
        """
        spec = StepSpec.from_dict(program.spec)
        if spec is None:
            return None
        # On a thread, so that a long `TrainStep.prepare` delays no heartbeat to the controllers.
        async with ComputePool(threads=1, name="step") as pool:
            step = await pool.run(self._steps.step_for, spec, cost="model")
            model = await pool.run(StepModel, step, spec, cost="model")  # checks the record
        if (store := cluster.run_store) is not None:
            name = next(name for name, record in cluster.stores.items() if record.id == store.id)
            model.check_store(joined_arrays(name, store, cluster.arrays))
        return step

    async def _report_failed(self, run: ProgramRecord, error: AdamError) -> None:
        """Report in the cluster map that this worker cannot train a run."""
        with suppress(TimeoutError, DeadlineExceeded):
            async with asyncio.timeout(self._waits.call_s):
                await self._membership.set_node(failed=failed_word(run.id, str(error)))

    async def _train(
        self,
        cluster: ClusterMap,
        program: TrainingProgram,
        replica: int,
        storage: ShardStorage | None,
        step: TrainStep | None,
    ) -> None:
        """Train one run until it ends, or until the replica begins another generation."""
        run = cluster.run
        assert run is not None
        replica_generation = cluster.replica_generation(replica)
        word = ready_word(run.id, replica_generation)
        number = int.from_bytes(self._entropy(7), "little")
        async with AsyncExitStack() as stack:
            if program.config.weights == "aliased" and storage is None:
                mapping = mapped_memory(
                    self._endpoint,
                    cluster,
                    program.config,
                    replica=replica,
                    session=number,
                    threads=self._compute.threads,
                    in_flight=self._compute.in_flight,
                    waits=self._waits,
                )
                try:
                    storage = await stack.enter_async_context(mapping)
                except RunFailed as error:  # the others continue, as if this worker could not import the step
                    logger.warning("%s refuses run %s: %s", self._identity.node, run.id, error)
                    await self._report_failed(run, error)
                    return
            setup = SessionSetup(
                endpoint=self._endpoint,
                cluster=cluster,
                program=program,
                replica=replica,
                part=cluster.nodes[self._identity.node].partition,
                session=number,
                waits=self._waits,
                buffers=self._buffers,
                compute=self._compute,
                storage=storage,
                layers=self._layers,
                step=step,
                timeline=self._timeline,
            )
            session = self._run_session = RunSession(setup)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(session.run(), name=f"{self._identity.node}/train-{run.id}"),
                    group.create_task(self._report_ready(session, word), name=f"{self._identity.node}/ready"),
                ]
                # The run may end before this worker is ready.
                await self._follow_map(run.id, replica, replica_generation, session.map_changed)
                for task in tasks:
                    task.cancel()
        logger.info("%s is done with run %s", self._identity.node, run.id)

    async def _on_link(self, link: Link) -> None:
        if link.peer.role == "worker":
            await self._on_peer_worker(link)
        else:
            await super()._on_link(link)

    async def _on_peer_worker(self, link: Link) -> None:
        """Serve another worker of the replica; a worker of another replica generation gets no answer."""
        self._traffic.watch(link)
        try:
            async with asyncio.timeout(self._waits.call_s):
                greet = unpack(await link.receive(), Greet)
            peer_workers = self._run_session.peer_workers if self._run_session is not None else None
            if peer_workers is not None and peer_workers.knows(greet, link.peer):
                await peer_workers.welcome(link, greet)
            else:
                self._refused_greets += 1
        except (TransportError, TimeoutError) as error:
            logger.info("%s: %s did not greet: %s", self._identity.node, link.peer.node, error)
        finally:
            link.abort()
            self._traffic.gone(link)

    async def _report_ready(self, session: RunSession, word: str) -> None:
        await session.prepared.wait()
        await self._membership.set_node(ready=word)

    async def _follow_map(
        self,
        run: str,
        replica: int,
        replica_generation: int,
        map_changed: Callable[[ClusterMap], None] = lambda _: None,
    ) -> None:
        """Pass on each cluster map until the run, or this generation of the replica, ends."""
        async for cluster in self._membership.changes():
            map_changed(cluster)
            now = cluster.run
            if now is None or now.id != run or now.over:
                return
            if cluster.replica_generation(replica) != replica_generation:
                return

    def statistics(self) -> WorkerCounts:
        """Return the counts of the worker, and of the run in progress or just ended."""
        session = self._run_session
        counts = session.statistics() if session is not None else WorkerCounts()
        counts.lag_s = Lag(**self._lag.percentiles())
        counts.late_s, counts.late_buckets = self._lag.all.total_s, self._lag.all.buckets
        counts.buffers = self._buffers.statistics()
        counts.refused_greets = self._refused_greets
        return self._with_common(counts)

    def __repr__(self) -> str:
        return f"<ModelWorker {self._identity.node} at {self.address} {self._compute.threads} threads>"


def _primaries_ready(cluster: ClusterMap) -> bool:
    store = cluster.run_store
    return store is not None and cluster.serving(store) and bool(cluster.live("data"))
