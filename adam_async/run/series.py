"""Pure: the numbers of a run over time: a sample for about each second, staleness, waits, counts of disks."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import msgspec

from adam_async.run.counts import Counts, ServerCounts, WorkerCounts, of_kind
from adam_async.run.learning_rate import Schedule


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the staleness of pushes, counted once per push and shard.

    A push's staleness is the number of pushes applied to the shard since the oldest version that its groups
    read. It does not count the worker's own pushes that local steps had applied; see
    `parameter_server/state.py`.
    """

    histogram: dict[str, int]
    """Number of pushes for each staleness, given as text, in ascending order."""
    mean: float
    max: int

    @property
    def pushes(self) -> int:
        """Number of applied pushes, counted per shard."""
        return sum(self.histogram.values())


class StalenessReport(Staleness, frozen=True, kw_only=True):
    """The staleness of a whole run and of its parts."""

    by_replica: dict[str, Staleness]
    by_tensor: dict[str, Staleness]
    """Staleness of the pushes to the shards of each tensor."""


def add_up(histograms: Iterable[Mapping[str, Any]]) -> Staleness:
    """Add up several servers' histograms; without a push, mean and max are 0."""
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


def waited_s(roles: Iterable[Counts]) -> tuple[float, float, float]:
    """Return the total waits of all workers, in seconds: for servers, images and clocks."""
    waits = [each.waited_s for each in of_kind(WorkerCounts, roles)]
    servers, images, clocks = zip(*waits, strict=True) if waits else ((), (), ())
    return sum(servers), sum(images), sum(clocks)


FEW = 0.25
"""Minimum number of pushes for a mean staleness, as a share of the number in the last mean; fewer pushes
count with the next ones. The last few pushes of an epoch have few concurrent ones, so their staleness is near
0."""

SAMPLES_KEPT = 1 << 13
"""Maximum number of samples of a run."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run at one moment. Counts are of the whole run so far."""

    s: float
    """Training time so far, in seconds, as in `train_s`: without start-up and evaluation."""
    epoch: int
    images: int
    """Trained images of all epochs so far."""
    loss: float | None
    """Mean loss over the epoch's images so far; None without images, or if not finite."""
    rate: float
    """Learning rate of the schedule at this moment."""
    staleness_mean: float | None
    """Mean staleness of the pushes since the last sample with a mean; None if too few (`FEW`)."""
    bytes: int
    """Bytes sent by data servers, parameter servers and workers."""
    waited_s: float
    """Total waits of all workers, in seconds; see `adam_async.run.series`."""


class Series:
    """Takes the samples of one run."""

    def __init__(self, schedule: Schedule, *, epoch_images: int) -> None:
        self._schedule = schedule
        self._epoch_images = max(epoch_images, 1)
        self._pushes = 0
        self._staleness = 0.0
        self._taken = 0
        """Number of pushes in the last mean staleness."""
        self.samples: list[Sample] = []
        """Samples of the run; at the limit, the series drops every second sample in its older half."""

    def take(
        self,
        roles: Mapping[str, Counts],
        *,
        s: float,
        epoch: int,
        images: int,
        images_before: int,
        loss: float,
    ) -> None:
        """Add a sample."""
        if len(self.samples) >= SAMPLES_KEPT:
            del self.samples[1 : SAMPLES_KEPT // 2 : 2]
        self.samples.append(
            Sample(
                s=round(max(s, self.samples[-1].s if self.samples else 0.0), 6),
                epoch=epoch,
                images=images_before + images,
                loss=loss if images and isfinite(loss) else None,
                rate=self._schedule.rate(epoch - 1 + min(images / self._epoch_images, 1.0)),
                staleness_mean=self._recent_staleness(
                    each.staleness for each in of_kind(ServerCounts, roles.values())
                ),
                bytes=sum(
                    row.payload_bytes + row.frame_bytes for each in roles.values() for row in each.sent
                ),
                waited_s=sum(waited_s(roles.values())),
            )
        )

    def _recent_staleness(self, histograms: Iterable[Mapping[str, Any]]) -> float | None:
        """Return the mean staleness of pushes since the last sample with a mean; None if there are few."""
        total = add_up(histograms)
        pushes, staleness = total.pushes - self._pushes, total.mean * total.pushes - self._staleness
        if 0 <= pushes < FEW * self._taken:
            return None
        self._pushes, self._staleness, self._taken = total.pushes, total.mean * total.pushes, pushes
        return max(staleness / pushes, 0.0) if pushes > 0 else None
