"""Pure: the waits of a model worker: for servers, for images, for the clocks of other replicas."""

from collections.abc import Mapping
from typing import Any

import msgspec


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
