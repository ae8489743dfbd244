"""Pure: the primary of a bundle and the lack of copies, as clients of the bundle see them."""

from typing import NamedTuple

from adam_async.run.cluster_map import ClusterMap


class Primary(NamedTuple):
    """The server that answers the clients of a bundle."""

    node: str
    incarnation: int
    address: str
    """Address of the server's listener."""


def primary_of(cluster: ClusterMap, store: str, home: str) -> Primary | None:
    """Return the primary of a bundle, by the id of its store and its home; None while there is none."""
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
