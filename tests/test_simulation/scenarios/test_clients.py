"""The shipped clients of three controllers: properties of every seed, and failures with a faulty client."""

import itertools

import msgspec
import pytest

from adam_async.controller import map_client
from adam_async.controller.leader_connection import LeaderConnection
from adam_async.messages import CompareAndSet
from tests.simulation.plan import Case
from tests.simulation.runner import draw_case, run_case, run_seed
from tests.simulation.scenarios.clients import CLIENTS

pytestmark = pytest.mark.thorough


def test_seeds_of_the_shipped_clients_count() -> None:
    results = [run_seed(CLIENTS, seed) for seed in (1, 2, 5)]

    assert all(result.seed_counts for result in results), results
    assert sum(result.counts.get("memberships given up", 0) for result in results) > 0


def test_every_plan_has_each_kind_of_fault_and_its_leader_is_cut_off() -> None:
    plans = [draw_case(CLIENTS, seed).plan for seed in range(100)]

    for plan in plans:
        assert {fault.kind for fault in plan.faults} == set(CLIENTS.kinds)
        assert all(fault.targets == () for fault in plan.faults if fault.kind == "isolate")
    assert len({plan.faults for plan in plans}) == 100


def with_sessions(seed: int, sessions: int) -> Case:
    """Return the run of a seed with another limit of sessions in the controllers."""
    case = draw_case(CLIENTS, seed)
    options = msgspec.structs.replace(
        case.plan.options, settings={**case.plan.options.settings, "sessions": sessions}
    )
    return msgspec.structs.replace(case, plan=msgspec.structs.replace(case.plan, options=options))


def test_forgotten_sessions_leave_outcomes_unknown_but_never_wrong() -> None:
    results = [run_case(CLIENTS, with_sessions(seed, 2)) for seed in (6, 8)]

    assert [one for one in results if not one.seed_counts] == []
    assert any(one.counts.get("unknown outcomes") for one in results)


# --- failures of faulty clients ----------------------------------------------------------------


def test_a_repeated_question_with_a_new_number_is_reported(monkeypatch) -> None:
    numbers = itertools.count(1)

    def renumbered(**fields) -> CompareAndSet:
        return CompareAndSet(**{**fields, "number": next(numbers)})

    monkeypatch.setattr(map_client, "CompareAndSet", renumbered)

    assert any(run_seed(CLIENTS, seed).invariant == "I6" for seed in range(1, 16))


def test_a_client_that_ignores_the_leaders_address_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(LeaderConnection, "_note_leader", lambda self, error: None)

    assert run_seed(CLIENTS, 1).invariant == "I15"
