"""Draw the picture of the README: the roles, and what they say to each other.

python docs/images/draw_roles.py        writes roles.svg beside this file
"""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 920, 430
INK, PAPER = "#1f2933", "#ffffff"
DATA, WORK, KEEP, RULE = "#dcebf7", "#e3f3e1", "#fbe9d3", "#ece6f5"


def box(x: int, y: int, width: int, height: int, fill: str, title: str, *lines: str) -> str:
    """A role: its name, and what it does in a few words."""
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" fill="{fill}" stroke="{INK}"/>',
        text(x + width // 2, y + 24, title, bold=True),
    ]
    parts += [text(x + width // 2, y + 46 + 18 * row, line) for row, line in enumerate(lines)]
    return "\n".join(parts)


def text(x: int, y: int, words: str, *, bold: bool = False, anchor: str = "middle") -> str:
    weight = ' font-weight="bold" font-size="15"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def arrow(x1: int, y1: int, x2: int, y2: int, *, dashed: bool = False, both: bool = False) -> str:
    """A line with a head at its end, or at both."""
    style = ' stroke-dasharray="5 4"' if dashed else ""
    style += ' marker-start="url(#head)"' if both else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5"{style} '
        'marker-end="url(#head)"/>'
    )


def picture() -> str:
    """Return the whole drawing."""
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="13" role="img" '
            'aria-label="Roles of a cluster and their messages">'
        ),
        (
            f'<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        f'<g fill="{INK}">',
        box(20, 190, 170, 110, DATA, "data server", "decodes and orders", "images; leases", "groups of them"),
        box(375, 130, 190, 100, WORK, "model worker", "a whole replica,", "T compute threads"),
        box(375, 260, 190, 100, WORK, "model worker", "a whole replica,", "T compute threads"),
        box(720, 130, 180, 100, KEEP, "parameter server", "shards of <= 1 MiB,", "one writer each"),
        box(720, 260, 180, 100, KEEP, "parameter server", "shards of <= 1 MiB,", "one writer each"),
        box(190, 20, 170, 74, RULE, "controller", "the cluster map"),
        box(580, 20, 170, 74, RULE, "driver", "starts, evaluates, ends"),
        arrow(193, 225, 372, 180, both=True),
        arrow(193, 265, 372, 310, both=True),
        text(255, 180, "image groups out,"),
        text(265, 312, "reports back"),
        arrow(565, 165, 717, 165),
        arrow(717, 195, 568, 195),
        arrow(565, 305, 717, 305),
        arrow(717, 325, 568, 325),
        arrow(565, 205, 717, 285),
        arrow(565, 285, 717, 205),
        text(641, 155, "deltas or factors"),
        text(641, 346, "new values"),
        arrow(578, 57, 363, 57, dashed=True),
        text(470, 48, "runs the epochs"),
        text(
            460, 404, "Everyone watches the controller's map. In one process the arrows hand over references;"
        ),
        text(460, 422, "between processes the same messages are frames over TCP."),
        "</g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("roles.svg").write_text(picture())
