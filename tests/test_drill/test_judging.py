"""Claims of a drill hold, fail or stay unchecked by its observations alone."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.drill.judging import (
    SLOTS,
    Audit,
    Claim,
    CopyCheck,
    FaultObservation,
    Observations,
    PairObservation,
    audit_of,
    count_push,
    equivalence,
    exit_code,
    gradient_of,
    judge,
    kind_rows,
    percentile,
)


def fault(kind: str, *times: float, whole_s: float | None = 2.0) -> FaultObservation:
    resumed = {f"ps-{number}": seconds for number, seconds in enumerate(times)}
    return FaultObservation(number=1, kind=kind, server="ps-0", at_s=0.0, resumed_s=resumed, whole_s=whole_s)


def pair(seed: int, difference: float) -> PairObservation:
    return PairObservation(
        seed=seed,
        faults=2,
        accuracy_without=0.9,
        accuracy_with=0.9 + difference,
        images_per_s_without=100.0,
        images_per_s_with=80.0,
    )


def verdicts(seen: Observations) -> dict[str, bool | None]:
    return {claim.name: claim.holds for claim in judge(seen, margin=0.005)}


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]

    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([3.0], 0.5) == 3.0
    assert percentile([], 0.5) is None


def test_each_kind_has_a_row_over_all_lost_bundles() -> None:
    seen = Observations(
        faults=[fault("kill", 0.5, 0.7), fault("freeze", 1.5), fault("kill", 0.9, whole_s=None)]
    )

    kill, freeze = kind_rows(seen)

    assert (kill.kind, kill.faults, kill.bundles, kill.p50_s, kill.max_s) == ("kill", 2, 3, 0.7, 0.9)
    assert (kill.whole_p50_s, freeze.p99_s) == (2.0, 1.5)


def test_a_clean_drill_holds_its_claims() -> None:
    seen = Observations(
        planned=1,
        faults=[fault("kill", 0.5)],
        audit=Audit(acknowledged=10),
        copies=CopyCheck(copies=9, compared=9),
    )

    assert set(verdicts(seen).values()) == {True}


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("workload ends well", Observations(failure="a push failed")),
        ("all planned faults", Observations(planned=2, faults=[fault("kill", 0.5)])),
        ("all planned faults", Observations(planned=1, faults=[fault("kill", 0.5, whole_s=None)])),
        ("no false failover", Observations(false_failovers=["ps-0 from ps-0 to ps-1, generation 2"])),
        ("each push applied once", Observations(audit=Audit(acknowledged=9, lost=1))),
        ("each push applied once", Observations(audit=Audit(acknowledged=9, twice=1))),
        ("each push applied once", Observations(audit=Audit(acknowledged=9, altered=1))),
        ("copies are equal", Observations(copies=CopyCheck(copies=9, compared=9, different=("a",)))),
        ("accuracy within 0.5 points", Observations(pairs=[pair(0, 0.01), pair(1, 0.011)])),
    ],
)
def test_each_violation_fails_the_claim_with_its_name(name: str, seen: Observations) -> None:
    assert verdicts(seen)[name] is False


def test_unchecked_claims_neither_hold_nor_fail() -> None:
    seen = Observations(copies=CopyCheck(copies=9, compared=7), pairs=[pair(0, 0.2)])

    assert verdicts(seen)["copies are equal"] is None
    assert verdicts(seen)["accuracy within 0.5 points"] is None


def test_two_one_sided_tests_give_the_interval_of_a_table() -> None:
    found = equivalence([0.001, -0.001, 0.002, 0.0, -0.002], 0.005)

    assert found is not None
    half = 2.132 * math.sqrt(2.5e-6) / math.sqrt(5)
    assert found.mean == pytest.approx(0.0, abs=1e-12)
    assert found.low == pytest.approx(-half)
    assert found.high == pytest.approx(half)
    assert found.holds
    assert equivalence([0.1], 0.005) is None


@pytest.mark.parametrize(
    ("holds", "skipped", "require", "code"),
    [
        (True, (), False, 0),
        (None, (), True, 0),
        (False, (), False, 1),
        (False, ("cut",), True, 1),
        (True, ("cut",), False, 0),
        (True, ("cut",), True, 3),
    ],
)
def test_exit_codes(holds: bool | None, skipped: tuple[str, ...], require: bool, code: int) -> None:
    claims = (Claim(name="a", holds=True, text=""), Claim(name="b", holds=holds, text=""))

    assert exit_code(claims, skipped, require=require) == code


def applied(numbers: Iterable[int]) -> NDArray[np.float64]:
    """Return the values (2, SLOTS) of a counter after these pushes."""
    values = np.zeros((2, SLOTS))
    for number in numbers:
        values -= gradient_of(number)
    return values


def test_pushes_that_were_applied_once_leave_no_difference() -> None:
    assert audit_of(applied(range(1, 1300)), 1299, unanswered=False) == Audit(acknowledged=1299)


def test_a_lost_push_and_a_doubled_one_do_not_cancel_each_other() -> None:
    found = audit_of(applied([1, 2, 2, 4]), 4, unanswered=False)

    assert (found.lost, found.twice, found.altered) == (1, 1, 0)


def test_a_push_in_the_place_of_another_of_its_slot_is_altered() -> None:
    numbers = [*range(1, 5 + SLOTS)]
    numbers[4 + SLOTS - 1] = 4  # which has the slot of the last number

    found = audit_of(applied(numbers), 4 + SLOTS, unanswered=False)

    assert (found.lost, found.twice, found.altered) == (0, 0, 1)


def test_a_push_without_an_answer_may_be_applied_or_not() -> None:
    for count in (6, 7):
        found = audit_of(applied(range(1, count + 1)), 6, unanswered=True)

        assert found == Audit(acknowledged=6, unanswered=1)


def test_an_acknowledged_push_may_not_be_lost_beside_an_unanswered_one() -> None:
    assert audit_of(applied(range(1, 6)), 6, unanswered=True).lost == 1


def test_audits_add_up() -> None:
    total = Audit(acknowledged=3, lost=1).plus(Audit(acknowledged=4, twice=2, unanswered=1))

    assert total == Audit(acknowledged=7, lost=1, twice=2, unanswered=1)


def test_pushes_are_counted_in_tenths_of_a_second_with_their_gaps() -> None:
    pushes: list[int] = []
    for at_s in (0.01, 0.05, 0.31, 0.39):
        count_push(pushes, at_s)

    assert pushes == [2, 0, 0, 2]
