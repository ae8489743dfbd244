"""Pure: statistics of data servers; fields have the names that reports read.

Each layer fills in its own fields: the state of the leases, the memory of images, the server. The answer
leaves an unset field out.
"""

import msgspec
from msgspec import UNSET, UnsetType

from adam_async.runtime.traffic import CommonStatistics
from dataflow import PoolStatistics


class CacheStatistics(msgspec.Struct, kw_only=True):
    """Memory of images and groups; only a cache that decodes images sets `hits` to `replaced_why`."""

    resident_images: int
    resident_bytes: int
    hits: int | UnsetType = UNSET
    misses: int | UnsetType = UNSET
    decoded: int | UnsetType = UNSET
    decode_s: float | UnsetType = UNSET
    spilled: int | UnsetType = UNSET
    spilled_bytes: int | UnsetType = UNSET
    read_back: int | UnsetType = UNSET
    replaced: int | UnsetType = UNSET
    replaced_why: list[str] | UnsetType = UNSET
    budget_bytes: int | UnsetType = UNSET
    block_bytes: int | UnsetType = UNSET
    evicted_blocks: int | UnsetType = UNSET


class TransformStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the thread that transforms images."""

    late_answers: int
    """Number of answers that waited for their groups."""
    pool: PoolStatistics


class DataStatistics(CommonStatistics, kw_only=True):
    """Statistics of a data server: progress of the epoch, and leases since it became the dealer."""

    term: int = 0
    """Term in which this server deals out the groups of the run; 0: another one does."""
    epoch: int
    groups: int
    finished: int
    drained: bool
    """Whether a run that stops has no leased group left."""
    clock: int
    """Known final clock of the epoch."""
    images: int
    train_s: float
    skipped_groups: tuple[tuple[int, int], ...]
    loss: float
    leased: int
    returned: int
    """Number of leases that returned from lost replicas."""
    late_reports: int
    skipped: int | UnsetType = UNSET
    """Number of skipped images."""
    transforms: TransformStatistics | UnsetType | None = UNSET
    """Statistics of the transforms; None without any."""
    cache: CacheStatistics | UnsetType | None = UNSET
    """Statistics of the memory; None before the first run."""


class HostStatistics(CommonStatistics, kw_only=True):
    """Statistics of a data host."""

    serving: dict[str, str]
    """Addresses of the data servers, by the controllers of their clusters."""


class StagingCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of files and bytes of a staging, by origin."""

    files: int
    kept_files: int
    """Number of files that an earlier start has left in the copy."""
    source_files: int
    """Number of files read from the source."""
    source_bytes: int
    copied_files: int
    """Number of files copied from other servers."""
    copied_bytes: int
    retried: int
    """Number of attempts that were repeated after a failure."""


class StagingStatistics(CommonStatistics, kw_only=True):
    """Statistics of a server of a staging."""

    staging: StagingCounts
