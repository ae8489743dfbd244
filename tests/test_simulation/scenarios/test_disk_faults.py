"""Disks of controllers: damage is refused, costs one disk at a time, and slow ones had to be written to."""

import asyncio

import pytest

from adam_async.controller.consensus import records
from tests.simulation.disk import DiskConditions
from tests.simulation.faults import Missed
from tests.simulation.plan import Fault
from tests.simulation.runner import SeedResult, draw_case, run_case
from tests.simulation.scenario import World, simulate
from tests.simulation.scenarios.controllers import CONTROLLERS
from tests.simulation.scenarios.disk_faults import DiskFaults
from tests.test_simulation.scenarios.cases import with_faults
from tests.test_simulation.scenarios.fault_targets import targets_in

pytestmark = pytest.mark.thorough


def run_with(seed: int, *faults: Fault) -> SeedResult:
    """The run of a seed, with these faults alone."""
    return run_case(CONTROLLERS, with_faults(draw_case(CONTROLLERS, seed), *faults))


def rot(at_s: float, number: int, *, runs: bool) -> Fault:
    """Flip bits on the disk of a controller, while it runs or is down."""
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


def test_damage_that_is_not_refused_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(records, "_refuse_damage", lambda *_: None)

    assert any(run_with(seed, rot(8.0, 1, runs=False)).invariant in ("I7", "I10") for seed in range(2, 6))


def strike_slow_disk(*, at_s: float, amount: float):
    """Slow down a disk of a group without clients. Return whether that counts, and the writes."""

    async def scenario(world: World):
        targets = targets_in(world, patience_s=5.0)
        group = targets.group
        group.start()
        await asyncio.sleep(at_s)
        written, counts = group.writes["controller-1"], True
        fault = Fault(at_s=at_s, kind="slow-disk", targets=("controller-1",), lasts_s=1.0, amount=amount)
        try:
            await DiskFaults(targets).strikes["slow-disk"](world, fault)
        except Missed:
            counts = False
        conditions = world.node("controller-1").disk_conditions
        assert conditions == DiskConditions()
        return counts, group.writes["controller-1"] - written

    return simulate(scenario, seed=0, limit_s=1000.0).result


@pytest.mark.parametrize("amount", [0.1, 0.5])
def test_a_slow_disk_of_a_controller_that_begins_lasts_until_that_had_to_write(amount: float) -> None:
    counts, writes = strike_slow_disk(at_s=0.01, amount=amount)

    assert counts
    assert writes > 0


@pytest.mark.parametrize("amount", [0.1, 0.5])
def test_a_slow_disk_without_a_write_does_not_count(amount: float) -> None:
    counts, writes = strike_slow_disk(at_s=20.0, amount=amount)

    assert not counts
    assert writes == 0
