"""The file of a profile: lanes, slices that enclose one another, arrows, all from events made by hand."""

import pytest

from adam_async.runtime.trace_events import (
    Carried,
    Delivered,
    Fired,
    Leased,
    Part,
    Phase,
    Reported,
    Settled,
    Stepped,
    trace_file,
)

US = 1e-6


def journey(
    number: int, *, begin: float = 10.0, run: str = "r", attempt: int = 1, thread: str = "w/0"
) -> list:
    """The events of one group that is a step of its own; 100 us apart."""
    tag = (1, number, attempt)
    at = [begin + 100 * US * place for place in range(8)]
    return [
        Leased("data-0", run, "w", (tag,), at[0], at[0] + 5 * US),
        Delivered("w", run, *tag, at[1], at[1] + 5 * US),
        Fired("w", run, "train", thread, *tag, at[1] + 2 * US, at[2], at[2] + 90 * US),
        Stepped("w", run, 7, number, (tag,), at[3] + 2 * US),
        Fired("w", run, "push", "loop", *tag, at[3], at[3], at[3] + 9 * US),
        Settled("ps-0", "apply", ((7, number),), 50, at[4], at[4] + 9 * US),
        Settled("ps-1", "apply", ((7, number),), 60, at[5], at[5] + 9 * US),
        Reported("w", run, *tag, at[6], at[6] + 3 * US),
    ]


def written(*events, dropped: int = 0, process: str = "p") -> list[dict]:
    return trace_file([Part(process, dropped, list(events))])["traceEvents"]


def of_phase(events: list[dict], phase: str) -> list[dict]:
    return [event for event in events if event["ph"] == phase]


def lanes(events: list[dict]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in of_phase(events, "M")
        if event["name"] == "thread_name"
    }


def test_a_group_is_one_arrow_from_its_lease_to_its_report_through_every_server():
    events = written(*journey(3))
    named = lanes(events)

    flow = [event for event in events if event["ph"] in "stf"]

    assert [event["ph"] for event in flow] == ["s", *"tttttt", "f"]
    assert {event["id"] for event in flow} == {1}
    assert [round(event["ts"]) for event in flow] == [0, 100, 200, 300, 302, 400, 500, 600]
    assert [named[event["pid"], event["tid"]] for event in flow] == [
        *["event loop"] * 2,
        "w/0",
        *["event loop"] * 5,
    ]


def test_a_step_of_several_groups_leads_each_of_them_to_its_servers():
    first, second = (1, 1, 1), (1, 2, 1)
    events = written(
        Fired("w", "r", "push", "loop", *first, 1.0, 1.0, 1.1),
        Fired("w", "r", "push", "loop", *second, 2.0, 2.0, 2.1),
        Stepped("w", "r", 7, 1, (first, second), 2.05),
        Settled("ps-0", "apply", ((7, 1),), 50, 3.0, 3.1),
    )

    seconds = {number: [e["ts"] / 1e6 for e in events if e.get("id") == number] for number in (1, 2)}

    assert seconds == {1: [0.0, 1.05, 2.0], 2: [1.0, 1.05, 2.0]}


def test_steps_of_another_session_are_not_taken_for_ours():
    tag = (1, 1, 1)
    events = written(
        Stepped("w", "r", 7, 1, (tag,), 1.0),
        Reported("w", "r", *tag, 2.0, 2.1),
        Settled("ps-0", "apply", ((8, 1),), 50, 1.5, 1.6),
    )

    assert [event["ph"] for event in events if event["ph"] in "stf"] == ["s", "f"]


def test_a_group_that_is_leased_again_has_a_journey_of_its_own():
    events = written(*journey(3), *journey(3, begin=11.0, attempt=2))

    assert len(of_phase(events, "s")) == len(of_phase(events, "f")) == 2
    assert {event["id"] for event in of_phase(events, "s")} == {1, 2}


def test_the_same_group_of_two_runs_is_two_groups():
    events = written(*journey(3), *journey(3, begin=11.0, run="next"))

    assert {event["id"] for event in of_phase(events, "s")} == {1, 2}


def test_a_group_seen_at_one_place_only_has_no_arrow():
    events = written(Delivered("w", "r", 1, 1, 1, 1.0, 1.1))

    assert [event["ph"] for event in events if event["ph"] in "stf"] == []


def test_how_long_a_job_waited_for_a_thread_is_an_event_and_a_number():
    events = written(Fired("w", "r", "train", "w/1", 1, 2, 1, 5.0, 5.25, 6.0))

    (begin,), (end,), (train,) = (of_phase(events, phase) for phase in "beX")

    assert begin["id"] == end["id"]
    assert (begin["ts"], end["ts"]) == (0.0, 250_000.0)
    assert (train["ts"], train["dur"]) == (250_000.0, 750_000.0)
    assert train["args"] == {"epoch": 1, "group": 2, "attempt": 1, "waited_us": 250_000.0}


def test_an_enclosing_slice_comes_before_the_enclosed_one():
    events = written(Delivered("w", "r", 1, 2, 1, 1.0, 1.1), Delivered("w", "r", 1, 1, 1, 1.0, 1.5))

    assert [event["args"]["group"] for event in of_phase(events, "X")] == [1, 2]


def test_every_lane_is_named_and_threads_of_two_processes_share_none():
    parts = [Part("worker-0", 0, journey(1)), Part("worker-1", 0, journey(2, thread="x/0"))]

    events = trace_file(parts)["traceEvents"]

    named = lanes(events)
    assert sorted(named.values()) == ["event loop", "event loop", "w/0", "x/0"]
    assert {(event["pid"], event["tid"]) for event in events if "ts" in event} == set(named)
    assert len({tid for _, tid in named}) == len(named)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "worker-0", 2: "worker-1"}


def test_parts_of_one_process_share_its_lanes():
    whole = journey(1)

    events = trace_file([Part("w", 0, whole[:4]), Part("w", 0, whole[4:])])["traceEvents"]

    assert events == trace_file([Part("w", 0, whole)])["traceEvents"]


def test_messages_are_instants_on_the_lane_of_their_node():
    events = written(
        Carried("w", "ps-0", True, "Push", 900, 1.0), Carried("ps-0", "w", False, "Push", 900, 1.1)
    )
    named = lanes(events)

    seen = [(named[e["pid"], e["tid"]], e["name"], e["args"]) for e in of_phase(events, "i")]

    assert seen == [
        ("links of w", "Push to ps-0", {"bytes": 900}),
        ("links of ps-0", "Push from w", {"bytes": 900}),
    ]


@pytest.mark.parametrize(("one_iteration", "lane"), [(True, "event loop"), (False, "driver")])
def test_a_phase_of_many_iterations_of_the_loop_has_a_lane_of_its_own(one_iteration, lane):
    events = written(Phase("driver", "epoch 1", one_iteration, 1.0, 2.0))

    (slice_,) = of_phase(events, "X")
    assert lanes(events)[slice_["pid"], slice_["tid"]] == lane


def test_where_room_ran_out_is_said_at_that_place():
    file = trace_file([Part("p", 12, journey(1))])

    (said,) = of_phase(file["traceEvents"], "i")
    assert said["name"] == "profile full: 8 events, 12 more dropped"
    assert said["ts"] == max(
        event["ts"] + event.get("dur", 0) for event in of_phase(file["traceEvents"], "X")
    )
    assert file["otherData"]["dropped"] == 12


def test_nothing_noted_is_an_empty_file():
    assert trace_file([Part("p", 0, [])])["otherData"]["events"] == 0
