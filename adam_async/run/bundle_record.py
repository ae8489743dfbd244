"""Pure: the record of a bundle in the cluster map: the servers with copies of some shards, and their primary.

A *bundle* is the shards of one store that share one log, one primary and one set of copies. Its *home* is the
server that the controllers placed it on; the bundle keeps this name when its primary moves. The record's key
is ``bundles/<store>/<home>``.
"""

import msgspec

Member = tuple[str, int]
"""A copy of a bundle: node and incarnation of its server."""

MOST_COPIES = 8
"""Maximum number of copies of a store's shards."""

DEFAULT_COPIES = 3
"""Default number of servers with each shard, in a cluster with several controllers."""

SPARE_MEMBERS = 1
"""Number of members that a bundle may have beyond the copies of its store, so that a successor joins before a
member leaves."""


class BundleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One bundle. The controllers create it with its store and strike out lost members; members change it."""

    store: str
    """Id of the store."""
    generation: int = 1
    """Number that grows with each new primary; a member refuses messages of an older generation."""
    in_sync: tuple[Member, ...] = ()
    """Members with all committed entries, the primary first; empty once all are lost."""
    joining: tuple[Member, ...] = ()
    """Invited members, which lack some entries or values."""
    lost: tuple[str, ...] = ()
    """Servers of members in sync that were lost since the bundle last had all copies, in the order of their
    loss. The controllers set it."""
    changed: int = 0

    @property
    def primary(self) -> Member | None:
        """Member that orders pushes and answers clients; None if no member is in sync."""
        return self.in_sync[0] if self.in_sync else None

    @property
    def members(self) -> tuple[Member, ...]:
        """All members; the members in sync come first."""
        return self.in_sync + self.joining


def bundle_key(store: str, home: str) -> str:
    """Return the key of a bundle in the cluster map, by the name of its store and its home."""
    return f"bundles/{store}/{home}"
