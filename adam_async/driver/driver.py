"""The driver: submits a run, evaluates after each epoch, ends it, and gathers what the roles counted.

A driver is a member of the cluster like the others. It does not care who started the roles: the same
code drives a cluster in its own event loop, child processes, or roles started by hand on many hosts.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    check_data,
    resumed_config,
    resumed_spec,
)
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.checkpoint.starting_values import FROM_THE_START, fill_from, first_states
from adam_async.checkpoint.trained_model import Model as TrainedModel
from adam_async.checkpoint.writer import Checkpointer, common_manifest, make_tensors
from adam_async.controller.client import Membership
from adam_async.data_server.validation_split import check_validation
from adam_async.driver.augmentation import transforms_of
from adam_async.driver.divergence import divergence, guessing, guessing_loss, largest_loss
from adam_async.driver.epoch_choice import EpochChoice
from adam_async.driver.epoch_results import EpochResults
from adam_async.driver.evaluator import Evaluator
from adam_async.driver.events import Incidents
from adam_async.driver.notices import Notices
from adam_async.driver.planning import plan_here
from adam_async.driver.readiness import LOOK_S, Readiness, check_failed
from adam_async.driver.recorder import Recorder
from adam_async.driver.resumption import bounded
from adam_async.driver.role_counts import RoleCounts
from adam_async.driver.role_queries import Inquiries
from adam_async.driver.silence import Silence
from adam_async.driver.snapshot import pull_snapshot
from adam_async.errors import (
    ConfigError,
    DeadlineExceeded,
    Diverged,
    RecordError,
    RoleDied,
    RunFailed,
    first_cause,
)
from adam_async.messages import read_number
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network as Model
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.client import ParameterClient, SessionIdentity
from adam_async.run.cluster_map import ClusterMap, EpochRecord, NodeRecord, RunRecord, skipped_groups
from adam_async.run.config import Config
from adam_async.run.learning_rate import Schedule, decide, squared_norm_of
from adam_async.run.memory_need import check_memory
from adam_async.run.model_selection import check_fits, check_size, choose_model
from adam_async.run.partition import check_crossings, table_of
from adam_async.run.progress import Progress, is_ledger_leader
from adam_async.run.result import CheckpointResult, EpochResult, OnEpoch, RunResult
from adam_async.run.series import Series
from adam_async.run.shard_table import holders
from adam_async.run.stragglers import describe
from adam_async.runtime.machine import ProcessMemory, process_memory
from adam_async.runtime.timeline import Timeline
from adam_async.runtime.traffic import Traffic
from dataflow import ComputePool, MakePool
from transport import BufferPool, Identity, LinkConfig, Network, RemoteError, TransportError

OUTSIDE = "the cluster is not running: train within its block, `async with cluster: await cluster.train()`"
"""Error of a cluster that is asked to train before or after its block."""


class Driver:
    """Drives one run at a time.

    Args:
        network: How to reach the cluster.
        controller: Address of the controller, or those of several joined by commas.
        identity: Who we are; role ``driver``.
        config: The run.
        buffers: Memory for received values.
        threads: Threads that evaluate.
        spec: The model, if the caller brings one; otherwise `config.model` says.
        model_text: What the TOML file that `config.model` names holds; the caller has read it.
        transforms: What becomes of training images where `config.augment` is set; None is what suits them.
        functions: Kinds of transforms that are functions of the user; see `Recipe.of`.
        layers: Kinds of layers that the model may use; every role must know the same.
        timeline: Where epochs and messages are noted.
        checkpoints: Where checkpoints go; without it none are taken.
        resume: What the first training continues; its model and rate are in force.
        init: Saved model that each training begins with; see `fill_from`.
        together: Whether the first worker of each replica trains all parts of a model that is cut.
        make_pool: Makes the pool that evaluates.
        process_memory: Says which process this is, and what that has held.
        available_bytes: Says what memory there is for the run, if all roles are on this machine.

    `config` is what is run: what the caller left open is decided there. Cancelling `train` ends the run in
    good order: phase `finished` is set if the controller can be reached within `drain_s`.
    """

    def __init__(
        self,
        *,
        network: Network,
        controller: str,
        identity: Identity,
        config: Config,
        buffers: BufferPool,
        threads: int,
        spec: ModelSpec | None = None,
        model_text: str | None = None,
        transforms: Sequence[Mapping[str, Any]] | None = None,
        functions: Mapping[str, Callable[..., Any]] = {},
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        timeline: Timeline | None = None,
        checkpoints: CheckpointFolder | None = None,
        resume: Checkpoint | None = None,
        init: TrainedModel | None = None,
        together: bool = False,
        make_pool: MakePool = ComputePool,
        process_memory: Callable[[], ProcessMemory] = process_memory,
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._network = network
        self._identity = identity
        if config.weights == "auto":  # who owns the whole cluster would have decided otherwise
            config = msgspec.structs.replace(config, weights="copy")
        if resume is not None:
            config, spec = resumed_config(resume.manifest, config), resumed_spec(resume.manifest, spec)
        if checkpoints is None:
            config = msgspec.structs.replace(config, checkpoint_every=0)
        elif config.evaluation == "concurrent":
            raise CheckpointError(
                "evaluation=concurrent does not pause at the end of an epoch, where checkpoints are taken: "
                "leave it at wait, or take none"
            )
        if init is not None and (resume is not None or config.record):
            other = "resume continues" if resume is not None else "record repeats"
            raise ConfigError(f"init and {other} both set the first weights: leave one of them out")
        self._folder = checkpoints
        self._resume = resume
        self._init = init
        self._together = together
        self._make_pool = make_pool
        self._process_memory = process_memory
        self._available_bytes = available_bytes
        self._asked = self.config = config
        self._buffers = buffers
        self._threads = threads
        self._spec = spec
        self._model_text = model_text
        self._transforms = transforms
        self._functions = functions
        self._layers = layers
        self._waits = config.waits
        self._timeline = timeline
        self._traffic = Traffic(identity.node, timeline=timeline)
        self._inquiries = Inquiries(
            network=network, identity=identity, waits=self._waits, traffic=self._traffic
        )
        self._copies = ShardCopies(
            network=network, identity=identity, waits=self._waits, traffic=self._traffic
        )
        self._plan: dict[str, Any] | None = None
        self._results = EpochResults()
        self._checkpointer: Checkpointer | None = None
        self._recorder: Recorder | None = None
        self._membership = Membership(
            network=network,
            controller=controller,
            identity=identity,
            record=NodeRecord(role="driver", address="", incarnation=identity.incarnation),
            waits=self._waits,
            traffic=self._traffic,
            seen=self._results.look,
        )
        self._stack = AsyncExitStack()
        self._silence = Silence()
        self._notices = Notices(self._membership)
        self._incidents = Incidents(self._notices.event)
        self._counts = RoleCounts(
            membership=self._membership,
            inquiries=self._inquiries,
            run=lambda: self._run,
            note=self.note,
            grace_s=self._waits.grace_s,
        )
        self._warned_of_divergence = False
        self._failure = ""
        """By what the run in progress fails, for its record in the map."""
        self._runs = 0
        self._training = False
        self._stopping = asyncio.Event()
        self._choice = EpochChoice()
        self.progress = Progress(consistency=config.consistency)
        self._readiness = Readiness(
            config=config, membership=self._membership, inquiries=self._inquiries, progress=self.progress
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            following = self._incidents.follow(self._membership.changes())
            tasks = {
                "membership": self._membership.run(),
                "incidents": following,
                "notices": self._notices.run(),
            }
            for name, work in tasks.items():
                task = group.create_task(work, name=f"{self._identity.node}/{name}")
                stack.callback(task.cancel)
            pool = self._pool = await stack.enter_async_context(
                self._make_pool(threads=self._threads, name=f"{self._identity.node}-evaluate")
            )
            self._evaluator = Evaluator(
                network=self._network,
                identity=self._identity,
                waits=self._waits,
                traffic=self._traffic,
                pool=pool,
                threads=self._threads,
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    @property
    def map(self) -> ClusterMap:
        """The cluster map as last heard."""
        return self._membership.map

    @property
    def leading(self) -> str:
        """Node id of the controller that leads, as far as is known; empty while we look for it."""
        return self._membership.leading

    @property
    def controllers(self) -> tuple[str, ...]:
        """Addresses of all controllers, as far as they are known."""
        return self._membership.controllers

    def listen(self, on_event: Callable[[str], None]) -> None:
        """Have a function called with each incident of a run at the moment when it is noted."""
        self._notices.on_event = on_event

    # --- the run -----------------------------------------------------------------------------

    async def train(self, on_epoch: OnEpoch | None = None) -> RunResult:
        """Run all epochs. May be called again: each call is a run of its own, from the beginning.

        With a checkpoint to resume, the first call continues its run. Epochs that are over are in the result,
        and not told again.

        Args:
            on_epoch: Called, and awaited if it is async, after each epoch's evaluation. Its False ends the
                run with that epoch.

        Raises:
            CheckpointError: The folder for checkpoints has those of another run, or the data are others.
            DeadlineExceeded: The roles were not there or not ready within `prepare_s`; names them. Or
                the disk did not answer within `checkpoint_s` at the beginning.
            RoleDied: A role that the run needs was lost; says which.
            RunFailed: It ended early for another reason, such as a controller that was started again; or this
                driver is already training.
        """
        if self._training:
            raise RunFailed(
                "already training: one cluster trains one run at a time; wait for the run in progress, or "
                "open another cluster"
            )
        self._training = True
        self._stopping.clear()
        try:
            result = await self._train(on_epoch)
            self.progress.phase = "finished"
        except asyncio.CancelledError:
            self.progress.phase = "interrupted"
            raise
        except BaseException:
            self.progress.phase = "failed"
            raise
        finally:
            self._training = False
        return result

    def stop(self) -> None:
        """End the training in progress after the groups at hand; `train` returns what it came to.

        The epoch in progress counts with the images that it has trained. Without a training in progress this
        does nothing.
        """
        if self._training:
            self._stopping.set()

    async def _train(self, on_epoch: OnEpoch | None) -> RunResult:
        self._incidents.begin(anew=self._runs > 0)
        self._warned_of_divergence, self._failure = False, ""
        self._runs += 1
        if self.config.slow:
            self.note(f"slowed on purpose: {describe(self.config.slow)}")
        if self._folder is not None:
            await self._take_up(self._folder)
        data = await self.wait_for_data()
        if self._resume is not None:
            check_data(self._resume.manifest, data)
        check_size(self.config.size, data)
        check_validation(self.config.validation, data)
        if self._spec is not None:
            check_fits(self._spec, data, layers=self._layers)
        init = self._init.network.spec if self._init is not None else None
        spec = self._spec or choose_model(self.config.model, data, text=self._model_text, init=init)
        # On a thread: the first network of a process imports the compiled kernels, which takes a while.
        new_model = partial(
            Model, spec, dtype=self.config.dtype, kernels=self.config.kernels, layers=self._layers
        )
        model = await self._pool.run(new_model, cost="model")
        if self._available_bytes is not None:
            check_memory(model, self.config, self._available_bytes())
        self.progress.data, self.progress.model = data, model
        self.progress.validation = self.config.validation
        if self._resume is not None:
            self._plan = self._resume.manifest.plan
        else:
            self._plan = await plan_here(model, self.config, self._pool)
        if self._plan is not None and not self._together:
            limit = LinkConfig().max_message_bytes
            check_crossings(model, self._plan, self.config, most_bytes=limit)
        again = 0 if self._resume is None else self._resume.trained_again
        in_flight = await self._readiness.wait_for_workers()
        try:
            run, cluster = await self._begin(spec, model, data, in_flight)
            return await self._disk_model(run, cluster, model, data, again, on_epoch)
        finally:
            await self._end(self._run)

    @property
    def _run(self) -> str:
        """The run that was submitted last."""
        return f"{self._identity.node}-{self._identity.incarnation:x}-{self._runs}"

    async def _begin(
        self, spec: ModelSpec, model: Model, data: dict[str, Any], in_flight: int
    ) -> tuple[RunRecord, ClusterMap]:
        """Submit a run and wait until it trains; returns the map in which it does.

        A server that is lost before takes nothing with it: the run is submitted anew, and placed on others.
        """
        resumed, loop, task = self._resume, asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        last_try = loop.time() + self._waits.prepare_s
        lost = ""
        if resumed is not None:
            self._note_resumption(resumed)
        transforms = transforms_of(
            self.config,
            resumed.manifest if resumed is not None else None,
            self._transforms,
            data["shape"],
            self._functions,
        )
        try:
            while True:
                run = await self._submit(spec, transforms, data, in_flight)
                self._recorder = self._record(run, model, data)
                self.progress.begin(
                    Series(
                        Schedule.of(self.config), epoch_images=data["train_images"] - self.config.validation
                    )
                )
                self._results.begin(run.id, resumed.manifest.resume.results if resumed is not None else ())
                await self._membership.submit_run(run)
                try:
                    return run, await self._prepare(run.id, model, resumed)
                except (RoleDied, DeadlineExceeded, ExceptionGroup) as error:
                    cause = first_cause(error)
                    if lost and isinstance(cause, DeadlineExceeded):
                        raise RoleDied(lost, f"and nobody took its place: {cause}") from error
                    lost = self._server_lost_by(cause)
                    if not lost or loop.time() > last_try or task.cancelling():
                        raise
                    self.note(f"{lost} was lost before training began: the run is placed anew")
                in_flight = await self._readiness.wait_for_workers()
                self._runs += 1
        finally:
            self._resume = None  # its memory is not kept, nor is a run continued twice

    async def _prepare(self, run: str, model: Model, resumed: Checkpoint | None) -> ClusterMap:
        """Wait until all are ready for a run; its servers are given what it begins with before they are."""
        if resumed is not None:
            self.progress.epochs.extend(resumed.manifest.epoch_results)
        if resumed is not None or self._init is not None:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._raise_failure(run), name=f"{self._identity.node}/failure")
                await self._load(run, model, resumed)
                watch.cancel()
        return await self._readiness.wait_training(run)

    def _server_lost_by(self, cause: BaseException) -> str:
        """The parameter server by whose loss a run failed; empty if it failed by something else."""
        lost = cause.node if isinstance(cause, RoleDied) else ""
        node = self.map.nodes.get(lost)
        return lost if node is not None and node.role == "ps" else ""

    async def _submit(
        self,
        spec: ModelSpec,
        transforms: tuple[dict[str, Any], ...],
        data: Mapping[str, Any],
        groups_in_flight: int,
    ) -> RunRecord:
        self.config = decide(self._asked, groups_in_flight, data["name"], squared_norm_of(data))
        self.progress.last_epoch = self.config.epochs
        config = msgspec.to_builtins(self.config)
        resumed, carried = (FROM_THE_START if self._init is not None else None), b""
        if self._resume is not None:
            resumed, carried = await self._pool.run(bounded, self._resume.manifest, self.config)
        return RunRecord(
            id=self._run,
            driver=self._identity.node,
            config=config,
            spec=spec.to_dict(),
            plan=self._plan,
            transforms=transforms,
            together=self._together,
            resumed=resumed,
            carried=carried,
        )

    def _record(self, run: RunRecord, model: Model, data: dict[str, Any]) -> Recorder | None:
        if not self.config.record:
            return None
        return Recorder(run=run, model=model, data=data, inquiries=self._inquiries, pool=self._pool)

    async def wait_for_data(self) -> dict[str, Any]:
        """Wait for a data server, and return what it says of its data. See `Muster.wait_for_data`."""
        return await self._readiness.wait_for_data()

    async def _disk_model(
        self,
        run: RunRecord,
        cluster: ClusterMap,
        model: Model,
        data: dict[str, Any],
        again: int,
        on_epoch: OnEpoch | None,
    ) -> RunResult:
        first = 1 if run.resumed is None else run.resumed.epoch
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())

            def spawn(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return group.create_task(work, name=f"{self._identity.node}/{name}")

            stack.callback(spawn("failure", self._raise_failure(run.id)).cancel)
            client = self._client(cluster, model)
            stack.callback(spawn("parameters", client.run()).cancel)
            if self._folder is not None:
                self._checkpointer = Checkpointer(
                    folder=self._folder,
                    copies=self._copies,
                    config=self.config,
                    model=model,
                    common=common_manifest(run, self._asked, data, trained_again=again),
                    spawn=spawn,
                    note=self.warn,
                    progress=self.progress,
                )
            choice = self._choice = self._new_choice()
            weights: Mapping[str, NDArray[Any]] = {}
            cut_short = False
            for epoch in range(first, self.config.epochs + 1):
                self.progress.begin_epoch(epoch, now=asyncio.get_running_loop().time())
                with self._phase(f"epoch {epoch}"):
                    ended = await self._wait_end_or_stop(run.id, epoch)
                if cut_short := ended is None:
                    weights = await self._cut_short(model, client, epoch, on_epoch)
                    break
                cluster = ended
                await self._read_progress(self._results.of(epoch))
                with self._phase(f"evaluate {epoch}"):
                    result, weights = await self._end_epoch(model, cluster, client, epoch)
                self._check_loss(epoch, result.train_loss)
                enough = choice.take(result, weights)
                goes_on = await _ask(on_epoch, result)
                if enough:
                    self.note(enough)
                if enough or not goes_on or self._stopping.is_set() or epoch == self.config.epochs:
                    break
                await self._next_epoch(run.id, epoch)
            self._look_for_guessing(model, int(data["classes"]))
            statistics = await self._counts.final(run.id)
            statistics[self._identity.node] = self._own_statistics()
            record: bytes | RecordError | None = None
            if self._recorder is not None and cut_short:
                record = RecordError("the run was stopped within an epoch, which no record holds")
            elif self._recorder is not None:
                record = await self._recorder.gather(self.map, weights, statistics)
            if self._checkpointer is not None:
                self.progress.phase = "waiting for the checkpoint to be written"
                await self._checkpointer.settle()
        return RunResult(
            epochs=tuple(self.progress.epochs),
            weights=choice.weights or weights,
            kept_epoch=choice.epoch,
            model=model,
            data=data,
            statistics=statistics,
            events=self._incidents.noted,
            series=tuple(self.progress.series),
            checkpoints=self._written(),
            checkpoint_missed=self._checkpointer.missed if self._checkpointer is not None else "",
            record=record,
        )

    def _check_loss(self, epoch: int, loss: float) -> None:
        """End a run that diverges, or with `keep_going` say so once."""
        model = self.progress.model
        assert model is not None, "an epoch is trained"
        found = divergence(loss, largest=largest_loss(model), epoch=epoch, rate=self.config.rate)
        if found and not self.config.keep_going:
            self._failure = found
            raise Diverged(f"{found}; or train on in any case with --keep-going")
        if found and not self._warned_of_divergence:
            self._warned_of_divergence = True
            self.warn(f"{found}; training goes on because of --keep-going")

    def _look_for_guessing(self, model: Model, classes: int) -> None:
        """Warn of a run that ends with the loss and the accuracy of guessing."""
        config, epochs = self.config, self.progress.epochs
        if epochs and (
            found := guessing(
                epochs[-1].train_loss,
                epochs[-1].test_accuracy,
                least=guessing_loss(model, classes),
                classes=classes,
                steps=sum(epoch.images for epoch in epochs) // config.images_per_update,
                rule=config.rule,
                rate=config.rate,
            )
        ):
            self.warn(found)

    def _new_choice(self) -> EpochChoice:
        config, before = self.config, self.progress.epochs
        if config.keep_best and before:
            first = before[-1].epoch + 1
            self.note(f"checkpoints keep no weights of earlier epochs: keep_best looks from epoch {first} on")
        return EpochChoice(
            patience=config.patience,
            keep_best=config.keep_best,
            until_accuracy=config.until_accuracy,
            before=before,
        )

    async def _wait_end_or_stop(self, run: str, epoch: int) -> ClusterMap | None:
        """Wait for the end of an epoch, see `_wait_epoch`; None if the run is to be stopped first."""
        node = self._identity.node
        async with asyncio.TaskGroup() as group:
            end = group.create_task(self._wait_epoch(run, epoch), name=f"{node}/epoch-{epoch}")
            stop = group.create_task(self._stopping.wait(), name=f"{node}/stop")
            try:
                await asyncio.wait((end, stop), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stop.cancel()
                end.cancel()
        return None if end.cancelled() else end.result()

    async def _cut_short(
        self, model: Model, client: ParameterClient, epoch: int, on_epoch: OnEpoch | None
    ) -> Mapping[str, NDArray[Any]]:
        """End the run within an epoch, and see what that came to; returns the weights."""
        self.progress.phase = "stopping"
        self.note(f"stopped within epoch {epoch}")
        await self._end(self._run)
        came_to = await self._counts.ledger_leader()
        weights = (await pull_snapshot(model, self._table(model), self.map, client)).weights
        if int(came_to["epoch"]) == epoch and int(came_to["images"]):
            result = await self._evaluate_epoch(
                model, weights, epoch, {**came_to, "skipped": 0, "trained_again": 0}
            )
            self.progress.epochs.append(result)
            self._choice.take(result, weights)
            await _ask(on_epoch, result)
        return weights

    def _written(self) -> tuple[CheckpointResult, ...]:
        return tuple(self._checkpointer.written) if self._checkpointer is not None else ()

    async def _end_epoch(
        self, model: Model, cluster: ClusterMap, client: ParameterClient, epoch: int
    ) -> tuple[EpochResult, Mapping[str, NDArray[Any]]]:
        """Evaluate what an epoch came to, and begin to write its checkpoint."""
        came_to, taken = self._results.of(epoch), self._checkpointer
        clock = int(came_to.get("clock", 0)) if self.config.slack is not None else 0
        reading = None
        if taken is not None:
            self.progress.phase = "taking a checkpoint"
            reading = await taken.read(cluster, clock)
        self.progress.phase = "evaluating"
        weights: Mapping[str, NDArray[Any]]
        if reading is not None:
            weights = reading.tensors.weights
            versions = tuple(state.version for state in reading.states)
        else:
            pulled = await pull_snapshot(model, self._table(model), cluster, client, clock=clock)
            weights, versions = pulled.weights, pulled.versions
        result = await self._evaluate_epoch(model, weights, epoch, came_to)
        if self._recorder is not None:
            self._recorder.evaluated(result, versions, skipped_groups([came_to])[0])
        self.progress.epochs.append(result)
        self.progress.images, self.progress.loss = result.images, result.train_loss
        self.progress.replicas = len(self.map.live_replicas())
        if taken is not None and reading is not None:
            taken.write_end(reading, cluster, self._results.before(epoch + 1), self.progress.epochs)
        return result, weights

    async def weights_so_far(self) -> tuple[Model, Mapping[str, NDArray[Any]], int]:
        """Return the model of an interrupted run, its weights, and the epoch of these if it is the best one.

        Without a kept epoch the weights are the latest, as the servers have them, and the number is 0.

        Raises:
            RunFailed: No run has trained.
            ShardUnavailable: A server did not answer in time.
        """
        model = self.progress.model
        if model is None or not self.map.buckets:
            raise RunFailed("no run has trained yet")
        if self.config.keep_best and self._choice.epoch:
            return model, self._choice.weights, self._choice.epoch
        async with asyncio.TaskGroup() as group:
            client = self._client(self.map, model)
            running = group.create_task(client.run(), name=f"{self._identity.node}/rescue")
            pulled = await pull_snapshot(model, self._table(model), self.map, client)
            running.cancel()
        return model, pulled.weights, 0

    def so_far(self) -> RunResult | None:
        """What a run that was cut short has come to, as its roles were last seen; None if it never began."""
        progress = self.progress
        if progress.model is None:
            return None
        return RunResult(
            epochs=tuple(progress.epochs),
            weights={},
            model=progress.model,
            data=progress.data,
            statistics={**progress.roles, self._identity.node: self._own_statistics()},
            events=self._incidents.noted,
            series=tuple(progress.series),
            checkpoints=self._written(),
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Note how long a part of the run takes."""
        begin = self._timeline.clock() if self._timeline is not None else 0.0
        yield
        if self._timeline is not None:
            self._timeline.phase(self._identity.node, name, begin)

    async def _raise_failure(self, run: str) -> None:
        """End what the driver is at as soon as the controller says that the run has failed."""
        async for cluster in self._membership.changes():
            check_failed(cluster, run)

    async def _wait_epoch(self, run: str, epoch: int) -> ClusterMap:
        """Wait for the end of an epoch, however long it takes, as long as the run is alive.

        Returns the map that has its result.
        """
        loop = asyncio.get_running_loop()
        look_at = loop.time() + LOOK_S
        empty_since: float | None = None
        while True:
            cluster = self.map
            check_failed(cluster, run)
            if cluster.ended >= epoch:
                return cluster
            record = cluster.epoch
            if record is not None and (record.run, record.number) == (run, epoch) and record.paused:
                await self._end_pause(cluster, record)
                continue
            if cluster.live_replicas():
                empty_since = None
            elif empty_since is None:
                empty_since = loop.time()
            elif loop.time() - empty_since > self._waits.replica_s:
                raise RunFailed(f"no replica was live for {self._waits.replica_s:g} s")
            try:
                await self._membership.wait_for(
                    lambda m: m is not cluster,  # noqa: B023 - awaited in this turn
                    "news of the run",
                    max(look_at - loop.time(), 0.0),
                )
            except DeadlineExceeded:
                await self._read_progress()
                self._check_loss(epoch, self.progress.loss)
                look_at = loop.time() + LOOK_S

    async def _end_pause(self, cluster: ClusterMap, paused: EpochRecord) -> None:
        """Take a checkpoint within an epoch, and let training go on."""

        def go_on(record: EpochRecord) -> EpochRecord | None:
            if (record.run, record.number) != (paused.run, paused.number) or not record.paused:
                return None
            return msgspec.structs.replace(record, paused=0)

        loop = asyncio.get_running_loop()
        begin, taken = loop.time(), self._checkpointer
        reading = None
        data: dict[str, Any] = {}
        self.progress.phase = "taking a checkpoint"
        if taken is not None:
            try:
                data = await self._counts.ledger_leader()
                reading = await taken.read(cluster, int(data["clock"]))
            except (TransportError, TimeoutError) as error:
                taken.miss(f"no checkpoint was taken, the data server could not be asked: {error!r}")
        await self._membership.update_epoch(go_on)
        self.progress.phase = "training"
        if taken is not None and reading is not None:
            before = self._results.before(paused.number)
            taken.write_within(reading, before, data, self.progress.epochs, loop.time() - begin)

    async def _next_epoch(self, run: str, epoch: int) -> None:
        def begin(record: RunRecord) -> RunRecord | None:
            if record.id != run or record.phase != "between":
                return None
            return msgspec.structs.replace(record, phase="training", epoch=epoch + 1)

        await self._membership.update_run(begin)

    async def _end(self, run: str) -> None:
        def finish(record: RunRecord) -> RunRecord | None:
            if record.id != run or record.over:
                return None
            if self._failure:
                return msgspec.structs.replace(record, phase="failed", reason=self._failure)
            return msgspec.structs.replace(record, phase="finished")

        try:
            async with asyncio.timeout(self._waits.drain_s):
                await self._membership.update_run(finish)
        except (TimeoutError, DeadlineExceeded):
            self.note("the controller could not be told that the run has ended")

    # --- checkpoints -------------------------------------------------------------------------

    async def _take_up(self, folder: CheckpointFolder) -> None:
        timeout_s = self._waits.checkpoint_s
        try:
            async with asyncio.timeout(timeout_s):
                await folder.take_up(self._resume.manifest if self._resume is not None else None)
        except TimeoutError:
            what = f"the disk to make {folder.path} ready for checkpoints"
            raise DeadlineExceeded(what, timeout_s) from None

    def _note_resumption(self, resumed: Checkpoint) -> None:
        for problem in resumed.problems:
            self.note(f"an older checkpoint is resumed: {problem}")
        again = resumed.trained_again - resumed.manifest.trained_again
        self.note(f"resumed from {resumed.manifest.name}; {again} groups or a few more are trained again")

    async def _load(self, run: str, model: Model, resumed: Checkpoint | None) -> None:
        """Give the servers the shards of the checkpoint or saved model; they are not ready before."""
        self.progress.phase = f"loading {resumed.manifest.name if resumed else 'the saved model'}"
        tensors = make_tensors(model, self.config, self._plan)
        if resumed is not None:
            tensors.fill(resumed)
            states = resumed.manifest.shards
        else:
            assert self._init is not None, "there is nothing else to load"
            fill = partial(fill_from, tensors, model, self._init, seed=self.config.seed)
            self.note(await self._pool.run(fill))
            states = first_states(tensors)
        cluster = await self._readiness.wait_placed(run)
        try:
            async with asyncio.timeout(self._waits.prepare_s):
                await self._copies.load(cluster, self._table(model), tensors, states)
        except TransportError as error:
            if not isinstance(error, RemoteError):  # a server that is lost is missed, which ends this wait
                await asyncio.sleep(self._waits.dial_s + self._waits.grace_s)
            raise
        except TimeoutError:
            raise DeadlineExceeded("the servers to take up their shards", self._waits.prepare_s) from None

    # --- evaluation --------------------------------------------------------------------------

    def _client(self, cluster: ClusterMap, model: Model) -> ParameterClient:
        run = cluster.run
        assert run is not None
        servers = holders(self._table(model), cluster.buckets)
        return ParameterClient(
            network=self._network,
            identity=self._identity,
            session=SessionIdentity(
                run=run.id,
                session=0,
                incarnation=self._identity.incarnation,
                replica=-1,
                generation=cluster.generation,
            ),
            addresses={server: cluster.nodes[server].address for server in servers},
            waits=self._waits,
            traffic=self._traffic,
        )

    def _table(self, model: Model) -> Any:
        return table_of(model, shard_bytes=self.config.shard_bytes, plan=self._plan)

    async def _evaluate_epoch(
        self, model: Model, weights: Mapping[str, NDArray[Any]], epoch: int, result: Mapping[str, Any]
    ) -> EpochResult:
        return EpochResult(
            epoch=epoch,
            images=int(result["images"]),
            skipped=int(result["skipped"]),
            trained_again=int(result["trained_again"]),
            train_loss=read_number(result["loss"]),
            test_accuracy=await self.evaluate(model, weights),
            validation_accuracy=await self._validate(model, weights),
            train_s=float(result["train_s"]),
        )

    async def _validate(self, model: Model, weights: Mapping[str, NDArray[Any]]) -> float | None:
        if not self.config.validation:
            return None
        return await self._evaluator.accuracy(model, weights, self._counts.data_address(), validation=True)

    async def evaluate(self, model: Model, weights: Mapping[str, NDArray[Any]]) -> float:
        """Share of the data server's test images that the weights name rightly."""
        model.use_ready()
        return await self._evaluator.accuracy(model, weights, self._counts.data_address())

    # --- what the roles counted --------------------------------------------------------------

    def _own_statistics(self) -> dict[str, Any]:
        return {
            "role": "driver",
            "traffic": self._traffic.rows(),
            "process": msgspec.to_builtins(self._process_memory()),
        }

    async def gather_profile(self) -> None:
        """Read what roles in other processes noted into our timeline. Those that cannot be reached lack."""
        assert self._timeline is not None, "there is no timeline to gather into"
        self._timeline.others[:] = await self._counts.profiles()

    async def look(self) -> None:
        """Ask the roles now how far they are, for `progress`; for a second at most."""
        await self._read_progress()

    async def _read_progress(self, ended: Mapping[str, Any] | None = None) -> None:
        """Ask the roles how far the epoch is, for live table and report; `ended` is what came of it."""
        loop, addresses = asyncio.get_running_loop(), self._counts.addresses("data", "ps", "worker")
        asked_at = loop.time()
        answers = await self._inquiries.answers(addresses, self._run, within_s=LOOK_S)
        now = loop.time()
        for event in self._silence.look(addresses, answers, asked_at=asked_at, now=now):
            self.note(event)
        self.progress.silent = self._silence.shown(now)
        known = {**self.progress.roles, **answers}
        self.progress.update({node: known[node] for node in addresses if node in known}, now=now, ended=ended)
        self.progress.replicas = len(self.map.live_replicas())
        if self._checkpointer is not None and self._training:  # it starts tasks of the run
            for values in self.progress.roles.values():
                if is_ledger_leader(values):
                    self._checkpointer.look(values)

    async def report_death(self, node: str) -> None:
        """Tell the controller that a node's process has ended. See `Membership.report_death`."""
        await self._membership.report_death(node)

    def note(self, what: str) -> None:
        """Add an incident to the run's events, with the time."""
        self._incidents.note(what)

    def warn(self, what: str) -> None:
        """Add an incident that costs the run something; the controllers hear of it too."""
        self.note(what)
        self._notices.warn(what)

    def __repr__(self) -> str:
        return f"<Driver {self._identity.node} {self.progress.phase} epoch {self.progress.epoch}>"


async def _ask(on_epoch: OnEpoch | None, result: EpochResult) -> bool:
    """Tell the caller of an epoch; returns whether training goes on."""
    answer = on_epoch(result) if on_epoch is not None else None
    if inspect.isawaitable(answer):
        answer = await answer
    return not isinstance(answer, bool | np.bool_) or bool(answer)
