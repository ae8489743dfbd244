"""Random programs of vectors on servers that are lost and return: properties of plans, and 1,000 seeds."""

import pytest

from tests.simulation.runner import draw_case, run_seed
from tests.simulation.scenarios.vectors import ALL_KINDS, LOST_KINDS, RETURNS, VECTORS

SEEDS, FAST_SEEDS, THOROUGH_SEEDS, AT_ONCE = 1000, 4, 24, 4
BATCHES = [
    pytest.param(
        first,
        marks=()
        if first < FAST_SEEDS
        else pytest.mark.thorough
        if first < THOROUGH_SEEDS
        else pytest.mark.slow,
    )
    for first in range(0, SEEDS, AT_ONCE)
]


def test_plans_lose_servers_of_every_store() -> None:
    plans = [draw_case(VECTORS, seed).plan for seed in range(200)]

    kinds = {fault.kind for plan in plans for fault in plan.faults}
    assert kinds == {*ALL_KINDS, *LOST_KINDS}
    settings = [plan.options.settings for plan in plans]
    assert {(each["copies"], each["durable"]) for each in settings} == {
        (1, False),
        (1, True),
        (3, False),
        (3, True),
    }


@pytest.mark.parametrize("first", BATCHES)
def test_programs_equal_numpy_while_links_fail_and_servers_are_lost_or_restart(first: int) -> None:
    results = [run_seed(VECTORS, seed) for seed in range(first, first + AT_ONCE)]

    assert [(one.case.seed, one.invariant, one.text) for one in results if not one.ok] == []
    assert all(one.seed_counts for one in results)
    assert any(one.counts[RETURNS] for one in results) or all(
        one.case.plan.options.settings["copies"] == 3 for one in results
    )
