"""Pure: all parts of a cut network in one process, run together by one thread.

Theory of operation
-------------------
What is local needs no message (paper 3.3; AD-15): where all workers of a replica are in one process, and
nothing is to come between them, one of them runs the segments of all parts, in an order in which whatever a
segment receives has been sent. What leaves one part is written where the other one reads it, and error
gradients are read where they lie.

To whoever trains it a joint network is the whole one: weights are whole tensors, of which each part reads its
rows, and each gradient is put together of what the parts have of it, or added up in the order of the
workers, to the last bit as between processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adam_async.model.context import Context
from adam_async.model.keyed_random import Dice, Key
from adam_async.model.layer import Array, Factors, ParameterSpec, Weights
from adam_async.model.network import Network
from adam_async.model.partition.exchange import WIRES, Arrival, Departure
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan

if TYPE_CHECKING:
    from adam_async.model.fast.joint import JointTapes


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one part has of a tensor."""

    part: int
    rows: slice | None
    """Of the whole tensor; None: all of it."""


class JointContext:
    """The contexts of all parts for one group, wired to one another.

    Args:
        parts: All parts.
        group_images: Most images of a group.
        errors: Outputs of each tensor whose factors several parts have.
        partial: Largest gradient that several parts have a part of.
    """

    def __init__(
        self, parts: Sequence[Partition], group_images: int, *, errors: dict[str, int], partial: int
    ) -> None:
        self._parts = parts
        self.contexts: list[Context] = [part.network.context(group_images) for part in parts]
        dtype = parts[0].network.dtype
        self.partial: NDArray[Any] = np.zeros(partial, dtype)
        """Memory for one part's part of a gradient."""
        self.errors = {name: np.zeros((rows, group_images), dtype) for name, rows in errors.items()}
        """Memory for error gradients of outputs that several parts have."""
        self._wired: set[int] = set()
        self._cuts = [_cut_of(part) for part in parts]

    @property
    def images(self) -> int:
        """Images of the group that is loaded."""
        return self.contexts[0].images

    def load(
        self, images: Array, labels: Array, *, dice: Dice | None = None, keys: tuple[Key, ...] = ()
    ) -> None:
        """Take a group; see `Context.load`. Each part takes what it reads of the images."""
        for context, cut in zip(self.contexts, self._cuts, strict=True):
            context.load(cut(images), labels, dice=dice, keys=keys)
        if self.images not in self._wired:
            self._wired.add(self.images)
            self._wire()

    def _wire(self) -> None:
        """Lead what crosses to its place, in contexts as they are laid out for groups of this size."""
        places: dict[int, NDArray[Any]] = {}
        for part, context in zip(self._parts, self.contexts, strict=True):
            for number, layer in enumerate(part.network.layers):
                if isinstance(layer, Arrival):
                    places |= dict(layer.places(context.slots(number)))
        for part, context in zip(self._parts, self.contexts, strict=True):
            for number, layer in enumerate(part.network.layers):
                if isinstance(layer, Arrival | Departure):
                    context.slots(number).views[WIRES] = places


class JointNetwork:
    """A cut network whose parts are run together. Holds no arrays; any number of threads may share it.

    Args:
        network: The whole network.
        plan: How it is cut.

    Raises:
        ModelError: The plan does not fit the network.
    """

    def __init__(self, network: Network, plan: PartitionPlan) -> None:
        self.whole = network
        self.parts = tuple(Partition(network, plan, worker) for worker in range(plan.workers))
        order = runnable_order(self.parts)
        loss = next(at for at, (part, number) in enumerate(order) if self._ends_in_loss(part, number))
        self._there, self._back = order[: loss + 1], order[loss + 1 :]
        self._loss_part = self.parts[order[loss][0]].network
        self._pieces: dict[str, list[_Piece]] = {p.name: [] for p in network.parameters}
        self._reads: list[list[tuple[str, slice | None]]] = []
        for at, part in enumerate(self.parts):
            self._reads.append([])
            for parameter in part.network.parameters:
                rows = None
                if parameter.shape != network.parameter(parameter.name).shape:
                    rows = slice(parameter.first_row, parameter.first_row + parameter.shape[0])
                self._reads[at].append((parameter.name, rows))
                self._pieces[parameter.name].append(_Piece(at, rows))
        shared = {name: pieces for name, pieces in self._pieces.items() if len(pieces) > 1}
        self._partial = max((network.parameter(name).size for name in shared), default=0)
        self._compiled = False
        if network.engine is not None:
            from adam_async.model.fast.joint import can_join  # importing numba takes a while

            self._compiled = can_join(self.parts)
        self._errors = {
            name: network.parameter(name).shape[0]
            for name, pieces in shared.items()
            if pieces[0].rows is not None
        }

    def _ends_in_loss(self, part: int, number: int) -> bool:
        """Whether the loss is there when this segment has run."""
        partition = self.parts[part]
        last = len(partition.network.layers) - 1
        return partition.has_loss and last in partition.segments[number].forward

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        return self.whole.dtype

    @property
    def kernels(self) -> str:
        """As of `Network`."""
        return self.whole.kernels

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Whole tensors, in the order of their layers."""
        return self.whole.parameters

    @property
    def trained(self) -> tuple[ParameterSpec, ...]:
        """As of `Network`."""
        return self.whole.trained

    @property
    def frozen(self) -> frozenset[str]:
        """As of `Network`."""
        return self.whole.frozen

    def parameter(self, name: str) -> ParameterSpec:
        """As of `Network`."""
        return self.whole.parameter(name)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """As of `Network`."""
        self.whole.warm_up(progress)

    def context(self, group_size: int) -> JointContext:
        """Allocate the arrays of all parts for one group of up to `group_size` images."""
        return JointContext(self.parts, group_size, errors=self._errors, partial=self._partial)

    def forward(self, weights: Weights, context: JointContext) -> float:
        """Run all parts on the loaded group until its loss is there, and return its mean.

        The segment that ends in the loss goes on to its way back.
        """
        if self._compiled:
            self._tapes(context).forward(weights)
        else:
            self._run(weights, context, self._there)
        at = self._there[-1][0]
        return self._loss_part.loss(context.contexts[at])

    def backward(self, weights: Weights, context: JointContext) -> None:
        """Run what is left; afterwards `delta` and `factors` are valid."""
        if self._compiled:
            self._tapes(context).backward(weights)
        else:
            self._run(weights, context, self._back)

    def _tapes(self, context: JointContext) -> "JointTapes":
        """What was compiled for the group's images, kept beside the first part's own."""
        kept = context.contexts[0].tapes
        if "joint" not in kept:
            from adam_async.model.fast.joint import JointTapes

            kept["joint"] = JointTapes(
                self.parts,
                context.contexts,
                there=self._there,
                back=self._back,
                pieces={name: [(p.part, p.rows) for p in held] for name, held in self._pieces.items()},
                partial=context.partial,
            )
        tapes: JointTapes = kept["joint"]
        return tapes

    def _run(self, weights: Weights, context: JointContext, order: Sequence[tuple[int, int]]) -> None:
        of_parts = [
            {name: weights[name] if rows is None else weights[name][rows] for name, rows in reads}
            for reads in self._reads
        ]
        for part, number in order:
            partition = self.parts[part]
            partition.compute(of_parts[part], context.contexts[part], partition.segments[number])

    def delta(self, context: JointContext, name: str, *, out: Array) -> None:
        """Write the group gradient of one tensor into `out`; see `Network.delta`."""
        if self._compiled:
            self._tapes(context).delta(name, out)
            return
        first, *others = self._pieces[name]
        self._part_of_delta(context, name, first, out)
        for piece in others:
            if piece.rows is not None:
                self._part_of_delta(context, name, piece, out)
                continue
            part = context.partial[: out.size].reshape(out.shape)
            self._part_of_delta(context, name, piece, part)
            np.add(out, part, out=out)

    def _part_of_delta(self, context: JointContext, name: str, piece: _Piece, out: Array) -> None:
        place = out if piece.rows is None else out[piece.rows]
        self.parts[piece.part].network.delta(context.contexts[piece.part], name, out=place)

    def factors(self, context: JointContext, name: str) -> Factors | None:
        """Give the factors of one tensor's gradient, or None; see `Network.factors`."""
        pieces = self._pieces[name]
        if len(pieces) > 1 and name not in self._errors:
            return None  # a sum over parts
        pairs = [self.parts[p.part].network.factors(context.contexts[p.part], name) for p in pieces]
        if len(pairs) == 1 or pairs[0] is None:
            return pairs[0]
        inputs, errors = pairs[0]
        together = context.errors[name][:, : len(errors)]
        for piece, pair in zip(pieces, pairs, strict=True):
            assert pair is not None
            assert piece.rows is not None
            together[piece.rows] = pair[1].T
        return inputs, together.T

    def __repr__(self) -> str:
        return f"<JointNetwork {self.whole!r} in {len(self.parts)} parts>"


def runnable_order(parts: Sequence[Partition]) -> list[tuple[int, int]]:
    """Order the segments of all parts so that whatever one receives was sent before: (part, segment)."""
    done: list[int] = [0] * len(parts)
    sent: set[int] = set()
    order: list[tuple[int, int]] = []
    while any(number < len(part.segments) for number, part in zip(done, parts, strict=True)):
        before = len(order)
        for place, part in enumerate(parts):
            while done[place] < len(part.segments) and sent.issuperset(part.segments[done[place]].receives):
                sent.update(part.segments[done[place]].sends)
                order.append((place, done[place]))
                done[place] += 1
        assert len(order) > before, "the parts wait for one another"
    return order


def _cut_of(part: Partition) -> Callable[[Array], Array | None]:
    """What a part reads of a group's images."""
    rows = part.input_rows
    if not rows:
        return lambda images: None
    if len(part.layout.input_shape) == 1:
        return lambda images: images.reshape(len(images), -1)[:, rows.start : rows.stop]
    if part.image_rows is None:
        return lambda images: images
    return lambda images: images[:, :, rows.start : rows.stop]
