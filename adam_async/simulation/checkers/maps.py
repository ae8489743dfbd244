"""Pure: checks that the cluster map only ever goes forward (I3, I4).

Each generation has one table of buckets, and each term of a run's ledger has one leader. Neither number goes
back. A replaced incarnation of a node is never live again.
"""

from adam_async.controller.map_history import changed
from adam_async.controller.replicated_state import ReplicatedState
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.simulation.scenario import Violation


class Maps:
    """Checks the maps of all controllers, each version once."""

    def __init__(self) -> None:
        self.lost = 0
        self._map = ClusterMap()
        self._buckets: dict[int, tuple[str, ...]] = {}
        self._ledger_leaders: dict[tuple[str, int], tuple[str, int]] = {}
        self._over: set[tuple[str, int]] = set()
        """Replaced incarnations, by node."""

    def saw(self, machine: ReplicatedState) -> None:
        """Check the map of a controller, if its version is new.

        Raises:
            Violation: The map breaks I3 or I4.
            AssertionError: The map breaks one of its own invariants.
        """
        if machine.map.version <= self._map.version:
            return
        machine.state.check_invariants()
        changes = machine.history.since(self._map.version)
        if changes is None:
            self.follow(machine.map)
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
        self._check_buckets(before, after)
        self._check_ledger(before, after)

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

    def _check_buckets(self, before: ClusterMap, after: ClusterMap) -> None:
        if after.generation < before.generation:
            text = f"the generation went back from {before.generation} to {after.generation}"
            raise Violation("I4", text)
        if after.buckets and self._buckets.setdefault(after.generation, after.buckets) != after.buckets:
            raise Violation("I3", f"generation {after.generation} has two tables of buckets")

    def _check_ledger(self, before: ClusterMap, after: ClusterMap) -> None:
        ledger_record, old = after.ledger_record, before.ledger_record
        if ledger_record is None or not ledger_record.ledger_replicas:
            return
        if old is not None and old.run == ledger_record.run and ledger_record.term < old.term:
            raise Violation("I4", f"the ledger of {ledger_record.run} went back to term {ledger_record.term}")
        first = self._ledger_leaders.setdefault(
            (ledger_record.run, ledger_record.term), ledger_record.ledger_replicas[0]
        )
        if first != ledger_record.ledger_replicas[0]:
            where = f"term {ledger_record.term} of {ledger_record.run}"
            text = f"{first} and {ledger_record.ledger_replicas[0]} both lead the ledger in {where}"
            raise Violation("I3", text)
