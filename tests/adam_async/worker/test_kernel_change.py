"""A worker begins with NumPy's kernels where none are compiled, and goes on with those that a child made."""

import asyncio
import logging
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="compiled kernels need numba")

from adam_async import Config, LocalCluster
from adam_async.model import Network, named_model
from adam_async.model.fast import program
from adam_async.model.fast.memory import NotOnDiskError
from adam_async.run.counts import KernelCounts, WorkerCounts
from adam_async.runtime.kernel_cache import KernelCache
from adam_async.worker import kernel_change
from adam_async.worker.kernel_change import KernelChange
from dataflow import ComputePool
from tests.adam_async.runs import tiny_dataset, until


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Kernels count as not compiled until something is in the list."""
    compiled: list[bool] = []
    monkeypatch.setattr(program, "are_ready", lambda codes, dtype: bool(compiled))
    return compiled


def change_of(cores: int = 1) -> tuple[Network, KernelChange]:
    """A network, and its change of kernels."""
    network = Network(named_model("digits"), np.float32, kernels="auto")
    return network, KernelChange(network, waits=False, cores=cores)


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the child run another module."""
    (folder / "another.py").write_text(text)
    monkeypatch.setattr(kernel_change, "MODULE", "another")
    monkeypatch.setenv("PYTHONPATH", str(folder))


async def test_the_network_takes_up_what_the_child_compiled(nothing_compiled: list[bool]) -> None:
    network, change = change_of()
    assert network.kernels == "numpy"
    compile_apart = change._compile

    async def compiled(engine: object) -> None:
        await compile_apart(engine)  # type: ignore[arg-type]
        nothing_compiled.append(True)

    change._compile = compiled  # type: ignore[method-assign]
    async with ComputePool(threads=1, name="test") as pool:
        await change.prepare(pool)
        assert change.statistics(5).numpy_groups == 5
        await change.run(pool, lambda: 7)
    assert network.kernels == "numba"
    found = change.statistics(100)
    assert (found.set, found.numpy_groups) == ("numba", 7)
    assert found.compiled == found.of > 1


async def test_a_run_does_not_wait_for_kernels_whose_files_are_lost(
    nothing_compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_compiled.append(True)
    network, change = change_of()
    assert network.kernels == "numba"

    def missing(code: int, dtype: object) -> int:
        nothing_compiled.clear()
        raise NotOnDiskError

    with monkeypatch.context() as patched:
        patched.setattr(program, "address", missing)
        async with ComputePool(threads=1, name="test") as pool:
            await change.prepare(pool)
    assert network.kernels == "numpy"
    nothing_compiled.append(True)
    async with ComputePool(threads=1, name="test") as pool:
        await change.run(pool, lambda: 7)
    assert network.kernels == "numba"


async def test_without_its_child_training_goes_on_with_numpys_kernels_and_a_reason_in_the_log(
    nothing_compiled: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module(tmp_path, monkeypatch, "raise SystemExit('no room on the disk')")
    network, change = change_of()
    with caplog.at_level(logging.WARNING):
        async with ComputePool(threads=1, name="test") as pool:
            await change.run(pool, lambda: 7)
    assert network.kernels == "numpy"
    assert (
        "goes on with NumPy's kernels, because compiling others failed: exit code 1, no room" in caplog.text
    )


async def test_where_the_disk_keeps_nothing_a_compute_thread_compiles_and_no_child_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, monkeypatch, "raise SystemExit('a child was started')")
    (tmp_path / "file").touch()
    monkeypatch.setattr(program, "CACHE", KernelCache(str(tmp_path / "file" / "kernels")))
    monkeypatch.setattr(program, "_addresses", {})
    network, change = change_of(cores=2)
    assert network.kernels == "numpy"
    async with ComputePool(threads=2, name="test") as pool:
        await change.run(pool, lambda: 7)
    assert network.kernels == "numba"


@pytest.fixture
def endless(nothing_compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelChange:
    """A change whose child never ends by itself, and has 0.2 s."""
    module(tmp_path, monkeypatch, "import threading; threading.Event().wait()")
    monkeypatch.setattr(kernel_change, "COMPILE_S", 0.2)
    return change_of()[1]


async def test_a_child_that_takes_too_long_is_killed(
    endless: KernelChange, caplog: pytest.LogCaptureFixture
) -> None:
    async with ComputePool(threads=1, name="test") as pool:
        await endless.run(pool, lambda: 7)
    assert "it took longer than 0 s" in caplog.text


async def test_a_long_compilation_is_in_the_log_and_a_short_one_is_not(
    endless: KernelChange, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with ComputePool(threads=1, name="test") as pool:
        await endless.run(pool, lambda: 7)
        assert "slower kernels until others are compiled" not in caplog.text
        monkeypatch.setattr(kernel_change, "NOTICE_S", 0.0)
        await endless.run(pool, lambda: 7)
        assert caplog.text.count("slower kernels until others are compiled") == 1


async def test_cancelling_kills_the_child(
    nothing_compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "pid"
    module(
        tmp_path,
        monkeypatch,
        "import os, pathlib, threading\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(said)!r})\n"
        "threading.Event().wait()",
    )
    _, change = change_of()
    async with ComputePool(threads=1, name="test") as pool:
        running = asyncio.create_task(change.run(pool, lambda: 7), name="running")
        await until(said.exists)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


@pytest.mark.parametrize(("threads", "cores", "left"), [(2, 2, 1), (3, 2, 2), (2, 3, 2), (1, 1, 1)])
async def test_the_child_gets_the_core_of_one_of_several_threads_that_need_every_core(
    threads: int,
    cores: int,
    left: int,
    nothing_compiled: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = tmp_path / "began"
    module(
        tmp_path,
        monkeypatch,
        f"import pathlib, threading; pathlib.Path({str(said)!r}).touch(); threading.Event().wait()",
    )
    _, change = change_of(cores=cores)
    async with ComputePool(threads=threads, name="test") as pool:
        running = asyncio.create_task(change.run(pool, lambda: 7), name="running")
        await until(said.exists)
        assert pool.outstanding == threads - left
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not pool.outstanding)


@pytest.mark.parametrize("options", [{"consistency": "bsp"}, {"record": True, "weights": "copy"}])
async def test_lockstep_and_recorded_runs_wait_for_compiled_kernels_and_log_it(
    options: dict[str, object], nothing_compiled: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = await train(**options)
    assert "training waits until its kernels are compiled" in caplog.text
    assert (found.set, found.numpy_groups) == ("numba", 0)


async def test_other_runs_begin_at_once(nothing_compiled: list[bool]) -> None:
    found = await train()
    assert found.set == "numpy"
    assert found.numpy_groups > 0


async def train(**options: object) -> KernelCounts:
    """Train for one epoch; returns the worker's statistics of its kernels."""
    config = Config(epochs=1, threads=1, model="digits", **options)  # type: ignore[arg-type]
    async with LocalCluster(config, dataset=tiny_dataset()) as cluster:
        result = await cluster.train()
    return next(each.kernels for each in result.statistics.values() if isinstance(each, WorkerCounts))
