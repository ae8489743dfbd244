"""Pure: how long a thread rests after a job, so that it uses no more than its share of a core's time."""

from __future__ import annotations

CREDIT_S = 0.005
"""A rest that lasted longer than it should counts towards the next ones, up to this: whoever was held up for
a second must not run at full speed for one."""


class Pace:
    """The pace of one thread: it tells what it has done, and hears how long to rest.

    A job of c seconds of the thread's own CPU time shall take c / share seconds. What it lacks is owed and
    rested; what is not, because the rest was cut short, is added to the next one. Time that a job spent
    waiting counts towards its own length only: who waits saves nothing up.

    Args:
        share: Of a core's time, above 0 and up to 1.

    Raises:
        ValueError: It is not.
    """

    __slots__ = ("_owed_s", "share")

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"pace is a share of a core's time, above 0 and up to 1, not {share}")
        self.share = share
        self._owed_s = 0.0

    def worked(self, *, cpu_s: float, wall_s: float) -> float:
        """Note a job; returns how many seconds to rest now, 0 for none."""
        self._owed_s += max(cpu_s / self.share - wall_s, 0.0)
        return max(self._owed_s, 0.0)

    def rested(self, rest_s: float) -> None:
        """Note how long the rest really was."""
        self._owed_s = max(self._owed_s - rest_s, -CREDIT_S)
