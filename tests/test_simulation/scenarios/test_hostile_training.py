"""Hostile peers beside a cluster in training: seeds that pass, and failures after the removal of a bound."""

import pytest

from adam_async.parameter_server.question_checks import QuestionChecks
from tests.ablations.every import NAMED
from tests.simulation.plan import Case, Fault, Options, Plan
from tests.simulation.random_streams import RandomStream
from tests.simulation.runner import run_case, run_seed
from tests.simulation.scenarios.hostile_peers import KINDS, SENDERS, TARGETS
from tests.simulation.scenarios.hostile_training import HOSTILE, draw_plan

QUICK = 25
"""Number of a seed that takes about a second."""


def struck_by(kind: str, target: str, amount: int = 200) -> Case:
    """A run with one hostile peer and one action."""
    fault = Fault(at_s=1.0, kind=kind, targets=("hostile-0", target), amount=float(amount))
    return Case(scenario="hostile", seed=1, plan=Plan(options=Options(), faults=(fault,)))


def test_a_cluster_learns_beside_hostile_peers() -> None:
    result = run_seed(HOSTILE, QUICK)

    assert (result.invariant, result.text, result.too_little) == ("", "", ())
    assert result.counts["refused"] > 300


def test_every_kind_of_peer_is_drawn_for_machines_that_it_can_reach() -> None:
    plan = draw_plan(RandomStream("hostile/0/plan"))

    assert {fault.kind for fault in plan.faults} == set(KINDS)
    assert {fault.targets[1] for fault in plan.faults} <= {
        name for names in TARGETS.values() for name in names
    }
    assert set(SENDERS) == set(TARGETS)


@pytest.mark.thorough
def test_a_cluster_learns_whatever_hostile_peers_do() -> None:
    result = run_seed(HOSTILE, 0)

    assert (result.invariant, result.text) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 5, 10, 15])
def test_clusters_learn_whatever_hostile_peers_do_in_more_seeds(first: int) -> None:
    results = [run_seed(HOSTILE, seed) for seed in range(first, first + 5)]

    assert [(one.case.seed, one.invariant, one.text) for one in results if not one.ok] == []
    assert sum(one.seed_counts for one in results) >= 3


@pytest.mark.thorough
def test_a_question_that_contradicts_the_run_and_is_answered_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(QuestionChecks, "refusal", lambda *_, **__: None)
    result = run_case(HOSTILE, struck_by("bad-ps", "ps-0", amount=2000))

    assert not result.ok


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("safeguard", "invariant"),
    [
        ("a session that the map does not name splits no tables", "tables stay shared"),
        ("a peer has few sessions that the map does not name", "sessions are bounded"),
    ],
)
def test_tables_that_an_invented_session_splits_are_reported(
    monkeypatch: pytest.MonkeyPatch, safeguard: str, invariant: str
) -> None:
    assert run_case(HOSTILE, struck_by("split", "ps-0")).ok
    NAMED[safeguard].remove(monkeypatch.setattr)
    assert run_case(HOSTILE, struck_by("split", "ps-0")).invariant == invariant


FORGED = (
    "a bundle takes groups only of generations that its map names",
    "a generation that the map has not named has no lane",
    "groups are within their epoch",
    "steps are reported to a store in place only",
    "the groups of a push are of its epoch",
)
"""Safeguards whose removal one peer that forges groups shows."""


@pytest.mark.thorough
def test_forged_groups_are_refused() -> None:
    result = run_case(HOSTILE, struck_by("forge", "ps-0"))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts["forged groups"] > 10


@pytest.mark.thorough
@pytest.mark.parametrize("safeguard", FORGED)
def test_forged_groups_that_a_server_takes_or_does_not_refuse_for_good_are_reported(
    monkeypatch: pytest.MonkeyPatch, safeguard: str
) -> None:
    NAMED[safeguard].remove(monkeypatch.setattr)
    result = run_case(HOSTILE, struck_by("forge", "ps-0"))

    assert result.invariant == NAMED[safeguard].breaks


@pytest.mark.thorough
def test_a_server_whose_handler_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("a field that nobody expected")

    monkeypatch.setattr(QuestionChecks, "refusal", fail)
    result = run_case(HOSTILE, struck_by("bad-ps", "ps-0"))

    assert not result.ok
