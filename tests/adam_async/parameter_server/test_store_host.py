"""A server compiles the kernel of its rule in a child, which ends with the store."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba", reason="compiled kernels need numba")

from adam_async import ParameterStore
from adam_async.model import Sgd
from adam_async.model.fast import batches
from adam_async.parameter_server import store_host
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.store_host import compile_kernels
from adam_async.runtime.kernel_cache import KernelCache
from dataflow import ComputePool
from tests.adam_async.runs import until


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Sets the text of the child's module; the disk can keep kernels, and has none."""
    monkeypatch.setattr(batches, "CACHE", KernelCache(str(tmp_path / "kernels")))
    monkeypatch.setattr(store_host, "MODULE", "another")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "another.py").write_text


def host() -> SimpleNamespace:
    """The services that a compilation needs."""
    return SimpleNamespace(node="ps-0", make_pool=ComputePool, compiling=asyncio.Lock())


def appliers() -> dict[tuple[int, str], Applier]:
    """One rule, which NumPy applies."""
    return {(0, "float32"): Applier(Sgd(), (), np.float32)}


def endless(new: Path, there: Path) -> str:
    """The text of a module that writes its process id to `there`, and never ends."""
    return (
        "import os, pathlib, threading\n"
        f"pathlib.Path({str(new)!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(new)!r}, {str(there)!r})\n"
        "threading.Event().wait()"
    )


async def test_a_local_store_closes_while_a_child_compiles(
    another: Callable[[str], object], tmp_path: Path
) -> None:
    there = tmp_path / "pid"
    another(endless(tmp_path / "new", there))
    async with asyncio.timeout(store_host.COMPILE_S / 2):
        async with ParameterStore.open("local", {"w": np.zeros(3)}) as store:
            await store.push({"w": np.ones(3)})
            await until(there.exists)
    with pytest.raises(ProcessLookupError):
        os.kill(int(there.read_text()), 0)


async def test_the_end_of_a_compilation_kills_its_child(
    another: Callable[[str], object], tmp_path: Path
) -> None:
    there = tmp_path / "pid"
    another(endless(tmp_path / "new", there))
    mine = appliers()
    running = asyncio.create_task(compile_kernels(mine, host()), name="running")
    await until(there.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(int(there.read_text()), 0)
    assert type(mine[0, "float32"].batches).__name__ == "NumpyBatches"


async def test_two_bundles_of_a_server_need_one_child(
    another: Callable[[str], object], tmp_path: Path
) -> None:
    # The second child would find the folder.
    another(f"import os; os.mkdir({str(tmp_path / 'once')!r})")
    both, shared = [appliers(), appliers()], host()
    async with asyncio.TaskGroup() as group:
        for mine in both:
            group.create_task(compile_kernels(mine, shared), name="compiling")
    assert {type(mine[0, "float32"].batches).__name__ for mine in both} == {"CompiledBatches"}


async def test_numpy_applies_the_rule_if_the_child_fails(
    another: Callable[[str], object], caplog: pytest.LogCaptureFixture
) -> None:
    another("raise SystemExit('no room')")
    mine = appliers()
    await compile_kernels(mine, host())
    assert type(mine[0, "float32"].batches).__name__ == "NumpyBatches"
    assert "compiling its kernel failed: exit code 1, no room" in caplog.text
