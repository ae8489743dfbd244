"""Pure: a partition plan as a picture: workers as columns, layers as rows, arrows for what crosses.

A box is what a worker computes of a layer, with a bar that shows which part of the whole it is. Under the
row of a layer lies an arrow for each way on which its output crosses, with the values of one image; a dot
where it begins says that as many error gradients come back. The last row is weight gradients on their way to
who adds them up.

The picture is a list of shapes that is written as SVG, or drawn with matplotlib (of the extra ``plot``) into
a PNG.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from adam_async.cli.plan.report import block_words, unit_of
from adam_async.errors import ConfigError
from adam_async.model.layer import Layer, extent
from adam_async.model.network import Network
from adam_async.model.partition.plan import Crossing, Layout, PartitionPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, PALE, PAPER = "#1f2933", "#6b7785", "#ffffff"
COMPUTED, AGAIN, MOVED, BAR = "#e3f3e1", "#fbe9d3", "#f4f6f8", "#8fcf8a"
FORWARD, SUMS = "#1f5fa8", "#c2185b"

MARGIN, LABELS, COLUMN, GAP = 20, 170, 230, 40
HEAD, BOX, LINE, SPACE = 76, 34, 19, 8
DOT = 3.5
DOTS_PER_INCH = 144
POINTS_PER_INCH = 72


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, its corner at the upper left."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    border: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """One line of words; `y` is its base line."""

    x: float
    y: float
    words: str
    size: int = 12
    anchor: str = "middle"
    colour: str = INK
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Arrow:
    """A level line with a head at its end, and a dot at its beginning if something comes back."""

    x1: float
    x2: float
    y: float
    colour: str
    back: bool = False


Shape = Box | Text | Arrow


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes in the order in which they are drawn."""

    width: int
    height: int
    title: str
    shapes: tuple[Shape, ...]


def draw_plan(network: Network, plan: PartitionPlan) -> Picture:
    """Draw how a network is cut.

    Raises:
        ModelError: The plan is not one of this network.
    """
    layout = Layout(network.topology, network.input_shape, plan)
    width = MARGIN + LABELS + plan.workers * (COLUMN + GAP) - GAP + MARGIN
    title = _title(network, plan)
    shapes: list[Shape] = [Text(MARGIN, 28, title, 15, "start", bold=True)]
    legend = "values of one image; dot: as many error gradients come back"
    planned = zip(plan.layers, network.layers, strict=True)
    if any(each.recomputed and not layer.moves for each, layer in planned):
        legend += "; orange: some rows on several workers"
    shapes.append(Text(MARGIN, 47, legend, 12, "start", PALE))
    shapes += [Text(_middle(w), HEAD - 6, f"worker {w}", 13, bold=True) for w in layout.workers]
    y = HEAD
    for number, layer in enumerate(network.layers):
        shapes += _row(layout, number, layer, y)
        y += BOX
        ways = [c for c in layout.crossings if c.layer == number and c.kind == "activation"]
        for way in ways:
            y += LINE
            back = network.topology.wants_error[number]
            shapes += _way(way, y - 5, f"{way.values:,}", FORWARD, back=back)
        y += SPACE
    sums = [c for c in layout.crossings if c.kind == "gradient"]
    if sums:
        shapes.append(Text(MARGIN, y + BOX - 14, "weight gradients", 12, "start", bold=True))
        shapes.append(Text(MARGIN, y + BOX, "of a group, to be added up", 11, "start", PALE))
    for way in sums:
        y += LINE
        shapes += _way(way, y - 2, f"{way.values:,}", SUMS, back=False)
    return Picture(width, y + MARGIN + LINE, title, tuple(shapes))


def _title(network: Network, plan: PartitionPlan) -> str:
    if plan.workers == 1:
        return f"{network.spec.name}, one worker"
    return f"{network.spec.name}, plan {plan.kind} over {plan.workers} workers"


def _left(worker: int) -> float:
    return MARGIN + LABELS + worker * (COLUMN + GAP)


def _middle(worker: int) -> float:
    return _left(worker) + COLUMN / 2


def _row(layout: Layout, number: int, layer: Layer, y: float) -> Iterator[Shape]:
    """The name of a layer, and what each worker computes of it."""
    shape = " x ".join(map(str, layer.output_shape)) or "1"
    yield Text(MARGIN, y + 15, layer.name, 12, "start", bold=True)
    yield Text(MARGIN, y + 29, f"{layer.spec.kind.replace('_', ' ')}, {shape}", 10, "start", PALE)
    again = layout.plan.layers[number].recomputed
    whole = extent(layer.output_shape)
    for worker in layout.workers:
        rows = layout.computes[number][worker]
        if not rows:
            continue
        fill = MOVED if layer.moves else AGAIN if again else COMPUTED
        yield Box(_left(worker), y, COLUMN, BOX, fill, border=True)
        words = block_words(unit_of(layer.output_shape), rows.start, rows.stop, whole)
        yield Text(_middle(worker), y + 20, words)
        step = (COLUMN - 2) / whole
        yield Box(_left(worker) + 1 + rows.start * step, y + BOX - 6, len(rows) * step, 5, BAR)


def _way(way: Crossing, y: float, words: str, colour: str, *, back: bool) -> Iterator[Shape]:
    """An arrow between the columns of two workers, with its number on it."""
    right = way.target > way.source
    near = COLUMN / 4 if right else -COLUMN / 4
    begin, end = _middle(way.source) + near, _middle(way.target) - near
    middle, width = (begin + end) / 2, 7.2 * len(words) + 10
    yield Arrow(begin, end, y, colour, back)
    yield Box(middle - width / 2, y - 8, width, 16, PAPER)
    yield Text(middle, y + 4, words, colour=colour)


def svg(picture: Picture) -> str:
    """The picture as the text of an SVG file."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
        for name, colour in _HEADS.items()
    )
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" '
            f'font-family="sans-serif" role="img" aria-label={quoteattr(picture.title)}>'
        ),
        f"<defs>{heads}</defs>",
        f'<rect width="{picture.width}" height="{picture.height}" fill="{PAPER}"/>',
        *map(_element, picture.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


_HEADS = {"values": FORWARD, "sums": SUMS}


def _element(shape: Shape) -> str:
    match shape:
        case Box():
            border = f' stroke="{INK}" rx="3"' if shape.border else ""
            return (
                f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}" '
                f'fill="{shape.fill}"{border}/>'
            )
        case Text():
            bold = ' font-weight="bold"' if shape.bold else ""
            return (
                f'<text x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size}" '
                f'text-anchor="{shape.anchor}" fill="{shape.colour}"{bold}>{escape(shape.words)}</text>'
            )
        case Arrow():
            head = next(name for name, colour in _HEADS.items() if colour == shape.colour)
            dot = f'<circle cx="{shape.x1:g}" cy="{shape.y:g}" r="{DOT}" fill="{shape.colour}"/>'
            return (
                f'<line x1="{shape.x1:g}" y1="{shape.y:g}" x2="{shape.x2:g}" y2="{shape.y:g}" '
                f'stroke="{shape.colour}" stroke-width="1.5" marker-end="url(#{head})"/>'
            ) + (dot if shape.back else "")


def png(picture: Picture) -> bytes:
    """The picture as a PNG file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a PNG needs matplotlib, of the extra `plot`: pip install 'adam-async[plot]'; or name a .svg"
        ) from None
    size = (picture.width / POINTS_PER_INCH, picture.height / POINTS_PER_INCH)
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.set_axis_off()
    _paint(axes, picture.shapes)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _paint(axes: "Axes", shapes: Sequence[Shape]) -> None:
    from matplotlib.patches import Circle, Rectangle

    for order, shape in enumerate(shapes):
        match shape:
            case Box():
                box = Rectangle((shape.x, shape.y), shape.width, shape.height, facecolor=shape.fill)
                box.set_edgecolor(INK if shape.border else "none")
                box.set_zorder(order)
                axes.add_patch(box)
            case Text():
                axes.text(
                    shape.x,
                    shape.y,
                    shape.words,
                    fontsize=shape.size,
                    ha={"start": "left"}.get(shape.anchor, "center"),
                    va="baseline",
                    color=shape.colour,
                    fontweight="bold" if shape.bold else "normal",
                    zorder=order,
                )
            case Arrow():
                begin, end = (shape.x1, shape.y), (shape.x2, shape.y)
                style = {"arrowstyle": "-|>", "color": shape.colour, "shrinkA": 0, "shrinkB": 0}
                axes.annotate("", end, begin, arrowprops=style, zorder=order)
                if shape.back:
                    axes.add_patch(Circle(begin, DOT, color=shape.colour, zorder=order))
