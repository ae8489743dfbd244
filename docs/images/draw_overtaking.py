"""Draw the picture of docs/explanation/partitions.md: two groups, the later one done first.

python examples/09_overtaking.py run.json
python docs/images/draw_overtaking.py run.json        writes overtaking.svg beside this file
"""

import argparse
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

INK, PAPER, PALE, OTHERS = "#1f2933", "#ffffff", "#f4f6f8", "#c3ccd5"
FIRST, LATER = "#1f5fa8", "#c2185b"
WORKERS = ("worker-0", "worker-1")
WIDTH, LEFT, RIGHT, TOP = 1100, 100, 30, 70
LANE, BAR, BETWEEN = 66, 20, 150
CABLE_US = 4000.0
"""The least that the cable of the example takes: what left later has not arrived."""
LEAST_PX = 5.0
"""A segment takes less than a tenth of the way to the other worker, and is to be seen."""

Event = dict[str, Any]


class Journey:
    """One group's way through both workers.

    Args:
        group: Its number.
        events: All of the trace.
    """

    def __init__(self, group: int, events: list[Event]) -> None:
        own = [
            e for e in events if e["ph"] == "X" and e["args"].get("group") == group and e["cat"] in WORKERS
        ]
        own.sort(key=lambda event: event["ts"])
        self.group = group
        self.segments = [e for e in own if e["name"].startswith(("segment-", "summed"))]
        self.leaves = [e for e in own if e["name"].startswith("leave-")]
        self.ends = {e["cat"]: e["ts"] for e in own if e["name"] == "push"}
        self.begins = {e["cat"]: e["ts"] for e in own if e["name"] == "segment-0"}
        self.begin, self.end = min(self.begins.values()), max(self.ends.values())

    def overtaken_by(self, other: "Journey") -> bool:
        """Whether the other one began later at both workers, and was done earlier at both."""
        return all(self.begins[w] < other.begins[w] and other.ends[w] < self.ends[w] for w in WORKERS)

    def arrows(self) -> list[tuple[Event, Event]]:
        """What left one worker, and the segment of the other one that had waited for it.

        A segment is ready when the last of what it needs has come. If that was not the segment before it, it
        came from the other worker, with the latest message that can have arrived by then.
        """
        found = []
        before: dict[str, float] = {}
        for segment in self.segments:
            worker = segment["cat"]
            ready = segment["ts"] - segment["args"]["waited_us"]
            left = [e for e in self.leaves if e["cat"] != worker and e["ts"] + CABLE_US <= ready]
            if left and ready - before.get(worker, ready) > 500.0:
                found.append((left[-1], segment))
            before[worker] = segment["ts"] + segment["dur"]
        return found


def choose(events: list[Event]) -> tuple[Journey, Journey]:
    """Of all overtakings the plainest: the later group began much later, and was done much earlier."""
    numbers = sorted(
        {e["args"]["group"] for e in events if e["ph"] == "X" and e["name"] == "push" and e["cat"] in WORKERS}
    )
    journeys = [Journey(number, events) for number in numbers]
    pairs = [(a, b) for a in journeys for b in journeys if a.overtaken_by(b)]
    if not pairs:
        raise SystemExit("no group overtook another: run the example again")
    return max(pairs, key=lambda pair: min(pair[1].begin - pair[0].begin, pair[0].end - pair[1].end))


def picture(events: list[Event]) -> str:
    """Return the whole drawing.

    Args:
        events: The trace events of a profile.
    """
    first, later = choose(events)
    begin, span = first.begin - 500.0, first.end - first.begin + 2500.0
    lanes = {worker: TOP + place * (LANE + BETWEEN) for place, worker in enumerate(WORKERS)}

    def x(at_us: float) -> float:
        return LEFT + (at_us - begin) / span * (WIDTH - LEFT - RIGHT)

    bottom = lanes[WORKERS[1]] + LANE
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 56}" '
            'font-family="sans-serif" font-size="13" role="img" '
            'aria-label="Two groups go to and fro between two workers, and the later one is done first">'
        ),
        *(marker(name, colour) for name, colour in (("first", FIRST), ("later", LATER))),
        f'<rect width="{WIDTH}" height="{bottom + 56}" fill="{PAPER}"/>',
    ]
    for worker, y in lanes.items():
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" fill="{PALE}"/>'
        )
        parts.append(text(LEFT - 8, y + LANE / 2 + 4, worker, anchor="end"))
    for tick in range(0, int(span / 1000) + 1, 10):
        at = x(begin + 1000.0 * tick)
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="#d3d9df"/>')
        parts.append(text(at, bottom + 18, f"{tick} ms"))
    parts += others(events, (first.group, later.group), lanes, begin, span, x)
    for journey, colour, name, row in ((first, FIRST, "first", 0), (later, LATER, "later", 1)):
        parts += drawn(journey, colour, name, row, lanes, x)
    parts += legend(first.group, later.group)
    return "\n".join([*parts, "</svg>"]) + "\n"


def others(
    events: list[Event], but: tuple[int, int], lanes: dict[str, int], begin: float, span: float, x: Any
) -> list[str]:
    """What the workers computed meanwhile, for whatever other groups, as one path each."""
    parts = []
    for worker, y in lanes.items():
        path = "".join(
            f"M{x(e['ts']):.1f} {y + LANE - 8}h{max(x(e['ts'] + e['dur']) - x(e['ts']), 1.0):.1f}"
            for e in events
            if e["ph"] == "X"
            and e["cat"] == worker
            and e["name"].startswith(("segment-", "summed"))
            and e["args"]["group"] not in but
            and begin <= e["ts"] < begin + span
        )
        parts.append(f'<path d="{path}" stroke="{OTHERS}" stroke-width="10"/>')
    return parts


def drawn(journey: Journey, colour: str, name: str, row: int, lanes: dict[str, int], x: Any) -> list[str]:
    """The segments of one group as boxes, and what crossed as arrows from one to another."""
    parts = []
    for segment in journey.segments:
        start = x(segment["ts"])
        width = max(x(segment["ts"] + segment["dur"]) - start, LEAST_PX)
        y = lanes[segment["cat"]] + 5 + row * (BAR + 3)
        parts.append(f'<rect x="{start:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
    for left, segment in journey.arrows():
        down = left["cat"] == WORKERS[0]
        y1 = lanes[WORKERS[0]] + LANE if down else lanes[WORKERS[1]]
        y2 = lanes[WORKERS[1]] if down else lanes[WORKERS[0]] + LANE
        arrived = segment["ts"] - segment["args"]["waited_us"]
        parts.append(
            f'<path d="M{x(left["ts"]):.1f} {y1}L{x(arrived):.1f} {y2}" stroke="{colour}" '
            f'stroke-width="1.5" marker-end="url(#{name})"/>'
        )
    return parts


def marker(name: str, colour: str) -> str:
    """The head of an arrow."""
    return (
        f'<defs><marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker></defs>'
    )


def legend(first: int, later: int) -> list[str]:
    """Who is who."""
    parts, at = [], LEFT
    for colour, words in (
        (FIRST, f"group {first} began first"),
        (LATER, f"group {later} began later, and was done earlier"),
        (OTHERS, "segments of other groups"),
    ):
        parts.append(f'<rect x="{at}" y="24" width="14" height="14" fill="{colour}"/>')
        parts.append(text(at + 20, 36, words, anchor="start"))
        at += 40 + 7 * len(words)
    parts.append(text(WIDTH - RIGHT, 36, "boxes: segments; arrows: what crossed", anchor="end"))
    return parts


def text(x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(words)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profile", type=Path)
    read = json.loads(parser.parse_args().profile.read_text())["traceEvents"]
    Path(__file__).with_name("overtaking.svg").write_text(picture(read))
