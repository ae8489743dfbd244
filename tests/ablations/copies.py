"""Safeguards of shards with several copies and their removals: more rows of `benchmarks.ablations`.

The scenario `pushes` finds them. A row that no seed is expected to find has the reason.
"""

from tests.ablations import copy_patches
from tests.ablations.safeguards import Ablation

GUARDS = "tests/adam_async/simulation/scenarios/test_pushes.py::"
KILLED = GUARDS + "test_a_killed_server_costs_no_push_and_returns_with_all_copies"
