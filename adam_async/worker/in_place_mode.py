"""Training in place: the worker's weights are the servers' memory, and nothing but records travels."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.messages import Finished, Values
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network as Model
from adam_async.model.rules import make_rule
from adam_async.parameter_server.client import ParameterClient
from adam_async.parameter_server.storage import ShardStorage
from adam_async.run.config import Config
from adam_async.run.learning_rate import Schedule
from adam_async.run.shard_table import ShardTable
from adam_async.worker.in_place_step import InPlaceTrainer, ThreadMemory, TrainedInPlace
from adam_async.worker.push_plan import plan_pushes
from adam_async.worker.step_reports import Recorder
from adam_async.worker.training import replica_graph
from adam_async.worker.training_mode import Deliver, OnStep
from dataflow import Firing, Graph, Tag

JOB_IMAGES = 128
"""Images that one job of a compute thread trains, as so many groups as they make. Meanwhile the thread needs
nothing of the loop. A group reads no weights before its turn comes, so waiting makes none stale."""

JOB_GROUPS = range(2, 33)
"""Bounds on these groups: two at least, so that there are jobs of several; no long jobs of tiny groups."""


def groups_of_a_job(images_per_group: int) -> int:
    """Groups that a compute thread trains in one job."""
    return min(max(JOB_IMAGES // images_per_group, JOB_GROUPS[0]), JOB_GROUPS[-1])


class Aliased:
    """The way of training of a run in one process that neither skips pushes nor pulls; see `WayOfTraining`.

    Args:
        model: The network.
        config: The run.
        table: Shards of the model.
        buckets: Primary of each bucket.
        client: How to reach the servers.
        storage: Their memory.
        threads: Compute threads of the worker.
        clock: Times of groups, for a profile; None notes none.
    """

    def __init__(
        self,
        *,
        model: Model,
        config: Config,
        table: ShardTable,
        buckets: Sequence[str],
        client: ParameterClient,
        storage: ShardStorage,
        threads: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._table = table
        self._buckets = buckets
        self._client = client
        self._frozen = model.frozen
        self._clock = 0
        self._plan = plan_pushes(
            model, table, buckets, images=config.images_per_group, wanted=config.protocol
        )
        self._job_groups = groups_of_a_job(config.images_per_group)
        self._jobs = 2 * threads  # one that a thread is in, and one that waits for it
        rule = make_rule(config.rule, momentum=config.momentum, weight_decay=config.weight_decay)
        self._trainer = InPlaceTrainer(
            network=model,
            rule=rule,
            storage=storage,
            schedule=Schedule.of(config),
            group_images=config.images_per_group,
            dice=Dice(config.seed),
            clock=clock,
        )

    async def prepare(self) -> None:
        """Ask each server where its clocks stand, by one shard of its own. Cancelling it loses nothing."""
        answered = asyncio.Event()
        firsts = {self._buckets[spec.bucket]: spec.id for spec in reversed(self._table.shards)}
        clocks: list[int] = []

        def on_values(values: Values, _: NDArray[Any]) -> None:
            clocks.append(values.clock)
            if len(clocks) == len(firsts):
                answered.set()

        for server, shard in firsts.items():
            self._client.pull(server, (shard,), on_values)
        await self._client.flush()
        await answered.wait()
        self._clock = min(clocks)

    def begin(self, on_finished: Callable[[Finished], None], on_step: OnStep | None = None) -> None:
        """See `WayOfTraining.begin`."""
        self._recorder = Recorder(
            table=self._table,
            buckets=self._buckets,
            client=self._client,
            clock=self._clock,
            on_finished=on_finished,
            on_step=on_step,
            frozen=self._frozen,
        )

    @property
    def in_flight(self) -> int:
        """Groups in flight that keep the threads busy: full jobs."""
        return self._jobs * self._job_groups

    def new_context(self) -> None:
        """See `WayOfTraining.new_context`."""

    def new_scratch(self) -> ThreadMemory:
        """See `WayOfTraining.new_scratch`."""
        return self._trainer.new_memory()

    def graph(self, landed: Callable[[Tag], None], deliver: Deliver) -> Graph:
        """See `WayOfTraining.graph`. No group waits for a pull: its step is in when it is trained."""
        return replica_graph(
            self._trainer.train,
            self._on_trained,
            waits_for_pull=False,
            batch=self._job_groups,
            jobs=self._jobs,
        )

    def _on_trained(self, firing: Firing, trained: TrainedInPlace) -> None:
        self._recorder.add(trained)

    @property
    def gate(self) -> None:
        """See `WayOfTraining.gate`. Nobody waits for anybody."""

    @property
    def record(self) -> bytes:
        """See `WayOfTraining.record`. Nothing can be noted where steps have no order."""
        return b""

    def flush(self) -> None:
        """See `WayOfTraining.flush`."""
        self._recorder.close()

    def statistics(self) -> dict[str, Any]:
        """What the gradient of each tensor would cost on a link; nothing of it travels."""
        choices = [msgspec.to_builtins(choice) for choice in self._plan.protocols.values()]
        return {"protocols": [{**choice, "chosen": "in place"} for choice in choices], "push_buffers": 0}
