"""Pure: the permission table: which role sets which key of the cluster map, with which fields.

    key            ps    data   worker   driver                         client   reader
    nodes/<id>     own   own    own      own, and the death of others   own      own
    stores/<name>  -     -      -        all but those of another's run some     -
    bundles/<...>  own   -      -        -                              -        -
    run            -     -      -        as its driver                  -        -
    run/<n>        -     -      -        all                            -        -

A controller sets no key here.

*Own* is the record of the node with that id, with the role and incarnation of the link. A server's own
bundles are those of which it is a member; `bundle_rules.may_change` has the changes that a primary and the
others may make.

*As its driver*: the record names the link's driver, with its incarnation. The rules of programs decide
whether this driver may replace another one. A driver reports the death of other roles, not of a driver.

*Some*: a client creates stores of no program, in its own name and incarnation, with its own pieces. Names and
ids of a client's stores must not be ones that a driver may give to a program. A client deletes its own
stores, and stores whose creator is no longer live, unless their program is in progress. A client adds and
deletes vectors of the store that it is in.

The leader asks the table before it proposes a command. If the refusal depends on the present record, the
command names that record's version. A command for an older version changes nothing; after a command for a
newer version the client tries again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from adam_async.controller.bundle_rules import may_change
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import BundleRecord, StoreRecord
from adam_async.run.training_program import is_piece
from transport import Identity

FORBIDDEN = "forbidden"
"""Code of a refusal by the table; the controller then closes the link."""

BEHIND = "busy"
"""Code of a refusal by a leader that has not reached the expected version yet; the client tries again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason for not setting a key: its code and its text."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A compare-and-set that a link received."""

    peer: Identity
    key: str
    value: Mapping[str, Any]
    expected: int


Permits = Callable[[Attempt, ClusterMap], Refusal | None]
"""Function from an attempt and the leader's cluster map to its refusal, or None."""

_MapRecord = TypeVar("_MapRecord", bound="HasVersion")

PermissionRule = Callable[[Attempt, ClusterMap], str]
"""Function from an attempt and the cluster map to `RIGHT`, `WRONG` or `LATER`."""

RIGHT, WRONG, LATER = "right", "wrong", "later"

NAMED = ("nodes", "stores", "bundles")
"""Kinds of keys with a name behind a slash."""

MEANT = {
    "nodes": "the node of that id sets it, with its own role and incarnation; a driver may report the death "
    "of a node of another role, with its time",
    "stores": "drivers set it, that of a run in progress only its own driver; clients create stores of no "
    "program in their own name, and delete these, and "
    "those of creators that have left",
    "bundles": "its primary sets it; a server in sync may replace the primary by itself",
    "run": "drivers set it, each with its own id and incarnation as the driver",
    "epoch": "the dealer ends it; the driver of the run may ask to lease no more groups",
}
"""Permission for each kind of key, as text for refusals."""


class HasVersion(Protocol):
    """A record of the map."""

    @property
    def changed(self) -> int:
        """Version of its last change."""
        ...


class PermissionTable:
    """Permission rules by kind of key and the link's role; a role without a rule may not set the key.

    Attributes:
        rows: All rules.
        meant: Permission for each kind of key, as text for refusals.
    """

    def __init__(self) -> None:
        self.rows = dict(TABLE)
        self.meant = dict(MEANT)

    def refusal(self, attempt: Attempt, cluster: ClusterMap) -> Refusal | None:
        """Return why an attempt is refused; None if the leader may propose it.

        An unknown key passes: the map refuses the key.
        """
        kind = attempt.key.partition("/")[0]
        is_named = "/" in attempt.key and not is_piece(attempt.key)
        if kind not in self.meant or (kind in NAMED) != is_named:
            return None
        found = self._found(kind, attempt, cluster)
        if found is WRONG:
            return Refusal(FORBIDDEN, f"{attempt.peer} may not set {attempt.key} so: {self.meant[kind]}")
        if found is LATER:
            return Refusal(BEHIND, f"version {attempt.expected} of {attempt.key} is not known here yet")
        return None

    def _found(self, kind: str, attempt: Attempt, cluster: ClusterMap) -> str:
        rule = self.rows.get((kind, attempt.peer.role))
        return rule(attempt, cluster) if rule is not None else WRONG


def _own_node(attempt: Attempt, cluster: ClusterMap) -> str:
    # The rules of the map decide between nodes of different roles.
    is_own = attempt.key == f"nodes/{attempt.peer.node}"
    return RIGHT if is_own and _is_record_of(attempt.value, attempt.peer) else WRONG


def _is_record_of(value: Mapping[str, Any], peer: Identity) -> bool:
    return value.get("role") == peer.role and value.get("incarnation") == peer.incarnation


def _own_node_or_a_death(attempt: Attempt, cluster: ClusterMap) -> str:
    if attempt.key == f"nodes/{attempt.peer.node}":
        return _own_node(attempt, cluster)
    if attempt.value.get("live") is not False:
        return WRONG
    old = cluster.nodes.get(attempt.key.removeprefix("nodes/"))
    if old is not None and old.role == "driver":
        return WRONG  # a driver that reports another driver dead could take its run
    at: Any = attempt.value.get("lost_at", 0.0)
    dead = msgspec.structs.replace(old, live=False, lost_at=at) if old is not None else None
    return _makes_only(attempt, old, dead)


def _own_program(attempt: Attempt, cluster: ClusterMap) -> str:
    """Return `RIGHT` if a driver sets a program that names it as driver, or a piece of a program."""
    if is_piece(attempt.key):
        return RIGHT
    value, peer = attempt.value, attempt.peer
    named = value.get("driver"), value.get("incarnation")
    return RIGHT if named == (peer.node, peer.incarnation) else WRONG


def _store_of_drivers(attempt: Attempt, cluster: ClusterMap) -> str:
    """Return whether a driver may set a store: any, except that of a run in progress with another driver."""
    run, peer, value = cluster.run, attempt.peer, attempt.value
    if run is None or run.over or run.driven_by == (peer.node, peer.incarnation):
        return RIGHT
    old = cluster.stores.get(attempt.key.split("/")[1])
    of_run = value.get("program") == run.id or run.id in (value.get("id"), value.get("store"))
    return WRONG if of_run or (old is not None and old.program == run.id) else RIGHT


def _store_of_clients(attempt: Attempt, cluster: ClusterMap) -> str:
    _, name, *piece = attempt.key.split("/")
    value, old, peer = attempt.value, cluster.stores.get(name), attempt.peer
    if value.get("phase", "placing") == "deleted" and not piece:
        return _deletion(attempt, old, cluster)
    if value.get("program") or (old is not None and old.program):
        return WRONG
    id = str(value.get("store" if piece else "id", ""))
    if any(cluster.is_of_program(text) for text in (name, id)):
        return WRONG
    if old is not None and not piece and id == old.id:
        return _change_of_vectors(attempt, old, cluster)
    if value.get("creator") != peer.node:
        return WRONG
    return LATER if _has_successor(peer, cluster) else RIGHT


def _change_of_vectors(attempt: Attempt, old: StoreRecord, cluster: ClusterMap) -> str:
    """Return whether a client may change a store's vectors: its creator, and each client in it."""
    if attempt.expected != old.changed:
        return (
            RIGHT if attempt.expected < old.changed else LATER
        )  # an older version is a conflict, not a fault
    try:
        new = msgspec.convert(attempt.value, StoreRecord)
    except msgspec.ValidationError:
        return WRONG
    node = cluster.nodes.get(attempt.peer.node)
    if node is None or node.incarnation != attempt.peer.incarnation:
        return LATER
    is_only = msgspec.structs.replace(new, vectors=old.vectors) == old
    return RIGHT if is_only and (node.store == old.id or old.creator == attempt.peer.node) else WRONG


def _has_successor(peer: Identity, cluster: ClusterMap) -> bool:
    """Return whether the map has another incarnation under a peer's name as live."""
    node = cluster.nodes.get(peer.node)
    return node is not None and node.live and node.incarnation != peer.incarnation


def _deletion(attempt: Attempt, old: StoreRecord | None, cluster: ClusterMap) -> str:
    """Return whether a client may delete a store: its own store, or one whose creator is not live."""
    if old is None:
        return RIGHT if attempt.expected <= cluster.version else LATER
    if attempt.expected != old.changed:
        return RIGHT if attempt.expected < old.changed else LATER
    if old.program and cluster.in_progress:
        return WRONG
    creator = cluster.nodes.get(old.creator)
    # A reader under the creator's name has created nothing.
    is_there = creator is not None and creator.live and creator.role != "reader"
    if not is_there:
        return RIGHT
    if old.creator != attempt.peer.node:
        return WRONG
    return LATER if _has_successor(attempt.peer, cluster) else RIGHT


def _own_bundle(attempt: Attempt, cluster: ClusterMap) -> str:
    old = cluster.bundles.get(attempt.key)
    if old is None or attempt.expected != old.changed:
        # This controller has applied the version, and the record has another version: a conflict, not a
        # fault.
        return LATER if attempt.expected > cluster.version else RIGHT
    try:
        new = msgspec.convert(attempt.value, BundleRecord)
    except msgspec.ValidationError:
        return WRONG
    return RIGHT if may_change((attempt.peer.node, attempt.peer.incarnation), old, new) else WRONG


def _makes_only(attempt: Attempt, old: _MapRecord | None, permitted: _MapRecord | None) -> str:
    """Return `RIGHT` if an attempt turns the record that it expects into the permitted one."""
    known = old.changed if old is not None else 0
    if attempt.expected != known:
        return RIGHT if attempt.expected < known else LATER  # an older version is a conflict, not a fault
    if permitted is None:
        return WRONG
    try:
        new = msgspec.convert(attempt.value, type(permitted))
    except msgspec.ValidationError:
        return WRONG
    return RIGHT if new == permitted else WRONG


def _end_of_dealer(attempt: Attempt, cluster: ClusterMap) -> str:
    dealer, epoch = cluster.dealer, cluster.epoch
    peer = (attempt.peer.node, attempt.peer.incarnation)
    # An attempt on an older record is a conflict: a dealer may learn late that it is replaced.
    at_present = epoch is not None and attempt.expected == epoch.changed
    mine = dealer is not None and (dealer.node, dealer.incarnation) == peer
    return WRONG if at_present and not mine else RIGHT


def _drain_of_driver(attempt: Attempt, cluster: ClusterMap) -> str:
    old, run = cluster.epoch, cluster.run
    drained = msgspec.structs.replace(old, drain=True) if old is not None else None
    found = _makes_only(attempt, old, drained)
    # Only the run's driver may change the present record; an attempt on an older record is a conflict.
    at_present = old is not None and attempt.expected == old.changed
    mine = run is not None and run.driven_by == (attempt.peer.node, attempt.peer.incarnation)
    return WRONG if found is RIGHT and at_present and not mine else found


TABLE: Mapping[tuple[str, str], PermissionRule] = {
    ("nodes", "ps"): _own_node,
    ("nodes", "data"): _own_node,
    ("nodes", "worker"): _own_node,
    ("nodes", "driver"): _own_node_or_a_death,
    ("nodes", "client"): _own_node,
    ("nodes", "reader"): _own_node,
    ("stores", "driver"): _store_of_drivers,
    ("stores", "client"): _store_of_clients,
    ("bundles", "ps"): _own_bundle,
    ("run", "driver"): _own_program,
    ("epoch", "data"): _end_of_dealer,
    ("epoch", "driver"): _drain_of_driver,
}
"""Rules by kind of key and the link's role; a role without a rule may not set the key."""
