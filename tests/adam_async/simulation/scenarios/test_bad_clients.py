"""Bad clients of a training cluster: answers to bad requests, and failures if a server accepts one."""

import pytest

from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.state import ServerState
from adam_async.simulation.plan import Case, Fault
from adam_async.simulation.runner import run_case
from adam_async.simulation.scenarios.training import TRAIN
from adam_async.worker.service import ModelWorker
from tests.ablations.rewriting import rewrite
from tests.adam_async.simulation.scenarios.cases import plain_training, with_faults

pytestmark = pytest.mark.thorough


def bad_requests_alone() -> Case:
    """Make a plain run whose only faults are two bad clients."""
    faults = (Fault(at_s=2.0, kind="visit", targets=(name,)) for name in ("ps-0", "ps-1"))
    return with_faults(plain_training(3), *faults)


def test_every_bad_request_has_its_answer() -> None:
    result = run_case(TRAIN, bad_requests_alone())

    assert result.text == ""
    assert result.faults == {"visit": 2}


def test_a_server_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerState, "_tick", lambda *_: [])
    result = run_case(TRAIN, bad_requests_alone())

    assert result.invariant == "every word has its answer"
    assert " did not answer Tick(" in result.text


def test_a_missing_answer_is_no_violation_while_a_fault_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerState, "_tick", lambda *_: [])
    case = bad_requests_alone()
    visit, _ = case.plan.faults
    freezes = (Fault(at_s=at, kind="freeze", targets=("worker-1",), lasts_s=0.8) for at in (4.0, 13.0, 22.0))
    result = run_case(TRAIN, with_faults(case, visit, *freezes))

    assert result.text == ""
    assert "a visit without an effect" in result.too_little


def test_a_worker_that_never_closes_the_link_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(
        monkeypatch, ModelWorker, "_on_neighbour", "self._refused_greets += 1", "await link.wait_closed()"
    )
    result = run_case(TRAIN, bad_requests_alone())

    assert result.invariant == "every word has its answer"
    assert "did not close the link after Greet(" in result.text


ABLATIONS = {
    "a push of another run is taken": (
        ServerState, "_order", "push.run != self.run", "False", "what is wrong is refused",
    ),
    "a push of another generation is taken": (
        ServerState, "_order", "push.generation == self.generation", "True", "what is wrong is refused",
    ),
    "a gradient that is not finite is applied": (
        Applier, "_shard_pieces", "gradient.finite or is_finite(gradient.values)", "True",
        "what is wrong is refused",
    ),
    "a tick counts before the push that it follows": (
        ServerState, "_tick", "shard.last_number.get(session, 0) < last", "False", "what is wrong is refused",
    ),
    "steps in place are counted again": (
        ServerState, "_record", "min(seen) >= last_step", "False", "what is wrong is refused",
    ),
}  # fmt: skip


@pytest.mark.parametrize("safeguard", ABLATIONS)
def test_a_run_fails_after_the_removal_of_a_safeguard(
    safeguard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, old, new, invariant = ABLATIONS[safeguard]
    rewrite(monkeypatch, owner, method, old, new)

    assert run_case(TRAIN, bad_requests_alone()).invariant == invariant
