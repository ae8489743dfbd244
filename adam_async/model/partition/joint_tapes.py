"""Pure: all parts of a cut network as two tapes over the contexts of all parts: one call for each direction.

Rows of a tape have addresses, so one tape can work on the arrays of several contexts. A departure writes
directly into the memory of its arrival, and an arrival copies only rows of its own part. A cut tensor is on a
tape once per part, each time under another name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from adam_async.model.context import Context
from adam_async.model.fast import program
from adam_async.model.fast.compiled import Compiled
from adam_async.model.fast.engine import TapeEngine
from adam_async.model.fast.tape import OUT, Field, Op, Ref, Tape
from adam_async.model.layer import Array, Slots, Weights
from adam_async.model.partition.exchange import WIRES, Arrival, Departure
from adam_async.model.partition.network import Partition

Pieces = Mapping[str, Sequence[tuple[int, slice | None]]]
"""Pieces of each tensor, by its name: a part, and the range of its rows in the tensor; None: all rows."""


def can_join(parts: Sequence[Partition]) -> bool:
    """Return whether every layer of all parts has compiled kernels."""
    return all(
        part.network.engine is not None
        and all(isinstance(layer, Compiled | Arrival | Departure) for layer in part.network.layers)
        for part in parts
    )


class JointTapes:
    """The tapes of all parts for groups of one size. For one thread at a time, like the contexts.

    Args:
        parts: All parts, for which `can_join` holds.
        contexts: Contexts of the parts, laid out for such groups and wired to one another.
        there: Segments up to the loss, in their order, each as the number of its part and its number within
            the part.
        back: The other segments, in their order.
        pieces: Rows of each tensor in each part.
        partial: Memory for one part's summand of a gradient.
    """

    def __init__(
        self,
        parts: Sequence[Partition],
        contexts: Sequence[Context],
        *,
        there: Sequence[tuple[int, int]],
        back: Sequence[tuple[int, int]],
        pieces: Pieces,
        partial: Array,
    ) -> None:
        self._parts, self._contexts = parts, contexts
        self._pieces, self._partial = pieces, partial
        self._dtype = parts[0].network.dtype
        # A tensor that a part reads whole keeps its own name.
        self._cuts = [
            (name, part, rows) for name, held in pieces.items() for part, rows in held if rows is not None
        ]
        self._there, self._back = (
            Tape([op for part, number in order for op in self._segment(part, number)], self._dtype)
            for order in (there, back)
        )
        # One tape per tensor, because a caller asks for the gradient of one tensor at a time.
        self._deltas: dict[str, Tape] = {}

    def forward(self, weights: Weights) -> None:
        """Run the segments up to the loss."""
        self._there.run(self._named(weights))

    def backward(self, weights: Weights) -> None:
        """Run the other segments."""
        self._back.run(self._named(weights))

    def _named(self, weights: Weights) -> dict[str, Array]:
        return {**weights, **{_of_part(name, part): weights[name][rows] for name, part, rows in self._cuts}}

    def delta(self, name: str, out: Array) -> None:
        """Write the group gradient of one whole tensor."""
        tape = self._deltas.get(name)
        if tape is None:
            tape = self._deltas[name] = Tape(list(self._delta_ops(name, out)), self._dtype)
        cuts = {_of_part(OUT, part): out[rows] for part, rows in self._pieces[name] if rows is not None}
        tape.run({OUT: out, **cuts})

    def _delta_ops(self, name: str, out: Array) -> Iterator[Op]:
        """Make the ops of the gradient of one tensor, from the parts that hold it, into `out`."""
        whole = Ref(name=OUT, shape=out.shape, written=True)
        for at, (part, rows) in enumerate(self._pieces[name]):
            # Parts with rows write these. Parts with the whole tensor have a summand each: the first writes
            # `out`, and the others are added in the order of the parts, as without kernels.
            target: Field = whole
            if rows is not None:
                target = Ref(name=_of_part(OUT, part), shape=out[rows].shape, written=True)
            elif at:
                target = self._partial[: out.size].reshape(out.shape)
            network = self._parts[part].network
            layer = next(each for each in network.layers if network.parameter(name) in each.parameters)
            assert isinstance(layer, Compiled)
            slots = self._contexts[part].slots(network.layers.index(layer))
            yield from layer.delta_ops(slots, network.parameter(name).kind, target)
            if at and rows is None:
                yield Op.of(program.ADD, out.size, whole, whole, target)

    # --- segments ----------------------------------------------------------------------------

    def _segment(self, part: int, number: int) -> Iterator[Op]:
        segment = self._parts[part].segments[number]
        for layer in segment.forward:
            yield from self._renamed(part, self._forward(part, layer))
        for layer in reversed(segment.back):
            yield from self._renamed(part, self._backward(part, layer))

    def _forward(self, part: int, number: int) -> list[Op]:
        """Make the ops of one layer of a part, forward."""
        context, network = self._contexts[part], self._parts[part].network
        layer = network.layers[number]
        # Departures and arrivals have no kernels: their ops are copies and sums over the wires.
        if isinstance(layer, Compiled):
            return layer.forward_ops(context.slots(number))
        slots = context.slots(number)
        if isinstance(layer, Departure):
            return list(_departs(layer, slots))
        assert isinstance(layer, Arrival)
        # A departure has written received rows here, and a hosted layer has written its own.
        if layer.own is None or slots.views["hosted"]:
            return []
        return _copies(*slots.views["own"])

    def _backward(self, part: int, number: int) -> list[Op]:
        """Make the ops of one layer of a part, backward."""
        context, network = self._contexts[part], self._parts[part].network
        layer, slots = network.layers[number], context.slots(number)
        assert isinstance(network.engine, TapeEngine)
        if isinstance(layer, Compiled):
            return network.engine.backward_ops(context, number, layer)
        ops = network.engine.gather_ops(context, number)
        # Before the first parameters to train no layer needs an error gradient.
        if not any(error is not None for error in slots.input_errors):
            return ops
        if isinstance(layer, Departure):
            return [*ops, *_returns(layer, slots)]
        # The layer before reads its error gradient in this same memory.
        if slots.views["hosted back"]:
            return ops
        # Rows that the arrival leaves out have no reader here, so their error gradient is 0.
        if not slots.views["covers"]:
            ops += _zeros(slots.input_error)
        return ops + _copies(*slots.views["own errors"])

    def _renamed(self, part: int, ops: Sequence[Op]) -> Iterator[Op]:
        """Replace the names of cut tensors in ops by those of this part."""
        own = {name for name, whose, _ in self._cuts if whose == part}

        def named(field: Field) -> Field:
            if isinstance(field, Ref) and field.name in own:
                return replace(field, name=_of_part(field.name, part))
            return field

        # Layers know only the name of the whole tensor; a tape has one array per name.
        for op in ops:
            yield replace(op, fields=tuple(named(field) for field in op.fields))


def _departs(layer: Departure, slots: Slots) -> Iterator[Op]:
    """Copy rows into the memory of the parts that read them."""
    for wire, rows in zip(layer.wires, slots.views["rows"], strict=True):
        yield from _copies(slots.views[WIRES][wire.forward], rows)


def _returns(layer: Departure, slots: Slots) -> Iterator[Op]:
    """Add up the error gradients of all readers, in the order of their workers; see `Departure.backward`."""
    before = slots.scratch.get("before")
    # Without a reader in this part no op has written the error gradient yet.
    if not layer.read:
        yield from _zeros(slots.error)
    if before is not None:
        yield from _zeros(before)
    for wire, rows in zip(layer.wires, slots.views["errors"], strict=True):
        if wire.back is None:
            continue
        # The sum over lower workers is complete now, and is added before the sums of higher workers.
        if before is not None and wire.peer > layer.worker:
            yield from _adds(slots.error, before)
            before = None
        yield from _adds(rows, slots.views[WIRES][wire.back])
    if before is not None:
        yield from _adds(slots.error, before)


def _copies(target: Array, source: Array) -> list[Op]:
    return [Op.of(program.COPY, to.size, to, of) for to, of in _runs(target, source)]


def _adds(target: Array, part: Array) -> list[Op]:
    return [Op.of(program.ADD, to.size, to, to, of) for to, of in _runs(target, part)]


def _zeros(target: Array) -> list[Op]:
    return [Op.of(program.CLEAR, to.size, to) for to, _ in _runs(target, target)]


def _runs(first: Array, second: Array) -> Iterator[tuple[Array, Array]]:
    """Yield two arrays of one shape in runs without gaps; rows of images are a run per channel."""
    # A kernel takes an address and a number of values, so each run without gaps is an op.
    if first.flags.c_contiguous and second.flags.c_contiguous:
        yield first, second
    else:
        yield from zip(first, second, strict=True)


def _of_part(name: str, part: int) -> str:
    return f"{name} of part {part}"
