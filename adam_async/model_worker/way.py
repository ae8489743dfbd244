"""Pure: what a way of training must offer, whether the worker's weights are a copy or the servers' memory."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from adam_async.messages import Finished, Lease
from adam_async.model.context import Context
from dataflow import Graph, Tag

OnStep = Callable[[int, Sequence[Lease]], None]
"""Told of a step that is about to leave for the servers: its clock, and the groups in it."""


class WayOfTraining(Protocol):
    """What turns image groups into steps of the run. `Copied` and `Aliased` are the two there are."""

    async def prepare(self) -> None:
        """Get ready for the first group. The client of the parameter servers runs beside it."""
        ...

    def begin(self, on_finished: Callable[[Finished], None], on_step: OnStep | None = None) -> None:
        """Take the run up where its servers' clocks stand.

        Args:
            on_finished: Called for each group whose step the servers have counted.
            on_step: Called with each step.
        """
        ...

    def new_context(self) -> Context | None:
        """Make a training context for one group in flight; None where threads have one each."""
        ...

    def new_scratch(self) -> Any:
        """Make what one compute thread needs beside the group's context. Called on that thread."""
        ...

    def graph(self, landed: Callable[[Tag], None]) -> Graph:
        """The dataflow graph of a group.

        Args:
            landed: To be called when a group that waits for its pull has it.
        """
        ...

    def flush(self) -> None:
        """No group waits for us: send what is being collected."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Counts, for the report."""
        ...
