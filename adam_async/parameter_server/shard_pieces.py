"""Pure: the state of a bundle in pieces, for a server that joins.

Piece 0 has the state that belongs to no shard: replica generations and the epoch. Each other piece has one
shard, or several shards of at most `PIECE_BYTES` together: values, rule state, tables and pending
contributions. The pushes of these contributions are in the piece, too, cut to its shards. All members cut the
shards into the same pieces. A piece is a copy taken between two entries: the state at one position of the
log. If pending pushes make a piece too large for a member, the primary copies it after the next complete sum.

In a recorded run a piece for a server also has the log of its shards (`replay_log.py`), and piece 0 has the
reads of all steps.

In place a bundle has one piece of shards, which goes to the disk only. So all shards there have the same
groups, and a run that continues in place can refuse none of them.

A piece begins with the tensor of its details (msgpack). Then come each shard's values and rule arrays, sorted
by name, then the tensors of the pushes, and last the log in parts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from adam_async.messages import MOST_TERMS, joined, of_place
from adam_async.messages import Part as PushedPart
from adam_async.messages.body import (
    Clock,
    Count,
    DrawnId,
    Epoch,
    GroupNumber,
    PushNumber,
    ReplicaNumber,
    ShardNumber,
    VectorNumber,
)
from adam_async.messages.body import Version as VersionNumber
from adam_async.messages.group_sets import KEPT_EPOCHS, MOST_BOUNDS, UNIT_BYTES, LossSum
from adam_async.messages.tensors import UNREADABLE
from adam_async.parameter_server.bsp_barrier import Contribution
from adam_async.parameter_server.bundle import MOST_KNOWN_PINS, Bundle
from adam_async.parameter_server.events import QueuedPush
from adam_async.parameter_server.gradients import FactorPart
from adam_async.parameter_server.log_entries import Part, PushDetails, entry_bytes, push_part, queued_push
from adam_async.parameter_server.replay_log import MOST_PACKED_BYTES, LogContent, read_order_log
from adam_async.parameter_server.replica_clocks import ClocksState
from adam_async.parameter_server.shard import (
    EARLY_KEPT,
    EXACT,
    MOST_DOTS,
    MOST_REFUSALS,
    OTHERS,
    BySession,
    Session,
    Shard,
    ShardTables,
    check_array,
)
from adam_async.run.group_ranges import GroupSets, groups_fault
from adam_async.run.ids import Replica, ShardId, Version
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import MOST_VECTORS, VectorRecord, is_vector_key, vector_key, vector_number
from transport import RemoteProtocolError

PART_BYTES = 8 << 20
"""Maximum size in bytes of a part of a piece, unless a single tensor is larger."""

PART_TENSORS = 256
"""Maximum number of tensors in a part of a piece."""

PIECE_BYTES = 1 << 20
"""Maximum size in bytes of the values in a piece of several shards; one round of the loop copies a piece."""

IN_PLACE_BYTES = 1 << 29
"""Maximum size in bytes of the values in the single piece in place: a state on a disk, with the rule's
arrays, has at most 4 GiB. A larger bundle has the usual pieces."""

PIECE_SHARDS = 1024
"""Maximum number of shards in a piece."""


MOST_ENTRIES = 1 << 16
"""Maximum number of sessions or replicas in the tables of a shard, far beyond `MOST_SENDERS`."""

_SessionIds = tuple[DrawnId, DrawnId]
_ReplicaRow = Annotated[int, Meta(ge=OTHERS, le=(1 << 20) - 1)]
_StalenessCounts = Annotated[dict[Count, Count], Meta(max_length=EXACT + 64)]


_Units = Annotated[bytes, Meta(max_length=UNIT_BYTES)]
_Ranges = Annotated[tuple[GroupNumber, ...], Meta(max_length=2 * MOST_BOUNDS)]


class TablesState(msgspec.Struct, frozen=True, array_like=True):
    """The tables of some shards, as in `ShardTables`."""

    version: VersionNumber
    last_number: Annotated[list[tuple[_SessionIds, PushNumber]], Meta(max_length=MOST_ENTRIES)]
    clocks: Annotated[dict[ReplicaNumber, Clock], Meta(max_length=MOST_ENTRIES)]
    staleness: Annotated[dict[_ReplicaRow, _StalenessCounts], Meta(max_length=MOST_ENTRIES)]
    early: Annotated[list[tuple[ReplicaNumber, DrawnId, Clock]], Meta(max_length=EARLY_KEPT)]
    """Replica, generation and clock of each early clock."""
    loaded: VersionNumber
    refused: Count
    refusals: Annotated[
        list[tuple[_SessionIds, Annotated[tuple[PushNumber, ...], Meta(max_length=MOST_REFUSALS)]]],
        Meta(max_length=MOST_ENTRIES),
    ]
    duplicates: Count
    known: Count
    sets: Count
    """Index of the tables' group sets in the piece: many tables share long sets."""
    losses: Annotated[list[tuple[Epoch, Count, _Units]], Meta(max_length=KEPT_EPOCHS)]
    """Losses of each epoch: number of images, and `LossSum.packed`."""


class ContributionState(msgspec.Struct, frozen=True, array_like=True):
    """A pending contribution: index of its push in the piece, and place of the shard in that push."""

    clock: Clock
    push: Count
    place: Count


_Dots = tuple[DrawnId, DrawnId, PushNumber, Annotated[tuple[float, ...], Meta(max_length=MOST_TERMS)]]


class ShardDetails(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a piece."""

    shard: ShardNumber
    tables: Count
    """Index of its tables in the piece."""
    reached: Clock = 0
    contributions: list[ContributionState] = []
    vectors: Annotated[list[VectorNumber], Meta(max_length=MOST_VECTORS)] = []
    """Numbers of the vectors, whose arrays follow the rule's arrays, in the order of `vector_key`."""
    dots: Annotated[list[_Dots], Meta(max_length=MOST_DOTS)] = []
    """Dot products of its newest steps, oldest first."""


class ShardsState(msgspec.Struct, frozen=True, array_like=True):
    """Details of a piece with shards."""

    shards: list[ShardDetails]
    tables: list[TablesState]
    pushes: list[tuple[PushDetails, Count]]
    """Each push with pending contributions, and its number of tensors."""
    sets: list[Annotated[list[tuple[Epoch, _Ranges]], Meta(max_length=KEPT_EPOCHS)]]
    """Counted groups of each epoch, shared by tables with equal sets."""
    log: Count = 0
    """Number of tensors that hold the shards' log."""


class ReplicasState(msgspec.Struct, frozen=True, array_like=True):
    """Details of piece 0."""

    epoch: Epoch
    clocks: ClocksState
    log: Count = 0
    """Number of tensors that hold the reads of all steps."""
    pins: Annotated[list[tuple[DrawnId, bool]], Meta(max_length=MOST_KNOWN_PINS)] = []
    """Ids of the newest pins, each with whether it was given up."""
    vectors: Annotated[list[VectorRecord], Meta(max_length=MOST_VECTORS)] = []


_encoder = msgspec.msgpack.Encoder()
_replicas = msgspec.msgpack.Decoder(ReplicasState)
_shards = msgspec.msgpack.Decoder(ShardsState)


def pieces_of(shards: Sequence[ShardSpec], *, in_place: bool) -> list[tuple[ShardSpec, ...]]:
    """Cut a bundle's shards into pieces 1, 2, and so on; piece 0 has no shards."""
    if in_place and 0 < sum([spec.nbytes for spec in shards]) <= IN_PLACE_BYTES:
        return [(), tuple(shards)]
    pieces: list[tuple[ShardSpec, ...]] = [()]
    size = 0
    for spec in shards:
        has_room = size + spec.nbytes <= PIECE_BYTES and len(pieces[-1]) < PIECE_SHARDS
        if len(pieces) > 1 and has_room:
            pieces[-1] = (*pieces[-1], spec)
            size += spec.nbytes
        else:
            pieces.append((spec,))
            size = spec.nbytes
    return pieces


def copy_piece(
    bundle: Bundle, specs: Sequence[ShardSpec], *, has_arrays: bool = True, has_log: bool = False
) -> Part:
    """Copy the shards of a piece; without shards, copy piece 0.

    Args:
        has_arrays: Whether the copy has the arrays and shares no memory with the bundle, so that another
            thread may read it. Otherwise `with_arrays` adds the arrays, and the pushes are not copied.
        has_log: Whether the copy has the log of a recorded run. A state on a disk has none.
    """
    log: Part = []
    if has_log and bundle.log is not None:
        log = _cut(bundle.log.part([int(spec.id) for spec in specs]))
    if not specs:
        pins = [*bundle.pins.items()]
        state = ReplicasState(bundle.epoch, bundle.replicas.state(), len(log), pins, [*bundle.vectors])
        return [np.frombuffer(_encoder.encode(state), np.uint8), *log]
    shards = [bundle.shards[spec.id] for spec in specs]
    tables = {id(shard.tables): shard.tables for shard in shards}
    table_at = {key: at for at, key in enumerate(tables)}
    places = _places(shards)
    push_at = {key: at for at, key in enumerate(places)}
    details = [
        ShardDetails(
            int(shard.spec.id),
            table_at[id(shard.tables)],
            shard.pending.reached if shard.pending is not None else 0,
            [
                ContributionState(clock, push_at[id(each.push)], places[id(each.push)][1].index(each.place))
                for clock, each in _waiting(shard)
            ],
            [vector_number(key) for key in _vector_keys(shard)],
            [(*step, dots) for step, dots in shard.dots.items()],
        )
        for shard in shards
    ]
    parts = [push_part(_of_places(queued, kept), sums=True) for queued, kept in places.values()]
    # By identity: comparing values would search a set once for each table that shares it.
    sets = {_ids(each.groups): each.groups for each in tables.values()}
    set_at = {key: at for at, key in enumerate(sets)}
    encoded = ShardsState(
        details,
        [_tables_state(each, set_at[_ids(each.groups)]) for each in tables.values()],
        [(part.details, len(part.tensors)) for part in parts],
        [list(each.items()) for each in sets.values()],
        len(log),
    )
    arrays = [array.copy() for array in piece_arrays(bundle, specs)] if has_arrays else []
    return [
        np.frombuffer(_encoder.encode(encoded), np.uint8),
        *arrays,
        *[tensor.copy() if has_arrays else tensor for part in parts for tensor in part.tensors],
        *log,
    ]


def _cut(log: bytes) -> Part:
    """Return a log as tensors of at most `PART_BYTES`."""
    data = np.frombuffer(log, np.uint8)
    return [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]


def piece_arrays(bundle: Bundle, specs: Sequence[ShardSpec]) -> list[NDArray[Any]]:
    """Return the arrays of a piece, in tensor order; not copies."""
    return [array for spec in specs for array in _arrays(bundle.shards[spec.id])]


def with_arrays(tensors: Part, arrays: Part) -> Part:
    """Return all tensors of a piece, given its arrays and its other tensors."""
    return [*tensors[:1], *arrays, *tensors[1:]]


def digest_of(arrays: Part) -> bytes:
    """Return the SHA-256 digest of some arrays' bytes; both sides know the shapes."""
    digest = sha256()
    for array in arrays:
        if array.size:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A piece that has arrived, checked against the shapes of its shards."""

    details: ShardsState | ReplicasState
    arrays: Sequence[tuple[NDArray[Any], NDArray[Any]]] = ()
    """Arrays of the shards on this server, each paired with its new values."""
    vectors: Sequence[Mapping[str, NDArray[Any]]] = ()
    """Vectors of each shard."""
    pushes: Sequence[QueuedPush] = ()
    log: LogContent | None = None
    """Log of the shards, or the reads of all steps; None if there is no log, or the log has ended."""


def read_piece(
    bundle: Bundle, specs: Sequence[ShardSpec], table: Sequence[ShardSpec], tensors: Part
) -> Piece:
    """Return a piece from its tensors; the bundle does not change before `load_piece`.

    Args:
        specs: The shards of the piece.
        table: All shards of the store, by number.

    Raises:
        RemoteProtocolError: The piece is of other shards, or a tensor has another shape or type.
    """
    try:
        if not specs:
            replicas = _replicas.decode(tensors[0].tobytes())
            clocks = replicas.clocks
            if {replica for replica, _ in clocks.over} - clocks.newest.keys():
                raise RemoteProtocolError("piece", "it has ended generations of a replica without the newest")
            return Piece(replicas, log=_read_log(bundle, tensors[1:], replicas.log, specs))
        details = _shards.decode(tensors[0].tobytes())
    except (*UNREADABLE, IndexError) as error:
        raise RemoteProtocolError("piece", f"its details: {error}") from None
    if [each.shard for each in details.shards] != [int(spec.id) for spec in specs]:
        raise RemoteProtocolError("piece", f"it has {len(details.shards)} shards, not those of this piece")
    if len(details.tables) > len(specs):
        raise RemoteProtocolError("piece", f"it has {len(details.tables)} tables for {len(specs)} shards")
    rest = iter(tensors[1:])
    arrays: list[tuple[NDArray[Any], NDArray[Any]]] = []
    vectors: list[dict[str, NDArray[Any]]] = []

    def next_like(target: NDArray[Any], shard: Shard) -> NDArray[Any]:
        """Return the next array, which must have the shape and type of a given array."""
        source = next(rest, None)
        if source is None:
            raise RemoteProtocolError("piece", f"it lacks arrays of shard {shard.spec.id}")
        check_array(source, f"shard {shard.spec.id}", target)
        return source

    for shard, each in zip([bundle.shards[spec.id] for spec in specs], details.shards, strict=True):
        arrays += [(target, next_like(target, shard)) for target in _rule_arrays(shard)]
        vectors.append({vector_key(number): next_like(shard.values, shard) for number in each.vectors})
    pushes = [queued_push(push, list(islice(rest, count)), bundle, table) for push, count in details.pushes]
    log = _read_log(bundle, [*rest], details.log, specs)
    for each in details.shards:
        _check_shard(each, len(details.tables), pushes, is_summed=bundle.summed)
    if len(details.sets) <= max([tables.sets for tables in details.tables], default=-1):
        raise RemoteProtocolError("piece", f"its tables name more sets than its {len(details.sets)}")
    for epoch, ranges in (kept for each in details.sets for kept in each):
        if ranges and (text := groups_fault((epoch, *ranges))):
            raise RemoteProtocolError("piece", text)
    for _, images, packed in (kept for tables in details.tables for kept in tables.losses):
        if text := LossSum.read(images, packed).fault:
            raise RemoteProtocolError("piece", text)
    return Piece(details, arrays, vectors, pushes, log)


def _read_log(bundle: Bundle, tensors: Part, count: int, specs: Sequence[ShardSpec]) -> LogContent | None:
    """Read the log of a piece from the last tensors of the piece. Raises RemoteProtocolError."""
    if len(tensors) != count:
        raise RemoteProtocolError(
            "piece", f"it has {len(tensors)} tensors of its log, its details name {count}"
        )
    if not tensors:
        return None
    # Before the log is decoded: its clients and steps take several times their bytes.
    if bundle.log is None or entry_bytes([tensors]) > MOST_PACKED_BYTES:
        size = entry_bytes([tensors])
        raise RemoteProtocolError("piece", f"it has a log of {size} bytes, or of a run without a record")
    try:
        log = read_order_log(b"".join([tensor.tobytes() for tensor in tensors]))
    except ValueError as error:
        raise RemoteProtocolError("piece", str(error)) from None
    if [*log.entries] != [int(spec.id) for spec in specs]:
        raise RemoteProtocolError("piece", f"it has the log of shards {[*log.entries][:8]}")
    return log


def _check_shard(
    details: ShardDetails, tables: int, pushes: Sequence[QueuedPush], *, is_summed: bool
) -> None:
    if details.tables >= tables:
        raise RemoteProtocolError("piece", f"tables {details.tables} of {tables}")
    if details.contributions and not is_summed:
        raise RemoteProtocolError("piece", "it has contributions, and only bsp adds pushes up")
    for each in details.contributions:
        places = pushes[each.push].push.shards if each.push < len(pushes) else ()
        if each.place >= len(places) or places[each.place] != details.shard:
            raise RemoteProtocolError("piece", f"push {each.push} has no place {each.place} for the shard")
        if each.clock <= details.reached:
            raise RemoteProtocolError("piece", f"clock {each.clock} is reached, as {details.reached} is")


def load_piece(bundle: Bundle, piece: Piece) -> None:
    """Set the shards of a piece, or the state in piece 0."""
    details = piece.details
    if bundle.log is not None:
        bundle.log.take(piece.log)
    if isinstance(details, ReplicasState):
        bundle.epoch = details.epoch
        bundle.replicas.restore(details.clocks)
        bundle.pins = dict(details.pins)
        bundle.vectors = tuple(details.vectors)
        return
    for target, source in piece.arrays:
        np.copyto(target, source)
    sets = [dict(each) for each in details.sets]
    tables = [_tables_of(each, sets[each.sets]) for each in details.tables]
    for each, vectors in zip(details.shards, piece.vectors, strict=True):
        shard = bundle.shards[ShardId(each.shard)]
        for key in _vector_keys(shard):
            del shard.rule_state[key]
        shard.rule_state |= {key: np.array(array, shard.values.dtype) for key, array in vectors.items()}
        shard.dots = {(client, generation, n): dots for client, generation, n, dots in each.dots}
        shard.tables.shards -= 1
        shard.tables = tables[each.tables]
        shard.tables.shards += 1
        _load_contributions(shard, each, piece.pushes)
    bundle.regroup()


def _rule_arrays(shard: Shard) -> list[NDArray[Any]]:
    names = [name for name in sorted(shard.rule_state) if not is_vector_key(name)]
    return [shard.values, *(shard.rule_state[name] for name in names)]


def _vector_keys(shard: Shard) -> list[str]:
    return sorted(filter(is_vector_key, shard.rule_state))


def _arrays(shard: Shard) -> list[NDArray[Any]]:
    return [*_rule_arrays(shard), *(shard.rule_state[key] for key in _vector_keys(shard))]


def count_arrays(bundle: Bundle, specs: Sequence[ShardSpec], tensors: Part) -> int:
    """Return how many arrays a piece has according to its details. Raises RemoteProtocolError."""
    try:
        details = _shards.decode(tensors[0].tobytes())
    except (*UNREADABLE, IndexError) as error:
        raise RemoteProtocolError("piece", f"its details: {error}") from None
    of_rules = sum([len(_rule_arrays(bundle.shards[spec.id])) for spec in specs])
    return of_rules + sum([len(each.vectors) for each in details.shards])


def _waiting(shard: Shard) -> Iterator[tuple[int, Contribution]]:
    """Yield the pending contributions of a shard, each with its clock."""
    for clock, waiting in shard.pending.waiting.items() if shard.pending is not None else ():
        for each in waiting:
            yield clock, each


def _places(shards: Sequence[Shard]) -> dict[int, tuple[QueuedPush, list[int]]]:
    """Return the pushes with pending contributions to some shards, by identity, and their places there."""
    found: dict[int, tuple[QueuedPush, list[int]]] = {}
    for shard in shards:
        for _, each in _waiting(shard):
            found.setdefault(id(each.push), (each.push, []))[1].append(each.place)
    for _, places in found.values():
        places.sort()
    return found


def _of_places(queued: QueuedPush, places: Sequence[int]) -> QueuedPush:
    """Return the part of a push at some indices; the pieces with its other shards have the rest."""
    push = queued.push
    if len(places) == len(push.shards):
        return queued
    gradients = msgspec.structs.replace(queued.gradients.only(places), checked=queued.gradients.checked)
    push = msgspec.structs.replace(
        push,
        parts=tuple([PushedPart(isinstance(part, FactorPart), 1) for part in gradients.parts]),
        shards=tuple([push.shards[place] for place in places]),
        numbers=joined([of_place(push.numbers, place) for place in places]),
        versions=joined([of_place(push.versions, place) for place in places]),
        own_applied=joined([of_place(push.own_applied, place) for place in places]),
        recorded=False,  # the log of the bundle has the reads since the contribution
    )
    shards = tuple([queued.shards[place] for place in places])
    return QueuedPush(None, push, shards, gradients, range(len(places)), [])


def _load_contributions(shard: Shard, details: ShardDetails, pushes: Sequence[QueuedPush]) -> None:
    if shard.pending is None:
        return
    shard.pending.reached = details.reached
    shard.pending.due.clear()
    shard.pending.waiting.clear()
    for each in details.contributions:
        queued = pushes[each.push]
        session: Session = (queued.push.session, queued.push.incarnation)
        contribution = Contribution(Replica(queued.push.replica), queued, each.place, session)
        shard.pending.waiting.setdefault(each.clock, []).append(contribution)


def _ids(groups: GroupSets) -> tuple[tuple[int, int], ...]:
    """Return the identity of group sets."""
    return tuple([(epoch, id(ranges)) for epoch, ranges in groups.items()])


def _tables_state(tables: ShardTables, sets: int) -> TablesState:
    return TablesState(
        int(tables.version),
        list(tables.last_number.whole().items()),
        {int(replica): clock for replica, clock in tables.clocks.items()},
        {replica: dict(counts) for replica, counts in tables.staleness_of.items()},
        [(int(replica), generation, clock) for (replica, generation), clock in tables.early.items()],
        int(tables.loaded),
        tables.refused,
        list(tables.refusals.whole().items()),
        tables.duplicates,
        tables.known,
        sets,
        [(epoch, each.images, each.packed) for epoch, each in tables.losses.items()],
    )


def _tables_of(state: TablesState, sets: GroupSets) -> ShardTables:
    return ShardTables(
        version=Version(state.version),
        last_number=BySession(0, dict(state.last_number)),
        clocks={Replica(replica): clock for replica, clock in state.clocks.items()},
        staleness_of={replica: Counter(counts) for replica, counts in state.staleness.items()},
        early={(Replica(replica), generation): clock for replica, generation, clock in state.early},
        loaded=Version(state.loaded),
        refused=state.refused,
        refusals=BySession((), dict(state.refusals)),
        duplicates=state.duplicates,
        known=state.known,
        groups=sets,
        losses={epoch: LossSum.read(images, packed) for epoch, images, packed in state.losses},
        shards=0,
    )


def cut_piece(tensors: Part) -> list[Part]:
    """Cut the tensors of a piece into parts."""
    parts: list[Part] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and (size + tensor.nbytes > PART_BYTES or len(parts[-1]) == PART_TENSORS):
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return parts
