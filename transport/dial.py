"""Pure: when to try again to reach a peer that does not answer."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["RetrySchedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySchedule:
    """Waits between attempts: ``first_s``, then ``factor`` times longer each time, at most ``longest_s``.

    Attempts end with the dial's own ``timeout_s``. ``attempts`` bounds them as well; 1 never tries again.
    """

    first_s: float = 0.05
    factor: float = 2.0
    longest_s: float = 2.0
    attempts: int = 1_000_000

    def __post_init__(self) -> None:
        if self.first_s <= 0 or self.longest_s < self.first_s:
            raise ValueError(f"need 0 < first_s <= longest_s, not {self.first_s} and {self.longest_s}")
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, not {self.factor}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}")

    def waits(self) -> Iterator[float]:
        """Yield the seconds to wait after each failed attempt; ends when no attempt is left."""
        wait_s = self.first_s
        for _ in range(self.attempts - 1):
            yield wait_s
            wait_s = min(wait_s * self.factor, self.longest_s)
