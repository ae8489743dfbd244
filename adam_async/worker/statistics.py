"""Pure: the statistics of a model worker, as the report has them.

Each layer fills in its own fields: the training mode, the run session, the worker. The report leaves an unset
field out.
"""

import msgspec
from msgspec import UNSET, UnsetType

from adam_async.client.parameter_client import ClientStatistics
from adam_async.data_server.client import DataClientStatistics
from adam_async.runtime.traffic import CommonStatistics
from adam_async.worker.push_plan import ProtocolChoice
from dataflow import EngineStatistics
from dataflow import PoolStatistics as ComputePoolStatistics
from transport import PoolStatistics as BufferPoolStatistics


class PartitionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's partition of a model."""

    segments: int
    """Number of segments of the partition's dataflow graph."""
    wires: int
    """Number of send buffers."""


class KernelStatistics(
    msgspec.Struct, frozen=True, kw_only=True, rename={"kernel_set": "set", "total": "of"}
):
    """The kernels that train a run."""

    kernel_set: str
    """Name of the set in use."""
    compiled: int
    total: int
    """Number of kernels of the set."""
    numpy_groups: int
    """Number of groups trained before the change to compiled kernels."""


class PeerWorkerStatistics(
    msgspec.Struct, frozen=True, kw_only=True, rename={"blocks_resent": "blocks_said_again"}
):
    """The exchange with another worker of the replica."""

    links: int
    """Number of links to that worker so far."""
    messages: int
    """Number of messages sent to that worker."""
    blocks_received: int
    blocks_duplicate: int
    blocks_resent: int
    blocks_unconfirmed: int


class WorkerStatistics(CommonStatistics, kw_only=True):
    """Counts of the run in progress or of the last run, and of the worker itself."""

    lag_s: dict[str, float] | UnsetType = UNSET
    """Percentiles of the event loop's lag, in seconds."""
    buffers: BufferPoolStatistics | UnsetType = UNSET
    refused_greets: int | UnsetType = UNSET
    protocols: list[ProtocolChoice] | UnsetType = UNSET
    push_buffers: int | UnsetType = UNSET
    left_ahead: int | UnsetType = UNSET
    """Number of messages sent while the rest of their step was computed."""
    clock: int | UnsetType = UNSET
    """Clock that the replica has at the servers after all messages in transit."""
    clock_waits: int | UnsetType = UNSET
    clock_wait_s: float | UnsetType = UNSET
    waiting_for: str | UnsetType = UNSET
    """Text that names the replicas for which this replica waits; empty without a wait."""
    part: PartitionStatistics | UnsetType = UNSET
    kernels: KernelStatistics | UnsetType = UNSET
    cpus: tuple[int, ...] | UnsetType | None = UNSET
    """CPUs to which the compute threads are pinned; None without pinning."""
    parameters: ClientStatistics | UnsetType = UNSET
    data: DataClientStatistics | UnsetType = UNSET
    neighbours: dict[str, PeerWorkerStatistics] | UnsetType = UNSET
    """The other workers of the replica, by node."""
    pool: ComputePoolStatistics | UnsetType | None = UNSET
    engine: EngineStatistics | UnsetType | None = UNSET
