"""Pure: all parts of a cut network in one process, run together by one thread.

Theory of operation
-------------------
Local exchange needs no message (paper 3.3; AD-15): if all workers of a replica share a process, and no
network or delay between them is configured, one worker runs the segments of all parts, each after the
segments that send to it. A part writes its rows into the memory of the part that reads them, and reads error
gradients in place.

A joint network has the interface of the whole network: weights are whole tensors, and each part reads its
rows of them. A gradient consists of the parts' rows, or is the sum of the parts' gradients in the order of
the workers, so it has the bits of a run in several processes.
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
    from adam_async.model.partition.joint_tapes import JointTapes


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of a tensor in one part."""

    part: int
    rows: slice | None
    """Rows of the whole tensor; None: all rows."""


class JointContext:
    """The contexts of all parts for one group, wired to one another.

    Args:
        parts: All parts.
        group_images: Largest number of images of a group.
        errors: Number of outputs of each tensor whose rows are in several parts, by the name of the tensor.
        partial: Number of values of the largest gradient that is a sum over parts.
    """

    def __init__(
        self, parts: Sequence[Partition], group_images: int, *, errors: dict[str, int], partial: int
    ) -> None:
        self._parts = parts
        self.contexts: list[Context] = [part.network.context(group_images) for part in parts]
        dtype = parts[0].network.dtype
        self.partial: NDArray[Any] = np.zeros(partial, dtype)
        """Memory for one part's summand of a gradient."""
        self.errors = {name: np.zeros((rows, group_images), dtype) for name, rows in errors.items()}
        """Memory for the error gradients of outputs in several parts, by the name of the tensor."""
        self._wired: set[int] = set()
        self._cuts = [_cut_of(part) for part in parts]

    @property
    def images(self) -> int:
        """Number of images of the loaded group."""
        return self.contexts[0].images

    def load(
        self, images: Array, labels: Array, *, dice: Dice | None = None, keys: tuple[Key, ...] = ()
    ) -> None:
        """Load a group; see `Context.load`. Each part loads the rows of the images that it reads."""
        for context, cut in zip(self.contexts, self._cuts, strict=True):
            context.load(cut(images), labels, dice=dice, keys=keys)
        if self.images not in self._wired:
            self._wired.add(self.images)
            self._wire()

    def _wire(self) -> None:
        """Use the arrays of the receiving parts as wires, in the contexts' layout for this group's size."""
        wires: dict[int, NDArray[Any]] = {}
        for part, context in zip(self._parts, self.contexts, strict=True):
            for number, layer in enumerate(part.network.layers):
                if isinstance(layer, Arrival):
                    wires |= dict(layer.wire_views(context.slots(number)))
        for part, context in zip(self._parts, self.contexts, strict=True):
            for number, layer in enumerate(part.network.layers):
                if isinstance(layer, Arrival | Departure):
                    context.slots(number).views[WIRES] = wires


class JointNetwork:
    """A cut network that runs its parts together. Holds no arrays; any number of threads may share it.

    Args:
        network: The whole network.
        plan: Cut of the network.

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
            from adam_async.model.partition.joint_tapes import can_join  # importing numba is slow

            self._compiled = can_join(self.parts)
        self._errors = {
            name: network.parameter(name).shape[0]
            for name, pieces in shared.items()
            if pieces[0].rows is not None
        }

    def _ends_in_loss(self, part: int, number: int) -> bool:
        """Return whether this segment computes the loss."""
        partition = self.parts[part]
        last = len(partition.network.layers) - 1
        return partition.has_loss and last in partition.segments[number].forward

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        return self.whole.dtype

    @property
    def kernels(self) -> str:
        """See `Network.kernels`."""
        return self.whole.kernels

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Whole tensors, in the order of their layers."""
        return self.whole.parameters

    @property
    def trained(self) -> tuple[ParameterSpec, ...]:
        """See `Network.trained`."""
        return self.whole.trained

    @property
    def frozen(self) -> frozenset[str]:
        """See `Network.frozen`."""
        return self.whole.frozen

    def parameter(self, name: str) -> ParameterSpec:
        """See `Network.parameter`."""
        return self.whole.parameter(name)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """See `Network.warm_up`."""
        self.whole.warm_up(progress)

    def context(self, group_size: int) -> JointContext:
        """Allocate the arrays of all parts for one group of up to `group_size` images."""
        return JointContext(self.parts, group_size, errors=self._errors, partial=self._partial)

    def forward(self, weights: Weights, context: JointContext) -> float:
        """Run all parts on the loaded group up to its loss, and return the mean.

        The segment with the loss runs its backward steps too.
        """
        if self._compiled:
            self._tapes(context).forward(weights)
        else:
            self._run(weights, context, self._there)
        at = self._there[-1][0]
        return self._loss_part.loss(context.contexts[at])

    def backward(self, weights: Weights, context: JointContext) -> None:
        """Run the remaining segments; afterwards `delta` and `factors` are valid."""
        if self._compiled:
            self._tapes(context).backward(weights)
        else:
            self._run(weights, context, self._back)

    def _tapes(self, context: JointContext) -> "JointTapes":
        """Return the tapes for the group's number of images, kept in the context of the first part."""
        kept = context.contexts[0].tapes
        if "joint" not in kept:
            from adam_async.model.partition.joint_tapes import JointTapes

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
        """Return the factors of one tensor's gradient, or None; see `Network.factors`."""
        pieces = self._pieces[name]
        if len(pieces) > 1 and name not in self._errors:
            return None  # the gradient is a sum over parts, which has no two factors
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
    """Order the segments of all parts, each after the segments that send to it: (part, segment)."""
    done: list[int] = [0] * len(parts)
    sent: set[int] = set()
    order: list[tuple[int, int]] = []
    while any(number < len(part.segments) for number, part in zip(done, parts, strict=True)):
        before = len(order)
        for at, part in enumerate(parts):
            while done[at] < len(part.segments) and sent.issuperset(part.segments[done[at]].receives):
                sent.update(part.segments[done[at]].sends)
                order.append((at, done[at]))
                done[at] += 1
        assert len(order) > before, "the parts wait for one another"
    return order


def _cut_of(part: Partition) -> Callable[[Array], Array | None]:
    """Return the function that cuts a part's rows out of a group's images."""
    rows = part.input_rows
    if not rows:
        return lambda images: None
    if len(part.layout.input_shape) == 1:
        return lambda images: images.reshape(len(images), -1)[:, rows.start : rows.stop]
    if part.image_rows is None:
        return lambda images: images
    return lambda images: images[:, :, rows.start : rows.stop]
