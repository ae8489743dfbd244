"""Pure: the numbers that roles count, one type per role, from their owners to the report.

The facts of an ended epoch are its counts, from its dealer, and its evaluation, from the driver.

A role fills in its type. The driver trusts no role, and reads an answer with the same type, which checks all
bounds. Polls, the live table, the status and the report use the fields as they are. Names are as in the JSON
text; docs/reference/report.md has each one's unit and meaning.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from sys import float_info
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from adam_async.messages.body import (
    Clock,
    Count,
    Epoch,
    Images,
    Name,
    NodeId,
    ReplicaNumber,
    Seconds,
    Version,
)
from adam_async.run.store_record import MOST_NAME
from adam_async.runtime.traffic import TrafficRow
from dataflow import EngineStatistics
from dataflow import PoolStatistics as ComputePoolStatistics
from transport import PoolStatistics as BufferPoolStatistics

RESULTS_KEPT = 32
"""Maximum number of epochs whose counts are in the map: the newest ones."""

MOST_BEHIND = 1 << 16
"""Maximum number of replicas with skipped groups."""

_Finite = Annotated[float, msgspec.Meta(ge=-float_info.max, le=float_info.max)]
"""A number that the JSON text of the cluster map can hold."""

SkippedGroups = tuple[tuple[Count, Count], ...]
"""The ranges of an epoch's skipped groups."""


class EpochCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The counts of an epoch, which its dealer sets at its end."""

    images: Count = 0
    """Number of trained images, each counted once."""
    loss: _Finite | None = None
    """Mean loss of the images in `loss_images`; None if not finite."""
    loss_images: Count = 0
    """Number of images with known losses. Losses are unknown if the shards have dropped the epoch's set, or
    if a dealer was lost and no shard takes gradients from the part that computes the loss."""
    train_s: Seconds = 0.0
    """Time from the first lease to the last report, in seconds, earlier parts of a resumed epoch included."""
    clock: Clock = 0
    """Common clock of the replicas; in asp the highest clock of any replica."""
    skipped: Images = 0
    """Number of images left for the next epoch."""
    skipped_groups: SkippedGroups = ()
    behind: Annotated[tuple[ReplicaNumber, ...], msgspec.Meta(max_length=MOST_BEHIND)] = ()
    """Replicas whose shares have skipped groups."""


class Evaluation(msgspec.Struct, frozen=True):
    """The accuracy of the weights after an epoch, which the driver of the run sets."""

    epoch: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    test_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)]
    validation_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Accuracy on the held-back training images; None without any."""


def joined_evaluations(*several: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """Return the evaluations of all epochs in order; if two are of one epoch, the later argument counts."""
    found = {each.epoch: each for evaluations in several for each in evaluations}
    return tuple(found[epoch] for epoch in sorted(found))


def newest_and_best(evaluations: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    """Return the newest `RESULTS_KEPT` evaluations, and the best earlier one by validation accuracy."""
    older, newest = evaluations[:-RESULTS_KEPT], evaluations[-RESULTS_KEPT:]
    best = max(older, key=lambda each: each.validation_accuracy or 0.0, default=None)
    return newest if best is None or best.validation_accuracy is None else (best, *newest)


def skipped_groups(results: Iterable[EpochCounts]) -> list[SkippedGroups]:
    """Return each epoch's ranges of skipped groups."""
    return [each.skipped_groups for each in results]


Total = Annotated[Count, msgspec.Meta(extra={"grows": True})]
"""Number that only grows while its role runs; other numbers are momentary states."""

TotalSeconds = Annotated[Seconds, msgspec.Meta(extra={"grows": True})]
"""Sum of durations that only grows."""

Buckets = Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
"""Number of durations in each bucket of `DURATIONS_S`. The sum of the durations is the field with ``s`` in
place of ``buckets`` at its end."""

Histogram = dict[Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\Z")], Count]
"""Number of pushes by staleness, which is text of 1 to 9 digits."""

ONCE = frozenset(("traffic", "protocols", "staleness_by_tensor"))
"""Fields that a report has once for all roles together; in its role records they are unset."""


_Client = Annotated[str, msgspec.Meta(max_length=16)]
"""Replica number of a client as text, or ``others``."""

_Tensor = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]


def _check_numbers(*records: Any) -> None:
    """Check the numbers in records of rooms that know no bounds. Raises ValueError: one is out of bounds."""
    for record in records:
        for name, value in dataclasses.asdict(record).items() if record is not None else ():
            if not 0 <= value < 1 << 53:
                raise ValueError(f"{name} is not from 0 to 2^53 - 1")


class Counts(msgspec.Struct, kw_only=True):
    """Counts of any role."""

    node: NodeId = ""
    host: Name = ""
    pid: Count = 0
    peak_rss_mb: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    age_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e10)] = 0.0
    cpu_s: TotalSeconds = 0.0
    traffic: list[TrafficRow] | UnsetType = UNSET

    @property
    def sent(self) -> Sequence[TrafficRow]:
        """Rows of sent messages."""
        return () if self.traffic is UNSET else self.traffic


class ControllerCounts(Counts, kw_only=True):
    """Counts of a controller: the version of its map, and its position in its group.

    A controller without a group has its name, its leader and its lists empty. Voters and learners are
    identities: longer than names of nodes, see `controller.consensus.membership.identity`.
    """

    version: Version = 0
    group: Name = ""
    role: Name = "founding"
    leader: NodeId = ""
    term: Count = 0
    commit: Count = 0
    log: Count = 0
    voters: list[Name] = []
    learners: list[Name] = []


class CacheCounts(msgspec.Struct, kw_only=True):
    """Memory that a data server uses for images and groups.

    Only a cache that decodes images sets `hits` and the fields after it.
    """

    name: NodeId = ""
    budget_bytes: Count = 0
    resident_images: Count
    resident_bytes: Count
    block_bytes: Count = 0
    evicted_blocks: Total = 0
    hits: Total = 0
    misses: Total = 0
    decoded: Total = 0
    decode_s: TotalSeconds = 0.0
    spilled: Total = 0
    spilled_bytes: Total = 0
    read_back: Total = 0
    replaced: Total = 0
    replaced_why: list[str] = []


class TransformCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the thread that transforms images."""

    late_answers: Total
    """Number of answers that waited for their groups."""
    pool: ComputePoolStatistics

    def __post_init__(self) -> None:
        _check_numbers(self.pool)


class DataCounts(Counts, kw_only=True):
    """Counts of a data server: progress of the epoch, and leases since it became the dealer."""

    term: Count = 0
    """Term in which this server deals out the run's groups; 0: another server does."""
    epoch: Epoch = 0
    """Epoch whose groups the server deals out; 0: none yet."""
    groups: Count = 0
    finished: Count = 0
    drained: bool = False
    """Whether a run that stops has no leased group left."""
    clock: Clock = 0
    """Known final clock of the epoch."""
    images: Count = 0
    train_s: Seconds = 0.0
    skipped_groups: SkippedGroups = ()
    skipped: Images = 0
    """Number of skipped images."""
    loss: float | None = None
    """Mean loss over the images in `loss_images`; None if not finite."""
    loss_images: Images = 0
    """Number of images with known losses: those in groups that workers have reported."""
    leased: Total = 0
    returned: Total = 0
    """Number of leases that returned from lost replicas."""
    late_reports: Total = 0
    transforms: TransformCounts | None = None
    """Statistics of the transforms; None without transforms."""
    cache: CacheCounts | None = None
    """Statistics of the memory; None before the first run."""


class ClientCounts(msgspec.Struct, kw_only=True):
    """Counts of one client of a store, or replica of a run, over one server's shards."""

    clock: Clock | None = None
    """Lowest clock of its shards, in steps; None for a client that the map does not name."""
    staleness: Histogram = {}


class StoreCounts(Counts, kw_only=True):
    """Counts of one store's shards on one server."""

    shards: Count = 0
    bytes: Count = 0
    state_bytes: Count = 0
    versions: dict[str, Version] = {}
    clients: dict[_Client, ClientCounts] = {}
    """Counts of each client, by its replica number in the cluster map, or ``others``."""
    refused: Total = 0
    duplicates: Total = 0
    waiting: Count = 0
    """Number of requests that wait for a clock or for sums."""
    waiting_for: list[ReplicaNumber] = []
    """Replica numbers of the clients that the waiting requests wait for."""
    batches: Total = 0
    batched_pushes: Total = 0
    cut_pushes: Total = 0


class DiskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a run's store on one server's disk."""

    updates: Total
    writes: Total
    bytes: Total
    amplification: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
    rounds: Total
    syncs: Total
    disk_bytes: Count
    age_s: Seconds | None = None
    """Age in seconds of the oldest update that is not on the disk; None until all pieces are written."""
    period_s: Seconds
    as_of: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] | None
    """Time in seconds since 1970 up to which all updates are on the disk; None before the first round."""
    full: bool
    """Whether the last write failed for lack of space."""


class ServerCounts(StoreCounts, kw_only=True):
    """Counts of a parameter server and of its shards in a run; zeros without shards."""

    staleness: Histogram = {}
    staleness_by_tensor: dict[_Tensor, Histogram] | UnsetType = UNSET
    clocks: dict[str, dict[str, Clock]] = {}
    """Clock of each replica on each shard."""
    clock: Clock = 0
    """Lowest clock of the shards."""
    pending_contributions: Count = 0
    """Number of contributions to sums that are not whole."""
    steps_in_place: Total = 0
    """Number of steps that compute threads have applied in place."""
    steps_cut: Total = 0
    """Number of steps in place that were cut off by the end of their process: a part may be applied."""
    disk: DiskCounts | None = None


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """Lateness of the event loop's timers, in seconds."""

    p50: Seconds
    p99: Seconds
    max: Seconds


class PartitionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's partition of a model."""

    segments: Count
    wires: Count


class KernelCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels that train a worker's groups."""

    set: str
    compiled: Count
    of: Count
    numpy_groups: Total
    """Number of groups that NumPy's kernels trained while other kernels were compiled."""


class PushCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a parameter server client, over all bundles."""

    primaries: dict[str, str]
    """Primary of each bundle, by the bundle's home; empty text while there is none."""
    moves: Total
    """Number of times that a bundle's primary moved."""
    numbers: dict[str, Count]
    """Number of the last push to each shard; a client numbers its pushes to a shard from 1."""
    unanswered: Count
    acknowledged: Total
    duplicates: Total
    refused: Total
    resent: Total
    reconnects: Total
    admission_waits: Total
    admission_wait_s: TotalSeconds
    admission_wait_buckets: Buckets = ()


class FetchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a worker's data server client."""

    groups: Total
    blocked_fetches: Total
    blocked_s: TotalSeconds
    blocked_buckets: Buckets = ()


class PeerWorkerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The exchange with another worker of the replica."""

    links: Count
    messages: Total
    blocks_received: Total
    blocks_duplicate: Total
    blocks_resent: Total
    blocks_unconfirmed: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolChoice:
    """Protocol of one tensor's gradient, and the payload bytes per step of either protocol."""

    tensor: str
    delta_bytes: Count
    factor_bytes: Count | None
    """Payload bytes of a step as factors; None if the gradient has no factors."""
    chosen: Literal["delta", "factors", "in place"]


class WorkerCounts(Counts, kw_only=True):
    """Counts of a model worker and of its current or last run.

    The worker, the run session and the training mode fill in their own fields.
    """

    lag_s: Lag | None = None
    late_s: TotalSeconds = 0.0
    late_buckets: Buckets = ()
    buffers: BufferPoolStatistics | None = None
    """Pool of receive buffers; several roles in a process may share it."""
    refused_greets: Total = 0
    protocols: list[ProtocolChoice] | UnsetType = UNSET
    push_buffers: Count = 0
    left_ahead: Count = 0
    clock: Clock = 0
    """Clock that the replica has at the servers after all messages in transit."""
    clock_waits: Total = 0
    clock_wait_s: TotalSeconds = 0.0
    clock_wait_buckets: Buckets = ()
    waiting_for: str = ""
    """Names of the replicas that this replica waits for, as text; empty without a wait."""
    part: PartitionCounts | None = None
    kernels: KernelCounts | None = None
    cpus: tuple[Count, ...] | None = None
    """CPUs to which the compute threads are pinned; None without pinning."""
    parameters: PushCounts | None = None
    data: FetchCounts | None = None
    neighbours: dict[str, PeerWorkerCounts] = {}
    """The replica's other workers, by node."""
    pool: ComputePoolStatistics | None = None
    engine: EngineStatistics | None = None

    def __post_init__(self) -> None:
        _check_numbers(self.buffers, self.pool, self.engine)

    @property
    def groups(self) -> int:
        """Number of groups that the worker has taken from data servers."""
        return self.data.groups if self.data is not None else 0

    @property
    def spent_s(self) -> tuple[float, float, float, float]:
        """Seconds that a compute thread computed, and the waits of `waited_s`."""
        pool = self.pool
        return (pool.busy_s / max(pool.threads, 1) if pool is not None else 0.0, *self.waited_s)

    @property
    def waited_s(self) -> tuple[float, float, float]:
        """Waits before groups were admitted, in seconds: for servers, images and clocks."""
        servers = self.parameters.admission_wait_s if self.parameters is not None else 0.0
        return servers, self.data.blocked_s if self.data is not None else 0.0, self.clock_wait_s


ROLES: dict[str, type[Counts]] = {
    "controller": ControllerCounts,
    "data": DataCounts,
    "ps": ServerCounts,
    "worker": WorkerCounts,
}
"""Type of each role's counts; a role that is not listed has the common counts."""

_Kind = TypeVar("_Kind", bound=Counts)


def of_kind(kind: type[_Kind], roles: Iterable[Counts]) -> list[_Kind]:
    """Return the counts of all roles of one kind."""
    return [counts for counts in roles if isinstance(counts, kind)]
