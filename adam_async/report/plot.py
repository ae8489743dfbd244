"""Plots of runs over time from their reports: six panels with a line per run.

Plots need matplotlib, of the extra ``plot``, and are drawn in memory, without a screen.
"""

import io
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from adam_async.errors import ConfigError, install_command
from adam_async.report.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = tuple[list[float], list[float]]
"""Seconds of training, and a value at each."""

NOTHING = float("nan")
"""Value that the plot shows as a gap."""

INCHES, DOTS_PER_INCH = (12.0, 7.0), 110


def panels(report: Report) -> dict[str, Line]:
    """Return the lines of one run, by the title of their panel."""
    series = report.series
    times = [sample.s for sample in series]
    stale = [(sample.s, sample.staleness_mean) for sample in series if sample.staleness_mean is not None]
    return {
        "test accuracy": (
            list(accumulate(epoch.train_s for epoch in report.epochs)),
            [epoch.test_accuracy for epoch in report.epochs],
        ),
        "training loss": (times, [NOTHING if s.loss is None else s.loss for s in series]),
        "rate": (times, [sample.rate for sample in series]),
        "staleness": ([s for s, _ in stale], [mean for _, mean in stale]),
        "sent, MB": (times, [sample.bytes / 1e6 for sample in series]),
        "waited, s": (times, [sample.waited_s for sample in series]),
    }


def new_figure(inches: tuple[float, float]) -> "Figure":
    """Return an empty figure. Raises ConfigError: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"drawing needs matplotlib, of the extra `plot`: {install_command('plot')}"
        ) from None
    return Figure(figsize=inches, dpi=DOTS_PER_INCH, layout="constrained")


def draw(runs: Sequence[tuple[str, Report]]) -> "Figure":
    """Draw runs into the same panels. Raises ConfigError: matplotlib is not installed."""
    figure = new_figure(INCHES)
    lines = [panels(report) for _, report in runs]
    for place, (title, axes) in enumerate(zip(lines[0], figure.subplots(2, 3).flat, strict=True)):
        for (name, _), run in zip(runs, lines, strict=True):
            axes.plot(*run[title], label=name, marker="o", markersize=3, linewidth=1.2)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        if place >= 3:
            axes.set_xlabel("seconds of training")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4), frameon=False)
    return figure


def encode(figure: "Figure", form: Literal["png", "svg"]) -> bytes:
    """Return the picture as a file of this format, without the date."""
    stream = io.BytesIO()
    figure.savefig(stream, format=form, metadata={"Date": None} if form == "svg" else {})
    return stream.getvalue()
