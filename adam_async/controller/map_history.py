"""Pure: the changes between versions of the cluster map, and the history of the last ones.

A `Change` holds the changed fields of the map: new records of nodes and the names of departed ones, added
results of epochs, and the variable fields of a continuing run. So its length does not grow with the number of
epochs. A watcher applies it to the map of the version before. The watcher sees each version once, in order,
and continues after a break at any controller, because all controllers have the same changes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from adam_async.run.bundle_record import BundleRecord
from adam_async.run.cluster_map import (
    RESULTS_KEPT,
    ClusterMap,
    EpochRecord,
    LedgerRecord,
    NodeRecord,
    RunPiece,
    RunRecord,
)
from adam_async.run.store_record import ArraysPiece, StoreRecord

_R = TypeVar("_R")

KEPT = 1024
"""Number of changes that a controller keeps; a watcher behind them gets the whole map."""


class Change(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"ledger_record": "lending"}
):
    """The changes of one version of the map. Fields are those of `ClusterMap`; unset ones are unchanged."""

    version: int
    nodes: dict[str, NodeRecord] = {}
    """The records that are new."""
    gone: tuple[str, ...] = ()
    """Nodes that have left the map."""
    run: RunRecord | UnsetType | None = UNSET
    same_run: bool = False
    """Whether `run` lacks the fields `cluster_map.FIXED`, which are unchanged."""
    stores: dict[str, StoreRecord] = {}
    """The records that are new."""
    stores_gone: tuple[str, ...] = ()
    """Stores that have left the map."""
    arrays: dict[str, ArraysPiece] = {}
    """The pieces that are new."""
    arrays_gone: tuple[str, ...] = ()
    """Keys of pieces that have left the map."""
    bundles: dict[str, BundleRecord] = {}
    """The bundles that are new."""
    bundles_gone: tuple[str, ...] = ()
    """Keys of bundles that have left the map."""
    placements: int | UnsetType = UNSET
    epoch: EpochRecord | UnsetType | None = UNSET
    ended: int | UnsetType = UNSET
    results: tuple[dict[str, Any], ...] | UnsetType = UNSET
    """All results of the map, or with `more_results` the added ones."""
    more_results: bool = False
    ledger_record: LedgerRecord | UnsetType | None = UNSET
    pieces: dict[str, RunPiece] | UnsetType = UNSET


_WHOLE = tuple(name for name in Change.__struct_fields__ if getattr(Change(version=0), name) is UNSET)


def difference(before: ClusterMap, after: ClusterMap) -> Change:
    """Return the change from one map to the next."""
    new: dict[str, Any] = {}
    for name in _WHOLE:
        value, old = getattr(after, name), getattr(before, name)
        if value is not old and value != old:
            new[name] = value
    if "run" in new and after.run and before.run and after.run.has_fixed_of(before.run):
        new |= {"run": after.run.without_fixed(), "same_run": True}
    added = after.ended - before.ended
    if 0 < added <= len(after.results) and after.results == _extended(before.results, after.results[-added:]):
        new |= {"results": after.results[-added:], "more_results": True}
    return Change(
        version=after.version,
        nodes=_new_records(before.nodes, after.nodes),
        gone=_gone(before.nodes, after.nodes),
        stores=_new_records(before.stores, after.stores),
        stores_gone=_gone(before.stores, after.stores),
        arrays=_new_records(before.arrays, after.arrays),
        arrays_gone=_gone(before.arrays, after.arrays),
        bundles=_new_records(before.bundles, after.bundles),
        bundles_gone=_gone(before.bundles, after.bundles),
        **new,
    )


def _new_records(before: Mapping[str, _R], after: Mapping[str, _R]) -> dict[str, _R]:
    if after is before:
        return {}
    new = {}
    for name, record in after.items():
        was = before.get(name)
        if record is not was and record != was:  # most are the same object, and long to compare
            new[name] = record
    return new


def _gone(before: Mapping[str, _R], after: Mapping[str, _R]) -> tuple[str, ...]:
    return () if after is before else tuple(name for name in before if name not in after)


def _merged(before: Mapping[str, _R], new: Mapping[str, _R], gone: Sequence[str]) -> dict[str, _R]:
    return {name: record for name, record in {**before, **new}.items() if name not in gone}


def _extended(
    results: tuple[dict[str, Any], ...], more: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], ...]:
    return (*results, *more)[-RESULTS_KEPT:]


def changed(before: ClusterMap, change: Change) -> ClusterMap:
    """Make the next version of a map.

    Raises:
        ValueError: The change does not follow this version, or continues another run.
    """
    if change.version != before.version + 1:
        raise ValueError(f"version {change.version} does not follow version {before.version}")
    new = {name: value for name in _WHOLE if (value := getattr(change, name)) is not UNSET}
    if change.nodes or change.gone:
        new["nodes"] = _merged(before.nodes, change.nodes, change.gone)
    if change.stores or change.stores_gone:
        new["stores"] = _merged(before.stores, change.stores, change.stores_gone)
    if change.arrays or change.arrays_gone:
        new["arrays"] = _merged(before.arrays, change.arrays, change.arrays_gone)
    if change.bundles or change.bundles_gone:
        new["bundles"] = _merged(before.bundles, change.bundles, change.bundles_gone)
    if change.same_run and change.run:
        if before.run is None or before.run.id != change.run.id:
            raise ValueError(f"version {change.version} goes on with run {change.run.id}, which is not there")
        new["run"] = change.run.with_fixed_of(before.run)
    if change.more_results and change.results:
        new["results"] = _extended(before.results, change.results)
    return msgspec.structs.replace(before, version=change.version, **new)


class History:
    """The last changes of a map, without a gap.

    Args:
        limit: Maximum number of changes.
    """

    def __init__(self, version: int = 0, *, limit: int = KEPT) -> None:
        self._version = version
        self._changes: deque[Change] = deque(maxlen=limit)

    def add(self, change: Change) -> None:
        """Append the change after the last one."""
        assert change.version == self._version + 1, (change.version, self._version)
        self._changes.append(change)
        self._version = change.version

    def since(self, version: int) -> Sequence[Change] | None:
        """Return all changes beyond a version, in order; None if one is not kept, or the version is new."""
        lacking = self._version - version
        if not 0 <= lacking <= len(self._changes):
            return None
        kept = len(self._changes)
        return [self._changes[position] for position in range(kept - lacking, kept)]
