"""Controllers under faults: properties of every seed, and the failure after a removed safeguard."""

import pytest

from adam_async.controller.consensus import core
from tests.ablations.every import NAMED
from tests.simulation.disk import SimulatedDisk
from tests.simulation.runner import draw_case, run_seed
from tests.simulation.scenario import Scenario
from tests.simulation.scenarios.controllers import CONTROLLERS
from tests.simulation.scenarios.restarts import RESTARTS, ROUNDS
from tests.test_simulation.other_processes import replay_hash_elsewhere

HERE = "tests.simulation.scenarios.controllers"


@pytest.mark.thorough
def test_seeds_of_chaos_count() -> None:
    for seed in (1, 2):
        result = run_seed(CONTROLLERS, seed)
        assert result.seed_counts, result


def test_a_seed_of_restarts_counts() -> None:
    result = run_seed(RESTARTS, 6)

    assert result.seed_counts, result
    assert result.counts["restarts"] >= ROUNDS


def test_every_plan_has_each_kind_of_fault_and_plans_differ() -> None:
    plans = [draw_case(CONTROLLERS, seed).plan for seed in range(100)]

    for plan in plans:
        assert {fault.kind for fault in plan.faults} == set(CONTROLLERS.kinds)
    assert len({plan.faults for plan in plans}) == 100
    assert {plan.options.settings["controllers"] for plan in plans} == {3, 5}
    leaders = [fault for plan in plans for fault in plan.faults if not fault.targets]
    assert {"crash", "freeze", "isolate", "disk-error"} <= {fault.kind for fault in leaders}


def test_restarts_are_of_groups_of_all_sizes() -> None:
    plans = [draw_case(RESTARTS, seed).plan for seed in range(30)]

    assert {plan.options.settings["controllers"] for plan in plans} == {1, 3, 5}
    assert all(len(plan.faults) == ROUNDS for plan in plans)


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_every_process() -> None:
    elsewhere = [replay_hash_elsewhere(HERE, "CONTROLLERS", 2, hash_seed=seed) for seed in ("0", "4242")]

    assert elsewhere[0] == elsewhere[1] != ""


# --- what the scenarios would not miss ---------------------------------------------------------


def broken(scenario: Scenario, seed: int) -> str:
    """The invariant that a seed violates; empty if none."""
    return run_seed(scenario, seed).invariant


@pytest.mark.thorough
def test_writes_that_are_not_forced_down_are_missed_after_a_restart(monkeypatch) -> None:
    monkeypatch.setattr(SimulatedDisk, "append_durably", SimulatedDisk.write_from)

    assert broken(RESTARTS, 0) in ("DamagedLog", "I7")


@pytest.mark.parametrize(
    ("safeguard", "scenario", "seeds", "invariant"),
    [
        pytest.param("a vote is durable", RESTARTS, 6, "I7", marks=pytest.mark.thorough),
        pytest.param("a promise is sent after its sync", CONTROLLERS, 4, "I7", marks=pytest.mark.thorough),
        pytest.param("a repeated request is applied once", CONTROLLERS, 8, "I6", marks=pytest.mark.slow),
    ],
)
def test_a_removed_safeguard_is_reported(safeguard, scenario, seeds, invariant, monkeypatch) -> None:
    NAMED[safeguard].remove(monkeypatch.setattr)

    assert any(broken(scenario, seed) == invariant for seed in range(seeds))


@pytest.mark.slow
def test_reads_without_a_round_are_reported(monkeypatch) -> None:
    def read(self, question):
        self._effects.append(core.ReadReady(question.tag))

    monkeypatch.setitem(core.HANDLERS[core.Read], core.Role.LEADER, read)

    assert any(broken(CONTROLLERS, seed) == "I6" for seed in range(5, 27))
