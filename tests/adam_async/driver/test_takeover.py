"""Runs that lose their driver: they go on, wait, and another driver takes them over."""

import asyncio
import random
import re
import shlex
from contextlib import AsyncExitStack, suppress

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint.checkpoint import CheckpointError, check_kept_step
from adam_async.checkpoint.files import CheckpointFolder, load_checkpoint
from adam_async.driver.driver import Driver
from adam_async.driver.settings import DriverSettings, RunInputs
from adam_async.driver.takeover import (
    Attach,
    SavedRun,
    at_first_gap,
    check_none_waits,
    check_options,
    next_epoch,
    run_in,
    run_to_take,
    take_over,
    update_program,
)
from adam_async.errors import ConfigError, RunFailed, first_cause
from adam_async.messages import ShardState
from adam_async.model.named import digits, mlp
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config
from adam_async.run.counts import EpochCounts, Evaluation
from adam_async.run.run_record import RunRecord
from adam_async.run.train_step import StepSpec
from adam_async.run.training_program import ResumeRecord, TrainingProgram
from adam_async.runtime.disk import Disk
from tests.adam_async.cluster_maps import node, run_record
from tests.adam_async.runs import IMPATIENT, NETWORKS, cluster_of, tiny_dataset, train, until
from tests.transport.testing import FaultyNetwork
from transport import DialFailed, Identity

WAITS = msgspec.structs.replace(IMPATIENT, answer_s=20.0, drain_s=0.2)


def config_of(**options):
    return Config(
        **{"epochs": 4, "threads": 1, "images_per_group": 10, "rate": 0.05, "waits": WAITS, **options}
    )


class Cable(FaultyNetwork):
    """A network from which one driver is cut off, and connected again."""

    def __init__(self, inner):
        super().__init__(inner, random.Random(1))
        self.whole = asyncio.Event()
        self.whole.set()

    async def dial(self, address, identity, *, timeout_s=1.0, **options):
        try:
            async with asyncio.timeout(timeout_s):
                await self.whole.wait()
        except TimeoutError:
            raise DialFailed(address, 1, "the cable is cut") from None
        return await super().dial(address, identity, timeout_s=timeout_s, **options)

    def cut(self):
        self.whole.clear()
        self.cut_all()


def driver_of(cluster, number, *, network=None, config=None, **inputs):
    controller = ",".join(each.address for each in cluster.controllers)
    settings = DriverSettings(
        network=network or cluster.network,
        controller=controller,
        identity=Identity(role="driver", node=f"driver-{number}", incarnation=number),
        threads=1,
    )
    spec = digits() if not inputs.get("attach") else None
    return Driver(config or cluster.config, settings, RunInputs(**{"spec": spec, **inputs}))


def map_of(cluster):
    """The newest map of the controllers."""
    return max((each.map for each in cluster.controllers), key=lambda each: each.version)


def in_epoch(cluster, number):
    """Whether the run trains in an epoch."""
    epoch = map_of(cluster).epoch
    return epoch is not None and epoch.number == number and not epoch.ended


def waits(cluster, phase="between"):
    """Whether the run waits for a driver, after an epoch."""
    now = map_of(cluster)
    return now.run.phase == phase and not now.driven


async def lose_driver(
    cluster, *, at=lambda cluster: in_epoch(cluster, 2), phase="between", on_epoch=None, **options
):
    """Train with a driver that disappears without a word, and wait until the run waits for another one."""
    cable = Cable(cluster.network)
    async with driver_of(cluster, 1, network=cable, **options) as driver:
        training = asyncio.create_task(driver.train(on_epoch))
        await until(lambda: at(cluster) or training.done())
        cable.cut()
        training.cancel()
        with suppress(asyncio.CancelledError):
            await training
    await until(lambda: waits(cluster, phase))


async def attach(cluster, *, number=2, run="", given=(), on_epoch=None, config=None, **inputs):
    """Train with another driver, which takes the run over; returns its result."""
    wish = Attach(run=run, given=frozenset(given))
    async with driver_of(cluster, number, config=config, attach=wish, **inputs) as driver:
        return await driver.train(on_epoch)


async def refused(cluster, kind, match, **options):
    """Take the run over in vain, with an error of a kind and a text."""
    with pytest.raises(ExceptionGroup) as failure:
        await attach(cluster, **options)
    error = first_cause(failure.value)
    assert isinstance(error, kind)
    assert re.search(match, str(error))


MODES = {
    "asp": {},
    "ssp": {"consistency": "ssp:1", "replicas": 2},
    "bsp": {"consistency": "bsp", "replicas": 2},
    "patience": {"validation": 10, "patience": 4, "keep_best": True},
    "three-controllers": {"consistency": "bsp", "controllers": 3, "servers": 2, "shard_bytes": 4096},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_run_whose_driver_is_lost_waits_and_another_driver_ends_it(network, mode):
    config, called = config_of(**MODES[mode]), []
    undisturbed = await train(config, NETWORKS[network]()) if config.synchronous else None
    async with cluster_of(config, NETWORKS[network]()) as cluster:
        await lose_driver(cluster)
        before = map_of(cluster)
        assert (before.run.epoch, before.run.driver, before.ended) == (2, "driver-1", 2)
        result = await attach(cluster, on_epoch=lambda epoch: called.append(epoch.epoch))
        after = map_of(cluster)
    assert (after.run.id, after.run.driver, after.run.phase) == (before.run.id, "driver-2", "finished")
    assert [epoch.epoch for epoch in result.epochs] == [1, 2, 3, 4]
    assert [epoch.images for epoch in result.epochs] == [60 - config.validation] * 4
    assert called == [2, 3, 4]
    events = [event["event"] for event in result.events]
    assert f"took over run {before.run.id} from driver-1, which was lost" in events
    assert "epoch 2 ended without a driver: evaluated with the present weights" in events
    if undisturbed is not None:
        assert [epoch.test_accuracy for epoch in result.epochs] == [
            epoch.test_accuracy for epoch in undisturbed.epochs
        ]
        for name, values in undisturbed.weights.items():
            assert np.array_equal(values, result.weights[name]), name


async def test_with_concurrent_evaluation_a_run_trains_all_epochs_without_its_driver():
    async with cluster_of(config_of(evaluation="concurrent")) as cluster:
        await lose_driver(cluster)
        assert map_of(cluster).ended == 4
        result = await attach(cluster)
    assert [epoch.epoch for epoch in result.epochs] == [1, 2, 3, 4]
    assert [epoch.images for epoch in result.epochs] == [60] * 4


async def test_a_driver_that_returns_before_another_one_drives_on():
    async with cluster_of(config_of()) as cluster:
        cable = Cable(cluster.network)
        async with driver_of(cluster, 1, network=cable) as driver:
            training = asyncio.create_task(driver.train())
            await until(lambda: in_epoch(cluster, 2))
            cable.cut()
            await until(lambda: waits(cluster))
            cable.whole.set()
            result = await training
    assert [epoch.epoch for epoch in result.epochs] == [1, 2, 3, 4]


async def test_a_replaced_driver_that_returns_ends_with_the_name_of_its_successor_and_changes_nothing():
    async with cluster_of(config_of()) as cluster:
        cable = Cable(cluster.network)
        async with AsyncExitStack() as stack:
            driver = await stack.enter_async_context(driver_of(cluster, 1, network=cable))
            training = asyncio.create_task(driver.train())
            await until(lambda: in_epoch(cluster, 2))
            cable.cut()
            await until(lambda: waits(cluster))

            async def return_in(epoch):
                if epoch.epoch == 3:
                    cable.whole.set()
                    with pytest.raises(ExceptionGroup) as failure:
                        await training
                    error = first_cause(failure.value)
                    assert isinstance(error, RunFailed)
                    assert "was taken over by another driver, driver-2, after the loss of this" in str(error)
                    await update_program(
                        driver._membership, lambda record: msgspec.structs.replace(record, phase="failed")
                    )
                    with pytest.raises(RunFailed, match="was taken over by another driver, driver-2"):
                        await take_over(driver._membership, map_of(cluster).run.id)

            result = await attach(cluster, on_epoch=return_in)
        assert map_of(cluster).run.phase == "finished"
    assert [epoch.epoch for epoch in result.epochs] == [1, 2, 3, 4]


async def test_a_new_run_begins_in_the_place_of_one_that_waits_only_on_request():
    async with cluster_of(config_of(epochs=3)) as cluster:
        await lose_driver(cluster)
        async with driver_of(cluster, 2) as driver:
            with pytest.raises(
                RunFailed, match="waits for a driver, because driver-1 was lost: --attach takes"
            ):
                await driver.train()
        assert waits(cluster)
        async with driver_of(cluster, 3, replace=True) as driver:
            result = await driver.train()
    assert [epoch.epoch for epoch in result.epochs] == [1, 2, 3]


async def test_without_a_run_that_waits_a_new_one_begins_and_a_named_one_is_an_error():
    async with cluster_of(config_of(epochs=1)) as cluster:
        await refused(cluster, RunFailed, "the cluster has no run 'r': it has had no run", number=3, run="r")
        async with driver_of(cluster, 4, attach=Attach(), spec=digits()) as driver:
            assert len((await driver.train()).epochs) == 1
        run = map_of(cluster).run.id
        await refused(
            cluster, RunFailed, f"run {run} is over, it has finished: it takes no driver", number=5, run=run
        )


async def test_options_and_models_that_are_not_those_of_the_run_are_refused_and_the_run_waits_on():
    async with cluster_of(config_of()) as cluster:
        await lose_driver(cluster)
        other = config_of(epochs=9, seed=3)
        differ = (
            r"^run driver-\S+ keeps its options, but these differ: epochs=9 \(there 4\), seed=3 \(there 0\); "
        )
        given = ("epochs", "seed", "rate")
        await refused(cluster, ConfigError, differ, number=3, given=given, config=other)
        await refused(
            cluster,
            ConfigError,
            "whose layers are not those of 'mlp'",
            number=4,
            spec=mlp((64, 10), input_shape=(1, 8, 8)),
        )
        assert waits(cluster)
        result = await attach(cluster, number=5, given=("epochs", "rate"))
    assert len(result.epochs) == 4


async def test_a_driver_that_takes_a_run_over_writes_its_checkpoints_on(tmp_path):
    config = config_of(checkpoint_every=2, consistency="bsp", lag=0)
    undisturbed = await train(config)
    async with Disk() as disk, cluster_of(config) as cluster:
        first = CheckpointFolder(tmp_path, disk)
        await lose_driver(cluster, checkpoints=first)
        second = CheckpointFolder(tmp_path, disk)
        result = await attach(cluster, checkpoints=second)
        last = await load_checkpoint(tmp_path, disk)
    assert last.manifest.run == map_of(cluster).run.id
    assert [epoch.epoch for epoch in last.manifest.epochs] == [1, 2, 3, 4]
    assert len(last.manifest.resume.results) == 4
    assert last.manifest.config["rate"] == config.rate
    for name, values in undisturbed.weights.items():
        assert np.array_equal(values, last.weights[name]), name
        assert np.array_equal(values, result.weights[name]), name


async def test_a_driver_lost_after_the_checkpoint_of_an_epoch_leaves_the_next_epoch_to_its_successor(
    tmp_path,
):
    """The folder has the evaluation of the epoch, and the map has not."""
    latest = tmp_path / "latest"

    async def stay(epoch):
        if epoch.epoch == 2:
            await asyncio.Event().wait()

    async with Disk() as disk, cluster_of(config_of()) as cluster:
        first = CheckpointFolder(tmp_path, disk)
        await lose_driver(
            cluster,
            at=lambda _: latest.exists() and latest.read_text().startswith("checkpoint-0002"),
            on_epoch=stay,
            checkpoints=first,
        )
        result = await attach(cluster, checkpoints=CheckpointFolder(tmp_path, disk))
    assert [epoch.epoch for epoch in result.epochs] == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["asp", "bsp"])
async def test_a_driver_lost_while_it_stops_a_run_leaves_the_stop_to_the_next_one(mode, tmp_path):
    config, data = config_of(images_per_group=1, epoch_fraction=1.0, **MODES[mode]), tiny_dataset(1000)
    async with Disk() as disk, cluster_of(config, dataset=data) as cluster:
        first = CheckpointFolder(tmp_path, disk)
        server, asked = cluster.data_servers[0], []

        def drained(cluster):
            if in_epoch(cluster, 1) and server.state.statistics().finished and not asked:
                change = server._membership.update("epoch", lambda newest: replace_epoch(newest, drain=True))
                asked.append(asyncio.create_task(change))
            return server.state.statistics().drained

        await lose_driver(cluster, at=drained, phase="training", checkpoints=first)
        await asked[0]
        second = CheckpointFolder(tmp_path, disk)
        result = await attach(cluster, checkpoints=second)
        last = await load_checkpoint(tmp_path, disk)
    assert [epoch.epoch for epoch in result.epochs] == [1]
    assert last.manifest.epoch == 1
    assert 0 < last.manifest.groups == result.epochs[0].images < 1000


def replace_epoch(cluster, **fields):
    return msgspec.structs.replace(cluster.epoch, **fields)


async def test_checkpoints_of_another_run_are_refused_before_the_takeover(tmp_path):
    async with Disk() as disk:
        folder = CheckpointFolder(tmp_path, disk)
        await train(config_of(epochs=1), checkpoint=tmp_path)
        async with cluster_of(config_of()) as cluster:
            await lose_driver(cluster)
            await refused(cluster, ConfigError, "has checkpoints of another run", checkpoints=folder)
            assert waits(cluster)


# --- the parts ---------------------------------------------------------------------------------


def waiting(**fields):
    """The map of a run that waits for a driver, or with `live` has one."""
    live = fields.pop("live", False)
    run = msgspec.structs.replace(run_record(phase="between", epoch=1), **fields)
    return ClusterMap(nodes={"driver": node("driver", live=live)}, run=run, ended=1)


@pytest.mark.parametrize(
    ("cluster", "wish", "error"),
    [
        (ClusterMap(), "r", "the cluster has no run 'r': it has had no run"),
        (waiting(), "r", "the cluster has no run 'r': its run is run-1, which is training"),
        (waiting(phase="failed"), "run-1", "run run-1 is over, it has failed: it takes no driver"),
        (waiting(live=True), "run-1", "run run-1 has a live driver, driver: end that one first"),
        (waiting(live=True), "", "run run-1 has a live driver, driver: end that one first"),
    ],
)
def test_a_run_that_cannot_be_taken_over_is_named(cluster, wish, error):
    with pytest.raises(RunFailed) as failure:
        run_to_take(cluster, Attach(run=wish))
    assert str(failure.value) == error


def test_the_run_that_waits_is_taken_and_no_other_one():
    assert run_to_take(waiting(), Attach()) == run_to_take(waiting(), Attach(run="run-1")) == waiting().run
    assert run_to_take(ClusterMap(), Attach()) is None
    assert run_to_take(waiting(phase="finished"), Attach()) is None
    # A driver that has joined again under its name is another incarnation.
    joined = waiting(live=True)
    again = msgspec.structs.replace(joined, nodes={"driver": node("driver", incarnation=2)})
    assert run_to_take(again, Attach()) == joined.run
    for cluster in (ClusterMap(), joined, waiting(phase="failed")):
        check_none_waits(cluster)


def test_the_words_for_a_step_of_a_run_are_safe_in_a_shell():
    there = StepSpec(name="a;b", args={"c": "'; d"}, shape=(1, 1, 1), classes=2).to_dict()
    with pytest.raises(ConfigError) as caught:
        check_kept_step(there, None, "run run-1")
    words = shlex.split(str(caught.value).partition("give ")[2])
    assert words == ["--step", "a;b", "--step-args", '{"c": "\'; d"}']


def test_options_that_the_run_decides_and_those_of_roles_may_differ():
    asked = Config(threads=3, data="x")
    config = Config(rate=0.5, epochs=7, schedule="cosine", warm_up=0.3, protocol="delta")
    given = ("rate", "epochs", "schedule", "warm_up", "protocol", "threads", "data", "waits", "model")
    check_options(given, asked, config, "r")
    check_options((), Config(seed=9), config, "r")
    with pytest.raises(
        ConfigError, match=r"run r keeps its options, but these differ: rate=0\.25 \(there 0\.5\)"
    ):
        check_options(("rate",), Config(rate=0.25), config, "r")


def results(first, last):
    return tuple(EpochCounts(images=number) for number in range(first, last + 1))


def test_a_run_of_the_map_has_the_results_of_its_program_before_those_of_the_map():
    plain, evaluated = run_record(epochs=20), (Evaluation(3, 0.5), Evaluation(8, 0.5), Evaluation(11, 0.5))
    plain = msgspec.structs.replace(plain, evaluated=evaluated)
    found = run_in(ClusterMap(ended=9, results=results(8, 9)), plain)
    assert (found.record.first, found.record.results) == (8, results(8, 9))
    assert found.record.evaluated == evaluated[:2]
    assert found.manifest.title == "run run-1"
    resumed = ResumeRecord(epoch=8, clock=0, results=results(6, 7))
    found = run_in(ClusterMap(ended=9, results=results(8, 9)), run_record(epochs=20, resumed=resumed))
    assert (found.record.first, found.record.results) == (6, results(6, 9))


@pytest.mark.parametrize(
    ("ended", "first", "start", "evaluated", "expected"),
    [
        (0, 1, 1, (), 1),
        (9, 1, 1, (), 1),
        (9, 1, 1, (8,), 9),
        (9, 1, 1, (9,), 10),
        (90, 59, 1, (3,), 59),
        (7, 6, 8, (), 8),
    ],
)
def test_a_driver_evaluates_from_the_first_epoch_on_that_no_driver_has(
    ended, first, start, evaluated, expected
):
    evaluations = tuple(Evaluation(epoch, 0.5) for epoch in evaluated)
    record = RunRecord(
        program=run_record(), ended=ended, results=results(first, ended), evaluated=evaluations
    )
    assert next_epoch(record, start) == expected


def skipping(*skipped):
    return tuple(EpochCounts(skipped_groups=ranges) for ranges in skipped)


@pytest.mark.parametrize(
    ("ended", "resumed", "has", "first", "skipped"),
    [
        (3, None, {1: (0, 20), 2: (0, 15), 3: (0, 20)}, 4, ()),
        (3, None, {1: (0, 20), 2: (0, 14), 3: (0, 9)}, 2, (((15, 20),), ())),
        (3, None, {1: (0, 19)}, 1, ((), ((15, 20),), ())),
        # A run before has ended epochs 2 and 3, and this one only epoch 2.
        (2, (((15, 20),), ((8, 20),)), {1: (0, 20), 2: (0, 15), 3: (0, 9)}, 3, (((8, 20),),)),
        (2, (((15, 20),), ((8, 20),)), {1: (0, 20), 2: (0, 9)}, 2, (((15, 20),), ((8, 20),))),
    ],
)
def test_epochs_that_have_ended_keep_their_skipped_groups(ended, resumed, has, first, skipped):
    start = ResumeRecord(epoch=2, clock=0, results=skipping(()), skipped=resumed) if resumed else None
    run = saved_run(
        ended,
        data={"train_images": 200},
        resumed=start,
        results=skipping((), ((15, 20),), ())[start is not None : ended],
        evaluated=tuple(Evaluation(number, 0.5) for number in range(1, ended + 1)),
    )
    states = [ShardState(0, 1, {}, has)]
    found = at_first_gap(run, states, {0}, 20)
    resume = found.resume
    assert found.title == "run run-1"
    assert (resume.epoch, resume.skipped) == (first, skipped)
    assert resume.skipped_from(first + 1) == skipped[1:]


def saved_run(ended=0, *, data, resumed=None, **fields):
    """A run on disks, with 10 images in a group."""
    config = Config(images_per_group=10, epochs=20)
    program = TrainingProgram(config=config, spec=digits().to_dict(), resumed=resumed, data=data)
    record = program.record("run-1", ("driver", 1))
    return SavedRun.of(RunRecord(program=record, ended=ended, **fields))


@pytest.mark.parametrize("data", [{}, {"train_images": "60"}, {"train_images": None}])
def test_a_record_on_disks_without_the_number_of_its_images_is_refused(data):
    with pytest.raises(CheckpointError, match="lacks the number of its images"):
        at_first_gap(saved_run(data=data), (), (), 1)
