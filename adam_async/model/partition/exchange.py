"""Pure: departures and arrivals, the exchange of a partition's rows with other workers.

Departures and arrivals are layers of a partition's network beside those of the model. A *departure* follows a
layer with an output that other workers read: forward copies their rows out, backward adds up their error
gradients. An *arrival* joins the rows that a layer reads, from this worker and from others; backward returns
the error gradients of both to their sources. An arrival without received rows is a slice of one output.

*Wires* are arrays by the number of their crossing, batch axis last; the caller of a step first puts them into
the slots' views. A wire may be memory of a reader in the same process, which then needs no copy.

An arrival of flat features *hosts* the features computed on this worker: their layer writes them directly
into the arrival's array (`Layer.hosts_at`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from adam_async.model.layer import Array, Layer, ScratchSpec, Slots, Weights
from adam_async.model.partition.plan import common
from adam_async.model.spec import LayerSpec, Shape

WIRES = "wires"
"""Name of the view with a layer's wires."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The exchange of one output between this worker and another."""

    peer: int
    rows: range
    """Rows of the uncut output."""
    forward: int
    """Number of the crossing of the values."""
    back: int | None
    """Number of the crossing of their error gradients, in the opposite direction; None if no layer needs
    them."""


class Departure(Layer):
    """Copies rows of its input for other workers, and adds up their error gradients; its output is its input.

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
        # Sums are in the order of the workers, ((0 + first) + second) + own: error gradients of several lower
        # workers are added separately, because `slots.error` already has this worker's own.
        apart = slots.scratch.get("before", slots.error)
        slots.views["errors"] = [
            _rows(apart if wire.peer < self.worker else slots.error, wire.rows, self.block)
            for wire in self.wires
        ]

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy the rows that other workers read; later layers may then overwrite them."""
        outgoing = slots.views[WIRES]
        for wire, rows in zip(self.wires, slots.views["rows"], strict=True):
            np.copyto(outgoing[wire.forward], rows)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Add up the error gradients of all readers, in the order of their workers."""
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
        """Make views of the rows of each source."""
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
            part = incoming[wire.forward]
            if part is not rows:
                np.copyto(rows, part)

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
        """Copy the error gradients of received rows, which are complete when `backward` may run."""
        outgoing = slots.views[WIRES]
        for wire, rows in zip(self.wires, slots.views["errors"], strict=True):
            if wire.back is not None and outgoing[wire.back] is not rows:
                np.copyto(outgoing[wire.back], rows)

    def wire_views(self, slots: Slots) -> Iterator[tuple[int, Array]]:
        """Yield the views of received rows and of their error gradients, by the number of the crossing."""
        errors = slots.views.get("errors", [None] * len(self.wires))
        for wire, rows, error in zip(self.wires, slots.views["rows"], errors, strict=True):
            yield wire.forward, rows
            if wire.back is not None and error is not None:
                yield wire.back, error


class Landing(Arrival):
    """An arrival with received rows only; a network may begin with it."""

    NUM_INPUTS: ClassVar[int | None] = 0


def with_rows(shape: Shape, rows: int) -> Shape:
    """Return the shape of an output with this number of rows."""
    return (shape[0], rows, shape[2]) if len(shape) == 3 else (rows,)


def _rows(array: Array, rows: range, base: range) -> Array:
    """Return a view of some rows of an output, in an array with the output's rows `base`, batch last."""
    start, stop = rows.start - base.start, rows.stop - base.start
    return array[:, start:stop] if array.ndim == 4 else array[start:stop]


def _add(target: Array, part: Array) -> None:
    np.add(target, part, out=target)
