"""The picture of `benchmarks/in_flight.py`: rates over groups in flight, a panel per group size.

Points are measured, lines are predictions; both axes are logarithmic.
"""

import math
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 980, 440
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 70, 30, 76, 60, 80
INK, PAPER, PALE = "#1f2933", "#ffffff", "#dfe4ea"
COLOURS = ("#6b7785", "#1f5fa8", "#3c8d40", "#d9732f", "#c2185b")

Row = dict[str, Any]


def picture(rows: list[Row]) -> str:
    """The whole drawing.

    Args:
        rows: Rows in the benchmark's form; rows of accuracies are left out.
    """
    points = [row for row in rows if row["unit"] == "groups/s"]
    delays = sorted({row["asked_ms"] for row in points})
    sizes = sorted({row["images"] for row in points}, reverse=True)
    width = (WIDTH - LEFT - RIGHT - BETWEEN * (len(sizes) - 1)) / len(sizes)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="13" '
            'font-family="sans-serif" role="img" '
            'aria-label="Groups per second against groups in flight, for several delays of a link">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
    ]
    for place, images in enumerate(sizes):
        panel = Panel(LEFT + place * (width + BETWEEN), width, [r for r in points if r["images"] == images])
        parts += panel.axes(f"{images} image{'s' if images > 1 else ''} per group")
        for delay, colour in zip(delays, COLOURS, strict=False):
            parts += panel.curve(delay, colour)
    for place, (delay, colour) in enumerate(zip(delays, COLOURS, strict=False)):
        parts += legend(LEFT + 118 * place, colour, f"{delay:g} ms" if delay else "no delay")
    parts.append(text(WIDTH - RIGHT, 28, "points: measured; lines: predicted", anchor="end"))
    return "\n".join([*parts, "</svg>"]) + "\n"


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
        parts = [text(self._left, TOP - 14, f"{title}: groups/s", anchor="start")]
        for power in range(self._low, self._high + 1):
            y = self.y(2.0**power)
            parts.append(f'<path d="M{self._left:.1f} {y:.1f}H{right:.1f}" stroke="{PALE}"/>')
            parts.append(text(self._left - 8, y + 4, f"{2.0**power:g}", anchor="end"))
        for n in sorted({row["in_flight"] for row in self._rows}):
            x = self.x(n)
            parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{PALE}"/>')
            parts.append(text(x, bottom + 20, str(n)))
        return [*parts, text(self._left + self._width / 2, HEIGHT - 18, "groups in flight")]

    def curve(self, delay: float, colour: str) -> list[str]:
        """The points of one delay, and the line of the prediction."""
        rows = sorted((r for r in self._rows if r["asked_ms"] == delay), key=lambda row: row["in_flight"])
        line = " ".join(f"{self.x(row['in_flight']):.1f},{self.y(row['peer']):.1f}" for row in rows)
        return [
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.4"/>',
            *(
                f'<circle cx="{self.x(row["in_flight"]):.1f}" cy="{self.y(row["ours"]):.1f}" r="4" '
                f'fill="{colour}"/>'
                for row in rows
            ),
        ]


def legend(x: float, colour: str, name: str) -> list[str]:
    """Return the entry of a delay in the legend."""
    return [
        f'<path d="M{x} 24h26" stroke="{colour}" stroke-width="3"/>',
        text(x + 34, 28, name, anchor="start"),
    ]


def text(x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    """Return a text element at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(words)}</text>'
