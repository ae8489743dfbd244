"""Pure: what a training mode gets: on a copy (`CopyMode`), in place, or on one partition of a model.

A mode is complete after construction: `ModeSetup` has the run, the servers, and `GroupEvents`, the only calls
from the mode to the session that feeds it. Groups enter the mode's graph, and events leave it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adam_async.client.parameter_client import ParameterClient
from adam_async.messages import Finished
from adam_async.run.config import Config
from adam_async.run.shard_table import ShardTable
from adam_async.worker.training import OnSection, OnStep
from dataflow import Tag


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
