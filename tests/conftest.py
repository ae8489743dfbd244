"""The house that every test lives in.

Every ``async def`` test runs twice, on stock asyncio and on uvloop (each hides faults that the other
shows); ``ADAM_TEST_LOOPS=asyncio`` or ``=uvloop`` narrows that to one. Tests of whole roles take time: those
under ``tests/adam_async`` run on uvloop in the fast tier. On stock asyncio the rooms `NEAR_THE_LOOP` run in
the thorough tier. The other rooms use the loop through these, and run on stock asyncio in the slow tier.
Tests that are marked thorough run on uvloop there, and on stock asyncio in the slow tier.

A leak fails the test that made it: tasks and asynchronous generators are looked at before its loop closes,
threads and file descriptors after. The look itself is a few system calls; garbage is collected only
when something seems to be left.
"""

import os

# Before anything loads numpy: BLAS threads would compete with ours and show up as leaked threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import uvloop
from hypothesis import HealthCheck, settings

from adam_async.runtime.kernel_cache import use_kernel_cache

use_kernel_cache()  # nothing has loaded numba yet


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels once, before tests with deadlines begin and before there are several processes."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        if find_spec("numba") is not None:
            from adam_async.model import Sgd
            from adam_async.model.fast.batches import CompiledBatches
            from adam_async.model.fast.program import KERNELS, compile_kernels

            for dtype in ("float32", "float64"):
                compile_kernels(range(len(KERNELS)), np.dtype(dtype))
                CompiledBatches(Sgd(), np.dtype(dtype))


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}

ROLES = Path(__file__).parent / "adam_async"

NEAR_THE_LOOP = {"client", "cluster", "controller", "runtime", "store"}
"""Rooms whose code uses sockets, timers, threads or processes of the loop itself, or runs whole clusters."""

FILES = "/proc/self/fd"

THREAD_JOIN_S = 10.0
"""How long a thread that was told to end may take to do so before it counts as leaked."""

# The first uvloop of a process opens a pipe for signals and keeps it; no test is to be blamed for that.
uvloop.new_event_loop().close()

# Shared machines stall: a deadline per example would report the neighbour's work as our failure.
settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Name the loops every asynchronous test runs on."""
    wanted = os.environ.get("ADAM_TEST_LOOPS", "asyncio,uvloop").split(",")
    unknown = [name for name in wanted if name not in LOOPS]
    if unknown:
        raise pytest.UsageError(f"ADAM_TEST_LOOPS names {unknown}; known loops are {sorted(LOOPS)}")
    return {name: LOOPS[name] for name in wanted}


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests of roles that run on stock asyncio one tier up, unless ADAM_TEST_LOOPS names the loops."""
    if "ADAM_TEST_LOOPS" in os.environ:
        return
    for item in items:
        spec = getattr(item, "callspec", None)
        if (
            spec is not None
            and spec.params.get("_asyncio_loop_factory") is LOOPS["asyncio"]
            and item.path.is_relative_to(ROLES)
        ):
            near = item.path.relative_to(ROLES).parts[0] in NEAR_THE_LOOP
            thorough = near and item.get_closest_marker("thorough") is None
            item.add_marker(pytest.mark.thorough if thorough else pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_looked_at_once() -> None:
    """Leave modules, tests and compiled kernels out of later collections: looking at them takes long.

    A simulated run thaws what is there when it ends, so that once is not enough.
    """
    gc.collect()
    gc.freeze()


def _open_files() -> set[str]:
    """Return the numbers of this process's open file descriptors, the one used for looking left out."""
    try:
        names = os.listdir(FILES)
    except FileNotFoundError:  # not Linux: descriptors are then not checked
        return set()
    return {name for name in names if os.path.lexists(f"{FILES}/{name}")}


def _describe_file(number: str) -> str:
    try:
        return f"{number} -> {os.readlink(f'{FILES}/{number}')}"
    except OSError:
        return number


@pytest.fixture(autouse=True)
def no_leaked_threads_or_files() -> Iterator[None]:
    """Fail a test that leaves a thread running or a socket or file open after its loop has closed."""
    threads_before = set(threading.enumerate())
    files_before = _open_files()
    yield
    left: list[str] = []
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(timeout=THREAD_JOIN_S)
        if thread.is_alive():
            left.append(f"thread {thread.name!r}")
    if _open_files() - files_before:
        gc.collect()  # what only a cycle kept open is closed now, with its ResourceWarning, in this test
        left += [f"file {_describe_file(number)}" for number in sorted(_open_files() - files_before)]
    if left:
        pytest.fail(f"the test left behind: {', '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True)
def no_leaked_tasks(no_leaked_threads_or_files: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an asynchronous test that leaves a task or an asynchronous generator unfinished.

    The runner is requested here and by name, so that this check ends after every asynchronous fixture has
    ended and before the runner cancels in silence whatever is still there.
    """
    if not pytest_asyncio.is_async_test(request.node):
        yield
        return
    runner: asyncio.Runner = request.getfixturevalue("_function_scoped_runner")
    yield
    loop = runner.get_loop()
    left = sorted(f"task {task.get_name()!r} ({task.get_coro()!r})" for task in asyncio.all_tasks(loop))
    # Only stock asyncio keeps its generators where they can be seen; every test runs there too.
    for generator in getattr(loop, "_asyncgens", ()):
        if generator.ag_frame is not None:
            left.append(f"asynchronous generator {generator!r}")
    if left:
        pytest.fail(f"the test left behind: {', '.join(left)}", pytrace=False)
