"""A cluster in the loop of a host program changes nothing else of the program."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import util
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import adam_async
import adam_async.cluster.sync
from adam_async import (
    Config,
    DataError,
    EpochResult,
    LocalCluster,
    ProcessCluster,
    RunFailed,
    make_dataset,
    synthetic,
)
from adam_async.run.counts import ServerCounts
from tests.adam_async.cluster.test_sync import bars
from tests.adam_async.runs import until

SMALL = Config(epochs=2, threads=1, replicas=2, servers=2)


def signal_handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in signal.valid_signals() if number < 32}


def logging_configuration() -> dict[str, Any]:
    names = sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] in PACKAGES)
    ours = {name: logging.getLogger(name) for name in names}
    return {
        "root": (logging.root.level, list(logging.root.handlers), logging.root.disabled),
        "raise": logging.raiseExceptions,
        "handlers": [
            h for logger in ours.values() for h in logger.handlers if type(h) is not logging.NullHandler
        ],
        "levels": {name for name, logger in ours.items() if logger.level != logging.NOTSET},
        "silent": {name for name, logger in ours.items() if not logger.propagate},
    }


def loop_settings() -> tuple[Any, ...]:
    loop = asyncio.get_running_loop()
    return (
        asyncio.get_event_loop_policy(),
        loop,
        loop.get_exception_handler(),
        loop.get_task_factory(),
        loop.get_debug(),
        sys.get_asyncgen_hooks(),
    )


def interpreter_settings() -> tuple[Any, ...]:
    return (
        sys.getswitchinterval(),
        sys.excepthook,
        threading.excepthook,
        np.geterr(),
        np.geterrcall(),
        threading.stack_size(),
    )


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


PACKAGES = ("adam_async", "dataflow", "transport")


@pytest.mark.parametrize(
    "look", [signal_handlers, logging_configuration, loop_settings, interpreter_settings, environment]
)
async def test_a_cluster_leaves_the_host_as_it_was(look: Callable[[], object]) -> None:
    before = look()

    async with LocalCluster(SMALL, dataset=bars()) as cluster:
        during: list[object] = []
        await cluster.train(lambda epoch: during.append(look()))

    assert during == [before, before]
    assert look() == before


async def test_a_cluster_trains_one_run_after_the_other_each_from_the_beginning() -> None:
    config = Config(epochs=2, threads=1, in_flight=1, servers=2)

    async with LocalCluster(config, dataset=bars()) as cluster:
        runs = [await cluster.train() for _ in range(3)]

    for run in runs:
        assert [(epoch.epoch, epoch.images) for epoch in run.epochs] == [(1, 64), (2, 64)]
        servers = [counts for counts in run.statistics.values() if isinstance(counts, ServerCounts)]
        pushes = [version for server in servers for version in server.versions.values()]
        assert set(pushes) == {2 * 64 // config.images_per_group}
        for name, values in runs[0].weights.items():
            np.testing.assert_array_equal(run.weights[name], values)


async def test_a_cancelled_training_leaves_no_task_and_no_thread() -> None:
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    endless = Config(epochs=1_000_000, threads=2)
    trained = asyncio.Event()

    async def host() -> None:
        async with LocalCluster(endless, dataset=bars()) as cluster:
            await cluster.train(lambda epoch: trained.set())

    async with asyncio.TaskGroup() as group:
        task = group.create_task(host(), name="host")
        await trained.wait()
        assert asyncio.all_tasks() > tasks | {task}
        task.cancel()

    assert task.cancelled()
    assert asyncio.all_tasks() == tasks
    assert set(threading.enumerate()) == threads


async def test_an_error_of_the_callback_leaves_the_block_unchanged() -> None:
    def fail(epoch: EpochResult) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with LocalCluster(SMALL, dataset=bars()) as cluster:
            await cluster.train(fail)


async def test_an_error_in_the_block_leaves_it_unchanged() -> None:
    several = ExceptionGroup("of the host", [ZeroDivisionError(), KeyError()])

    with pytest.raises(ExceptionGroup) as caught:
        async with LocalCluster(SMALL, dataset=bars()):
            raise several

    assert caught.value is several


async def test_a_second_training_of_the_same_cluster_at_once_is_refused_and_the_first_goes_on() -> None:
    async with LocalCluster(SMALL, dataset=bars()) as cluster, asyncio.TaskGroup() as group:
        first = group.create_task(cluster.train(), name="first")
        await asyncio.sleep(0)
        with pytest.raises(RunFailed, match="already training"):
            await cluster.train()

    assert [epoch.images for epoch in first.result().epochs] == [64] * 2


async def test_the_callback_may_be_async_and_its_false_ends_the_run() -> None:
    seen: list[int] = []

    async def enough(epoch: EpochResult) -> bool:
        await asyncio.sleep(0)
        seen.append(epoch.epoch)
        return epoch.epoch < 3

    async with LocalCluster(Config(epochs=1000, threads=1), dataset=bars()) as cluster:
        result = await cluster.train(enough)

    assert seen == [epoch.epoch for epoch in result.epochs] == [1, 2, 3]
    assert result.weights


@pytest.mark.parametrize(
    "options", [{}, {"weights": "copy", "replicas": 2}, {"consistency": "bsp", "replicas": 2}]
)
async def test_stop_ends_a_run_within_an_epoch_and_keeps_its_weights(options: dict[str, Any]) -> None:
    data = synthetic(6_000)

    async with LocalCluster(Config(epochs=1000, threads=1, **options), dataset=data) as cluster:
        training = asyncio.create_task(cluster.train(), name="training")
        await until(lambda: cluster.data.state.statistics().images > 0)
        cluster.stop()
        result = await training
        again = asyncio.create_task(cluster.train(lambda epoch: False), name="again")
        whole = await again

    assert [epoch.epoch for epoch in result.epochs] == [1]
    assert 0 < result.epochs[0].images < 6_000
    named = result.model.predict(result.weights, data.test_images)
    assert result.test_accuracy == np.mean(named == data.test_labels)
    assert [epoch.images for epoch in whole.epochs] == [6_000]


async def test_stop_without_a_training_does_nothing() -> None:
    async with LocalCluster(SMALL, dataset=bars()) as cluster:
        cluster.stop()
        assert len((await cluster.train()).epochs) == 2


async def test_a_run_ends_by_patience_and_keeps_the_best_epoch() -> None:
    config = Config(epochs=50, threads=1, validation=16, patience=3, keep_best=True)

    async with LocalCluster(config, dataset=bars()) as cluster:
        result = await cluster.train()

    accuracies = [epoch.validation_accuracy or 0.0 for epoch in result.epochs]
    best = int(np.argmax(accuracies))
    assert len(accuracies) == best + 1 + 3 < 50
    assert result.kept_epoch == best + 1
    assert result.test_accuracy == result.epochs[best].test_accuracy
    named = result.model.predict(result.weights, bars().test_images)
    assert result.test_accuracy == np.mean(named == bars().test_labels)


async def test_a_run_that_has_ended_is_finished_and_one_that_was_cancelled_is_not() -> None:
    async with LocalCluster(SMALL, dataset=bars()) as cluster:
        await cluster.train()
        assert cluster.driver.progress.phase == "finished"
        async with asyncio.TaskGroup() as group:
            task = group.create_task(cluster.train(lambda epoch: task.cancel()), name="train")
        assert (cluster.driver.progress.phase, cluster.controller.map.run.phase) == (
            "interrupted",
            "finished",
        )
        assert len((await cluster.train()).epochs) == 2


async def test_a_cluster_without_a_dataset_loads_the_one_that_its_configuration_names() -> None:
    async with LocalCluster(Config(data="digits", epochs=1, threads=1)) as cluster:
        assert (await cluster.train()).epochs[0].images == 1437


async def test_a_cluster_trains_only_within_its_block() -> None:
    cluster = LocalCluster(SMALL, dataset=bars())
    with pytest.raises(RunFailed, match="train within its block"):
        await cluster.train()
    async with cluster:
        pass
    with pytest.raises(RunFailed, match="train within its block"):
        await cluster.train()
    with pytest.raises(RunFailed, match="train within its block"):
        await ProcessCluster(SMALL).train()


@pytest.mark.parametrize("make", [LocalCluster, ProcessCluster, adam_async.cluster.sync.LocalCluster])
def test_a_dataset_that_is_none_is_refused_by_name(make: Callable[..., Any]) -> None:
    with pytest.raises(
        DataError, match="dataset is a list, expected a Dataset: make one of arrays by make_dataset"
    ):
        make(SMALL, dataset=[[1, 2], [3, 4]])


def test_lists_in_place_of_arrays_are_refused_by_name() -> None:
    part = [[[0, 255]]], [0]
    with pytest.raises(DataError, match="my images is a list, expected a NumPy array"):
        make_dataset(name="l", source="here", train=part, test=part, origins=("my images", "b", "c", "d"))  # type: ignore[arg-type]


OFF_LOOP = """
import asyncio, sys, threading
from adam_async import Config, LocalCluster, synthetic

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            print(name, threading.current_thread().name)

async def main():
    async with LocalCluster(Config(epochs=1, threads=1, weights="copy"), dataset=synthetic(64)) as cluster:
        await cluster.train()

sys.meta_path.insert(0, Watch())
asyncio.run(main())
"""


@pytest.mark.skipif(util.find_spec("numba") is None, reason="there are no compiled kernels to import")
def test_the_first_cluster_imports_compiled_kernels_outside_of_the_loop() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFF_LOOP], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.startswith("numba driver-evaluate"), done.stdout


IMPORT = """
import logging, os, signal, sys, threading
before = dict(os.environ), [signal.getsignal(s) for s in signal.valid_signals()], list(logging.root.handlers)
import adam_async
heavy = sorted({"numpy", "asyncio", "uvloop", "msgpack", "transport", "dataflow"} & set(sys.modules))
adam_async.LocalCluster, adam_async.Config
from adam_async import sync
after = dict(os.environ), [signal.getsignal(s) for s in signal.valid_signals()], list(logging.root.handlers)
print(heavy, before == after, [thread.name for thread in threading.enumerate()])
"""


def test_importing_loads_nothing_heavy_and_sets_nothing_up() -> None:
    # An interpreter of its own: in this one everything is imported already.
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=30
    )

    assert done.stdout.strip() == "[] True ['MainThread']"
    assert done.stderr == ""


def test_every_public_name_is_there() -> None:
    assert set(adam_async.__all__) <= set(dir(adam_async))
    for name in adam_async.__all__:
        value = getattr(adam_async, name)
        if isinstance(value, str):
            continue  # a constant, which knows no module
        home = value.__name__ if isinstance(value, ModuleType) else value.__module__
        assert name == "Metrics" or home.startswith("adam_async"), name  # an alias of a mapping
    with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
        adam_async.Unknown


def test_the_package_has_its_version() -> None:
    assert adam_async.__version__ == version("adam-async")
