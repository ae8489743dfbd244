"""Servers with disks lose their power: properties of seeds, and runs of one fault."""

import msgspec
import pytest

from tests.simulation.plan import Case, Fault, Options, Plan, in_order
from tests.simulation.runner import draw_case, run_case, run_seed
from tests.simulation.scenarios.bundle_watch import FROM_DISK
from tests.simulation.scenarios.disk_watch import QUARANTINE, READ_BACK, REPLAYED
from tests.simulation.scenarios.power import (
    ACKS,
    ALL_KINDS,
    CONSISTENCIES,
    DISK_KINDS,
    LOST,
    ONE_KINDS,
    POWER_CUTS,
    RECOVERED,
    SPARING_KINDS,
)
from tests.simulation.wire import Conditions
from tests.test_simulation.other_processes import replay_hash_elsewhere

# Beside them some cases of one fault are thorough; the slow tier has the rest of both.
SEEDS, THOROUGH_SEEDS, AT_ONCE = 40, 4, 2
THOROUGH_KINDS = {"power", "kill", "rot", "full-disks", "strand"}
BATCHES = [
    pytest.param(first, marks=pytest.mark.thorough if first < THOROUGH_SEEDS else pytest.mark.slow)
    for first in range(0, SEEDS, AT_ONCE)
]


def case_of(
    *faults: Fault,
    seed: int = 1,
    ack: str = "replicated",
    copies: int = 2,
    consistency: str = "asp",
    cold: bool = False,
) -> Case:
    """A run over a quiet network with these faults alone."""
    settings = {
        "ack": ack,
        "copies": copies,
        "min_in_sync": 0,
        "consistency": consistency,
        "momentum": False,
        "flush_s": 0.5,
        "pace_s": 0.2,
        "segment_bytes": 4096,
        "cold": cold,
    }
    options = Options(network=Conditions(delay_s=0.0005, jitter_s=0.0005), settings=settings)
    return Case(scenario="power", seed=seed, plan=Plan(options=options, faults=in_order(faults)))


def test_a_store_in_memory_of_one_copy_comes_back_without_its_last_pushes_alone() -> None:
    result = run_case(POWER_CUTS, case_of(Fault(at_s=2.6, kind="power", lasts_s=0.3), ack="single", copies=1))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts[RECOVERED] > 0
    assert result.counts[READ_BACK] > 0
    assert result.counts[LOST] > 0


def test_a_durable_store_comes_back_with_all_acknowledged_pushes() -> None:
    result = run_case(
        POWER_CUTS, case_of(Fault(at_s=2.6, kind="power", lasts_s=0.3), ack="durable", copies=1)
    )

    assert (result.invariant, result.text) == ("", "")
    assert result.counts[REPLAYED] > 0
    assert result.counts[LOST] == 0


def test_a_step_in_progress_ends_with_its_store() -> None:
    fault = Fault(at_s=2.8, kind="power", lasts_s=0.3)
    result = run_case(POWER_CUTS, case_of(fault, ack="durable", copies=1, consistency="bsp"))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts[RECOVERED] > 0
    assert result.counts[LOST] > 0


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_server_that_returns_takes_the_piece_of_a_cold_array_from_its_disk(is_cold: bool) -> None:
    fault = Fault(at_s=3.0, kind="crash", targets=("ps-0",), lasts_s=1.5)
    result = run_case(POWER_CUTS, case_of(fault, copies=3, cold=is_cold))

    assert (result.invariant, result.text) == ("", "")
    assert (result.counts[FROM_DISK] > 0) == is_cold, "the pieces of the other arrays have changed"


@pytest.mark.parametrize("ack", [pytest.param("replicated", marks=pytest.mark.slow), "durable"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.thorough if kind in THOROUGH_KINDS else pytest.mark.slow)
        for kind in sorted({*ALL_KINDS, *ONE_KINDS, *DISK_KINDS, *SPARING_KINDS})
    ],
)
def test_a_store_with_copies_survives_each_fault(kind: str, ack: str) -> None:
    fault = Fault(at_s=2.5, kind=kind, lasts_s=0.5, amount=0.2 if kind == "slow-disks" else 0.0)
    result = run_case(POWER_CUTS, case_of(fault, ack=ack))

    assert (result.invariant, result.text) == ("", "")
    assert result.faults == {kind: 1}
    if kind == "rot":
        assert result.counts[QUARANTINE] > 0


def test_a_plan_ends_all_servers_and_draws_every_mode() -> None:
    plans = [draw_case(POWER_CUTS, seed).plan for seed in range(200)]

    for plan in plans:
        assert any(fault.kind in ALL_KINDS for fault in plan.faults)
    kinds = {fault.kind for plan in plans for fault in plan.faults}
    assert kinds == {*ALL_KINDS, *ONE_KINDS, *DISK_KINDS, *SPARING_KINDS}
    settings = [plan.options.settings for plan in plans]
    assert {each["ack"] for each in settings} == {*ACKS}
    assert {each["consistency"] for each in settings} == {*CONSISTENCIES}
    assert all((each["copies"] == 1) or each["ack"] != "single" for each in settings)
    assert {each["cold"] for each in settings if each["copies"] != 1} == {False, True}
    assert len({msgspec.json.encode(plan) for plan in plans}) == 200


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_every_process() -> None:
    elsewhere = replay_hash_elsewhere("tests.simulation.scenarios.power", "POWER_CUTS", 4)

    assert elsewhere == run_seed(POWER_CUTS, 4).replay_hash


@pytest.mark.parametrize("first", BATCHES)
def test_stores_come_back_after_losses_of_power(first: int) -> None:
    results = [run_seed(POWER_CUTS, seed) for seed in range(first, first + AT_ONCE)]

    assert [(one.case.seed, one.invariant, one.text) for one in results if not one.ok] == []
    assert sum(one.seed_counts for one in results) >= AT_ONCE - 1
