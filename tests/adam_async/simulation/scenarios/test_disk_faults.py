"""Disks of controllers that rot: damage is refused, costs one disk at a time, and would be missed else."""

import msgspec
import pytest

from adam_async.consensus import records
from adam_async.simulation.campaign import SeedResult, draw_case, run_case
from adam_async.simulation.plan import Fault, in_order
from adam_async.simulation.scenarios.controllers import CONTROLLERS


def run_with(seed: int, *faults: Fault) -> SeedResult:
    """The run of a seed, with these faults alone."""
    case = draw_case(CONTROLLERS, seed)
    plan = msgspec.structs.replace(case.plan, faults=in_order(faults))
    return run_case(CONTROLLERS, msgspec.structs.replace(case, plan=plan))


def rot(at_s: float, number: int, *, runs: bool) -> Fault:
    """Bits of what a controller has on disk flip, while it runs or is down."""
    name = f"controller-{number}"
    return Fault(at_s=at_s, kind="rot", targets=(name,), lasts_s=1.0, amount=float(runs))


@pytest.mark.parametrize("runs", [False, True])
def test_a_controller_whose_file_rots_comes_back_with_another_disk(runs: bool) -> None:
    result = run_with(1, rot(5.0, 1, runs=runs), rot(15.0, 2, runs=runs))

    assert result.invariant == "", result.text
    assert result.faults == {"rot": 2}


def test_disks_that_rot_at_the_same_time_are_lost_one_after_the_other() -> None:
    result = run_with(3, *(rot(6.0, number, runs=True) for number in (1, 2, 3)))

    assert result.invariant == "", result.text
    assert result.faults == {"rot": 3}


def test_damage_that_is_not_refused_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(records, "_refuse_damage", lambda *_: None)

    assert any(run_with(seed, rot(8.0, 1, runs=False)).invariant in ("I7", "I10") for seed in range(2, 6))
