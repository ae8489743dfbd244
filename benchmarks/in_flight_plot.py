"""The picture of `benchmarks/in_flight.py`: rates over groups in flight, a panel per group size.

Points are measured, lines are predictions; both axes are logarithmic.
"""

import math
from typing import Any

from benchmarks import svg

WIDTH, HEIGHT = 980, 440
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 70, 30, 76, 60, 80
COLOURS = ("#6b7785", "#1f5fa8", "#3c8d40", "#d9732f", "#c2185b")

Row = dict[str, Any]


def picture(rows: list[Row]) -> str:
    """The whole drawing of the benchmark's rows."""
    delays = sorted({row["asked_ms"] for row in rows})
    sizes = sorted({row["images"] for row in rows}, reverse=True)
    width = (WIDTH - LEFT - RIGHT - BETWEEN * (len(sizes) - 1)) / len(sizes)
    parts: list[str] = []
    for place, images in enumerate(sizes):
        panel = Panel(LEFT + place * (width + BETWEEN), width, [r for r in rows if r["images"] == images])
        parts += panel.axes(f"{images} image{'s' if images > 1 else ''} per group")
        for delay, colour in zip(delays, COLOURS, strict=False):
            parts += panel.curve(delay, colour)
    for place, (delay, colour) in enumerate(zip(delays, COLOURS, strict=False)):
        parts += svg.legend(LEFT + 118 * place, 24, colour, f"{delay:g} ms" if delay else "no delay")
    parts.append(svg.text(WIDTH - RIGHT, 28, "points: measured; lines: predicted", anchor="end"))
    label = "Groups per second against groups in flight, for several delays of a link"
    return svg.drawing(WIDTH, HEIGHT, label, parts)


class Panel:
    """Rates of one group size.

    Args:
        left: Left edge of the panel on the page.
        width: Width of the panel.
        rows: Points of the panel.
    """

    def __init__(self, left: float, width: float, rows: list[Row]) -> None:
        self._left, self._width, self._rows = left, width, rows
        rates = [rate for row in rows for rate in (row["ours"], row["peer"])]
        self._low = math.floor(math.log2(min(rates)))
        self._high = max(math.ceil(math.log2(max(rates))), self._low + 1)
        self._most = max(math.log2(row["in_flight"]) for row in rows) or 1.0

    def x(self, in_flight: float) -> float:
        """Position of a number of groups on the page."""
        return self._left + math.log2(in_flight) / self._most * self._width

    def y(self, rate: float) -> float:
        """Position of a rate on the page."""
        share = (math.log2(rate) - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def axes(self, title: str) -> list[str]:
        """Return the lines and numbers of both axes."""
        right, bottom = self._left + self._width, HEIGHT - BOTTOM
        parts = [svg.text(self._left, TOP - 14, f"{title}: groups/s", anchor="start")]
        for power in range(self._low, self._high + 1):
            y = self.y(2.0**power)
            parts.append(svg.line(f"{self._left:.1f}", f"{y:.1f}", f"{right:.1f}", f"{y:.1f}"))
            parts.append(svg.text(self._left - 8, y + 4, f"{2.0**power:g}", anchor="end"))
        for n in sorted({row["in_flight"] for row in self._rows}):
            x = self.x(n)
            parts.append(svg.line(f"{x:.1f}", TOP, f"{x:.1f}", bottom))
            parts.append(svg.text(x, bottom + 20, str(n)))
        return [*parts, svg.text(self._left + self._width / 2, HEIGHT - 18, "groups in flight")]

    def curve(self, delay: float, colour: str) -> list[str]:
        """The points of one delay, and the line of the prediction."""
        rows = sorted((r for r in self._rows if r["asked_ms"] == delay), key=lambda row: row["in_flight"])
        ours = [(self.x(row["in_flight"]), self.y(row["ours"])) for row in rows]
        peer = [(self.x(row["in_flight"]), self.y(row["peer"])) for row in rows]
        return [svg.curve(peer, 1.4, colour), *svg.points(ours, 4, colour)]
