"""Pure: the immutable description of a graph, validated once when it is built.

A *port* is a name for a value: either an external input of the graph or an output of one node. A node reads
ports and writes ports; a port may have any number of readers, but has exactly one writer. Ports and nodes
have numbers, so a firing costs a few list operations and no look-up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from inspect import iscoroutinefunction
from typing import Any

from dataflow.errors import GraphError, WrongOutputs


@dataclass(frozen=True, slots=True)
class Node:
    """One step of a graph: a plain function with named inputs and outputs.

    The function is called as ``fn(firing, *inputs)``, inputs in declared order. It returns

    - no outputs: any value, which is ignored;
    - one output: the value itself;
    - two or more: a tuple or list of exactly that many values, in declared order.

    A node with ``batch > 1`` is called as ``fn(firings, *columns)``: with a list of firings and, per input,
    an equally long list of values. The function returns a sequence with one entry per firing, each in the
    form above.

    A node without inputs fires when its tag is admitted.

    Args:
        name: Name, unique in its graph.
        fn: Plain function, not a coroutine function.
        inputs: Ports that the node reads. A node may read one port twice.
        outputs: Ports that the node writes.
        heavy: Whether the node runs in the compute pool; otherwise it runs on the event loop, and must be
            short.
        cost: Label of the node's jobs for the pool; the name by default.
        batch: Maximum number of ready tags per call.
        jobs: Maximum number of simultaneous calls; later ready tags wait, and form the next batch. None means
            no limit without batching, and 1 with batching, because a batch forms only while tags wait.

    Raises:
        GraphError: The name is empty, a number is below 1, or ports or `fn` have the wrong type.
    """

    name: str
    fn: Callable[..., Any]
    _: KW_ONLY
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    heavy: bool = False
    cost: str = ""
    batch: int = 1
    jobs: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise GraphError("a node needs a name")
        assign = object.__setattr__  # the dataclass is frozen
        for side in ("inputs", "outputs"):
            ports = getattr(self, side)
            if isinstance(ports, str):
                raise GraphError(f"node {self.name!r} has {side}={ports!r}, it must be a tuple of names")
            assign(self, side, tuple(ports))
        if self.batch < 1:
            raise GraphError(f"node {self.name!r} has batch={self.batch}, it must be at least 1")
        if self.jobs is None and self.batch > 1:
            assign(self, "jobs", 1)
        if self.jobs is not None and self.jobs < 1:
            raise GraphError(f"node {self.name!r} has jobs={self.jobs}, it must be at least 1 or None")
        if iscoroutinefunction(self.fn):
            raise GraphError(f"node {self.name!r} has a coroutine function; nodes are plain functions")


class CompiledNode:
    """A numbered node, with the values that the scheduler reads for each firing."""

    __slots__ = ("arity", "batch", "cost", "fn", "gated", "heavy", "index", "jobs", "name", "outputs")

    def __init__(self, node: Node, *, index: int, outputs: tuple[int, ...]) -> None:
        self.index = index
        self.name = node.name
        self.fn = node.fn
        self.heavy = node.heavy
        self.cost = node.cost or node.name
        self.batch = node.batch
        self.jobs = node.jobs or 0
        self.gated = node.jobs is not None
        self.arity = len(node.inputs)
        self.outputs = outputs

    def unpack(self, result: Any) -> Sequence[Any]:
        """Return one value per output port from the function's result. Raises WrongOutputs."""
        count = len(self.outputs)
        if count == 1:
            return (result,)
        if count == 0:
            return ()
        if not isinstance(result, tuple | list) or len(result) != count:
            raise WrongOutputs(node=self.name, expected=f"a tuple of {count}", result=result)
        return result

    def __repr__(self) -> str:
        return f"<node {self.name!r}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes joined by named ports.

    Args:
        nodes: At least one node, in any order.
        inputs: Ports delivered from outside, each with one token per tag. An input without a reader only
            delays the finish of its tag.
        outputs: Ports reported to the outside when they get their value.

    Raises:
        GraphError: There is no node, a name is used twice, a port has no writer, or nodes wait for each other
            in a cycle. The message names the node or port.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ports: tuple[str, ...] = field(init=False, compare=False)
    """All ports: the inputs first, then node outputs in node order. A port's number is its index here."""
    compiled: tuple[CompiledNode, ...] = field(init=False, compare=False, repr=False)
    """The nodes by number."""
    readers: tuple[tuple[tuple[CompiledNode, int], ...], ...] = field(init=False, compare=False, repr=False)
    """Readers by port number: each with the node, and the index among the node's inputs."""

    def __post_init__(self) -> None:
        assign = object.__setattr__  # the dataclass is frozen
        for name in ("nodes", "inputs", "outputs"):
            assign(self, name, tuple(getattr(self, name)))
        if not self.nodes:
            raise GraphError("a graph needs at least one node")
        assign(self, "ports", self._number_ports())
        self._check_readers()
        self._check_cycles()
        number = {port: index for index, port in enumerate(self.ports)}
        compiled = tuple(
            CompiledNode(node, index=index, outputs=tuple(number[port] for port in node.outputs))
            for index, node in enumerate(self.nodes)
        )
        readers: list[list[tuple[CompiledNode, int]]] = [[] for _ in self.ports]
        for node, described in zip(compiled, self.nodes, strict=True):
            for slot, port in enumerate(described.inputs):
                readers[number[port]].append((node, slot))
        assign(self, "compiled", compiled)
        assign(self, "readers", tuple(map(tuple, readers)))

    def _number_ports(self) -> tuple[str, ...]:
        """Return the ports in the order of their numbers: inputs first, then outputs of the nodes.

        Raises:
            GraphError: Two nodes have one name, or two writers one port.
        """
        names: set[str] = set()
        for node in self.nodes:
            if node.name in names:
                raise GraphError(f"two nodes are called {node.name!r}")
            names.add(node.name)
        writer: dict[str, str] = {}
        for port in self.inputs:
            if port in writer:
                raise GraphError(f"input {port!r} is listed twice")
            writer[port] = "the graph's inputs"
        for node in self.nodes:
            for port in node.outputs:
                if port in writer:
                    raise GraphError(
                        f"port {port!r} of node {node.name!r} is already written by {writer[port]}"
                    )
                writer[port] = f"node {node.name!r}"
        return tuple(writer)

    def _check_readers(self) -> None:
        """Check that each port that is read is written.

        Raises:
            GraphError: A port that is read has no writer, or an output is listed twice.
        """
        ports = set(self.ports)
        for node in self.nodes:
            for port in node.inputs:
                if port not in ports:
                    raise GraphError(f"node {node.name!r} reads port {port!r}, which nothing writes")
        for place, port in enumerate(self.outputs):
            if port not in ports:
                raise GraphError(f"output {port!r} is written by nothing")
            if port in self.outputs[:place]:
                raise GraphError(f"output {port!r} is listed twice")

    def _check_cycles(self) -> None:
        """Check that no nodes wait for each other: remove nodes whose inputs are known until none is left."""
        there = set(self.inputs)
        waiting = list(self.nodes)
        while waiting:
            stuck = [node for node in waiting if not there.issuperset(node.inputs)]
            if len(stuck) == len(waiting):
                raise GraphError(f"nodes wait for each other in a cycle: {' -> '.join(_one_cycle(stuck))}")
            for node in waiting:
                if there.issuperset(node.inputs):
                    there.update(node.outputs)
            waiting = stuck


def _one_cycle(stuck: list[Node]) -> list[str]:
    """Follow writers backwards from the first stuck node, and return the names of the cycle found."""
    writer = {port: node for node in stuck for port in node.outputs}
    node = stuck[0]
    path: list[str] = []
    while node.name not in path:
        path.append(node.name)
        node = next(writer[port] for port in node.inputs if port in writer)
    return [*path[path.index(node.name) :], node.name][::-1]
