"""Pure: the plan of a step's pushes: protocol per tensor, messages per server, push buffers.

The plan is made once per run (AD-17). The plan has the tensors sent as deltas and as factors, the shards of
each message to a server, and the position of each piece in a push buffer. Filling a buffer is a series of
copies into prepared views, and sending it needs only numbers and versions.

For a dense layer with M inputs and N outputs on S servers, factors of K rows are K (S M + N) values, because
each server gets the activations once; the delta is M N. The plan takes the protocol with fewer bytes. A layer
of a network has one row of factors for each image. A step's layer may have several, such as one for each
token of a text.

Letters: K factor rows of one step, I inputs, R rows of one server, O all outputs. Messages have factors
    with these K rows last, (I, K) and (R, K), as in a context.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Part
from adam_async.model.network import Network, Trainable
from adam_async.run.counts import ProtocolChoice
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, ShardTable

MESSAGE_BYTES = 2 << 20
"""Bytes of values after which a server's shards continue in the next message; the server receives one message
while it applies the earlier one."""

ALIGNED_VALUES = 16
"""Number of float32 values of a 64-byte cache line."""

MESSAGE_SHARDS = 256
"""Maximum number of shards in one message; their numbers must fit into a frame's meta."""

Protocol = Literal["delta", "factors"]

ServerShards = tuple[tuple[str, tuple[ShardId, ...]], ...]
"""Pairs of a server and some of its shards, each for one message that only names shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPart:
    """Shards of one message: any shards as deltas, or the shards of one tensor as factors."""

    factors: bool
    shards: tuple[ShardSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushMessage:
    """One message of every step."""

    server: str
    parts: tuple[PushPart, ...]
    wire_parts: tuple[Part, ...]
    shards: tuple[ShardId, ...]
    specs: tuple[ShardSpec, ...]
    reads: tuple[tuple[str, int], ...]
    """Tensor of each shard, and the shard's position within the tensor's shards."""
    pulls: bool
    """Whether these shards' values fit into the answer; otherwise a pull gets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """All messages of a step, and the protocol of each tensor."""

    messages: tuple[PushMessage, ...]
    protocols: Mapping[str, ProtocolChoice]
    images: int
    """Maximum number of images in a step."""
    factor_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of factors for each image, of the tensors that are sent as factors."""
    ticked: ServerShards = ()
    """Shards that the worker pushes or ticks."""
    silent: ServerShards = ()
    """Shards of frozen layers among them, which are never pushed."""
    read_only: tuple[ShardSpec, ...] = ()
    """Shards whose gradient another worker of the replica pushes."""


def choose_protocol(
    table: ShardTable,
    buckets: Sequence[str],
    tensor: str,
    shape: Sequence[int],
    *,
    images: int,
    rows: int,
    wanted: Literal["auto", "delta", "factors"] = "auto",
) -> ProtocolChoice:
    """Choose the protocol of one tensor's gradient by the bytes of a step of `images`.

    Args:
        rows: Number of factor rows per image; 0 if the gradient has no factors.
    """
    shards = table.by_tensor[tensor]
    delta = prod(shape) * table.item_bytes
    if not rows or not all(shard.whole_rows for shard in shards):
        return ProtocolChoice(tensor=tensor, delta_bytes=delta, factor_bytes=None, chosen="delta")
    servers = len({buckets[shard.bucket] for shard in shards})
    factors = images * rows * (servers * shape[1] + shape[0]) * table.item_bytes
    fewer: Protocol = "factors" if factors < delta else "delta"
    return ProtocolChoice(
        tensor=tensor, delta_bytes=delta, factor_bytes=factors, chosen=fewer if wanted == "auto" else wanted
    )


def factorable_tensors(network: Trainable) -> dict[str, int]:
    """Return the tensors whose gradient has two factors, with the number of rows per image."""
    context = network.context(1)
    pairs = {p.name: network.factors(context, p.name) for p in network.trained}
    return {name: len(pair[0]) for name, pair in pairs.items() if pair is not None}


def plan_pushes(
    network: Trainable,
    table: ShardTable,
    buckets: Sequence[str],
    *,
    images: int,
    wanted: Literal["auto", "delta", "factors"] = "auto",
    owned: Collection[str] | None = None,
) -> PushPlan:
    """Plan the messages of every step.

    Args:
        buckets: Home of each bucket.
        images: Maximum number of images in a step (images per group times groups per push).
        wanted: ``auto`` chooses by bytes; the other values force one protocol if possible.
        owned: Tensors that this worker of the replica pushes; None: all.
    """
    factorable = factorable_tensors(network)
    ours = frozenset(p.name for p in network.parameters) if owned is None else frozenset(owned)
    protocols = {
        p.name: choose_protocol(
            table, buckets, p.name, p.shape, images=images, rows=factorable.get(p.name, 0), wanted=wanted
        )
        for p in network.trained
        if p.name in ours
    }
    mine = [spec for spec in table.shards if spec.tensor in ours]
    pushed = [spec for spec in mine if spec.tensor in protocols]
    messages = [
        _message(server, group, protocols, table)
        for server, group in cut_messages(pushed, buckets, table, protocols)
    ]
    return PushPlan(
        messages=tuple(messages),
        protocols=protocols,
        images=images,
        factor_rows={name: factorable[name] for name, it in protocols.items() if it.chosen == "factors"},
        ticked=cut_shards(mine, buckets),
        silent=cut_shards([spec for spec in mine if spec.tensor not in protocols], buckets),
        read_only=tuple(s for s in table.shards if s.tensor not in ours and s.tensor not in network.frozen),
    )


def _by_server(specs: Iterable[ShardSpec], buckets: Sequence[str]) -> list[tuple[str, list[ShardSpec]]]:
    found: dict[str, list[ShardSpec]] = {}
    for spec in specs:
        found.setdefault(buckets[spec.bucket], []).append(spec)
    return sorted(found.items())


def cut_shards(specs: Iterable[ShardSpec], buckets: Sequence[str]) -> ServerShards:
    """Cut shards into lists for messages that only name shards, server by server."""
    return tuple(
        (server, tuple(spec.id for spec in shards[at : at + MESSAGE_SHARDS]))
        for server, shards in _by_server(specs, buckets)
        for at in range(0, len(shards), MESSAGE_SHARDS)
    )


def travels_apart(table: ShardTable, tensor: str) -> bool:
    """Return whether the shards of a tensor share their messages with no other tensor.

    Large tensors have separate messages if their values exceed one message, so that the values arrive in
    place.
    """
    shards = table.by_tensor[tensor]  # consecutive: first and last give the size, without a sum per call
    return (shards[-1].stop - shards[0].start) * table.item_bytes > MESSAGE_BYTES


def cut_messages(
    specs: Iterable[ShardSpec],
    buckets: Sequence[str],
    table: ShardTable,
    protocols: Mapping[str, ProtocolChoice] | None = None,
) -> list[tuple[str, list[ShardSpec]]]:
    """Cut shards into messages by the bytes of their values, server by server.

    Large tensors of several shards have separate messages, so that values arrive in place. The shards of a
    tensor that is sent as factors stay together, so the activations are sent once.

    Args:
        protocols: Protocol of each tensor, if gradients travel in the messages.
    """
    messages: list[tuple[str, list[ShardSpec]]] = []
    for server, shards in _by_server(specs, buckets):
        kept, room = None, 0
        for spec in shards:
            key = spec.tensor if travels_apart(table, spec.tensor) else ""
            several = protocols is not None and len(table.by_tensor[spec.tensor]) > 1
            stays = several and protocols is not None and protocols[spec.tensor].chosen == "factors"
            size = spec.size * table.item_bytes
            if key != kept or (size > room and not stays) or len(messages[-1][1]) >= MESSAGE_SHARDS:
                messages.append((server, []))
                kept, room = key, MESSAGE_BYTES
            messages[-1][1].append(spec)
            room -= size
    return messages


def _message(
    server: str, specs: Sequence[ShardSpec], protocols: Mapping[str, ProtocolChoice], table: ShardTable
) -> PushMessage:
    # Tensors of whole cache lines first: the next tensor in flat memory then starts on a line.
    sizes = Counter[str]()
    for spec in specs:
        sizes[spec.tensor] += spec.size
    ordered = sorted(specs, key=lambda spec: (sizes[spec.tensor] % ALIGNED_VALUES != 0, spec.id))
    parts: list[PushPart] = []
    deltas = tuple(spec for spec in ordered if protocols[spec.tensor].chosen == "delta")
    if deltas:
        parts.append(PushPart(factors=False, shards=deltas))
    for tensor in dict.fromkeys(spec.tensor for spec in ordered):
        if protocols[tensor].chosen == "factors":
            shards = tuple(spec for spec in ordered if spec.tensor == tensor)
            parts.append(PushPart(factors=True, shards=shards))
    flat = tuple(shard for part in parts for shard in part.shards)
    return PushMessage(
        server=server,
        parts=tuple(parts),
        wire_parts=tuple(Part(part.factors, len(part.shards)) for part in parts),
        shards=tuple(shard.id for shard in flat),
        specs=flat,
        # The shards of a tensor have consecutive numbers.
        reads=tuple((shard.tensor, shard.id - table.by_tensor[shard.tensor][0].id) for shard in flat),
        pulls=sum(shard.size for shard in flat) * table.item_bytes <= MESSAGE_BYTES,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fill:
    """The arrays from which one message of a push buffer is filled."""

    deltas: dict[str, NDArray[Any]] = field(default_factory=dict)
    pieces: list[tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=list)
    inputs: list[tuple[str, NDArray[Any]]] = field(default_factory=list)
    errors: list[tuple[str, NDArray[Any], list[slice]]] = field(default_factory=list)


EARLY_BYTES = 256 << 10
"""Minimum bytes of gradients in a message that is sent as soon as it is complete. For a smaller message, a
call of the loop would take more time than the early start saves."""


@dataclass(frozen=True, slots=True)
class BackwardSection:
    """A range of layers in the backward pass, and the messages of the plan that are complete at its end."""

    layers: range
    messages: tuple[int, ...]


def plan_sections(network: Network, plan: PushPlan) -> tuple[BackwardSection, ...]:
    """Cut the backward pass at the ends of large messages; return one section if no cut gains time.

    While one section is computed, the messages of earlier sections may travel (GP-10, DS-05).
    """
    layer_of = {p.name: number for number, layer in enumerate(network.layers) for p in layer.parameters}
    complete = [min(layer_of[shard.tensor] for shard in message.specs) for message in plan.messages]
    item_bytes = network.dtype.itemsize
    large = [_gradient_bytes(message, plan.images, item_bytes) >= EARLY_BYTES for message in plan.messages]
    last = min(complete, default=0)
    cuts = sorted(
        {at for at, early in zip(complete, large, strict=True) if early and at > last}, reverse=True
    )
    sections, stop, left = [], len(network.layers), set(range(len(complete)))
    for cut in (*cuts, 0):
        ready = tuple(sorted(index for index in left if complete[index] >= cut))
        sections.append(BackwardSection(range(cut, stop), ready))
        stop, left = cut, left.difference(ready)
    return tuple(sections)


def _gradient_bytes(message: PushMessage, images: int, item_bytes: int) -> int:
    """Return the bytes of gradients that a full step sends in one message."""
    values = 0
    for part in message.parts:
        if part.factors:
            row = part.shards[0].row_size
            values += images * (row + sum(shard.size for shard in part.shards) // row)
        else:
            values += sum(shard.size for shard in part.shards)
    return values * item_bytes


class PushBuffer:
    """Memory for the gradients of one group or step, laid out for the messages of a plan.

    A compute thread fills the buffer, and messages have views of it. The buffer is free again when all
    messages are settled and released. If a tensor's delta is whole in one message, it is written in place; if
    its shards are in several messages, it is written to separate memory and copied piece by piece.

    Args:
        network: The model.
        plan: The messages.
        capacity: Maximum number of images.
    """

    def __init__(self, network: Trainable, plan: PushPlan, capacity: int) -> None:
        self._network = network
        self._capacity = capacity
        self._rows = plan.factor_rows
        self.images = 0
        self._shapes = {p.name: p.shape for p in network.parameters}
        self._dtype = network.dtype
        self._flat: list[NDArray[Any]] = []
        """The concatenated deltas of each message."""
        self._inputs: dict[str, NDArray[Any]] = {}
        self._tensors: list[list[tuple[NDArray[Any], int]]] = []
        """Tensors of each message, with the number of factor rows per image; 0 for deltas."""
        self._shares: list[tuple[str, NDArray[Any]]] = []
        """Tensor and memory of each shard that is sent as a delta."""
        self._apart: dict[str, NDArray[Any]] = {}
        """Whole deltas of tensors whose shards are in several messages."""
        self._fills = [_Fill() for _ in plan.messages]
        """Arrays of each message, in the order of the plan."""
        for message, fill in zip(plan.messages, self._fills, strict=True):
            self._tensors.append([])
            for part in message.parts:
                add = self._add_factors if part.factors else self._add_deltas
                add(part, fill)
        self.deltas_by_name = {name: delta for fill in self._fills for name, delta in fill.deltas.items()}
        """Memory of each whole delta, by the tensor's name."""
        self._errors = [errors for fill in self._fills for errors in fill.errors]
        self._full = [[tensor for tensor, _ in tensors] for tensors in self._tensors]
        """Tensors of each message in a buffer with its full number of images."""

    def _add_deltas(self, part: PushPart, fill: _Fill) -> None:
        apart = self._apart
        flat = np.zeros(sum(shard.size for shard in part.shards), self._dtype)
        self._flat.append(flat)
        self._tensors[-1].append((flat, 0))
        at = 0
        sizes = Counter[str]()
        for shard in part.shards:
            sizes[shard.tensor] += shard.size
        for shard in part.shards:
            piece = flat[at : at + shard.size]
            shape, size = self._shapes[shard.tensor], prod(self._shapes[shard.tensor])
            self._shares.append((shard.tensor, piece))
            if sizes[shard.tensor] == size:  # the message has all shards of the tensor, in order
                if not shard.start:
                    fill.deltas[shard.tensor] = flat[at : at + size].reshape(shape)
                at += shard.size
                continue
            at += shard.size
            if shard.tensor not in apart:
                apart[shard.tensor] = np.zeros(shape, self._dtype)
                fill.deltas[shard.tensor] = apart[shard.tensor]
            fill.pieces.append((piece, apart[shard.tensor].reshape(-1)[shard.start : shard.stop]))

    def _add_factors(self, part: PushPart, fill: _Fill) -> None:
        tensor = part.shards[0].tensor
        row = part.shards[0].row_size
        each = self._rows[tensor]
        if tensor not in self._inputs:
            self._inputs[tensor] = np.zeros((row, self._capacity * each), self._dtype)
            fill.inputs.append((tensor, self._inputs[tensor]))
        rows = sum(shard.size for shard in part.shards) // row
        errors = np.zeros((rows, self._capacity * each), self._dtype)
        fill.errors.append((tensor, errors, [shard.rows for shard in part.shards]))
        self._tensors[-1] += [(self._inputs[tensor], each), (errors, each)]

    def train(
        self,
        weights: Mapping[str, NDArray[Any]],
        context: Any,
        images: NDArray[Any] | None,
        labels: NDArray[Any],
        **keyed: Any,
    ) -> float:
        """Train on a group: load it, run forward and backward, write the gradients; return its mean loss.

        Runs on a compute thread. If the network has compiled kernels, one call does all of this. Between two
        calls the thread would wait for the interpreter, which the event loop uses.

        Args:
            keyed: The arguments `dice` and `keys` of `Context.load`.
        """
        network, self.images = self._network, len(labels)
        if self.images == self._capacity and isinstance(network, Network):
            loss = network.train(weights, context, images, labels, self)
            if loss is not None:
                return loss
        context.load(images, labels, **keyed)
        loss = network.forward(weights, context)
        network.backward(weights, context)
        self.fill(context)
        return loss

    def copies(self, context: Any) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """See `GradientTargets.copies`; requires the full number of images."""
        return [pair for fill in self._fills for pair in self._copies_of(fill, context)]

    def _copies_of(self, fill: _Fill, context: Any) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return the arrays to copy into one message, each with its source."""
        pairs = fill.pieces.copy()
        for name, inputs in fill.inputs:
            pairs.append((inputs[:, : self.images * self._rows[name]], self._factors_of(context, name)[0].T))
        for name, errors, rows in fill.errors:
            columns, count = self._factors_of(context, name)[1].T, self.images * self._rows[name]
            stops = accumulate([piece.stop - piece.start for piece in rows])
            pairs += [
                (errors[stop - piece.stop + piece.start : stop, :count], columns[piece])
                for piece, stop in zip(rows, stops, strict=True)
            ]
        return pairs

    def fill(self, context: Any) -> None:
        """Write the gradients of the group in `context`. Runs on a compute thread."""
        self.images = context.images
        self.fill_messages(context, range(len(self._fills)))

    def fill_messages(self, context: Any, messages: Iterable[int]) -> None:
        """Write the gradients of these messages, which must be complete; `images` must be set.

        If a tensor has shards in several messages, the first message computes its gradient: name all these
        messages, in order.
        """
        for message in messages:
            fill = self._fills[message]
            if fill.deltas:
                self._network.deltas(context, fill.deltas)
            for target, source in self._copies_of(fill, context):
                target[:] = source

    def _factors_of(self, context: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        pair = self._network.factors(context, name)
        assert pair is not None, f"{name} was planned as factors and has none"
        return pair

    def add_partial(self, tensor: str, part: NDArray[Any]) -> None:
        """Add another worker's part of a tensor's gradient, flat; the tensor is sent as a delta."""
        delta = self.delta(tensor)
        assert delta is not None, f"{tensor} goes as factors"
        flat = delta.reshape(-1)
        np.add(flat, part, out=flat)

    def spread(self) -> None:
        """Copy the deltas whose shards are in several messages into these messages, after an addition."""
        for fill in self._fills:
            for piece, source in fill.pieces:
                piece[:] = source

    def clear(self) -> None:
        """Clear the buffer before the groups of a step are summed."""
        self.images = 0
        for flat in self._flat:
            flat.fill(0.0)

    def add(self, group: "PushBuffer") -> None:
        """Add the gradients of one more group to the step: deltas are summed, factors are stacked."""
        start, stop = self.images, self.images + group.images
        for flat, other in zip(self._flat, group._flat, strict=True):
            np.add(flat, other, out=flat)
        for name, inputs in self._inputs.items():
            each = self._rows[name]
            inputs[:, start * each : stop * each] = group._inputs[name][:, : group.images * each]
        for (name, errors, _), (_, others, _) in zip(self._errors, group._errors, strict=True):
            each = self._rows[name]
            errors[:, start * each : stop * each] = others[:, : group.images * each]
        self.images = stop

    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply the gradient of each of these tensors by its factor."""
        for name, share in (*self._shares, *self._apart.items()):
            if name in factors:
                np.multiply(share, factors[name], out=share)
        for name, errors, _ in self._errors:
            if name in factors:
                used = errors[:, : self.images * self._rows[name]]
                np.multiply(used, factors[name], out=used)

    def scale_all(self, factor: float) -> None:
        """Multiply all gradients by one factor."""
        for flat in self._flat:
            np.multiply(flat, factor, out=flat)
        for name, errors, _ in self._errors:
            used = errors[:, : self.images * self._rows[name]]
            np.multiply(used, factor, out=used)

    def deltas(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the deltas: each shard's tensor and its gradient, flat."""
        yield from self._shares

    def factors(self) -> Iterator[tuple[str, NDArray[Any], list[NDArray[Any]]]]:
        """Yield the factors: tensor, activations (I, K), and each server's error gradients (R, K)."""
        for name, inputs in self._inputs.items():
            count = self.images * self._rows[name]
            rows = [errors[:, :count] for tensor, errors, _ in self._errors if tensor == name]
            yield name, inputs[:, :count], rows

    def tensors(self, message: int) -> list[NDArray[Any]]:
        """Return the tensors in one message of the plan. Factors of a short step are copied without gaps."""
        if self.images == self._capacity:
            return self._full[message]
        return [
            np.ascontiguousarray(tensor[:, : self.images * rows]) if rows else tensor
            for tensor, rows in self._tensors[message]
        ]

    def delta(self, tensor: str) -> NDArray[Any] | None:
        """Return the delta of a whole tensor after `fill`; None for a tensor sent as factors."""
        return self.deltas_by_name.get(tensor)


class PushBufferPool:
    """Pool of free push buffers. Lending and returning are atomic, from any thread."""

    def __init__(self, make: Callable[[], PushBuffer], made: int) -> None:
        self._make = make
        self._free = deque(make() for _ in range(made))
        self.made = made

    def take(self) -> PushBuffer:
        """Take a free buffer; make one more if all are in use."""
        try:
            return self._free.pop()
        except IndexError:
            self.made += 1
            return self._make()

    def give_back(self, buffer: PushBuffer) -> None:
        """Return a buffer after it is settled and released."""
        self._free.append(buffer)
