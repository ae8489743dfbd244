"""Bad clients of a training cluster: answers to bad requests, and failures if a server accepts one."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from adam_async.parameter_server import apply
from adam_async.parameter_server.state import ServerState
from adam_async.simulation.plan import Case, Fault
from adam_async.simulation.runner import run_case
from adam_async.simulation.scenarios.training import TRAIN
from adam_async.worker.service import ModelWorker
from tests.ablations.patches import Patch, replaces
from tests.adam_async.simulation.scenarios.cases import plain_training, with_faults
from transport import Link

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
    async def keep(_: ModelWorker, link: Link) -> None:
        await link.wait_closed()

    monkeypatch.setattr(ModelWorker, "_on_neighbour", keep)
    result = run_case(TRAIN, bad_requests_alone())

    assert result.invariant == "every word has its answer"
    assert "did not close the link after Greet(" in result.text


@replaces(ServerState, "_order")
def take_pushes_of_other_runs(order: Any, self: ServerState, event: Any) -> Any:
    """Take a push of any run as one of the present run."""
    push = msgspec.structs.replace(event.push, run=self.run)
    return order(self, msgspec.structs.replace(event, push=push))


@replaces(ServerState, "_order")
def take_pushes_of_other_generations(order: Any, self: ServerState, event: Any) -> Any:
    """Take a push for any version of the assignment as one for the present version."""
    push = msgspec.structs.replace(event.push, generation=self.generation)
    return order(self, msgspec.structs.replace(event, push=push))


@replaces(apply, "is_finite")
def apply_infinite_gradients(*_: Any) -> bool:
    """Regard every gradient as finite."""
    return True


@replaces(ServerState, "_tick")
def count_early_ticks(tick: Any, self: ServerState, event: Any) -> Any:
    """Forget which pushes a tick follows."""
    return tick(self, replace(event, tick=msgspec.structs.replace(event.tick, numbers=())))


@replaces(ServerState, "_record")
def count_steps_again(record: Any, self: ServerState, event: Any) -> Any:
    """Forget the last record of a session before it arrives again."""
    session = event.record.session, event.record.incarnation
    last_step = event.record.number + len(event.record.steps) - 1
    for shard in self.shards.values():
        if shard.last_number.get(session, 0) == last_step:
            shard.last_number[session] = event.record.number - 1
    return record(self, event)


REFUSED = "what is wrong is refused"
ABLATIONS = {
    "a push of another run is taken": (take_pushes_of_other_runs, REFUSED),
    "a push of another generation is taken": (take_pushes_of_other_generations, REFUSED),
    "a gradient that is not finite is applied": (apply_infinite_gradients, REFUSED),
    "a tick counts before the push that it follows": (count_early_ticks, REFUSED),
    "steps in place are counted again": (count_steps_again, "I2"),
}


@pytest.mark.parametrize(("patch", "invariant"), ABLATIONS.values(), ids=ABLATIONS)
def test_a_run_fails_after_the_removal_of_a_safeguard(
    patch: Patch, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch.setattr)

    assert run_case(TRAIN, bad_requests_alone()).invariant == invariant
