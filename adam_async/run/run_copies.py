"""Pure: the copies of a store's shards, for reports, tables and events.

Clients of a bundle see the same primary, and the same missing copies.
"""

from typing import NamedTuple

import msgspec

from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import StoreRecord


class BundleCopies(msgspec.Struct, frozen=True, kw_only=True):
    """The servers with copies of one bundle."""

    home: str
    """Server that gives the bundle its name."""
    primary: str
    """Server that answers the clients of the bundle; empty once all copies are lost."""
    in_sync: tuple[str, ...]
    """Servers with all acknowledged pushes, the primary first."""
    joining: tuple[str, ...]
    """Servers that still receive values."""


class RunCopies(msgspec.Struct, frozen=True, kw_only=True):
    """The copies of all shards in a store or run."""

    copies: int
    """Number of servers that should have each shard."""
    min_in_sync: int
    """Number of copies that must have a push before it is applied."""
    bundles: tuple[BundleCopies, ...]
    """Copies of each bundle, in the order of the homes."""

    @property
    def lagging(self) -> tuple[BundleCopies, ...]:
        """Bundles with fewer copies in sync than the store should have."""
        return tuple(bundle for bundle in self.bundles if len(bundle.in_sync) < self.copies)


def copies_of(cluster: ClusterMap) -> RunCopies | None:
    """Return the copies of the run's shards; None until the shards are placed."""
    store = cluster.run_store
    return None if store is None or not store.buckets else store_copies(cluster, store)


def store_copies(cluster: ClusterMap, store: StoreRecord) -> RunCopies:
    """Return the copies of a store's shards; without bundles until the shards are placed."""
    bundles = []
    for home in sorted(set(store.buckets)):
        bundle = cluster.bundle(store.id, home)
        if bundle is None:
            continue
        in_sync = tuple(node for node, _ in bundle.in_sync)
        joining = tuple(node for node, _ in bundle.joining)
        bundles.append(
            BundleCopies(home=home, primary=next(iter(in_sync), ""), in_sync=in_sync, joining=joining)
        )
    return RunCopies(copies=store.copies, min_in_sync=store.min_in_sync_in_force, bundles=tuple(bundles))


class Primary(NamedTuple):
    """The server that answers the clients of a bundle."""

    node: str
    incarnation: int
    address: str
    """Address of the server's listener."""


def primary_of(cluster: ClusterMap, store: str, home: str) -> Primary | None:
    """Return a bundle's primary, by the store's id and the bundle's home; None while there is none."""
    bundle, record = cluster.bundle(store, home), cluster.primary(store, home)
    if bundle is None or bundle.primary is None or record is None:
        return None
    return Primary(*bundle.primary, record.address)


def lacks_copies(cluster: ClusterMap, store: str, home: str) -> bool:
    """Return whether a bundle has a primary, but too few members in sync for its pushes."""
    bundle, record = cluster.bundle(store, home), cluster.store(store)
    if bundle is None or record is None:
        return False
    return 0 < len(bundle.in_sync) < record.min_in_sync_in_force
