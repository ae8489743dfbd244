"""Pure: the statistics of a parameter server, as the report has them: versions, clocks, staleness.

A field that is unset is left out of the report: a server without a run has no counts of shards.
"""

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
from msgspec import UNSET, UnsetType

from adam_async.parameter_server.shard import OTHERS, Shard
from adam_async.parameter_server.state import ServerState
from adam_async.run.series import DiskCounts
from adam_async.runtime.traffic import CommonStatistics

PIECE_SHARDS = 1 << 11
"""Number of shards whose counts one round of the loop adds up."""

Histogram = dict[str, int]
"""Number of pushes by staleness; the keys are the staleness as text."""


class ServerStatistics(CommonStatistics, kw_only=True, rename={"pending_contributions": "held"}):
    """Counts of the shards of one server in one run, and of the server itself. Keys are text, as in JSON."""

    shards: int | UnsetType = UNSET
    versions: dict[str, int] | UnsetType = UNSET
    """Version of each shard."""
    staleness: Histogram | UnsetType = UNSET
    staleness_by_replica: dict[str, Histogram] | UnsetType = UNSET
    staleness_by_tensor: dict[str, Histogram] | UnsetType = UNSET
    clocks: dict[str, dict[str, int]] | UnsetType = UNSET
    """Clock of each replica on each shard."""
    clock: int | UnsetType = UNSET
    """Lowest clock of the shards."""
    pending_contributions: int | UnsetType = UNSET
    refused: int | UnsetType = UNSET
    duplicates: int | UnsetType = UNSET
    parked: int | UnsetType = UNSET
    """Number of requests that wait for a clock or for sums."""
    waiting_for: list[int] | UnsetType = UNSET
    """Replicas that the waiting requests wait for."""
    batches: int | UnsetType = UNSET
    batched_pushes: int | UnsetType = UNSET
    disk: DiskCounts | UnsetType = UNSET


class ClientCounts(msgspec.Struct, kw_only=True):
    """Counts of one client of a store, over the shards of one server."""

    clock: int | UnsetType = UNSET
    """Lowest clock of its shards, in steps; unset for a client that the map does not name."""
    pushes: int = 0
    """Number of applied pushes, each counted on each of its shards."""
    staleness: Histogram = {}


class StoreStatistics(CommonStatistics, kw_only=True):
    """Counts of one store on one server, for its clients. Keys are text, as in JSON."""

    shards: int
    bytes: int = 0
    """Size of the values, in bytes."""
    state_bytes: int = 0
    """Size of the rules' arrays, in bytes."""
    versions: dict[str, int] = msgspec.field(default_factory=dict)
    """Version of each shard."""
    clients: dict[str, ClientCounts] = msgspec.field(default_factory=dict)
    """Counts of each client, by its replica number in the cluster map, or "others"."""
    refused: int = 0
    duplicates: int = 0
    waiting: int = 0
    """Number of requests that wait for a clock or for sums."""
    waiting_for: list[int] = msgspec.field(default_factory=list)
    """Replica numbers of the clients that the waiting requests wait for."""
    batches: int = 0
    batched_pushes: int = 0


def count_store(states: Sequence[ServerState]) -> Generator[None, None, StoreStatistics]:
    """Add up the counts of a store's bundles on one server for its clients, `PIECE_SHARDS` shards per step.

    Shards may change between two pieces.
    """
    shards = _shards_of(states)
    total = StoreStatistics(shards=len(shards))
    staleness: dict[str, Counter[int]] = {}
    for number, piece in enumerate(_pieces(shards)):
        if number:
            yield
        for shard in piece:
            total.bytes += shard.values.nbytes
            total.state_bytes += sum([array.nbytes for array in shard.rule_state.values()])
            total.versions[str(shard.spec.id)] = int(shard.version)
            total.refused += shard.tables.refused
            total.duplicates += shard.tables.duplicates
            for replica, clock in shard.clocks.items():
                counts = total.clients.setdefault(str(replica), ClientCounts())
                counts.clock = clock if counts.clock is UNSET else min(counts.clock, clock)
        for name, found in _staleness(piece)[0].items():
            staleness.setdefault(name, Counter()).update(found)
    for name, found in staleness.items():
        counts = total.clients.setdefault(name, ClientCounts())
        counts.staleness, counts.pushes = _as_text(found), found.total()
    total.waiting, total.waiting_for = _waiting_in(states)
    total.batches, total.batched_pushes = _batches_of(states)
    return total


def count_server(states: Sequence[ServerState]) -> ServerStatistics:
    """Add up the counts of a run's bundles on one server."""
    shards = _shards_of(states)
    waiting, waiting_for = _waiting_in(states)
    batches, batched_pushes = _batches_of(states)
    by_replica, by_tensor = _staleness(shards)
    total: Counter[int] = Counter()
    for counts in by_replica.values():
        total.update(counts)
    pending = [shard.pending for shard in shards if shard.pending is not None]
    return ServerStatistics(
        shards=len(shards),
        versions={str(shard.spec.id): int(shard.version) for shard in shards},
        staleness=_as_text(total),
        staleness_by_replica={name: _as_text(by_replica[name]) for name in sorted(by_replica)},
        staleness_by_tensor={name: _as_text(counts) for name, counts in by_tensor.items()},
        clocks={str(shard.spec.id): {str(r): c for r, c in shard.clocks.items()} for shard in shards},
        clock=min((shard.applied_clock() for shard in shards), default=0),
        pending_contributions=sum(len(sums) for each in pending for sums in each.waiting.values()),
        refused=sum(shard.tables.refused for shard in shards),
        duplicates=sum(shard.tables.duplicates for shard in shards),
        parked=waiting,
        waiting_for=waiting_for,
        batches=batches,
        batched_pushes=batched_pushes,
    )


def _shards_of(states: Sequence[ServerState]) -> list[Shard]:
    return [shard for state in states for shard in state.shards.values()]


def _waiting_in(states: Sequence[ServerState]) -> tuple[int, list[int]]:
    """Return the number of waiting requests, and the replicas that they wait for."""
    replicas = {int(replica) for state in states for replica in state.waiting.waiting_for()}
    return sum([len(state.waiting) for state in states]), sorted(replicas)


def _batches_of(states: Sequence[ServerState]) -> tuple[int, int]:
    """Return the number of batches, and of the pushes in them."""
    bundles = [state.bundle for state in states]
    return sum([each.batches for each in bundles]), sum([each.batched_pushes for each in bundles])


def _pieces(shards: Collection[Shard]) -> Iterator[list[Shard]]:
    rest = iter(shards)
    while piece := list(islice(rest, PIECE_SHARDS)):
        yield piece


def _staleness(shards: Collection[Shard]) -> tuple[dict[str, Counter[int]], dict[str, Counter[int]]]:
    """Add up the staleness of pushes by replica, and by tensor."""
    by_replica: dict[str, Counter[int]] = {}
    by_tensor: dict[str, Counter[int]] = {}
    for shard in shards:
        for replica, counts in shard.tables.staleness_of.items():
            if not counts:
                continue  # the map names the replica, and it has not pushed
            name = str(replica) if replica != OTHERS else "others"
            by_replica.setdefault(name, Counter()).update(counts)
            by_tensor.setdefault(shard.spec.tensor, Counter()).update(counts)
    return by_replica, by_tensor


def _as_text(counts: Mapping[int, int]) -> Histogram:
    return {str(staleness): counts[staleness] for staleness in sorted(counts)}
