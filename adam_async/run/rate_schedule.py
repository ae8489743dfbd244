"""Pure: how the learning rate goes over the epochs of a run: a rise at its beginning, then a schedule."""

import math
from dataclasses import dataclass
from typing import Literal, Self

from adam_async.run.config import Config

FIRST_SHARE = 0.001
"""The least share of the rate that a warm-up begins with: a group at rate 0 would be computed in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The rate as a function of progress alone, so that the same group gets the same rate in every run.

    With a warm-up the rate rises linearly over `warm_up` epochs and is at `peak` at their end; only then the
    schedule begins: falls of ``step`` are counted from there, ``cosine`` goes from there to 0 at `epochs`.
    """

    kind: Literal["constant", "step", "cosine"]
    peak: float
    """The rate that the schedule begins with."""
    warm_up: float
    """Epochs."""
    decay: float
    decay_every: float
    """Epochs."""
    epochs: int

    @classmethod
    def of(cls, config: Config) -> Self:
        """The schedule of a run's options in force (`Config.decided`); its peak is the rate in force."""
        return cls(
            kind="constant" if config.schedule == "auto" else config.schedule,
            peak=config.default_rate(),
            warm_up=config.warm_up,
            decay=config.decay,
            decay_every=config.decay_every,
            epochs=config.epochs,
        )

    @property
    def fixed(self) -> float | None:
        """The rate of every group, where it never changes; None where it does."""
        return self.peak if self.kind == "constant" and not self.warm_up else None

    def rate(self, progress: float) -> float:
        """The rate, between 0 and `peak`, of a group before which so many epochs lie."""
        if progress < self.warm_up:
            return self.peak * max(progress / self.warm_up, FIRST_SHARE)
        since = progress - self.warm_up
        if self.kind == "step":
            return self.peak * self.decay ** math.floor(since / self.decay_every)
        if self.kind == "cosine":
            done = min(since / (self.epochs - self.warm_up), 1.0)
            return self.peak * (1 + math.cos(math.pi * done)) / 2
        return self.peak
