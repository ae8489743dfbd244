"""Pure: the numbers of a run over time: a sample for about each second, staleness, waits, counts of disks."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import msgspec

from adam_async.run.learning_rate import Schedule


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


class WaitReport(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of one worker before it admits groups: their numbers, and the sums of their seconds."""

    worker: str
    admission_waits: int
    admission_wait_s: float
    blocked_fetches: int
    blocked_s: float
    clock_waits: int
    clock_wait_s: float

    @property
    def total_s(self) -> float:
        """Sum of all waits, in seconds."""
        return self.admission_wait_s + self.blocked_s + self.clock_wait_s


def waits_of(worker: str, values: Mapping[str, Any]) -> WaitReport | None:
    """Return the waits in a worker's statistics; None for another role, or before its first training."""
    parameters, data = values.get("parameters"), values.get("data")
    if parameters is None or data is None:
        return None
    return WaitReport(
        worker=worker,
        admission_waits=parameters["admission_waits"],
        admission_wait_s=parameters["admission_wait_s"],
        blocked_fetches=data["blocked_fetches"],
        blocked_s=data["blocked_s"],
        clock_waits=values.get("clock_waits", 0),
        clock_wait_s=values.get("clock_wait_s", 0.0),
    )


FEW = 0.25
"""Minimum number of pushes of a mean staleness, as a share of the number in the last mean; fewer pushes count
with the next ones. The last few pushes of an epoch have few concurrent ones, so their staleness is near 0."""

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
    """Mean loss over the images of the epoch so far; None without images, or if not finite."""
    rate: float
    """Learning rate of the schedule at this moment."""
    staleness_mean: float | None
    """Mean staleness of the pushes since the last sample that has a mean; None without pushes, or with too
    few (`FEW`)."""
    bytes: int
    """Bytes sent by data servers, parameter servers and workers."""
    waited_s: float
    """Sum of the waits of all workers, in seconds; see `adam_async.run.series`."""


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
        """Samples of the run; at the limit, the series drops every second sample of its older half."""

    def take(
        self,
        roles: Mapping[str, Mapping[str, Any]],
        *,
        s: float,
        epoch: int,
        images: int,
        images_before: int,
        loss: float,
    ) -> None:
        """Add a sample."""
        waits = [waits_of(node, values) for node, values in roles.items()]
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
                    values.get("staleness", {}) for values in roles.values()
                ),
                bytes=sum(
                    row["payload_bytes"] + row["frame_bytes"]
                    for values in roles.values()
                    for row in values.get("traffic", ())
                ),
                waited_s=sum(each.total_s for each in waits if each is not None),
            )
        )

    def _recent_staleness(self, histograms: Iterable[Mapping[str, Any]]) -> float | None:
        """Return the mean staleness of the pushes since the last sample with a mean; None if they are few."""
        total = add_up(histograms)
        pushes, staleness = total.pushes - self._pushes, total.mean * total.pushes - self._staleness
        if 0 <= pushes < FEW * self._taken:
            return None
        self._pushes, self._staleness, self._taken = total.pushes, total.mean * total.pushes, pushes
        return max(staleness / pushes, 0.0) if pushes > 0 else None


class DiskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the store of a run on the disk of one server."""

    updates: int
    """Number of applied pushes; a push counts once for each piece that it changes."""
    writes: int
    """Number of pieces written because of these pushes."""
    bytes: int
    """Size of the written pieces, in bytes."""
    amplification: float
    """Number of bytes written to files for each byte of the written pieces."""
    rounds: int
    """Number of complete rounds of writing."""
    syncs: int
    disk_bytes: int
    """Present size of the files, in bytes."""
    age_s: float | None = None
    """Age of the oldest update that is not on the disk, in seconds; None until all pieces were written."""
    period_s: float
    """Time between the beginnings of two rounds, in seconds."""
    as_of: float | None
    """Time up to which all updates are on the disk, in seconds since 1970; None before the first round."""
    full: bool
    """Whether the last write failed for lack of space."""
