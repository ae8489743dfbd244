"""Members that crash, freeze and are cut off: properties of every seed, and failures without a safeguard."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from adam_async.controller.client import Membership
from adam_async.data_server.client import DataClient, ImageGroup
from adam_async.data_server.dealer import SetReader
from adam_async.data_server.epoch import SetsRead
from adam_async.data_server.service import DataServer
from adam_async.errors import DeadlineExceeded
from adam_async.messages import Lease
from adam_async.run.counts import EpochCounts
from tests.simulation.random_streams import RandomStream
from tests.simulation.runner import draw_case, run_case, run_seed
from tests.simulation.scenarios import short_runs
from tests.simulation.scenarios.members import MEMBERS
from tests.simulation.scenarios.short_runs import draw_run, steps_of
from tests.test_simulation.other_processes import replay_hash_elsewhere

pytestmark = pytest.mark.thorough

HERE = "tests.simulation.scenarios.members"


@pytest.mark.slow
def test_seeds_count() -> None:
    for seed in range(2, 5):
        result = run_seed(MEMBERS, seed)
        assert result.seed_counts, result


def test_every_plan_has_each_kind_of_fault_and_plans_differ() -> None:
    plans = [draw_case(MEMBERS, seed).plan for seed in range(100)]

    for plan in plans:
        assert {fault.kind for fault in plan.faults} == set(MEMBERS.kinds)
    assert len({plan.faults for plan in plans}) == 100
    assert {plan.options.settings["members"] for plan in plans} == {4, 5, 6}
    assert {plan.options.settings["data_servers"] for plan in plans} == {2, 3}


def test_runs_pause_and_end_early_and_wrong_questions_are_refused() -> None:
    counts: Counter[str] = Counter()
    for seed in (3, 6):
        counts.update(run_seed(MEMBERS, seed).counts)

    assert counts["stops"]
    assert counts["epochs cut short"]
    assert counts["refused"]


def test_runs_differ_in_how_groups_are_shared_out_and_taken_up() -> None:
    runs = [draw_run(RandomStream(f"run {number}")) for number in range(60)]

    assert {run.config.consistency for run in runs} == {"asp", "ssp:2", "bsp"}
    assert {run.config.partitions for run in runs} == {1, 2}
    assert {run.resumed is None for run in runs} == {True, False}


def test_a_step_ends_at_its_size_at_a_clock_and_around_a_group_that_was_leased_before() -> None:
    def group(number: int, *, attempt: int = 1, clock: int = 0) -> ImageGroup:
        lease = Lease(epoch=1, number=number, attempt=attempt, images=2, progress=0.0)
        return ImageGroup(lease, None, np.zeros(2), clock)

    groups = [*map(group, range(5)), group(5, attempt=2), group(6), group(7, clock=9)]
    cut = steps_of(groups, 3)

    assert [[each.lease.number for each in step] for step in cut] == [[0, 1, 2], [3, 4], [5], [6], [7]]


def test_a_step_of_which_a_part_has_some_groups_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_runs, "is_returned", lambda _: False)

    assert run_seed(MEMBERS, 17).invariant == "steps are taken whole"


def test_groups_counted_twice_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = DataServer._report_epoch

    async def twice(server: DataServer, run: str, term: int, number: int, result: EpochCounts) -> None:
        await shipped(server, run, term, number, msgspec.structs.replace(result, images=result.images + 1))

    monkeypatch.setattr(DataServer, "_report_epoch", twice)

    assert run_seed(MEMBERS, 2).invariant == "every image once"


def test_stalled_runs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataServer, "_report_epoch", lambda *_: asyncio.sleep(0))

    assert run_seed(MEMBERS, 3).invariant == "epochs end"


def test_an_epoch_without_a_next_one_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unanswered(*_: object) -> None:
        await asyncio.sleep(1.0)
        raise DeadlineExceeded("an answer", 1.0)

    monkeypatch.setattr(short_runs, "update_program", unanswered)

    assert run_seed(MEMBERS, 4).invariant == "epochs end"


@pytest.mark.slow
def test_groups_that_were_not_reported_count_only_by_the_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Membership.set_node
    answered = []

    async def counted(membership: Membership, **changes: Any) -> None:
        await shipped(membership, **changes)
        answered.extend(changes.get("info", ()))

    monkeypatch.setattr(Membership, "set_node", counted)
    monkeypatch.setattr(DataClient, "_report", lambda *_: asyncio.Event().wait())

    monkeypatch.setattr(SetReader, "read", lambda *_, **__: asyncio.Event().wait())

    assert run_seed(MEMBERS, 2).operations == len(answered) > 0


@pytest.mark.slow
def test_a_dealer_that_does_not_know_the_sets_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = SetReader.read

    async def forgetful(reader: SetReader, *which: Any, **options: Any) -> SetsRead:
        sets = await shipped(reader, *which, **options)
        return replace(sets, every=frozenset(), some=frozenset())

    monkeypatch.setattr(SetReader, "read", forgetful)

    assert run_seed(MEMBERS, 2).invariant == "each group once"


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_every_process() -> None:
    elsewhere = [replay_hash_elsewhere(HERE, "MEMBERS", 2, hash_seed=seed) for seed in ("0", "4242")]

    assert {*elsewhere} == {run_seed(MEMBERS, 2).replay_hash}


def test_a_write_that_is_acknowledged_and_lost_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Membership.set_node

    async def forgetful(membership: Membership, **changes: Any) -> None:
        if changes.get("info", {}).get("number") != 10:
            await shipped(membership, **changes)

    monkeypatch.setattr(Membership, "set_node", forgetful)

    assert run_seed(MEMBERS, 2).invariant == "I6"


def test_members_that_do_not_join_again_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Membership._join
    joined = set()

    async def once(membership: Membership, *arguments: object) -> None:
        if membership.node not in joined:
            joined.add(membership.node)
            await shipped(membership, *arguments)

    monkeypatch.setattr(Membership, "_join", once)

    assert run_case(MEMBERS, draw_case(MEMBERS, 2)).invariant == "all return"
