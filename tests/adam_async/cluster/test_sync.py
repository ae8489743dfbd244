"""The synchronous face: whole trainings from a thread that has no loop, or has one that runs."""

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NoReturn, Self

import numpy as np
import pytest

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.cluster import local as cluster_module
from adam_async.cluster import sync
from adam_async.cluster.processes import ProcessCluster
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.driver import training_run
from adam_async.errors import ConfigError, DataError, DeadlineExceeded, RunFailed
from adam_async.run.config import Config, Waits
from adam_async.run.result import EpochResult, OnEpoch
from adam_async.runtime import loop_thread

SMALL = Config(epochs=2, threads=1)


@cache
def bars() -> Dataset:
    """64 images of one bright row out of four, and 16 to test with."""
    labels = np.arange(80) % 4
    images = np.zeros((80, 4, 4), np.uint8)
    images[np.arange(80), labels] = 255
    return make_dataset(
        name="bars",
        source="made here",
        train=(images[:64], labels[:64]),
        test=(images[64:], labels[64:]),
        origins=("images", "labels", "test images", "test labels"),
    )


def test_a_script_trains_without_knowing_of_loops() -> None:
    seen: list[EpochResult] = []

    with sync.LocalCluster(SMALL, dataset=bars()) as cluster:
        result = cluster.train(seen.append)

    assert [epoch.images for epoch in seen] == [64, 64]
    assert result.epochs == tuple(seen)
    assert result.test_accuracy > 0.25


async def test_a_script_resumes_a_run_and_reads_its_weights_where_a_loop_runs(tmp_path: Path) -> None:
    with sync.LocalCluster(SMALL, dataset=bars(), checkpoint=tmp_path) as cluster:
        first = cluster.train()
    with sync.LocalCluster(Config(epochs=3, threads=1), dataset=bars(), resume=tmp_path) as cluster:
        result = cluster.train()

    assert result.epochs[:2] == first.epochs
    assert [epoch.epoch for epoch in result.epochs] == [1, 2, 3]
    found = sync.load_checkpoint(tmp_path)
    assert found.manifest.epoch == 3
    for name, values in result.weights.items():
        np.testing.assert_array_equal(found.weights[name], values)


def test_a_failed_resume_is_raised_on_entering(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="train --checkpoint writes them"),
        sync.LocalCluster(SMALL, dataset=bars(), resume=tmp_path),
    ):
        raise AssertionError("entered")
    with pytest.raises(CheckpointError, match="No such file"):
        sync.load_checkpoint(tmp_path / "absent")


def test_it_runs_on_the_stock_loop_too() -> None:
    with sync.LocalCluster(SMALL, dataset=bars(), loop_factory=asyncio.new_event_loop) as cluster:
        assert len(cluster.train().epochs) == 2


def test_two_clusters_train_side_by_side() -> None:
    with sync.LocalCluster(SMALL, dataset=bars()) as one, sync.LocalCluster(SMALL, dataset=bars()) as other:
        assert len(one.train().epochs) == len(other.train().epochs) == 2


def test_the_callback_runs_in_the_callers_thread() -> None:
    threads: set[str] = set()

    with sync.LocalCluster(SMALL, dataset=bars()) as cluster:
        cluster.train(lambda epoch: threads.add(threading.current_thread().name))

    assert threads == {threading.current_thread().name}


def test_the_next_epoch_waits_for_the_callbacks_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool] = []
    ask = training_run._ask

    async def noted(on_epoch: OnEpoch | None, result: EpochResult) -> bool:
        answers.append(await ask(on_epoch, result))
        return answers[-1]

    monkeypatch.setattr(training_run, "_ask", noted)
    seen: list[int] = []

    def until_two(epoch: EpochResult) -> bool:
        seen.append(epoch.epoch)
        return epoch.epoch < 2

    with sync.LocalCluster(Config(epochs=1_000_000, threads=1), dataset=bars()) as cluster:
        result = cluster.train(until_two)

    assert answers == [True, False]
    assert seen == [1, 2]
    assert [(epoch.epoch, epoch.images) for epoch in result.epochs] == [(1, 64), (2, 64)]


def test_an_async_callback_is_awaited_on_the_clusters_loop() -> None:
    threads: set[str] = set()

    async def until_two(epoch: EpochResult) -> bool:
        await asyncio.sleep(0)
        threads.add(threading.current_thread().name)
        return epoch.epoch < 2

    with sync.LocalCluster(Config(epochs=3, threads=1), dataset=bars()) as cluster:
        result = cluster.train(until_two)

    assert threads == {"adam-cluster"}
    assert len(result.epochs) == 2


def test_an_error_of_an_async_callback_is_raised_as_it_is() -> None:
    async def fail(epoch: EpochResult) -> None:
        raise ZeroDivisionError

    with sync.LocalCluster(SMALL, dataset=bars()) as cluster:
        with pytest.raises(ZeroDivisionError):
            cluster.train(fail)
        assert len(cluster.train().epochs) == 2


def test_a_callback_that_is_cancelled_ends_the_run() -> None:
    async def cancelled(epoch: EpochResult) -> None:
        raise asyncio.CancelledError

    with sync.LocalCluster(SMALL, dataset=bars()) as cluster:
        with pytest.raises(RunFailed, match="on_epoch was cancelled"):
            cluster.train(cancelled)
        assert len(cluster.train().epochs) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_between_epochs_ends_training_and_passes_on(error: type[BaseException]) -> None:
    def fail(epoch: EpochResult) -> None:
        raise error

    endless = Config(epochs=1_000_000, threads=1)

    with sync.LocalCluster(endless, dataset=bars()) as cluster, pytest.raises(error):
        cluster.train(fail)

    assert "adam-cluster" not in {thread.name for thread in threading.enumerate()}


def test_after_an_interrupted_training_another_may_begin() -> None:
    def interrupt(epoch: EpochResult) -> None:
        raise KeyboardInterrupt

    with sync.LocalCluster(SMALL, dataset=bars()) as cluster:
        with pytest.raises(KeyboardInterrupt):
            cluster.train(interrupt)
        result = cluster.train()

    assert [(epoch.epoch, epoch.images) for epoch in result.epochs] == [(1, 64), (2, 64)]


def test_leaving_the_block_by_an_error_closes_the_cluster() -> None:
    with pytest.raises(ZeroDivisionError), sync.LocalCluster(SMALL, dataset=bars()) as cluster:
        raise ZeroDivisionError

    with pytest.raises(RunFailed, match="the cluster was closed"):
        cluster.train()


def test_a_cluster_that_ends_slowly_is_a_note_of_the_error_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def hold() -> None:
        """Keep the cluster's loop from its end."""
        assert may_end.wait(30)

    with pytest.raises(ZeroDivisionError) as caught, sync.LocalCluster(SMALL, dataset=bars()) as cluster:
        monkeypatch.setattr(loop_thread, "CLOSE_S", 0.0)
        assert cluster._thread is not None
        cluster._thread.call(hold)
        raise ZeroDivisionError
    may_end.set()
    monkeypatch.undo()
    cluster._thread.end()

    assert caught.value.__notes__ == ["waited 0 s for thread adam-cluster to end"]


def test_a_stop_during_the_start_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting(cluster_module.LocalCluster):
        async def __aenter__(self) -> Self:
            cluster.stop()
            await asyncio.sleep(0)
            return await super().__aenter__()

    monkeypatch.setattr(sync.local, "LocalCluster", Starting)
    cluster = sync.LocalCluster(SMALL, dataset=bars())
    with cluster:
        assert len(cluster.train().epochs) == 2


def test_a_training_that_begins_as_the_cluster_ends_has_the_reason_of_the_end() -> None:
    asked = threading.Event()

    class Ended:
        def create_task(self, work: object, *, name: str) -> NoReturn:
            asked.set()
            raise RuntimeError("TaskGroup is finished")

    with sync.LocalCluster(SMALL, dataset=bars()) as cluster, ThreadPoolExecutor(1) as other:
        cluster._group = Ended()  # type: ignore[assignment]
        training = other.submit(cluster.train)
        assert asked.wait(30)
        cluster._close(None)
        with pytest.raises(RunFailed, match="the cluster was closed"):
            training.result(30)


def test_a_cluster_is_entered_once() -> None:
    cluster = sync.LocalCluster(SMALL, dataset=bars())
    with cluster, pytest.raises(RunFailed, match="entered once: make another LocalCluster"):
        cluster.__enter__()


def test_training_before_the_block_is_an_error() -> None:
    with pytest.raises(RunFailed, match="it was not entered"):
        sync.LocalCluster(SMALL, dataset=bars()).train()


def test_an_error_of_the_start_is_raised_unchanged() -> None:
    with pytest.raises(DataError, match="does not exist"), sync.LocalCluster(Config(data="/no/such/folder")):
        pass
    with (
        pytest.raises(ConfigError, match="threads=100000"),
        sync.LocalCluster(Config(threads=100_000), dataset=bars()),
    ):
        pass


def test_a_start_that_takes_too_long_is_named_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting(cluster_module.LocalCluster):
        async def __aenter__(self) -> Self:
            await asyncio.Event().wait()
            return self

    monkeypatch.setattr(sync.local, "LocalCluster", Starting)
    with (
        pytest.raises(DeadlineExceeded, match="for the cluster to start"),
        sync.LocalCluster(Config(threads=1, waits=Waits(prepare_s=0.01)), dataset=bars()),
    ):
        pass

    assert "adam-cluster" not in {thread.name for thread in threading.enumerate()}


INTERRUPTED = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
from adam_async import Config, sync
try:
    with sync.LocalCluster(Config(data="digits", epochs=1_000_000, threads=1)) as cluster:
        cluster.train(lambda epoch: print("epoch", flush=True))
except KeyboardInterrupt:
    print("interrupted", [thread.name for thread in threading.enumerate()])
"""


@pytest.mark.processes
def test_ctrl_c_ends_a_training_in_good_order() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "epoch\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)

    assert output.splitlines()[-1] == "interrupted ['MainThread']"
    assert errors == ""
    assert process.returncode == 0


def test_the_path_of_a_model_is_refused_with_how_to_load_it() -> None:
    for kind in (sync.LocalCluster, cluster_module.LocalCluster, ProcessCluster):
        with pytest.raises(ConfigError, match=r"init is a str, expected a model: .*Model\.load\('out'\)"):
            kind(SMALL, dataset=bars(), init="out")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"init is a dict, expected a model: .*Model\.load\(path\)"):
            kind(SMALL, dataset=bars(), init={})  # type: ignore[arg-type]
