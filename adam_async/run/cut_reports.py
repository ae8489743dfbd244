"""Pure: the cuts of the stores on disks, as the servers report them in their records of the cluster map.

A *cut* is a store of bsp at one clock of all its bundles. The primary of the first bundle names the next
clock; each server with a disk reports which of its bundles are on it at which clocks.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec

from adam_async.messages.body import Clock, Count, NodeId
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.store_record import StoreRecord, served_word

CUTS = "cuts"
"""Key in `NodeRecord.info` of a server. Its value has a `CutReport` of each store, by its `served_word`."""

MOST_CUTS = 8
"""Maximum number of cuts of a bundle in a report; a disk has two, at the end of a server perhaps three."""

NO_CLOCK = -1
"""Clock of a cut that does not exist."""

ClockOrNone = Annotated[int, msgspec.Meta(ge=NO_CLOCK, le=(1 << 48) - 1)]


class NamedCut(msgspec.Struct, frozen=True, array_like=True):
    """The next cut, as the primary of the first bundle names it."""

    number: Count
    """Number of this naming, from 1; the newest one in the map counts."""
    clock: Clock
    complete: ClockOrNone
    """Newest clock at which the disks had all bundles; `NO_CLOCK` if there was none. It never decreases. The
    disks keep this cut until a later naming has a later one."""


class CutReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cuts of a store on one server."""

    named: NamedCut | None = None
    """The newest naming of this server."""
    handled: Count = 0
    """Number of the last naming that this server has taken, or given up."""
    passed: Clock = 0
    """Clock of a shard that had passed the clock of this naming; 0 if none had."""
    on_disk: dict[NodeId, Annotated[tuple[Clock, ...], msgspec.Meta(max_length=MOST_CUTS)]] = {}
    """Clocks of the cuts on the disk, by the home of the bundle."""


def report_of(node: NodeRecord, store: StoreRecord) -> CutReport | None:
    """Return the report of a server on a store; None if it has none that is valid."""
    reports = node.info.get(CUTS)
    found: Any = reports.get(served_word(store)) if isinstance(reports, dict) else None
    try:
        return msgspec.convert(found, CutReport) if found is not None else None
    except msgspec.ValidationError:
        return None


def newest_named(cluster: ClusterMap, store: StoreRecord) -> NamedCut | None:
    """Return the newest naming of a cut, also of a server that was lost since."""
    reports = [report_of(node, store) for node in cluster.nodes.values() if node.role == "ps"]
    named = [each.named for each in reports if each is not None and each.named is not None]
    return max(named, key=lambda each: each.number, default=None)


def reports_in_sync(
    cluster: ClusterMap, store: StoreRecord, homes: Collection[str]
) -> dict[str, dict[str, CutReport]]:
    """Return the reports of the members in sync, by home and server; without one the report is empty."""
    found: dict[str, dict[str, CutReport]] = {home: {} for home in homes}
    for home in homes:
        record = cluster.bundle(store.id, home)
        for name, incarnation in record.in_sync if record is not None else ():
            node = cluster.nodes.get(name)
            if node is not None and node.incarnation == incarnation:
                found[home][name] = report_of(node, store) or CutReport()
    return found


def complete_clock(reports: Mapping[str, Mapping[str, CutReport]], *, disks: int) -> int:
    """Return the newest clock at which each bundle is on enough disks; `NO_CLOCK` if there is none.

    Args:
        reports: See `reports_in_sync`.
        disks: Number of disks that are enough. Fewer members in sync are enough, too.
    """
    common: set[int] | None = None
    for home, by_server in reports.items():
        clocks = [clock for each in by_server.values() for clock in each.on_disk.get(home, ())]
        enough = max(min(disks, len(by_server)), 1)
        mine = {clock for clock in clocks if clocks.count(clock) >= enough}
        common = mine if common is None else common & mine
    return max(common or (), default=NO_CLOCK)
