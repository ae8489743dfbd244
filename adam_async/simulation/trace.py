"""Pure: one simulated run as Trace Event JSON, which Perfetto and chrome://tracing open.

Each machine is a process. One lane shows its incarnations; each kind of event, such as faults, cuts and notes
of the scenario, has a lane of its own. Overlapping events of a kind get further lanes. Times are in
microseconds of the simulation.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from adam_async.simulation.runner import Played
from adam_async.simulation.scenario import Span

PROCESS = "life"
"""Name of the lane of incarnations."""


def trace_file(played: Played) -> dict[str, Any]:
    """Return the whole file, as builtins."""
    result = played.result
    nodes = list(dict.fromkeys([*played.nodes, *(span.node for span in played.spans)]))
    events: list[dict[str, Any]] = []
    for pid, node in enumerate(nodes, 1):
        spans = [span for span in played.spans if span.node == node]
        spans = [*uptime_spans(node, played.nodes.get(node, ()), result.ended_s), *spans]
        events += _rows(pid, node, spans)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": "adam-async simulation 1",
            "scenario": result.case.scenario,
            "seed": result.case.seed,
            "options": str(result.case.plan.options),
            "outcome": f"{result.invariant}: {result.text}" if result.invariant else "all held",
            "replay_hash": result.replay_hash,
        },
        "traceEvents": events,
    }


def uptime_spans(node: str, times: Sequence[tuple[float, float | None]], ended_s: float) -> Iterator[Span]:
    """Yield a span for each incarnation of a machine."""
    for incarnation, (begun, ended) in enumerate(times, 1):
        yield Span(node, PROCESS, f"life {incarnation}", begun, ended_s if ended is None else ended)


def _rows(pid: int, node: str, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node}}
    lanes: dict[tuple[str, int], float] = {}
    tids: dict[tuple[str, int], int] = {}
    for span in sorted(spans, key=lambda span: (span.kind != PROCESS, span.begun)):
        number = 0
        while lanes.get((span.kind, number), 0.0) > span.begun:
            number += 1
        lane = (span.kind, number)
        lanes[lane] = span.begun if span.ended is None else span.ended
        if lane not in tids:
            # Unique across all machines: some readers require that of thread numbers.
            tids[lane] = 1000 * pid + len(tids)
            name = span.kind if not number else f"{span.kind} {number + 1}"
            row = {"ph": "M", "pid": pid, "tid": tids[lane]}
            yield {**row, "name": "thread_name", "args": {"name": name}}
            yield {**row, "name": "thread_sort_index", "args": {"sort_index": len(tids)}}
        event = {"name": span.text, "cat": span.kind, "pid": pid, "tid": tids[lane], "ts": _us(span.begun)}
        if span.ended is None:
            yield {**event, "ph": "i", "s": "t"}
        else:
            yield {**event, "ph": "X", "dur": _us(span.ended - span.begun)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
