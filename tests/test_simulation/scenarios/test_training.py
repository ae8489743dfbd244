"""A cluster that trains under faults: properties of every seed, and failures without a safeguard."""

import msgspec
import pytest

from adam_async.driver import driver
from tests.ablations.ablation import Ablation
from tests.ablations.every import NAMED
from tests.simulation.plan import Fault, Options, Plan, Setting
from tests.simulation.runner import SeedResult, draw_case, run_case, run_seed
from tests.simulation.scenarios import SCENARIOS, training, training_faults
from tests.simulation.scenarios.bundle_watch import ROUND_OTHERWISE, SUCCESSIVE
from tests.simulation.scenarios.cluster import CONTROLLERS
from tests.simulation.scenarios.training import BRIEF_S, LOSSES, TRAIN
from tests.simulation.scenarios.training_cluster import CLIENTS, IMAGES, WORKERS, images
from tests.simulation.scenarios.training_faults import CONTROLLER_KINDS, DRIVER_KINDS, SERVER_KINDS, TORN_KIND
from tests.simulation.scenarios.training_setups import Draw
from tests.simulation.wire import Conditions
from tests.test_simulation.other_processes import replay_hash_elsewhere
from tests.test_simulation.scenarios.cases import plain_training, with_faults

pytestmark = pytest.mark.thorough


def test_a_seed_counts() -> None:
    result = run_seed(SCENARIOS["training"], 14)

    assert result.seed_counts, result


def test_every_plan_has_each_kind_and_spares_roles_with_the_only_copy_of_their_state() -> None:
    plans = [draw_case(TRAIN, seed).plan for seed in range(200)]

    for plan in plans:
        kinds, copies = {fault.kind for fault in plan.faults}, plan.options.settings.get("copies", 1)
        assert kinds - {*SERVER_KINDS, *DRIVER_KINDS, TORN_KIND} == set(TRAIN.kinds)
        assert bool(kinds & set(LOSSES)) == (int(copies) > 1)
        may_replace = "resumed" not in plan.options.settings
        for fault in plan.faults:
            if fault.kind in DRIVER_KINDS:
                assert may_replace or not fault.amount, fault
                continue
            alone = len(fault.targets) == 1 and fault.targets[0] not in (*WORKERS, *CONTROLLERS, *CLIENTS)
            brief = fault.kind == "freeze" and fault.lasts_s <= BRIEF_S
            assert not alone or brief, fault
    assert len({plan.faults for plan in plans}) == 200
    drivers = [[fault for fault in plan.faults if fault.kind in DRIVER_KINDS] for plan in plans]
    assert {len(faults) for faults in drivers} == {0, 1, 2}
    assert {fault.amount for faults in drivers for fault in faults} == {0.0, 1.0}
    assert 0.25 < sum(map(bool, drivers)) / len(plans) < 0.45


def test_servers_with_copies_are_lost_in_every_mode_and_with_both_forms_of_pushes() -> None:
    drawn = [draw_case(TRAIN, seed).plan.options.settings for seed in range(200)]
    copied = [settings for settings in drawn if "copies" in settings]

    assert {(each["servers"], each["copies"]) for each in copied} == {(3, 2), (3, 3), (4, 2), (4, 3)}
    modes = {str(each.get("consistency", "asp")).partition(":")[0] for each in copied}
    assert modes == {str(each["stores"]).partition(":")[0] for each in copied} == {"asp", "ssp", "bsp"}
    assert {"delta", "factors"} <= {each.get("protocol") for each in copied}
    assert not any("record" in each for each in copied)


@pytest.mark.parametrize("mode", ["asp", pytest.param("ssp:1", marks=pytest.mark.slow), "bsp"])
@pytest.mark.parametrize("protocol", ["factors", pytest.param("delta", marks=pytest.mark.slow)])
def test_a_lost_server_and_its_successor_cost_a_run_with_copies_nothing(mode: str, protocol: str) -> None:
    settings: dict[str, Setting] = {"consistency": mode, "protocol": protocol, "servers": 3, "copies": 3}
    network = Conditions(delay_s=0.0005, jitter_s=0.0005)
    faults = (
        Fault(at_s=2.0, kind="server-kill", targets=("ps-1",), lasts_s=1.0),
        Fault(at_s=4.0, kind="server-successors", lasts_s=1.0),
    )
    plan = Plan(options=Options(network=network, settings=settings | {"stores": mode}), faults=faults)
    result = run_case(TRAIN, msgspec.structs.replace(draw_case(TRAIN, 14), plan=plan))

    assert (result.invariant, result.text) == ("", "")
    assert result.faults == {"server-kill": 1, "server-successors": 1}
    assert result.counts[SUCCESSIVE] > 0
    assert result.counts[ROUND_OTHERWISE] > 0


def lost_driver(settings: Draw, *faults: Fault) -> SeedResult:
    """Run a plan with these settings and faults."""
    options = Options(network=Conditions(delay_s=0.0005, jitter_s=0.0005), settings={**settings})
    return run_case(
        TRAIN, msgspec.structs.replace(draw_case(TRAIN, 14), plan=Plan(options=options, faults=faults))
    )


KILL = Fault(at_s=2.0, kind="driver-kill", targets=("driver",), lasts_s=1.0)
CRASH = Fault(at_s=6.0, kind="driver-crash", targets=("driver",), lasts_s=2.0)

LOST_WITH: dict[str, Draw] = {
    "asp": {},
    "bsp": {"consistency": "bsp"},
    "concurrent evaluation": {"evaluation": "concurrent"},
    "checkpoints": {"resumed": 2, "checkpoint_every": 20},
    "copies": {"servers": 3, "copies": 3},
}


@pytest.mark.parametrize("settings", LOST_WITH.values(), ids=LOST_WITH)
def test_a_driver_that_is_lost_twice_leaves_its_run_to_the_next_one(settings: Draw) -> None:
    lost = Fault(at_s=3.0, kind="server-kill", targets=("ps-1",), lasts_s=1.0)
    result = lost_driver(settings, KILL, *([lost] if "copies" in settings else []), CRASH)

    assert (result.invariant, result.text) == ("", "")
    assert (result.counts["drivers lost"], result.counts["runs taken over"]) == (2, 1)


def test_a_driver_may_begin_a_new_run_in_the_place_of_one_that_waits() -> None:
    result = lost_driver({}, msgspec.structs.replace(KILL, amount=1.0))

    assert (result.invariant, result.text) == ("", "")
    assert (result.counts["drivers lost"], result.counts["runs taken over"]) == (1, 0)


def test_a_driver_that_begins_another_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "run_to_take", lambda cluster, attach: None)
    monkeypatch.setattr(driver, "check_none_waits", lambda cluster: None)

    assert lost_driver({}, KILL).invariant == "a run is taken over"


def test_a_run_that_ends_with_its_driver_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    Ablation(
        "a run waits for its driver",
        "adam_async/controller/training_rules.py",
        'if run.phase == "preparing" and not cluster.driven:',
        "if not cluster.driven:",
    ).remove(monkeypatch.setattr)
    result = lost_driver({}, KILL)

    assert result.invariant == "a run is taken over"


def test_half_of_the_faults_of_controllers_strike_the_leader() -> None:
    plans = [draw_case(TRAIN, seed).plan for seed in range(200)]
    struck = [fault.targets for plan in plans for fault in plan.faults if fault.kind in CONTROLLER_KINDS]

    assert 0.45 < struck.count(()) / len(struck) < 0.55
    assert {targets[0] for targets in struck if targets} == set(CONTROLLERS)


def test_the_images_are_digits_of_the_package_and_none_is_both_trained_and_tested() -> None:
    digits = images()

    assert len(digits.train_labels) == len(digits.train_images) == IMAGES
    assert set(digits.train_labels) == set(digits.test_labels) == set(range(10))
    learnt = {image.tobytes() for image in digits.train_images}
    assert len(digits.test_images) == 360
    assert not [image for image in digits.test_images if image.tobytes() in learnt]


def test_a_seed_is_the_same_run_in_every_process() -> None:
    elsewhere = replay_hash_elsewhere("tests.simulation.scenarios.training", "TRAIN", 9)

    assert elsewhere == run_seed(TRAIN, 9).replay_hash


def test_a_restarted_worker_does_not_train_in_a_place_of_another_one() -> None:
    # The worker restarts while the map still shows its first incarnation; then the other worker takes its
    # place. All faults strike during the preparation of the run: it has places, and no role is ready.
    faults = (
        Fault(at_s=1.47, kind="kill", targets=("worker-1",), lasts_s=5.2),
        Fault(at_s=2.6, kind="freeze", targets=("worker-1",), lasts_s=0.4),
        Fault(at_s=4.74, kind="crash", targets=("worker-0",), lasts_s=0.3),
        Fault(at_s=5.54, kind="freeze", targets=("worker-0",), lasts_s=3.4),
    )
    case = draw_case(TRAIN, 1011)
    network = Conditions(delay_s=0.0005, jitter_s=0.0005)
    options = Options(shuffled=False, unkind=False, network=network)
    plan = Plan(options=options, faults=faults)

    assert run_case(TRAIN, msgspec.structs.replace(case, plan=plan)).text == ""


ABLATIONS = {
    NAMED["a repeated push is applied once"]: "I2",
    Ablation(
        "an acknowledged push is queued",
        "adam_async/parameter_server/state.py",
        "if not queued.accepted and not queued.unapplied and self.idle:",
        "if True:",
    ): "I1",
    Ablation(
        "a lost replica leaves its groups",
        "adam_async/data_server/state.py",
        "self._epoch.replicas_changed(logs, event.version)",
        "pass",
    ): "the run ends",
}


def test_an_entry_that_a_primary_commits_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    NAMED["an entry is committed once all members in sync hold it"].remove(monkeypatch.setattr)
    cases = [draw_case(TRAIN, seed) for seed in range(12)]
    broken = (run_case(TRAIN, case) for case in cases if "copies" in case.plan.options.settings)

    assert next((result.invariant for result in broken if not result.ok), "") == "committed"


def test_an_older_map_of_another_controller_ends_no_generation() -> None:
    """In this seed the only controller that runs has a map of which two generations are no part yet."""
    assert run_case(TRAIN, draw_case(TRAIN, 58)).invariant == ""


@pytest.mark.parametrize(("ablation", "invariant"), ABLATIONS.items(), ids=[each.name for each in ABLATIONS])
def test_a_run_fails_after_the_removal_of_a_safeguard(
    ablation: Ablation, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation.remove(monkeypatch.setattr)
    broken = (run_case(TRAIN, plain_training(seed)) for seed in range(2, 12))

    assert next((result.invariant for result in broken if not result.ok), "") == invariant


def test_a_model_that_has_not_learnt_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TRAINING", msgspec.structs.replace(training.TRAINING, rate=1e-9))

    assert run_case(TRAIN, plain_training(14)).invariant == "it learns"


@pytest.mark.parametrize("bar", ["LEARNT", "LEARNT_OTHERWISE"])
def test_a_run_without_options_must_reach_the_accuracy_of_plain_runs(
    bar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, bar, 1.01)
    quiet = with_faults(plain_training(14))

    assert run_case(TRAIN, quiet).invariant == ("it learns" if bar == "LEARNT" else "")


def test_a_fault_without_a_target_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_faults, "VICTIM_S", 3.0)
    monkeypatch.setattr(training_faults, "is_running", lambda node: False)
    fault = Fault(at_s=1.0, kind="freeze", targets=("ps-0",), lasts_s=1.0)
    result = run_case(TRAIN, with_faults(plain_training(14), fault))

    assert result.invariant == "faults find their victims"
    assert result.text.endswith("for 3 s ps-0 did not run")
