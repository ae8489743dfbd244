"""Pure: the clock of the next cut, named by the primary of a store's first bundle.

The bundles of bsp are at the same clock, give or take one. While the clock moves, the next cut is some steps
ahead, so that no bundle has passed it when the other servers learn it. If one had passed it nevertheless, the
next naming is twice as far ahead in time. If the clock stands still, as between two epochs, the cut is at it.
"""

from math import ceil

from adam_async.run.cut_reports import NO_CLOCK, NamedCut

FIRST_AHEAD_S, MOST_AHEAD_S = 0.02, 10.0
"""First and longest time between the naming of a cut and its clock, in seconds."""

MOST_AHEAD = 1 << 20
"""Maximum number of steps between a clock and the cut that is named at it."""

LATE_S = 60.0
"""Time after which a cut is named although a server has not handled the one before, in seconds."""


class CutNaming:
    """The names of the cuts of one store.

    Args:
        now: Time in seconds of the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self._named: NamedCut | None = None
        self._named_at = now
        self._clock, self._moved_at = NO_CLOCK, now
        self._step_s = 0.0
        self._ahead_s = FIRST_AHEAD_S

    def _observe(self, now: float, clock: int) -> bool:
        """Take the present clock; returns whether it has moved since the last call."""
        if clock == self._clock:
            return False
        if NO_CLOCK < self._clock < clock:
            self._step_s = (now - self._moved_at) / (clock - self._clock)
        is_first = self._clock == NO_CLOCK
        self._clock, self._moved_at = clock, now
        return not is_first

    def next(
        self,
        now: float,
        clock: int,
        *,
        period_s: float,
        newest: NamedCut | None,
        handled: int,
        passed: int,
        complete: int,
    ) -> NamedCut | None:
        """Return the next cut; None if none is due.

        Args:
            now: Time in seconds of the caller's clock.
            clock: Clock of the bundle of this server.
            period_s: Time between two cuts, in seconds.
            newest: Newest naming in the map, perhaps of another server.
            handled: Least number that all servers have handled.
            passed: Highest clock that a shard had passed when the last naming arrived; 0 if none had.
            complete: Newest clock at which the disks have all bundles.
        """
        is_moving = self._observe(now, clock)
        last = self._named
        if last is None or (newest is not None and newest.number > last.number):
            last = newest
        if last is not None and handled < last.number:
            is_stuck = not is_moving and clock < last.clock and now - self._moved_at >= period_s
            if now - self._named_at < (period_s if is_stuck else LATE_S):
                return None
        elif not passed and now - self._named_at < period_s:
            return None
        if passed:
            self._ahead_s = min(2 * self._ahead_s, MOST_AHEAD_S)
        target = max(clock, passed)
        if is_moving:
            ahead = ceil(self._ahead_s / self._step_s) if self._step_s else MOST_AHEAD
            target += min(max(ahead, 1), MOST_AHEAD)
        if target == complete:
            return None
        if last is not None:
            complete = max(complete, last.complete)
        self._named_at = now
        self._named = NamedCut(1 if last is None else last.number + 1, target, complete)
        return self._named

    def __repr__(self) -> str:
        return f"<CutNaming {self._named}>"
