"""Fault points in product code, which simulations switch on, and marks for events that runs reach.

    if fault_points.ON and fault_points.fires("ps.answer.late"):        # or a tiny buffer, a batch of one
        await asyncio.sleep(1.0)
    if fault_points.ON:
        fault_points.sometimes("a push came again after its server was asked for values")

`ON` is False in production, so a fault point costs one test of a name. A simulation sets `ON` and the two
functions; they are called only if `ON`. A mark that no run sets shows an event that the scenarios never
reach.
"""

from collections.abc import Callable

ON = False
"""Whether fault points are on: in simulated runs only."""


def _is_off(name: str) -> bool:
    return False


fires: Callable[[str], bool] = _is_off
"""Function that returns whether a fault point fires now."""

sometimes: Callable[[str], object] = _is_off
"""Function that counts a mark: an event that only some runs reach."""
