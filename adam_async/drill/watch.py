"""The newest cluster map of a drill, with waits for its changes, and the failovers that the maps show."""

import asyncio
from collections.abc import Callable, Mapping

from adam_async.drill.failovers import FailoverCount
from adam_async.errors import DeadlineExceeded
from adam_async.run.bundle_record import BundleRecord
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import StoreRecord

StoreOf = Callable[[ClusterMap], StoreRecord | None]
"""Function that returns the store of a drill in a map, or None before the store exists."""


class MapWatch:
    """Receives cluster maps in their order.

    Args:
        store_of: Finds the store of the drill.
    """

    def __init__(self, store_of: StoreOf) -> None:
        self.map = ClusterMap()
        self.failovers = FailoverCount()
        self._store_of = store_of
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def copies(self) -> int:
        """Number of copies of each shard; 0 before the store exists."""
        store = self._store_of(self.map)
        return store.copies if store is not None else 0

    @property
    def bundles(self) -> Mapping[str, BundleRecord]:
        """The placed bundles of the store, by home."""
        store = self._store_of(self.map)
        if store is None:
            return {}
        found = {home: self.map.bundle(store.id, home) for home in sorted(set(store.buckets))}
        return {home: bundle for home, bundle in found.items() if bundle is not None}

    @property
    def is_whole(self) -> bool:
        """Whether the store is open, and each of its bundles has all copies in sync."""
        store, bundles = self._store_of(self.map), self.bundles
        if store is None or store.phase != "open" or not bundles:
            return False
        return all(len(bundle.in_sync) >= store.copies for bundle in bundles.values())

    def see(self, cluster: ClusterMap) -> None:
        """Take a newer map."""
        self.map = cluster
        self.failovers.observe(self.bundles)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until the newest map satisfies a condition.

        Raises:
            DeadlineExceeded: No map satisfied the condition in time; the error contains `what`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(changed)
                    await changed
        except TimeoutError:
            raise DeadlineExceeded(what, timeout_s) from None
