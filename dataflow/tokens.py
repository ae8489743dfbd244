"""Pure: tokens, flights, firings, effects, and the trace records of firings.

A *flight* is the state of one admitted tag. A *firing* is the run of one node for one tag. A *call* is one
call of a node's function: a firing, or a batch of firings. Calls are jobs, so a firing costs one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dataflow.errors import WrongOutputs
from dataflow.graph import CompiledNode
from dataflow.jobs import Job, Tag


class Token(NamedTuple):
    """A value for the external input `port` of one tag."""

    port: str
    tag: Tag
    value: Any


class TraceRecord(NamedTuple):
    """One ended firing, with times in seconds of the pool's clock. A named tuple is cheap to make.

    Light nodes have `queued == started` and the thread "loop". The firings of a batch share
    `queued`, and by default the other times.
    """

    node: str
    tag: Tag
    queued: float
    started: float
    finished: float
    thread: str


class Flight:
    """The state of one admitted tag. Only the scheduler writes a flight; threads read `abandoned`."""

    __slots__ = ("abandoned", "args", "arrived", "context", "left", "missing", "running", "tag")

    def __init__(
        self, tag: Tag, *, context: Any, num_nodes: int, missing: list[int], unread: int = 0
    ) -> None:
        self.tag = tag
        self.context = context
        self.abandoned = False
        self.arrived = 0
        """Bit mask of the external inputs that have their token."""
        self.missing = missing
        """Number of inputs without a value, per node."""
        self.args: list[list[Any] | None] = [None] * num_nodes
        """Values so far, per node with several inputs."""
        self.left = num_nodes + unread
        """Number of nodes that have not completed, plus inputs without a reader that have not arrived."""
        self.running = 0
        """Number of calls handed out and not reported back. Above 0 a thread may use the context."""


class Firing(Job):
    """The run of one node for one tag: the first argument of every node function.

    Attributes:
        scratch: Context object of the executing compute thread; None on the loop.
        args: The node's inputs, in declared order.
    """

    __slots__ = ("args", "flight", "node", "scratch")

    def __init__(self, node: CompiledNode, flight: Flight, args: Sequence[Any]) -> None:
        self.node = node
        self.flight = flight
        self.args = args
        self.cost = node.cost
        self.result = None
        self.error = None
        self.scratch: Any = None

    @property
    def tag(self) -> Tag:
        return self.flight.tag

    @property
    def context(self) -> Any:
        """Training context of the tag; None if the engine has none."""
        return self.flight.context

    @property
    def firings(self) -> Sequence[Firing]:
        """The firings of this call, which is this firing alone."""
        return (self,)

    def execute(self, context: Any) -> Sequence[Any] | None:
        """Call the node's function; return one value per output, or None if the tag was abandoned.

        Raises the function's errors, and WrongOutputs.
        """
        if self.flight.abandoned:
            return None
        self.scratch = context
        node = self.node
        result = node.fn(self, *self.args)
        return node.unpack(result) if node.outputs else ()

    def __repr__(self) -> str:
        return f"<firing of {self.node.name!r} for {self.flight.tag}>"


class BatchCall(Job):
    """One call of a batching node for several tags.

    The function may set `started` and `finished` of its firings, in seconds of the pool's clock; by default
    they are the call's times.
    """

    __slots__ = ("firings", "node")

    def __init__(self, node: CompiledNode, firings: Sequence[Firing]) -> None:
        self.node = node
        self.firings = firings
        self.cost = node.cost
        self.result = None
        self.error = None

    def execute(self, context: Any) -> list[Sequence[Any] | None]:
        """Call the node's function for all tags that are not abandoned.

        Returns, per firing, one value per output or None. Raises the function's errors, and WrongOutputs.
        """
        node = self.node
        live = [firing for firing in self.firings if not firing.flight.abandoned]
        if not live:
            return [None] * len(self.firings)
        for firing in live:
            firing.scratch = context
            firing.finished = 0.0
        columns = (list(column) for column in zip(*(firing.args for firing in live), strict=True))
        results = node.fn(live, *columns)
        if not node.outputs:
            return [()] * len(self.firings)
        if not isinstance(results, Sequence) or len(results) != len(live):
            raise WrongOutputs(
                node=node.name, expected=f"one entry for each of {len(live)} tags", result=results
            )
        by_tag = {firing.tag: node.unpack(result) for firing, result in zip(live, results, strict=True)}
        return [by_tag.get(firing.tag) for firing in self.firings]

    def __repr__(self) -> str:
        return f"<call of {self.node.name!r} for {len(self.firings)} tags>"


Call = Firing | BatchCall


class Output(NamedTuple):
    """Effect: the graph's output `port` has its value for `tag`."""

    port: str
    tag: Tag
    value: Any


class Finished(NamedTuple):
    """Effect: for `tag` every node has fired and every input has come; its slot and context are free."""

    tag: Tag


class Abandoned(NamedTuple):
    """Effect: `tag` was abandoned; its slot is free now, and its context after the last running call."""

    tag: Tag


class ContextFreed(NamedTuple):
    """Effect: the last call of the abandoned `tag` has ended; its context is free."""

    tag: Tag


Effect = Firing | BatchCall | Output | Finished | Abandoned | ContextFreed
"""Output of a scheduler to its engine. The engine executes a call and reports its end; the other effects
notify the engine and need no report."""
