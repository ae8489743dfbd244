"""One run from its first epoch to its result: waits, evaluations, checkpoints, and the end.

The controllers share out each epoch's groups, and the data servers end the epoch in the cluster map; the
driver follows the map. After an epoch the run evaluates the weights. The next epoch begins after the
evaluation, or with concurrent evaluation at once.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.checkpoint.writer import Checkpointer, Spawn
from adam_async.client.parameter_client import ParameterClient
from adam_async.controller.client import Membership
from adam_async.driver.epoch_checkpoints import LEAST_POLL_S, EpochCheckpoints
from adam_async.driver.evaluator import Evaluator, follow_primaries, pull_snapshot, reading_client
from adam_async.driver.events import RunEvents
from adam_async.driver.preparation import PreparedRun
from adam_async.driver.readiness import POLL_S, check_failed, no_data_server, raise_failure
from adam_async.driver.recorder import Recorder
from adam_async.driver.role_counts import RoleCounts
from adam_async.driver.settings import DriverSettings
from adam_async.driver.stopping import EpochChoice, LossChecks
from adam_async.driver.takeover import next_epoch, update_program, with_evaluations
from adam_async.errors import AdamError, DeadlineExceeded, RecordError, RunFailed
from adam_async.report.stream import EventStream
from adam_async.run.cluster_map import ClusterMap, EpochRecord
from adam_async.run.counts import Counts, EpochCounts, Evaluation
from adam_async.run.events import EpochEnds, Evaluated
from adam_async.run.progress import Progress
from adam_async.run.result import CheckpointResult, EpochResult, OnEpoch, RunResult
from adam_async.run.run_record import RunRecord
from adam_async.run.shard_table import ShardTable
from adam_async.run.training_program import ProgramRecord, TrainingProgram
from adam_async.runtime.channel import StackedTaskGroup
from adam_async.runtime.traffic import Traffic
from transport import TransportError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DriverParts:
    """The parts of a driver that its runs use.

    Attributes:
        record: Returns the newest record of the run.
        stopping: Set to end the run after the groups in flight.
        warn: Adds an event that costs the run something.
    """

    settings: DriverSettings
    membership: Membership
    counts: RoleCounts
    copies: ShardCopies
    evaluator: Evaluator
    record: Callable[[], RunRecord]
    events: RunEvents
    stream: EventStream
    progress: Progress
    traffic: Traffic
    stopping: asyncio.Event
    warn: Callable[[str], None]
    end_run: Callable[[], Awaitable[None]]
    own_statistics: Callable[[], Counts]


class TrainingRun:
    """One run that trains.

    Args:
        record: Record of the run, from which the run goes on.
        folder: Folder for checkpoints; None: no checkpoints.
    """

    def __init__(
        self,
        parts: DriverParts,
        *,
        program: TrainingProgram,
        prepared: PreparedRun,
        record: RunRecord,
        recorder: Recorder | None,
        folder: CheckpointFolder | None,
    ) -> None:
        self._parts = parts
        self._id = record.program.id
        self._program = program
        config = self._config = program.config
        self._prepared = prepared
        self._recorder = recorder
        self._folder = folder
        resumed = program.resumed
        self._first = next_epoch(record, resumed.epoch if resumed is not None else 1)
        self._table: ShardTable = prepared.table(config)
        self._progress = parts.progress
        self._membership = parts.membership
        self._waits = config.waits
        self._node = parts.settings.identity.node
        self._checkpointer: Checkpointer | None = None
        self._checkpoints: EpochCheckpoints | None = None
        self._training = False
        self._cut_short = False
        self.choice = self._new_choice(record.evaluated)
        self.losses = LossChecks(config, prepared.model, parts.warn)

    async def train(self, cluster: ClusterMap, on_epoch: OnEpoch | None) -> RunResult:
        """Train all epochs, and gather the counts of the roles.

        Raises:
            AdamError: See `Driver.train`.
        """
        parts, settings = self._parts, self._parts.settings
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(StackedTaskGroup())

            def spawn(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return group.create_task(work, name=f"{self._node}/{name}")

            stack.callback(spawn("failure", raise_failure(self._membership, self._id)).cancel)
            client = reading_client(
                cluster,
                self._table,
                network=settings.network,
                identity=settings.identity,
                waits=self._waits,
                traffic=parts.traffic,
            )
            stack.callback(spawn("parameters", client.run()).cancel)
            stack.callback(spawn("primaries", follow_primaries(client, self._membership.changes())).cancel)
            self._checkpointer = self._new_checkpointer(spawn)
            self._checkpoints = self._new_checkpoints(self._checkpointer)
            await parts.evaluator.read_sample(self._prepared.model, parts.counts.data_address)
            self._training = True
            stack.callback(setattr, self, "_training", False)
            weights = await self._train_epochs(client, on_epoch)
            self.losses.check_end(self._progress.epochs, int(self._prepared.data["classes"]))
            statistics = await parts.counts.final(self._id)
            own = parts.own_statistics()  # now: a record and a checkpoint are not traffic of the training
            record = await self._make_record(weights, statistics)
            if self._checkpointer is not None:
                self._progress.phase = "waiting for the checkpoint to be written"
                await self._checkpointer.settle()
        return self._result(weights, {**statistics, self._node: own}, record)

    async def _train_epochs(
        self, client: ParameterClient, on_epoch: OnEpoch | None
    ) -> Mapping[str, NDArray[Any]]:
        """Train and evaluate epoch after epoch; returns the last weights."""
        config, progress = self._config, self._progress
        weights: Mapping[str, NDArray[Any]] = {}
        for epoch in range(self._first, config.epochs + 1):
            progress.begin_epoch(epoch, now=asyncio.get_running_loop().time())
            with self._phase(f"epoch {epoch}"):
                cluster = await self._wait_end_or_stop(epoch)
            if cluster is None:
                return await self._stop_within(client, epoch, on_epoch)
            # With the result of the map: the data servers may already be at the next epoch.
            counts = self._parts.record().result(epoch)
            await self._parts.counts.update(self._progress, counts)
            self._parts.stream.publish(EpochEnds(epoch=epoch, counts=counts))
            with self._phase(f"evaluate {epoch}"):
                result, weights = await self._end_epoch(cluster, client, epoch)
            if self._parts.record().result(epoch).loss_images:  # otherwise the loss is unknown
                self.losses.check(epoch, result.train_loss)
            enough = self.choice.take(result, weights)
            goes_on = await _ask(on_epoch, result)
            if enough:
                self._parts.events.note(enough)
            if enough or not goes_on or self._parts.stopping.is_set() or epoch == config.epochs:
                break
            await self._next_epoch(epoch)
        return weights

    def _new_choice(self, before: Sequence[Evaluation]) -> EpochChoice:
        config = self._config
        if config.keep_best and before:
            first = before[-1].epoch + 1
            self._parts.events.note(
                f"no weights of earlier epochs are left: keep_best looks from epoch {first} on"
            )
        return EpochChoice(
            patience=config.patience,
            keep_best=config.keep_best,
            until_accuracy=config.until_accuracy,
            before=before,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Record the duration of a part of the run."""
        timeline = self._parts.settings.timeline
        begin = timeline.clock() if timeline is not None else 0.0
        yield
        if timeline is not None:
            timeline.phase(self._node, name, begin)

    # --- an epoch ----------------------------------------------------------------------------

    async def _wait_end_or_stop(self, epoch: int) -> ClusterMap | None:
        """Wait for the end of an epoch, see `_wait_epoch`; None if the run is to stop before.

        The method takes the checkpoints of the epoch meanwhile. If a run with checkpoints stops and its
        leased groups are finished in time, the method takes a last checkpoint.
        """
        record, checkpoints = self._membership.map.epoch, self._checkpoints
        if record is not None and (record.run, record.number, record.drain) == (self._id, epoch, True):
            self._parts.stopping.set()  # the previous driver was lost while it stopped the run
        async with asyncio.TaskGroup() as group:
            end = group.create_task(self._wait_epoch(epoch), name=f"{self._node}/epoch-{epoch}")
            stop = group.create_task(self._parts.stopping.wait(), name=f"{self._node}/stop")
            taking: list[asyncio.Task[None]] = []
            if checkpoints is not None and self._config.checkpoint_every:
                name = f"{self._node}/checkpoints-{epoch}"
                taking.append(group.create_task(checkpoints.take(), name=name))
            try:
                await asyncio.wait((end, stop), return_when=asyncio.FIRST_COMPLETED)
                if not end.done() and checkpoints is not None:
                    await _cancel(taking)
                    await self._stop_with_checkpoint(epoch, checkpoints, end)
            finally:
                for task in (end, stop, *taking):
                    task.cancel()
        # An epoch that ended at the same time counts as ended, because its result is in the map.
        return None if end.cancelled() else end.result()

    async def _stop_with_checkpoint(
        self, epoch: int, checkpoints: EpochCheckpoints, end: asyncio.Task[ClusterMap]
    ) -> None:
        """Drain an epoch, and take a checkpoint when its leased groups are finished, unless the epoch
        ends."""
        run, drain_s = self._id, self._waits.drain_s

        def drain(newest: ClusterMap) -> EpochRecord | None:
            """Return the epoch with the order to drain, if it is still in progress."""
            record = newest.epoch
            if record is None or (record.run, record.number) != (run, epoch) or record.drain or record.ended:
                return None
            return msgspec.structs.replace(record, drain=True)

        self._progress.phase = "stopping"
        await self._membership.update("epoch", drain)
        why = f"groups in flight were not finished within drain_s={drain_s:g} s"
        try:
            async with asyncio.timeout(drain_s):
                data = await self._parts.counts.dealer()
                while data.epoch == epoch and not data.drained and not end.done():
                    await asyncio.wait((end,), timeout=LEAST_POLL_S)
                    data = await self._parts.counts.dealer()
        except TimeoutError:
            self._parts.warn(f"no checkpoint was taken, {why}")
        except TransportError as error:
            self._parts.warn(f"no checkpoint was taken, the data server could not be asked: {error!r}")
        else:
            if data.epoch == epoch and data.drained:
                await checkpoints.take_last(data)
            else:
                await asyncio.wait((end,))

    async def _wait_epoch(self, epoch: int) -> ClusterMap:
        """Without a deadline, wait for the end of an epoch, as long as the run has not failed.

        Returns the map with the result of the epoch.
        """
        loop, run = asyncio.get_running_loop(), self._id
        poll_at = loop.time() + POLL_S
        lacking_since: float | None = None
        while True:
            cluster = self._membership.map
            check_failed(cluster, run)
            if cluster.ended >= epoch:
                return cluster
            if cluster.live_replicas() and cluster.dealing:
                lacking_since = None
            elif lacking_since is None:
                lacking_since = loop.time()
            elif loop.time() - lacking_since > self._waits.replica_s:
                if not cluster.dealing:
                    raise no_data_server(self._waits.replica_s)
                raise RunFailed(f"no replica was live for {self._waits.replica_s:g} s")
            try:
                await self._membership.wait_for(
                    lambda m: m is not cluster,  # noqa: B023 - awaited in this iteration
                    "a change of the cluster map",
                    max(poll_at - loop.time(), 0.0),
                )
            except DeadlineExceeded:
                await self._parts.counts.update(self._progress)
                self.losses.check(epoch, self._progress.loss)
                poll_at = loop.time() + POLL_S

    async def _end_epoch(
        self, cluster: ClusterMap, client: ParameterClient, epoch: int
    ) -> tuple[EpochResult, Mapping[str, NDArray[Any]]]:
        """Evaluate the weights after an epoch, and begin to write its checkpoint."""
        counts, taken = self._parts.record().result(epoch), self._checkpointer
        clock = counts.clock if self._config.slack is not None else 0
        reading = None
        if taken is not None:
            self._progress.phase = "taking a checkpoint"
            reading = await taken.read(cluster, clock, has_weights=True)
        self._progress.phase = "evaluating"
        weights: Mapping[str, NDArray[Any]]
        if reading is not None:
            # The copy for the checkpoint is from the same moment, so a second pull is not needed.
            weights = reading.weights
            versions = tuple(state.version for state in reading.states)
        else:
            pulled = await pull_snapshot(self._prepared.model, self._table, cluster, client, clock=clock)
            weights, versions = pulled.weights, pulled.versions
        result = await self._evaluate(weights, epoch, counts)
        if self._recorder is not None:
            self._recorder.evaluated(result, versions, counts.skipped_groups)
        progress = self._progress
        progress.epochs.append(result)
        progress.images, progress.loss = result.images, result.train_loss
        if taken is not None and reading is not None:
            results = self._parts.record().until(epoch).results
            taken.write_end(reading, cluster, results, progress.epochs)
        return result, weights

    async def _evaluate(
        self, weights: Mapping[str, NDArray[Any]], epoch: int, counts: EpochCounts
    ) -> EpochResult:
        model, evaluator = self._prepared.model, self._parts.evaluator
        model.use_ready()
        address = self._parts.counts.data_address
        test = await evaluator.accuracy(model, weights, address)
        validation = None
        if self._config.validation:
            validation = await evaluator.accuracy(model, weights, address, validation=True)
        evaluation = Evaluation(epoch, test, validation)
        stream = self._parts.stream
        stream.publish(Evaluated(evaluation=evaluation))
        if stream.shows_images and (found := await evaluator.predicted(epoch)) is not None:
            stream.publish(found)
        return EpochResult.of(counts, evaluation)

    async def _next_epoch(self, epoch: int) -> None:
        """Let the next epoch begin, and set the evaluation of the ended one."""

        def begin(record: ProgramRecord) -> ProgramRecord | None:
            """Return the program with the evaluation, and in its next epoch unless that epoch has begun."""
            if record.id != self._id or record.over:
                return None
            record = with_evaluations(record, self._progress.epochs, ended=self._membership.map.ended)
            if record.phase != "between":  # with concurrent evaluation the next epoch has begun
                return record
            return msgspec.structs.replace(record, phase="training", epoch=epoch + 1)

        await update_program(self._membership, begin)

    # --- the end -----------------------------------------------------------------------------

    async def _stop_within(
        self, client: ParameterClient, epoch: int, on_epoch: OnEpoch | None
    ) -> Mapping[str, NDArray[Any]]:
        """End the run within an epoch, and evaluate and return its weights."""
        self._cut_short = True
        self._progress.phase = "stopping"
        self._parts.events.note(f"stopped within epoch {epoch}")
        await self._parts.end_run()
        try:
            pulled = await pull_snapshot(self._prepared.model, self._table, self._membership.map, client)
        except Exception:
            await self._finish_checkpoint()
            raise
        await self._finish_checkpoint()
        result = await self._result_at_stop(pulled.weights, epoch)
        if result is not None:
            self._progress.epochs.append(result)
            self.choice.take(result, pulled.weights)
            await _ask(on_epoch, result)
        return pulled.weights

    async def _finish_checkpoint(self) -> None:
        """Wait for the last checkpoint of a stop, because an error would cancel its write."""
        if self._checkpointer is not None:
            await self._checkpointer.settle()

    async def _result_at_stop(self, weights: Mapping[str, NDArray[Any]], epoch: int) -> EpochResult | None:
        """Return the result of the epoch in which the run stops; None if there is none."""
        try:
            async with asyncio.timeout(self._waits.call_s):
                data = await self._parts.counts.dealer()
            if data.epoch != epoch or not data.images:
                return None
            counts = EpochCounts(
                images=data.images, loss=data.loss, loss_images=data.loss_images, train_s=data.train_s
            )
            return await self._evaluate(weights, epoch, counts)
        except (AdamError, TransportError, TimeoutError) as error:
            self._parts.warn(f"epoch {epoch} was stopped and has no result: {error!r}")
            return None

    async def _make_record(
        self, weights: Mapping[str, NDArray[Any]], statistics: Mapping[str, Counts]
    ) -> bytes | RecordError | None:
        if self._recorder is None and self._config.record:
            return RecordError("the run was not recorded: another driver has taken it over")
        if self._recorder is None:
            return None
        if self._cut_short:
            return RecordError("the run was stopped within an epoch, which no record holds")
        return await self._recorder.gather(self._membership.map, weights, statistics)

    def _result(
        self,
        weights: Mapping[str, NDArray[Any]],
        statistics: dict[str, Counts],
        record: bytes | RecordError | None,
    ) -> RunResult:
        return RunResult(
            epochs=tuple(self._progress.epochs),
            weights=self.choice.weights or weights,
            kept_epoch=self.choice.epoch,
            model=self._prepared.model,
            data=self._prepared.data,
            statistics=statistics,
            events=self._parts.events.noted,
            series=tuple(self._progress.series),
            copies=self._progress.copies,
            checkpoints=self.written,
            checkpoint_missed=self._checkpointer.missed if self._checkpointer is not None else "",
            record=record,
        )

    # --- checkpoints -------------------------------------------------------------------------

    @property
    def written(self) -> tuple[CheckpointResult, ...]:
        """Results of the checkpoints that this run has written."""
        return tuple(self._checkpointer.written) if self._checkpointer is not None else ()

    def _new_checkpointer(self, spawn: Spawn) -> Checkpointer | None:
        if self._folder is None:
            return None
        return Checkpointer(
            folder=self._folder,
            copies=self._parts.copies,
            storage_pool=self._parts.settings.storage_pool,
            config=self._config,
            spawn=spawn,
            note=self._parts.warn,
            progress=self._progress,
        )

    def _new_checkpoints(self, checkpointer: Checkpointer | None) -> EpochCheckpoints | None:
        if checkpointer is None:
            return None
        return EpochCheckpoints(
            checkpointer,
            config=self._config,
            membership=self._membership,
            counts=self._parts.counts,
            record=self._parts.record,
            progress=self._progress,
            phase=self._phase,
        )


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for their ends."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _ask(on_epoch: OnEpoch | None, result: EpochResult) -> bool:
    """Call the caller's function with an epoch's result; returns whether training continues."""
    answer = on_epoch(result) if on_epoch is not None else None
    if inspect.isawaitable(answer):
        answer = await answer
    return not isinstance(answer, bool | np.bool_) or bool(answer)
