"""From groups trained in place to step reports: the event loop's side of training in place.

Each group is a step. Each server gets all steps, because it counts them and their clocks; a group is finished
when all servers have counted it. A few steps travel in one report, because a report costs as much as a push
without payload. The remaining steps are sent at once when no more groups come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adam_async.client.parameter_client import ParameterClient
from adam_async.messages import Finished, StepReport
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardTable
from adam_async.worker.push_plan import cut_shards
from adam_async.worker.training import OnStep, TrainedInPlace

STEPS = 8
"""Number of steps of a full report."""


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
        on_step: Called with each step, before its report is sent.
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
