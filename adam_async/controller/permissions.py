"""Pure: the permission table: which role sets which key of the cluster map, with which fields.

    key            ps    data   worker   driver                         client   reader
    nodes/<id>     own   own    own      own, and the death of others   own      own
    stores/<name>  -     -      -        all                            clients' -
    bundles/<...>  own   -      -        -                              -        -
    run, run/<n>   -     -      -        all                            -        -
    epoch          -     all    -        the end of a pause             -        -
    lending        -     all    -        -                              -        -

*Own* is the record of the node of that id, with the role and the incarnation of the link. Clients' stores are
those of no program, with their pieces; a client creates them in its own name, and the id of a store whose
pieces it sets begins with this name and a hyphen. A server's own bundles are those in which it is in sync;
`bundle_rules.may_change` has the changes of a primary and of the others. A controller sets nothing here. The
leader asks `verdict` before it proposes a command. If the verdict depends on the present record, the command
names the version of that record: a command for an older version changes nothing, and the client of one for a
newer version tries again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from adam_async.controller.bundle_rules import may_change
from adam_async.controller.records import is_piece
from adam_async.run.bundle_record import BundleRecord
from adam_async.run.cluster_map import ClusterMap, EpochRecord, NodeRecord
from transport import Identity

FORBIDDEN = "forbidden"
"""Code of a refusal by the table; the controller then closes the link."""

BEHIND = "busy"
"""Code of a refusal by a leader that does not know the named version yet; the client tries again."""


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

_MapRecord = TypeVar("_MapRecord", NodeRecord, EpochRecord)

_Rule = Callable[[Attempt, ClusterMap], str]
"""Function from an attempt and the cluster map to `_RIGHT`, `_WRONG` or `_LATER`."""

_RIGHT, _WRONG, _LATER = "right", "wrong", "later"

NAMED = ("nodes", "stores", "bundles")
"""Kinds of keys with a name behind a slash."""

MEANT = {
    "nodes": "the node of that id sets it, with its own role and incarnation; a driver may report its death",
    "stores": "drivers set it; clients create stores of no program in their own name, and delete them",
    "bundles": "its primary sets it; a server in sync may replace the primary by itself",
    "run": "drivers set it",
    "epoch": "data servers set it; a driver may end a pause",
    "lending": "data servers set it",
}
"""Permission for each kind of key, as text for refusals."""


def verdict(attempt: Attempt, cluster: ClusterMap) -> Refusal | None:
    """Return the refusal of an attempt; None if the leader may propose it.

    An unknown key passes: the map refuses it itself.
    """
    kind = attempt.key.partition("/")[0]
    if kind not in MEANT or ((kind in NAMED) != ("/" in attempt.key) and not is_piece(attempt.key)):
        return None
    found = _found_by_table(kind, attempt, cluster)
    if found is _WRONG:
        return Refusal(FORBIDDEN, f"{attempt.peer} may not set {attempt.key} so: {MEANT[kind]}")
    if found is _LATER:
        return Refusal(BEHIND, f"version {attempt.expected} of {attempt.key} is not known here yet")
    return None


def _found_by_table(kind: str, attempt: Attempt, cluster: ClusterMap) -> str:
    rule = TABLE.get((kind, attempt.peer.role))
    return rule(attempt, cluster) if rule is not None else _WRONG


def _own_node(attempt: Attempt, cluster: ClusterMap) -> str:
    peer, value = attempt.peer, attempt.value
    if attempt.key != f"nodes/{peer.node}":
        return _WRONG
    if not _is_record_of(value, peer):
        return _WRONG
    old = cluster.nodes.get(peer.node)
    if old is None:
        # A record of another role may be committed and not applied here yet. If this controller has applied
        # the expected version, the record has left the map, and the attempt is a conflict.
        return _LATER if attempt.expected > cluster.version else _RIGHT
    return _RIGHT if old.role == peer.role else _WRONG


def _is_record_of(value: Mapping[str, Any], peer: Identity) -> bool:
    return value.get("role") == peer.role and value.get("incarnation") == peer.incarnation


def _own_node_or_a_death(attempt: Attempt, cluster: ClusterMap) -> str:
    if attempt.key == f"nodes/{attempt.peer.node}":
        return _own_node(attempt, cluster)
    if attempt.value.get("live") is not False:
        return _WRONG
    old = cluster.nodes.get(attempt.key.removeprefix("nodes/"))
    dead = msgspec.structs.replace(old, live=False) if old is not None else None
    return _makes_only(attempt, old, dead)


def _end_of_a_pause(attempt: Attempt, cluster: ClusterMap) -> str:
    old = cluster.epoch
    resumed = msgspec.structs.replace(old, paused=0) if old is not None else None
    return _makes_only(attempt, old, resumed)


def _store_of_clients(attempt: Attempt, cluster: ClusterMap) -> str:
    _, name, *piece = attempt.key.split("/")
    value, old = attempt.value, cluster.stores.get(name)
    run = cluster.run.id if cluster.run is not None else ""
    if value.get("program") or (old is not None and old.program):
        return _WRONG
    if run and run in (name, value.get("id")):
        return _WRONG  # the run's driver creates this store
    if piece:
        of_peer = str(value.get("store", "")).startswith(f"{attempt.peer.node}-")
        return _RIGHT if of_peer else _WRONG
    created = value.get("phase", "placing") != "deleted"
    return _WRONG if created and value.get("creator") != attempt.peer.node else _RIGHT


def _own_bundle(attempt: Attempt, cluster: ClusterMap) -> str:
    old = cluster.bundles.get(attempt.key)
    if old is None or attempt.expected != old.changed:
        # A version that this controller has applied, and that the record does not have, is a mere conflict.
        return _LATER if attempt.expected > cluster.version else _RIGHT
    try:
        new = msgspec.convert(attempt.value, BundleRecord)
    except msgspec.ValidationError:
        return _WRONG
    return _RIGHT if may_change((attempt.peer.node, attempt.peer.incarnation), old, new) else _WRONG


def _anything(attempt: Attempt, cluster: ClusterMap) -> str:
    return _RIGHT


def _makes_only(attempt: Attempt, old: _MapRecord | None, permitted: _MapRecord | None) -> str:
    """Return `_RIGHT` if an attempt turns the record that it expects into the permitted one."""
    known = old.changed if old is not None else 0
    if attempt.expected != known:
        return _RIGHT if attempt.expected < known else _LATER  # an older version is a mere conflict
    if permitted is None:
        return _WRONG
    try:
        new = msgspec.convert(attempt.value, type(permitted))
    except msgspec.ValidationError:
        return _WRONG
    return _RIGHT if new == permitted else _WRONG


TABLE: Mapping[tuple[str, str], _Rule] = {
    ("nodes", "ps"): _own_node,
    ("nodes", "data"): _own_node,
    ("nodes", "worker"): _own_node,
    ("nodes", "driver"): _own_node_or_a_death,
    ("nodes", "client"): _own_node,
    ("nodes", "reader"): _own_node,
    ("stores", "driver"): _anything,
    ("stores", "client"): _store_of_clients,
    ("bundles", "ps"): _own_bundle,
    ("run", "driver"): _anything,
    ("epoch", "data"): _anything,
    ("epoch", "driver"): _end_of_a_pause,
    ("lending", "data"): _anything,
}
"""Rules by kind of key and role of the link; a role without a rule may not set the key."""
