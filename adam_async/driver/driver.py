"""The driver: submits a run, follows its training, ends it, and gathers the counts of the roles.

A driver is a member of the cluster like the other roles. The driver does not depend on how the roles were
started. The same code drives a cluster in its own event loop, child processes, and roles started by hand on
many hosts.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import msgspec
from numpy.typing import NDArray

from adam_async.checkpoint.checkpoint import (
    CheckpointError,
    Manifest,
    StoredCheckpoint,
    check_kept_arrays,
    check_kept_step,
    kept_model,
    resumed_options,
)
from adam_async.checkpoint.saved_shards import SavedShards
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.controller.client import Membership
from adam_async.driver.evaluator import Evaluator, pull_snapshot, reading_client, running
from adam_async.driver.events import Notices, RunEvents
from adam_async.driver.preparation import (
    PreparedRun,
    StartingValues,
    in_time,
    prepare_model,
    prepare_plan,
    store_of,
    transforms_of,
    unless_stopped,
)
from adam_async.driver.readiness import Readiness, raise_failure
from adam_async.driver.recorder import Recorder
from adam_async.driver.requests import Answer, Operations, OperatorRequests, Request
from adam_async.driver.role_counts import RoleCounts
from adam_async.driver.saved_run import SavedRunReader, check_disks
from adam_async.driver.settings import DriverSettings, RunInputs, config_of
from adam_async.driver.takeover import (
    REPLACE,
    SavedRun,
    check_has_ended,
    check_none_waits,
    check_options,
    next_epoch,
    run_in,
    run_to_take,
    submit,
    take_over,
    update_program,
    with_evaluations,
)
from adam_async.driver.training_run import DriverParts, TrainingRun
from adam_async.errors import ConfigError, DeadlineExceeded, RoleDied, RunFailed, first_cause
from adam_async.model.named import PHOTO
from adam_async.model.network import Network
from adam_async.report.stream import Caller, EventStream
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.config import Config
from adam_async.run.counts import Counts, newest_and_best
from adam_async.run.events import Outcome, RunBegins, RunEnds
from adam_async.run.learning_rate import Schedule, decide, squared_norm_of
from adam_async.run.model_selection import check_memory, choose_model
from adam_async.run.option_sources import make_config
from adam_async.run.partition import arrays_of, table_of
from adam_async.run.progress import Progress
from adam_async.run.result import OnEpoch, RunResult, epoch_results
from adam_async.run.run_record import RunRecord, begun, followed, newest
from adam_async.run.series import Series
from adam_async.run.step_model import RunModel
from adam_async.run.stragglers import describe
from adam_async.run.training_program import ProgramRecord, TrainingProgram, program_prefix
from adam_async.runtime.channel import Endpoint, StackedTaskGroup
from adam_async.runtime.machine import available_bytes
from adam_async.runtime.traffic import Traffic
from transport import LocalNetwork

logger = logging.getLogger(__name__)

OUTSIDE = "the cluster is not running: train within its block, `async with cluster: await cluster.train()`"
"""Text of the error for a call of `train` outside the cluster's `async with` block."""


class Driver:
    """Drives one run at a time.

    `config` becomes the configuration of the run in progress: the driver decides the options that the caller
    left open. Cancelling `train` ends the run: its phase becomes `finished` if the driver reaches the
    controller within `drain_s`.

    Raises:
        CheckpointError: The run takes checkpoints with concurrent evaluation, or the resumed checkpoint does
            not fit.
        ConfigError: Two inputs set the first weights, or an option contradicts a step.
        StepFailed: The `arrays` of the step raised.
    """

    def __init__(self, config: Config, settings: DriverSettings, inputs: RunInputs | None = None) -> None:
        inputs = inputs or RunInputs()
        self._settings = settings
        self._identity = settings.identity
        self._asked = self.config = config_of(config, inputs)
        self._inputs = _resuming(inputs)
        self._given: tuple[RunInputs, Config] | None = (self._inputs, self._asked)
        """Inputs and options of the first run; None once this run has begun to train. A call of `train` until
        then looks for the same run."""
        self._waits = config.waits
        self._traffic = Traffic(self._identity.node, timeline=settings.timeline)
        self._endpoint = Endpoint(settings.network, self._identity, self._traffic)
        self._membership = Membership(
            network=settings.network,
            controller=settings.controller,
            identity=self._identity,
            record=NodeRecord(role="driver", address="", incarnation=self._identity.incarnation),
            waits=self._waits,
            traffic=self._traffic,
            seen=self._observe,
        )
        self._copies = ShardCopies(self._endpoint, changes=self._membership.changes, waits=self._waits)
        self._notices = Notices(self._membership)
        self.events = EventStream(settings.wall)
        """Events of the runs, as they happen; see `adam_async.run.events`."""
        self._events = RunEvents(self.events)
        self._requests = OperatorRequests(
            self._membership, run=lambda: self._run if self._training else "", stop=self.stop
        )
        self._counts = RoleCounts(
            self._endpoint,
            waits=self._waits,
            membership=self._membership,
            run=lambda: self._run,
            events=self._events,
            stream=self.events,
        )
        self.progress = Progress(consistency=config.consistency)
        saved = SavedShards(self._endpoint, waits=self._waits)
        self._saved_runs = SavedRunReader(
            membership=self._membership, saved=saved, progress=self.progress, note=self.note
        )
        self._readiness = self._new_readiness()
        self._stack = AsyncExitStack()
        self._run = ""
        """Id of the run that was submitted or taken over last."""
        self._runs = 0
        self._training = False
        self._stopping = asyncio.Event()
        self._training_run: TrainingRun | None = None
        self._recorder: Recorder | None = None
        self._record: RunRecord | None = None
        """Record of this run, at the newest version of the map."""
        self._plan: dict[str, Any] | None = None
        """Partition plan of the run that was submitted or taken over last."""

    def _new_readiness(self) -> Readiness:
        return Readiness(
            config=self.config, membership=self._membership, queries=self._counts, progress=self.progress
        )

    async def __aenter__(self) -> Self:
        settings = self._settings
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(StackedTaskGroup())
            tasks = {
                "membership": self._membership.run(),
                "events": self._events.follow(self._membership.changes()),
                "notices": self._notices.run(),
                "requests": self._requests.serve(),
            }
            for name, work in tasks.items():
                task = group.create_task(work, name=f"{self._identity.node}/{name}")
                stack.callback(task.cancel)
            for callback in self._inputs.callbacks:
                caller = Caller(self.events, callback)
                stack.push_async_callback(caller.finish)
                stack.callback(group.create_task(caller.run(), name=caller.name).cancel)
            pool = self._pool = await stack.enter_async_context(
                settings.make_pool(threads=settings.threads, name=f"{self._identity.node}-evaluate")
            )
            self._starting_values = StartingValues(
                copies=self._copies, readiness=self._readiness, pool=pool, note=self.note
            )
            self._parts = DriverParts(
                settings=settings,
                membership=self._membership,
                counts=self._counts,
                copies=self._copies,
                evaluator=Evaluator(
                    self._endpoint,
                    waits=self._waits,
                    pool=pool,
                    threads=settings.threads,
                    available_bytes=settings.available_bytes or available_bytes,
                ),
                record=self._newest_record,
                events=self._events,
                stream=self.events,
                progress=self.progress,
                traffic=self._traffic,
                stopping=self._stopping,
                warn=self.warn,
                end_run=self._end_run,
                own_statistics=self.counts,
            )
            stack.push_async_callback(self._goodbye)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def _goodbye(self) -> None:
        """Leave the cluster, so that the controllers do not report the driver lost; not during its run."""
        run = self.map.run
        if run is None or run.over or run.driven_by != self._membership.member:
            await self._membership.leave()

    @property
    def map(self) -> ClusterMap:
        """The newest cluster map that the driver has."""
        return self._membership.map

    def maps(self) -> AsyncIterator[ClusterMap]:
        """Yield the map now and after every change, always the newest, until cancelled."""
        return self._membership.changes()

    @property
    def leading(self) -> str:
        """Node id of the leading controller; empty while the driver does not know it."""
        return self._membership.leading

    @property
    def controllers(self) -> tuple[str, ...]:
        """Addresses of all controllers that the driver knows."""
        return self._membership.controllers

    def operate(self, operations: Operations, *, allows_faults: bool = False) -> None:
        """Set the cluster that carries out an operator's requests about roles (`driver/requests.py`).

        Args:
            allows_faults: Whether operators may kill, freeze and add roles.
        """
        self._requests.operations, self._requests.allows_faults = operations, allows_faults

    async def answer(self, request: Request) -> Answer:
        """Carry out a request from this process like one from an operator."""
        return await self._requests.answer(request)

    # --- the run -----------------------------------------------------------------------------

    async def train(self, on_epoch: OnEpoch | None = None) -> RunResult:
        """Run all epochs. May be called again: each call is a new run.

        With a checkpoint to resume, the first call continues the run of the checkpoint. The result includes
        that run's ended epochs, but `on_epoch` is not called with them.

        With `RunInputs.attach` the first call takes over the run that waits for a driver, if there is one.
        For each epoch that ended while the run had no driver, the call evaluates the servers' present
        weights. With `attach` or `RunInputs.on_disks` the first call continues the run on the disks of the
        servers, if there is one. A call that ended before any training does not count as the first one.

        Raises:
            CheckpointError: The folder has checkpoints of another run, or the data are not the checkpoint's;
                or the disks lack shards of their run.
            ConfigError: An option, the model or the step is not that of the run to take over.
            DeadlineExceeded: Roles did not join or were not ready within `prepare_s`; the error lists the
                required and the joined roles. Or a disk did not answer within `checkpoint_s` at the start.
            RoleDied: A role that the run needs was lost; the error has its name.
            RunFailed: The run ended early for another reason, such as a restarted controller; or this driver
                is already training; or another run waits for a driver; or the run to take over does not wait
                for one.
        """
        if self._training:
            raise RunFailed(
                "already training: one cluster trains one run at a time; wait for the run in progress, or "
                "open another cluster"
            )
        self._training = True
        self._stopping.clear()
        outcome: Outcome = "finished"
        reason = ""
        try:
            result = await self._train(on_epoch)
        except asyncio.CancelledError:
            outcome = "interrupted"
            raise
        except BaseException as error:
            outcome, reason = "failed", str(first_cause(error))
            raise
        finally:
            self.progress.phase = outcome
            self._training = False
            self.events.publish(RunEnds(run=self._run, outcome=outcome, reason=reason))
        return result

    def stop(self) -> None:
        """End the training in progress after the groups in flight; `train` then returns its result.

        A run with a folder for checkpoints takes a last checkpoint, if the groups in flight are finished
        within `drain_s`. The result includes the epoch in progress, with the images trained so far. Before
        the first epoch `train` raises `RunFailed`. Without a training this method does nothing.
        """
        if self._training:
            self._stopping.set()

    async def _train(self, on_epoch: OnEpoch | None) -> RunResult:
        self._events.begin(anew=self._runs > 0)
        self._training_run = self._recorder = None
        if self._runs and self._given is not None:
            self._inputs, self._asked = self._given
            self._take_options(self._asked)
        self._runs += 1
        if self.config.slow:
            self.note(f"slowed on purpose: {describe(self.config.slow)}")
        data = await self.wait_for_data()
        saved = await unless_stopped(self._find(), self._stopping)
        if saved is not None:
            self._go_on_with(saved, data)
        prepared = await self._prepare_run(data)
        kept = await self._take_up_folder(saved)
        try:
            if saved is not None and saved.store is None:  # the servers in the map have the run's shards
                program, cluster = await self._take_over(saved, kept, prepared)
            else:
                in_flight = await unless_stopped(self._readiness.wait_for_workers(), self._stopping)
                program, cluster = await unless_stopped(self._begin(prepared, in_flight), self._stopping)
            assert self._record is not None, "the run has begun"
            self._given = None
            training = self._training_run = TrainingRun(
                self._parts,
                program=program,
                prepared=prepared,
                record=self._record,
                recorder=self._recorder,
                folder=self._inputs.checkpoints,
            )
            return await training.train(cluster, on_epoch)
        finally:
            await self._end_run()

    async def _take_up_folder(self, saved: SavedRun | None) -> Manifest | None:
        """Prepare the folder for checkpoints, if any; return the checkpoint there that the run continues."""
        folder, resume = self._inputs.checkpoints, self._inputs.resume
        if folder is None:
            return None
        if saved is not None:
            return await in_time(folder, folder.take_up(None, runs=saved.manifest.training), self._waits)
        manifest = resume.manifest if resume is not None else None
        return await in_time(folder, folder.take_up(manifest), self._waits)

    def _observe(self, cluster: ClusterMap) -> None:
        """Take the new results from a version of the map."""
        if self._record is not None:
            self._record = followed(self._record, cluster)

    def _newest_record(self) -> RunRecord:
        assert self._record is not None, "the run has begun"
        return self._record

    async def _find(self) -> SavedRun | None:
        """Return the run to continue: the map's run if it waits for a driver, or the disks' run; None if a
        new run begins, or a checkpoint's run continues.

        A new run would destroy the values of a run that waits, so it is refused without `RunInputs.replace`.

        Raises:
            CheckpointError: The disks lack shards of their run, or `RunInputs.resume` names another run.
            ConfigError: Servers with and without disks would keep the shards.
            RunFailed: The named run is nowhere, or has a live driver; or a new run would replace one that
                waits, or one of which the disks have a part.
        """
        attach, on_disks = self._inputs.attach, self._inputs.on_disks
        if self._inputs.replace:
            return None
        if attach is not None and self._given is not None and self.map.in_progress:
            if (run := run_to_take(self.map, attach)) is not None:
                return run_in(self.map, run)
        check_none_waits(self.map)
        if self._given is None:
            return None
        cluster = await self._readiness.wait_for_servers()
        if on_disks:
            check_disks(cluster)
        # Otherwise a new run would begin if the first server to join has no run, and others come later.
        patient = attach is not None and "servers" not in attach.given
        try:
            saved = await self._saved_runs.find(patient=patient)
        except (ConfigError, RunFailed) as error:
            if attach is not None or on_disks:
                raise
            raise RunFailed(f"{error}; or {REPLACE}") from error
        if attach is None and not on_disks:
            if saved is not None:
                check_has_ended(saved)
            return None
        if attach is not None and not on_disks:
            if saved is None or attach.run not in ("", saved.manifest.run) or saved.has_finished:
                run_to_take(self.map, attach)  # refuses a run that is nowhere
                return None
        elif saved is not None and self._inputs.resume is not None:
            raise CheckpointError(
                f"the disks have run {saved.manifest.run}, and --resume names another one: leave --resume "
                "out to continue that run, or give another folder for the shards"
            )
        return saved

    def _go_on_with(self, saved: SavedRun, data: dict[str, Any]) -> None:
        """Take options and model of a run that waits in the map, or on the disks of its servers."""
        asked, attach = self._asked, self._inputs.attach
        inputs = replace(self._inputs, resume=saved, init=None)
        if saved.store is None:
            assert attach is not None, "no other driver takes a run over"
            check_options(attach.given, asked, saved.program.config, saved.manifest.run)
            if inputs.spec is None and inputs.step is None and "model" in attach.given:
                model = choose_model(
                    asked.model, data, text=inputs.model_text, init=None, layers=inputs.layers
                )
                inputs = replace(inputs, spec=model)
            config = msgspec.structs.replace(saved.program.config, waits=asked.waits)
        else:
            if attach is not None:
                given = {name: getattr(asked, name) for name in attach.given - {"waits"}}
                asked = make_config(resumed_options(saved.manifest), given)
                asked = msgspec.structs.replace(asked, waits=self._asked.waits)
            config = self._asked = config_of(asked, inputs)
        self._inputs = _resuming(inputs)
        self._take_options(config)

    def _take_options(self, config: Config) -> None:
        self.config = config
        self._readiness = self._new_readiness()
        self.progress.consistency = config.consistency

    async def _take_over(
        self, saved: SavedRun, kept: Manifest | None, prepared: PreparedRun
    ) -> tuple[TrainingProgram, ClusterMap]:
        """Become the driver of a run of the map. An earlier error leaves the run unchanged.

        Args:
            kept: The newest checkpoint of the run.
        """
        there = run_in(self.map, saved.record.program).record
        # The map lacks an evaluation if the earlier driver was lost between the checkpoint at an epoch's end
        # and the change that begins the next epoch. This driver evaluates again, and makes the change.
        last = there.evaluated[-1].epoch if there.evaluated else saved.start - 1
        before = (kept.as_record(saved.record.program, evaluated=last),) if kept is not None else ()
        record = self._record = newest((there, *before)) or there
        self._run, self._plan = saved.manifest.run, prepared.plan
        self._begin_progress(prepared.data)
        self.progress.plan = prepared.plan
        await take_over(self._membership, self._run)
        self._inputs = replace(self._inputs, attach=None, resume=None)  # later calls begin new runs
        self.note(f"took over run {self._run} from {saved.record.program.driver}, which was lost")
        first, last = next_epoch(record, saved.start), record.ended
        if first <= last:
            alone = f"epochs {first} to {last}" if first < last else f"epoch {first}"
            self.note(f"{alone} ended without a driver: evaluated with the present weights")
        return msgspec.structs.replace(saved.program, config=self.config), self.map

    def _begin_progress(self, data: dict[str, Any]) -> None:
        progress, config = self.progress, self.config
        progress.data, progress.validation, progress.last_epoch = data, config.validation, config.epochs
        epoch_images = data["train_images"] - config.validation
        progress.begin(Series(Schedule.of(config), epoch_images=epoch_images))
        progress.epochs.extend(epoch_results(self._newest_record()))
        assert progress.model is not None, "the run is prepared"
        self.events.publish(
            RunBegins(
                run=self._run,
                driver=self._identity.node,
                model=progress.model.spec.name,
                data=str(data["name"]),
                config=msgspec.to_builtins(config),
                epochs=config.epochs,
                images=epoch_images,
            )
        )

    async def wait_for_data(self) -> dict[str, Any]:
        """Wait for a data server; return its description of the data. See `Readiness.wait_for_data`."""
        return await self._readiness.wait_for_data()

    async def _prepare_run(self, data: dict[str, Any]) -> PreparedRun:
        """Choose the model and its plan; for errors see `prepare_model` and `prepare_plan`."""
        inputs = self._inputs
        spec, model = await prepare_model(data, self.config, inputs, self._pool)
        if self._settings.available_bytes is not None:
            check_memory(model, self.config, self._settings.available_bytes())
        self.progress.data, self.progress.model = data, model
        plan = await prepare_plan(model, self.config, inputs, self._pool)
        return PreparedRun(spec=spec, model=model, data=data, plan=plan)

    async def _begin(self, prepared: PreparedRun, in_flight: int) -> tuple[TrainingProgram, ClusterMap]:
        """Submit a run and wait until it trains; return the cluster map from the beginning of the training.

        A server lost before training has no values to lose: the driver submits the run again, on other
        servers.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        resumed = await self._read_resumed(prepared)
        self._inputs = replace(self._inputs, resume=resumed)
        last_try = loop.time() + self._waits.prepare_s
        lost = ""
        transforms = await transforms_of(
            self.config,
            resumed.manifest if resumed is not None else None,
            self._inputs.transforms,
            prepared.data["shape"],
            self._inputs.functions,
        )
        try:
            while True:
                self._run = f"{program_prefix(*self._membership.member)}{self._runs}"
                program = await self._program_of(prepared, transforms, in_flight)
                await self._submit(program, prepared, resumed)
                try:
                    return program, await self._prepare_roles(self._run, prepared, resumed)
                except (RoleDied, DeadlineExceeded, ExceptionGroup) as error:
                    cause = first_cause(error)
                    if lost and isinstance(cause, DeadlineExceeded):
                        raise RoleDied(lost, f"and no other server took its place: {cause}") from error
                    lost = self._server_lost_by(cause)
                    if not lost or loop.time() > last_try or task.cancelling():
                        raise
                    self.note(f"{lost} was lost before training began: the run is placed anew")
                in_flight = await self._readiness.wait_for_workers()
                self._runs += 1
        finally:
            # A second run begins from the start.
            self._inputs = replace(self._inputs, resume=None)

    async def _read_resumed(self, prepared: PreparedRun) -> StoredCheckpoint | None:
        """Return the checkpoint that the run continues; read it from the servers' disks if it is there.

        Raises:
            CheckpointError: The checkpoint is of another model; or see `SavedRunReader.read`.
        """
        resume = self._inputs.resume
        if resume is None:
            return None
        if isinstance(resume, SavedRun):
            resume = await self._saved_runs.read(resume, self.config)
        else:
            for problem in resume.problems:
                self.note(f"an older checkpoint is resumed: {problem}")
            for remark in resume.remarks:
                self.note(remark)
            self.note(f"resumed from {resume.manifest.name}")
        check_kept_arrays(
            resume.pieces.catalogue.arrays, arrays_of(prepared.model, prepared.plan), resume.manifest
        )
        return resume

    async def _program_of(
        self, prepared: PreparedRun, transforms: tuple[dict[str, Any], ...], groups_in_flight: int
    ) -> TrainingProgram:
        """Decide the open options, and make the program of the run."""
        data, inputs = prepared.data, self._inputs
        images = data["train_images"] - self._asked.validation
        config = decide(
            self._asked,
            groups_in_flight,
            images,
            squared_norm_of(data),
            photographs=prepared.spec.name == PHOTO,
        )
        model, one_process = prepared.model, isinstance(self._settings.network, LocalNetwork)
        if isinstance(model, Network):
            nbytes = model.num_parameters * model.dtype.itemsize
            protocol = config.protocol_in(one_process=one_process, model_bytes=nbytes)
            config = msgspec.structs.replace(config, protocol=protocol)
        self.config = config
        return TrainingProgram(
            config=self.config,
            spec=prepared.spec.to_dict(),
            plan=prepared.plan,
            transforms=transforms,
            resumed=inputs.resume.manifest.resume.without_old_results() if inputs.resume else None,
            data=data,
            asked_rate=self._asked.rate,
            asked_protocol=self._asked.protocol,
        )

    async def _submit(
        self, program: TrainingProgram, prepared: PreparedRun, resumed: StoredCheckpoint | None
    ) -> None:
        if self.config.record:
            self._recorder = Recorder(
                run=self._run,
                program=program,
                model=prepared.model,
                data=prepared.data,
                queries=self._counts,
                pool=self._pool,
            )
        record, self._plan = program.record(self._run, self._membership.member), program.plan
        self._record = begun(record, [resumed.record] if resumed is not None else ())
        self._begin_progress(prepared.data)
        record = msgspec.structs.replace(record, evaluated=newest_and_best(self._record.evaluated))
        await submit(self._membership, record)
        arrays = arrays_of(prepared.model, prepared.plan)
        await self._membership.create_store(record.id, store_of(record, program, arrays), arrays)

    async def _prepare_roles(
        self, run: str, prepared: PreparedRun, resumed: StoredCheckpoint | None
    ) -> ClusterMap:
        """Load the first values into the servers, and wait until all roles are ready."""
        source = resumed if resumed is not None else self._inputs.init
        if source is not None:
            self.progress.phase = f"loading {resumed.manifest.title if resumed else 'the saved model'}"
        async with asyncio.TaskGroup() as group:
            failure = raise_failure(self._membership, run)
            watch = group.create_task(failure, name=f"{self._identity.node}/failure")
            await self._starting_values.load(run, self.config, prepared, source)
            watch.cancel()
        cluster = await self._readiness.wait_training(run)
        self.progress.plan = prepared.plan
        return cluster

    def _server_lost_by(self, cause: BaseException) -> str:
        """Return the parameter server whose loss made a run fail; empty for another reason."""
        lost = cause.node if isinstance(cause, RoleDied) else ""
        node = self.map.nodes.get(lost)
        return lost if node is not None and node.role == "ps" else ""

    async def _end_run(self) -> None:
        """End the run in the cluster map, so that its roles stop."""
        run = self._run
        failure = self._training_run.losses.failure if self._training_run is not None else ""

        def finish(record: ProgramRecord) -> ProgramRecord | None:
            """Return the program as failed or finished, if it is not over."""
            if record.id != run or record.over:
                return None
            if failure:
                return msgspec.structs.replace(record, phase="failed", reason=failure)
            record = with_evaluations(record, self.progress.epochs, ended=self.map.ended)
            return msgspec.structs.replace(record, phase="finished")

        try:
            async with asyncio.timeout(self._waits.drain_s):
                await update_program(self._membership, finish)
        except (TimeoutError, DeadlineExceeded):
            self.note("the end of the run did not reach the controller")

    async def evaluate(self, model: RunModel, weights: Mapping[str, NDArray[Any]]) -> float:
        """Return the share of the data server's test images that the weights classify correctly."""
        model.use_ready()
        return await self._parts.evaluator.accuracy(model, weights, self._counts.data_address)

    # --- results of an interrupted run -------------------------------------------------------

    async def weights_so_far(self) -> tuple[RunModel, Mapping[str, NDArray[Any]], int]:
        """Return an interrupted run's model, its weights, and the number of their epoch.

        With `keep_best` the weights are those of the best epoch so far. Otherwise, or before such an epoch,
        they are the servers' latest weights, and the number is 0.

        Raises:
            RunFailed: No run has trained, or another driver has the run of the map.
            ShardUnavailable: A server did not answer in time.
        """
        model = self.progress.model
        if model is None or not self.map.buckets:
            raise RunFailed("no run has trained yet")
        run = self.map.run
        if run is None or run.driven_by != self._membership.member:
            raise RunFailed("another driver has the run")
        choice = self._training_run.choice if self._training_run is not None else None
        if self.config.keep_best and choice is not None and choice.epoch:
            return model, choice.weights, choice.epoch
        table = table_of(model, shard_bytes=self.config.shard_bytes, plan=self._plan)
        client = reading_client(
            self.map,
            table,
            network=self._settings.network,
            identity=self._identity,
            # The run has ended, so nothing waits for copies of its shards.
            waits=msgspec.structs.replace(self._waits, copies_s=self._waits.patience_s),
            traffic=self._traffic,
        )
        async with running(client, self._membership.changes(), node=self._identity.node):
            pulled = await pull_snapshot(model, table, self.map, client)
        return model, pulled.weights, 0

    def so_far(self) -> RunResult | None:
        """Return an interrupted run's result with its roles' last counts; None if no run began."""
        progress = self.progress
        if progress.model is None:
            return None
        return RunResult(
            epochs=tuple(progress.epochs),
            weights={},
            model=progress.model,
            data=progress.data,
            statistics={**progress.roles, self._identity.node: self.counts()},
            events=self._events.noted,
            series=tuple(progress.series),
            copies=progress.copies,
            checkpoints=self._training_run.written if self._training_run is not None else (),
        )

    # --- counts and events -------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return the counts of the driver: its traffic, and facts of the process."""
        process = msgspec.structs.asdict(self._settings.process_memory())
        return Counts(node=self._identity.node, traffic=self._traffic.rows(), **process)

    async def gather_profile(self) -> None:
        """Read the profiles of reachable roles in other processes into the driver's timeline."""
        timeline = self._settings.timeline
        assert timeline is not None, "there is no timeline to gather into"
        timeline.others[:] = await self._counts.profiles()

    async def look(self) -> None:
        """Update `progress` with the roles' counts; takes at most a second."""
        await self._counts.update(self.progress)

    async def report_death(self, node: str) -> None:
        """Report the end of a node's process to the controller. See `Membership.report_death`."""
        await self._membership.report_death(node, self._settings.wall())

    def note(self, what: str) -> None:
        """Add an event of the run, with its time."""
        self._events.note(what)

    def warn(self, what: str) -> None:
        """Add an event that costs the run something, and report it to the controllers."""
        if not self.events.is_read:
            logger.warning("%s", what)
        self.note(what)
        self._notices.report(what)


def _resuming(inputs: RunInputs) -> RunInputs:
    """Return the inputs with the model of the run that they continue.

    Raises:
        CheckpointError: The caller has another model or step.
    """
    if inputs.resume is None:
        return inputs
    manifest = inputs.resume.manifest
    check_kept_step(manifest.spec, inputs.step, manifest.title)
    return replace(inputs, spec=kept_model(manifest.spec, inputs.spec, manifest.title))
