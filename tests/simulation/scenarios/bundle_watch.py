"""Observations of all bundles' copies in a run, over all incarnations of their servers.

Checkers follow every map and every entry that a copy applies; the states of copies are compared at intervals.
Faults use the observations to choose a server that may be lost, and to strike at a moment of the replication.
"""

from collections.abc import Iterator, Sequence

from adam_async.controller.bundle_rules import other_numerics
from adam_async.controller.consensus import Core, Effect, Event
from adam_async.controller.replicated_state import ReplicatedState
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.replication.local_copy import Entry, Log
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import BundleRecord, Member
from tests.simulation.checkers.bundles import Bundles
from tests.simulation.checkers.maps import Maps
from tests.simulation.faults import is_running
from tests.simulation.scenario import Ledger, Violation, World

FAILOVERS = "failovers with a push in flight"
CATCH_UPS = "catch-ups under load"
SUCCESSIVE = "successive losses"
ROUND_OTHERWISE = "members with other numerics"
FROM_DISK = "pieces of joining servers from their disks"
EVENTS = (FAILOVERS, CATCH_UPS, SUCCESSIVE)
"""Names of the event counts of bundles with several copies."""


def numerics_of(server: str) -> dict[str, str]:
    """Return the numerics that a simulated server publishes; `ps-2` differs from the others."""
    return {"blas": "another" if server == "ps-2" else "simulated"}


class BundleWatch:
    """The bundles of a run.

    Attributes:
        servers: Newest incarnation of each server, by name.
        map: Newest cluster map of any controller.
        disturbed: Servers that a fault strikes now.
        pending: Number of pushes without an answer.
        acknowledged: Number of answered pushes.
        failed: Reasons of the stores that failed, by id.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.servers: dict[str, ParameterServer] = {}
        self.map = ClusterMap()
        self.disturbed: set[str] = set()
        self.pending = self.acknowledged = 0
        self.failed: dict[str, str] = {}
        self._world = world
        self._ledger = ledger
        self._maps, self._bundles = Maps(), Bundles()
        self._incarnations: dict[str, int] = {}
        self._losses: dict[str, int] = {}
        """Number of members that each bundle has lost since it last had all copies in sync."""
        self._joining: dict[tuple[str, Member], int] = {}
        """Number of answered pushes when a member began to join, by key of the bundle."""
        self._was_whole: set[str] = set()
        """Keys of the bundles that had all copies in sync once."""

    def started(self, server: ParameterServer, member: Member) -> None:
        """Note the next incarnation of a server."""
        name, incarnation = member
        self.servers[name], self._incarnations[name] = server, incarnation

    def ended(self, name: str) -> None:
        """Record the end of a server's incarnation, before the next one opens its disk."""
        self.servers.pop(name, None)
        self._incarnations.pop(name, None)

    # --- observations ------------------------------------------------------------------------

    def applies(self, copy: BundleCopy, entry: Entry, parts: Sequence[Part]) -> None:
        """Check the next entry of a copy. Raises Violation."""
        self._bundles.applies(copy, entry, parts)
        if copy.is_primary:
            self._bundles.commits(copy, entry, self._others_in_sync(copy))

    def _others_in_sync(self, primary: BundleCopy) -> Iterator[BundleCopy]:
        """Yield the other copies of a bundle that are in sync by the newest map."""
        store = primary.record.store
        newest = self.map.bundle(store, primary.home)
        for member in newest.in_sync if newest is not None else ():
            served = self.servers[member[0]].served.get((store, primary.home)) if self.runs(member) else None
            if served is not None and served.copy is not None and served.copy is not primary:
                yield served.copy

    def saw_state(
        self, core: Core, replicated_state: ReplicatedState, event: Event | None, effects: Sequence[Effect]
    ) -> None:
        """Follow the map of a controller. Raises Violation."""
        self._maps.saw(replicated_state)
        newest = replicated_state.map
        if newest.version <= self.map.version:
            return
        before, self.map = self.map, newest
        for store in newest.stores.values() if newest.stores is not before.stores else ():
            if store.phase == "failed":
                self.failed.setdefault(store.id, store.reason)
        for key, bundle in newest.bundles.items():
            was = before.bundles.get(key)
            if was is not bundle and self._copies(key) > 1:
                self._saw_bundle(key, was, bundle)

    def _copies(self, key: str) -> int:
        """Return the number of copies that a bundle should have."""
        return self.map.stores[key.split("/", 2)[1]].copies

    def _saw_bundle(self, key: str, was: BundleRecord | None, bundle: BundleRecord) -> None:
        counts, home = self._ledger.counts, key.rpartition("/")[2]
        if was is None or was.store != bundle.store:
            was = BundleRecord(store=bundle.store)
            self._was_whole.discard(key)
        for member in set(bundle.joining) - set(was.joining):
            self._joining[key, member] = self.acknowledged
        for member in set(bundle.in_sync) - set(was.in_sync):
            begun = self._joining.pop((key, member), self.acknowledged)
            counts[FROM_DISK] += self._pieces_from_disk(member, bundle.store, home)
            if key in self._was_whole and self.acknowledged > begun:
                counts[CATCH_UPS] += 1
        counts[ROUND_OTHERWISE] += len(
            other_numerics(self.map, bundle).keys() - {node for node, _ in was.members}
        )
        lost = set(was.in_sync) - set(bundle.in_sync)
        if len(bundle.in_sync) >= self._copies(key):
            self._was_whole.add(key)
            self._losses[key] = 0
        elif lost and key in self._was_whole:
            self._losses[key] = self._losses.get(key, 0) + len(lost)
            if self._losses[key] == 2:
                counts[SUCCESSIVE] += 1
        if was.in_sync and not bundle.in_sync:
            self._check_loss(key, was)
        if was.primary is not None and bundle.primary != was.primary:
            if was.primary in lost and self.pending:
                counts[FAILOVERS] += 1
            new = bundle.primary[0] if bundle.primary is not None else "none"
            self._ledger.note("bundle", home, f"generation {bundle.generation}: {was.primary[0]} -> {new}")

    def _pieces_from_disk(self, member: Member, store: str, home: str) -> int:
        served = self.servers[member[0]].served.get((store, home)) if self.runs(member) else None
        return served.copy.pieces_from_disk if served is not None and served.copy is not None else 0

    def _check_loss(self, key: str, was: BundleRecord) -> None:
        """Check that a bundle without members in sync has lost them all. Raises Violation."""
        self._ledger.counts["bundles lost"] += 1
        well = [member for member in was.in_sync if self.is_well(member)]
        if well:
            raise Violation("a store fails without copies only", f"{key} is lost, and {well[0]} is well")

    def compare(self) -> None:
        """Compare the copies at the same position. Raises Violation."""
        for name, server in self.servers.items():
            if is_running(self._world.node(name)):
                for served in server.served.values():
                    if served.copy is not None:
                        self._bundles.compare(served.copy, served.store)
        self._ledger.counts["copies compared"] = self._bundles.compared
        self._ledger.counts["entries applied"] = self._bundles.applied

    # --- questions ---------------------------------------------------------------------------

    def runs(self, member: Member) -> bool:
        """Return whether a server's incarnation still runs, and so has its memory."""
        return is_running(self._world.node(member[0])) and self._incarnations.get(member[0]) == member[1]

    def is_well(self, member: Member) -> bool:
        """Return whether a server's incarnation runs without a fault."""
        return member[0] not in self.disturbed and self.runs(member)

    def can_spare(self, name: str) -> bool:
        """Return whether a server may be lost: each of its bundles has another well member in sync."""
        for bundle in self.map.bundles.values():
            others = [member for member in bundle.in_sync if member[0] != name]
            if len(others) < len(bundle.in_sync) and not any(map(self.is_well, others)):
                return False
        return bool(self.map.bundles)

    def led_by(self, name: str) -> list[str]:
        """Return the keys of the bundles whose primary is this server."""
        bundles = self.map.bundles.items()
        return [key for key, each in bundles if each.primary is not None and each.primary[0] == name]

    def logs(self, key: str) -> list[Log]:
        """Return the log of each of a bundle's members in sync, the primary's first.

        A member that does not run, or has no copy yet, has an empty log.
        """
        bundle, home = self.map.bundles[key], key.rpartition("/")[2]
        found = []
        for member in bundle.in_sync:
            server = self.servers.get(member[0]) if self.runs(member) else None
            served = server.served.get((bundle.store, home)) if server is not None else None
            found.append(served.copy.log if served is not None and served.copy is not None else Log())
        return found

    def lacking(self) -> str:
        """Return a text about bundles that lack copies in sync on running servers; empty if none does."""
        phases = {name: store.phase for name, store in self.map.stores.items()}
        found = [] if "open" in phases.values() else ["no store is open"]
        for key, bundle in sorted(self.map.bundles.items()):
            copies = self._copies(key)
            if phases[key.split("/", 2)[1]] == "failed":
                continue
            members = [member for member in bundle.in_sync if self.runs(member)]
            if len(members) < copies or len(members) < len(bundle.in_sync):
                nodes = ", ".join(node for node, _ in bundle.in_sync)
                found.append(f"{key} has {nodes or 'no member'} of {copies} copies in sync")
        return "; ".join(found)
