"""The fault points of product code (`adam_async/runtime/fault_points.py`) in a simulated run.

A run enables or disables each fault point for its whole duration, and an enabled fault point fires at random.
Runs with different subsets of faults find more errors than runs with a few faults of every kind.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from adam_async.runtime import fault_points
from tests.simulation.random_streams import RandomStream

ENABLED = 0.25
"""Probability that a run enables a fault point."""

FIRES = 0.25
"""Probability that an enabled fault point fires at a call."""


@contextmanager
def unkind(dice: RandomStream) -> Iterator[Counter[str]]:
    """Switch fault points on for a block; yield the counts of its marks and of fired fault points."""
    enabled: dict[str, bool] = {}
    marks = Counter[str]()

    def fires(place: str) -> bool:
        """Return whether a fault point fires now."""
        if place not in enabled:
            enabled[place] = dice.fork(place).random() < ENABLED
        fired = enabled[place] and dice.random() < FIRES
        if fired:
            marks[place] += 1
        return fired

    def sometimes(mark: str) -> None:
        marks[mark] += 1

    before = fault_points.ON, fault_points.fires, fault_points.sometimes
    fault_points.ON, fault_points.fires, fault_points.sometimes = True, fires, sometimes
    try:
        yield marks
    finally:
        fault_points.ON, fault_points.fires, fault_points.sometimes = before
