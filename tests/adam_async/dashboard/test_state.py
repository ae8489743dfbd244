"""The fold of events: curves, rates, links, incidents, stores, predictions; bounded, and without paths."""

import json
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.dashboard.state import (
    MOST_INCIDENTS,
    MOST_LINKS,
    MOST_NOTES,
    MOST_POINTS,
    Curve,
    Part,
    State,
    ranges_of,
    shown,
)
from adam_async.run.condition import LostRole, Wait
from adam_async.run.counts import EpochCounts
from adam_async.run.events import (
    DataCounted,
    Dropped,
    EpochEnds,
    IncidentBegins,
    IncidentEnds,
    Noted,
    RunBegins,
    RunEnds,
    StatusSeen,
    StoreCounted,
)
from tests.adam_async.dashboard_events import AT, beginning, epochs, poll, predicted, seen, state_of, status
from tests.adam_async.role_counts import counts_of


def test_curves_have_images_and_seconds_and_the_newest_values() -> None:
    curves = seen(state_of(beginning(), *epochs(3)), "curves")
    assert curves.title == "digits on digits"
    assert curves.loss == [
        (50, 0.5, 1.0),
        (100, 1.0, 1.0),
        (150, 1.5, 0.5),
        (200, 2.0, 0.5),
        (250, 2.5, pytest.approx(1 / 3)),
        (300, 3.0, pytest.approx(1 / 3)),
    ]
    assert curves.accuracy == [
        (100, 1.0, 0.5, None),
        (200, 2.0, 0.75, None),
        (300, 3.0, pytest.approx(5 / 6), None),
    ]


def test_ten_thousand_epochs_are_a_thousand_points_of_a_curve_at_most() -> None:
    curves = seen(state_of(beginning(), *epochs(10_000)), "curves")
    assert MOST_POINTS // 2 < len(curves.loss) <= MOST_POINTS
    assert MOST_POINTS // 2 < len(curves.accuracy) <= MOST_POINTS
    assert curves.accuracy[-1][0] == 1_000_000
    assert len(json.dumps(curves.loss)) < 100_000


def test_without_samples_of_a_driver_the_dealer_gives_the_loss() -> None:
    ended = EpochEnds(at=AT, epoch=41, counts=EpochCounts(images=90, loss=0.25, train_s=1.0))
    dealt = DataCounted(
        at=AT,
        counts=counts_of(
            "data", "data-0", term=1, epoch=42, images=30, train_s=0.5, loss=0.2, loss_images=30
        ),
    )
    # A map has the newest epochs alone: the images of the earlier ones follow from the size of an epoch.
    assert seen(state_of(beginning(), ended, dealt), "curves").loss == [(4090, 1.0, 0.25), (4120, 1.5, 0.2)]
    idle = DataCounted(
        at=AT, counts=counts_of("data", "data-1", epoch=42, images=30, train_s=0.5, loss=0.2, loss_images=30)
    )
    assert len(seen(state_of(beginning(), ended, dealt, idle), "curves").loss) == 2


def test_rates_shares_and_staleness_of_workers_come_from_two_polls() -> None:
    now = seen(state_of(beginning(), *poll(1), *poll(2)))
    first = now.workers[0]
    assert (first.node, first.replica, first.images_per_s) == ("worker-0", "0", 20.0)
    assert (first.clock, first.compute) == (0.25, 0.0)
    assert first.staleness == 3.0
    assert now.staleness == [("1", 8), ("5-8", 8)]
    one = seen(state_of(beginning(), *poll(1)))
    assert one.workers[0].images_per_s == 0.0


def test_a_role_with_a_new_process_begins_its_rates_again() -> None:
    state = state_of(beginning(), *poll(5))
    before = {link[0]: link for link in seen(state).links}
    for event in poll(1):
        state.take(event)
    assert before["worker-0"][2] == 5000
    assert all(link[3] == 0 for link in seen(state).links)


def test_links_have_bytes_per_second_the_busiest_first_and_at_most_so_many() -> None:
    links = seen(state_of(beginning(), *poll(1), *poll(2))).links
    assert (links[0][0], *links[0][2:]) == ("worker-0", 2000, 1000)
    assert {link[3] for link in links} == {1000, 500}
    many = seen(state_of(beginning(), *poll(1, 200, 8), *poll(2, 200, 8)))
    assert len(many.links) == MOST_LINKS
    assert len(many.workers) == 200
    assert len(state_of(beginning(), *poll(1, 200, 8), *poll(2, 200, 8)).part("now")) < 200_000


def test_lost_roles_leave_the_counts_and_stay_on_the_map() -> None:
    state = state_of(beginning(), *poll(1), *poll(2))
    lost = (LostRole(node="worker-1", role="worker", since=AT),)
    for event in poll(3, workers=1, lost=lost):
        state.take(event)
    now = seen(state)
    assert [worker.node for worker in now.workers] == ["worker-0"]
    assert [(role.node, role.since) for role in now.status.condition.lost] == [("worker-1", AT)]
    assert not any("worker-1" in link[:2] for link in now.links)


def test_an_incident_begins_and_ends_with_its_seconds() -> None:
    begins = IncidentBegins(at=AT + 5, incident="failover", subject="ps-0")
    state = state_of(beginning(), begins)
    assert [(each.kind, each.lasted_s) for each in seen(state).incidents] == [("failover", None)]
    state.take(
        IncidentEnds(at=AT + 7, incident="failover", subject="ps-0", lasted_s=2.0, text="primary moved")
    )
    (found,) = seen(state).incidents
    assert (found.began, found.lasted_s, found.text) == (AT + 5, 2.0, "primary moved")
    assert [text for _, text in seen(state).notes] == ["primary moved"]
    state.take(
        IncidentEnds(at=AT + 8, incident="lost", subject="ps-0", lasted_s=1.0)
    )  # began before the page
    assert len(seen(state).incidents) == 1


def test_incidents_and_notes_are_bounded_and_those_in_progress_stay() -> None:
    state = state_of(IncidentBegins(at=AT, incident="copies", subject="ps-0"))
    for n in range(3 * MOST_INCIDENTS):
        state.take(IncidentBegins(at=AT + n, incident="lost", subject=f"worker-{n}"))
        state.take(IncidentEnds(at=AT + n, incident="lost", subject=f"worker-{n}", lasted_s=1.0, text="back"))
    now = seen(state)
    assert len(now.incidents) == MOST_INCIDENTS
    assert now.incidents[0].subject == "ps-0"
    assert len(now.notes) == MOST_NOTES
    for n in range(2 * MOST_INCIDENTS):
        state.take(IncidentBegins(at=AT, incident="lost", subject=f"data-{n}"))
    assert len(seen(state).incidents) == MOST_INCIDENTS


def test_stores_have_versions_and_clients() -> None:
    state = state_of(beginning(), *poll(4))
    (run,) = seen(state).stores
    assert (run.name, run.servers, run.shards, run.first_version, run.last_version) == ("", 2, 4, 4, 4)
    assert [(each.name, each.clock, each.pushes, each.staleness) for each in run.clients] == [
        ("0", 4, 16, 3.0),
        ("1", 4, 16, 3.0),
    ]
    state.take(
        StoreCounted(at=AT, store="table", node="ps-0", counts=counts_of("ps", "ps-0", shards=1, refused=3))
    )
    assert [each.name for each in seen(state).stores] == ["", "table"]
    state.take(StatusSeen(at=AT, status=status()))  # the store is gone
    assert [each.name for each in seen(state).stores] == [""]


def test_samples_are_those_of_the_newest_evaluation() -> None:
    assert seen(state_of(beginning()), "samples") is None
    found = seen(state_of(beginning(), predicted(1), predicted(2)), "samples")
    assert found is not None
    assert (found.epoch, len(found.first), len(found.mistakes)) == (2, 2, 1)
    assert found.first[0].pixels == "AFCg8A=="


def test_a_new_run_begins_an_empty_page_and_the_same_run_goes_on() -> None:
    state = state_of(beginning(), *epochs(2), *poll(1), RunEnds(run="run-1", outcome="failed", reason="lost"))
    assert (seen(state).ended, state.run) == ("failed: lost", "run-1")
    state.take(beginning())
    assert (seen(state).ended, len(seen(state, "curves").accuracy)) == ("", 2)
    state.take(beginning("run-2"))
    assert (state.run, seen(state, "curves").accuracy, seen(state, "curves").loss) == ("run-2", (), ())
    assert seen(state).status.roles


def test_the_page_counts_the_events_that_it_lost() -> None:
    assert seen(state_of(Dropped(events=3), Dropped(events=4))).dropped == 7


PATHS = ("/home/ann/runs/a.toml", "~/runs/a.toml", "../runs/a.toml", "file:///srv/a.toml", "C:/runs/a.toml")


@pytest.mark.parametrize("path", PATHS)
def test_no_text_of_the_page_has_a_folder_of_the_host(path: str) -> None:
    secret = path.rpartition("/")[0].strip("/.~")
    wait = Wait(who=path, what=f"file {path}", deadline_s=1.0, cure=f"write {path}")
    begins = IncidentBegins(
        at=AT, incident="lost", subject="ps-0", text=f"cannot read {path}: no file", cure=path
    )
    name = RunBegins(
        at=AT, run="run-1", driver="d", model=path, data=path, config={"data": path}, epochs=1, images=1
    )
    seen = poll(1, waits=(wait,), reasons=(f"run failed: '{path}'",))
    state = state_of(
        name,
        *seen,
        begins,
        Noted(at=AT, text=f"wrote {path}\n{path}"),
        RunEnds(run="", outcome="failed", reason=path),
    )
    text = (state.part("now") + state.part("curves")).decode()
    assert "a.toml" in text
    assert path not in text
    assert secret not in text


@pytest.mark.parametrize(
    "text", ["12 images/s", "tcp://127.0.0.1:7000 is silent", "2/3 of 1/2", "http://a.b/c/d", "ssp:3"]
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert shown(text) == text


def test_ranges_of_staleness_hold_every_push() -> None:
    assert ranges_of({}) == []
    found = ranges_of({"0": 1, "6": 2, "70": 4, "999": 8})
    assert sum(pushes for _, pushes in found) == 15
    assert found[-1] == ("65+", 12)


@given(st.data())
def test_any_order_of_events_folds_without_an_error(data: st.DataObject) -> None:
    events = [
        beginning(),
        *epochs(3),
        *poll(1),
        *poll(2),
        *poll(1, 1, 1),
        predicted(),
        RunEnds(run="x", outcome="failed"),
    ]
    state = State()
    for event in data.draw(st.permutations(events)):
        state.take(event)
        for part in get_args(Part):
            json.loads(state.part(part))


@given(st.integers(2, 40), st.integers(0, 500))
def test_kept_points_are_evenly_spaced_and_end_with_the_newest(most: int, number: int) -> None:
    curve = Curve(most)
    for x in range(number):
        curve.add(x, 2.0 * x)
        assert curve.points[0] == (0, 0.0)
        assert curve.points[-1] == (x, 2.0 * x)
    points = [x for x, _ in curve.points]
    assert len(points) <= most
    gaps = [b - a for a, b in pairwise(points)]
    assert len(set(gaps[:-1])) <= 1
    assert not gaps[:-1] or gaps[-1] <= gaps[0]


def test_a_long_run_has_a_thousand_points_and_keeps_half_of_them_at_least() -> None:
    curve = Curve()
    for x in range(100_000):
        curve.add(x, None)
    assert MOST_POINTS // 2 <= len(curve.points) <= MOST_POINTS
