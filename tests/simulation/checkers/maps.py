"""Pure: checks that the cluster map never returns to an earlier state (I3, I4).

Each placement of a store has one table of buckets, each generation of a bundle one primary, and each term of
a run one dealer. The numbers of placements, generations and terms never decrease. A server is in
sync only after it was a member. A store keeps its id, its phases change in one order, and a removed store
never returns. A replaced incarnation of a node is never live again.
"""

from adam_async.controller.replicated_state import ReplicatedState
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.map_changes import changed
from adam_async.run.store_record import BundleRecord, Member, StoreRecord
from tests.simulation.scenario import Violation

PHASES = ("placing", "loading", "open", "failed")
"""Phases of a store in the map, in the only order in which they change."""


class Maps:
    """Checks the maps of all controllers, each version once."""

    def __init__(self) -> None:
        self.lost = 0
        self._map = ClusterMap()
        self._buckets: dict[int, tuple[str, tuple[str, ...]]] = {}
        """Id of the store and its buckets, by number of the placement."""
        self._removed: set[str] = set()
        """Ids of removed stores."""
        self._primaries: dict[tuple[str, str, int], Member] = {}
        """Primary by id of the store, key and generation of the bundle."""
        self._dealers: dict[tuple[str, int], tuple[str, int]] = {}
        self._over: set[tuple[str, int]] = set()
        """Replaced incarnations, by node."""

    def saw(self, replicated_state: ReplicatedState) -> None:
        """Check the map of a controller, if its version is new.

        Raises:
            Violation: The map breaks I3 or I4.
            AssertionError: The map breaks one of its own invariants.
        """
        if replicated_state.map.version <= self._map.version:
            return
        replicated_state.state.check_invariants()
        changes = replicated_state.history.since(self._map.version)
        if changes is None:
            self.follow(replicated_state.map)
            return
        for change in changes:
            self.follow(changed(self._map, change))

    def follow(self, after: ClusterMap) -> None:
        """Check that a map may follow the last one. Raises Violation."""
        before, self._map = self._map, after
        for name, node in after.nodes.items():
            was = before.nodes.get(name)
            if was is not node:
                self._check_node(name, was, node)
        if after.placements < before.placements:
            text = f"the number of placements went back from {before.placements} to {after.placements}"
            raise Violation("I4", text)
        for name in before.stores.keys() | after.stores.keys():
            if before.stores.get(name) is not after.stores.get(name):
                self._check_store(name, before.stores.get(name), after.stores.get(name))
        is_next = after.version == before.version + 1
        for key, bundle in after.bundles.items():
            if bundle is not before.bundles.get(key):
                self._check_bundle(key, before.bundles.get(key), bundle, is_next=is_next)
        self._check_dealer(before, after)

    def _check_node(self, name: str, was: NodeRecord | None, node: NodeRecord) -> None:
        if was is not None:
            if node.changed < was.changed:
                raise Violation("I4", f"{name} went back from version {was.changed} to {node.changed}")
            if node.incarnation != was.incarnation:
                self._over.add((name, was.incarnation))
            elif was.live and not node.live:
                self.lost += 1
        if node.live and (name, node.incarnation) in self._over:
            raise Violation("I4", f"{name} is live as incarnation {node.incarnation} after a later one")

    def _check_store(self, name: str, was: StoreRecord | None, store: StoreRecord | None) -> None:
        if was is not None and (store is None or store.id != was.id):
            self._removed.add(was.id)
        if store is None:
            return
        if store.id in self._removed:
            raise Violation("I4", f"store {name} is {store.id} again, which was removed")
        if was is not None and was.id == store.id and PHASES.index(store.phase) < PHASES.index(was.phase):
            raise Violation("I4", f"store {name} went back from {was.phase} to {store.phase}")
        if not store.buckets:
            return
        table = (store.id, store.buckets)
        if self._buckets.setdefault(store.generation, table) != table:
            raise Violation("I3", f"generation {store.generation} has two tables of buckets")

    def _check_bundle(
        self, key: str, was: BundleRecord | None, bundle: BundleRecord, *, is_next: bool
    ) -> None:
        """Check a bundle's new record.

        Args:
            is_next: Whether no version of the map lies between the two records.
        """
        if bundle.primary is not None:
            at = (bundle.store, key, bundle.generation)
            first = self._primaries.setdefault(at, bundle.primary)
            if first != bundle.primary:
                text = f"{first} and {bundle.primary} both are the primary of {key} in generation {at[-1]}"
                raise Violation("I3", text)
        if was is None or was.store != bundle.store:
            return
        if bundle.generation < was.generation:
            text = f"{key} went back from generation {was.generation} to {bundle.generation}"
            raise Violation("I4", text)
        alien = [member for member in bundle.in_sync if member not in was.members]
        if alien and is_next:
            raise Violation("I4", f"{alien[0]} is in sync in {key}, and had not joined")

    def _check_dealer(self, before: ClusterMap, after: ClusterMap) -> None:
        dealer, old = after.dealer, before.dealer
        if dealer is None or dealer == old:
            return
        if old is not None and old.run == dealer.run and dealer.term < old.term:
            raise Violation("I4", f"the dealer of {dealer.run} went back to term {dealer.term}")
        member = (dealer.node, dealer.incarnation)
        first = self._dealers.setdefault((dealer.run, dealer.term), member)
        if first != member:
            where = f"term {dealer.term} of {dealer.run}"
            raise Violation("I3", f"{first} and {member} both deal out groups in {where}")
