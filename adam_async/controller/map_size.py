"""Pure: counts the bytes of the cluster map's records, and refuses a record that the map has no room for.

The size is a function of the map, so all controllers refuse the same records, also after a restart. Each
change updates the size, because an encoding of the whole map is slow.
"""

import msgspec

from adam_async.messages.bounds import MOST_MAP_BYTES
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.map_changes import Change, changed_records, difference

GROWTH_BYTES = 1 << 20
"""Number of bytes by which existing records may still grow in a full map, so that members can continue; no
node can join then."""

STORES_BYTES = MOST_MAP_BYTES // 2
"""Maximum size of the records of all stores, lists of arrays and bundles together, in bytes. The rest of the
map is room for joining nodes."""

MARKS_BYTES = 16
"""Maximum size of the quotes, colons and commas that the map's JSON text adds to one record and its key, in
bytes."""

OUTLINE_BYTES = 1024
"""Maximum size of the JSON text of a map without records, with the commas of epoch results, in bytes."""

_ENCODE = msgspec.json.Encoder().encode


class MapSize:
    """Bytes of the JSON text of a map's records."""

    def __init__(self, cluster: ClusterMap | None = None) -> None:
        self._of: dict[str, int] = {}
        self.total = 0
        self.stores = 0
        """Part of `total` for stores, lists of arrays and bundles, in bytes."""
        if cluster is not None:
            self.take(difference(ClusterMap(), cluster))

    def take(self, change: Change) -> None:
        """Update the size for a changed map."""
        for key, record in changed_records(change):
            self._set(key, len(key) + len(_ENCODE(record)) if record is not None else 0)

    def _set(self, key: str, size: int) -> None:
        more = size - self._of.pop(key, 0)
        self.total += more
        if key.startswith(("stores/", "bundles/")):
            self.stores += more
        if size:
            self._of[key] = size

    @property
    def most_text(self) -> int:
        """Upper bound of the size of the whole map's JSON text, names and marks included, in bytes."""
        return self.total + MARKS_BYTES * len(self._of) + OUTLINE_BYTES

    def refusal(self, key: str, size: int) -> str:
        """Return why the map has no room for a record; empty if it has.

        Args:
            key: Key of the record; a record whose key has no slash always has room.
        """
        held = self._of.get(key, 0)
        most = MOST_MAP_BYTES + (GROWTH_BYTES if held else 0)
        if "/" not in key or size <= held:
            return ""
        if key.startswith("stores/") and self.stores + size - held > STORES_BYTES:
            return (
                f"the map holds {self.stores} bytes of stores; a record of {size} more would exceed "
                f"{STORES_BYTES >> 20} MiB: delete a store"
            )
        if self.total + size - held <= most:
            return ""
        return (
            f"the map holds {self.total} bytes; a record of {size} more would exceed {most >> 20} MiB: "
            "end what is not needed, or start the cluster again"
        )

    def __repr__(self) -> str:
        return f"<MapSize {self.total}>"
