"""Pure: the state of a bundle in pieces, for a server that joins.

Piece 0 has the state that belongs to no shard: replica generations and the epoch. Each other piece has a few
shards that follow one another, of about `PIECE_BYTES`: values, rule state, tables and pending contributions,
whose pushes travel with it. All members cut the shards into the same pieces. A piece is a copy, taken between
two entries, so it is the state at one position of the log.

The first tensor of a piece is its details (msgpack); then come the values of each shard and its rule's
arrays, in the order of their names, and then the tensors of the pushes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.messages import check_tensor
from adam_async.parameter_server.bsp_barrier import Contribution
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import QueuedPush
from adam_async.parameter_server.log_entries import Part, PushDetails, push_part, queued_push
from adam_async.parameter_server.replica_clocks import ClocksState
from adam_async.parameter_server.shard import Session, Shard, ShardTables
from adam_async.run.ids import Replica, Version
from adam_async.run.shard_table import ShardSpec
from transport import RemoteProtocolError

PIECE_BYTES = 1 << 20
"""Size of the values of a piece of several shards, in bytes; one round of the loop copies it."""


class TablesState(msgspec.Struct, frozen=True, array_like=True):
    """The tables of some shards, as `ShardTables` has them."""

    version: int
    last_number: list[tuple[Session, int]]
    clocks: dict[int, int]
    staleness: dict[int, dict[int, int]]
    loaded: int
    refused: int
    duplicates: int


class ContributionState(msgspec.Struct, frozen=True, array_like=True):
    """A pending contribution: index of its push in the piece, and place of the shard in that push."""

    clock: int
    push: int
    place: int


class ShardDetails(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a piece."""

    shard: int
    tables: int
    """Index of its tables in the piece."""
    reached: int = 0
    contributions: list[ContributionState] = []


class ShardsState(msgspec.Struct, frozen=True, array_like=True):
    """Details of a piece of shards."""

    shards: list[ShardDetails]
    tables: list[TablesState]
    pushes: list[tuple[PushDetails, int]]
    """Each push with pending contributions, and the number of its tensors."""


class ReplicasState(msgspec.Struct, frozen=True, array_like=True):
    """Details of piece 0."""

    epoch: int
    clocks: ClocksState


_encoder = msgspec.msgpack.Encoder()
_replicas = msgspec.msgpack.Decoder(ReplicasState)
_shards = msgspec.msgpack.Decoder(ShardsState)


def pieces_of(shards: Sequence[ShardSpec]) -> list[tuple[ShardSpec, ...]]:
    """Cut the shards of a bundle into pieces, from piece 1 on; piece 0 has none of them."""
    pieces: list[tuple[ShardSpec, ...]] = [()]
    size = 0
    for spec in shards:
        if len(pieces) > 1 and size + spec.nbytes <= PIECE_BYTES:
            pieces[-1] = (*pieces[-1], spec)
            size += spec.nbytes
        else:
            pieces.append((spec,))
            size = spec.nbytes
    return pieces


def copy_piece(bundle: Bundle, specs: Sequence[ShardSpec]) -> Part:
    """Copy the shards of a piece, or with no shard piece 0."""
    if not specs:
        state = ReplicasState(bundle.epoch, bundle.replicas.state())
        return [np.frombuffer(_encoder.encode(state), np.uint8)]
    shards = [bundle.shards[spec.id] for spec in specs]
    tables = list({id(shard.tables): shard.tables for shard in shards}.values())
    pushes: dict[int, tuple[int, QueuedPush]] = {}
    details = [
        ShardDetails(
            int(shard.spec.id),
            next(at for at, each in enumerate(tables) if each is shard.tables),
            shard.pending.reached if shard.pending is not None else 0,
            list(_contributions(shard, pushes)),
        )
        for shard in shards
    ]
    parts = [push_part(queued, sums=True) for _, queued in pushes.values()]
    encoded = ShardsState(
        details,
        [_tables_state(each) for each in tables],
        [(part.details, len(part.tensors)) for part in parts],
    )
    arrays = [array.copy() for shard in shards for array in _arrays(shard)]
    return [
        np.frombuffer(_encoder.encode(encoded), np.uint8),
        *arrays,
        *[tensor for part in parts for tensor in part.tensors],
    ]


def load_piece(bundle: Bundle, specs: Sequence[ShardSpec], table: Sequence[ShardSpec], tensors: Part) -> None:
    """Set the shards of a piece, or with no shard the state of piece 0.

    Args:
        specs: The shards of the piece.
        table: All shards of the store, by number.

    Raises:
        RemoteProtocolError: The piece is of other shards, or a tensor of another shape or type. Shards may
            have some of its values then: the caller drops the copy.
    """
    try:
        if not specs:
            state = _replicas.decode(tensors[0].tobytes())
            bundle.epoch = state.epoch
            bundle.replicas.restore(state.clocks)
            return
        details = _shards.decode(tensors[0].tobytes())
    except (msgspec.DecodeError, IndexError) as error:
        raise RemoteProtocolError("piece", f"its details: {error}") from None
    if [each.shard for each in details.shards] != [int(spec.id) for spec in specs]:
        raise RemoteProtocolError("piece", f"it has {len(details.shards)} shards, not those of this piece")
    rest = iter(tensors[1:])
    shards = [bundle.shards[spec.id] for spec in specs]
    for shard in shards:
        for target in _arrays(shard):
            source = next(rest, None)
            if source is None:
                raise RemoteProtocolError("piece", f"it lacks arrays of shard {shard.spec.id}")
            check_tensor(source, f"shard {shard.spec.id}", target.shape, target.dtype)
            np.copyto(target, source)
    pushes = [queued_push(push, list(islice(rest, count)), bundle, table) for push, count in details.pushes]
    tables = [_tables_of(each) for each in details.tables]
    for shard, of_shard in zip(shards, details.shards, strict=True):
        if not of_shard.tables < len(tables):
            raise RemoteProtocolError("piece", f"no tables {of_shard.tables}")
        shard.tables = tables[of_shard.tables]
        shard.tables.shards += 1
        _load_contributions(shard, of_shard, pushes)
    bundle.regroup()


def _arrays(shard: Shard) -> list[NDArray[Any]]:
    return [shard.values, *(shard.rule_state[name] for name in sorted(shard.rule_state))]


def _contributions(shard: Shard, pushes: dict[int, tuple[int, QueuedPush]]) -> Iterator[ContributionState]:
    """Yield the contributions of a shard, and number their pushes."""
    if shard.pending is None:
        return
    for clock, waiting in shard.pending.waiting.items():
        for each in waiting:
            number, _ = pushes.setdefault(id(each.push), (len(pushes), each.push))
            yield ContributionState(clock, number, each.place)


def _load_contributions(shard: Shard, details: ShardDetails, pushes: Sequence[QueuedPush]) -> None:
    if shard.pending is None:
        return
    shard.pending.reached = details.reached
    shard.pending.due.clear()
    shard.pending.waiting.clear()
    for each in details.contributions:
        if not each.push < len(pushes) or not each.place < len(pushes[each.push].shards):
            raise RemoteProtocolError("piece", f"no push {each.push} with a place {each.place}")
        queued = pushes[each.push]
        session: Session = (queued.push.session, queued.push.incarnation)
        contribution = Contribution(Replica(queued.push.replica), queued, each.place, session)
        shard.pending.waiting.setdefault(each.clock, []).append(contribution)


def _tables_state(tables: ShardTables) -> TablesState:
    return TablesState(
        int(tables.version),
        list(tables.last_number.items()),
        {int(replica): clock for replica, clock in tables.clocks.items()},
        {replica: dict(counts) for replica, counts in tables.staleness_of.items()},
        int(tables.loaded),
        tables.refused,
        tables.duplicates,
    )


def _tables_of(state: TablesState) -> ShardTables:
    return ShardTables(
        version=Version(state.version),
        last_number=dict(state.last_number),
        clocks={Replica(replica): clock for replica, clock in state.clocks.items()},
        staleness_of={replica: Counter(counts) for replica, counts in state.staleness.items()},
        loaded=Version(state.loaded),
        refused=state.refused,
        duplicates=state.duplicates,
        shards=0,
    )
