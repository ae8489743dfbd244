"""Pure: the time that a consensus core lives in, which stands still while its process did not run.

A deadline that is noticed late says that this process did not run. Then words of the leader may lie unread
in the sockets, and it would be wrong to call it silent; and if the whole machine stood still, the others on
it have said nothing meanwhile. So this time does not pass for the core, and there is a pause in which what
came is read. Who is late for the same deadline again is just slow, and goes on. A leader speaks without a
pause: its own silence is what the others would miss.
"""

import math
from collections.abc import Callable

from adam_async.controller.consensus import Core, Role

LATE_S = 0.1
"""A timer that rings later than this says that this process has not run."""

PAUSE_S = 0.3
"""For reading what came meanwhile, and for others to say something, before the core's time goes on."""


class CoreClock:
    """What one core is told that it is.

    Args:
        clock: Of the loop, in seconds.

    Attributes:
        told_s: The latest time that the core was told.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.told_s = -math.inf
        self._clock = clock
        self._stalled_s = 0.0
        """For how long this process did not run: how far the core is behind the loop."""
        self._paused_for: float | None = None
        """The deadline for which there was a pause, in the core's time."""

    def now(self) -> float:
        """The core's time. It never goes back, nor behind a deadline that has come by rounding."""
        return max(self._clock() - self._stalled_s, self.told_s)

    def by_the_loop(self, core_s: float) -> float:
        """When a time of the core comes by the clock of the loop."""
        return core_s + self._stalled_s

    def tell(self, core: Core) -> float:
        """The time that an event happens at, of which the core is about to be told."""
        now = self.now()
        if now - core.next_deadline() > LATE_S:
            self.begins_pause(core)
            now = self.now()
        self.told_s = now
        return now

    def begins_pause(self, core: Core) -> bool:
        """See whether this process has not run; then the core is set back to before its deadline."""
        now, deadline = self.now(), core.next_deadline()
        if now - deadline <= LATE_S or self._paused_for == deadline:
            return False
        if core.role is Role.LEADER:
            self._stalled_s += now - max(deadline, self.told_s)
            return False
        self._paused_for = deadline
        self._stalled_s += now - max(deadline - PAUSE_S, self.told_s)
        return True

    def meets(self, deadline: float) -> None:
        """The core's deadline has come, and there is no pause: it is that time now, however late it is."""
        late_s = self.now() - deadline
        if late_s > LATE_S:
            self._stalled_s += late_s
        self.told_s = max(self.told_s, deadline)
