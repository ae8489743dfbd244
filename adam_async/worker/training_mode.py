"""Pure: the interface of a training mode: on a copy, in place, or on one partition of a model.

A mode is complete after construction: `ModeSetup` has the run, the servers, and `GroupEvents`, the only calls
from the mode to the session that feeds it. Groups enter the mode's graph, and events leave it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from adam_async.client.parameter_client import ParameterClient
from adam_async.messages import Finished
from adam_async.model.context import Context
from adam_async.run.config import Config
from adam_async.run.shard_table import ShardTable
from adam_async.worker.statistics import WorkerStatistics
from adam_async.worker.stepper import Stepper
from adam_async.worker.training import OnSection, OnStep
from dataflow import Graph, Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvents:
    """Functions that take the events of groups. The loop calls all of them except `section_done`."""

    finished: Callable[[Finished], None]
    """Function that takes the report of a group whose step the servers have counted."""
    landed: Callable[[Tag], None]
    """Function that takes the tag of a group after its pull is installed."""
    section_done: OnSection
    """Function that takes a finished section of a group's backward pass, on the compute thread."""
    stepped: OnStep | None = None
    """Function that takes each step; None in a run without a timeline."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModeSetup:
    """The parts of a run that every training mode needs."""

    config: Config
    table: ShardTable
    """Shards of the model, or of the partition."""
    buckets: Sequence[str]
    """Home of each bucket."""
    client: ParameterClient
    events: GroupEvents


class TrainingMode(Protocol):
    """Turns image groups into steps of the run; `CopyMode`, `PartitionMode` and `InPlaceMode` are modes."""

    @property
    def gate(self) -> Stepper | None:
        """The gate that admits groups; None if replicas do not wait for each other's clocks."""
        ...

    async def prepare(self) -> None:
        """Get the first values, and set the replica's clock from the servers' clocks.

        The parameter client must be running.
        """
        ...

    async def refresh(self) -> None:
        """Get newer values before the first group."""
        ...

    def new_context(self) -> Context | None:
        """Make a training context for one group in flight; None if each thread has its own."""
        ...

    def new_scratch(self) -> object:
        """Make the scratch memory of one compute thread, on that thread."""
        ...

    def graph(self) -> Graph:
        """Return the dataflow graph of a group."""
        ...

    def flush(self, sync_clock: int) -> None:
        """Send the collected steps: no more groups come for now. With a gate, tick to the sync clock."""
        ...

    def statistics(self) -> WorkerStatistics:
        """Return the mode's part of the worker's statistics."""
        ...
