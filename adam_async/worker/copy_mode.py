"""Training on a copy: pull, compute, push, and pull again; over any link, at any cadence."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec

from adam_async.messages import Finished
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network as Model
from adam_async.model.trainable import Trainable
from adam_async.parameter_server.client import ParameterClient, SessionIdentity
from adam_async.run.config import Config
from adam_async.run.ids import ShardId
from adam_async.run.learning_rate import Schedule
from adam_async.run.shard_table import ShardTable
from adam_async.worker.bounded_stepper import ClockedStepper
from adam_async.worker.gradient_clipping import Scaling
from adam_async.worker.puller import Puller
from adam_async.worker.push_plan import cut_shards, plan_pushes, plan_stages
from adam_async.worker.replay_log import Reader, ReadLog
from adam_async.worker.replica_clock import ReplicaClock
from adam_async.worker.stepper import Pusher, Stepper
from adam_async.worker.training import GroupTrainer, ThreadScratch, Trained, replica_graph
from adam_async.worker.training_mode import Deliver, OnStep
from adam_async.worker.weights import WorkerWeights
from dataflow import Firing, Graph, Tag
from transport import BufferPool

OPEN_GROUPS, OPEN_STEPS = 8, 2
"""Groups whose pushes a server may owe answers for, and steps at least. More bring no rate, for one step
travels while the next computes; but where servers fall behind, all that is open is stale by so much, and a
run that pushes rarely would lose its way."""


def open_steps(push_every: int) -> int:
    """Steps that a server may owe answers for before the worker waits."""
    return max(OPEN_STEPS, OPEN_GROUPS // push_every)


class Copied:
    """The way of training of every run but the aliased ones; see `WayOfTraining`.

    Args:
        model: The network.
        config: The run.
        table: Shards of the model.
        buckets: Primary of each bucket.
        client: How to reach the servers.
        session: Who we are to them.
        buffers: Memory for pulled values.
        in_flight: Groups in flight; with one, each waits for its pull, otherwise pulls run in the background.
        owned: Tensors that this worker pushes or ticks; None: all.
    """

    def __init__(
        self,
        *,
        model: Trainable,
        config: Config,
        table: ShardTable,
        buckets: Sequence[str],
        client: ParameterClient,
        session: SessionIdentity,
        buffers: BufferPool,
        in_flight: int,
        owned: Collection[str] | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._table = table
        self._client = client
        self._in_flight = in_flight
        # In lockstep no group begins before its values are there: none has to wait for those that follow.
        self._background = in_flight > 1 or config.synchronous
        self._buckets = buckets
        self._session = session
        self._clocked: ClockedStepper | None = None
        self._log: ReadLog | None = None
        self._pusher: Pusher | None = None
        self._owned = owned
        self._plan = plan_pushes(
            model,
            table,
            buckets,
            images=config.images_per_group * config.push_every,
            wanted=config.protocol,
            owned=owned,
        )
        per_server = Counter(message.server for message in self._plan.messages)
        self._client.allow_unacknowledged(open_steps(config.push_every) * max(per_server.values(), default=1))
        self._weights = WorkerWeights(recorded=config.record)
        self._puller = Puller(
            network=model,
            table=table,
            buckets=buckets,
            client=client,
            weights=self._weights,
            buffers=buffers,
            clocked=config.slack is not None,
        )
        # A local step fills the steps between two pulls. With a pull at every step there are none: the
        # values that follow a push contain it, and arrive before a local step would have paid for itself.
        self._schedule = Schedule.of(config)
        self._scaling = Scaling.of(config)
        # Limits of the gradient, and sums of several groups, need all of it before any of it may leave.
        leaves_ahead = config.push_every == 1 and not config.local_steps and self._scaling is None
        self._stages = (
            plan_stages(model, self._plan)
            if leaves_ahead and owned is None and isinstance(model, Model)
            else ()
        )
        self._trainer = self._new_trainer(
            weights=self._weights,
            plan=self._plan,
            schedule=self._schedule,
            local=config.local_steps,
            group_images=config.images_per_group,
            push_every=config.push_every,
            buffers=in_flight + 2,
            dice=Dice(config.seed),
            scaling=self._scaling,
            by_images=config.synchronous,
        )
        self._landed: Callable[[Tag], None] = _nothing

    def _new_trainer(self, **common: Any) -> GroupTrainer:
        """Make what trains groups on compute threads."""
        return GroupTrainer(network=self._model, stages=self._stages, **common)

    async def prepare(self) -> None:
        """Pull everything. Cancelling it loses nothing."""
        landed = asyncio.Event()
        self._puller.pull(landed.set)
        await self._client.flush()
        await landed.wait()

    def begin(self, on_finished: Callable[[Finished], None], on_step: OnStep | None = None) -> None:
        """See `WayOfTraining.begin`."""
        config = self._config
        if config.record:
            shards = {name: len(specs) for name, specs in self._table.by_tensor.items()}
            who = Reader(self._session.replica, self._session.session, self._session.incarnation)
            rated = self._schedule.fixed is None
            self._log = ReadLog(who, shards, local=config.local_steps, rated=rated)
        pusher = self._pusher = Pusher(
            table=self._table,
            plan=self._plan,
            client=self._client,
            puller=self._puller,
            trainer=self._trainer,
            weights=self._weights,
            schedule=self._schedule,
            on_finished=on_finished,
            on_step=on_step,
            scaling=self._scaling if config.push_every > 1 else None,
            unit=config.images_per_group if config.synchronous else None,
            log=self._log,
        )
        if config.slack is not None:
            self._clocked = self._new_clocked(pusher, config.slack)
            return
        self._stepper = Stepper(
            pusher=pusher,
            trainer=self._trainer,
            push_every=config.push_every,
            pull_every=config.pull_every,
            clock=self._puller.clock,
        )

    def _new_clocked(self, pusher: Pusher, slack: int) -> ClockedStepper:
        config = self._config
        by_server: dict[str, list[ShardId]] = {}
        for spec in self._table.shards:
            if self._owned is None or spec.tensor in self._owned:
                by_server.setdefault(self._buckets[spec.bucket], []).append(spec.id)
        clock = ReplicaClock(
            start=self._weights.clock,
            push_every=config.push_every,
            slack=slack,
            synchronous=config.synchronous,
        )
        return ClockedStepper(
            pusher=pusher,
            client=self._client,
            puller=self._puller,
            trainer=self._trainer,
            weights=self._weights,
            clock=clock,
            replica=self._session.replica,
            push_every=config.push_every,
            pull_every=config.pull_every,
            synchronous=config.synchronous,
            most_steps=self._in_flight + 2,
            shards=cut_shards(by_server),
            silent=self._plan.silent,
            timeout_s=config.waits.clock_s,
        )

    def new_context(self) -> Any:
        """See `WayOfTraining.new_context`."""
        return self._model.context(self._config.images_per_group)

    def new_scratch(self) -> ThreadScratch:
        """See `WayOfTraining.new_scratch`."""
        return ThreadScratch(self._model)

    def graph(self, landed: Callable[[Tag], None], deliver: Deliver) -> Graph:
        """See `WayOfTraining.graph`."""
        self._landed = landed

        def tell(stage: int, tag: Tag, trained: Trained | None) -> None:
            deliver(f"ahead-{stage}", tag, trained)

        self._trainer.tell = tell
        train = self._trainer.train if self._config.slack is None else self._trainer.train_admitted
        ahead = [partial(self._on_ahead, stage.messages) for stage in self._stages[:-1]]
        return replica_graph(train, self._on_trained, waits_for_pull=not self._background, ahead=ahead)

    def _on_trained(self, firing: Firing, trained: Trained) -> None:
        stepper = self._stepper if self._clocked is None else self._clocked
        stepper.add(trained, _nothing if self._background else partial(self._landed, firing.tag))

    def _on_ahead(self, messages: Sequence[int], firing: Firing, trained: Trained | None) -> None:
        if trained is not None:
            stepper = self._stepper if self._clocked is None else self._clocked
            on_landed = _nothing if self._background else partial(self._landed, firing.tag)
            stepper.ahead(trained, messages, on_landed)

    @property
    def gate(self) -> ClockedStepper | None:
        """See `WayOfTraining.gate`."""
        return self._clocked

    def flush(self) -> None:
        """See `WayOfTraining.flush`."""
        self._stepper.close()

    @property
    def record(self) -> bytes | bytearray:
        """See `WayOfTraining.record`."""
        return b"" if self._log is None else self._log.data

    def statistics(self) -> dict[str, Any]:
        """Protocol of each tensor, and how many push buffers there are."""
        return {
            "protocols": [msgspec.to_builtins(choice) for choice in self._plan.protocols.values()],
            "push_buffers": self._trainer.buffers_made,
            "left_ahead": self._pusher.left_ahead if self._pusher is not None else 0,
            **({} if self._clocked is None else self._clocked.statistics()),
        }


def _nothing(*_: Any) -> None:
    """A pull in the background has landed: nobody waits for it."""
