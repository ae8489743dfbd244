"""Random and fixed runs of the cores can fail: one of them misses each safeguard that is removed."""

import pytest

from adam_async.controller.consensus.violations import Violation
from tests.adam_async.controller.consensus.ablations import ABLATIONS as CONSENSUS
from tests.adam_async.controller.consensus.fuzzed_group import run_seed as run_group
from tests.adam_async.parameter_server.replication.ablations import ABLATIONS as REPLICATION
from tests.adam_async.parameter_server.replication.fuzzed_bundle import run_seed as run_bundle

SEEDS = 300
ROWS = [*((row, run_group) for row in CONSENSUS), *((row, run_bundle) for row in REPLICATION)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ablation", "run"), [pytest.param(*row, id=row[0].name) for row in ROWS if row[0].story is None]
)
def test_a_random_run_without_a_safeguard_fails(ablation, run, monkeypatch):
    ablation.remove(monkeypatch.setattr)
    for seed in (ablation.seed, *range(SEEDS)):
        try:
            run(seed)
        except Exception:  # whatever breaks, breaks because of the removal
            return
    pytest.fail(f"no run of {SEEDS} seeds fails")


@pytest.mark.parametrize("ablation", [row for row, _ in ROWS if row.story is not None], ids=lambda a: a.name)
def test_a_fixed_run_without_its_safeguard_fails(ablation, monkeypatch):
    ablation.remove(monkeypatch.setattr)
    with pytest.raises((AssertionError, Violation)):
        ablation.story()
