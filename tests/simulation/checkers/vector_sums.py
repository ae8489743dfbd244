"""Pure: checks that vectors keep the sum of all pushes to them, whatever moves between them.

Clients add ones to the vector `INBOX`. A step of any client adds `INBOX` to `TOTAL` and empties `INBOX`. So
each value of `INBOX` plus that of `TOTAL` is the number of pushes applied to its shard. A step that was
applied twice, in part, or at another place than its dot product shows as another number.
"""

from collections.abc import Sequence
from math import inf

from tests.simulation.scenario import Violation

INBOX, TOTAL = "inbox", "total"
"""Names of the vectors."""


class VectorSums:
    """The pushes to the vectors of one store.

    Args:
        size: Number of values in a vector.
        keeps_all: Whether no loss of servers may take acknowledged pushes away.
    """

    def __init__(self, name: str, size: int, *, keeps_all: bool = True) -> None:
        self._name = name
        self._size = size
        self._keeps_all = keeps_all
        self.begun = self.acknowledged = 0
        """Number of pushes that began, and number that are acknowledged."""

    def check_square(self, square: float, *, acknowledged: int) -> None:
        """Check the dot product of `TOTAL` with itself behind a step.

        Args:
            acknowledged: Number of pushes that were acknowledged before the step began.

        Raises:
            Violation: The step has missed an acknowledged push, or counts one twice.
        """
        self._check([(square / self._size) ** 0.5], acknowledged, "the step's total")

    def check_values(self, values: Sequence[float]) -> None:
        """Check the sum of both vectors after the end of all pushes. Raises Violation: see `check_square`."""
        self._check(values, self.acknowledged, "inbox and total")

    def _check(self, values: Sequence[float], least: int, what: str) -> None:
        least *= self._keeps_all
        low, high = min(values, default=inf), max(values, default=0.0)
        if not least - 1e-9 <= low <= high <= self.begun + 1e-9:
            raise Violation(
                "conservation of vectors",
                f"{what} of {self._name} is {low} to {high}, of {least} to {self.begun} pushes",
            )
