"""Pure: arrival times of messages over a path with a delay, jitter and a bandwidth."""

from dataclasses import dataclass
from typing import Protocol


class RandomSource(Protocol):
    """Source of random numbers for jitter and faults, such as a seeded ``random.Random``."""

    def random(self) -> float:
        """Return a number in [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathConditions:
    """Delay and bandwidth of one direction of a path.

    Attributes:
        delay_s: Seconds from one end to the other.
        jitter_s: Maximum additional seconds, drawn uniformly for each transfer.
        bytes_per_s: Bandwidth in bytes per second; None for no limit.

    Raises:
        ValueError: A number is negative, or the bandwidth is not positive.
    """

    delay_s: float
    jitter_s: float = 0.0
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not (self.delay_s >= 0 and self.jitter_s >= 0):
            raise ValueError(
                f"delay_s and jitter_s must not be negative, they are {self.delay_s} and {self.jitter_s}"
            )
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive or None, not {self.bytes_per_s}")


class Path:
    """One direction of a path. Arrivals keep the order of sending.

    Args:
        conditions: Delay and bandwidth of the direction.
        dice: Source of the jitter; not used without jitter.
    """

    __slots__ = ("_conditions", "_dice", "_free_at", "_last")

    def __init__(self, conditions: PathConditions, dice: RandomSource) -> None:
        self._conditions = conditions
        self._dice = dice
        self._free_at = float("-inf")
        self._last = float("-inf")

    def arrival(self, *, now: float, nbytes: int) -> float:
        """Send ``nbytes`` and return the arrival time of the last of them, on the clock of ``now``.

        With a bandwidth, bytes wait until all earlier bytes have passed.
        """
        conditions = self._conditions
        left = now
        if conditions.bytes_per_s is not None:
            left = self._free_at = max(now, self._free_at) + nbytes / conditions.bytes_per_s
        late_s = conditions.jitter_s * self._dice.random() if conditions.jitter_s else 0.0
        arrives = left + conditions.delay_s + late_s
        if arrives > self._last:
            self._last = arrives
        return self._last
