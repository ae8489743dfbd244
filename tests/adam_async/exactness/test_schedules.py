"""The rate that a push carries, or a step in place uses, is a function of the group alone."""

import math
from contextlib import contextmanager

import pytest

from adam_async.driver.replay.decode import load_record, make_recording
from adam_async.parameter_server.at_once import ShortWay
from adam_async.parameter_server.events import PushArrived
from adam_async.parameter_server.state import ServerState
from adam_async.run.config import Config
from tests.adam_async.checkpoint.test_resume import stopped_from
from tests.adam_async.exactness.serial import RULES, assert_close, lockstep_sgd
from tests.adam_async.runs import SHARDED, tiny_dataset, train

pytestmark = pytest.mark.thorough

PEAK, EPOCHS, GROUPS = 0.05, 2, 15


def halved(progress):
    """Schedule ``step`` by 0.5 every 0.4 epochs."""
    return PEAK * 0.5 ** int(progress / 0.4)


def risen_and_fallen(progress):
    """Schedule ``cosine`` behind a warm-up of half an epoch."""
    if progress < 0.5:
        return PEAK * max(progress / 0.5, 0.001)
    return PEAK * (1 + math.cos(math.pi * (progress - 0.5) / 1.5)) / 2


def risen(progress):
    """A constant rate behind a warm-up of one and a half epochs."""
    return PEAK * min(max(progress / 1.5, 0.001), 1.0)


SCHEDULES = {
    "constant": (risen, {"schedule": "constant", "warm_up": 1.5}),
    "step": (halved, {"schedule": "step", "decay": 0.5, "decay_every": 0.4}),
    "cosine": (risen_and_fallen, {"schedule": "cosine", "warm_up": 0.5}),
}
MODES = {
    "asp": {"weights": "copy", "in_flight": 1},
    "asp-steps-of-2": {"weights": "copy", "in_flight": 1, "push_every": 2},
    "in-place": {"weights": "aliased", "in_flight": 1},
    "ssp": {"consistency": "ssp:0"},
    "ssp-2": {"consistency": "ssp:2", "in_flight": 1},
    "bsp": {"consistency": "bsp"},
    "bsp-3-replicas": {"consistency": "bsp", "replicas": 3, "push_every": 2},
}


def config_of(schedule, **options):
    return Config(
        **{
            **RULES["momentum"],
            **SCHEDULES[schedule][1],
            "rate": PEAK,
            "epochs": EPOCHS,
            "images_per_group": 4,
            "threads": 1,
            **options,
        }
    )


@contextmanager
def rates_carried():
    """Note the rates of the pushes of each step, by replica and clock, as they come to the servers."""
    carried = {}
    handle, take = ServerState.handle, ShortWay.take

    def note(push):
        carried.setdefault((push.replica, push.clock), set()).add(push.rate)

    def noted(state, event):
        if isinstance(event, PushArrived):
            note(event.push)
        return handle(state, event)

    def taken(short, request, push, **options):
        note(push)
        return take(short, request, push, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ServerState, "handle", noted)
        patched.setattr(ShortWay, "take", taken)
        yield carried


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_training_equals_serial_sgd_at_the_rates_of_the_schedule(schedule, mode):
    # A step of two groups has the sum of their means: twice the mean of its images, if both are whole.
    dataset = tiny_dataset(train=64 if mode == "asp-steps-of-2" else 59)
    factor = 2 if mode == "asp-steps-of-2" else 1
    config = config_of(schedule, dtype="float64", **MODES[mode], **SHARDED)
    result = await train(config, dataset=dataset)
    rate_of = SCHEDULES[schedule][0]
    expected, _ = lockstep_sgd(config, dataset, rate_at=lambda progress: factor * rate_of(progress))
    assert_close(result.weights, expected, 1e-9)


@pytest.mark.parametrize("mode", ["asp", "ssp:1"])
@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_each_replica_goes_through_the_schedule_over_its_own_share(schedule, mode):
    config = config_of(schedule, consistency=mode, replicas=2, push_every=2, record=True, weights="copy")
    with rates_carried() as carried:
        result = await train(config)
    header, logs = load_record(result.record, origin="the run")
    recording = make_recording(header, logs, result.model)
    expected = {}
    for replica, reads in recording.reads.items():
        for clock, epoch, number in zip(reads.clocks, reads.epochs, reads.numbers, strict=True):
            # In ranges replica 0 has the first 7 of the 15 groups; in turns all go along side by side.
            first, size = ((0, 7), (7, 8))[replica] if mode == "asp" else (0, GROUPS)
            rate = SCHEDULES[schedule][0](epoch - 1 + (number - first) / size)
            expected.setdefault((replica, int(clock)), rate)
    assert carried.keys() == expected.keys()
    for push, rates in carried.items():
        assert sorted(rates) == [pytest.approx(expected[push], rel=1e-12)]


RESUMED = {
    "asp": {"weights": "copy", "in_flight": 1},
    "in-place": {"weights": "aliased", "in_flight": 1},
    "ssp": {"consistency": "ssp:1", "replicas": 2},
    "bsp": {"consistency": "bsp", "replicas": 2},
}


@pytest.mark.parametrize("mode", RESUMED)
@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_resumed_run_goes_on_along_the_schedule(schedule, mode, tmp_path):
    every = 4 if mode == "bsp" else 0  # in the other modes only the end of an epoch is exact
    config = config_of(schedule, dtype="float64", checkpoint_every=every, **RESUMED[mode])
    found = await stopped_from(config, tmp_path, (1, 4))
    epoch = found.manifest.resume.epoch
    ranges = found.states[0].groups.get(epoch, ())  # all shards have the same groups
    trained = {n for first, stop in zip(ranges[::2], ranges[1::2], strict=True) for n in range(first, stop)}
    left = [epoch - 1 + number / GROUPS for number in range(GROUPS) if number not in trained]
    left += [later + number / GROUPS for later in range(epoch, EPOCHS) for number in range(GROUPS)]
    with rates_carried() as carried:
        result = await train(config, resume=tmp_path)
    expected, _ = lockstep_sgd(config, tiny_dataset(), rate_at=SCHEDULES[schedule][0])
    if mode != "ssp":
        assert_close(result.weights, expected, 1e-9)
    if mode in ("asp", "ssp"):
        rates = sorted(rate for each in carried.values() for rate in each)
        assert rates == pytest.approx(sorted(map(SCHEDULES[schedule][0], left)), rel=1e-12)
