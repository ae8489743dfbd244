"""Pure: the rules of bundles in the cluster map: changes by members, lost members, and new members.

    party              change, by compare-and-set
    primary            strike out, invite and add members; hand over to another member in sync
    member in sync     become the primary, without the old one
    joining member     leave, because it cannot hold its copy
    controllers        strike out lost incarnations; a lost primary: the next member in sync follows

A change has two checks. `may_change` compares a link's caller with the record of the expected version; the
leader calls it before it proposes the command (`permissions`). `set_bundle` needs no caller, and runs in the
replicated state machine. A command for another version than the present one changes nothing. So both checks
see the same record, even if the map changes between them.

All results depend only on the map and the arguments, so all controllers and servers compute the same results.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from adam_async.run.cluster_map import NUMERICS, ClusterMap
from adam_async.run.store_record import (
    NUM_BUCKETS,
    SPARE_MEMBERS,
    BundleRecord,
    Member,
    StoreRecord,
    bundle_key,
)

UNKNOWN_BYTES = 1 << 50
"""Assumed memory of a server that reports none, in bytes."""

SHARD_OVERHEAD = 2048
"""Approximate memory that a shard takes on a server in addition to its values and rule state, in bytes."""

DOTS_OVERHEAD = 18 << 10
"""Memory of the dot products that a shard of a store with vectors keeps for repeated steps, in bytes: 512
numbers, and eight keys."""

UNCOUNTED_SHARDS = 1024
"""Number of a store's shards whose overhead is not counted, because a process needs far more."""

MOST_FACTS = 16
"""Maximum number of facts that a server may report as its numerics (`cluster_map.NUMERICS`)."""

MOST_FACT = 80
"""Maximum length of a fact in a server's numerics, and of its name, in characters."""

# --- changes by members --------------------------------------------------------------------------


def may_change(caller: Member, old: BundleRecord, new: BundleRecord) -> bool:
    """Return whether a node may turn one record of a bundle into another one.

    The primary makes any change that `fault_of_change` permits. Another member in sync may only become the
    primary and strike out the old one; it may not invite or add members. A joining member may only leave.
    """
    if caller == old.primary:
        return True
    if caller in old.joining:
        left = tuple(member for member in old.joining if member != caller)
        return new == msgspec.structs.replace(old, joining=left)
    others = set(old.in_sync[1:])
    return (
        caller in others
        and new.primary == caller
        and set(new.in_sync) == others
        and set(new.joining) <= set(old.joining)
    )


def fault_of_change(store: StoreRecord, old: BundleRecord, new: BundleRecord) -> str:
    """Return the rule that a new bundle record breaks, with the wrong values; empty if it breaks none."""
    if new.store != old.store:
        return f"store is {new.store[:80]!r}, and the bundle belongs to store {old.store}"
    if not new.in_sync:
        return "in_sync is empty: only the controllers strike out the last member"
    nodes = [node for node, _ in new.members]
    twice = next((node for node, count in Counter(nodes).items() if count > 1), None)
    if twice is not None:
        return f"server {twice[:80]!r} is named twice in in_sync and joining"
    most = store.copies + SPARE_MEMBERS
    if len(nodes) > most:
        return (
            f"in_sync and joining name {len(nodes)} members; {most} are the most with copies={store.copies}"
        )
    alien = next((member for member in new.in_sync if member not in old.members), None)
    if alien is not None:
        return f"in_sync names {_named(alien)}, which was neither in sync nor joining"
    if new.primary == old.primary:
        wanted, why = old.generation, "the primary stays"
    elif new.primary in old.in_sync:
        wanted, why = old.generation + 1, f"the primary is another one than {_named(old.in_sync[0])}"
    else:
        return f"the first of in_sync is {_named(new.in_sync[0])}, which was not in sync before"
    if new.generation != wanted:
        return f"generation is {new.generation}; it must be {wanted}, because {why}"
    return ""


def is_outdated(cluster: ClusterMap, key: str, new: BundleRecord) -> bool:
    """Return whether a change is for a failed store, or adds a lost member.

    The writer of such a change did not have the newest map, so the change is a conflict, not a fault.
    """
    added = set(new.members).difference(cluster.bundles[key].members)
    is_over = cluster.stores[_store_of(key)].phase == "failed"
    return is_over or not added <= _live_members(cluster)


def set_bundle(cluster: ClusterMap, key: str, new: BundleRecord) -> ClusterMap | str:
    """Return the map with the change of a bundle by a member, or the fault of the change."""
    old = cluster.bundles.get(key)
    if old is None:
        return "there is no such bundle: the controllers create bundles with their store"
    store = cluster.stores[_store_of(key)]
    fault = fault_of_change(store, old, new)
    if fault:
        return fault
    version = cluster.version + 1
    record = msgspec.structs.replace(new, lost=_lost_since(store, new, old.lost), changed=version)
    return msgspec.structs.replace(cluster, bundles={**cluster.bundles, key: record})


def _lost_since(store: StoreRecord, bundle: BundleRecord, lost: tuple[str, ...]) -> tuple[str, ...]:
    return () if len(bundle.in_sync) >= store.copies else lost[-store.copies :]


def _store_of(key: str) -> str:
    return key.split("/", 2)[1]


def _named(member: Member) -> str:
    return f"{member[0][:80]} (incarnation {member[1]})"


def _live_members(cluster: ClusterMap) -> set[Member]:
    return {
        (name, node.incarnation) for name, node in cluster.nodes.items() if node.role == "ps" and node.live
    }


# --- standing rules ------------------------------------------------------------------------------


def strike_out_lost(cluster: ClusterMap) -> ClusterMap:
    """Return the map without lost members of bundles; the next member in sync follows a lost primary."""
    if not cluster.bundles:
        return cluster
    live, new = _live_members(cluster), {}
    for key, bundle in cluster.bundles.items():
        if not live.issuperset(bundle.members):
            store = cluster.stores[_store_of(key)]
            new[key] = _without_lost(store, bundle, live, version=cluster.version + 1)
    return msgspec.structs.replace(cluster, bundles={**cluster.bundles, **new}) if new else cluster


def _without_lost(
    store: StoreRecord, bundle: BundleRecord, live: set[Member], *, version: int
) -> BundleRecord:
    in_sync = tuple(member for member in bundle.in_sync if member in live)
    gone = tuple(node for node, incarnation in bundle.in_sync if (node, incarnation) not in live)
    left = msgspec.structs.replace(
        bundle,
        generation=bundle.generation + bool(in_sync and in_sync[0] != bundle.primary),
        in_sync=in_sync,
        # The values of joining members are incomplete: they are useless without a member in sync.
        joining=tuple(member for member in bundle.joining if member in live) if in_sync else (),
        changed=version,
    )
    lost = (*(node for node in bundle.lost if node not in gone), *gone)
    return msgspec.structs.replace(left, lost=_lost_since(store, left, lost))


class LostBundles(NamedTuple):
    """Bundles of a store without a member in sync."""

    homes: tuple[str, ...]
    servers: tuple[str, ...]
    """Lost servers that had the last copies of these bundles, bundle by bundle, in the order of loss."""


def lost_bundles(cluster: ClusterMap) -> dict[str, LostBundles]:
    """Return the bundles without a member in sync, by their store's name."""
    homes: dict[str, list[str]] = {}
    servers: dict[str, dict[str, None]] = {}
    for key in sorted([key for key, bundle in cluster.bundles.items() if not bundle.in_sync]):
        _, name, home = key.split("/", 2)
        homes.setdefault(name, []).append(home)
        servers.setdefault(name, {}).update(dict.fromkeys(cluster.bundles[key].lost))
    return {name: LostBundles(tuple(found), tuple(servers[name])) for name, found in homes.items()}


# --- memory, and new members ---------------------------------------------------------------------


def bytes_of_bundles(store: StoreRecord, buckets: Sequence[str]) -> Counter[str]:
    """Return the bytes that a copy of each bundle of a store needs, by the bundle's home.

    Args:
        buckets: Home of each bucket.
    """
    needs: Counter[str] = Counter()
    of_vectors = store.vector_bytes or (0,) * len(store.bucket_bytes)
    for home, size, vectors in zip(buckets, store.bucket_bytes, of_vectors, strict=False):
        needs[home] += (
            size * (store.value_arrays + store.state_arrays) + vectors + overhead_bytes(store) // NUM_BUCKETS
        )
    return needs


def overhead_bytes(store: StoreRecord) -> int:
    """Return the bytes that one copy of a store's shards needs in addition to values and rule state."""
    each = SHARD_OVERHEAD + (DOTS_OVERHEAD if store.vectors else 0)
    return max(store.shards - UNCOUNTED_SHARDS, 0) * each


def used_bytes(cluster: ClusterMap, *, without: str = "") -> Counter[str]:
    """Return the bytes of bundles on each server, without the store `without` and failed client stores."""
    used: Counter[str] = Counter()
    for name, store in cluster.stores.items():
        is_dropped = store.phase == "failed" and not store.program
        if name == without or is_dropped:
            continue
        for home, need in bytes_of_bundles(store, store.buckets).items():
            for node, _ in cluster.bundles[bundle_key(name, home)].members:
                used[node] += need
    return used


def free_bytes(cluster: ClusterMap, used: Counter[str]) -> dict[str, int]:
    """Return the free bytes of each live server, from its used bytes; negative if these exceed its memory."""
    return {
        server: int(cluster.nodes[server].info.get("memory_bytes", UNKNOWN_BYTES)) - used[server]
        for server in cluster.live("ps")
    }


def next_member(
    cluster: ClusterMap, store: str, home: str, may_join: Callable[[Member], bool]
) -> Member | None:
    """Return the server that a bundle's primary should invite next; None if there is none.

    Only servers with enough memory qualify. A bundle's home comes first, even if the store has enough copies,
    so that bundles return home. Then come servers with the primary's numerics, the least used first.

    Args:
        store: Id of the store.
        may_join: Returns whether a server may be invited now.
    """
    name, record = next(
        ((name, record) for name, record in cluster.stores.items() if record.id == store), ("", None)
    )
    bundle = cluster.bundles.get(bundle_key(name, home))
    if record is None or bundle is None or bundle.primary is None or record.phase not in ("loading", "open"):
        return None
    if len(bundle.members) >= record.copies + SPARE_MEMBERS:
        return None
    is_full = len(bundle.members) >= record.copies
    members = {node for node, _ in bundle.members}
    if is_full and home in members:
        return None
    nodes, used, need = cluster.nodes, used_bytes(cluster), bytes_of_bundles(record, record.buckets)[home]
    servers = [
        server
        for server, free in free_bytes(cluster, used).items()
        if server not in members and free >= need and (server == home or not is_full)
        if may_join((server, nodes[server].incarnation))
    ]
    numerics = nodes[bundle.primary[0]].info.get(NUMERICS)

    def rank(server: str) -> tuple[bool, bool, int, str]:
        return server != home, nodes[server].info.get(NUMERICS) != numerics, used[server], server

    best = min(servers, key=rank, default=None)
    return (best, nodes[best].incarnation) if best is not None else None


def unready_copy(cluster: ClusterMap, member: Member) -> str:
    """Return the home of a bundle that this server should have in sync but has not; empty if there is none.

    The primaries of its bundles invite a restarted server, and the server joins the bundles one by one.
    """
    for key, bundle in cluster.bundles.items():
        home = key.rpartition("/")[2]
        if member in bundle.joining:
            return home
        if (
            member not in bundle.in_sync
            and next_member(cluster, bundle.store, home, lambda _: True) == member
        ):
            return home
    return ""


def other_numerics(cluster: ClusterMap, bundle: BundleRecord) -> dict[str, str]:
    """Return the members whose numerics differ from the primary's, with the differences as text.

    Each of these members follows the same log, so it applies the same pushes in the same order, with equal
    versions. The member's values may differ by rounding.
    """
    if bundle.primary is None:
        return {}
    ours, found = _facts(cluster, bundle.primary[0]), {}
    for node, _ in bundle.members:
        theirs = _facts(cluster, node)
        names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if ours and theirs and names:
            found[node] = ", ".join(
                f"{name} is {theirs.get(name) or 'unknown'}, not {ours.get(name) or 'unknown'}"
                for name in names
            )
    return found


def _facts(cluster: ClusterMap, node: str) -> dict[str, str]:
    """Return the numerics that a server reports; empty if missing or in the wrong form."""
    record = cluster.nodes.get(node)
    facts = record.info.get(NUMERICS) if record is not None else None
    if not isinstance(facts, dict) or len(facts) > MOST_FACTS:
        return {}
    return {str(name)[:MOST_FACT]: str(fact)[:MOST_FACT] for name, fact in facts.items()}


# --- lines and invariants ------------------------------------------------------------------------


def bundle_lines(before: ClusterMap, after: ClusterMap) -> Iterator[str]:
    """Yield a log line for each primary that moved, and each member that was removed, invited or added.

    Further lines name a new member with other numerics than the primary's, and a bundle whose pushes wait.
    """
    if after.bundles is before.bundles:
        return
    for key, bundle in after.bundles.items():
        was = before.bundles.get(key)
        if was is bundle or not bundle.in_sync:
            continue
        _, store, home = key.split("/", 2)
        prefix = f"shards of {home} in store {store!r}:"
        known = {node for node, _ in was.members} if was is not None and was.store == bundle.store else ()
        for node, differences in other_numerics(after, bundle).items():
            if node not in known:
                yield f"{prefix} {node} may round otherwise than {bundle.in_sync[0][0]}: {differences}"
        if was is None or was.store != bundle.store:
            continue
        for node, _ in (member for member in was.members if member not in bundle.members):
            yield f"{prefix} {node} was removed from the copies"
        for node, _ in (member for member in bundle.joining if member not in was.members):
            yield f"{prefix} {node} begins a copy"
        for node, _ in (member for member in bundle.in_sync if member not in was.in_sync):
            copies = after.stores[store].copies
            yield f"{prefix} {node} is in sync ({len(bundle.in_sync)} of {copies} copies are)"
        least, in_sync = after.stores[store].min_in_sync_in_force, len(bundle.in_sync)
        if in_sync < least <= len(was.in_sync):
            yield f"{prefix} pushes wait: {in_sync} in sync, {least} needed (min_in_sync): start a server"
        if bundle.primary != was.primary and was.primary is not None:
            yield (
                f"{prefix} {bundle.in_sync[0][0]} is the primary now, not {was.primary[0]} "
                f"(generation {bundle.generation})"
            )


def check_bundles(cluster: ClusterMap) -> None:
    """Assert the invariants of bundles after a command."""
    homes = {
        bundle_key(name, home): store for name, store in cluster.stores.items() for home in set(store.buckets)
    }
    assert cluster.bundles.keys() == homes.keys(), cluster.bundles.keys() ^ homes.keys()
    live = _live_members(cluster)
    for key, bundle in cluster.bundles.items():
        store = homes[key]
        nodes = [node for node, _ in bundle.members]
        assert bundle.store == store.id, (key, bundle.store)
        assert live.issuperset(bundle.members), f"{key} has lost members: {bundle}"
        assert len(nodes) == len(set(nodes)) <= store.copies + SPARE_MEMBERS, (key, nodes)
        assert bundle.in_sync or store.phase == "failed", f"{key} has no member, and {store.phase}"
        assert len(bundle.lost) <= store.copies, (key, bundle.lost)
