"""The stores of a cluster, for a member without clocks: list, details, deletion.

The cluster map has names, rules and clients; servers report a store's versions, clocks and staleness to its
clients and readers.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from adam_async.controller.client import Membership, joined_as
from adam_async.driver.role_queries import RoleQueries
from adam_async.errors import StoreError
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.counts import Histogram, StoreCounts
from adam_async.run.run_copies import RunCopies, primary_of, store_copies
from adam_async.run.shard_table import ShardTable, shard_table
from adam_async.run.store_record import ArrayRecord, StorePhase, StoreRecord, joined_arrays
from adam_async.runtime.channel import Endpoint
from adam_async.store.arguments import consistency_of
from adam_async.store.joining import ONLY_ON_DISKS
from adam_async.store.pins import PinSummary, list_pins, pin_summaries
from transport import Identity, Link, Network, TransportError


class StoreSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One store."""

    name: str
    id: str
    phase: StorePhase
    reason: str
    """Reason for the store's failure."""
    run: str
    """Id of the training run that owns the store; empty for a store of a program."""
    consistency: str
    arrays: int
    bytes: int
    """Bytes of all values."""
    servers: tuple[str, ...]
    """Servers that are now the primary of a bundle."""
    copies: RunCopies
    """Copies of each bundle: the primary, the other copies in sync, the joining ones."""
    clients: int


class ArraySummary(msgspec.Struct, frozen=True, kw_only=True):
    """One array of a store."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    shards: int
    bytes: int
    version: int | None
    """Lowest version over the array's shards; None if a server did not report it."""


class ClientSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One client of a store."""

    node: str
    """Node of the client; empty if the client has left."""
    place: str
    """Number of the client in the clocks, or ``others`` for clients that a server counts together."""
    clock: int | None
    """Number of steps of the client, the lowest that a server reported; None without a report."""
    staleness: Histogram
    """Number of the client's pushes, each counted on each of its shards."""


class StoreDetails(msgspec.Struct, frozen=True, kw_only=True):
    """One store with its arrays and clients."""

    store: StoreSummary
    arrays: list[ArraySummary]
    clients: list[ClientSummary]
    pins: list[PinSummary]


@asynccontextmanager
async def join(network: Network, controllers: str, role: str, waits: Waits) -> AsyncIterator["Survey"]:
    """Join a cluster during the block.

    Args:
        controllers: Addresses of controllers, joined by commas.
        role: ``reader`` to read; ``client`` also to delete stores whose creator has left, ``driver`` all.

    Raises:
        RoleUnreachable: No controller answered within `start_s`.
        HandshakeRejected: The token is wrong.
    """
    async with joined_as(role, network, controllers, waits) as (membership, identity):
        yield Survey(network, identity, membership, waits)


class Survey:
    """A member's view of its cluster's stores."""

    def __init__(self, network: Network, identity: Identity, membership: Membership, waits: Waits) -> None:
        self._network = network
        self._identity = identity
        self._membership = membership
        self._waits = waits

    def stores(self) -> list[StoreSummary]:
        """Return all stores, sorted by name."""
        cluster = self._membership.map
        return [_summary(name, store, cluster) for name, store in sorted(cluster.stores.items())]

    def summary(self, name: str) -> StoreSummary:
        """Return one store. Raises StoreError: the cluster has no store of this name."""
        return _summary(name, self._record(name), self._membership.map)

    async def details(self, name: str, on_silence: Callable[[str], None]) -> StoreDetails:
        """Return one store with its arrays and clients.

        Args:
            on_silence: Called with a sentence for each bundle or primary whose counts are missing.

        Raises:
            StoreError: The cluster has no store of this name.
        """
        cluster, store = self._membership.map, self._record(name)
        arrays = joined_arrays(name, store, cluster.arrays)
        table = shard_table(arrays, shard_bytes=store.shard_bytes)
        reports, asked = [], set()
        queries = RoleQueries(Endpoint(self._network, self._identity), waits=self._waits)
        for home in sorted(set(store.buckets)):
            primary = primary_of(cluster, store.id, home)
            if primary is None:
                on_silence(f"bundle {home} has no primary now, so its counts are missing")
                continue
            if primary in asked:
                continue  # one report has the counts of all its bundles
            asked.add(primary)
            try:
                reports.append(await queries.store_counts(primary.address, store.id))
            except (TransportError, ValueError) as error:
                on_silence(
                    f"{primary.node}, the primary of bundle {home}, did not report its counts: {error}"
                )
        pins = await list_pins(name, cluster, self._connect, self._waits)
        if not pins:
            on_silence("no server listed the pins, so they are missing")
        return StoreDetails(
            store=_summary(name, store, cluster),
            arrays=_array_summaries(store, arrays, table, reports),
            clients=_client_summaries(store, cluster, reports),
            pins=pin_summaries(pins),
        )

    def _connect(self, address: str) -> AbstractAsyncContextManager[Link]:
        return self._network.connect(address, self._identity, timeout_s=self._waits.dial_s)

    async def delete(self, name: str) -> None:
        """Delete a store, whatever its state.

        Raises:
            StoreError: No store has this name, or its training run is in progress.
            RunFailed: The controller refused the deletion.
        """
        store, cluster = self._record(name), self._membership.map
        if store.program and cluster.in_progress:
            raise StoreError(f"store {name!r} belongs to run {store.program}, and ends with it: end the run")
        await self._membership.delete_store(name, store.id)

    def _record(self, name: str) -> StoreRecord:
        stores = self._membership.map.stores
        if name not in stores:
            there = ", ".join(map(repr, sorted(stores)[:8])) or "none"
            raise StoreError(
                f"store {name[:80]!r} does not exist; stores of this cluster: {there}{ONLY_ON_DISKS}"
            )
        return stores[name]


def _summary(name: str, store: StoreRecord, cluster: ClusterMap) -> StoreSummary:
    return StoreSummary(
        name=name,
        id=store.id,
        phase=store.phase,
        reason=store.reason,
        run=store.program,
        consistency=consistency_of(store.slack, is_summed=store.summed_weight > 0),
        arrays=store.arrays,
        bytes=store.nbytes,
        servers=_primaries(store, cluster),
        copies=store_copies(cluster, store),
        clients=len(cluster.pushers(store)),
    )


def _primaries(store: StoreRecord, cluster: ClusterMap) -> tuple[str, ...]:
    found = [primary_of(cluster, store.id, home) for home in set(store.buckets)]
    return tuple(sorted({primary.node for primary in found if primary is not None}))


def _array_summaries(
    store: StoreRecord, arrays: Sequence[ArrayRecord], table: ShardTable, reports: Sequence[StoreCounts]
) -> list[ArraySummary]:
    """Summarize each array; it has a version only if all its shards were reported."""
    versions = {shard: version for report in reports for shard, version in report.versions.items()}
    found = []
    for array in arrays:
        shards = table.by_tensor.get(array.name, ())
        known = [versions[str(shard.id)] for shard in shards if str(shard.id) in versions]
        found.append(
            ArraySummary(
                name=array.name,
                shape=array.shape,
                dtype=array.dtype,
                rule=store.rules[array.rule].name,
                shards=len(shards),
                bytes=array.nbytes,
                version=min(known) if known and len(known) == len(shards) else None,
            )
        )
    return found


def _client_summaries(
    store: StoreRecord, cluster: ClusterMap, reports: Sequence[StoreCounts]
) -> list[ClientSummary]:
    """Summarize the clients that have a place or were counted, in place order."""
    nodes = {
        str(replica): ", ".join(sorted(node for node, _ in members))
        for replica, (_, members) in cluster.pushers(store).items()
    }
    reported = {place for report in reports for place in report.clients}
    found = []
    for place in sorted({*nodes, *reported}, key=lambda place: (len(place), place)):
        counts = [report.clients[place] for report in reports if place in report.clients]
        staleness: Counter[str] = Counter()
        for each in counts:
            staleness.update(each.staleness)
        clocks = [each.clock for each in counts if each.clock is not None]
        found.append(
            ClientSummary(
                node=nodes.get(place, ""),
                place=place,
                clock=min(clocks) if clocks else None,
                staleness={lag: staleness[lag] for lag in sorted(staleness, key=lambda lag: (len(lag), lag))},
            )
        )
    return found
