"""Pure: how a step's gradients travel: protocol per tensor, messages per server, push buffers.

Everything that does not change from step to step is decided once (AD-17): which tensors go as deltas
and which as factors, which shards form one message to which server, and where in a push buffer each
piece lies. Filling a buffer is then a series of copies into prepared views, and sending it needs only
numbers and versions.

The protocol of a dense layer of M inputs and N outputs, held on S servers, for K images: factors are
K (S M + N) values, for the activations go to each server once; the delta is M N. Fewer bytes win.

Letters: K images of one step, I inputs, R rows of one server, O all outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adam_async.ids import ShardId
from adam_async.messages import Part
from adam_async.model.context import Context
from adam_async.model.network import Network
from adam_async.placement import ShardSpec, ShardTable

MESSAGE_BYTES = 1 << 20
"""Payload after which the shards of a server continue in the next message, so that receiving one
overlaps with applying the one before."""

MESSAGE_SHARDS = 256
"""Shards of one message at most; their numbers must fit into a frame's meta."""

Protocol = Literal["delta", "factors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolChoice:
    """How one tensor's gradient travels, and what either way costs per step, in payload bytes."""

    tensor: str
    delta_bytes: int
    factor_bytes: int | None
    """None where the gradient has no factors."""
    chosen: Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPart:
    """Some shards of one tensor that travel together."""

    tensor: str
    factors: bool
    shards: tuple[ShardSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushMessage:
    """What one message of every step holds."""

    server: str
    parts: tuple[PushPart, ...]
    wire_parts: tuple[Part, ...]
    shards: tuple[ShardId, ...]
    specs: tuple[ShardSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """Every message of a step, and how each tensor travels."""

    messages: tuple[PushMessage, ...]
    protocols: Mapping[str, ProtocolChoice]
    images: int
    """Most images of a step: the K of the factors."""


def choose_protocol(
    table: ShardTable,
    buckets: Sequence[str],
    tensor: str,
    shape: Sequence[int],
    *,
    images: int,
    factorable: bool,
    wanted: Literal["auto", "delta", "factors"] = "auto",
) -> ProtocolChoice:
    """Decide how the gradient of one tensor travels, by the bytes that a step of `images` needs."""
    shards = table.by_tensor[tensor]
    delta = prod(shape) * table.item_bytes
    if not factorable or not all(shard.whole_rows for shard in shards):
        return ProtocolChoice(tensor=tensor, delta_bytes=delta, factor_bytes=None, chosen="delta")
    servers = len({buckets[shard.bucket] for shard in shards})
    factors = images * (servers * shape[1] + shape[0]) * table.item_bytes
    fewer: Protocol = "factors" if factors < delta else "delta"
    return ProtocolChoice(
        tensor=tensor,
        delta_bytes=delta,
        factor_bytes=factors,
        chosen=fewer if wanted == "auto" else wanted,
    )


def factorable_tensors(network: Network) -> frozenset[str]:
    """Tensors whose gradient comes as two factors; asked of a context for one image."""
    context = network.context(1)
    return frozenset(p.name for p in network.parameters if network.factors(context, p.name) is not None)


def plan_pushes(
    network: Network,
    table: ShardTable,
    buckets: Sequence[str],
    *,
    images: int,
    wanted: Literal["auto", "delta", "factors"] = "auto",
) -> PushPlan:
    """Lay out the messages of every step.

    Args:
        buckets: Primary of each bucket.
        images: Most images of a step (images per group times groups per push).
        wanted: ``auto`` chooses by bytes; the others force one protocol where it is possible.
    """
    factorable = factorable_tensors(network)
    protocols = {
        p.name: choose_protocol(
            table, buckets, p.name, p.shape, images=images, factorable=p.name in factorable, wanted=wanted
        )
        for p in network.parameters
    }
    parts: dict[str, list[PushPart]] = {}
    for tensor, shards in table.by_tensor.items():
        factors = protocols[tensor].chosen == "factors"
        for server in dict.fromkeys(buckets[shard.bucket] for shard in shards):
            mine = tuple(shard for shard in shards if buckets[shard.bucket] == server)
            pieces = [mine] if factors else [(shard,) for shard in mine]
            parts.setdefault(server, []).extend(
                PushPart(tensor=tensor, factors=factors, shards=piece) for piece in pieces
            )
    messages = [
        _message(server, group)
        for server in sorted(parts)
        for group in _split(parts[server], images, table.item_bytes)
    ]
    return PushPlan(messages=tuple(messages), protocols=protocols, images=images)


def _message(server: str, parts: Sequence[PushPart]) -> PushMessage:
    specs = tuple(shard for part in parts for shard in part.shards)
    return PushMessage(
        server=server,
        parts=tuple(parts),
        wire_parts=tuple(Part(part.factors, len(part.shards)) for part in parts),
        shards=tuple(shard.id for shard in specs),
        specs=specs,
    )


def _split(parts: Sequence[PushPart], images: int, item_bytes: int) -> list[list[PushPart]]:
    groups: list[list[PushPart]] = []
    room = count = 0
    for part in parts:
        size = _part_bytes(part, images, item_bytes)
        if not groups or size > room or count + len(part.shards) > MESSAGE_SHARDS:
            groups.append([])
            room, count = MESSAGE_BYTES, 0
        groups[-1].append(part)
        room -= size
        count += len(part.shards)
    return groups


def _part_bytes(part: PushPart, images: int, item_bytes: int) -> int:
    values = sum(shard.size for shard in part.shards)
    if part.factors:
        row = part.shards[0].row_size
        values = images * (row + values // row)
    return values * item_bytes


class PushBuffer:
    """Memory for the gradients of one group or step, laid out for the messages of a plan.

    A compute thread fills it, the messages carry views of it, and it is free again when all of them
    are settled and released.

    Args:
        network: The model.
        plan: What goes where.
        capacity: Most images that it shall hold.
    """

    def __init__(self, network: Network, plan: PushPlan, capacity: int) -> None:
        self._network = network
        self._capacity = capacity
        self.images = 0
        self.deltas: dict[str, NDArray[Any]] = {}
        self._inputs: dict[str, NDArray[Any]] = {}
        self._errors: list[tuple[str, NDArray[Any], list[slice]]] = []
        self._tensors: list[list[NDArray[Any]]] = []
        self._shapes: dict[str, tuple[int, ...]] = {p.name: p.shape for p in network.parameters}
        dtype = network.dtype
        for name, choice in plan.protocols.items():
            shape = self._shapes[name]
            if choice.chosen == "delta":
                self.deltas[name] = np.zeros(shape, dtype)
            else:
                self._inputs[name] = np.zeros((capacity, shape[1]), dtype)
        for message in plan.messages:
            self._tensors.append([])
            for part in message.parts:
                if not part.factors:
                    spec = part.shards[0]
                    self._tensors[-1].append(self.deltas[part.tensor].reshape(-1)[spec.start : spec.stop])
                    continue
                rows = sum(shard.size for shard in part.shards) // part.shards[0].row_size
                errors = np.zeros((capacity, rows), dtype)
                self._errors.append((part.tensor, errors, [shard.rows for shard in part.shards]))
                self._tensors[-1] += [self._inputs[part.tensor], errors]

    def fill(self, context: Context) -> None:
        """Write the gradients of the group in `context`. On a compute thread."""
        self.images = 0
        for name, delta in self.deltas.items():
            self._network.delta(context, name, out=delta)
        self._put_factors(context)
        self.images = context.images

    def _put_factors(self, context: Context) -> None:
        count = context.images
        factors = {}
        for name, inputs in self._inputs.items():
            pair = self._network.factors(context, name)
            assert pair is not None, f"{name} was planned as factors and has none"
            factors[name] = pair
            np.copyto(inputs[:count], pair[0])
        for name, errors, rows in self._errors:
            _gather_rows(errors[:count], factors[name][1], rows)

    def clear(self) -> None:
        """Forget what is in it, before adding up the groups of a step."""
        self.images = 0
        for delta in self.deltas.values():
            delta.fill(0.0)

    def add(self, group: "PushBuffer") -> None:
        """Add the gradients of one more group of the step: deltas are summed, factors are stacked."""
        start, stop = self.images, self.images + group.images
        for name, delta in self.deltas.items():
            np.add(delta, group.deltas[name], out=delta)
        for name, inputs in self._inputs.items():
            np.copyto(inputs[start:stop], group._inputs[name][: group.images])
        for (_, errors, _), (_, others, _) in zip(self._errors, group._errors, strict=True):
            np.copyto(errors[start:stop], others[: group.images])
        self.images = stop

    def tensors(self, message: int) -> list[NDArray[Any]]:
        """What rides beside one message of the plan."""
        if self.images == self._capacity:
            return self._tensors[message]
        return [
            tensor[: self.images] if tensor.ndim == 2 else tensor for tensor in self._tensors[message]
        ]


def _gather_rows(out_KR: NDArray[Any], errors_KO: NDArray[Any], rows: Sequence[slice]) -> None:
    at = 0
    for piece in rows:
        width = piece.stop - piece.start
        np.copyto(out_KR[:, at : at + width], errors_KO[:, piece])
        at += width
