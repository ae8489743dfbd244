"""A store that comes back from the disks of its servers: found by its name, and loaded into a new store.

All its servers were lost, so a client creates it again, with another id. Its values and the state of
its rules come from the disks; versions and clocks begin at 0, and each client begins with a new session.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from adam_async.checkpoint.manifest import CheckpointError
from adam_async.checkpoint.saved_shards import FoundStore, SavedShards
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.errors import StoreError
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import ArrayRecord, StoreRecord

logger = logging.getLogger(__name__)


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
    cluster: ClusterMap,
) -> None:
    """Load a store from the disks into a new one with the same arrays.

    Raises:
        StoreError: A server does not have a piece any more, or the piece is damaged.
        TransportError, ShardUnavailable: See `ShardCopies.load`.
    """
    try:
        await copies.load(store, saved.shards(found, cluster))
    except CheckpointError as error:
        raise StoreError(str(error)) from error
    logger.warning("store %r goes on from the disks of its servers", found.name)


def same_shards(found: FoundStore, store: StoreRecord, arrays: Sequence[ArrayRecord]) -> bool:
    """Return whether two stores have the same arrays, shards and rules, apart from the rates of the rules."""
    mine, theirs = (
        [msgspec.structs.replace(rule, rate=0.0) for rule in rules]
        for rules in (store.rules, found.record.rules)
    )
    return (found.arrays, theirs, found.record.shard_bytes) == (tuple(arrays), mine, store.shard_bytes)
