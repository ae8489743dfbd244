"""Unkind places: off in production, some of them on in a run, the same ones for the same seed."""

from adam_async.runtime import fault_points
from tests.simulation.fault_points import unkind
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import simulate

PLACES = [f"place {number}" for number in range(100)]


def fired(seed, times=40):
    with unkind(RandomStream(seed)) as marks:
        for _ in range(times):
            for place in PLACES:
                fault_points.fires(place)
    return dict(marks)


def test_nothing_is_on_outside_of_a_simulation():
    assert not fault_points.ON
    with unkind(RandomStream("1")):
        assert fault_points.ON
    assert not fault_points.ON


def test_some_places_fire_now_and_then_and_the_others_never():
    marks = fired("1")

    assert 10 < len(marks) < 45
    assert all(0 < count < 30 for count in marks.values())
    assert fired("1") == marks
    assert fired("2").keys() != marks.keys()


def test_marks_are_counted_for_the_run_that_set_them():
    async def scenario(world):
        if fault_points.ON:
            fault_points.sometimes("we were here")
            fault_points.sometimes("we were here")

    assert simulate(scenario, seed=1, unkind=True).marks == {"we were here": 2}
    assert simulate(scenario, seed=1).marks == {}
