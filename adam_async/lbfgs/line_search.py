"""Pure: a line search for the strong Wolfe conditions (Nocedal and Wright, Numerical Optimization, 3.5, 3.6).

The search looks for a step t along a direction from a point with value f and slope p, p < 0. The step must
decrease the value sufficiently, f(t) <= f + c1 t p, and be long enough, |p(t)| <= c2 |p|. Steps double until
an interval contains such a step; cubic interpolation then narrows the interval. A value that is not finite
counts as too large.
"""

from math import copysign, isfinite, sqrt
from typing import Annotated, Literal

import msgspec

DECREASE, CURVATURE = 1e-4, 0.9
"""The constants c1 and c2 of the Wolfe conditions, without a unit."""

MOST_TRIES = 24
"""Maximum number of evaluations in one line search."""

MARGIN = 0.1
"""Least distance of an interpolated step from both ends of its interval, as a share of the interval."""

ROUNDING = 2.0**-50
"""Largest change of a value that may be rounding alone, as a share of the value."""

Verdict = Literal["evaluate", "accept", "fail"]
"""Outcome of an evaluation: evaluate again at `LineSearch.step`, or end the search."""


class Trial(msgspec.Struct, frozen=True):
    """A step along the direction, with the value and the slope there."""

    step: float
    value: float
    slope: float


class LineSearch(msgspec.Struct, kw_only=True):
    """One search, as numbers that can be stored.

    Attributes:
        start: The point where the search begins; its step is 0, and its slope negative.
        step: The step to evaluate next.
        low: The end of the interval with the lower value; before there is an interval, the last trial.
        high: The other end; None until there is an interval.
        tries: Number of evaluations so far.
        is_last: Whether the search takes the next evaluation whatever its slope.
    """

    start: Trial
    step: float
    low: Trial
    high: Trial | None = None
    tries: Annotated[int, msgspec.Meta(ge=0)] = 0
    is_last: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a search can have these numbers: others would divide by zero, or send no finite step."""
        start, low, high = self.start, self.low, self.high
        is_finite = all(map(isfinite, [start.value, start.slope, self.step, *msgspec.structs.astuple(low)]))
        is_wide = high is None or (isfinite(high.step) and high.step != low.step)
        has_step = self.is_last or self.step != low.step
        return is_finite and is_wide and has_step and start.step == 0 and start.slope < 0

    @classmethod
    def begin(cls, value: float, slope: float, step: float) -> "LineSearch":
        """Return a search that begins at a value and a negative slope, with a first step to try."""
        start = Trial(0.0, value, slope)
        return cls(start=start, step=step, low=start)

    def take(self, value: float, slope: float) -> Verdict:
        """Take the value and the slope at `step`."""
        self.tries += 1
        trial, start = Trial(self.step, value, slope), self.start
        is_finite = isfinite(value) and isfinite(slope)
        # With a step below rounding the bound equals the value, so no decrease would pass.
        bound = start.value + DECREASE * trial.step * start.slope
        decreases = is_finite and value <= bound and value < start.value
        if decreases and (self.is_last or abs(slope) <= -CURVATURE * start.slope):
            return "accept"
        if self.is_last:
            return "fail"
        is_lower = decreases and (value < self.low.value or not self.low.step)
        # A step that is too short changes the value by no more than its rounding, and the slope by little.
        is_flat = is_finite and abs(value - start.value) <= ROUNDING * abs(start.value)
        if is_flat and self.high is None and slope < CURVATURE * start.slope:
            is_lower = True
        if not is_lower:
            self.high = trial
        elif self.high is None:
            # A rising slope behind a lower value: the minimum lies between the last trial and this one.
            self.high = self.low if slope >= 0 else None
            self.low = trial
        else:
            if slope * (self.high.step - self.low.step) >= 0:
                self.high = self.low
            self.low = trial
        return self._next()

    def _next(self) -> Verdict:
        """Choose the next step."""
        if self.tries < MOST_TRIES - 1:
            before = self.step
            self.step = 2 * self.low.step if self.high is None else _between(self.low, self.high)
            if isfinite(self.step) and self.step not in (before, self.low.step):
                return "evaluate"
        # No step fulfils both conditions in time: the best one with a decrease has to do, if there is one.
        self.step, self.is_last = self.low.step, True
        return "evaluate" if self.step else "fail"


def _between(low: Trial, high: Trial) -> float:
    """Return a step inside the interval: the minimum of the cubic through both ends, if it has one."""
    width, share = high.step - low.step, 0.5
    if isfinite(high.value) and isfinite(high.slope):
        mean = low.slope + high.slope - 3 * (high.value - low.value) / width
        square = mean * mean - low.slope * high.slope
        root = copysign(sqrt(max(square, 0.0)), width)
        below = high.slope - low.slope + 2 * root
        # Huge values overflow, and then the middle has to do.
        if square >= 0 and below and isfinite(square):
            share = 1 - (high.slope + root - mean) / below
    return low.step + width * min(max(share, MARGIN), 1 - MARGIN)
