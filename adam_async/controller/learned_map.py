"""Pure: the first map of a restarted single controller without a folder, which it learns from servers.

Theory of operation
-------------------
A controller without a folder loses the cluster map when its process ends. But the servers still hold the
stores' values, and the newest map that each has received. So a single controller founds its group only after
a wait, in which an earlier controller's servers report this map and the positions of their logs.

*The map.* All reported maps belong to one history, so the newest one decides about all stores. The newest
map's stores, bundles, servers and clients become the first map; programs and their roles do not. Clients keep
their places in the clocks and their push sessions.

*Numbers.* The first version is `AHEAD` above the newest reported one, and all bundles get one generation,
half as far above it. A bundle or store gets a new number only with a new version. So the numbers are also
above those of changes that no reporting server has heard of.

*Primaries.* The primary of the newest record continues, if it reports: no member has entries that it lacks.
Otherwise the member in sync with the highest generation and position leads, and a member whose entries end
before the new primary's log begins must join again. A member that does not report is lost.

*The wait.* The wait lasts `LISTEN_S`, in which each server with a link to the earlier controller reports. The
wait is longer if the newest map names a server with copies that has not reported, or if only other roles of
an earlier controller have come. The wait then lasts as long as nodes have to find a group's new leader.

A group of several controllers never founds itself this way: its majority has the map.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from adam_async.controller.records import check_node
from adam_async.controller.replicated_state import GROWTH_BYTES, MapSize
from adam_async.controller.state import ControllerState, NodeLost
from adam_async.controller.store_rules import MOST_STORES
from adam_async.errors import ConfigError
from adam_async.messages import Standing
from adam_async.messages.body import MOST_MAP_BYTES
from adam_async.run.cluster_map import STORE_ROLES, ClusterMap
from adam_async.run.shard_table import bytes_of_buckets, bytes_of_vectors, fault_of_shards, shard_sizes
from adam_async.run.store_checks import MAX_SHARDS, check_store, fault_of_vectors
from adam_async.run.store_record import (
    NUM_BUCKETS,
    SPARE_MEMBERS,
    BundleRecord,
    Member,
    StoreRecord,
    bundle_key,
    is_store_name,
    joined_arrays,
)

LISTEN_S = 3.0
"""Time in which servers or clients of an earlier controller must begin to come, in seconds. Members without a
controller dial it twice a second."""

AHEAD = 1 << 20
"""Number of versions by which the first map is above the newest reported one: more than an earlier controller
may have made without any of the reporting servers."""

PLAUSIBLE, PLAUSIBLE_EACH_S = 1 << 40, 1 << 20
"""Highest version that a report may name: the first number, plus the second one per second since 1970. A
false report below it leaves later controllers room, because the bound rises faster than maps change."""

MOST_REPORTS = 1024
"""Maximum number of servers whose reports a controller takes."""

MOST_LOGS = 1 << 17
"""Maximum number of logs in all reports; the stores of a map have 73,728 at most."""

MOST_PLACES = 1 << 20
"""Number of places in a store's clocks."""


class StoresReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one server to a controller that learns the stores."""

    map: ClusterMap
    """The newest map that the server has received, as `stores_of` returns it."""
    standings: dict[str, Standing] = {}
    """Logs of the server, by their bundles' keys."""


def stores_of(cluster: ClusterMap) -> ClusterMap:
    """Return the clients' stores in a map, with their servers and clients, without programs."""
    stores = {name: store for name, store in cluster.stores.items() if not store.program}
    return ClusterMap(
        version=cluster.version,
        placements=cluster.placements,
        nodes={name: node for name, node in cluster.nodes.items() if node.role in STORE_ROLES},
        stores=stores,
        arrays={
            key: piece
            for key, piece in cluster.arrays.items()
            if (store := stores.get(key.split("/")[1])) is not None and store.id == piece.store
        },
        bundles={key: each for key, each in cluster.bundles.items() if key.split("/")[1] in stores},
    )


@dataclass(slots=True)
class LearnedMap:
    """The servers' reports, and the end of the wait for them.

    Attributes:
        begun_at: Begin of the wait, in seconds on the caller's clock.
        longest_s: Maximum wait, in seconds.
        most_version: Highest plausible version, see `most_version`.
    """

    begun_at: float
    longest_s: float
    most_version: int
    newest: ClusterMap = field(default_factory=ClusterMap)
    standings: dict[Member, Mapping[str, Standing]] = field(default_factory=dict)
    """Logs of each server that has reported."""
    is_restart: bool = False
    """Whether a node of an earlier controller has come."""

    @property
    def ends_at(self) -> float:
        """End of the wait, as far as known now."""
        is_quiet = not self.missing() if self.standings else not self.is_restart
        return self.begun_at + (min(LISTEN_S, self.longest_s) if is_quiet else self.longest_s)

    def missing(self) -> list[Member]:
        """Return the servers with copies, by the newest map, that have not reported."""
        named = {member for bundle in self.newest.bundles.values() for member in bundle.members}
        return sorted(named - self.standings.keys())

    def report(self, server: Member, report: StoresReport) -> str:
        """Take a server's report; return the fault for which it is refused, empty if none."""
        if len(self.standings) >= MOST_REPORTS and server not in self.standings:
            return f"{MOST_REPORTS} servers have reported, and no more may"
        logs = sum(len(each) for other, each in self.standings.items() if other != server)
        if logs + len(report.standings) > MOST_LOGS:
            return f"all reports would have {logs + len(report.standings)} logs; {MOST_LOGS} are the most"
        fault = fault_of(report, most_version=self.most_version, checked=self.newest)
        if not fault:
            self.standings[server] = report.standings
            if report.map.version > self.newest.version:
                self.newest = report.map
        return fault

    def first_map(self) -> ClusterMap:
        """Return the map with which the group begins; without reports it is empty."""
        if not self.standings:
            return ClusterMap()
        newest = self.newest
        version = newest.version + AHEAD
        bundles = {
            key: msgspec.structs.replace(
                bundle,
                in_sync=self._led(key, bundle),
                generation=newest.version + AHEAD // 2,
                changed=version,
            )
            for key, bundle in newest.bundles.items()
        }
        state = ControllerState()
        state.map = msgspec.structs.replace(newest, version=version, bundles=bundles)
        for name, node in newest.nodes.items():
            if node.role == "ps" and node.live and (name, node.incarnation) not in self.standings:
                state.apply(NodeLost(name, node.incarnation))
        return state.map

    def _led(self, key: str, bundle: BundleRecord) -> tuple[Member, ...]:
        """Return a bundle's members in sync, the next primary first, and those that have not reported."""
        in_sync, standings = bundle.in_sync, self.standings
        present = [member for member in in_sync if member in standings]
        if present and present[0] != bundle.primary:  # the primary itself has all entries
            at = {member: standings[member].get(key, Standing()) for member in present}
            first = max(present, key=lambda member: (at[member].generation, at[member].last))
            reached = [each for each in present if each != first and at[each].committed >= at[first].start]
            absent = [member for member in in_sync if member not in standings]
            in_sync = (first, *reached, *absent)
        return in_sync


def most_version(wall_s: float) -> int:
    """Return the highest plausible version of a map at a time, in seconds since 1970."""
    return PLAUSIBLE + PLAUSIBLE_EACH_S * int(max(wall_s, 0.0))


# --- checks of reports ---------------------------------------------------------------------------


def fault_of(report: StoresReport, *, most_version: int, checked: ClusterMap) -> str:
    """Return the first fault of a report; empty if a map may begin with it.

    The map's present rules made every correct record, so a record that breaks one is false.

    Args:
        report: The report.
        most_version: Highest plausible version, see `most_version`.
        checked: A map without a fault.
    """
    cluster = report.map
    if not 0 < cluster.version <= most_version or not 0 <= cluster.placements <= cluster.version:
        return f"its map has version {cluster.version} and {cluster.placements} placements"
    if unknown := report.standings.keys() - cluster.bundles.keys():
        return f"it has a log of {min(unknown)[:80]!r}, of which its map has no bundle"
    if cluster.version < max((each.generation for each in report.standings.values()), default=0):
        return f"a log has a generation above the version {cluster.version} of its map"
    if cluster == checked:  # checking every server's copy of one map would block the loop for seconds
        return ""
    if (size := MapSize(cluster).total) > MOST_MAP_BYTES + GROWTH_BYTES:
        return f"its records have {size} bytes"
    if cluster != stores_of(cluster):
        return "it names a program, or nodes or arrays that belong to no store"
    return _fault_of_nodes(cluster) or _fault_of_stores(cluster)


def _fault_of_nodes(cluster: ClusterMap) -> str:
    places = set()
    for name, node in cluster.nodes.items():
        if fault := check_node(node):
            return f"node {name[:80]!r}: {fault}"
        if max(node.changed, node.placed) > cluster.version or node.partition or not name:
            return f"node {name[:80]!r} has changed or was placed after version {cluster.version}"
        if node.placed and node.live:
            place = node.store, node.replica
            if not 0 <= node.replica < MOST_PLACES or place in places:
                return f"node {name[:80]!r} has the place {node.replica} in the clocks, which it cannot have"
            places.add(place)
    return ""


def _fault_of_stores(cluster: ClusterMap) -> str:
    homes: dict[str, StoreRecord] = {}
    if len({store.id for store in cluster.stores.values()}) < len(cluster.stores) or (
        len(cluster.stores) > MOST_STORES
    ):
        return f"it names {len(cluster.stores)} stores, or one of them twice; {MOST_STORES} are the most"
    for name, store in cluster.stores.items():
        if fault := _fault_of_store(cluster, name, store):
            return f"store {name[:80]!r}: {fault}"
        homes.update((bundle_key(name, home), store) for home in store.buckets)
    if homes.keys() != cluster.bundles.keys():
        return f"bundle {min(homes.keys() ^ cluster.bundles.keys())[:80]!r} and its store do not fit"
    for key, bundle in cluster.bundles.items():
        store, nodes = homes[key], {node for node, _ in bundle.members}
        if bundle.store != store.id or not max(bundle.generation, bundle.changed) <= cluster.version:
            return f"bundle {key[:80]!r} is of another store, or later than its map"
        if not len(nodes) == len(bundle.members) <= store.copies + SPARE_MEMBERS:
            return f"bundle {key[:80]!r} names {len(bundle.members)} members"
        if len(bundle.lost) > store.copies or (not bundle.in_sync and store.phase != "failed"):
            return f"bundle {key[:80]!r} has {len(bundle.in_sync)} members in sync, and {store.phase}"
        live = [cluster.nodes.get(node) for node in nodes]
        if any(node is None or node.role != "ps" for node in live):
            return f"bundle {key[:80]!r} names a member that is no server"
    return ""


def _fault_of_store(cluster: ClusterMap, name: str, store: StoreRecord) -> str:
    if not is_store_name(name) or store.phase == "deleted" or store.changed > cluster.version:
        return f"its name, its phase {store.phase} or its version {store.changed} is none of a map"
    if not 0 <= store.generation <= cluster.placements or store.epoch not in (0, 1):
        return f"its generation is {store.generation}, and its epoch {store.epoch}"
    if not set(store.buckets) <= cluster.nodes.keys():
        return "a bucket is on an unknown server"
    try:
        if fault := check_store(store):
            return fault
        arrays = joined_arrays(name, store, cluster.arrays)
        if (store.buckets or store.phase in ("loading", "open")) and len(store.buckets) != NUM_BUCKETS:
            return f"it names the servers of {len(store.buckets)} buckets instead of {NUM_BUCKETS}"
        if fault := fault_of_shards(arrays, store.shard_bytes) or fault_of_vectors(store, arrays):
            return fault
        sizes = shard_sizes(arrays, store.shard_bytes)
    except (ConfigError, ValueError) as error:
        return str(error)
    if sizes.total() > MAX_SHARDS:
        return f"its arrays have {sizes.total()} shards; {MAX_SHARDS} are the most"
    if (store.shards, store.bucket_bytes) != (sizes.total(), bytes_of_buckets(sizes)):
        return f"its arrays have {sizes.total()} shards, and its record {store.shards}"
    if store.vector_bytes != bytes_of_vectors(store.vectors, arrays, store.shard_bytes):
        return f"its {len(store.vectors)} vectors have other bytes than its record"
    return ""
