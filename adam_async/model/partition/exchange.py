"""Pure: where a partition's arrays meet those of other workers: departures and arrivals.

Both are layers of a partition's network that compute nothing. A *departure* follows a layer whose output
others read: on the way forward it copies their rows out, on the way back it adds their error gradients up.
An *arrival* makes the rows that a layer here reads out of those computed here and those received; on the
way back it hands the error gradients of both on, to where they came from. Without anything received it is a
cut through one output.

What comes and goes lies in *wires*: arrays by the number of their crossing, batch axis last, which whoever
runs the network puts into the slots' views before it runs the step. A wire may be the very place where its
values belong, in the arrays of a reader in the same process; then they are not copied there.

Of flat features an arrival *hosts* what is computed here: it lies in the arrival's own array from the
beginning (`Layer.hosts_at`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from adam_async.model.layer import Array, Layer, ScratchSpec, Slots, Weights
from adam_async.model.partition.plan import common
from adam_async.model.spec import LayerSpec, Shape

WIRES = "wires"
"""Name of the view that holds a layer's wires."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What crosses between this worker and another one of one output."""

    peer: int
    rows: range
    """Of the uncut output."""
    forward: int
    """Crossing of the values."""
    back: int | None
    """Crossing of their error gradients, the other way; None if nobody needs those."""


class Departure(Layer):
    """Lets others have rows of its input, which is also its output; adds up their error gradients.

    Args:
        of: Its name.
        shape: Of one image, uncut.
        block: Rows of the input.
        worker: This one.
        wires: To whom.
        read: Whether the output is read here too.
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
        """The sum of what comes before our own part, where that is a sum."""
        return {"before": ((*self.output_shape, images), None)} if self._before > 1 else {}

    def prepare(self, slots: Slots) -> None:
        """Cut the rows of each wire out."""
        slots.views[WIRES] = {}
        slots.views["rows"] = [_rows(slots.inputs[0], wire.rows, self.block) for wire in self.wires]
        if slots.output_error is None:
            return
        # ((0 + first) + second) + own: what comes before our own part is added up apart, if it is a sum.
        apart = slots.scratch.get("before", slots.error)
        slots.views["errors"] = [
            _rows(apart if wire.peer < self.worker else slots.error, wire.rows, self.block)
            for wire in self.wires
        ]

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy the rows that others read; afterwards they may be overwritten here."""
        outgoing = slots.views[WIRES]
        for wire, rows in zip(self.wires, slots.views["rows"], strict=True):
            np.copyto(outgoing[wire.forward], rows)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Add the error gradients of all readers up, in the order of their workers."""
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
    """Rows of one output, some computed here, some received.

    Args:
        of: Name of the output.
        shape: Of one image, uncut.
        rows: Rows that are made here.
        own: Rows that are computed here, those of the input; `Landing` has none.
        wires: From whom the others come.
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
        """Cut out what comes from where."""
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
        """Put the rows together."""
        incoming = slots.views[WIRES]
        if self.own is not None and not slots.views["hosted"]:
            target, source = slots.views["own"]
            np.copyto(target, source)
        for wire, rows in zip(self.wires, slots.views["rows"], strict=True):
            part = incoming[wire.forward]
            if part is not rows:
                np.copyto(rows, part)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Hand the error gradients of what was computed here on; nobody here read the rest of that."""
        if slots.views["hosted back"]:
            return
        target, source = slots.views["own errors"]
        if not slots.views["covers"]:
            error = slots.input_errors[0]
            assert error is not None
            error.fill(0)
        np.copyto(target, source)

    def send_errors(self, slots: Slots) -> None:
        """Copy the error gradients of what was received; they are complete when `backward` may run."""
        outgoing = slots.views[WIRES]
        for wire, rows in zip(self.wires, slots.views["errors"], strict=True):
            if wire.back is not None and outgoing[wire.back] is not rows:
                np.copyto(outgoing[wire.back], rows)

    def places(self, slots: Slots) -> Iterator[tuple[int, Array]]:
        """Where what is received belongs, and its error gradients lie, by the number of the crossing."""
        errors = slots.views.get("errors", [None] * len(self.wires))
        for wire, rows, error in zip(self.wires, slots.views["rows"], errors, strict=True):
            yield wire.forward, rows
            if wire.back is not None and error is not None:
                yield wire.back, error


class Landing(Arrival):
    """An arrival of an output none of which is computed here; a network may begin with it."""

    NUM_INPUTS: ClassVar[int | None] = 0


def with_rows(shape: Shape, rows: int) -> Shape:
    """The shape of so many rows of an output."""
    return (shape[0], rows, shape[2]) if len(shape) == 3 else (rows,)


def _rows(array: Array, rows: range, base: range) -> Array:
    """View rows of an output in an array, batch last, that holds those of `base`."""
    start, stop = rows.start - base.start, rows.stop - base.start
    return array[:, start:stop] if array.ndim == 4 else array[start:stop]


def _add(target: Array, part: Array) -> None:
    np.add(target, part, out=target)
