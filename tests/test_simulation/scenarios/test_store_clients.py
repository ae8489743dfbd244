"""Clients of stores beside a simulated training run: what they do in a run without faults and with them."""

import asyncio

import msgspec
import pytest

from adam_async.parameter_server.served_store import ServedStore
from adam_async.run.cluster_map import ClusterMap
from tests.simulation.plan import Case, Fault
from tests.simulation.runner import run_case
from tests.simulation.scenarios.store_clients import PUSHED
from tests.simulation.scenarios.training import CONSISTENCIES, TRAIN
from tests.test_simulation.scenarios.cases import plain_training, with_faults

pytestmark = pytest.mark.thorough

CRASH_S = 7.0


def quiet(consistency: str) -> Case:
    """A plain run without faults, beside a store of this consistency."""
    case = with_faults(plain_training(14))
    options = msgspec.structs.replace(case.plan.options, settings={"stores": consistency})
    return msgspec.structs.replace(case, plan=msgspec.structs.replace(case.plan, options=options))


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_clients_push_to_a_store_beside_a_run(consistency: str) -> None:
    result = run_case(TRAIN, quiet(consistency))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts[PUSHED] > 60
    assert result.counts["stores read"] > 10


def test_clients_of_a_deleted_store_open_the_next_one() -> None:
    result = run_case(TRAIN, quiet("asp"))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts["stores created"] >= result.counts["stores deleted"] >= 1
    assert result.counts["stores opened again"] >= 2


def test_a_client_that_servers_hear_of_late_counts_from_the_clock_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follow = ServedStore._follow_map

    def follow_late(served: ServedStore, cluster: ClusterMap) -> None:
        """Let the others end several steps before the servers hear of a client."""
        loop = asyncio.get_running_loop()
        loop.call_later(4.0 if loop.time() > CRASH_S - 1.5 else 0.0, follow, served, cluster)

    monkeypatch.setattr(ServedStore, "_follow_map", follow_late)
    # One of two late clients may end a step that the third has ended, before the other does.
    crashes = [
        Fault(at_s=CRASH_S, kind="client-crash", targets=(name,), lasts_s=5.0)
        for name in ("client-0", "client-1")
    ]
    result = run_case(TRAIN, with_faults(quiet("bsp"), *crashes))

    assert (result.invariant, result.text) == ("", "")
    assert result.faults == {"client-crash": 2}
