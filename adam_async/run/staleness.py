"""Pure: the staleness of applied pushes, over all shards and servers."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the staleness of pushes, counted once per push and shard.

    The staleness of a push is the number of pushes applied to the shard since the oldest version that its
    groups read, minus the worker's own ones that local steps had applied; see `parameter_server/state.py`.
    """

    histogram: dict[str, int]
    """Number of pushes by their staleness, as text, in ascending order."""
    mean: float
    max: int

    @property
    def pushes(self) -> int:
        """Number of applied pushes, counted per shard."""
        return sum(self.histogram.values())


class StalenessReport(Staleness, frozen=True, kw_only=True):
    """The staleness of a whole run, and of its parts."""

    by_replica: dict[str, Staleness]
    by_tensor: dict[str, Staleness]
    """Staleness of the pushes to the shards of each tensor."""


def add_up(histograms: Iterable[Mapping[str, Any]]) -> Staleness:
    """Add up the histograms of several servers; without a push mean and max are 0."""
    counts: dict[int, int] = {}
    for histogram in histograms:
        for staleness, count in histogram.items():
            counts[int(staleness)] = counts.get(int(staleness), 0) + int(count)
    pushes = sum(counts.values())
    return Staleness(
        histogram={str(staleness): counts[staleness] for staleness in sorted(counts)},
        mean=sum(staleness * count for staleness, count in counts.items()) / pushes if pushes else 0.0,
        max=max(counts, default=0),
    )


def add_up_by_name(tables: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Staleness]:
    """Add up the histograms of several servers by name; the names are sorted, numbers by value."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for table in tables:
        for name, histogram in table.items():
            found.setdefault(name, []).append(histogram)
    return {name: add_up(found[name]) for name in sorted(found, key=_natural)}


def _natural(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (-1, name)
