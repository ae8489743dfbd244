"""Fault points of product code, which simulated runs switch on, and marks of the events that runs reach.

    if fault_points.ON and fault_points.fires("ps.answer.late"):        # or a tiny buffer, a batch of one
        await asyncio.sleep(1.0)
    if fault_points.ON:
        fault_points.sometimes("a push came again after its server was asked for values")

`ON` is False in production, so a fault point costs one test of a name. A simulated run enables or disables
each fault point for its whole duration, and an enabled fault point fires at random. Runs with different
subsets of faults find more errors than runs with a few faults of every kind. A mark that none of many runs
sets shows an event that the scenarios do not reach.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, Self


class RandomSource(Protocol):
    """Random numbers of a simulated run."""

    def random(self) -> float:
        """Return a number in [0, 1)."""

    def fork(self, name: str, /) -> Self:
        """Return the numbers of one concern."""


ENABLED = 0.25
"""Probability that a run enables a fault point."""

FIRES = 0.25
"""Probability that an enabled fault point fires at a call."""

ON = False
"""Whether fault points are on: in simulated runs only."""

_dice: RandomSource | None = None
_enabled: dict[str, bool] = {}
_marks: Counter[str] = Counter()


def fires(place: str) -> bool:
    """Return whether a fault point fires now. Call the function only if `ON`."""
    assert _dice is not None, "fault points are off"
    enabled = _enabled.get(place)
    if enabled is None:
        enabled = _enabled[place] = _dice.fork(place).random() < ENABLED
    fired = enabled and _dice.random() < FIRES
    if fired:
        _marks[place] += 1
    return fired


def sometimes(mark: str) -> None:
    """Count a mark: an event that not every run reaches. Call the function only if `ON`."""
    _marks[mark] += 1


@contextmanager
def unkind(dice: RandomSource) -> Iterator[Counter[str]]:
    """Switch fault points on for a block; yield the counts of its marks and fired fault points."""
    global ON, _dice, _enabled, _marks
    before = ON, _dice, _enabled, _marks
    ON, _dice, _enabled, _marks = True, dice, {}, Counter()
    try:
        yield _marks
    finally:
        ON, _dice, _enabled, _marks = before
