"""Clients of stores beside a simulated training run: what they do in a run without faults and with them."""

import msgspec
import pytest

from adam_async.simulation.plan import Case
from adam_async.simulation.runner import run_case
from adam_async.simulation.scenarios.store_clients import CONSISTENCIES
from adam_async.simulation.scenarios.training import TRAIN
from tests.adam_async.simulation.scenarios.cases import plain_training, with_faults

pytestmark = pytest.mark.thorough


def quiet(consistency: str) -> Case:
    """A plain run without faults, beside a store of this consistency."""
    case = with_faults(plain_training(14))
    options = msgspec.structs.replace(case.plan.options, settings={"stores": consistency})
    return msgspec.structs.replace(case, plan=msgspec.structs.replace(case.plan, options=options))


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_clients_push_to_a_store_beside_a_run(consistency: str) -> None:
    result = run_case(TRAIN, quiet(consistency))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts["pushes to stores"] > 60
    assert result.counts["stores read"] > 10


def test_clients_of_a_deleted_store_open_the_next_one() -> None:
    result = run_case(TRAIN, quiet("asp"))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts["stores created"] >= result.counts["stores deleted"] >= 1
    assert result.counts["stores opened again"] >= 2
