"""A plan is data: it has a readable text, survives encoding, and refuses invalid values."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from tests.simulation.plan import Case, Fault, Options, Plan, draw_options, in_order, read_case
from tests.simulation.random_streams import RandomStream
from tests.simulation.wire import Conditions

SECONDS = st.floats(0, 1e6)

FAULTS = st.builds(
    Fault,
    at_s=SECONDS,
    kind=st.sampled_from(["crash", "cut"]),
    targets=st.lists(st.text(max_size=3), max_size=2).map(tuple),
    lasts_s=SECONDS,
    amount=SECONDS,
)


@given(
    faults=st.lists(FAULTS, max_size=4),
    shuffled=st.booleans(),
    delay_s=SECONDS,
    settings=st.dictionaries(st.text(max_size=4), st.booleans() | st.integers(0, 99) | st.text(max_size=4)),
)
def test_a_case_that_was_written_down_is_the_same_again(
    faults: list[Fault], shuffled: bool, delay_s: float, settings: dict[str, bool | int | str]
) -> None:
    options = Options(shuffled=shuffled, network=Conditions(delay_s=delay_s), settings=settings)
    case = Case(scenario="members", seed=3, plan=Plan(options=options, faults=tuple(faults)))

    assert read_case(msgspec.json.encode(case), origin="here") == case


def test_a_fault_is_one_line() -> None:
    assert (
        str(Fault(at_s=3.25, kind="crash", targets=("a",), lasts_s=5.5)) == "at 3.250 s crash a for 5.500 s"
    )
    assert str(Fault(at_s=0, kind="cut", targets=("a", "b"), amount=1)) == "at 0.000 s cut a b, amount 1"


def test_options_are_expanded_whole() -> None:
    text = str(Options(shuffled=True, settings={"members": 4}))

    assert text.startswith("shuffled True, unkind False, together none, delay_s 0.0005, ")
    assert text.endswith("members 4")
    assert all(name in text for name in Conditions.__dataclass_fields__)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["at_s", "lasts_s", "amount"])
def test_a_time_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} of a fault must be a number from 0 on"):
        Fault(**{"at_s": 1.0, "kind": "crash", name: value})


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b'{"more": ' + b"[" * 99999,
        b"\xff",
        b'{"scenario": "x"}',
        b'{"scenario": "x", "seed": 0, "plan": 1}',
    ],
)
def test_an_invalid_plan_is_named(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^FILE is no plan of a simulated run: "):
        read_case(data, origin="FILE")


def test_options_follow_from_the_dice_alone_and_are_of_all_kinds() -> None:
    drawn = [draw_options(RandomStream(f"{seed}"), {"members": 3}) for seed in range(50)]

    assert drawn == [draw_options(RandomStream(f"{seed}"), {"members": 3}) for seed in range(50)]
    for name in ("shuffled", "unkind"):
        assert {getattr(options, name) for options in drawn} == {False, True}
    assert {options.network.ragged for options in drawn} == {False, True}


def test_faults_are_put_in_order() -> None:
    late, early = (Fault(at_s=at_s, kind="crash") for at_s in (2.0, 1.0))

    assert in_order([late, early]) == (early, late)
