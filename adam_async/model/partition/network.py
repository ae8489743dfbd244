"""Pure: one worker's part of a cut network: cut layers, and the order in which they run.

Theory of operation
-------------------
A part runs its own steps of the whole network: its layers forward in their order, then backward. A *segment*
is a longest run of steps without a wait. A step that receives from another worker begins a segment, unless
all steps of the present segment receive, too. At its end a segment sends its results. No deadlock can occur:
every worker runs its steps in the order of the whole network, so each wait is for an earlier step.

Departures and arrivals are layers of a partition's network beside those of the model. A *departure* follows a
layer with an output that other workers read: forward copies their rows out, backward adds up their error
gradients. An *arrival* joins the rows that a layer reads, from this worker and from others. Backward returns
the rows' error gradients to their sources. An arrival without received rows is a slice of one output.

*Wires* are arrays by crossing number, batch axis last; the caller of a step first puts them into the slots'
views.

An arrival of flat features *hosts* the features computed on this worker: their layer writes them directly
into the arrival's array (`Layer.hosts_at`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from adam_async.model.context import Context
from adam_async.model.layer import Array, Layer, Loss, ScratchSpec, Slots, Weights
from adam_async.model.network import Network
from adam_async.model.partition.plan import Crossing, Layout, PartitionPlan, common
from adam_async.model.spec import LayerSpec, Shape
from adam_async.model.topology import INPUT_INDEX, Topology

WIRES = "wires"
"""Name of the view with a layer's wires."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The exchange of one output between this worker and another."""

    peer: int
    rows: range
    """Rows of the uncut output."""
    forward: int
    """Number of the crossing that has the values."""
    back: int | None
    """Number of the opposite crossing, of their error gradients; None if no layer needs these."""


class Departure(Layer):
    """Copies rows of its input for other workers, and adds up these workers' error gradients; its output is
    its input.

    Args:
        of: Name of the layer.
        shape: Shape of one image, uncut.
        block: Rows of the input.
        worker: Number of this worker.
        wires: Exchange with each other worker.
        read: Whether a layer of this worker also reads the output.
    """

    SHARES_INPUT: ClassVar[bool] = True

    def __init__(
        self, of: str, shape: Shape, block: range, *, worker: int, wires: Sequence[Wire], read: bool
    ) -> None:
        super().__init__(LayerSpec.of(of, "departure"), (with_rows(shape, len(block)),))
        self.block = block
        self.worker = worker
        self.wires = tuple(wires)
        self.read = read
        self._before = sum(wire.back is not None and wire.peer < worker for wire in self.wires)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the sum of the error gradients from lower workers, if there are several."""
        return {"before": ((*self.output_shape, images), None)} if self._before > 1 else {}

    def prepare(self, slots: Slots) -> None:
        """Make a view of each wire's rows."""
        slots.views[WIRES] = {}
        slots.views["rows"] = [_rows(slots.inputs[0], wire.rows, self.block) for wire in self.wires]
        if slots.output_error is None:
            return
        # Sums are in worker order, ((0 + first) + second) + own. Error gradients of several lower workers are
        # added separately, because `slots.error` already has this worker's own.
        apart = slots.scratch.get("before", slots.error)
        slots.views["errors"] = [
            _rows(apart if wire.peer < self.worker else slots.error, wire.rows, self.block)
            for wire in self.wires
        ]

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy the rows that other workers read; later layers may then overwrite the rows."""
        outgoing = slots.views[WIRES]
        for wire, rows in zip(self.wires, slots.views["rows"], strict=True):
            np.copyto(outgoing[wire.forward], rows)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Add up all readers' error gradients, in worker order."""
        incoming = slots.views[WIRES]
        if not self.read:
            slots.error.fill(0)
        before = slots.scratch.get("before")
        if before is not None:
            before.fill(0)
        for wire, rows in zip(self.wires, slots.views["errors"], strict=True):
            if wire.back is None:
                continue
            if before is not None and wire.peer > self.worker:
                _add(slots.error, before)
                before = None
            _add(rows, incoming[wire.back])
        if before is not None:
            _add(slots.error, before)


class Arrival(Layer):
    """Rows of one output, some computed on this worker, some received.

    Args:
        of: Name of the layer.
        shape: Shape of one image, uncut.
        rows: Rows of the result.
        own: Rows of the input, which this worker computes; None in a `Landing`.
        wires: Exchange with the other workers.
    """

    def __init__(
        self, of: str, shape: Shape, rows: range, *, own: range | None, wires: Sequence[Wire] = ()
    ) -> None:
        sources = () if own is None else (with_rows(shape, len(own)),)
        super().__init__(LayerSpec.of(of, "arrival"), sources)
        self.output_shape = with_rows(shape, len(rows))
        self.rows = rows
        self.own = own
        self.wires = tuple(wires)
        if len(shape) == 1 and own is not None and common(own, rows) == own:
            self.hosts_at = own.start - rows.start

    def prepare(self, slots: Slots) -> None:
        """Make views of each source's rows."""
        slots.views[WIRES] = {}
        slots.views["rows"] = [_rows(slots.output, wire.rows, self.rows) for wire in self.wires]
        if slots.output_error is not None:
            slots.views["errors"] = [_rows(slots.error, wire.rows, self.rows) for wire in self.wires]
        slots.views["hosted"] = False
        if self.own is None:
            return
        slots.views["hosted"] = np.may_share_memory(slots.inputs[0], slots.output)
        both = common(self.own, self.rows)
        slots.views["own"] = (_rows(slots.output, both, self.rows), _rows(slots.inputs[0], both, self.own))
        target = slots.input_errors[0]
        if target is not None:
            slots.views["own errors"] = (_rows(target, both, self.own), _rows(slots.error, both, self.rows))
            slots.views["covers"] = len(both) == len(self.own)
            slots.views["hosted back"] = np.may_share_memory(target, slots.error)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Join the rows of all sources."""
        incoming = slots.views[WIRES]
        if self.own is not None and not slots.views["hosted"]:
            target, source = slots.views["own"]
            np.copyto(target, source)
        for wire, rows in zip(self.wires, slots.views["rows"], strict=True):
            np.copyto(rows, incoming[wire.forward])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Write the error gradients of the input; rows that the arrival leaves out get zero."""
        if slots.views["hosted back"]:
            return
        target, source = slots.views["own errors"]
        if not slots.views["covers"]:
            error = slots.input_error
            error.fill(0)
        np.copyto(target, source)

    def send_errors(self, slots: Slots) -> None:
        """Copy the error gradients of received rows; they are complete when `backward` may run."""
        outgoing = slots.views[WIRES]
        for wire, rows in zip(self.wires, slots.views["errors"], strict=True):
            if wire.back is not None:
                np.copyto(outgoing[wire.back], rows)


class Landing(Arrival):
    """An arrival with received rows only; a network may begin with it."""

    NUM_INPUTS: ClassVar[int | None] = 0


def with_rows(shape: Shape, rows: int) -> Shape:
    """Return the shape of an output with this number of rows."""
    return (shape[0], rows, shape[2]) if len(shape) == 3 else (rows,)


def _rows(array: Array, rows: range, base: range) -> Array:
    """Return a view of some rows of an output, in an array that has the output's rows `base`, batch last."""
    start, stop = rows.start - base.start, rows.stop - base.start
    return array[:, start:stop] if array.ndim == 4 else array[start:stop]


def _add(target: Array, part: Array) -> None:
    np.add(target, part, out=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps without a wait in between."""

    forward: range
    """Layers of the part that run forward, in order."""
    back: range
    """Layers that run backward afterwards, last first."""
    receives: tuple[int, ...]
    """Crossings that must have arrived before the segment begins."""
    sends: tuple[int, ...]
    """Crossings that are complete when the segment ends."""
    wiring: tuple[tuple[int, int], ...]
    """Pairs of a layer of the part and a crossing: one for each of `receives`, then of `sends`."""
    departs: tuple[int, ...]
    """Arrivals in `back` that copy error gradients to wires."""


class Partition:
    """The part of one worker. Holds no arrays, so any number of threads may share it.

    Args:
        network: The whole network.
        plan: Cut of the network.
        worker: Number of the part's worker.

    Raises:
        ModelError: The plan does not fit the network.
    """

    def __init__(self, network: Network, plan: PartitionPlan, worker: int) -> None:
        self.worker = worker
        self.layout = Layout(network.topology, network.input_shape, plan)
        self.input_rows = self.layout.input_rows[worker]
        """Image rows that the part reads; empty if it reads none."""
        builder = _Builder(network.topology, self.layout, worker)
        shape = with_rows(network.input_shape, len(self.input_rows))
        self.network = network.part(builder.topology(), shape)
        """The part's layers, with departures and arrivals between them."""
        self.has_loss = isinstance(self.network.layers[-1], Loss)
        crossings = self.layout.crossings
        self.incoming: tuple[Crossing, ...] = tuple(c for c in crossings if c.target == worker)
        self.outgoing: tuple[Crossing, ...] = tuple(c for c in crossings if c.source == worker)
        self.sums: tuple[Crossing, ...] = tuple(c for c in self.incoming if c.kind == "gradient")
        """Partial weight gradients that this worker adds up."""
        self.partial: tuple[Crossing, ...] = tuple(c for c in self.outgoing if c.kind == "gradient")
        """Partial weight gradients that other workers add up."""
        self.owned = frozenset(self._owned(network))
        """Names of the parameters whose shards only this worker of the replica pushes or ticks."""
        self.segments: tuple[Segment, ...] = tuple(_cut(self.network.layers))
        self._shapes = {crossing.number: self._shape(crossing) for crossing in crossings}

    @property
    def image_rows(self) -> tuple[int, int] | None:
        """Rows of each image to request from a data server; ``(0, 0)``: none; None: whole images."""
        rows, shape = self.input_rows, self.layout.input_shape
        if rows and (len(shape) == 1 or len(rows) == shape[1]):
            return None  # data servers cut only rows; the part itself cuts features out of a flat image
        return rows.start, rows.stop

    def _owned(self, network: Network) -> Iterator[str]:
        for number, layer in enumerate(network.layers):
            if not self.layout.computes[number][self.worker]:
                continue
            if layer.cut_by == "outputs" or self.layout.owner(number) == self.worker:
                yield from (parameter.name for parameter in layer.parameters)

    def _shape(self, crossing: Crossing) -> Shape:
        if crossing.kind == "gradient":
            return (crossing.values,)
        return with_rows(self.layout.topology.layers[crossing.layer].output_shape, len(crossing.rows))

    def wire_shape(self, crossing: Crossing, images: int) -> Shape:
        """Return the shape of a crossing's tensor for a number of images.

        The batch is the last axis; weight gradients are flat.
        """
        shape = self._shapes[crossing.number]
        return shape if crossing.kind == "gradient" else (*shape, images)

    def run(self, weights: Weights, context: Context, segment: Segment, wires: Mapping[int, Array]) -> None:
        """Run one segment of the group loaded in the context.

        Args:
            weights: Weights of the part.
            context: Context of the part's network.
            segment: One of `segments`, all earlier ones of which have run.
            wires: An array per crossing: the segment reads the received ones and writes the sent ones.
        """
        self.connect(context, segment, [wires[crossing] for _, crossing in segment.wiring])
        self.compute(weights, context, segment)
        self.send_errors(context, segment)
        self.disconnect(context, segment)

    def connect(self, context: Context, segment: Segment, wires: Sequence[Array]) -> None:
        """Put a segment's wires, in the order of `Segment.wiring`, into the slots of its layers."""
        for (layer, crossing), wire in zip(segment.wiring, wires, strict=True):
            context.slots(layer).views[WIRES][crossing] = wire

    def disconnect(self, context: Context, segment: Segment) -> None:
        """Remove the wires from the slots."""
        for layer, crossing in segment.wiring:
            del context.slots(layer).views[WIRES][crossing]

    def compute(self, weights: Weights, context: Context, segment: Segment) -> None:
        """Run the layers of a connected segment."""
        if segment.forward:
            self.network.forward_layers(weights, context, segment.forward)
        if segment.back:
            self.network.backward_layers(weights, context, segment.back)

    def send_errors(self, context: Context, segment: Segment) -> None:
        """Copy the error gradients for other workers to their wires."""
        for number in segment.departs:
            arrival = self.network.layers[number]
            assert isinstance(arrival, Arrival)
            arrival.send_errors(context.slots(number))

    def write_partial(self, context: Context, crossing: Crossing, out: Array) -> None:
        """Write the partial weight gradients of one crossing, one tensor after the other."""
        at = 0
        for name in crossing.tensors:
            parameter = self.network.parameter(name)
            piece = out[at : at + parameter.size].reshape(parameter.shape)
            self.network.deltas(context, {name: piece})
            at += parameter.size

    def __repr__(self) -> str:
        return f"<Partition {self.worker} of {self.layout.plan.workers}, {len(self.segments)} segments>"


class _Builder:
    """Assembles the layers of a part."""

    def __init__(self, whole: Topology, layout: Layout, worker: int) -> None:
        self._whole, self._layout, self._worker = whole, layout, worker
        self._layers: list[Layer] = []
        self._producers: list[tuple[int, ...]] = []
        self._wants: list[bool] = []
        self._made: dict[int, tuple[int, range]] = {}
        """For each layer of the whole network: the part's layer with its output, and the rows there."""

    def topology(self) -> Topology:
        """Assemble the topology of the part."""
        for number in range(len(self._whole.layers)):
            self._make(number)
        return Topology.join(self._layers, self._producers, self._wants)

    def _add(self, layer: Layer, sources: tuple[int, ...], wants_error: bool) -> int:
        self._layers.append(layer)
        self._producers.append(sources)
        self._wants.append(wants_error)
        return len(self._layers) - 1

    def _make(self, number: int) -> None:
        """Add the part of one layer: its block, and the departure and arrival that the block needs."""
        layout, worker = self._layout, self._worker
        layer = self._whole.layers[number]
        block, need = layout.computes[number][worker], layout.needs[number][worker]
        wants = self._whole.wants_error[number]
        at: int | None = None
        if block:
            sources = tuple(
                self._source(layer, position, source, layout.reads(number, position, worker))
                for position, source in enumerate(self._whole.producers[number])
            )
            at = self._add(layer.cut(block), sources, wants)
            to = self._wires(number, worker, outgoing=True)
            if to:
                name = f"{layer.name} to others"
                shape, read = layer.output_shape, bool(need)
                departure = Departure(name, shape, block, worker=worker, wires=to, read=read)
                at = self._add(departure, (at,), wants)
            self._made[number] = at, block
        wires = self._wires(number, worker, outgoing=False)
        if need and (wires or need != block):
            name = f"{layer.name} from others"
            if at is None:
                at = self._add(Landing(name, layer.output_shape, need, own=None, wires=wires), (), wants)
            else:
                arrival = Arrival(name, layer.output_shape, need, own=block, wires=wires)
                at = self._add(arrival, (at,), wants)
            self._made[number] = at, need

    def _source(self, reader: Layer, position: int, source: int, rows: range) -> int:
        """Return the layer that has a source's rows for `reader`; may add a layer for them."""
        name, shape = f"{reader.name} reads {position}", reader.input_shapes[position]
        if source == INPUT_INDEX:
            at, have, wants = INPUT_INDEX, self._layout.input_rows[self._worker], False
        elif source in self._made:
            (at, have), wants = self._made[source], self._whole.wants_error[source]
        else:  # the block of `reader` reads only padding
            return self._add(Landing(name, shape, rows, own=None), (), self._whole.wants_error[source])
        if have == rows:
            return at
        return self._add(Arrival(name, shape, rows, own=have), (at,), wants)

    def _wires(self, number: int, worker: int, *, outgoing: bool) -> list[Wire]:
        wires = []
        ways = [c for c in self._layout.crossings if c.layer == number and c.kind != "gradient"]
        backs = {(way.target, way.source): way.number for way in ways if way.kind == "error"}
        for way in ways:
            if way.kind == "activation" and (way.source if outgoing else way.target) == worker:
                peer = way.target if outgoing else way.source
                wires.append(Wire(peer, way.rows, way.number, backs.get((way.source, way.target))))
        return wires


def _cut(layers: Sequence[Layer]) -> Iterator[Segment]:
    """Cut the steps of a part, forward and backward, into segments."""
    steps = [(number, False) for number in range(len(layers))]
    steps += [(number, True) for number in reversed(range(len(layers)))]
    run: list[tuple[int, bool]] = []
    waiting_only = True
    for number, back in steps:
        waits = bool(_receives(layers[number], back))
        if waits and run and not waiting_only:
            yield _segment(layers, run)
            run, waiting_only = [], True
        run.append((number, back))
        waiting_only = waiting_only and waits
    yield _segment(layers, run)


def _segment(layers: Sequence[Layer], steps: list[tuple[int, bool]]) -> Segment:
    forward = [number for number, back in steps if not back]
    back = [number for number, back in steps if back]
    receives = [(n, crossing) for n, back in steps for crossing in _receives(layers[n], back)]
    sends = [(n, crossing) for n, back in steps for crossing in _sends(layers[n], back)]
    return Segment(
        forward=range(forward[0], forward[-1] + 1) if forward else range(0),
        back=range(back[-1], back[0] + 1) if back else range(0),
        receives=tuple(crossing for _, crossing in receives),
        sends=tuple(crossing for _, crossing in sends),
        wiring=(*receives, *sends),
        departs=tuple(n for n in back if isinstance(layers[n], Arrival) and _sends(layers[n], True)),
    )


def _receives(layer: Layer, back: bool) -> list[int]:
    if isinstance(layer, Arrival) and not back:
        return [wire.forward for wire in layer.wires]
    if isinstance(layer, Departure) and back:
        return [wire.back for wire in layer.wires if wire.back is not None]
    return []


def _sends(layer: Layer, back: bool) -> list[int]:
    if isinstance(layer, Departure) and not back:
        return [wire.forward for wire in layer.wires]
    if isinstance(layer, Arrival) and back:
        return [wire.back for wire in layer.wires if wire.back is not None]
    return []
