"""Pure: the rules of the cluster map: members, stores and their placement; programs have separate rules.

A state machine: `apply` takes one command and returns the events that it caused. After each command that
changes the map, the standing rules run; each rule reads the map and may change it:

    strike    a lost server is no member of bundles; the next member in sync follows a lost primary
    fail      a store has failed if all members in sync of one of its bundles are lost
    drop      a list of arrays without a store leaves the map with its creator
    place     enough servers are live and have the memory: the store's bundles get their members
    number    a new client of a store gets a place in the store's clocks
    open      the primaries of a store hold values for all its shards: the store is open
    forget    the map drops departed nodes, except the last `DEPARTED_KEPT` of each role and those in use

The controllers know nothing of models. The rules of the training run (`training_rules`) are pure functions of
the map that this file calls between its own and after them.

The loss of a node is a command, `NodeLost`; `failure_detector` decides when to propose it.
"""

from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from adam_async.controller import bundle_rules, store_rules, training_rules
from adam_async.controller.records import check_node
from adam_async.errors import ConfigError
from adam_async.messages import USERS
from adam_async.option_types import read_record
from adam_async.run.cluster_map import NO_SLOT, ClusterMap, EpochRecord, NodeRecord
from adam_async.run.store_record import ArraysPiece, BundleRecord, StoreRecord, is_store_name
from adam_async.run.training_program import ProgramPiece, ProgramRecord, is_piece

INCARNATIONS_KEPT = 16
"""Maximum number of ended incarnations that the map keeps of a node."""

DEPARTED_KEPT = 64
"""Maximum number of departed nodes per role in the map, except nodes in use; the latest stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAndSet:
    """Set `key` to `value` if its record still has version `expected`; 0 if the key must be absent."""

    key: str
    expected: int
    value: Any


@dataclass(frozen=True, slots=True)
class NodeLost:
    """An incarnation of the node is lost."""

    node: str
    incarnation: int
    at: float = 0.0
    """Time of the loss, in seconds since 1970; 0 if unknown."""


Command = CompareAndSet | NodeLost


@dataclass(frozen=True, slots=True)
class Changed:
    """The map has a new version."""

    version: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """A compare-and-set expected another version of its key, or was made from an outdated map."""

    key: str
    version: int


@dataclass(frozen=True, slots=True)
class Invalid:
    """A compare-and-set named no key of the map, or its value breaks a rule of the map."""

    reason: str


Event = Changed | Conflict | Invalid


class ControllerState:
    """The cluster map and its rules."""

    def __init__(self) -> None:
        self.map = ClusterMap()

    # --- commands ----------------------------------------------------------------------------

    def apply(self, command: Command) -> list[Event]:
        """Apply one command, then the standing rules. The same commands give the same map."""
        before = self.map
        match command:
            case CompareAndSet():
                problem = self._compare_and_set(command)
                if problem is not None:
                    return [problem]
            case NodeLost():
                self.map = _without_node(self.map, command)
            case _:
                assert_never(command)
        if self.map is before:
            return []
        self._run_rules()
        self._forget_departed()
        self.map = msgspec.structs.replace(self.map, version=before.version + 1)
        return [Changed(self.map.version)]

    def _compare_and_set(self, command: CompareAndSet) -> Conflict | Invalid | None:
        key = command.key
        version = self._version(key)
        if version is None:
            own = "nodes/<id>, stores/<name>, stores/<name>/<n>, bundles/<store>/<home>, run, run/<n>, epoch"
            return Invalid(f"no key {key[:200]!r}; there are {own}")
        if version != command.expected:
            return Conflict(key, version)
        kind, _, name = key.partition("/")
        try:
            new: ClusterMap | str
            if kind == "nodes":
                new = self._set_node(name, msgspec.convert(command.value, NodeRecord))
            elif kind == "stores" and "/" in name:
                new = store_rules.set_piece(self.map, key, msgspec.convert(command.value, ArraysPiece))
            elif kind == "stores":
                new = store_rules.set_store(self.map, name, read_record(StoreRecord, command.value))
            elif kind == "bundles":
                bundle = msgspec.convert(command.value, BundleRecord)
                new = bundle_rules.set_bundle(self.map, key, bundle)
                if not isinstance(new, str) and bundle_rules.is_outdated(self.map, key, bundle):
                    return Conflict(key, version)
            elif key == "run":
                new = training_rules.set_program(self.map, msgspec.convert(command.value, ProgramRecord))
            elif key == "epoch":
                new = training_rules.set_epoch(self.map, msgspec.convert(command.value, EpochRecord))
            else:
                new = training_rules.set_piece(self.map, key, msgspec.convert(command.value, ProgramPiece))
        except (msgspec.ValidationError, ConfigError) as error:
            new = str(error)
        if isinstance(new, str):
            return Invalid(f"{key}: {new}")
        self.map = new
        return None

    def _version(self, key: str) -> int | None:
        """Return the version of a key's record, 0 without a record; None if the key does not exist."""
        kind, _, name = key.partition("/")
        if kind == "nodes":
            exists = bool(name)
        elif kind == "stores":
            store, slash, number = name.partition("/")
            exists = is_store_name(store) and (not slash or number in store_rules.PIECE_NUMBERS)
        elif kind == "bundles":
            store, _, home = name.partition("/")
            exists = is_store_name(store) and bool(home)
        else:
            exists = key in ("run", "epoch") or is_piece(key)
        return self.map.version_of(key) if exists else None

    # --- members -------------------------------------------------------------------------------

    def _set_node(self, name: str, new: NodeRecord) -> ClusterMap | str:
        cluster, old = self.map, self.map.nodes.get(name)
        problem = check_node(new) or training_rules.check_node(new)
        if problem:
            return problem
        if old is not None and old.role != new.role:
            if not _gives_way(name, old, new, in_use=name in self._in_use()):
                return f"{name} is the name of a {old.role}: choose another one, such as {new.role}-1 (--id)"
            # The incarnations of another role say nothing about those of this one.
            cluster, old = self._lost(cluster, name, old), None
        before = old.before if old is not None else ()
        if new.incarnation in before:
            return f"a later incarnation of {name} has joined; start this one again"
        if old is not None and old.incarnation != new.incarnation:
            before = (*before, old.incarnation)[-INCARNATIONS_KEPT:]
            # If the old incarnation is live, it was not reported lost yet, but its state is lost.
            cluster = self._lost(cluster, name, old)
        new = msgspec.structs.replace(new, before=before, changed=cluster.version + 1)
        if old is not None and old.incarnation == new.incarnation and old.live and old.store == new.store:
            new = msgspec.structs.replace(
                new, replica=old.replica, partition=old.partition, placed=old.placed
            )
        else:
            new = msgspec.structs.replace(new, **NO_SLOT)
        return msgspec.structs.replace(cluster, nodes={**cluster.nodes, name: new})

    def _lost(self, cluster: ClusterMap, name: str, node: NodeRecord) -> ClusterMap:
        """Return the map without a node whose name another node takes; the same map if it has departed."""
        if not node.live:
            return cluster
        cluster = _without_node(cluster, NodeLost(name, node.incarnation))
        return training_rules.fail_if_lost(store_rules.fail_stores(bundle_rules.strike_out_lost(cluster)))

    def _in_use(self) -> set[str]:
        """Return the nodes that the map needs after their departure."""
        homes = {name for store in self.map.stores.values() for name in store.buckets}
        return homes | training_rules.in_use(self.map)

    def _forget_departed(self) -> None:
        """Remove nodes that left long ago from the map, except those in use.

        A removed node can join again as a new one; the map also drops its ended incarnations.
        """
        kept = self._in_use()
        departed: dict[str, list[tuple[int, str]]] = {}
        for name, node in self.map.nodes.items():
            if not node.live and name not in kept:
                departed.setdefault(node.role, []).append((node.changed, name))
        gone = {name for of_role in departed.values() for _, name in sorted(of_role)[:-DEPARTED_KEPT]}
        if gone:
            nodes = {name: node for name, node in self.map.nodes.items() if name not in gone}
            self.map = msgspec.structs.replace(self.map, nodes=nodes)

    # --- standing rules ----------------------------------------------------------------------

    def _run_rules(self) -> None:
        for rule in (
            bundle_rules.strike_out_lost,
            store_rules.fail_stores,
            store_rules.drop_unfinished,
            training_rules.fail_if_lost,
            store_rules.place_stores,
            store_rules.number_clients,
            store_rules.open_stores,
            training_rules.standing,
        ):
            self.map = rule(self.map)

    # --- invariants --------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert the invariants after a command."""
        store_rules.check_invariants(self.map)
        training_rules.check_invariants(self.map)


def _gives_way(name: str, old: NodeRecord, new: NodeRecord, *, in_use: bool) -> bool:
    """Return whether a node gives up its name to a node of another role.

    A name that begins with a role, such as worker-1, is reserved for that role. Any other name is free after
    its node has departed; a program that uses stores at once gives up such a name to the cluster's roles.
    """
    named = name.partition("-")[0]
    if named in (old.role, new.role):
        return named == new.role
    if old.role in USERS and new.role not in USERS:
        return True
    # Other records name a departed node by its incarnation.
    return not old.live and not in_use and old.incarnation != new.incarnation


def _without_node(cluster: ClusterMap, lost: NodeLost) -> ClusterMap:
    """Return the map with a lost incarnation as departed; the same map if it had departed already."""
    node = cluster.nodes.get(lost.node)
    if node is None or not node.live or node.incarnation != lost.incarnation:
        return cluster
    dead = msgspec.structs.replace(node, live=False, lost_at=lost.at, changed=cluster.version + 1)
    return msgspec.structs.replace(cluster, nodes={**cluster.nodes, lost.node: dead})
