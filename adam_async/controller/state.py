"""Pure: the rules of the cluster map: members, stores and their placement; rules of programs are handed in.

A state machine: `apply` takes one command and returns the events that it caused. After each command the
standing rules run, each of which reads the map and may change it:

    fail      a store has failed if a server with the only copy of some shards is lost
    place     enough servers are live and have the memory: the store's buckets get their primaries
    number    a new client of a store gets a place in the store's clocks
    open      all servers of a store hold values for all its shards: the store is open
    forget    the map drops departed nodes, except the last `DEPARTED_KEPT` of each role and those in use

The controllers know nothing of models or of training. A *program* is a kind of work with records of its own,
such as a training run; its `Rules` are pure functions of the map that this file calls after its own.

With one copy of each shard a lost primary means lost values, so the store fails and names the server.

The loss of a node is a command, `NodeLost`; `failure_detector` decides when to propose it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack, assert_never

import msgspec

from adam_async.controller.records import check_node
from adam_async.errors import LOST_SHARDS, LOST_STORE, ConfigError
from adam_async.run.bundle_record import BundleRecord, bundle_key
from adam_async.run.cluster_map import NO_SLOT, ClusterMap, NodeRecord
from adam_async.run.shard_table import NUM_BUCKETS, bytes_of_buckets, count_shards, spread
from adam_async.run.store_record import (
    MOST_ARRAYS,
    STORE_PIECES,
    ArrayRecord,
    ArraysPiece,
    StorePhase,
    StoreRecord,
    check_rule,
    is_store_name,
    joined_arrays,
)

INCARNATIONS_KEPT = 16
"""Maximum number of ended incarnations that the map keeps of a node."""

DEPARTED_KEPT = 64
"""Maximum number of departed nodes of each role in the map; the last ones to leave stay."""

MAX_SHARDS = 100_000
"""Maximum number of shards of a store. Creating it blocks the controller for a fifth of a second."""

MOST_STORES = 128
"""Maximum number of stores. The record of a server names all that it holds."""

UNFINISHED_PIECES = 2 * STORE_PIECES
"""Maximum number of pieces of stores without a record in the map; the oldest leave."""

MOST_STORE_ID = 160
"""Maximum length of a store's id and of its creator's, in bytes of UTF-8, as in messages."""

MOST_RULES = 256
"""Maximum number of rules of a store."""


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


Command = CompareAndSet | NodeLost


@dataclass(frozen=True, slots=True)
class Changed:
    """The map has a new version."""

    version: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """A compare-and-set came too late: its key has changed."""

    key: str
    version: int


@dataclass(frozen=True, slots=True)
class Invalid:
    """A compare-and-set named no key of the map, or held a value of another type."""

    reason: str


Event = Changed | Conflict | Invalid


class _MapFields(TypedDict, total=False):
    """Fields of `ClusterMap` that a rule of this file sets."""

    nodes: dict[str, NodeRecord]
    stores: dict[str, StoreRecord]
    arrays: dict[str, ArraysPiece]
    bundles: dict[str, BundleRecord]
    placements: int


class _StoreFields(TypedDict, total=False):
    """Fields of `StoreRecord` that a rule of this file sets."""

    phase: StorePhase
    buckets: tuple[str, ...]
    generation: int
    epoch: int
    reason: str
    lost: str


@dataclass(frozen=True, slots=True)
class _Placing:
    """A choice of servers for a store."""

    buckets: tuple[str, ...] = ()
    problem: str = ""
    """Reason why the live servers cannot hold it; empty if they can, or too few are live to know."""


class Rules(Protocol):
    """The rules of a program. All methods are pure: the same map gives the same map on every controller."""

    keys: str
    """Its keys, as text for a refusal."""

    def version(self, cluster: ClusterMap, key: str) -> int | None:
        """Return the version of a key's record, 0 if there is none; None if the program has no such key."""
        ...

    def set(self, cluster: ClusterMap, key: str, value: Any) -> ClusterMap | str:
        """Return the map with a new record for a key, or the fault of the value.

        Raises:
            msgspec.ValidationError: The value is no record of that key.
        """
        ...

    def check_node(self, record: NodeRecord) -> str:
        """Return the fault of a node's record for the program; empty if it has none."""
        ...

    def lost(self, cluster: ClusterMap) -> ClusterMap:
        """Return the map after the loss of nodes or stores: the program strikes them out, or fails."""
        ...

    def standing(self, cluster: ClusterMap) -> ClusterMap:
        """Apply the standing rules."""
        ...

    def in_use(self, cluster: ClusterMap) -> frozenset[str]:
        """Return the nodes that the map has to keep after their departure."""
        ...

    def lines(self, before: ClusterMap, after: ClusterMap) -> Iterable[str]:
        """Return a log line for each important change of the program from one map to the next."""
        ...

    def check_invariants(self, cluster: ClusterMap) -> None:
        """Assert the invariants after a command."""
        ...


class ControllerState:
    """The map.

    Args:
        rules: Rules of the programs that may run in the cluster.
    """

    def __init__(self, *, rules: Rules) -> None:
        self._rules = rules
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
                self._node_lost(command)
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
            own = "nodes/<id>, stores/<name>, stores/<name>/<n>"
            return Invalid(f"no key {key[:200]!r}; there are {own}, {self._rules.keys}")
        if version != command.expected:
            return Conflict(key, version)
        kind, _, name = key.partition("/")
        problem = ""
        try:
            if kind == "nodes":
                problem = self._set_node(name, msgspec.convert(command.value, NodeRecord))
            elif kind == "stores":
                store, _, number = name.partition("/")
                if number:
                    problem = self._set_piece(key, store, msgspec.convert(command.value, ArraysPiece))
                else:
                    problem = self._set_store(store, msgspec.convert(command.value, StoreRecord))
            else:
                new = self._rules.set(self.map, key, command.value)
                if isinstance(new, str):
                    problem = new
                else:
                    self.map = new
        except (msgspec.ValidationError, ConfigError) as error:
            problem = str(error)
        return Invalid(f"{key}: {problem}") if problem else None

    def _version(self, key: str) -> int | None:
        """Return the version of a key's record, 0 without one; None if there is no such key."""
        kind, _, name = key.partition("/")
        old: NodeRecord | StoreRecord | ArraysPiece | None
        if kind == "nodes" and name:
            old = self.map.nodes.get(name)
        elif kind == "stores":
            store, slash, number = name.partition("/")
            if not is_store_name(store) or (slash and number not in PIECE_NUMBERS):
                return None
            old = self.map.arrays.get(key) if slash else self.map.stores.get(store)
        else:
            return self._rules.version(self.map, key)
        return old.changed if old is not None else 0

    # --- members -------------------------------------------------------------------------------

    def _set_node(self, name: str, new: NodeRecord) -> str:
        old = self.map.nodes.get(name)
        problem = check_node(new) or self._rules.check_node(new)
        if problem:
            return problem
        before = old.before if old is not None else ()
        if new.incarnation in before:
            return f"a later incarnation of {name} has joined; start this one again"
        if old is not None and old.incarnation != new.incarnation:
            before = (*before, old.incarnation)[-INCARNATIONS_KEPT:]
        new = msgspec.structs.replace(new, before=before, changed=self.map.version + 1)
        if old is not None and old.live and old.incarnation != new.incarnation:
            # The old incarnation was not reported lost yet, but its state is lost all the same.
            self._node_lost(NodeLost(name, old.incarnation))
            self._fail_stores()
            self.map = self._rules.lost(self.map)
        if old is not None and old.incarnation == new.incarnation and old.live and old.store == new.store:
            new = msgspec.structs.replace(
                new, replica=old.replica, partition=old.partition, placed=old.placed
            )
        else:
            new = msgspec.structs.replace(new, **NO_SLOT)
        self._set(nodes={**self.map.nodes, name: new})
        return ""

    def _node_lost(self, command: NodeLost) -> None:
        node = self.map.nodes.get(command.node)
        if node is None or not node.live or node.incarnation != command.incarnation:
            return
        dead = msgspec.structs.replace(node, live=False, changed=self.map.version + 1)
        self._set(nodes={**self.map.nodes, command.node: dead})

    def _forget_departed(self) -> None:
        """Remove nodes that left long ago from the map, except those in use.

        A removed node can join again as a new one; the map also drops its ended incarnations.
        """
        kept = {name for store in self.map.stores.values() for name in store.buckets}
        kept |= self._rules.in_use(self.map)
        departed: dict[str, list[tuple[int, str]]] = {}
        for name, node in self.map.nodes.items():
            if not node.live and name not in kept:
                departed.setdefault(node.role, []).append((node.changed, name))
        gone = {name for of_role in departed.values() for _, name in sorted(of_role)[:-DEPARTED_KEPT]}
        if gone:
            self._set(nodes={name: node for name, node in self.map.nodes.items() if name not in gone})

    def _set(self, **fields: Unpack[_MapFields]) -> None:
        self.map = msgspec.structs.replace(self.map, **fields)

    # --- stores --------------------------------------------------------------------------------

    def _set_piece(self, key: str, name: str, new: ArraysPiece) -> str:
        store = self.map.stores.get(name)
        if store is not None and (store.id == new.store or store.phase != "failed"):
            return f"store {name!r} exists: delete it first, or open it with create='never'"
        kept = _pieces_of(self.map, name, new.store)
        self._set(arrays={**kept, key: msgspec.structs.replace(new, changed=self.map.version + 1)})
        self._forget_unfinished()
        return ""

    def _forget_unfinished(self) -> None:
        """Remove the oldest pieces of stores whose creators have set no record."""
        ids = {store.id for store in self.map.stores.values()}
        unfinished = [
            (piece.changed, key) for key, piece in self.map.arrays.items() if piece.store not in ids
        ]
        gone = {key for _, key in sorted(unfinished)[:-UNFINISHED_PIECES]}
        if gone:
            self._set(arrays={key: piece for key, piece in self.map.arrays.items() if key not in gone})

    def _set_store(self, name: str, new: StoreRecord) -> str:
        """Create, replace or delete a store. All that may change of a present one is its deletion."""
        old = self.map.stores.get(name)
        if new.phase == "deleted":
            if old is None or old.id != new.id:
                return f"there is no store {new.id[:80]}"
            self.map = without_stores(self.map, {name})
            return ""
        if old is not None and (old.id == new.id or old.phase != "failed"):
            return f"store {name!r} exists: delete it first, or open it with create='never'"
        if len(self.map.stores) >= MOST_STORES and old is None:
            return f"the cluster has {MOST_STORES} stores: delete one"
        problem = check_store(new)
        if problem:
            return problem
        if any(store.id == new.id for other, store in self.map.stores.items() if other != name):
            return f"another store has the id {new.id}"
        arrays = self._arrays_of(name, new)
        shards = sum([count_shards(array, new.shard_bytes) for array in arrays])
        if shards > MAX_SHARDS:
            return (
                f"shard_bytes={new.shard_bytes} cuts its {new.nbytes} bytes into {shards} shards; "
                f"raise it, so that there are at most {MAX_SHARDS}"
            )
        clean = msgspec.structs.replace(
            new,
            phase="placing",
            buckets=(),
            generation=0,
            epoch=0,
            reason="",
            lost="",
            bucket_bytes=bytes_of_buckets(arrays, shard_bytes=new.shard_bytes),
            changed=self.map.version + 1,
        )
        problem = self._placing_of(name, clean).problem
        if problem:
            return problem
        self._set(stores={**self.map.stores, name: clean}, arrays=_pieces_of(self.map, name, new.id))
        return ""

    def _arrays_of(self, name: str, store: StoreRecord) -> tuple[ArrayRecord, ...]:
        pieces = [self.map.arrays.get(f"stores/{name}/{number}") for number in range(min(store.pieces, 99))]
        return joined_arrays(store, pieces)

    def _placing_of(self, name: str, store: StoreRecord) -> _Placing:
        """Choose the servers of a store: the least used, or if it does not fit, those with the most room."""
        servers = self.map.live("ps")
        if len(servers) < max(store.servers, 1):
            return _Placing()
        used = self._used_bytes(without=name)
        free = {
            server: int(self.map.nodes[server].info.get("memory_bytes", UNKNOWN_BYTES)) - used[server]
            for server in servers
        }
        wanted = store.servers or len(servers)
        least_used = sorted(servers, key=lambda server: (used[server], server))[:wanted]
        most_room = sorted(servers, key=lambda server: (-free[server], server))[:wanted]
        places = spread(store.bucket_bytes, wanted)
        for chosen in (sorted(least_used), sorted(most_room)):
            buckets = tuple(chosen[place] for place in places)
            needs = _bytes_on_servers(store, buckets)
            lacking = [(need, server) for server, need in needs.items() if need > free[server]]
            if not lacking:
                return _Placing(buckets)
        need, server = max(lacking)
        return _Placing(
            problem=f"its {store.nbytes} bytes of values need {memory_of(store)} bytes with the state of "
            f"their rules, {need} of them on {server}, which has {max(free[server], 0)} bytes free: "
            "add servers, or delete a store"
        )

    def _used_bytes(self, *, without: str) -> Counter[str]:
        """Return the bytes that the stores except one need on each server."""
        used: Counter[str] = Counter()
        for name, store in self.map.stores.items():
            is_dropped = store.phase == "failed" and not store.program
            if name != without and not is_dropped:
                used.update(_bytes_on_servers(store, store.buckets))
        return used

    def _set_stores(self, changed: Mapping[str, _StoreFields]) -> None:
        """Set fields of some stores."""
        version = self.map.version + 1
        new = {
            name: msgspec.structs.replace(self.map.stores[name], changed=version, **fields)
            for name, fields in changed.items()
        }
        if new:
            self._set(stores={**self.map.stores, **new})

    # --- standing rules ----------------------------------------------------------------------

    def _run_rules(self) -> None:
        self._fail_stores()
        self.map = self._rules.lost(self.map)
        self._place_stores()
        self._number_clients()
        self._open_stores()
        self.map = self._rules.standing(self.map)

    def _fail_stores(self) -> None:
        nodes = self.map.nodes
        lost = {
            name: next((each for each in sorted(set(store.buckets)) if not nodes[each].live), "")
            for name, store in self.map.stores.items()
            if store.phase in ("loading", "open")
        }
        changes: dict[str, _StoreFields] = {}
        for name, server in lost.items():
            if server:
                remedy = LOST_SHARDS if self.map.stores[name].program else LOST_STORE
                changes[name] = {"phase": "failed", "lost": server, "reason": f"{server} died: {remedy}"}
        self._set_stores(changes)

    def _place_stores(self) -> None:
        for name, store in self.map.stores.items():
            if store.phase != "placing":
                continue
            placing = self._placing_of(name, store)
            if placing.problem:
                self._set_stores({name: {"phase": "failed", "reason": placing.problem}})
            elif placing.buckets:
                placements = self.map.placements + 1
                self._set(placements=placements)
                self._set_stores(
                    {name: {"phase": "loading", "buckets": placing.buckets, "generation": placements}}
                )
                self._place_bundles(name)

    def _place_bundles(self, name: str) -> None:
        store, version = self.map.stores[name], self.map.version + 1
        new = {
            bundle_key(name, home): BundleRecord(
                store=store.id, in_sync=((home, self.map.nodes[home].incarnation),), changed=version
            )
            for home in sorted(set(store.buckets))
        }
        others = {
            key: bundle for key, bundle in self.map.bundles.items() if not key.startswith(f"bundles/{name}/")
        }
        self._set(bundles={**others, **new})

    def _number_clients(self) -> None:
        """Give each new client of a store the lowest free place in the clocks of the store."""
        ids = {store.id for store in self.map.stores.values() if not store.program}
        taken: dict[str, set[int]] = {}
        new: list[str] = []
        for name, node in sorted(self.map.nodes.items()):
            if node.role == "client" and node.live and node.store in ids:
                if node.placed:
                    taken.setdefault(node.store, set()).add(node.replica)
                else:
                    new.append(name)
        version, moved = self.map.version + 1, {}
        for name in new:
            node = self.map.nodes[name]
            places = taken.setdefault(node.store, set())
            place = next(number for number in range(len(places) + 1) if number not in places)
            places.add(place)
            moved[name] = msgspec.structs.replace(node, replica=place, placed=version, changed=version)
        if moved:
            self._set(nodes={**self.map.nodes, **moved})

    def _open_stores(self) -> None:
        """Open each store with values for all shards, and begin its clocks when its clients have come."""
        changes: dict[str, _StoreFields] = {}
        for name, store in self.map.stores.items():
            if store.phase not in ("loading", "open") or not self.map.serving(store):
                continue
            if store.phase == "loading":
                changes[name] = {"phase": "open"}
            clocked = store.slack is not None and not store.program and not store.epoch
            if clocked and len(self.map.pushers(store)) >= store.replicas:
                changes.setdefault(name, {})["epoch"] = 1
        self._set_stores(changes)

    # --- invariants --------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert the invariants after a command."""
        for name, store in self.map.stores.items():
            assert (store.phase in ("loading", "open")) <= bool(store.buckets), (name, store.phase)
            assert len(store.buckets) in (0, NUM_BUCKETS)
            for server in store.buckets:
                assert server in self.map.nodes, f"bucket on unknown node {server}"
            places = [
                node.replica
                for node in self.map.nodes.values()
                if node.role == "client" and node.live and node.store == store.id and node.placed
            ]
            assert len(places) == len(set(places)), f"two clients of {name} share a place: {places}"
        self._rules.check_invariants(self.map)


PIECE_NUMBERS = frozenset(map(str, range(STORE_PIECES)))
"""Numbers of the pieces of a list of arrays, as text."""

KERNELS = ("auto", "numpy", "numba")
"""Kernels of the rules that a store may name."""

UNKNOWN_BYTES = 1 << 50
"""Bytes of memory of a server that reports none."""


def _bytes_on_servers(store: StoreRecord, buckets: Sequence[str]) -> Counter[str]:
    """Return the bytes that a store needs on each of its servers, with the state of its rules."""
    needs: Counter[str] = Counter()
    for name, size in zip(buckets, store.bucket_bytes, strict=False):
        needs[name] += size * (1 + store.state_arrays)
    return needs


def memory_of(store: StoreRecord) -> int:
    """Return the bytes of a store's values with the state of their rules, on all servers."""
    return store.nbytes * (1 + store.state_arrays) * store.copies


def check_store(store: StoreRecord) -> str:
    """Return the fault of the record of a new store without its arrays; empty if it has none."""
    for field in ("id", "creator"):
        text = getattr(store, field)
        if not text.isprintable():
            return f"its {field} {text[:80]!r} has an unprintable character"
        length = len(text.encode())
        if length > MOST_STORE_ID or (field == "id" and not length):
            return f"its {field} has {length} bytes; 1 to {MOST_STORE_ID} are allowed"
    if not 1 <= len(store.rules) <= MOST_RULES:
        return f"it has {len(store.rules)} rules; 1 to {MOST_RULES} are allowed"
    problem = next(filter(None, map(check_rule, store.rules)), "")
    if problem:
        return problem
    least_state = max(rule.state_arrays for rule in store.rules)
    if store.state_arrays < least_state:
        return f"state_arrays is {store.state_arrays}, and its rules keep {least_state}"
    if store.kernels not in KERNELS:
        return f"kernels is {store.kernels[:80]!r}; known: {', '.join(KERNELS)}"
    if store.summed_weight and store.slack is None:
        return f"summed_weight is {store.summed_weight} without clocks: sums need a slack"
    if store.in_place and not store.program:
        return "in_place is for the store of a program"
    bounds = (
        ("arrays", 1, MOST_ARRAYS),
        ("pieces", 1, STORE_PIECES),
        ("nbytes", 0, 1 << 53),
        ("state_arrays", 0, 8),
        ("shard_bytes", 8, 1 << 40),
        ("servers", 0, NUM_BUCKETS),
        ("copies", 1, 1),
        ("replicas", 1, 1 << 20),
        ("most_weight", 1, (1 << 32) - 1),
        ("summed_weight", 0, (1 << 32) - 1),
        ("first_epoch", 0, (1 << 32) - 1),
        ("first_clock", 0, 1 << 48),
    )
    for name, least, most in bounds:
        value = getattr(store, name)
        if not least <= value <= most:
            return f"{name} is {value}; {least} to {most} are allowed"
    if store.slack is not None and not 0 <= store.slack <= 1 << 20:
        return f"slack is {store.slack}; 0 to {1 << 20} are allowed"
    return ""


def _pieces_of(cluster: ClusterMap, name: str, store: str) -> dict[str, ArraysPiece]:
    """Return the pieces of the map without those that another store left behind under a name."""
    return {
        key: piece
        for key, piece in cluster.arrays.items()
        if key.split("/")[1] != name or piece.store == store
    }


def without_stores(cluster: ClusterMap, names: set[str]) -> ClusterMap:
    """Return the map without some stores and their lists of arrays."""
    return msgspec.structs.replace(
        cluster,
        stores={name: store for name, store in cluster.stores.items() if name not in names},
        arrays={key: piece for key, piece in cluster.arrays.items() if key.split("/")[1] not in names},
        bundles={key: bundle for key, bundle in cluster.bundles.items() if key.split("/")[1] not in names},
    )
