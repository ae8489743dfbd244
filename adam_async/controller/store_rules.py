"""Pure: the rules of stores: their records, their placement on servers, and their phases.

A setter of a key returns a new map, or a text on the record's fault; a standing rule returns a new map.
`state` calls the changed key's setter, then the standing rules.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import msgspec

from adam_async.controller.bundle_rules import (
    bytes_of_bundles,
    check_bundles,
    free_bytes,
    lost_bundles,
    overhead_bytes,
    used_bytes,
)
from adam_async.errors import LOST_SHARDS, LOST_STORE, lost_copies_text
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.shard_table import (
    bytes_of_buckets,
    bytes_of_vectors,
    fault_of_shards,
    shard_sizes,
    spread,
)
from adam_async.run.store_checks import MAX_SHARDS, check_store, fault_of_vectors
from adam_async.run.store_record import (
    NUM_BUCKETS,
    STORE_PIECES,
    ArraysPiece,
    BundleRecord,
    StorePhase,
    StoreRecord,
    VectorRecord,
    bundle_key,
    joined_arrays,
)

MOST_STORES = 128
"""Maximum number of stores. The record of a server names all its stores."""

CLIENT_STORES = 120
"""Maximum number of clients' stores; the remaining ones are for programs."""

CREATOR_STORES = 64
"""Maximum number of one client's stores."""

UNFINISHED_PIECES = 2 * STORE_PIECES
"""Maximum number of pieces of stores without a record in the map; beyond it, old pieces leave the map."""

PIECE_NUMBERS = frozenset(map(str, range(STORE_PIECES)))
"""Numbers of the pieces of an array list, as text."""


class _MapFields(TypedDict, total=False):
    """Fields of `ClusterMap` that a store rule sets."""

    nodes: dict[str, NodeRecord]
    stores: dict[str, StoreRecord]
    arrays: dict[str, ArraysPiece]
    bundles: dict[str, BundleRecord]
    placements: int


class _StoreFields(TypedDict, total=False):
    """Fields of `StoreRecord` that a rule in this file sets."""

    phase: StorePhase
    buckets: tuple[str, ...]
    generation: int
    epoch: int
    reason: str
    lost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placing:
    """A choice of servers for a store."""

    buckets: tuple[str, ...] = ()
    copies: tuple[tuple[str, ...], ...] = ()
    """Servers of each bundle; the home comes first."""
    problem: str = ""
    """Why the live servers cannot hold the store; empty if they can, or if too few servers are live."""


# --- records -------------------------------------------------------------------------------------


def set_piece(cluster: ClusterMap, key: str, new: ArraysPiece) -> ClusterMap | str:
    """Return the map with a new piece of an array list, or what is wrong with the piece."""
    name = key.split("/")[1]
    store = cluster.stores.get(name)
    if store is not None and (store.id == new.store or store.phase != "failed"):
        return f"store {name!r} exists: delete it first, or open it with create='never'"
    piece = msgspec.structs.replace(new, changed=cluster.version + 1)
    return _with(cluster, arrays={**_pieces_of(cluster, name, new.store), key: piece})


def drop_unfinished(cluster: ClusterMap) -> ClusterMap:
    """Apply the rule `drop`: remove old pieces of stores whose creators have set no record.

    Each live creator has room for one store's pieces. If there are too many creators, those with the most
    pieces lose their oldest pieces first, so that no creator can displace the others.
    """
    ids = {store.id for store in cluster.stores.values()}
    unfinished: dict[str, list[tuple[int, str]]] = {}
    gone: set[str] = set()
    for key, piece in cluster.arrays.items():
        if piece.store in ids:
            continue
        creator = cluster.nodes.get(piece.creator)
        # Only drivers set pieces without a creator.
        if piece.creator and (creator is None or not creator.live):
            gone.add(key)
        else:
            unfinished.setdefault(piece.creator, []).append((piece.changed, key))
    for pieces in unfinished.values():
        pieces.sort()
        gone.update(key for _, key in pieces[:-STORE_PIECES])
        del pieces[:-STORE_PIECES]
    while sum(map(len, unfinished.values())) > UNFINISHED_PIECES:
        most = max(unfinished.values(), key=lambda pieces: (len(pieces), -pieces[0][0]))
        gone.add(most.pop(0)[1])
    if not gone:
        return cluster
    return _with(cluster, arrays={key: piece for key, piece in cluster.arrays.items() if key not in gone})


def set_store(cluster: ClusterMap, name: str, new: StoreRecord) -> ClusterMap | str:
    """Create or delete a store, or replace a failed one; any other change of a store is a fault."""
    old = cluster.stores.get(name)
    if new.phase == "deleted":
        if old is None or old.id != new.id:
            return f"there is no store {new.id[:80]}"
        if cluster.in_progress and cluster.run is not None and cluster.run.id == old.program:
            return (
                f"store {name!r} belongs to {old.program}, which is in progress; it can go when that is over"
            )
        return without_stores(cluster, {name})
    if old is not None and (old.id, old.fixed) == (new.id, new.fixed) and new.vectors != old.vectors:
        return _set_vectors(cluster, name, old, new.vectors)
    if old is not None and (old.id == new.id or old.phase != "failed"):
        return f"store {name!r} exists: delete it first, or open it with create='never'"
    problem = (_share_problem(cluster, new) if old is None else "") or check_store(new)
    if problem:
        return problem
    if any(store.id == new.id for other, store in cluster.stores.items() if other != name):
        return f"another store has the id {new.id}"
    arrays = joined_arrays(name, new, cluster.arrays)
    sizes = shard_sizes(arrays, new.shard_bytes)
    shards = sizes.total()
    if shards > MAX_SHARDS:
        return (
            f"shard_bytes={new.shard_bytes} cuts its {new.nbytes} bytes into {shards} shards; "
            f"raise it, so that there are at most {MAX_SHARDS}"
        )
    if problem := fault_of_shards(arrays, new.shard_bytes) or fault_of_vectors(new, arrays):
        return problem
    clean = msgspec.structs.replace(
        new,
        phase="placing",
        buckets=(),
        generation=0,
        epoch=0,
        reason="",
        lost="",
        shards=shards,
        bucket_bytes=bytes_of_buckets(sizes),
        vector_bytes=bytes_of_vectors(new.vectors, arrays, new.shard_bytes),
        changed=cluster.version + 1,
    )
    problem = _placing_of(cluster, name, clean).problem
    if problem:
        return problem
    arrays_left = _pieces_of(cluster, name, new.id)
    cluster = without_stores(cluster, {name})
    return _with(cluster, stores={**cluster.stores, name: clean}, arrays=arrays_left)


def _set_vectors(
    cluster: ClusterMap, name: str, old: StoreRecord, vectors: tuple[VectorRecord, ...]
) -> ClusterMap | str:
    """Add and delete a store's vectors; a new vector has no number yet, and gets the next one.

    The creator of a store that goes on from a disk, a pin or a file gives its vectors with their numbers.
    """
    if old.phase not in ("loading", "open"):
        return f"store {name!r} is {old.phase}"
    goes_on = old.phase == "loading" and not old.vectors_made
    made = max([each.number for each in vectors], default=0) if goes_on else old.vectors_made
    numbered = []
    for vector in vectors:
        is_new = vector not in old.vectors and not (goes_on and vector.number)
        if is_new and vector.number:
            return f"vector {vector.name[:80]!r} was deleted, or changed: delete it, and add it again"
        made += is_new
        numbered.append(msgspec.structs.replace(vector, number=made) if is_new else vector)
    arrays = joined_arrays(name, old, cluster.arrays)
    new = msgspec.structs.replace(
        old, vectors=tuple(numbered), vectors_made=made, changed=cluster.version + 1
    )
    if problem := fault_of_vectors(new, arrays):
        return problem
    new = msgspec.structs.replace(new, vector_bytes=bytes_of_vectors(new.vectors, arrays, new.shard_bytes))
    before, after = (bytes_of_bundles(store, store.buckets) for store in (old, new))
    free = free_bytes(cluster, used_bytes(cluster))
    for home in sorted(after):
        more = after[home] - before[home]
        for server, _ in cluster.bundles[bundle_key(name, home)].members:
            if more > 0 and free.get(server, more) < more:
                return (
                    f"the vectors need {more} further bytes on {server}, which has {max(free[server], 0)} "
                    "bytes free: delete a vector or a store, or add memory"
                )
            free[server] = free.get(server, more) - more
    return _with(cluster, stores={**cluster.stores, name: new})


def _share_problem(cluster: ClusterMap, new: StoreRecord) -> str:
    """Return why the map takes no further store of this kind or creator; empty if it does."""
    if len(cluster.stores) >= MOST_STORES:
        return f"the cluster has {MOST_STORES} stores: delete one"
    others = [store.creator for store in cluster.stores.values() if not store.program]
    if new.program:
        return ""
    if new.creator and others.count(new.creator) >= CREATOR_STORES:
        return f"{new.creator} has created {CREATOR_STORES} stores, and no client may have more: delete one"
    if len(others) >= CLIENT_STORES:
        return f"clients have {CLIENT_STORES} of {MOST_STORES} stores, all that are not for runs: delete one"
    return ""


def _placing_of(cluster: ClusterMap, name: str, store: StoreRecord) -> _Placing:
    """Choose the servers of a store: the least used, or if these lack memory, those with the most free."""
    servers = cluster.live("ps")
    wanted = store.servers or len(servers)
    if len(servers) < max(wanted, store.copies):
        return _Placing()
    used = used_bytes(cluster, without=name)
    free = free_bytes(cluster, used)
    least_used = sorted(servers, key=lambda server: (used[server], server))
    most_room = sorted(servers, key=lambda server: (-free[server], server))
    places = spread(store.bucket_bytes, wanted)
    for chosen in (least_used, most_room):
        homes = sorted(chosen[:wanted])
        # With fewer homes than copies, further servers hold copies only.
        ring = homes + sorted(chosen[wanted : store.copies])
        buckets = tuple(homes[place] for place in places)
        copies = tuple(_from(ring, ring.index(home), store.copies) for home in sorted(set(buckets)))
        needs: Counter[str] = Counter()
        of_bundle = bytes_of_bundles(store, buckets)
        for members in copies:
            needs.update(dict.fromkeys(members, of_bundle[members[0]]))
        lacking = [(need, server) for server, need in needs.items() if need > free[server]]
        if not lacking:
            return _Placing(buckets=buckets, copies=copies)
    need, server = max(lacking)
    of_shards = f" and {overhead_bytes(store)} for {store.shards} shards" if overhead_bytes(store) else ""
    in_copies = f" in {store.copies} copies" if store.copies > 1 else ""
    return _Placing(
        problem=f"its {store.nbytes} bytes of values need {memory_of(store)} bytes{in_copies} with the state "
        f"of their rules{of_shards}, {need} of them on {server}, which has {max(free[server], 0)} bytes "
        "free: add servers, or delete a store"
    )


def _from(ring: Sequence[str], start: int, count: int) -> tuple[str, ...]:
    """Return consecutive servers of a ring, so that each is a secondary of equally many bundles."""
    return tuple(ring[(start + step) % len(ring)] for step in range(count))


def _set_stores(cluster: ClusterMap, changed: Mapping[str, _StoreFields]) -> ClusterMap:
    """Return the map with new fields of some stores."""
    version = cluster.version + 1
    new = {
        name: msgspec.structs.replace(cluster.stores[name], changed=version, **fields)
        for name, fields in changed.items()
    }
    return _with(cluster, stores={**cluster.stores, **new}) if new else cluster


def fail_stores(cluster: ClusterMap) -> ClusterMap:
    """Apply the rule `fail`, after `bundle_rules.strike_out_lost`."""
    changes: dict[str, _StoreFields] = {}
    for name, (homes, servers) in lost_bundles(cluster).items():
        store = cluster.stores[name]
        if store.phase not in ("loading", "open"):
            continue
        if store.copies == 1:
            loss = LOST_SHARDS if store.program else LOST_STORE
        else:
            loss = lost_copies_text(homes, name, is_of_run=bool(store.program))
        lost = ", ".join(servers)
        changes[name] = {"phase": "failed", "lost": lost, "reason": f"{lost} died: {loss}"}
    return _set_stores(cluster, changes)


def place_stores(cluster: ClusterMap) -> ClusterMap:
    """Apply the rule `place`."""
    for name, store in cluster.stores.items():
        if store.phase != "placing":
            continue
        placing = _placing_of(cluster, name, store)
        if placing.problem:
            cluster = _set_stores(cluster, {name: {"phase": "failed", "reason": placing.problem}})
        elif placing.buckets:
            cluster = _with(cluster, placements=cluster.placements + 1)
            placed: _StoreFields = {
                "phase": "loading",
                "buckets": placing.buckets,
                "generation": cluster.placements,
            }
            cluster = _place_bundles(_set_stores(cluster, {name: placed}), name, placing.copies)
    return cluster


def _place_bundles(cluster: ClusterMap, name: str, copies: Sequence[tuple[str, ...]]) -> ClusterMap:
    """Create the bundles of a store, whose creator loads the values into the homes; other members join."""
    new = {}
    for servers in copies:
        members = tuple((server, cluster.nodes[server].incarnation) for server in servers)
        new[bundle_key(name, servers[0])] = BundleRecord(
            store=cluster.stores[name].id,
            in_sync=members[:1],
            joining=members[1:],
            changed=cluster.version + 1,
        )
    return _with(cluster, bundles={**cluster.bundles, **new})


def number_clients(cluster: ClusterMap) -> ClusterMap:
    """Apply the rule `number`: each new client gets the lowest free place in the clocks of its store."""
    ids = {store.id for store in cluster.stores.values() if not store.program}
    taken: dict[str, set[int]] = {}
    new: list[str] = []
    for name, node in sorted(cluster.nodes.items()):
        if node.role == "client" and node.live and node.store in ids:
            if node.placed:
                taken.setdefault(node.store, set()).add(node.replica)
            else:
                new.append(name)
    version, moved = cluster.version + 1, {}
    for name in new:
        node = cluster.nodes[name]
        places = taken.setdefault(node.store, set())
        place = next(number for number in range(len(places) + 1) if number not in places)
        places.add(place)
        moved[name] = msgspec.structs.replace(node, replica=place, placed=version, changed=version)
    return _with(cluster, nodes={**cluster.nodes, **moved}) if moved else cluster


def open_stores(cluster: ClusterMap) -> ClusterMap:
    """Apply the rule `open`, and begin the clocks of each open store with enough clients."""
    changes: dict[str, _StoreFields] = {}
    for name, store in cluster.stores.items():
        clocked = store.slack is not None and not store.program and not store.epoch
        waits = store.phase == "loading" or (store.phase == "open" and clocked)
        if not waits or not cluster.serving(store):
            continue
        if store.phase == "loading":
            changes[name] = {"phase": "open"}
        if clocked and len(cluster.pushers(store)) >= store.replicas:
            changes.setdefault(name, {})["epoch"] = 1
    return _set_stores(cluster, changes)


def memory_of(store: StoreRecord) -> int:
    """Return the bytes of a store's shards on all servers."""
    of_vectors = sum(store.vector_bytes)
    return (
        store.nbytes * (store.value_arrays + store.state_arrays) + of_vectors + overhead_bytes(store)
    ) * store.copies


def _pieces_of(cluster: ClusterMap, name: str, store: str) -> dict[str, ArraysPiece]:
    """Return the map's pieces without those of other stores of this name."""
    return {
        key: piece
        for key, piece in cluster.arrays.items()
        if key.split("/")[1] != name or piece.store == store
    }


def without_stores(cluster: ClusterMap, names: set[str]) -> ClusterMap:
    """Return the map without some stores, their lists of arrays and their bundles."""
    return msgspec.structs.replace(
        cluster,
        stores={name: store for name, store in cluster.stores.items() if name not in names},
        arrays={key: piece for key, piece in cluster.arrays.items() if key.split("/")[1] not in names},
        bundles={key: bundle for key, bundle in cluster.bundles.items() if key.split("/")[1] not in names},
    )


def _with(cluster: ClusterMap, **fields: Unpack[_MapFields]) -> ClusterMap:
    return msgspec.structs.replace(cluster, **fields)


def check_invariants(cluster: ClusterMap) -> None:
    """Assert the invariants of the stores after a command."""
    for name, store in cluster.stores.items():
        assert (store.phase in ("loading", "open")) <= bool(store.buckets), (name, store.phase)
        assert len(store.buckets) in (0, NUM_BUCKETS)
        for server in store.buckets:
            assert server in cluster.nodes, f"bucket on unknown node {server}"
        places = [
            node.replica
            for node in cluster.nodes.values()
            if node.role == "client" and node.live and node.store == store.id and node.placed
        ]
        assert len(places) == len(set(places)), f"two clients of {name} share a place: {places}"
    check_bundles(cluster)
