"""Training in place: the worker's weights are the servers' memory, and only step reports travel.

Each group is a step. Each server gets all steps, because it counts them and their clocks; a group is finished
when all servers have counted it. A few steps travel in one report, because a report costs as much as a push
without payload. The remaining steps are sent at once when no more groups come.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient
from adam_async.messages import Finished, StepReport, Values
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.model.rules import rule_of
from adam_async.parameter_server.storage import ShardStorage
from adam_async.run.counts import WorkerCounts
from adam_async.run.ids import ShardId
from adam_async.run.learning_rate import Schedule
from adam_async.run.shard_table import ShardTable
from adam_async.worker.push_plan import cut_shards, plan_pushes
from adam_async.worker.training import (
    InPlaceTrainer,
    ModeSetup,
    OnStep,
    ThreadMemory,
    TrainedInPlace,
    replica_graph,
)
from dataflow import Graph

STEPS = 8
"""Number of steps in a full report."""


@dataclass(slots=True, eq=False)
class _Open:
    """A report in transit to all servers."""

    groups: list[TrainedInPlace]
    unanswered: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The shards in one message of every report."""

    server: str
    shards: tuple[ShardId, ...]
    tensors: tuple[str, ...]
    """Tensor of each shard."""

    def places(self, tensors: Sequence[str]) -> tuple[int, ...]:
        """Return the positions of the shards of these tensors."""
        if not tensors:
            return ()
        return tuple([place for place, tensor in enumerate(self.tensors) if tensor in tensors])


class StepReports:
    """Reports to the servers the steps that were applied in place.

    Args:
        table: Shards of the model.
        buckets: Home of each bucket.
        client: Client of the servers.
        on_finished: Called for each group that all servers have counted.
        on_step: Called with a step, before its report is sent.
        frozen: Tensors that no step changes; no report names them.
        on_settled: Called when the servers have counted all reported steps.

    Attributes:
        unsettled: Number of reports that a server has not counted.
    """

    def __init__(
        self,
        *,
        table: ShardTable,
        buckets: Sequence[str],
        client: ParameterClient,
        on_finished: Callable[[Finished], None],
        on_step: OnStep | None = None,
        frozen: frozenset[str] = frozenset(),
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._on_finished = on_finished
        self._on_step = on_step
        self._on_settled = on_settled
        self.unsettled = 0
        self.clock = 0
        """Clock of the replica's last step; before the first step, the clock from the servers."""
        self._groups: list[TrainedInPlace] = []
        tensors = [spec.tensor for spec in table.shards]
        self._parts = [
            _Part(server, shards, tuple(tensors[shard] for shard in shards))
            for server, shards in cut_shards((s for s in table.shards if s.tensor not in frozen), buckets)
        ]

    def start(self, clock: int) -> None:
        """Set the replica's clock before the first group."""
        self.clock = clock

    def add(self, trained: TrainedInPlace) -> None:
        """Take a trained group. Never waits."""
        self._groups.append(trained)
        if len(self._groups) >= STEPS:
            self.close()

    def close(self) -> None:
        """Send the collected steps."""
        groups, self._groups = self._groups, []
        if not groups:
            return
        begin = self.clock + 1
        self.clock += len(groups)
        if self._on_step is not None:
            for clock, group in enumerate(groups, start=begin):
                self._on_step(clock, (group.lease,))
        open_ = _Open(groups, len(self._parts))
        self.unsettled += 1

        def answered() -> None:
            open_.unanswered -= 1
            if not open_.unanswered:
                self._settled(open_.groups, begin)

        for part in self._parts:
            steps = [
                StepReport(
                    clock,
                    group.lease.images,
                    group.staleness,
                    part.places(group.refused),
                    (group.lease.epoch, group.lease.number, group.lease.number + 1),
                    group.loss * group.lease.images,
                )
                for clock, group in enumerate(groups, start=begin)
            ]
            self._client.connections[part.server].report_steps(part.shards, tuple(steps), answered)

    def _settled(self, groups: Sequence[TrainedInPlace], begin: int) -> None:
        for clock, group in enumerate(groups, start=begin):
            lease = group.lease
            self._on_finished(
                Finished(lease.epoch, lease.number, lease.attempt, lease.images, group.loss, clock)
            )
        self.unsettled -= 1
        if not self.unsettled:
            self._on_settled()


JOB_IMAGES = 128
"""Number of images that one job of a compute thread trains, in as many groups as these images fill. During
the job the thread needs no service of the loop. A group reads the weights when its training begins, so
waiting groups do not become stale."""

JOB_GROUPS = range(2, 33)
"""Bounds on a job's number of groups: at least 2, so that some jobs have several groups; at most 32, so that
a job of tiny groups stays short."""

JOBS_PER_THREAD = 2
"""Number of jobs per compute thread: one in training, and one in the queue of the thread."""


def groups_of_a_job(images_per_group: int) -> int:
    """Return the number of groups that a compute thread trains in one job."""
    return min(max(JOB_IMAGES // images_per_group, JOB_GROUPS[0]), JOB_GROUPS[-1])


def groups_in_flight(threads: int, images_per_group: int) -> int:
    """Return the number of groups in flight that keeps the compute threads busy with full jobs."""
    return JOBS_PER_THREAD * threads * groups_of_a_job(images_per_group)


class InPlaceMode:
    """The training mode of a run in place, with a push and a pull at every step; see `CopyMode`.

    Args:
        setup: The run.
        model: The network.
        storage: Memory of the servers.
        threads: Compute threads of the worker.
        clock: Clock for the times of groups in a profile; None to note no times.
    """

    gate = None
    """Admission gate: none, because replicas in place do not wait for each other's clocks."""

    def __init__(
        self,
        setup: ModeSetup,
        *,
        model: Network,
        storage: ShardStorage,
        threads: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        config = setup.config
        self._setup = setup
        self._storage = storage
        self._settled = asyncio.Event()
        """Event that is set when the servers have counted all reported steps, and when the run ends."""
        self._plan = plan_pushes(
            model, setup.table, setup.buckets, images=config.images_per_group, wanted=config.protocol
        )
        self._job_groups = groups_of_a_job(config.images_per_group)
        self._jobs = JOBS_PER_THREAD * threads
        rule = rule_of(config)
        self._trainer = InPlaceTrainer(
            network=model,
            rule=rule,
            storage=storage,
            schedule=Schedule.of(config),
            group_images=config.images_per_group,
            dice=Dice(config.seed),
            clock=clock,
        )
        self._step_reports = StepReports(
            table=setup.table,
            buckets=setup.buckets,
            client=setup.client,
            on_finished=setup.events.finished,
            on_step=setup.events.stepped,
            frozen=model.frozen,
            on_settled=self._settled.set,
        )

    async def prepare(self) -> None:
        """Ask each server for its clocks, through one of its shards. Cancelling it loses nothing."""
        setup = self._setup
        firsts = {setup.buckets[spec.bucket]: spec.id for spec in reversed(setup.table.shards)}
        clocks = _Clocks()
        for server, shard in firsts.items():
            setup.client.connections[server].pull((shard,), clocks)
        await setup.client.flush()
        self._step_reports.start(min(clocks.pulled_clocks))

    async def refresh(self) -> None:
        """See `CopyMode.refresh`. The memory of the servers always has the newest values."""

    def new_context(self) -> None:
        """See `CopyMode.new_context`."""

    def new_scratch(self) -> ThreadMemory:
        """See `CopyMode.new_scratch`."""
        return self._trainer.new_memory()

    def graph(self) -> Graph:
        """See `CopyMode.graph`. No group waits for a pull, because its training applies its step."""
        return replica_graph(
            self._trainer.train,
            lambda firing, trained: self._take_trained(),
            waits_for_pull=False,
            batch=self._job_groups,
            jobs=self._jobs,
        )

    def _take_trained(self) -> None:
        """Take all groups whose steps are in the values, including those of unfinished calls."""
        trained = self._trainer.trained
        while trained:
            self._step_reports.add(trained.popleft())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Let readers of the memory wait, for as long as the block lasts, until all its steps are counted."""
        with self._storage.counted_by(self._settle):
            try:
                yield
            finally:
                self._settled.set()

    @asynccontextmanager
    async def _settle(self) -> AsyncIterator[None]:
        """While the gate is closed, report all steps in the values, and wait until the servers have counted
        them.

        A server that counts none for `waits.patience_s` ends the worker's part in the run, and this wait.
        """
        self._settled.clear()
        self._take_trained()
        self._step_reports.close()
        if self._step_reports.unsettled:
            await self._settled.wait()
        yield

    def flush(self, sync_clock: int) -> None:
        """See `CopyMode.flush`."""
        self._step_reports.close()

    def statistics(self) -> WorkerCounts:
        """Return the bytes that each tensor's gradient would need on a link; a run in place sends none."""
        choices = [replace(choice, chosen="in place") for choice in self._plan.protocols.values()]
        return WorkerCounts(protocols=choices, push_buffers=0)


class _Clocks:
    """Takes the servers' clocks from pulls; see `PullReceiver`."""

    def __init__(self) -> None:
        self.pulled_clocks: list[int] = []

    def pulled(self, number: int, answer: Values, values: NDArray[Any]) -> None:
        """Keep the clock of a server."""
        self.pulled_clocks.append(answer.clock)

    def behind(self, number: int, answer: Values) -> bool:
        """Ask again; only answers to pulls with a clock have no values."""
        return True

    def freed(self) -> None:
        """See `Receiver`."""
