"""Claims of a drill hold, fail or stay unchecked by its observations alone."""

import math

import pytest

from adam_async.drill.judging import (
    Claim,
    equivalence,
    exit_code,
    judge,
    kind_rows,
    percentile,
)
from adam_async.drill.observations import (
    Audit,
    CopyCheck,
    FaultObservation,
    Observations,
    PairObservation,
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
        ("all cores are busy", Observations(saturated_s=90.0, load=1.2, cores=2)),
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
    seen = Observations(
        copies=CopyCheck(copies=9, compared=7), pairs=[pair(0, 0.2)], saturated_s=5.0, load=0.1, cores=2
    )

    assert verdicts(seen)["copies are equal"] is None
    assert verdicts(seen)["accuracy within 0.5 points"] is None
    assert verdicts(seen)["all cores are busy"] is None


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
