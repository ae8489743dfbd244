"""A plan that fails becomes as small as it can be, and still fails."""

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.plan import LEAST_S, Fault, Options, Plan, shrink
from tests.simulation.wire import Conditions


def plan_with(names: list[str], options: Options | None = None) -> Plan:
    faults = tuple(
        Fault(at_s=1.0 + number, kind="crash", targets=(name,), lasts_s=3.0, amount=1.0)
        for number, name in enumerate(names)
    )
    return Plan(options=options or Options(shuffled=True, unkind=True), faults=faults)


def targets(plan: Plan) -> list[str]:
    return [fault.targets[0] for fault in plan.faults]


@given(count=st.integers(1, 20), data=st.data())
def test_exactly_the_necessary_faults_are_left(count: int, data: st.DataObject) -> None:
    names = [f"worker-{number}" for number in range(count)]
    necessary = data.draw(st.sets(st.sampled_from(names), max_size=3))

    shrunk = shrink(plan_with(names), lambda plan: necessary <= set(targets(plan)), most_tries=1000)

    assert set(targets(shrunk.plan)) == necessary
    assert len(shrunk.plan.faults) == len(necessary)


@given(count=st.integers(1, 12), most=st.integers(0, 30), salt=st.integers(0, 1000))
def test_the_smallest_plan_fails_and_no_more_is_tried_than_may_be(count: int, most: int, salt: int) -> None:
    tried = []

    def fails(plan: Plan) -> bool:
        tried.append(plan)
        return plan == first or hash((salt, *targets(plan))) % 3 == 0

    first = plan_with([f"worker-{number}" for number in range(count)])
    shrunk = shrink(first, fails, most_tries=most)

    assert shrunk.tries == len(tried) <= most
    assert fails(shrunk.plan)


def test_remaining_faults_become_short_and_early_and_conditions_mild() -> None:
    def fails(plan: Plan) -> bool:
        return any(fault.targets == ("b",) and fault.lasts_s >= 1.0 for fault in plan.faults)

    shrunk = shrink(plan_with(["a", "b", "c"]), fails)

    (fault,) = shrunk.plan.faults
    assert 1.0 <= fault.lasts_s <= 2.0
    assert LEAST_S <= fault.at_s <= 0.1
    assert fault.amount == 0.0
    assert shrunk.plan.options == Options()


def test_a_shrink_keeps_everything_that_the_failure_needs() -> None:
    options = Options(shuffled=True, unkind=True, network=Conditions(ragged=True), settings={"members": 4})

    def fails(plan: Plan) -> bool:
        return plan.options.shuffled and plan.options.network.ragged and plan.faults[0].amount == 1.0

    shrunk = shrink(plan_with(["a"], options), lambda plan: bool(plan.faults) and fails(plan))

    assert shrunk.plan.options == Options(
        shuffled=True, network=Conditions(ragged=True), settings={"members": 4}
    )
    assert shrunk.plan.faults[0].amount == 1.0


def test_a_fault_that_strikes_earlier_takes_its_place_in_the_order() -> None:
    def fails(plan: Plan) -> bool:
        assert list(plan.faults) == sorted(plan.faults, key=lambda fault: fault.at_s)
        return {"a", "b"} <= set(targets(plan)) and plan.faults[-1].at_s >= 1.0

    assert set(targets(shrink(plan_with(["a", "b", "c"]), fails).plan)) == {"a", "b"}
