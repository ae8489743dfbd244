"""A store that comes back from the disks of its servers: found by its name, and loaded into a new store.

All its servers were lost, so a client creates it again, with another id. Its values and the state of
its rules come from the disks; versions and clocks begin at 0, and each client begins with a new session.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.checkpoint.manifest import CheckpointError
from adam_async.checkpoint.saved_shards import FoundStore, SavedShards
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.errors import StoreError
from adam_async.messages import ShardState
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.shard_table import ShardSpec, ShardTable, shard_table
from adam_async.run.store_record import ArrayRecord, StoreRecord
from transport import RemoteProtocolError

logger = logging.getLogger(__name__)


class SavedValues:
    """Shards in memory, by the names of their rules' arrays; `ShardCopies` loads them into a store."""

    def __init__(self) -> None:
        self.by_names: dict[tuple[str, ...], dict[int, list[NDArray[Any]]]] = {}

    def put(self, shards: Sequence[int], arrays: Sequence[str], tensors: Sequence[NDArray[Any]]) -> None:
        """Take the shards of a message. Raises RemoteProtocolError: the number of tensors is wrong."""
        each = 1 + len(arrays)
        if len(tensors) != each * len(shards):
            raise RemoteProtocolError(
                "shards", f"{len(shards)} shards need {each * len(shards)} tensors, not {len(tensors)}"
            )
        found = self.by_names.setdefault(tuple(arrays), {})
        for place, shard in enumerate(shards):
            # The link uses the memory of a message's tensors again.
            found[shard] = [tensor.copy() for tensor in tensors[place * each : (place + 1) * each]]


class _Family:
    """The shards with the same names of their rules' arrays."""

    def __init__(self, arrays: tuple[str, ...], values: dict[int, list[NDArray[Any]]]) -> None:
        self.arrays = arrays
        self._values = values

    def bytes_of(self, shard: ShardSpec) -> int:
        """Return the size of a shard with its rule state, in bytes."""
        return sum([array.nbytes for array in self._values[int(shard.id)]])

    def cut(self, shard: ShardSpec) -> list[NDArray[Any]]:
        """Return the values of a shard, and its rule's arrays."""
        return self._values[int(shard.id)]


async def find_saved(
    saved: SavedShards, name: str, maps: Callable[[], ClusterMap], *, without: str = ""
) -> FoundStore | None:
    """Return the newest store of a name on the disks of the servers; see `SavedShards.find`.

    Raises:
        StoreError: The disks have only a part of the store.
    """
    try:
        return await saved.find(name, maps, without=without)
    except CheckpointError as error:
        raise StoreError(str(error)) from error


async def load_saved(
    saved: SavedShards,
    copies: ShardCopies,
    found: FoundStore,
    store: StoreRecord,
    arrays: Sequence[ArrayRecord],
    cluster: ClusterMap,
) -> None:
    """Load a store from the disks into a new one with the same arrays.

    Raises:
        StoreError: A server does not have a piece any more, or the piece is damaged.
        TransportError, ShardUnavailable: See `ShardCopies.load`.
    """
    values = SavedValues()
    try:
        await saved.read(found, values, cluster)
    except CheckpointError as error:
        raise StoreError(str(error)) from error
    table = shard_table(arrays, shard_bytes=store.shard_bytes)
    states = [ShardState(shard=int(spec.id), version=0, clocks={}) for spec in table.shards]
    for names, of_family in values.by_names.items():
        part = tuple(spec for spec in table.shards if int(spec.id) in of_family)
        await copies.load(store, ShardTable(part, {}), _Family(names, of_family), states)
    logger.warning("store %r goes on from the disks of its servers", found.name)


def same_shards(found: FoundStore, store: StoreRecord, arrays: Sequence[ArrayRecord]) -> bool:
    """Return whether two stores have the same arrays, shards and rules, apart from the rates of the rules."""
    mine, theirs = (
        [msgspec.structs.replace(rule, rate=0.0) for rule in rules]
        for rules in (store.rules, found.record.rules)
    )
    return (found.arrays, theirs, found.record.shard_bytes) == (tuple(arrays), mine, store.shard_bytes)
