"""Kills of processes that share memory lose and double no push, and leave no memory."""

import signal
from contextlib import ExitStack

import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from tests.processes.commands import started_by_hand
from tests.processes.shared_kills import PHASES, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_killed_clients_lose_and_double_no_push_and_leave_no_memory() -> None:
    counts = run(timer=8, steps=len(PHASES))
    assert all(counts[f"{phase}: kills"] for phase in PHASES)
    assert counts["answer: applied without an answer"] == 1


async def test_a_client_with_buffers_goes_on_with_another_copy_of_a_killed_server() -> None:
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        servers = {node: start("ps", "--id", node, "--controller") for node in ("ps-0", "ps-1", "ps-2")}
        arrays = {"w": np.zeros(1 << 18, np.float32)}
        async with ParameterStore.open(
            where, arrays, name="model", rule=Sgd(rate=1.0), copies=3, servers=1, link="shared"
        ) as store:
            gradients = await store.buffers()
            gradients["w"][:] = 1
            for number in range(40):
                if number == 20:
                    servers["ps-0"].signal(signal.SIGKILL)
                await store.push(gradients)
            assert ((await store.pull())["w"] == -40).all()
