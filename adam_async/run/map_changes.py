"""Pure: the changes between versions of the cluster map.

A `Change` has the map's changed fields: new node records and the names of departed nodes, added epoch
results, and the variable fields of a continuing run. So its length does not grow with the number of epochs. A
watcher applies the change to the map of the version before. The watcher sees each version once, in order.
After a break the watch continues at any controller, because all have the same changes.

A controller keeps the last changes, for watchers (`History`).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from adam_async.run.cluster_map import ClusterMap, DealerRecord, EpochRecord, NodeRecord
from adam_async.run.counts import RESULTS_KEPT, EpochCounts
from adam_async.run.store_record import ArraysPiece, BundleRecord, StoreRecord
from adam_async.run.training_program import FIXED, PROGRAM_PIECES, ProgramPiece, ProgramRecord

_R = TypeVar("_R")


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changes of one version of the map. Fields are those of `ClusterMap`; unset ones are unchanged."""

    version: int
    nodes: dict[str, NodeRecord] = {}
    """New records of nodes, by node id."""
    gone: tuple[str, ...] = ()
    """Nodes that have left the map."""
    run: ProgramRecord | UnsetType | None = UNSET
    same_run: bool = False
    """Whether `run` omits its blob, pieces and terms, which are unchanged."""
    stores: dict[str, StoreRecord] = {}
    """New records of stores, by name."""
    stores_gone: tuple[str, ...] = ()
    """Stores that have left the map."""
    arrays: dict[str, ArraysPiece] = {}
    """New pieces of array lists, by key."""
    arrays_gone: tuple[str, ...] = ()
    """Keys of the pieces of array lists that have left the map."""
    bundles: dict[str, BundleRecord] = {}
    """New records of bundles, by key."""
    bundles_gone: tuple[str, ...] = ()
    """Keys of bundles that have left the map."""
    placements: int | UnsetType = UNSET
    epoch: EpochRecord | UnsetType | None = UNSET
    ended: int | UnsetType = UNSET
    results: tuple[EpochCounts, ...] | UnsetType = UNSET
    """All results in the map; with `more_results` only the added ones."""
    more_results: bool = False
    dealer: DealerRecord | UnsetType | None = UNSET
    pieces: dict[str, ProgramPiece] | UnsetType = UNSET


_RECORDS = {
    "nodes": ("gone", "nodes/"),
    "stores": ("stores_gone", "stores/"),
    "arrays": ("arrays_gone", ""),
    "bundles": ("bundles_gone", ""),
}
"""Fields with a record per name: the field of names that have left the map, and the prefix of the keys,
unless the names are keys."""

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
    if "results" in new:
        new["ended"] = after.ended
    for name, (gone, _) in _RECORDS.items():
        if (now := getattr(after, name)) is not (was := getattr(before, name)):
            new |= {name: _new_records(was, now), gone: tuple(each for each in was if each not in now)}
    return Change(version=after.version, **new)


def _new_records(before: Mapping[str, _R], after: Mapping[str, _R]) -> dict[str, _R]:
    new = {}
    for name, record in after.items():
        was = before.get(name)
        if record is not was and record != was:  # most records are the same object, and comparing takes long
            new[name] = record
    return new


def _extended(results: tuple[EpochCounts, ...], more: tuple[EpochCounts, ...]) -> tuple[EpochCounts, ...]:
    return (*results, *more)[-RESULTS_KEPT:]


def changed(before: ClusterMap, change: Change) -> ClusterMap:
    """Make the next version of a map.

    Raises:
        ValueError: The change does not follow this version, or continues another run.
    """
    if change.version != before.version + 1:
        raise ValueError(f"version {change.version} does not follow version {before.version}")
    new = {name: value for name in _WHOLE if (value := getattr(change, name)) is not UNSET}
    for name, (gone, _) in _RECORDS.items():
        if getattr(change, name) or getattr(change, gone):
            left, records = getattr(change, gone), {**getattr(before, name), **getattr(change, name)}
            new[name] = {each: record for each, record in records.items() if each not in left}
    if change.same_run and change.run:
        if before.run is None or before.run.id != change.run.id:
            raise ValueError(f"version {change.version} goes on with run {change.run.id}, which is not there")
        new["run"] = change.run.with_fixed_of(before.run)
    if change.more_results and change.results:
        new["results"] = _extended(before.results, change.results)
    return msgspec.structs.replace(before, version=change.version, **new)


def changed_records(change: Change) -> Iterator[tuple[str, Any]]:
    """Yield the key of each changed record with its new value, or None if it has left the map.

    The variable fields of the program have the key ``run``, its fixed ones ``run/fixed``. A result has the
    key ``results/<n>``, with n from 0 to `RESULTS_KEPT` - 1; the newest result replaces the oldest.
    """
    for kind, (gone, begin) in _RECORDS.items():
        for name, record in {**dict.fromkeys(getattr(change, gone)), **getattr(change, kind)}.items():
            yield f"{begin}{name}", record
    if change.run is None:
        yield from (("run", None), ("run/fixed", None))
    elif change.run is not UNSET:
        yield "run", change.run.without_fixed()
        if not change.same_run:
            yield "run/fixed", [getattr(change.run, name) for name in FIXED]
    for key, record in (("epoch", change.epoch), ("dealer", change.dealer)):
        if record is not UNSET:
            yield key, record
    if change.results is not UNSET:
        if not change.more_results:
            yield from ((f"results/{number}", None) for number in range(RESULTS_KEPT))
        assert change.ended is not UNSET, "results change with their number"
        first = change.ended - len(change.results)
        for number, result in enumerate(change.results, first):
            yield f"results/{number % RESULTS_KEPT}", result
    if change.pieces is not UNSET:
        for number in range(PROGRAM_PIECES):
            yield f"run/{number}", change.pieces.get(f"run/{number}")


CHANGES_KEPT = 1024
"""Number of changes that a controller keeps; a watcher with an older version gets the whole map."""


class History:
    """The last changes of a map, without a gap.

    Args:
        limit: Maximum number of changes.
    """

    def __init__(self, version: int = 0, *, limit: int = CHANGES_KEPT) -> None:
        self._version = version
        self._changes: deque[Change] = deque(maxlen=limit)

    def add(self, change: Change) -> None:
        """Append the change after the last one."""
        assert change.version == self._version + 1, (change.version, self._version)
        self._changes.append(change)
        self._version = change.version

    def since(self, version: int) -> Sequence[Change] | None:
        """Return all changes after a version, in order; None if a change was dropped, or the map is older."""
        lacking = self._version - version
        if not 0 <= lacking <= len(self._changes):
            return None
        kept = len(self._changes)
        return [self._changes[position] for position in range(kept - lacking, kept)]
