"""Pure: how stale the pushes were when they were applied, over all shards and servers."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the staleness of pushes, counted once per push and shard.

    The staleness of a push is the number of pushes applied to the shard since the oldest version that its
    groups read; see `adam_async.parameter_server.state`.
    """

    histogram: dict[str, int]
    """Staleness, as text, to the number of pushes applied with it; ascending."""
    mean: float
    max: int

    @property
    def pushes(self) -> int:
        """Pushes applied, counted per shard."""
        return sum(self.histogram.values())


def add_up(histograms: Iterable[Mapping[str, Any]]) -> Staleness:
    """Join what several servers counted; without any push mean and max are 0."""
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
