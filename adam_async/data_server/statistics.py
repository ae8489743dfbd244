"""Pure: statistics of a data server; fields have the names that reports read."""

from typing import Any

import msgspec

from adam_async.runtime.machine import ProcessMemory
from dataflow import PoolStatistics


class EpochStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the epoch, and leases since the start of the run."""

    epoch: int
    groups: int
    finished: int
    trained_ranges: tuple[tuple[int, int], ...]
    """Ranges of finished groups; empty while any group is leased."""
    clock: int
    """Final clock of the epoch, as far as it is known."""
    images: int
    train_s: float
    skipped_groups: tuple[tuple[int, int], ...]
    loss: float
    leased: int
    trained_again: int
    late_reports: int


class ImageStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Images in memory; all fields below the second count images that a cache has decoded."""

    resident_images: int
    resident_bytes: int
    hits: int | msgspec.UnsetType = msgspec.UNSET
    misses: int | msgspec.UnsetType = msgspec.UNSET
    decoded: int | msgspec.UnsetType = msgspec.UNSET
    decode_s: float | msgspec.UnsetType = msgspec.UNSET
    spilled: int | msgspec.UnsetType = msgspec.UNSET
    spilled_bytes: int | msgspec.UnsetType = msgspec.UNSET
    read_back: int | msgspec.UnsetType = msgspec.UNSET
    replaced: int | msgspec.UnsetType = msgspec.UNSET
    replaced_why: list[str] | msgspec.UnsetType = msgspec.UNSET


class CacheStatistics(ImageStatistics, frozen=True, kw_only=True):
    """Memory of images and groups."""

    budget_bytes: int
    block_bytes: int
    evicted_blocks: int


class TransformStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the thread that transforms images."""

    late_answers: int
    """Number of answers that waited for their groups."""
    pool: PoolStatistics


class LedgerStatistics(msgspec.Struct, frozen=True, kw_only=True, rename={"ledger_replicas": "keepers"}):
    """Part of a data server in the ledger of leases."""

    leads: bool
    term: int
    ledger_replicas: int


class DataStatistics(EpochStatistics, frozen=True, kw_only=True, rename={"ledger": "lending"}):
    """Statistics of a data server."""

    skipped: int
    """Number of skipped images."""
    transforms: TransformStatistics | None
    """Statistics of the transforms; None without any."""
    cache: CacheStatistics | None
    """Statistics of the memory; None before the first run."""
    ledger: LedgerStatistics
    traffic: list[dict[str, Any]]
    process: ProcessMemory
