"""Pure: counts the bytes of the cluster map's records, and refuses a record that the map has no room for.

The size is a function of the map, so all controllers refuse the same records, also after a restart. Each
change updates the size, because encoding the whole map takes long.
"""

from collections import deque

import msgspec
from msgspec import UNSET

from adam_async.controller.map_history import Change, difference
from adam_async.messages.bounds import MOST_MAP_BYTES
from adam_async.run.cluster_map import RESULTS_KEPT, ClusterMap, RunRecord

GROWTH_BYTES = 1 << 20
"""Bytes by which present records may grow in a full map: members continue, and no node joins."""

STORES_BYTES = MOST_MAP_BYTES // 2
"""Maximum size of all stores with lists of arrays and bundles, in bytes: nodes must have room to join."""

MARKS_BYTES = 16
"""Maximum size of the quotes, colons and commas around one record, with the key of a piece, in bytes."""

OUTLINE_BYTES = 1024
"""Maximum size of a map without records as JSON text, with the commas between results, in bytes."""

_ENCODE = msgspec.json.Encoder().encode


class MapSize:
    """Bytes of the JSON text of a map's records."""

    def __init__(self, cluster: ClusterMap | None = None) -> None:
        self._of: dict[str, int] = {}
        self._results: deque[int] = deque(maxlen=RESULTS_KEPT)
        self.total = 0
        self.stores = 0
        """Bytes of the stores among them."""
        if cluster is not None:
            self.take(difference(ClusterMap(), cluster))

    def take(self, change: Change) -> None:
        """Update the size for a changed map."""
        for name in change.gone:
            self._set(f"nodes/{name}", 0)
        for name, node in change.nodes.items():
            self._set(f"nodes/{name}", len(name) + len(_ENCODE(node)))
        for key in (*(f"stores/{name}" for name in change.stores_gone), *change.arrays_gone):
            self._set(key, 0)
        for name, store in change.stores.items():
            self._set(f"stores/{name}", len(name) + len(_ENCODE(store)))
        for key, array_piece in change.arrays.items():
            self._set(key, len(key) + len(_ENCODE(array_piece)))
        for key in change.bundles_gone:
            self._set(key, 0)
        for key, bundle in change.bundles.items():
            self._set(key, len(key) + len(_ENCODE(bundle)))
        self._take_run(change)
        for key, value in (
            ("epoch", change.epoch),
            ("lending", change.ledger_record),
        ):
            if value is not UNSET:
                self._set(key, len(_ENCODE(value)) if value else 0)
        if change.results is not UNSET:
            if not change.more_results:
                self._results.clear()
            self._results.extend(len(_ENCODE(result)) for result in change.results)
            self._set("results", sum(self._results))
        if change.pieces is not UNSET:
            for key in [key for key in self._of if key.startswith("run/") and key not in change.pieces]:
                self._set(key, 0)
            for key, piece in change.pieces.items():
                self._set(key, len(_ENCODE(piece)))

    def _take_run(self, change: Change) -> None:
        run = change.run
        if not isinstance(run, RunRecord):
            if run is None:
                self._set("run", 0)
                self._set("fixed", 0)
            return
        alone = len(_ENCODE(run.without_fixed()))
        if not change.same_run:
            self._set("fixed", len(_ENCODE(run)) - alone)
        self._set("run", alone)

    def _set(self, key: str, size: int) -> None:
        more = size - self._of.pop(key, 0)
        self.total += more
        if key.startswith(("stores/", "bundles/")):
            self.stores += more
        if size:
            self._of[key] = size

    @property
    def most_text(self) -> int:
        """Upper bound of the JSON text of the whole map, in bytes, with names and marks between records."""
        return self.total + MARKS_BYTES * len(self._of) + OUTLINE_BYTES

    def refusal(self, key: str, size: int) -> str:
        """Return why the map has no room for a record; empty if it has.

        Args:
            key: Key of the record. The run, its epoch and its ledger record always have room.
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
