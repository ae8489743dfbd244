"""Training in place: the worker's weights are the servers' memory, and nothing but records travels."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.config import Config
from adam_async.dice import Dice
from adam_async.messages import Finished, Values
from adam_async.model.context import Context
from adam_async.model.network import Network as Model
from adam_async.model.rules import make_rule
from adam_async.model_worker.in_place import InPlaceTrainer, TrainedInPlace
from adam_async.model_worker.records import Recorder
from adam_async.model_worker.training import replica_graph
from adam_async.model_worker.updates import plan_pushes
from adam_async.model_worker.way import OnStep
from adam_async.parameter_server.client import ParameterClient
from adam_async.placement import ShardTable
from adam_async.shard_storage import ShardStorage
from dataflow import Firing, Graph, Tag


class Aliased:
    """The way of training of a run in one process that neither skips pushes nor pulls; see `WayOfTraining`.

    Args:
        model: The network.
        config: The run.
        table: Shards of the model.
        buckets: Primary of each bucket.
        client: How to reach the servers.
        storage: Their memory.
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
    ) -> None:
        self._table = table
        self._buckets = buckets
        self._client = client
        self._clock = 0
        self._plan = plan_pushes(
            model, table, buckets, images=config.images_per_group, wanted=config.protocol
        )
        rule = make_rule(config.rule, momentum=config.momentum, weight_decay=config.weight_decay)
        self._trainer = InPlaceTrainer(
            network=model,
            rule=rule,
            storage=storage,
            rate=config.rate,
            group_images=config.images_per_group,
            dice=Dice(config.seed),
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
        )

    def new_context(self) -> Context:
        """See `WayOfTraining.new_context`."""
        return self._trainer.new_context()

    def new_scratch(self) -> None:
        """See `WayOfTraining.new_scratch`."""

    def graph(self, landed: Callable[[Tag], None]) -> Graph:
        """See `WayOfTraining.graph`. No group waits for a pull: its step is in when it is trained."""
        return replica_graph(self._trainer.train, self._on_trained, waits_for_pull=False)

    def _on_trained(self, firing: Firing, trained: TrainedInPlace) -> None:
        self._recorder.add(trained)

    def flush(self) -> None:
        """See `WayOfTraining.flush`."""
        self._recorder.close()

    def statistics(self) -> dict[str, Any]:
        """What the gradient of each tensor would cost on a link; nothing of it travels."""
        choices = [msgspec.to_builtins(choice) for choice in self._plan.protocols.values()]
        return {"protocols": [{**choice, "chosen": "in place"} for choice in choices], "push_buffers": 0}
