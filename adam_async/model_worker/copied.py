"""Training on a copy: pull, compute, push, and pull again; over any link, at any cadence."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from adam_async.config import Config
from adam_async.dice import Dice
from adam_async.messages import Finished
from adam_async.model.context import Context
from adam_async.model.network import Network as Model
from adam_async.model_worker.pulls import Puller
from adam_async.model_worker.steps import Stepper
from adam_async.model_worker.training import GroupTrainer, ThreadScratch, Trained, replica_graph
from adam_async.model_worker.updates import plan_pushes
from adam_async.model_worker.way import OnStep
from adam_async.model_worker.weights import WorkerWeights
from adam_async.parameter_server.client import ParameterClient
from adam_async.placement import ShardTable
from dataflow import Firing, Graph, Tag
from transport import BufferPool


class Copied:
    """The way of training of every run but the aliased ones; see `WayOfTraining`.

    Args:
        model: The network.
        config: The run.
        table: Shards of the model.
        buckets: Primary of each bucket.
        client: How to reach the servers.
        buffers: Memory for pulled values.
        in_flight: Groups in flight; with one, each waits for its pull, otherwise pulls run in the background.
    """

    def __init__(
        self,
        *,
        model: Model,
        config: Config,
        table: ShardTable,
        buckets: Sequence[str],
        client: ParameterClient,
        buffers: BufferPool,
        in_flight: int,
    ) -> None:
        self._model = model
        self._config = config
        self._table = table
        self._client = client
        self._background = in_flight > 1
        self._plan = plan_pushes(
            model, table, buckets, images=config.images_per_group * config.push_every, wanted=config.protocol
        )
        self._weights = WorkerWeights()
        self._puller = Puller(
            network=model,
            table=table,
            buckets=buckets,
            client=client,
            weights=self._weights,
            buffers=buffers,
        )
        # A local step fills the steps between two pulls. With a pull at every step there are none: the
        # values that follow a push contain it, and arrive before a local step would have paid for itself.
        local = config.rule == "sgd" and config.pull_every > 1
        self._trainer = GroupTrainer(
            network=model,
            weights=self._weights,
            plan=self._plan,
            rate=config.rate if local else 0.0,
            group_images=config.images_per_group,
            push_every=config.push_every,
            buffers=in_flight + 2,
            dice=Dice(config.seed),
        )
        self._landed: Callable[[Tag], None] = _nothing

    async def prepare(self) -> None:
        """Pull everything. Cancelling it loses nothing."""
        landed = asyncio.Event()
        self._puller.pull(landed.set)
        await self._client.flush()
        await landed.wait()

    def begin(self, on_finished: Callable[[Finished], None], on_step: OnStep | None = None) -> None:
        """See `WayOfTraining.begin`."""
        self._stepper = Stepper(
            table=self._table,
            plan=self._plan,
            client=self._client,
            puller=self._puller,
            trainer=self._trainer,
            weights=self._weights,
            rate=self._config.rate,
            push_every=self._config.push_every,
            pull_every=self._config.pull_every,
            clock=self._puller.clock,
            on_finished=on_finished,
            on_step=on_step,
        )

    def new_context(self) -> Context:
        """See `WayOfTraining.new_context`."""
        return self._model.context(self._config.images_per_group)

    def new_scratch(self) -> ThreadScratch:
        """See `WayOfTraining.new_scratch`."""
        return ThreadScratch(self._model)

    def graph(self, landed: Callable[[Tag], None]) -> Graph:
        """See `WayOfTraining.graph`."""
        self._landed = landed
        return replica_graph(self._trainer.train, self._on_trained, waits_for_pull=not self._background)

    def _on_trained(self, firing: Firing, trained: Trained) -> None:
        self._stepper.add(trained, _nothing if self._background else partial(self._landed, firing.tag))

    def flush(self) -> None:
        """See `WayOfTraining.flush`."""
        self._stepper.close(_nothing)

    def statistics(self) -> dict[str, Any]:
        """Protocol of each tensor, and how many push buffers there are."""
        return {
            "protocols": [msgspec.to_builtins(choice) for choice in self._plan.protocols.values()],
            "push_buffers": self._trainer.buffers_made,
        }


def _nothing(*_: Any) -> None:
    """A pull in the background has landed: nobody waits for it."""
