"""The result of a seed: whether all invariants held, whether it counts, and that it repeats."""

import asyncio
import logging

import msgspec
import pytest

from tests.simulation.plan import Case, Fault
from tests.simulation.runner import NOT_DONE, digest, draw_case, play, run_case, run_seed, summary, unreached
from tests.simulation.scenario import Violation
from tests.test_simulation.other_processes import replay_hash_elsewhere
from tests.test_simulation.toy import BROKEN, plan_of, toy


def case_of(*faults: Fault) -> Case:
    return Case(scenario="toy", seed=0, plan=plan_of(*faults))


def test_a_seed_in_which_enough_went_on_counts() -> None:
    result = run_seed(toy(), 5)

    assert result.ok
    assert result.seed_counts
    assert result.operations > 200
    assert sum(result.faults.values()) == len(result.case.plan.faults) == 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"least_operations": 100_000}, "fewer than 100000 operations"),
        ({"least_leader_changes": 1}, "fewer than 1 changes of leader"),
        ({"kinds": ("kill", "isolate")}, "no isolate"),
        ({"events": ("found", "lost")}, "none of found, lost"),
    ],
)
def test_a_seed_in_which_too_little_went_on_does_not_count(changes: dict[str, object], reason: str) -> None:
    result = run_seed(toy(**changes), 5)

    assert result.ok
    assert not result.seed_counts
    assert result.too_little == (reason,)


async def misses(world, plan, ledger):
    for fault in plan.faults:
        (ledger.missed if fault.kind == "cut" else ledger.fired)(fault)


def test_a_seed_with_a_fault_without_an_effect_does_not_count() -> None:
    crash = Fault(at_s=1.0, kind="crash", targets=("a",))
    cut = Fault(at_s=1.0, kind="cut", targets=("a", "b"))

    result = run_case(toy(run=misses, kinds=("cut",), least_operations=0), case_of(crash, cut, cut))

    assert result.ok
    assert result.too_little == ("a cut without an effect",)
    assert result.faults == {"crash": 1}


async def comes_across(world, plan, ledger):
    ledger.counts["found"] += len(plan.faults)


def test_marks_are_reached_by_seeds_together() -> None:
    scenario = toy(run=comes_across, marks=("found", "lost"))
    none, some = (run_case(scenario, case_of(*faults)) for faults in ((), (Fault(at_s=1.0, kind="cut"),)))

    assert unreached(scenario, [none]) == ["found", "lost"]
    assert unreached(scenario, [none, some]) == ["lost"]


def test_the_invariant_that_a_program_violates_is_named() -> None:
    result = run_seed(BROKEN, 0)

    assert (result.invariant, result.text) == ("I0", "b came back as 2")
    assert not result.seed_counts


async def deadlocks(world, plan, ledger):
    await asyncio.Event().wait()


async def never_ends(world, plan, ledger):
    await asyncio.sleep(1e6)


async def divides(world, plan, ledger):
    async with asyncio.TaskGroup():
        raise ZeroDivisionError("by nothing")


async def is_cancelled(world, plan, ledger):
    raise asyncio.CancelledError


async def skips_its_plan(world, plan, ledger):
    ledger.fired(plan.faults[0])


@pytest.mark.parametrize(
    ("run", "invariant", "text"),
    [
        (deadlocks, "no deadlock", "no step can ever run again"),
        (never_ends, "the run ends", "the run goes on after 100 s"),
        (divides, "ZeroDivisionError", "by nothing"),
        (is_cancelled, "CancelledError", ""),
        (skips_its_plan, NOT_DONE, "the run ended without 1 x crash, 1 x cut"),
    ],
)
def test_whatever_ends_a_run_is_named_and_never_raised(run: object, invariant: str, text: str) -> None:
    crash = Fault(at_s=1.0, kind="crash", targets=("a",))
    faults = (crash, crash, Fault(at_s=1.0, kind="cut", targets=("a", "b")))

    result = run_case(toy(run=run), case_of(*faults))

    assert result.invariant == invariant
    assert text in result.text
    assert result.is_error == (run in (divides, is_cancelled)), "no check raises these"
    assert result.replay_hash


def test_a_case_is_the_same_run_again_and_another_seed_is_another() -> None:
    hashes = [run_seed(toy(), seed).replay_hash for seed in range(3)]
    again = [run_case(toy(), draw_case(toy(), seed)).replay_hash for seed in range(3)]

    assert hashes == again
    assert len(set(hashes)) == 3


def test_the_conditions_of_a_plan_are_those_of_its_run() -> None:
    case = case_of()
    shuffled = msgspec.structs.replace(case, plan=plan_of(shuffled=True))

    assert run_case(toy(), case).replay_hash != run_case(toy(), shuffled).replay_hash


def test_a_seed_is_the_same_run_in_every_process() -> None:
    elsewhere = [
        replay_hash_elsewhere("tests.test_simulation.toy", "toy()", 3, hash_seed=seed)
        for seed in ("0", "4242")
    ]

    assert {*elsewhere} == {run_seed(toy(), 3).replay_hash}


async def test_within_an_event_loop_nothing_can_be_run() -> None:
    with pytest.raises(RuntimeError, match="another loop runs here"):
        run_seed(toy(), 0)


def test_nothing_is_logged_in_a_run_and_all_is_after_it(caplog: pytest.LogCaptureFixture) -> None:
    async def loud(world, plan, ledger):
        logging.getLogger("loud").critical("in it")

    run_case(toy(run=loud), case_of())
    logging.getLogger("loud").critical("after it")

    assert caplog.messages == ["after it"]


def test_the_digest_is_that_of_the_seeds_and_not_of_their_order() -> None:
    results = [run_seed(toy(), seed) for seed in range(3)]

    assert digest(results) == digest(results[::-1])
    assert digest(results) != digest(results[:2])


def test_the_line_of_a_scenario_counts_seeds_and_ends_in_the_digest() -> None:
    results = [run_seed(toy(), 0), run_seed(toy(least_leader_changes=1), 1), run_seed(BROKEN, 2)]

    assert summary("toy", results, 31.2) == f"toy: 3 seeds, 1 count, 1 failed, 31 s, hash {digest(results)}"
    assert summary("toy", results[:1], 0.0).startswith("toy: 1 seed, 1 count, 0 failed, 0 s, hash ")


def test_a_note_is_kept_with_its_time() -> None:
    async def notes(world, plan, ledger):
        world.node("a")
        await asyncio.sleep(1.0)
        ledger.note("leader", "a", "elected")
        await asyncio.sleep(1.0)
        ledger.span("leader", "a", "term 1", 1.0)
        raise Violation("I9", "enough")

    played = play(toy(run=notes), case_of())

    assert played.nodes == {"a": ()}
    assert [(span.text, span.begun, span.ended) for span in played.spans] == [
        ("elected", 1.0, None),
        ("term 1", 1.0, 2.0),
    ]
    assert played.result.invariant == "I9"
