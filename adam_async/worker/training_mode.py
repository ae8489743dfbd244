"""Pure: what a way of training must offer, be it on a copy, in place, or of a part of the model."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from adam_async.data_server.client import ImageGroup
from adam_async.messages import Finished, Lease
from adam_async.model.context import Context
from dataflow import Graph, Tag

OnStep = Callable[[int, Sequence[Lease]], None]
"""Told of a step that is about to leave for the servers: its clock, and the groups in it."""


class Gate(Protocol):
    """What lets groups through only when the values that they may read are here."""

    def opens_for(self, group: ImageGroup) -> bool:
        """Whether the next group may be admitted; what it tells of meetings is heard in any case."""
        ...

    def admit(self, group: ImageGroup) -> Any:
        """Let it through; returns what is trained in its place."""
        ...

    def meet(self, clock: int) -> None:
        """No group waits for us, and when all are pushed all replicas meet at this clock."""
        ...

    async def wait(self) -> None:
        """Wait for anything that may open the gate. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: The slowest clock has not advanced for `waits.clock_s`; names who is behind.
            RunFailed: Servers sent the values of another clock.
        """
        ...


Deliver = Callable[[str, Tag, Any], None]
"""Takes a port, a tag and a value."""


class TrainingMode(Protocol):
    """What turns image groups into steps of the run; `Copied`, `Parted` and `Aliased` do."""

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

    def graph(self, landed: Callable[[Tag], None], deliver: Deliver) -> Graph:
        """The dataflow graph of a group.

        Args:
            landed: To be called when a group that waits for its pull has it.
            deliver: Gives an external port of the graph its value, from any thread.
        """
        ...

    @property
    def gate(self) -> Gate | None:
        """What groups come through, after `begin`; None where nobody waits for the clocks of others."""
        ...

    def flush(self) -> None:
        """No group waits for us: send what is being collected. Where there is a gate, it `meet`s instead."""
        ...

    @property
    def record(self) -> bytes | bytearray:
        """What was noted for a replay; `read_log.py`."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Counts, for the report."""
        ...
