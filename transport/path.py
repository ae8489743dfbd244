"""Pure: when a message that is sent now arrives, over a path that takes its time."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Dice", "Path", "PathConditions"]


class Dice(Protocol):
    """What jitter and faults are drawn with: a seeded ``random.Random`` will do."""

    def random(self) -> float:
        """Return a number in [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathConditions:
    """How slow a path is, in one direction.

    Attributes:
        delay_s: Seconds from one end to the other.
        jitter_s: Most seconds on top of that, drawn anew each time, each as likely as the other.
        bytes_per_s: How much passes in a second; None for as much as comes.

    Raises:
        ValueError: A number is negative, or no byte may pass.
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
    """One direction of a path. What is sent later never arrives earlier.

    Args:
        conditions: How slow it is.
        dice: For the jitter; not touched without one.
    """

    __slots__ = ("_conditions", "_dice", "_free_at", "_last")

    def __init__(self, conditions: PathConditions, dice: Dice) -> None:
        self._conditions = conditions
        self._dice = dice
        self._free_at = float("-inf")
        self._last = float("-inf")

    def arrival(self, *, now: float, nbytes: int) -> float:
        """Send so many bytes; returns when the last of them arrives, in the time of ``now``.

        Bytes wait until those before them have passed.
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
