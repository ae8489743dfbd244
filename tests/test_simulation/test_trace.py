"""The trace of a run has the form that Perfetto reads: machines with lanes without overlap."""

import json
from collections import defaultdict
from itertools import pairwise

import msgspec

from tests.simulation.faults import UNTARGETED
from tests.simulation.runner import Played, draw_case, play
from tests.simulation.scenario import Span
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.work import trace_file, uptime_spans
from tests.test_simulation.toy import BROKEN, toy


def trace_of(played: Played) -> dict:
    return json.loads(msgspec.json.encode(trace_file(played)))


def test_the_trace_of_a_run_names_machines_lanes_and_times_within_it() -> None:
    played = play(toy(), draw_case(toy(), 1))

    trace = trace_of(played)
    events = trace["traceEvents"]

    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"a", "b", "c"}
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"life", "kill", "slow"} <= set(lanes.values())
    for event in events:
        if event["ph"] == "X":
            assert event["tid"] in lanes
            assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= played.result.ended_s * 1e6 + 1
    assert trace["otherData"]["seed"] == 1
    assert trace["otherData"]["outcome"] == "all held"


def test_nothing_overlaps_on_a_lane() -> None:
    spans = tuple(Span("a", "cut", f"cut {n}", begun=float(n), ended=n + 2.5) for n in range(6))
    played = msgspec.structs.replace(play(toy(), draw_case(toy(), 1)), spans=spans)

    by_lane = defaultdict(list)
    for event in trace_of(played)["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "cut":
            by_lane[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))

    assert len(by_lane) == 3
    assert sum(map(len, by_lane.values())) == 6
    for lane in by_lane.values():
        assert all(ended <= begun for (_, ended), (begun, _) in pairwise(lane))


def test_an_incarnation_lasts_from_its_start_to_its_end_for_every_kind_of_end() -> None:
    times = [(0.5, 1.0), (2.0, 5.0), (6.0, None)]

    assert [(span.text, span.begun, span.ended) for span in uptime_spans("a", times, 10.0)] == [
        ("life 1", 0.5, 1.0),
        ("life 2", 2.0, 5.0),
        ("life 3", 6.0, 10.0),
    ]


def test_a_fault_without_a_target_is_shown_with_the_incarnations_that_it_ended() -> None:
    case = draw_case(SCENARIOS["restarts"], 2)
    short = msgspec.structs.replace(
        case, plan=msgspec.structs.replace(case.plan, faults=case.plan.faults[:2])
    )
    played = play(SCENARIOS["restarts"], short)

    assert [span.kind for span in played.spans if span.node == UNTARGETED] == ["restart-all"] * 2
    assert len(played.nodes["controller-1"]) > 2
    assert all(before[1] <= after[0] for before, after in pairwise(played.nodes["controller-1"]))


def test_a_moment_is_an_instant_and_a_run_that_failed_says_so() -> None:
    played = play(BROKEN, draw_case(BROKEN, 1))
    noted = msgspec.structs.replace(played, spans=(Span("z", "leader", "elected", 1.5, None),))

    trace = trace_of(noted)

    (instant,) = (event for event in trace["traceEvents"] if event["ph"] == "i")
    assert (instant["name"], instant["ts"], instant["s"]) == ("elected", 1.5e6, "t")
    assert trace["otherData"]["outcome"] == "I0: b came back as 2"
