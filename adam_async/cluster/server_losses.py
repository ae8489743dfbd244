"""Pure: decides whether the copies of a run's shards suffice to go on after server processes have ended.

The parent of the server processes learns that one has ended before the controllers do. `ServerLosses`
therefore notes the ended incarnations, and leaves them out when it reads the newest map.
"""

from collections.abc import Iterator

from adam_async.errors import listed, lost_copies_text
from adam_async.run.bundle_record import BundleRecord, Member
from adam_async.run.cluster_map import ClusterMap


class ServerLosses:
    """The ended servers of a cluster of processes. The methods get the newest map of the cluster's driver."""

    def __init__(self) -> None:
        self._ended: set[Member] = set()

    def note(self, cluster: ClusterMap, node: str) -> None:
        """Note that the process of a server has ended."""
        if node in cluster.nodes:
            self._ended.add((node, cluster.nodes[node].incarnation))

    def loss(self, cluster: ClusterMap) -> str:
        """Return a text about the shards of the run that have no copy left; empty if there are none."""
        homes = [home for home, bundle in _bundles_of(cluster) if not self._left(bundle)]
        store = cluster.run_store
        return lost_copies_text(homes, store.id, is_of_run=True) if homes and store is not None else ""

    def suffice(self, cluster: ClusterMap) -> bool:
        """Return whether all pushes of the run can go on with the servers that are left."""
        store, bundles = cluster.run_store, tuple(_bundles_of(cluster))
        if store is None or not bundles:
            return False
        return all(len(self._left(bundle)) >= store.min_in_sync_in_force for _, bundle in bundles)

    def successors(self, cluster: ClusterMap, node: str) -> tuple[str, ...]:
        """Return the servers that go on with the shards of which an ended server was the primary."""
        found: dict[str, None] = {}
        for _, bundle in _bundles_of(cluster):
            if bundle.primary is not None and bundle.primary[0] == node:
                found.update(dict.fromkeys(self._left(bundle)))
        return tuple(found)

    def _left(self, bundle: BundleRecord) -> list[str]:
        return [member[0] for member in bundle.in_sync if member not in self._ended]


def successors_text(servers: tuple[str, ...]) -> str:
    """Return a text about the servers that go on with the shards of a lost server; empty without servers."""
    return f"; its shards go on with {listed(servers)}" if servers else ""


def _bundles_of(cluster: ClusterMap) -> Iterator[tuple[str, BundleRecord]]:
    """Yield home and record of each bundle of the run in progress, once its store was opened."""
    store = cluster.run_store
    if store is None or not cluster.in_progress or store.phase not in ("open", "failed"):
        return
    for home in sorted(set(store.buckets)):
        bundle = cluster.bundle(store.id, home)
        if bundle is not None:
            yield home, bundle
