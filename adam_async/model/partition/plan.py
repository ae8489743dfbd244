"""Pure: how one model is cut over a replica's workers, and what the workers exchange.

Theory of operation
-------------------
A `PartitionPlan` names for each layer the *block* of its output that each worker owns: image rows, or
features. `Layout` derives everything else, from the loss back to the images:

    needs      the range of an output that a worker's later layers read: the hull of their needs
    computes   the range that the worker computes: its block, or its whole need if the layer is *recomputed*
    pieces     the ranges that the worker needs and does not compute: the owners send them, each value once

No worker sends the output of a layer that only *moves* values (flatten): each reader computes it. A value
therefore crosses between two workers at most once forward. The value's error gradient crosses at most once
backward, to the owner, which adds up the gradients of all workers in their order. Recomputed rows never
cross. Each worker has the error gradients of the rows that its later layers read, and its weight gradients
are partial sums anyway.

Every worker that computes a block of a convolution has all its weights. Its gradients are partial sums; one
*owner* per layer adds them up and pushes the sum. Rows of dense weights are on the worker of their outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import msgspec

from adam_async.errors import ModelError
from adam_async.model.layer import Layer, extent
from adam_async.model.topology import INPUT_INDEX, Topology

Kind = Literal["activation", "error", "gradient"]
PlanKind = Literal["vertical", "layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The cut of one layer."""

    layer: str
    blocks: tuple[tuple[int, int], ...]
    """For each worker, the first output row (or feature) that the worker owns, and the row after its last."""
    recomputed: bool = False
    """Whether every worker computes all rows of the output that it reads, instead of receiving some."""
    whole: str = ""
    """Reason why a vertical plan leaves the layer whole; otherwise empty."""

    def block(self, worker: int) -> range:
        """Return the rows (or features) that one worker owns."""
        return range(*self.blocks[worker])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """A model cut over several workers. `planner.py` makes plans."""

    kind: PlanKind
    workers: int
    layers: tuple[LayerPlan, ...]
    """Cuts of the layers, in the order of the network."""
    owners: dict[str, int]
    """By layer name, the worker that pushes the parameters of a layer that several workers have."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain builtins."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Read a result of `to_dict`.

        Raises:
            ModelError: A key is missing or has the wrong type.
        """
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise ModelError(f"not a partition plan: {error}") from None

    def row_cuts(self, layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
        """For each cut tensor, return the first rows of the workers' pieces, without row 0."""
        cuts: dict[str, tuple[int, ...]] = {}
        for layer, planned in zip(layers, self.layers, strict=True):
            starts = sorted({start for start, stop in planned.blocks if start < stop} - {0})
            if layer.cut_by == "outputs" and starts and not planned.recomputed:
                cuts |= {parameter.name: tuple(starts) for parameter in layer.parameters}
        return cuts


def planned_cuts(plain: Mapping[str, Any] | None, layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """Return `PartitionPlan.row_cuts` of a plan from `to_dict`; no cuts without a plan."""
    return {} if plain is None else PartitionPlan.from_dict(plain).row_cuts(layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor that one worker sends to another for every group."""

    number: int
    kind: Kind
    layer: int
    """Number of the layer whose output or error gradient crosses; for weight gradients, of the first one."""
    source: int
    target: int
    rows: range
    """Rows or features of that output; empty for weight gradients."""
    values: int
    """Number of values per image; for weight gradients, per group of any size."""
    tensors: tuple[str, ...] = ()
    """Names of the parameters whose partial gradients cross, one after the other."""


class Layout:
    """The ranges that each worker reads, computes, sends and receives under a plan.

    Args:
        topology: The uncut network.
        input_shape: Shape of one image.
        plan: Cut of the network.

    Raises:
        ModelError: The plan does not fit this network, or a layer reads rows that no worker owns.
    """

    def __init__(self, topology: Topology, input_shape: tuple[int, ...], plan: PartitionPlan) -> None:
        self.topology = topology
        self.input_shape = input_shape
        self.plan = plan
        self.workers = range(plan.workers)
        _check_plan(topology, plan)
        names = [layer.name for layer in topology.layers]
        nothing = [range(0)] * plan.workers
        self.input_rows: list[range] = list(nothing)
        """Rows (or features) of the images that each worker reads."""
        self.needs: list[list[range]] = [list(nothing) for _ in names]
        """Rows (or features) of an output that a worker reads, by layer and worker."""
        self.computes: list[list[range]] = [list(nothing) for _ in names]
        """Rows (or features) of an output that a worker computes, by layer and worker."""
        for number in reversed(range(len(names))):
            self._derive(number)
        self._check_work()
        self._check_input(extent(input_shape))
        self.crossings = tuple(self._cross())
        """Crossings by number: each output's values, then its error gradients; weight gradients come last."""

    def reads(self, reader: int, position: int, worker: int) -> range:
        """Return the range of an input that one worker's part of a layer reads.

        A layer that is not cut reads its whole input, even rows that no square of a pool reaches. So its
        results have the same bits as in the uncut network.
        """
        layer, computed = self.topology.layers[reader], self.computes[reader][worker]
        if len(computed) == extent(layer.output_shape):
            return range(extent(layer.input_shapes[position]))
        return layer.needs(computed, position)

    def _derive(self, number: int) -> None:
        """Derive the rows of a layer that each worker needs and computes from those of later layers."""
        layer, planned = self.topology.layers[number], self.plan.layers[number]
        readers = self.topology.consumers[number]
        for worker in self.workers:
            hulls = [self.reads(reader, position, worker) for reader, position in readers]
            self.needs[number][worker] = hull(hulls)
        # An output without a reader, such as the loss, is still computed.
        wanted = hull(self.needs[number]) or range(extent(layer.output_shape))
        for worker in self.workers:
            need, block = self.needs[number][worker], planned.block(worker)
            whole = range(extent(layer.output_shape))
            if layer.moves:
                self.computes[number][worker] = whole if need else range(0)
            elif planned.recomputed and any(self.needs[number]):
                self.computes[number][worker] = whole if need and layer.cut_by == "whole" else need
            else:
                self.computes[number][worker] = block if block == whole else common(block, wanted)
        if not layer.moves and not planned.recomputed:
            self._check_owned(layer, planned, wanted)
        for position, source in enumerate(self.topology.producers[number]):
            if source == INPUT_INDEX:
                for worker in self.workers:
                    rows = self.reads(number, position, worker)
                    self.input_rows[worker] = hull([self.input_rows[worker], rows])

    def _check_owned(self, layer: Layer, planned: LayerPlan, wanted: range) -> None:
        at = wanted.start
        for worker in self.workers:
            block = common(planned.block(worker), wanted)
            if block and block.start != at:
                break
            at = block.stop if block else at
        if at != wanted.stop:
            raise ModelError(
                f"layer {layer.name!r}: the blocks {list(planned.blocks)} do not hold each of {wanted.start} "
                f"to {wanted.stop} once, in the order of the workers"
            )

    def _check_work(self) -> None:
        for worker in self.workers:
            if not any(computed[worker] for computed in self.computes):
                raise ModelError(
                    f"worker {worker} of {self.plan.workers} has nothing to compute: use fewer partitions"
                )

    def _check_input(self, rows: int) -> None:
        for read in self.input_rows:
            if read.stop > rows:
                raise ModelError(f"the plan reads rows {read.start} to {read.stop} of an image of {rows}")

    def _cross(self) -> Iterator[Crossing]:
        """List all crossings by number: each layer's crossings, then sums of gradients."""
        number = 0
        for layer in range(len(self.topology.layers)):
            values = row_values(self.topology.layers[layer].output_shape)
            ways: list[tuple[Kind, int, int, range]] = []
            for source in self.workers:
                for target in self.workers:
                    rows = self.piece(layer, source, target)
                    if rows:
                        ways.append(("activation", source, target, rows))
            if self.topology.wants_error[layer]:
                ways += [("error", target, source, rows) for _, source, target, rows in ways]
            for kind, source, target, rows in ways:
                yield Crossing(
                    number=number,
                    kind=kind,
                    layer=layer,
                    source=source,
                    target=target,
                    rows=rows,
                    values=len(rows) * values,
                )
                number += 1
        for source in self.workers:
            for target in self.workers:
                layers = self._summed(source, target)
                if layers:
                    parameters = [p for layer in layers for p in self.topology.layers[layer].parameters]
                    yield Crossing(
                        number=number,
                        kind="gradient",
                        layer=layers[0],
                        source=source,
                        target=target,
                        rows=range(0),
                        values=sum(parameter.size for parameter in parameters),
                        tensors=tuple(parameter.name for parameter in parameters),
                    )
                    number += 1

    def piece(self, layer: int, source: int, target: int) -> range:
        """Return the range of a layer's output that one worker sends to another; it may be empty."""
        if source == target or self.topology.layers[layer].moves or self.plan.layers[layer].recomputed:
            return range(0)
        return common(self.computes[layer][source], self.needs[layer][target])

    def _summed(self, source: int, target: int) -> list[int]:
        """Return the layers with a partial weight gradient at the source, which the target adds up."""
        if source == target:
            return []
        return [
            number
            for number, layer in enumerate(self.topology.layers)
            if layer.parameters
            and not layer.frozen
            and layer.cut_by != "outputs"
            and self.computes[number][source]
            and self.owner(number) == target
        ]

    def owner(self, layer: int) -> int:
        """Return the worker that pushes a layer's parameters, if several workers may have all of them."""
        holders = [worker for worker in self.workers if self.computes[layer][worker]]
        planned = self.plan.owners.get(self.topology.layers[layer].name, holders[0] if holders else 0)
        return planned if planned in holders else holders[0]


def _check_plan(topology: Topology, plan: PartitionPlan) -> None:
    """Check the properties of a plan that need no derivation."""
    names = [layer.name for layer in topology.layers]
    if plan.workers < 1:
        raise ModelError(f"a model is cut over at least 1 worker, not {plan.workers}")
    if [planned.layer for planned in plan.layers] != names:
        raise ModelError(f"the plan is for layers {[p.layer for p in plan.layers]}, not {names}")
    for number, (layer, planned) in enumerate(zip(topology.layers, plan.layers, strict=True)):
        blocks, size = list(planned.blocks), extent(layer.output_shape)
        if len(blocks) != plan.workers:
            raise ModelError(
                f"layer {layer.name!r}: the plan is for {plan.workers} workers, but names blocks {blocks}"
            )
        if not all(0 <= start <= stop <= size for start, stop in blocks):
            raise ModelError(
                f"layer {layer.name!r}: blocks {blocks} are not all within its output of 0 to {size}"
            )
        if layer.cut_by == "whole" and any(0 < stop - start < size for start, stop in blocks):
            raise ModelError(
                f"layer {layer.name!r} ({layer.spec.kind}) may not be cut, but its blocks are {blocks}: "
                "let one worker compute all of it"
            )
        if planned.recomputed and (layer.cut_by == "outputs" or not topology.consumers[number]):
            raise ModelError(
                f"layer {layer.name!r} ({layer.spec.kind}) may not be recomputed: "
                "a recomputed layer is cut by rows or not at all, and another layer reads it"
            )
    for name, worker in plan.owners.items():
        if name not in names or not 0 <= worker < plan.workers:
            raise ModelError(
                f"the plan has worker {worker} own the parameters of layer {name!r}: "
                f"workers are 0 to {plan.workers - 1}, layers {names}"
            )


def row_values(shape: Sequence[int]) -> int:
    """Return the number of values in one image row, over all channels; 1 for features."""
    return shape[0] * shape[2] if len(shape) == 3 else 1


def hull(ranges: Sequence[range]) -> range:
    """Return the smallest range with all of these ranges."""
    filled = [each for each in ranges if each]
    if not filled:
        return range(0)
    return range(min(each.start for each in filled), max(each.stop for each in filled))


def common(one: range, other: range) -> range:
    """Return the intersection of two ranges."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return range(start, stop) if start < stop else range(0)
