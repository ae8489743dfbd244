"""Pure: the rules that programs of all kinds share, and the table of kinds.

A driver sets the pieces of a program's blob (``run/<n>``), then the program's record (``run``). The map has
one program at a time; its stores leave the map with it. The `Rules` of the program's kind check its terms,
begin the program, and apply the standing rules. No rule reads the blob.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from adam_async.controller.permissions import PermissionRule
from adam_async.controller.store_rules import without_stores
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.training_program import (
    ProgramPiece,
    ProgramRecord,
    check_program,
    is_piece,
    joined_blob,
)


class Rules(Protocol):
    """The rules of a kind of program. All are pure: the same map gives the same map on every controller."""

    permissions: Mapping[tuple[str, str], PermissionRule]
    """Permission rules of the kind's keys, by key and role of the link."""
    meant: Mapping[str, str]
    """Permission for each of the kind's keys, as text for refusals."""

    def version(self, cluster: ClusterMap, key: str) -> int | None:
        """Return the version of a key's record, 0 if there is none; None if the kind has no such key."""
        ...

    def set(self, cluster: ClusterMap, key: str, value: Any) -> ClusterMap | str:
        """Return the map with a new record for a key of the kind, or the fault of the value.

        Raises:
            msgspec.ValidationError: The value is no record of that key.
        """
        ...

    def check(self, program: ProgramRecord) -> str:
        """Return the fault of the terms or the phase of a program's record; empty if it has none."""
        ...

    def begin(self, cluster: ClusterMap) -> ClusterMap:
        """Return the map for a new program, without the records of the one before."""
        ...

    def check_node(self, record: NodeRecord) -> str:
        """Return the fault of a node's record for the kind; empty if it has none."""
        ...

    def lost(self, cluster: ClusterMap) -> ClusterMap:
        """Return the map after the loss of nodes or stores: the program strikes them out, or fails."""
        ...

    def standing(self, cluster: ClusterMap) -> ClusterMap:
        """Apply the standing rules."""
        ...

    def lines(self, before: ClusterMap, after: ClusterMap) -> Iterator[str]:
        """Return a log line for each important change of the program from one map to the next."""
        ...

    def check_invariants(self, cluster: ClusterMap) -> None:
        """Assert the invariants after a command."""
        ...


class ProgramRules:
    """The rules of all programs.

    Args:
        kinds: Rules by kind of program; the same on all controllers of a group.
    """

    def __init__(self, kinds: Mapping[str, Rules]) -> None:
        self._kinds = kinds
        names = [key for rules in kinds.values() for key in rules.meant]
        self.keys = ", ".join(["run", "run/<n>", *names])
        """Keys of all programs, as text for a refusal."""

    def _of(self, cluster: ClusterMap) -> Rules | None:
        """Return the rules of the program of the map; None without a program of a known kind."""
        return self._kinds.get(cluster.run.kind) if cluster.run is not None else None

    # --- records -------------------------------------------------------------------------------

    def version(self, cluster: ClusterMap, key: str) -> int | None:
        """Return the version of a key's record, 0 if there is none; None if no program has such a key."""
        if key == "run" or is_piece(key):
            return cluster.version_of(key)
        found = (rules.version(cluster, key) for rules in self._kinds.values())
        return next((version for version in found if version is not None), None)

    def set(self, cluster: ClusterMap, key: str, value: Any) -> ClusterMap | str:
        """Return the map with a new record for a key of a program, or the fault of the value.

        Raises:
            msgspec.ValidationError: The value is no record of that key.
        """
        changed = cluster.version + 1
        if key == "run":
            new = msgspec.convert(value, ProgramRecord)
            return self._set_program(cluster, msgspec.structs.replace(new, changed=changed))
        if is_piece(key):
            piece = msgspec.structs.replace(msgspec.convert(value, ProgramPiece), changed=changed)
            return msgspec.structs.replace(cluster, pieces={**cluster.pieces, key: piece})
        (rules,) = (each for each in self._kinds.values() if each.version(cluster, key) is not None)
        return rules.set(cluster, key, value)

    def _set_program(self, cluster: ClusterMap, new: ProgramRecord) -> ClusterMap | str:
        old = cluster.run
        goes_on = old is not None and old.id == new.id
        if old is not None and goes_on:
            new = new.with_fixed_of(old)
        rules = self._kinds.get(new.kind)
        if rules is None:
            return f"unknown kind of program {new.kind[:80]!r}; known: {', '.join(self._kinds)}"
        if not goes_on:
            joined = joined_blob(new, cluster.pieces)
            if isinstance(joined, str):
                return joined
            new = joined
        problem = check_program(new) or rules.check(new)
        if problem:
            return problem
        changed = msgspec.structs.replace(cluster, run=new)
        if old is not None and not old.over and new.driven_by != old.driven_by:
            if cluster.driven:
                return f"run {old.id} is in progress, and its driver {old.driver} is live"
            if not changed.driven:
                return f"its driver {new.driver} has not joined in this incarnation"
        if old is not None and goes_on:
            return _takeover_problem(old, new) or changed
        return rules.begin(msgspec.structs.replace(cluster, run=new, pieces={}))

    def check_node(self, record: NodeRecord) -> str:
        """Return the fault of a node's record for a kind of program; empty if it has none."""
        return next(filter(None, (rules.check_node(record) for rules in self._kinds.values())), "")

    # --- standing rules ------------------------------------------------------------------------

    def lost(self, cluster: ClusterMap) -> ClusterMap:
        """Return the map after the loss of nodes or stores: the program strikes them out, or fails."""
        rules = self._of(cluster)
        return rules.lost(cluster) if rules is not None else cluster

    def standing(self, cluster: ClusterMap) -> ClusterMap:
        """Drop the stores of earlier programs, and apply the standing rules of the kind."""
        rules, cluster = self._of(cluster), _drop_stores(cluster)
        return rules.standing(cluster) if rules is not None else cluster

    def in_use(self, cluster: ClusterMap) -> frozenset[str]:
        """Return the nodes that the map has to keep after their departure."""
        return frozenset({cluster.run.driver}) if cluster.run is not None else frozenset()

    def lines(self, before: ClusterMap, after: ClusterMap) -> Iterator[str]:
        """Yield a log line for each important change of the program from one map to the next."""
        rules = self._of(after)
        if rules is not None:
            yield from rules.lines(before, after)

    def check_invariants(self, cluster: ClusterMap) -> None:
        """Assert the invariants after a command."""
        rules = self._of(cluster)
        if rules is not None:
            rules.check_invariants(cluster)


def _takeover_problem(old: ProgramRecord, new: ProgramRecord) -> str:
    """Return the fault of a new record with another driver; empty for the same driver."""
    if new.driven_by == old.driven_by:
        return ""
    if old.over:
        return f"run {old.id} is over ({old.phase}): it takes no other driver"
    taken = msgspec.structs.replace(old, driver=new.driver, incarnation=new.incarnation, changed=new.changed)
    return "" if new == taken else f"a driver that takes run {old.id} over sets driver and incarnation only"


def _drop_stores(cluster: ClusterMap) -> ClusterMap:
    """Return the map without the stores of programs that are not the program of the map."""
    program = cluster.run.id if cluster.run is not None else ""
    old = {name for name, store in cluster.stores.items() if store.program and store.program != program}
    return without_stores(cluster, old) if old else cluster
