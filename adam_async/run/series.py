"""Pure: the time series of a run: one sample for about each second of its training."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import msgspec

from adam_async.run.learning_rate import Schedule
from adam_async.run.staleness import add_up
from adam_async.run.waits import waits_of

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
    """Sum of the waits of all workers, in seconds; see `adam_async.run.waits`."""


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
