"""A hundred seeds of controllers under faults pass."""

import pytest

from tests.simulation.runner import run_seed
from tests.simulation.scenarios import SCENARIOS

SEEDS, THOROUGH_SEEDS = 100, 5
AT_ONCE = 5


@pytest.mark.thorough
@pytest.mark.parametrize(
    "first",
    [
        *range(0, THOROUGH_SEEDS, AT_ONCE),
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(THOROUGH_SEEDS, SEEDS, AT_ONCE)),
    ],
)
def test_controllers_keep_their_promises_under_all_faults(first: int) -> None:
    results = [run_seed(SCENARIOS["controllers"], seed) for seed in range(first, first + AT_ONCE)]

    assert [(one.case.seed, one.invariant, one.text) for one in results if not one.ok] == []
    assert sum(one.seed_counts for one in results) > AT_ONCE // 2  # or the chaos has become too quiet
