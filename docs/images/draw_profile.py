"""Draw the picture of docs/how-to/profile.md: one second of a run, and a few milliseconds of it.

adam-async train --profile run.json --epochs 1
python docs/images/draw_profile.py run.json        writes profile.svg beside this file
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

INK, PAPER, PALE, ARROW = "#1f2933", "#ffffff", "#f4f6f8", "#c2185b"
COLOURS = {
    "train": "#8fcf8a",
    "deliver": "#7fb2e5",
    "lease": "#1f5fa8",
    "push": "#f2b45c",
    "apply": "#d9732f",
    "record": "#d9732f",
    "report": "#a58bd0",
    "flush": "#f2b45c",
    "messages": "#6b7785",
}
LEFT, RIGHT, LANE, GAP = 130, 36, 22, 6
WIDTH = 1100
SECOND_US = 1e6

Event = dict[str, Any]


def kind_of(event: Event) -> str:
    """What a slice is: the first word of its name; messages are all of a kind."""
    return "messages" if event["ph"] == "i" else str(event["name"]).split(" ")[0]


class Panel:
    """A window of time over some lanes.

    Args:
        lanes: (pid, tid) of each lane, from the top, and its name.
        begin_us: Where the window begins.
        width_us: How long it is.
        top: Where it begins on the page.
    """

    def __init__(
        self, lanes: dict[tuple[int, int], str], *, begin_us: float, width_us: float, top: float
    ) -> None:
        self.lanes, self.begin, self.width, self.top = lanes, begin_us, width_us, top
        self.rows = {lane: top + place * (LANE + GAP) for place, lane in enumerate(lanes)}
        self.height = len(lanes) * (LANE + GAP)

    def x(self, at_us: float) -> float:
        """Where a time is on the page."""
        return LEFT + (at_us - self.begin) / self.width * (WIDTH - LEFT - RIGHT)

    def holds(self, event: Event) -> bool:
        """Whether any of an event lies in the window."""
        ends = event["ts"] + event.get("dur", 0.0)
        inside = event["ts"] < self.begin + self.width and ends > self.begin
        return inside and (event["pid"], event["tid"]) in self.rows

    def crossed_by(self, flow: list[Event]) -> bool:
        """Whether two points of a journey lie in the window."""
        return sum(self.begin <= point["ts"] < self.begin + self.width for point in flow) > 1

    def frame(self, step_us: float, unit_us: float, unit: str) -> list[str]:
        """Names and backgrounds of the lanes, and times below them."""
        parts = []
        for lane, y in self.rows.items():
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" fill="{PALE}"/>'
            )
            parts.append(text(LEFT - 8, y + 15, self.lanes[lane], anchor="end"))
        for tick in range(int(self.width / step_us) + 1):
            x = self.x(self.begin + tick * step_us)
            parts.append(f'<path d="M{x:.1f} {self.top}v{self.height}" stroke="#d3d9df"/>')
            words = f"{tick * step_us / unit_us:g} {unit}"
            parts.append(text(x, self.top + self.height + 14, words, anchor="middle"))
        return parts

    def bars(self, events: list[Event]) -> list[str]:
        """Slices and instants, one path for all of a colour; what touches at this scale is one line."""
        runs: dict[tuple[str, float], list[list[float]]] = {}
        for event in events:
            if event["ph"] not in "Xi" or not self.holds(event):
                continue
            kind = kind_of(event)
            start = max(self.x(event["ts"]), LEFT)
            end = min(self.x(event["ts"] + event.get("dur", 0.0)), WIDTH - RIGHT)
            found = runs.setdefault((kind, self.rows[event["pid"], event["tid"]]), [])
            if found and start - found[-1][1] < 0.1:
                found[-1][1] = max(end, found[-1][1])
            else:
                found.append([start, max(end, start + 0.4)])
        parts = []
        order = list(COLOURS)
        # Short slices lie within long ones: those that enclose are drawn first.
        for (kind, y), spans in sorted(runs.items(), key=lambda run: order.index(run[0][0])):
            thick = LANE - 8 if kind in ("push", "record", "apply") else LANE - 2
            path = "".join(f"M{start:.1f} {y + LANE / 2:g}h{end - start:.1f}" for start, end in spans)
            parts.append(f'<path d="{path}" stroke="{COLOURS[kind]}" stroke-width="{thick}"/>')
        return parts

    def names(self, events: list[Event]) -> list[str]:
        """What groups are trained, where there is room to say so."""
        parts = []
        for event in events:
            if event["ph"] == "X" and event["name"] == "train" and self.holds(event):
                start = max(self.x(event["ts"]), LEFT)
                end = min(self.x(event["ts"] + event["dur"]), WIDTH - RIGHT)
                if end - start > 30:
                    y = self.rows[event["pid"], event["tid"]] + 15
                    parts.append(text((start + end) / 2, y, str(event["args"]["group"]), anchor="middle"))
        return parts

    def arrow(self, points: list[Event], *, strong: bool) -> str:
        """The journey of a group: curves from point to point."""
        style = f'stroke="{ARROW}" stroke-width="2" marker-end="url(#head)"'
        if not strong:
            style = f'stroke="{ARROW}" stroke-width="0.7" opacity="0.35"'
        places = [
            (self.x(point["ts"]), self.rows[point["pid"], point["tid"]] + LANE / 2)
            for point in points
            if (point["pid"], point["tid"]) in self.rows
        ]
        path = f"M{places[0][0]:.1f} {places[0][1]:g}"
        for (x1, y1), (x2, y2) in itertools.pairwise(places):
            # Along its lane it would hide what is there: it leaves it a little.
            bow = 16 if y1 == y2 else 0
            middle = (x1 + x2) / 2
            path += f"C{middle:.1f} {y1 - bow:g} {middle:.1f} {y2 - bow:g} {x2:.1f} {y2:g}"
        return f'<path d="{path}" fill="none" {style}/>'


def text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def lanes_of(events: list[Event]) -> dict[tuple[int, int], str]:
    """Lanes in their order: loops, threads and links, without the phases of the driver."""
    named = {}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for event in events:
        if event["name"] == "thread_name" and "driver" not in event["args"]["name"]:
            prefix = f"{processes[event['pid']]} " if len(processes) > 1 else ""
            named[event["pid"], event["tid"]] = prefix + event["args"]["name"]
    return named


def journeys(events: list[Event]) -> list[list[Event]]:
    """Points of each group's arrows, in the order in which the groups were first seen."""
    found: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            found.setdefault(event["id"], []).append(event)
    return list(found.values())


def picture(events: list[Event]) -> str:
    """Return the whole drawing.

    Args:
        events: The trace events of a profile.
    """
    lanes, flows = lanes_of(events), journeys(events)
    # From the second quarter of the groups, where training runs evenly: one that took as long as most.
    chosen = flows[len(flows) // 4 : len(flows) // 2] or flows
    shown = sorted(chosen, key=lambda flow: flow[-1]["ts"] - flow[1]["ts"])[len(chosen) // 2]
    close_us = 1.25 * (shown[-1]["ts"] - shown[1]["ts"])
    close_begin = shown[1]["ts"] - 0.1 * close_us
    whole = Panel(lanes, begin_us=close_begin - SECOND_US / 2, width_us=SECOND_US, top=60)
    near = Panel(lanes, begin_us=close_begin, width_us=close_us, top=whole.top + whole.height + 84)
    height = near.top + near.height + 60
    title = (
        f"{close_us / 1000:.1f} ms in the middle of it, with the journey of group {group_of(shown, events)}"
    )
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            'font-family="sans-serif" font-size="12" role="img" '
            'aria-label="A profile: lanes of threads and links, and the journey of a group through them">'
        ),
        (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{ARROW}"/></marker>'
            f'<clipPath id="near"><rect x="{LEFT}" y="{near.top - 20}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{near.height + 24}"/></clipPath></defs>'
        ),
        f'<rect width="{WIDTH}" height="{height:g}" fill="{PAPER}"/>',
        f'<g fill="{INK}">',
        text(LEFT, 40, "One second of training", bold=True),
        *whole.frame(SECOND_US / 10, 1000.0, "ms"),
        *whole.bars(events),
        text(LEFT, near.top - 26, title, bold=True),
        *near.frame(500.0 * max(1, round(close_us / 5000)), 1000.0, "ms"),
        *near.bars(events),
        *near.names(events),
        '<g clip-path="url(#near)">',
        *(near.arrow(flow, strong=False) for flow in flows if flow is not shown and near.crossed_by(flow)),
        near.arrow(shown, strong=True),
        "</g>",
        *legend(
            [event for event in events if event["ph"] in "Xi" and whole.holds(event)],
            near.top + near.height + 44,
        ),
        "</g></svg>\n",
    ]
    return "\n".join(parts)


def group_of(flow: list[Event], events: list[Event]) -> int:
    """The number of the group whose journey this is: that of the slice where it was trained."""
    places = {(point["ts"], point["tid"]) for point in flow}
    return next(
        int(event["args"]["group"])
        for event in events
        if event["name"] == "train" and (event["ts"], event["tid"]) in places
    )


def legend(events: list[Event], y: float) -> list[str]:
    """The colours that occur, with their names."""
    seen = {kind_of(event) for event in events}
    parts, x = [], float(LEFT)
    for kind, colour in COLOURS.items():
        if kind in seen:
            parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{colour}"/>')
            parts.append(text(x + 20, y, kind))
            x += 95
    parts.append(f'<path d="M{x} {y - 4}h24" stroke="{ARROW}" stroke-width="2" marker-end="url(#head)"/>')
    parts.append(text(x + 32, y, "journey of a group"))
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profile", type=Path)
    read = json.loads(parser.parse_args().profile.read_text())["traceEvents"]
    Path(__file__).with_name("profile.svg").write_text(picture(read))
