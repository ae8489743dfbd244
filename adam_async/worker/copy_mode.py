"""Training on a copy: pull, compute, push, and pull again, over any link, at any interval."""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from adam_async.client.parameter_client import SessionIdentity
from adam_async.model.context import Context
from adam_async.model.network import Network, Trainable
from adam_async.model.partition.network import Partition
from adam_async.run.config import Config
from adam_async.run.counts import PartitionCounts, WorkerCounts
from adam_async.run.step_model import StepModel
from adam_async.worker.gradient_clipping import Scaling
from adam_async.worker.partition_trainer import PartitionTrainer, SendBlock, partition_graph
from adam_async.worker.puller import Puller, WorkerWeights
from adam_async.worker.push_plan import BackwardSection, PushPlan, plan_pushes, plan_sections
from adam_async.worker.pusher import Pusher, StepReads
from adam_async.worker.stepper import ReplicaClock, Stepper
from adam_async.worker.training import GroupTrainer, ModeSetup, ThreadScratch, replica_graph
from dataflow import Graph
from transport import BufferPool

OPEN_GROUPS = 8
"""Maximum number of groups in pushes that one server has not acknowledged, unless `OPEN_STEPS` steps have
more. More groups do not raise the rate, because one step travels while the next computes. But if servers fall
behind, more groups make every open push staler."""

OPEN_STEPS = 2
"""Number of steps that one server may always leave unacknowledged, for any number of groups per step."""


def open_steps(push_every: int) -> int:
    """Return the maximum number of steps that one server may leave unacknowledged before the worker waits."""
    return max(OPEN_STEPS, OPEN_GROUPS // push_every)


def context_of(model: Trainable, config: Config, plan: PushPlan) -> Any:
    """Make a run's training context, for one group at a time."""
    images = config.images_per_group
    if isinstance(model, StepModel):
        return model.context(images, factored=plan.factor_rows)
    return model.context(images)


class CopyMode:
    """The training mode of every run but those in place.

    Args:
        setup: The run.
        model: The network, or a step of the user's.
        session: Identity of the worker towards the servers.
        buffers: Memory for pulled values.
        in_flight: Number of groups in flight. With 1 each group waits for its pull, except in bsp; otherwise
            pulls run in the background.
        owned: Tensors that this worker pushes or ticks; None: all.
    """

    def __init__(
        self,
        setup: ModeSetup,
        *,
        model: Trainable,
        session: SessionIdentity,
        buffers: BufferPool,
        in_flight: int,
        owned: Collection[str] | None = None,
    ) -> None:
        config = self._config = setup.config
        self._setup = setup
        self._model = model
        self._in_flight = in_flight
        self._owned = owned
        # In bsp a group begins only after its values are installed, so no group waits for the pull after its
        # own step.
        self._background = in_flight > 1 or config.synchronous
        self._plan = plan_pushes(
            model,
            setup.table,
            setup.buckets,
            images=config.images_per_group * config.push_every,
            wanted=config.protocol,
            owned=owned,
        )
        per_server = Counter(message.server for message in self._plan.messages)
        setup.client.allow_unacknowledged(open_steps(config.push_every) * max(per_server.values(), default=1))
        self._weights = WorkerWeights(recorded=config.record)
        self._puller = Puller(
            network=model,
            table=setup.table,
            buckets=setup.buckets,
            client=setup.client,
            weights=self._weights,
            buffers=buffers,
            clocked=config.slack is not None,
        )
        self._sections = self._new_sections()
        self._trainer = self._new_trainer()
        shards = {name: len(specs) for name, specs in setup.table.by_tensor.items()}
        self._pusher = Pusher(
            config,
            plan=self._plan,
            client=setup.client,
            puller=self._puller,
            trainer=self._trainer,
            on_finished=setup.events.finished,
            on_step=setup.events.stepped,
            reads=StepReads(shards) if config.record else None,
        )
        self._stepper = Stepper(
            ReplicaClock(
                push_every=config.push_every,
                pull_every=config.pull_every,
                slack=config.slack,
                synchronous=config.synchronous,
            ),
            self._pusher,
            replica=session.replica,
            most_steps=in_flight + 2,
            timeout_s=config.waits.clock_s,
            landed=None if self._background else setup.events.landed,
        )
        self.gate = None if config.slack is None else self._stepper
        """The gate that admits groups; None if replicas do not wait for each other's clocks."""

    def _new_sections(self) -> Sequence[BackwardSection]:
        # Limits of the gradient, and sums of several groups, need the whole gradient before any message.
        config = self._config
        complete = config.push_every == 1 and not config.local_steps and Scaling.of(config) is None
        if complete and self._owned is None and isinstance(self._model, Network):
            return plan_sections(self._model, self._plan)
        return ()

    def _new_trainer(self) -> GroupTrainer:
        """Make the trainer of groups on compute threads."""
        return GroupTrainer(
            self._model,
            self._config,
            weights=self._weights,
            plan=self._plan,
            buffers=self._buffers_ahead,
            sections=self._sections,
            on_section=self._setup.events.section_done,
        )

    @property
    def _buffers_ahead(self) -> int:
        """Number of push buffers made ahead: one per group in flight, and two for pushes in transit."""
        return self._in_flight + 2

    async def prepare(self) -> None:
        """Get the first values, and set the replica's clock from the servers' clocks.

        The parameter client must be running. Cancelling it loses nothing.
        """
        await self.refresh()
        self._stepper.start(self._puller.clock if self.gate is None else self._weights.clock)

    async def refresh(self) -> None:
        """Pull everything. Cancelling it loses nothing."""
        landed = asyncio.Event()
        self._puller.pull(landed.set)
        await self._setup.client.flush()
        await landed.wait()

    def new_context(self) -> Context | None:
        """Make a training context for one group in flight; None if each thread has its own."""
        return None

    def new_scratch(self) -> object:
        """Make the scratch memory of one compute thread, on that thread."""
        return ThreadScratch(self._model, context_of(self._model, self._config, self._plan))

    def graph(self) -> Graph:
        """Return the dataflow graph of a group."""
        ahead = [partial(self._stepper.ahead, section.messages) for section in self._sections[:-1]]
        waits = not self._background
        return replica_graph(self._trainer.train, self._stepper.add, waits_for_pull=waits, ahead=ahead)

    def flush(self, sync_clock: int) -> None:
        """Send the collected steps: no more groups come for now. With a gate, tick to the sync clock."""
        if self.gate is None:
            self._stepper.close()
        else:
            self._stepper.sync_at(sync_clock)

    def statistics(self) -> WorkerCounts:
        """Return the protocol of each tensor, the number of push buffers, and the replica's clock."""
        counts = WorkerCounts(
            protocols=list(self._plan.protocols.values()),
            push_buffers=self._trainer.buffers_made,
            left_ahead=self._pusher.left_ahead,
        )
        if self.gate is not None:
            self.gate.count_into(counts)
        return counts


class PartitionMode(CopyMode):
    """The training mode of one of several workers of a replica; see `CopyMode`.

    The mode's weights are a copy of the tensors that the partition's layers read. The worker pulls all these
    tensors, but pushes only the tensors that it owns; other workers of the replica push the rest.

    Args:
        setup: The run, with the shards of the partition.
        partition: The partition.
        send_block: Sends a block to the worker of another partition. Never waits.
        session: See `CopyMode`.
        buffers: See `CopyMode`.
        in_flight: See `CopyMode`.
    """

    def __init__(
        self,
        setup: ModeSetup,
        *,
        partition: Partition,
        send_block: SendBlock,
        session: SessionIdentity,
        buffers: BufferPool,
        in_flight: int,
    ) -> None:
        self._partition = partition
        self._send_block = send_block
        super().__init__(
            setup,
            model=partition.network,
            session=session,
            buffers=buffers,
            in_flight=in_flight,
            owned=partition.owned,
        )

    def _new_trainer(self) -> PartitionTrainer:
        self._partition_trainer = PartitionTrainer(
            self._partition, self._config, weights=self._weights, plan=self._plan, buffers=self._buffers_ahead
        )
        return self._partition_trainer

    def new_context(self) -> Context:
        """See `CopyMode.new_context`: a group in flight waits for blocks between two jobs."""
        return self._partition.network.context(self._config.images_per_group)

    def new_scratch(self) -> WeakKeyDictionary[PartitionTrainer, ThreadScratch]:
        """See `CopyMode.new_scratch`: a thread may work for several partitions."""
        return WeakKeyDictionary()

    def graph(self) -> Graph:
        """See `CopyMode.graph`. The ports ``in-<crossing>`` receive blocks of other workers."""
        return partition_graph(
            self._partition_trainer,
            self._partition,
            self._send_block,
            self._stepper.add,
            waits_for_pull=not self._background,
        )

    def statistics(self) -> WorkerCounts:
        """Return the statistics of `CopyMode`, and the partition's numbers of segments and send buffers."""
        counts = super().statistics()
        counts.part = PartitionCounts(
            segments=len(self._partition.segments), wires=self._partition_trainer.wires_made
        )
        return counts
