"""Events of a run: each death once, returns, and successors of workers."""

from collections.abc import AsyncIterator, Callable, Iterable

import msgspec
import pytest

from adam_async.driver.events import EVENTS_KEPT, RunEvents
from adam_async.report.stream import EventStream, texts
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.condition import Wait
from adam_async.run.events import AnyEvent, IncidentBegins, IncidentEnds, Noted
from adam_async.run.training_program import ProgramRecord
from tests.adam_async.cluster_maps import bundle_map, node, run_record

KILLED = "worker-1 died: killed by signal 9; starting it again"
BACK = "worker-1 came back as a new incarnation"


def worker(incarnation: int = 1, *, live: bool = True, left: bool = False, place=(-1, 0)) -> NodeRecord:
    replica, partition = place
    return NodeRecord(
        role="worker",
        address="local://x",
        incarnation=incarnation,
        live=live,
        left=left,
        replica=replica,
        partition=partition,
    )


def map_of(run: str = "run", *, partitions: int = 2, **nodes: NodeRecord) -> ClusterMap:
    record = ProgramRecord(id=run, driver="driver", incarnation=1, terms={"partitions": partitions})
    named = {name.replace("_", "-"): node for name, node in nodes.items()}
    return ClusterMap(nodes=named, run=record)


async def maps(
    seen: Iterable[ClusterMap | Callable[[RunEvents], None]], events: RunEvents
) -> AsyncIterator[ClusterMap]:
    """Yield the maps; call the functions between them."""
    for each in seen:
        if isinstance(each, ClusterMap):
            yield each
        else:
            each(events)


async def noted(*seen: ClusterMap | Callable[[RunEvents], None]) -> list[str]:
    """Return the events of maps, and of functions called between them."""
    events = RunEvents(EventStream())
    await events.follow(maps(seen, events))
    return [event["event"] for event in events.noted]


async def test_the_next_run_of_a_command_has_another_driver_which_is_no_event() -> None:
    def driver(incarnation: int, *, live: bool = True) -> NodeRecord:
        return NodeRecord(role="driver", address="", incarnation=incarnation, live=live)

    assert await noted(map_of(driver=driver(1)), map_of(driver=driver(2))) == []


async def test_an_operator_with_the_keys_of_a_reader_comes_and_goes_without_an_event() -> None:
    there, gone = (map_of(reader=node("reader", live=not left, left=left)) for left in (False, True))
    assert await noted(there, gone) == []


async def test_the_listener_gets_each_event_as_it_is_noted() -> None:
    received: list[str] = []
    stream = EventStream()
    stream.listen(texts(received.append))
    RunEvents(stream).note("one")
    assert received == ["one"]


def kill(events: RunEvents) -> None:
    """Note the death of the worker's process, like its parent."""
    events.note(KILLED)


async def test_a_death_with_a_noted_cause_is_not_noted_again() -> None:
    alive, dead, again = (map_of(worker_1=node) for node in (worker(), worker(live=False), worker(2)))

    assert await noted(alive, kill, dead, again) == [KILLED, BACK]
    assert await noted(alive, kill, again) == [KILLED, BACK], "the map of its death was missed"


async def test_a_death_without_a_known_cause_is_noted() -> None:
    alive, dead, again = (map_of(worker_1=node) for node in (worker(), worker(live=False), worker(2)))

    assert await noted(alive, dead, again) == ["worker-1 died", BACK]


async def test_a_silent_node_counts_as_dead_and_one_that_answers_again_may_die() -> None:
    def silent(events: RunEvents) -> None:
        events.begins("silent", "worker-1", "worker-1 has not answered for 3 s")

    def heard(events: RunEvents) -> None:
        events.ends("silent", "worker-1", "worker-1 answers again, after 5 s")

    live, dead = map_of(worker_1=worker()), map_of(worker_1=worker(live=False))
    assert (await noted(live, silent, dead))[-1] == "worker-1 counts as dead, after its silence"
    assert (await noted(live, silent, heard, dead))[-1] == "worker-1 died"

    def killed(events: RunEvents) -> None:
        events.note(KILLED)

    again, lost = map_of(worker_1=worker(2)), map_of(worker_1=worker(2, live=False))
    assert (await noted(live, silent, killed, dead, again, lost))[-1] == "worker-1 died"


async def test_the_cause_of_one_death_does_not_hide_the_next_one() -> None:
    seen = [map_of(worker_1=worker(n, live=live)) for n in (1, 2) for live in (True, False)]

    assert await noted(seen[0], kill, *seen[1:]) == [KILLED, BACK, "worker-1 died"]


async def test_the_cause_of_one_death_does_not_hide_that_of_another_node() -> None:
    alive = map_of(worker_1=worker(), worker_2=worker())
    dead = map_of(worker_1=worker(live=False), worker_2=worker(live=False))

    assert await noted(alive, kill, dead) == [KILLED, "worker-2 died"]


async def test_a_node_that_left_is_not_a_death() -> None:
    assert await noted(map_of(worker_1=worker()), map_of(worker_1=worker(live=False, left=True))) == [
        "worker-1 left"
    ]


@pytest.mark.parametrize(
    ("partitions", "place", "event"),
    [(2, (0, 1), "worker-9 takes part 1 of replica 0"), (1, (3, 0), "worker-9 takes replica 3")],
)
async def test_a_worker_of_another_name_in_the_place_of_a_lost_one_is_noted(partitions, place, event) -> None:
    alive = map_of(partitions=partitions, worker_1=worker(place=place))
    dead = worker(live=False)
    joined = map_of(partitions=partitions, worker_1=dead, worker_9=worker())
    placed = map_of(partitions=partitions, worker_1=dead, worker_9=worker(place=place))

    assert await noted(alive, joined, placed, placed) == ["worker-1 died", event]
    assert await noted(alive, placed) == ["worker-1 died", event], "the map between them was missed"


async def test_a_worker_that_comes_back_to_its_own_place_is_no_successor() -> None:
    seen = (worker(place=(0, 1)), worker(live=False), worker(2), worker(2, place=(0, 1)))

    assert await noted(*(map_of(worker_1=node) for node in seen)) == ["worker-1 died", BACK]


async def test_a_new_run_forgets_the_places_of_an_earlier_one() -> None:
    first = map_of("first", worker_1=worker(place=(0, 0)), worker_2=worker(place=(0, 1)))
    second = map_of("second", worker_1=worker(place=(0, 1)), worker_2=worker(place=(0, 0)))

    assert await noted(first, second) == []


async def test_nodes_that_the_map_forgot_are_forgotten_and_the_newest_events_kept() -> None:
    events, count = RunEvents(EventStream()), EVENTS_KEPT // 2 + 5

    async def maps() -> AsyncIterator[ClusterMap]:
        for number in range(count):
            yield map_of(**{f"worker_{number}": worker(number + 1)})
            yield map_of(**{f"worker_{number}": worker(number + 1, live=False)})
            events.note("something else")

    await events.follow(maps())
    first, *_, last = [event["event"] for event in events.noted]
    assert first == f"{2 * count - EVENTS_KEPT} earlier events were dropped"
    assert last == "something else"
    assert len(events.noted) == EVENTS_KEPT + 1
    assert events._ever == {f"worker-{count - 1}"}


async def test_a_primary_that_moves_and_copies_that_are_complete_again_are_events() -> None:
    whole = bundle_map({"ps-0": ("ps-0", "ps-1", "ps-2")}, copies=3)
    moved = bundle_map({"ps-0": ("ps-1", "ps-2")}, copies=3)
    again = bundle_map({"ps-0": ("ps-1", "ps-2", "ps-0")}, copies=3)

    assert await noted(whole, moved, again) == [
        "primary of the shards of ps-0 moved from ps-0 to ps-1",
        "the shards of ps-0 have 3 copies in sync again",
    ]


async def test_pushes_that_wait_for_copies_are_an_event_and_so_is_their_going_on() -> None:
    first = bundle_map({"ps-0": ("ps-0",)}, joining={"ps-0": ("ps-1",)})
    whole = bundle_map({"ps-0": ("ps-0", "ps-1")})
    alone = bundle_map({"ps-0": ("ps-0",)})

    assert await noted(first, whole, alone, alone, whole) == [
        "pushes to the shards of ps-0 wait: 1 in sync, 2 needed (min_in_sync)",
        "pushes to the shards of ps-0 go on: 2 in sync",
        "the shards of ps-0 have 2 copies in sync again",
    ]


async def test_a_new_notice_of_a_server_is_an_event_once() -> None:
    quiet, noticed = (
        ClusterMap(nodes={"ps-0": node("ps", info=info), "driver": node("driver", info=info)})
        for info in ({}, {"notice": "ps-0 does not join: it has no memory"})
    )

    assert await noted(quiet, noticed, noticed) == ["ps-0 does not join: it has no memory"]
    assert await noted(noticed, noticed) == []


async def test_a_notice_in_the_form_of_a_death_is_no_incident_of_the_named_role() -> None:
    stream, seen = EventStream(), list[AnyEvent]()
    stream.listen(seen.append)
    events = RunEvents(stream)

    async def maps() -> AsyncIterator[ClusterMap]:
        for info in ({}, {"notice": "ps-1 died: by my word"}):
            yield ClusterMap(nodes={"ps-0": node("ps", info=info), "ps-1": node("ps")})

    await events.follow(maps())
    assert [type(each) for each in seen] == [Noted]


async def test_shards_with_one_copy_and_those_of_the_next_run_make_no_event() -> None:
    one = [bundle_map({"ps-0": (name,)}, copies=1) for name in ("ps-0", "ps-1")]
    assert await noted(*one) == []
    first, second = (bundle_map({"ps-0": names}) for names in (("ps-0", "ps-1"), ("ps-1", "ps-0")))
    run = msgspec.structs.replace(run_record("run-2"), phase="training")
    store = msgspec.structs.replace(second.stores["run-1"], id="run-2", program="run-2")
    bundles = {key: msgspec.structs.replace(bundle, store="run-2") for key, bundle in second.bundles.items()}
    other = msgspec.structs.replace(second, run=run, stores={"run-1": store}, bundles=bundles)
    assert await noted(first, other) == []


async def incidents(*seen: ClusterMap | Callable[[RunEvents], None]) -> list[tuple[str, str, str]]:
    """Return the beginnings and ends of incidents of maps, and of functions called between them."""
    found: list[AnyEvent] = []
    clock = iter(range(1000))
    stream = EventStream(lambda: float(next(clock)))
    stream.listen(found.append)
    events = RunEvents(stream)
    await events.follow(maps(seen, events))
    assert all(each.at > 0 or isinstance(each, IncidentBegins) for each in found[1:])
    ends = [each for each in found if isinstance(each, IncidentEnds)]
    assert all(each.lasted_s > 0 for each in ends)
    return [
        ("begins" if isinstance(each, IncidentBegins) else "ends", each.incident, each.subject)
        for each in found
        if isinstance(each, IncidentBegins | IncidentEnds)
    ]


async def test_a_loss_is_an_incident_until_the_role_is_back_or_another_takes_its_place() -> None:
    place = (0, 0)
    alive, dead = map_of(worker_1=worker(place=place)), map_of(worker_1=worker(live=False))
    again = map_of(worker_1=worker(2))
    taken = map_of(worker_1=worker(live=False), worker_9=worker(place=place))

    begins, ends = ("begins", "lost", "worker-1"), ("ends", "lost", "worker-1")
    assert await incidents(alive, kill, dead, again) == [begins, ends]
    assert await incidents(alive, again) == [begins, ends], "one map has both"
    assert await incidents(alive, dead, taken) == [begins, ends]
    assert await incidents(alive, dead, map_of()) == [begins, ends], "the controllers have forgotten it"


async def test_a_failover_lasts_from_the_loss_of_the_primary_to_the_next_one() -> None:
    whole = bundle_map({"ps-0": ("ps-0", "ps-1")})
    none, moved = bundle_map({"ps-0": ()}), bundle_map({"ps-0": ("ps-1",)})

    found = await incidents(whole, none, moved, whole)
    assert [each for each in found if each[1] == "failover"] == [
        ("begins", "failover", "ps-0"),
        ("ends", "failover", "ps-0"),
    ] * 2
    assert [each for each in found if each[1] in ("copies", "pushes")] == [
        ("begins", "pushes", "ps-0"),
        ("begins", "copies", "ps-0"),
        ("ends", "pushes", "ps-0"),
        ("ends", "copies", "ps-0"),
    ]


def test_a_wait_is_an_incident_if_two_polls_see_it() -> None:
    found: list[AnyEvent] = []
    stream = EventStream()
    stream.listen(found.append)
    events = RunEvents(stream)
    waits = [
        Wait(who="worker-0", what=f"replica 1 at clock {n}", deadline_s=9.0, cure="wait") for n in range(3)
    ]
    events.waits(waits[:1])
    events.waits(waits[1:2])
    assert found == [], "the clock goes on"
    events.waits(waits[1:2])
    events.waits(waits[1:2])
    events.waits([])
    begins, ends = found
    assert isinstance(begins, IncidentBegins)
    assert (begins.incident, begins.subject, begins.deadline_s, begins.cure) == (
        "wait",
        "worker-0",
        9.0,
        "wait",
    )
    assert isinstance(ends, IncidentEnds)
