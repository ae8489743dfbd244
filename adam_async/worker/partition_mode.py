"""Training one part of a model that is cut over several workers: on a copy, with others on the way."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from adam_async.model.partition.network import Partition
from adam_async.worker.copy_mode import Copied
from adam_async.worker.partition_trainer import PartTrainer, part_graph
from adam_async.worker.reliable_stream import Parcel
from adam_async.worker.training_mode import Deliver
from dataflow import Graph, Tag


class Parted(Copied):
    """The way of training of one worker of several of a replica; see `WayOfTraining`.

    Its weights are a copy of what its layers read. It pushes what it owns; weights that others of the
    replica have too, and own, it pulls.

    Args:
        partition: The part.
        put: Sends a block to the worker that has another part. Never waits.
        rest: As of `Copied`, with the shards of the part.
    """

    def __init__(
        self,
        *,
        partition: Partition,
        put: Callable[[int, Parcel], None],
        **rest: Any,
    ) -> None:
        self._partition = partition
        self._put = put
        super().__init__(model=partition.network, owned=partition.owned, **rest)

    def _new_trainer(self, **common: Any) -> PartTrainer:
        self._parts = PartTrainer(self._partition, **common)
        return self._parts

    def new_scratch(self) -> Any:
        """See `WayOfTraining.new_scratch`: a thread may work for several parts."""
        return WeakKeyDictionary()

    def graph(self, landed: Callable[[Tag], None], deliver: Deliver) -> Graph:
        """See `WayOfTraining.graph`. Blocks of others are delivered to its ports ``in-<crossing>``."""
        self._landed = landed
        return part_graph(
            self._parts,
            self._partition,
            self._leave,
            self._on_trained,
            waits_for_pull=not self._background,
        )

    def _leave(self, target: int, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            self._put(target, parcel)

    def statistics(self) -> dict[str, Any]:
        """Those of `Copied`, and what the part is."""
        return {
            **super().statistics(),
            "part": {
                "segments": len(self._partition.segments),
                "wires": self._parts.wires_made,
            },
        }
