"""Pure: a bundle's pieces as states on a disk, and the record of their store beside them.

A state begins with a head, which has types and shapes. One part for each tensor of the piece
(`shard_pieces.py`) follows. In bsp the last tensor has the replicas and the epoch at the time of the copy:
the sums that later entries complete depend on them. The state `CATALOGUE` has the store's record and its list
of arrays. In the store of a run the state `RUN` has the run's record. So a folder alone tells which arrays
and which run its shards belong to.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError, DataError
from adam_async.messages.body import MOST_IN_A_META, Count
from adam_async.messages.tensors import UNREADABLE
from adam_async.model.rules import Rule
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.kept_shards import KeptShards
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.shard import Shard, set_vectors
from adam_async.parameter_server.shard_pieces import (
    PART_BYTES,
    copy_piece,
    load_piece,
    piece_arrays,
    pieces_of,
    read_piece,
    with_arrays,
)
from adam_async.parameter_server.shard_transfer import set_state
from adam_async.parameter_server.storage import own_shards
from adam_async.persistence.frames import Part as Bytes
from adam_async.persistence.records import LEADING, Order, State, StateKey, StateName, WallTime
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.run_record import RunRecord, packed_record, read_run_record
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_checks import check_placed_store
from adam_async.run.store_record import ArrayRecord, StoreRecord, joined_arrays

CONTENTS = 9
"""Version of the encoding of states and entries."""

CATALOGUE = StateName(LEADING, 0)
"""Name of the state with the record of the store."""

RUN = StateName(LEADING, 1)
"""Name of the state with the run's record, in the store of a run."""

PIN = StateName(LEADING, 2)
"""Name of the state with the facts of a pin, in the pin's folder."""

_TYPES = frozenset(np.dtype(name).str for name in ("f4", "f8", "i8", "u1"))
"""Types that tensors of pieces and entries may have."""


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=32)]


_heads = msgspec.msgpack.Decoder(tuple[_Tensor, ...])
_entry_heads = msgspec.msgpack.Decoder(tuple[tuple[_Tensor, ...], ...])


class Catalogue(msgspec.Struct, frozen=True):
    """The store of a folder."""

    name: str
    record: StoreRecord
    arrays: tuple[ArrayRecord, ...]
    began: WallTime
    """Time at which the server took the store up, in seconds since 1970."""


def catalogue_of(cluster: ClusterMap, name: str, store: StoreRecord, *, began: float) -> Catalogue:
    """Return the catalogue of a placed store. Raises ConfigError: see `joined_arrays`."""
    return Catalogue(name, store, joined_arrays(name, store, cluster.arrays), began)


def catalogue_state(catalogue: Catalogue) -> State:
    """Return a catalogue as a state. A later placement, and then a later record, has the newer state."""
    record = catalogue.record
    key = StateKey(CATALOGUE.home, CATALOGUE.shard, 1 + record.generation, 1 + record.changed, 0)
    return State(key, [msgspec.msgpack.encode(catalogue)])


def read_catalogue(parts: Sequence[memoryview], origin: str) -> Catalogue:
    """Return the catalogue of a state.

    Args:
        origin: Name of the folder, for errors.

    Raises:
        DataError: The state is no catalogue.
    """
    try:
        catalogue = msgspec.msgpack.decode(b"".join(parts), type=Catalogue)
        check_placed_store(catalogue.record, catalogue.arrays)
    except (*UNREADABLE, ConfigError) as error:
        raise DataError(
            f"{origin} has no readable record of its store: {error}; move the folder away to begin without it"
        ) from None
    return catalogue


def run_state(record: RunRecord, order: Order) -> State:
    """Return the record of a run as a state."""
    return State(StateKey(*RUN, *order, record.ended), [packed_record(record)])


def read_run(parts: Sequence[memoryview], origin: str) -> RunRecord:
    """Return the record of a run from a state. Raises DataError: the state is none."""
    try:
        return read_run_record(b"".join(parts))
    except ValueError as error:
        raise DataError(
            f"the record of the run in {origin} is not readable: {error}; move the folder away to begin "
            "without it"
        ) from None


def pieces_by_name(record: StoreRecord, table: Sequence[ShardSpec]) -> dict[StateName, tuple[ShardSpec, ...]]:
    """Return the shards of each piece of a placed store, except pieces 0.

    Args:
        table: All shards of the store, by number.
    """
    of_home: dict[str, list[ShardSpec]] = {}
    for spec in table:
        of_home.setdefault(record.buckets[spec.bucket], []).append(spec)
    return {
        StateName(home, number): specs
        for home in sorted(of_home)
        for number, specs in enumerate(pieces_of(of_home[home], in_place=record.in_place))
        if specs
    }


def new_bundle(record: StoreRecord, specs: Sequence[ShardSpec], rules: Sequence[Rule]) -> Bundle:
    """Return a bundle with new shards and vectors, for the pieces of a store on a disk."""
    shards = own_shards(specs, rules)
    set_vectors(shards, record.vectors)
    return bundle_of(record, shards)


def bundle_of(record: StoreRecord, shards: Iterable[Shard]) -> Bundle:
    return Bundle(
        shards,
        clocked=record.slack is not None,
        summed_weight=record.summed_weight,
        scale_by_staleness=record.scale_by_staleness,
    )


def kept_state(
    kept: KeptShards, store: StoreRecord, home: str, piece: int, specs: Sequence[ShardSpec], *, order: Order
) -> State | None:
    """Return a piece of kept shards, which counts as taken; None if the kept shards have ended."""
    shards = []
    for spec in specs:
        if (copy := kept.take(spec.id)) is None:
            return None
        shards.append(Shard(spec=spec, values=copy.values, rule_state=dict(copy.rule_state)))
        set_state(shards[-1], copy.state)
    bundle = bundle_of(store, shards)
    bundle.share_equal_tables()
    return piece_state(bundle, home, piece, specs, order=order, is_copy=False)


def piece_state(
    bundle: Bundle, home: str, piece: int, specs: Sequence[ShardSpec], *, order: Order, is_copy: bool = True
) -> State:
    """Return a piece of a bundle, which is between two entries.

    Args:
        specs: The shards of the piece.
        order: Generation and position of the last entry in them.
        is_copy: Whether the arrays are copied; otherwise the bundle must not change any more.
    """
    tensors = copy_piece(bundle, specs, has_arrays=is_copy)
    if not is_copy:
        tensors = with_arrays(tensors, piece_arrays(bundle, specs))
    if specs and bundle.summed:
        tensors += copy_piece(bundle, ())
    clocks = [clock for spec in specs for clock in bundle.shards[spec.id].clocks.values()]
    head = [_Tensor(tensor.dtype.str, tensor.shape) for tensor in tensors]
    key = StateKey(home, piece, *order, max(clocks, default=0))
    return State(key, [msgspec.msgpack.encode(head), *map(_bytes_of, tensors)])


def _bytes_of(tensor: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data if tensor.size else b""


def tensors_of(parts: Sequence[memoryview], origin: str) -> Part:
    """Return the tensors of a state, as views.

    Args:
        origin: Name of the state, for errors.

    Raises:
        DataError: The parts are not those of a piece.
    """
    try:
        head = _heads.decode(parts[0])
        tensors = []
        for tensor, part in zip(head, parts[1:], strict=True):
            if tensor.dtype not in _TYPES:
                raise ValueError(f"values of type {tensor.dtype}")
            tensors.append(np.frombuffer(part, tensor.dtype).reshape(tensor.shape))
    except (*UNREADABLE, ValueError, IndexError) as error:
        raise DataError(f"{origin} is no piece of a store: {error}") from None
    return tensors


def load_tensors(
    bundle: Bundle, specs: Sequence[ShardSpec], table: Sequence[ShardSpec], tensors: Part
) -> None:
    """Set the shards of a piece from its tensors on a disk. Raises RemoteProtocolError: see `read_piece`."""
    if specs and bundle.summed:
        load_piece(bundle, read_piece(bundle, (), table, tensors[-1:]))
        tensors = tensors[:-1]
    load_piece(bundle, read_piece(bundle, specs, table, tensors))


def entry_parts(parts: Sequence[Part]) -> list[Bytes]:
    """Return an entry of a bundle's log as the parts of an entry on a disk."""
    head = [[_Tensor(tensor.dtype.str, tensor.shape) for tensor in part] for part in parts]
    return [msgspec.msgpack.encode(head), *(_bytes_of(tensor) for part in parts for tensor in part)]


def read_entry(parts: Sequence[memoryview], origin: str) -> list[Part]:
    """Return an entry of a bundle's log from its parts on a disk.

    Args:
        origin: Name of the entry, for errors.

    Raises:
        DataError: The parts are not those of an entry.
    """
    try:
        head = _entry_heads.decode(parts[0])
    except (*UNREADABLE, IndexError) as error:
        raise DataError(f"{origin} is no entry: {error}") from None
    flat = tuple(tensor for part in head for tensor in part)
    rest = iter(tensors_of([memoryview(msgspec.msgpack.encode(flat)), *parts[1:]], origin))
    return [[next(rest) for _ in part] for part in head]


def chunks_of(shards: Sequence[ShardSpec], arrays: int) -> list[tuple[int, ...]]:
    """Cut the shards of a piece into messages of one rule and one type, each of about `PART_BYTES`.

    Returns the shards' numbers by message.

    Args:
        arrays: Number of arrays that a rule has.
    """
    most = max(MOST_IN_A_META // 16 // (1 + arrays), 1)
    chunks: list[tuple[int, ...]] = []
    open_: dict[tuple[int, str], tuple[list[int], int]] = {}
    for spec in shards:
        family = spec.rule, spec.dtype
        numbers, size = open_.get(family, ([], 0))
        nbytes = spec.nbytes * (1 + arrays)
        if numbers and (len(numbers) == most or size + nbytes > PART_BYTES):
            chunks.append(tuple(numbers))
            numbers, size = [], 0
        open_[family] = [*numbers, int(spec.id)], size + nbytes
    return [*chunks, *(tuple(numbers) for numbers, _ in open_.values())]
