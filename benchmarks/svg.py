"""Elements of the pictures that benchmarks draw: texts, lines and legends of an SVG file."""

from collections.abc import Iterable
from xml.sax.saxutils import escape

INK, PAPER, PALE = "#1f2933", "#ffffff", "#dfe4ea"


def drawing(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    """Return a whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13" '
        f'font-family="sans-serif" role="img" aria-label="{label}">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([head, paper, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, *, anchor: str = "middle", colour: str = INK) -> str:
    """Return a text at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def line(x1: float | str, y1: float | str, x2: float | str, y2: float | str) -> str:
    """Return a pale line of a grid."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{PALE}"/>'


def points(places: Iterable[tuple[float, float]], radius: float, colour: str) -> list[str]:
    """Return a point at each place."""
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in places]


def curve(places: Iterable[tuple[float, float]], width: float, colour: str) -> str:
    """Return a line through places."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def legend(x: float, y: float, colour: str, name: str) -> list[str]:
    """Return the entry of a curve."""
    return [
        f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" stroke="{colour}" stroke-width="3"/>',
        text(x + 34, y + 4, name, anchor="start"),
    ]
