"""Pure: counts the bytes of the cluster map's records, and refuses a record that the map has no room for.

The size is a function of the map, so all controllers refuse the same records, also after a restart. Each
change updates the size, because an encoding of the whole map is slow.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from adam_async.messages import USERS
from adam_async.messages.bounds import MOST_MAP_BYTES
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.map_changes import Change, changed_records, difference

GROWTH_BYTES = 1 << 20
"""Number of bytes by which existing records may still grow in a full map, so that members can continue; no
node can join then."""

STORES_BYTES = MOST_MAP_BYTES // 2
"""Maximum size of the records of all stores, lists of arrays and bundles together at which a client may add
one, in bytes. The rest of the map is room for programs, and for joining nodes."""

NODES_BYTES: Mapping[str, int] = {
    "ps": 2 << 20,
    "data": 2 << 20,
    "worker": 1 << 20,
    "driver": 1 << 19,
    "client": 1 << 19,
    "reader": 1 << 19,
}
"""Maximum size of the records of all nodes of each role, in bytes, so that no role fills the map."""

MARKS_BYTES = 16
"""Maximum size of the quotes, colons and commas that the map's JSON text adds to one record and its key, in
bytes."""

OUTLINE_BYTES = 1024
"""Maximum size of the JSON text of a map without records, with the commas of epoch results, in bytes."""

_ENCODE = msgspec.json.Encoder().encode


class Share(NamedTuple):
    """Part of the map for some records."""

    group: str
    """Role of the nodes, or `STORES`; empty for records without a limit of their own."""
    most: int = MOST_MAP_BYTES
    """Maximum number of bytes of all records of the group."""
    grows: int = 0
    """Number of bytes by which existing records of the group may exceed `most`."""


STORES = "stores"
"""Group of the records of all stores, lists of arrays and bundles."""


def share_of(key: str, value: Mapping[str, Any], cluster: ClusterMap) -> Share:
    """Return the share of a new record, whose fields are still unchecked."""
    kind = key.partition("/")[0]
    if kind == "nodes" and (role := str(value.get("role"))) in NODES_BYTES:
        # A full share must not keep members of the cluster from their work.
        return Share(role, NODES_BYTES[role], 0 if role in USERS else GROWTH_BYTES)
    is_program = value.get("program") or cluster.is_of_program(str(value.get("store", "")))
    if kind == "stores" and not is_program and value.get("phase") != "deleted":
        return Share(STORES, STORES_BYTES)
    return Share("")


class MapSize:
    """Bytes of the JSON text of a map's records."""

    def __init__(self, cluster: ClusterMap | None = None) -> None:
        self._of: dict[str, tuple[str, int]] = {}
        """Group and size of each record, by key."""
        self.total = 0
        self.by_group: Counter[str] = Counter()
        """Parts of `total`: the nodes of each role, and stores with their lists of arrays and bundles."""
        if cluster is not None:
            self.take(difference(ClusterMap(), cluster))

    def take(self, change: Change) -> None:
        """Update the size for a changed map."""
        for key, record in changed_records(change):
            group, size = self._of.pop(key, ("", 0))
            self.by_group[group] -= size
            self.total -= size
            if record is None:
                continue
            size = len(key) + len(_ENCODE(record))
            group = STORES if key.startswith(("stores/", "bundles/")) else ""
            if isinstance(record, NodeRecord):
                group = record.role
            self._of[key] = group, size
            self.by_group[group] += size
            self.total += size

    @property
    def most_text(self) -> int:
        """Upper bound of the size of the whole map's JSON text, names and marks included, in bytes."""
        return self.total + MARKS_BYTES * len(self._of) + OUTLINE_BYTES

    def refusal(self, key: str, size: int, share: Share) -> str:
        """Return why the map has no room for a record; empty if it has.

        Args:
            key: Key of the record; a record whose key has no slash always has room.
        """
        group, held = self._of.get(key, ("", 0))
        most = MOST_MAP_BYTES + (GROWTH_BYTES if held else 0)
        if "/" not in key or size <= held:
            return ""
        of_group, own = self.by_group[share.group], held if group == share.group else 0
        if share.group and of_group + size - own > share.most + (share.grows if own else 0):
            what, cure = f"{share.group} nodes", f"end a {share.group} that is not needed"
            if share.group == STORES:
                what, cure = STORES, "delete a store"
            return (
                f"the map holds {of_group} bytes of {what}; a record of {size} more would exceed "
                f"{share.most / (1 << 20):g} MiB: {cure}"
            )
        if self.total + size - held <= most:
            return ""
        return (
            f"the map holds {self.total} bytes; a record of {size} more would exceed {most >> 20} MiB: "
            "end what is not needed, or start the cluster again"
        )

    def __repr__(self) -> str:
        return f"<MapSize {self.total}>"
