"""Clients push to a store with copies while servers are lost: properties of seeds, and broken safeguards."""

from collections import defaultdict
from itertools import pairwise

import msgspec
import pytest

from adam_async.parameter_server.members_watch import UNSTEADY_S
from adam_async.run.store_record import BundleRecord
from tests.ablations.every import NAMED
from tests.simulation.plan import Case, Fault, Options, in_order
from tests.simulation.runner import draw_case, run_case, run_seed
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.scenarios.bundle_watch import CATCH_UPS, EVENTS, FAILOVERS, SUCCESSIVE, BundleWatch
from tests.simulation.scenarios.pushes import OWN_KINDS, PUSHERS, PUSHES
from tests.simulation.scenarios.server_faults import LOSS_KINDS, POWER
from tests.simulation.wire import Conditions
from tests.test_simulation.other_processes import replay_hash_elsewhere

# A seed takes four to ten seconds of a processor, so the slow tier has the rest.
SEEDS, THOROUGH_SEEDS, AT_ONCE = 60, 4, 2
BATCHES = [
    pytest.param(first, marks=pytest.mark.thorough if first < THOROUGH_SEEDS else pytest.mark.slow)
    for first in range(0, SEEDS, AT_ONCE)
]


def case_of(*faults: Fault, copies: int = 3, seed: int = 1) -> Case:
    """A run over a quiet network with these faults alone."""
    settings = {"copies": copies, "min_in_sync": 0, "consistency": "asp", "momentum": False}
    network = Conditions(delay_s=0.0005, jitter_s=0.0005)
    plan = msgspec.structs.replace(
        draw_case(PUSHES, 1).plan,
        options=Options(network=network, settings=settings),
        faults=in_order(faults),
    )
    return Case(scenario="pushes", seed=seed, plan=plan)


def test_a_killed_server_costs_no_push_and_returns_with_all_copies() -> None:
    result = run_case(PUSHES, case_of(Fault(at_s=2.0, kind="kill", targets=("ps-1",), lasts_s=1.0)))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts[FAILOVERS] > 0
    assert result.counts["copies compared"] > 100


def test_two_of_three_copies_may_be_lost_one_after_the_other() -> None:
    faults = [
        Fault(at_s=2.0, kind="kill", targets=("ps-0",), lasts_s=5.0),
        Fault(at_s=3.0, kind="crash", targets=("ps-1",), lasts_s=1.0),
    ]
    result = run_case(PUSHES, case_of(*faults, seed=4))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts[SUCCESSIVE] > 0
    assert result.counts[CATCH_UPS] > 0


def test_a_store_whose_servers_all_lose_power_fails_and_clients_go_on_with_another() -> None:
    result = run_case(PUSHES, case_of(Fault(at_s=3.0, kind="power", lasts_s=1.0)))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts["bundles lost"] == 4
    assert result.counts["stores opened again"] >= len(PUSHERS)


def test_a_primary_is_lost_while_its_successor_lacks_an_entry() -> None:
    result = run_case(PUSHES, case_of(Fault(at_s=2.0, kind="split", lasts_s=1.0)))

    assert (result.invariant, result.text) == ("", "")
    assert result.faults == {"split": 1}
    assert result.counts[FAILOVERS] > 0


def test_a_primary_is_lost_and_then_its_successor() -> None:
    result = run_case(PUSHES, case_of(Fault(at_s=2.0, kind="successors", lasts_s=1.0)))

    assert (result.invariant, result.text) == ("", "")
    assert result.counts[SUCCESSIVE] > 0


@pytest.mark.parametrize(
    ("safeguard", "kind", "invariant"),
    [
        ("the new primary's entry takes the place of an uncommitted one", "split", "committed"),
        ("a member keeps its tail when a new primary begins", "successors", "one log"),
        ("an entry is committed once all members in sync hold it", "kill", "committed"),
    ],
)
def test_a_loss_in_the_moment_that_needs_a_safeguard_finds_its_removal(
    safeguard: str, kind: str, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    NAMED[safeguard].remove(monkeypatch.setattr)

    # After a power cut the first member in sync takes over; a kill lets any of them do so.
    fault = Fault(at_s=3.0, kind=kind, lasts_s=1.0, amount=1.0)
    assert run_case(PUSHES, case_of(fault, seed=3)).invariant == invariant


def histories_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, set[str]]]]:
    """Return the servers in sync of each bundle after each change, with the time in seconds, by home."""
    saw, histories = BundleWatch._saw_bundle, defaultdict(list)

    def note(watch: BundleWatch, key: str, was: BundleRecord | None, bundle: BundleRecord) -> None:
        names = {name for name, _ in bundle.in_sync}
        histories[key.rpartition("/")[2]].append((watch._world.now, names))
        saw(watch, key, was, bundle)

    monkeypatch.setattr(BundleWatch, "_saw_bundle", note)
    result = run_case(PUSHES, case)
    assert (result.invariant, result.text) == ("", "")
    return histories


def test_pushes_that_lack_copies_wait_for_no_lost_server_while_another_is_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    histories = histories_of(
        case_of(Fault(at_s=3.0, kind="kill", targets=("ps-1",), lasts_s=9.0), copies=2), monkeypatch
    )

    left = 0
    for history in histories.values():
        lost = [at for (at, names), (_, before) in pairwise(reversed(history)) if before - names == {"ps-1"}]
        left += len(lost)
        if lost:
            assert next(at for at, names in history if at > lost[0] and len(names) == 2) < lost[0] + 1.0
    assert left > 0


@pytest.mark.parametrize(
    ("kind", "lasts_s", "silence_s"),
    [("freeze", 1.2, 1.0), ("freeze", 2.0, 1.0), ("freeze", 3.5, 1.0), ("kill", 0.8, 0.0)],
)
def test_a_lost_server_is_in_sync_again_soon_after_it_is_back(
    kind: str, lasts_s: float, silence_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(at_s=3.0, kind=kind, targets=("ps-1",), lasts_s=lasts_s)
    histories = histories_of(case_of(fault), monkeypatch)

    left = 0
    for history in histories.values():
        # The first change places the bundle, and its members join before the freeze.
        lost = [at for (at, names), (_, before) in pairwise(reversed(history)) if before - names == {"ps-1"}]
        left += len(lost)
        if lost:
            returned = [at for at, names in history if at > lost[0] and "ps-1" in names]
            assert silence_s <= lost[0] - 3.0 < silence_s + 0.6
            assert returned[0] < 3.0 + lasts_s + 0.8
    assert left > 0


def test_a_server_that_freezes_again_and_again_returns_less_often_than_it_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freezes = [
        Fault(at_s=3.0 + 1.8 * number, kind="freeze", targets=("ps-1",), lasts_s=1.2) for number in range(6)
    ]
    histories = histories_of(case_of(*freezes), monkeypatch)

    for history in histories.values():
        returns = [at for (_, before), (at, names) in pairwise(history) if "ps-1" in names - before]
        assert all(later - earlier > UNSTEADY_S for earlier, later in pairwise(returns[1:])), returns


def test_a_plan_loses_two_servers_or_more() -> None:
    plans = [draw_case(PUSHES, seed).plan for seed in range(200)]

    for plan in plans:
        assert sum(fault.kind in LOSS_KINDS for fault in plan.faults) >= 2
    assert {fault.kind for plan in plans for fault in plan.faults} == {*OWN_KINDS, POWER}
    assert {plan.options.settings["copies"] for plan in plans} == {2, 3}
    assert len({plan.faults for plan in plans}) == 200


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_every_process() -> None:
    elsewhere = replay_hash_elsewhere("tests.simulation.scenarios.pushes", "PUSHES", 9)

    assert elsewhere == run_seed(PUSHES, 9).replay_hash


@pytest.mark.parametrize("first", BATCHES)
def test_acknowledged_pushes_survive_lost_servers(first: int) -> None:
    results = [run_seed(SCENARIOS["pushes"], seed) for seed in range(first, first + AT_ONCE)]

    assert [(one.case.seed, one.invariant, one.text) for one in results if not one.ok] == []
    assert sum(any(one.counts.get(name) for name in EVENTS) for one in results) >= AT_ONCE - 1
