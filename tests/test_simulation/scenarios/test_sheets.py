"""Values that clients of one host read in place and keep: properties of plans, and 48 seeds."""

import pytest

from tests.simulation.runner import draw_case, run_seed
from tests.simulation.scenarios.sheets import DELETE, KINDS, LENT, LOST, ON_SHEETS, SHEETS_OF_STORES

SEEDS, FAST_SEEDS, AT_ONCE = 48, 2, 2
BATCHES = [
    pytest.param(first, marks=() if first < FAST_SEEDS else pytest.mark.thorough)
    for first in range(0, SEEDS, AT_ONCE)
]


def test_plans_have_one_copy_on_one_host_and_every_fault() -> None:
    plans = [draw_case(SHEETS_OF_STORES, seed).plan for seed in range(100)]

    assert {fault.kind for plan in plans for fault in plan.faults} == {*KINDS} >= {DELETE}
    assert {plan.options.together for plan in plans} == {"all"}
    assert {plan.options.settings["copies"] for plan in plans} == {1}


@pytest.mark.parametrize("first", BATCHES)
def test_kept_values_stay_and_each_push_counts_once_while_clients_are_lost(first: int) -> None:
    results = [run_seed(SHEETS_OF_STORES, seed) for seed in range(first, first + AT_ONCE)]

    assert [(one.case.seed, one.invariant, one.text) for one in results if not one.ok] == []
    # A host may lack memory for the sheets of both servers.
    assert any(one.counts.get(LENT) and one.counts.get(LOST) for one in results)
    assert all(one.counts.get(ON_SHEETS) for one in results)
