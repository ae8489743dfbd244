"""Pure: the entries of a bundle's log on the wire.

An entry travels in parts of one or more tensors. The first tensor of a part has its details (msgpack). For a
push these are its message, its accepted places, and whether the primary has checked its gradients one by one.
The other tensors are those of the push, in order, not copied or changed. An entry of another kind is one
part.
"""

from collections.abc import Container, Sequence, Set
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Push, Tick
from adam_async.messages.body import Indices
from adam_async.messages.replication import Copy, PieceCopy
from adam_async.messages.tensors import UNREADABLE
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import (
    Apply,
    Contribute,
    Entry,
    EpochBegan,
    ForgetSessions,
    Pin,
    QueuedPin,
    QueuedPush,
    QueuedTick,
    ReplicasChanged,
    VectorsChanged,
)
from adam_async.parameter_server.gradients import FactorPart, read_gradients
from adam_async.run.group_ranges import groups_fault
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import Member
from transport import RemoteProtocolError

MOST_PARTS = 64
"""Maximum number of parts in an entry; a batch has fewer pushes."""

MOST_PIECE_PARTS = 1024
"""Maximum number of parts in a piece."""

MOST_BYTES = 1 << 30
"""Maximum size of an entry or a piece, in bytes."""

Part = list[NDArray[Any]]
"""Tensors of one part of an entry or piece; the first tensor has the part's details."""


class PushDetails(msgspec.Struct, frozen=True, array_like=True, tag="push"):
    """A push of a batch; if `sums` is set, a push that contributes to sums."""

    push: Push
    accepted: Indices
    refused: Indices
    checked: bool
    """Whether the primary has checked each gradient, because their bounds did not prove them finite."""
    sums: bool = False
    known: tuple[int, ...] = ()

    @property
    def counted(self) -> tuple[int, ...]:
        """Places whose number the push uses up."""
        return (*self.accepted, *self.refused, *self.known)


class TickDetails(msgspec.Struct, frozen=True, array_like=True, tag="tick"):
    """A tick."""

    tick: Tick


_Details = PushDetails | TickDetails | Pin | ReplicasChanged | EpochBegan | VectorsChanged | ForgetSessions

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Details] = msgspec.msgpack.Decoder(_Details)


def encode_entry(entry: Entry) -> list[Part]:
    """Return the parts of an entry. The tensors share the memory of the entry's gradients."""
    match entry:
        case Apply():
            return [_packed_part(queued, sums=False) for queued in entry.pushes]
        case Contribute():
            return [_packed_part(entry.queued, sums=True)]
        case QueuedTick():
            details: _Details = TickDetails(entry.tick)
        case QueuedPin():
            details = entry.pin
        case ReplicasChanged() | EpochBegan() | VectorsChanged() | ForgetSessions():
            details = entry
        case _:
            raise AssertionError(f"{entry!r} belongs to a run in place, which has one copy")
    return [[_packed(details)]]


def entry_bytes(parts: list[Part]) -> int:
    """Return the size of an entry, in bytes."""
    return sum([tensor.nbytes for part in parts for tensor in part])


def decode_entry(
    parts: list[Part], bundle: Bundle, specs: Sequence[ShardSpec], *, is_partial: bool = False
) -> Entry:
    """Return an entry from its parts.

    Args:
        bundle: The shards that the entry is applied to.
        specs: All shards of the store, by number.
        is_partial: Whether the bundle has only some of the shards that the entry changes.

    Raises:
        RemoteProtocolError: A part's tensors differ from its details, or no primary forms such an entry.
    """
    if not parts:
        raise RemoteProtocolError("entry", "it has no part")
    try:
        details = [_decoder.decode(part[0].tobytes()) for part in parts]
    except (*UNREADABLE, IndexError) as error:
        raise RemoteProtocolError("entry", f"its details: {error}") from None
    first = details[0]
    if not isinstance(first, PushDetails):
        if len(parts) != 1 or len(parts[0]) != 1:
            raise RemoteProtocolError("entry", f"{len(parts)} parts of a {type(first).__name__}")
        if isinstance(first, Pin):
            return QueuedPin(None, first)
        return QueuedTick(None, first.tick) if isinstance(first, TickDetails) else first
    pushes = [each for each in details if isinstance(each, PushDetails)]
    if len(pushes) != len(details) or (first.sums and len(pushes) != 1):
        raise RemoteProtocolError("entry", "its parts are of several kinds")
    if is_partial:
        pushes = [_of_shards(each, bundle) for each in pushes]
    queued = [queued_push(each, part[1:], bundle, specs) for each, part in zip(pushes, parts, strict=True)]
    if any(each.push.assign for each in queued) and (first.sums or len(queued) > 1):
        raise RemoteProtocolError("entry", "values that replace those of shards are an entry of their own")
    if any(each.push.assign and (each.push.clock or _has_factors(each.push)) for each in queued):
        raise RemoteProtocolError("entry", "an assignment has values, and no clock")
    if first.sums is not (bundle.summed and not queued[0].push.assign):
        raise RemoteProtocolError("entry", "gradients are added up in bsp, and only in bsp")
    if first.sums:
        return Contribute(queued[0])
    _check_batch(queued)
    return Apply(tuple(queued))


def _of_shards(details: PushDetails, bundle: Bundle) -> PushDetails:
    """Return the details of a push with only those places whose shards a bundle has."""
    numbers = details.push.shards
    if any(place not in range(len(numbers)) for place in details.counted):
        return details  # `queued_push` refuses such a place
    accepted, refused, known = (
        tuple([place for place in places if ShardId(numbers[place]) in bundle.shards])
        for places in (details.accepted, details.refused, details.known)
    )
    return msgspec.structs.replace(details, accepted=accepted, refused=refused, known=known)


def _has_factors(push: Push) -> bool:
    return any(part.factors for part in push.parts)


def _check_batch(pushes: Sequence[QueuedPush]) -> None:
    """Raise unless all pushes of a batch accept the same places, with the same shards of one family."""
    first = pushes[0]
    shards = [first.push.shards[place] for place in first.accepted]
    for each in pushes[1:]:
        if each.accepted != first.accepted or [each.push.shards[place] for place in each.accepted] != shards:
            raise RemoteProtocolError("entry", "pushes of a batch are for different shards")
    if any(each.push.vector != first.push.vector for each in pushes):
        raise RemoteProtocolError("entry", "pushes of a batch are for several vectors")
    found = [first.shards[place] for place in (*first.accepted, *first.unapplied)]
    if (
        first.push.commands is None
        and len({(shard.spec.rule, shard.spec.dtype) for shard in found if shard is not None}) > 1
    ):
        raise RemoteProtocolError("entry", "pushes of a batch are for shards of several rules or types")


def without_shards(entry: Entry, absent: Set[ShardId]) -> Entry:
    """Return an entry without some shards, which have the entry already or have not yet arrived.

    `Bundle.absent` does the same for entries without places.
    """
    match entry:
        case Apply():
            return Apply(tuple([_without(queued, absent) for queued in entry.pushes]))
        case Contribute():
            return Contribute(_without(entry.queued, absent))
        case _:
            return entry


def _without(queued: QueuedPush, absent: Set[ShardId]) -> QueuedPush:
    shards = queued.push.shards
    return msgspec.structs.replace(
        queued,
        accepted=tuple([place for place in queued.accepted if shards[place] not in absent]),
        refused=tuple([place for place in queued.refused if shards[place] not in absent]),
        known=tuple([place for place in queued.known if shards[place] not in absent]),
    )


class PushPart(NamedTuple):
    """The details and the tensors of a push."""

    details: PushDetails
    tensors: Part


def push_part(queued: QueuedPush, *, sums: bool) -> PushPart:
    """Return a push in its sent form; see `PushDetails` for `sums`."""
    tensors: Part = []
    for part in queued.gradients.parts:
        tensors += [part.x_IK, part.errors_RK] if isinstance(part, FactorPart) else [part.flat]
    if queued.gradients.reads is not None:
        tensors.append(queued.gradients.reads)
    details = PushDetails(
        queued.push,
        tuple(queued.accepted),
        tuple(queued.refused),
        queued.gradients.checked,
        sums,
        tuple(queued.known),
    )
    return PushPart(details, tensors)


def queued_push(
    details: PushDetails, tensors: Part, bundle: Bundle, specs: Sequence[ShardSpec]
) -> QueuedPush:
    """Return the push that has these details and tensors; arguments and errors are as in `decode_entry`."""
    push = details.push
    if text := groups_fault(push.groups):
        raise RemoteProtocolError("entry", text)
    dtype = np.dtype(specs[push.shards[0]].dtype if push.shards and push.shards[0] < len(specs) else "f4")
    group = bundle.group(push.shards)
    gradients = read_gradients(push, tensors, specs, dtype, group)
    if details.checked:
        gradients = gradients.trusted()
    shards = group or tuple([bundle.shards.get(ShardId(number)) for number in push.shards])
    places, counted = range(len(push.shards)), details.counted
    for place in counted:
        if place not in places or shards[place] is None:
            raise RemoteProtocolError("entry", f"place {place} of a push of {len(push.shards)} shards")
    if len({push.shards[place] for place in counted}) < len(counted):
        raise RemoteProtocolError("entry", "a push counts twice on a shard")
    return QueuedPush(None, push, shards, gradients, details.accepted, [], details.refused, details.known)


def _packed_part(queued: QueuedPush, *, sums: bool) -> Part:
    details, tensors = push_part(queued, sums=sums)
    return [_packed(details), *tensors]


def _packed(details: _Details) -> NDArray[Any]:
    return np.frombuffer(_encoder.encode(details), np.uint8)


class PartCollector:
    """Joins the parts of incomplete entries and pieces, by senders and classes of messages.

    An entry and a piece of the primary may arrive at the same time, on two links. Only the parts of the
    primary are kept, so the memory for one bundle is at most twice `MOST_BYTES`.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[Member, type[Copy | PieceCopy]], list[Part]] = {}

    def __len__(self) -> int:
        """Return the number of incomplete messages."""
        return len(self._parts)

    def keep(self, members: Container[Member | None]) -> None:
        """Forget the parts of all other senders."""
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] in members}

    def forget(self, sender: Member) -> None:
        """Forget the parts of a sender: its link has ended."""
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] != sender}

    def add(self, sender: Member, message: Copy | PieceCopy, tensors: Part) -> list[Part] | None:
        """Add a part; return all parts once this is the last one.

        Raises:
            RemoteProtocolError: No correct member sends this part.
        """
        parts = self._parts.pop((sender, type(message)), [])
        if message.part == 0:
            parts = []  # the earlier parts came on an earlier link
        most = MOST_PARTS if isinstance(message, Copy) else MOST_PIECE_PARTS
        if not tensors or message.part != len(parts) or not message.part < message.parts <= most:
            raise RemoteProtocolError(
                "replication", f"part {message.part} of {message.parts} after {len(parts)} parts"
            )
        parts.append(tensors)
        size, is_last = entry_bytes(parts), len(parts) == message.parts
        if not size <= message.nbytes <= MOST_BYTES or (is_last and size != message.nbytes):
            raise RemoteProtocolError(
                "replication", f"{size} bytes in {len(parts)} of {message.parts} parts, not {message.nbytes}"
            )
        if is_last:
            return parts
        self._parts[sender, type(message)] = parts
        return None
