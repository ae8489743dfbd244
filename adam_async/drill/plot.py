"""The picture of a drill: acknowledged pushes per second, the faults, and the times with missing copies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adam_async.drill.observations import BIN_S, Observations
from adam_async.drill.plan import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCHES = (11.0, 4.0)

MOST_POINTS = 1200
"""Maximum number of points of the line; more intervals are joined."""

COLORS = dict(zip(KINDS, ("tab:red", "tab:blue", "tab:purple"), strict=True))
"""Color of the mark of each kind of fault."""


def goodput(pushes: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return times in seconds, and the pushes per second in the interval that begins at each time.

    Args:
        pushes: Number of pushes in each interval of `BIN_S`.
    """
    joined = -(-len(pushes) // MOST_POINTS) or 1
    starts = range(0, len(pushes), joined)
    rates = [
        sum(pushes[start : start + joined]) / (BIN_S * len(pushes[start : start + joined]))
        for start in starts
    ]
    return [BIN_S * start for start in starts], rates


def draw(seen: Observations, figure: "Figure") -> None:
    """Draw a drill into an empty figure."""
    axes = figure.subplots()
    times, rates = goodput(seen.pushes)
    axes.plot(times, rates, drawstyle="steps-post", color="black", linewidth=0.8)
    labelled: set[str] = set()
    for fault in seen.faults:
        end_s = fault.at_s + fault.whole_s if fault.whole_s is not None else BIN_S * len(seen.pushes)
        band = "" if labelled else "copies missing"
        axes.axvspan(fault.at_s, end_s, color="tab:orange", alpha=0.2, linewidth=0, label=band)
        mark = "" if fault.kind in labelled else fault.kind
        axes.axvline(fault.at_s, color=COLORS[fault.kind], linewidth=1.2, label=mark)
        labelled.add(fault.kind)
    axes.set(xlabel="seconds", ylabel="acknowledged pushes per second", ylim=(0, None))
    if labelled:
        figure.legend(loc="outside upper center", ncols=len(labelled) + 1, frameon=False)
