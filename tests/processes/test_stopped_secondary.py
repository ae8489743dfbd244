"""Memory of a primary while a secondary is stopped, until the primary strikes the secondary out.

Clients push far more than the memory budget of the primary. No push is acknowledged while the stopped
secondary counts, so all received pushes wait in the primary's log and in its queue to the secondary.
"""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from adam_async.run.store_record import BundleRecord, StoreRecord
from adam_async.store import joining
from tests.processes.commands import started_by_hand

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory of a process"),
]

BUDGET = 64 << 20
CLIENTS, PUSHES, SHAPE = 8, 16, (1 << 20,)
"""Clients, pushes in flight of each, and the shape of each push: 4 MiB, 512 MiB in all."""


def memory_of(pid: int, field: str) -> int:
    """Return a field of a process's status in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) << 10


def forget_peak(pid: int) -> None:
    """Let `VmHWM` of a process begin at its present memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def bundle_of(store: ParameterStore) -> BundleRecord:
    """Return the only bundle in the cluster map of a client."""
    (bundle,) = store.link.membership.map.bundles.values()
    return bundle


async def test_a_primary_with_a_stopped_secondary_stays_within_its_memory_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A compiler of kernels would take memory of its own, at a time of its own.
    monkeypatch.setattr(joining, "StoreRecord", partial(StoreRecord, kernels="numpy"))
    gradient = np.ones(SHAPE, dtype=np.float32)
    with ExitStack() as commands:
        where, start = started_by_hand(commands)
        servers = {
            node: start("ps", "--id", node, "--memory-budget", str(BUDGET), "--controller")
            for node in ("ps-0", "ps-1", "ps-2")
        }
        async with AsyncExitStack() as stack:
            stores = [
                await stack.enter_async_context(
                    ParameterStore.open(
                        where,
                        {"w": np.zeros(SHAPE, np.float32)},
                        name="model",
                        rule=Sgd(rate=1.0),
                        copies=3,
                        servers=1,
                    )
                )
                for _ in range(CLIENTS)
            ]
            membership = stores[0].link.membership
            await membership.wait_for(lambda _: len(bundle_of(stores[0]).in_sync) == 3, "three copies", 30.0)
            primary, stopped, _ = (servers[node] for node, _ in bundle_of(stores[0]).in_sync)
            before = memory_of(primary.pid, "VmRSS")
            forget_peak(primary.pid)
            stopped.signal(signal.SIGSTOP)
            async with asyncio.TaskGroup() as group:
                for store in stores:
                    for _ in range(PUSHES):
                        group.create_task(store.push({"w": gradient}))
                await membership.wait_for(
                    lambda _: len(bundle_of(stores[0]).in_sync) == 2, "the strike-out", 30.0
                )
                growth = memory_of(primary.pid, "VmHWM") - before
            values = (await stores[0].pull())["w"]
            stopped.signal(signal.SIGCONT)

    print(f"{growth / BUDGET:.2f} of the budget")  # noqa: T201 - shown with -s
    assert 0.25 * BUDGET <= growth <= 1.1 * BUDGET
    assert (values == -CLIENTS * PUSHES).all()
