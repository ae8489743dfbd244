"""Training one partition of a model that several workers share: on a copy, with blocks between workers."""

from weakref import WeakKeyDictionary

from adam_async.client.parameter_client import SessionIdentity
from adam_async.model.context import Context
from adam_async.model.partition.network import Partition
from adam_async.worker.copy_mode import CopyMode
from adam_async.worker.partition_trainer import PartitionTrainer, SendBlock, partition_graph
from adam_async.worker.statistics import PartitionStatistics, WorkerStatistics
from adam_async.worker.training import ThreadScratch
from adam_async.worker.training_mode import ModeSetup
from dataflow import Graph
from transport import BufferPool


class PartitionMode(CopyMode):
    """The training mode of one of several workers of a replica; see `CopyMode`.

    The mode's weights are a copy of the tensors that the partition's layers read. The worker pulls all these
    tensors, and pushes the tensors that it owns; other workers of the replica push the rest.

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
            self._partition,
            self._config,
            weights=self._weights,
            plan=self._plan,
            buffers=self._buffers_ahead,
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

    def statistics(self) -> WorkerStatistics:
        """Return the statistics of `CopyMode`, and the partition's numbers of segments and send buffers."""
        counts = super().statistics()
        counts.part = PartitionStatistics(
            segments=len(self._partition.segments), wires=self._partition_trainer.wires_made
        )
        return counts
