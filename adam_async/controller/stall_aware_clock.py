"""Pure: the clock of a consensus core, which stops while its process does not run.

A timer that fires late shows that this process did not run. Messages of the leader may then wait unread in
the sockets. If the whole host stalled, other controllers on it sent nothing either. The silence therefore
shows no failure: the core's time leaves out the stall, and a pause follows, in which the shell reads queued
messages. A process that is late for the same deadline again is only slow, and continues. A leader makes no
pause, because the others would take its silence for a failure.
"""

import math
from collections.abc import Callable

from adam_async.controller.consensus import Core, Role

LATE_S = 0.1
"""Lateness of a timer that shows a stall of this process, in seconds."""

PAUSE_S = 0.3
"""Pause of the core's clock after a stall, in which this process reads queued messages and others send, in
seconds."""


class CoreClock:
    """The clock of one core.

    Args:
        clock: Clock of the loop, in seconds.

    Attributes:
        latest_s: Latest time given to the core.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.latest_s = -math.inf
        self._clock = clock
        self._stalled_s = 0.0
        """Sum of all stalls, in seconds: the core's delay behind the loop."""
        self._paused_for: float | None = None
        """Deadline of the last pause, in the core's time."""

    def now(self) -> float:
        """Return the core's time, which never goes back, not even by rounding at a reached deadline."""
        return max(self._clock() - self._stalled_s, self.latest_s)

    def by_the_loop(self, core_s: float) -> float:
        """Return the loop's time at a time of the core."""
        return core_s + self._stalled_s

    def event_time(self, core: Core) -> float:
        """Return the core's time of a new event, without the time of a stall."""
        now = self.now()
        if now - core.next_deadline() > LATE_S:
            self.begins_pause(core)
            now = self.now()
        self.latest_s = now
        return now

    def begins_pause(self, core: Core) -> bool:
        """Leave a stall out of the core's time; return whether a pause before the core's deadline begins."""
        now, deadline = self.now(), core.next_deadline()
        if now - deadline <= LATE_S or self._paused_for == deadline:
            return False
        if core.role is Role.LEADER:
            self._stalled_s += now - max(deadline, self.latest_s)
            return False
        self._paused_for = deadline
        self._stalled_s += now - max(deadline - PAUSE_S, self.latest_s)
        return True

    def reached(self, deadline: float) -> None:
        """Note a reached deadline that begins no pause; leave a lateness above `LATE_S` out of the time."""
        late_s = self.now() - deadline
        if late_s > LATE_S:
            self._stalled_s += late_s
        self.latest_s = max(self.latest_s, deadline)
