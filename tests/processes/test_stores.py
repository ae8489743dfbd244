"""Stores whose servers, clients and controllers are killed, as in the table of failures of the reference."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from adam_async import ParameterStore, RoleDied, Sgd, StoreError, Waits
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.runtime.clock import system_entropy
from adam_async.store.survey import join
from tests.processes.commands import Command, address_of, started_by_hand
from transport import BufferPool

pytestmark = pytest.mark.processes

ZEROS = {"w": np.zeros(3)}
ONES = {"w": np.ones(3)}
# Ends one step of the store `clocks`, and then does nothing.
STEPS = """
import asyncio, sys
import numpy as np
from adam_async import ParameterStore

async def main():
    async with ParameterStore.open(sys.argv[1], name="clocks") as store:
        await store.push({"w": np.ones(3)})
        await store.tick()
        print("one step", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


CREATES_ON_TWO_SERVERS = """
import sys
import numpy as np
from adam_async import sync

sync.ParameterStore.open(sys.argv[1], {"w": np.ones(3)}, name="model", servers=2)
"""


@contextmanager
def program(source: str, where: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program with the address of a controller until the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", source, where], stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


async def push_until_it_fails(store: ParameterStore) -> StoreError:
    with pytest.raises(StoreError) as failure:
        while True:
            await store.push(ONES)
    return failure.value


async def test_a_killed_server_is_named_to_every_client_and_the_store_can_be_created_again() -> None:
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        server = start("ps", "--id", "ps-1", "--controller")
        async with (
            ParameterStore.open(where, ZEROS, name="model", rule=Sgd(rate=1.0)) as store,
            ParameterStore.open(where, name="model", reader=True) as reader,
        ):
            await store.push(ONES)
            assert (await reader.pull())["w"].tolist() == [-1, -1, -1]
            server.signal(signal.SIGKILL)

            assert "ps-1 died" in str(await push_until_it_fails(store))
            with pytest.raises(StoreError, match="ps-1 died"):
                await reader.pull()
        with pytest.raises(StoreError, match="ps-1 died"):
            await ParameterStore.open(where, name="model")
        start("ps", "--id", "ps-2", "--controller")
        async with ParameterStore.open(where, ZEROS, name="model") as store:
            assert (await store.pull())["w"].tolist() == [0, 0, 0]


async def test_a_store_whose_creator_is_killed_before_it_loads_the_values_is_created_again() -> None:
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        start("ps", "--controller")
        network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
        async with join(network, where, "reader", Waits()) as survey:
            with program(CREATES_ON_TWO_SERVERS, where) as creator:  # and waits for the second one
                await survey._membership.wait_for(lambda cluster: "model" in cluster.stores, "it", 20)
                joining = asyncio.ensure_future(ParameterStore.open(where, name="model"))
                creator.kill()
                with pytest.raises(StoreError, match="creator of store 'model' left before it had loaded"):
                    await joining
        async with ParameterStore.open(where, ZEROS, name="model", rule=Sgd(rate=1.0)) as store:
            await store.push(ONES)
            assert (await store.pull())["w"].tolist() == [-1, -1, -1]


async def test_pushes_and_pulls_go_on_without_the_only_controller_until_it_returns_with_its_folder(
    unused_tcp_port, tmp_path
) -> None:
    where = f"tcp://127.0.0.1:{unused_tcp_port}"
    words = ("controller", "--bind", where, "--dir", str(tmp_path))
    with ExitStack() as stack:
        controller = stack.enter_context(Command(*words))
        address_of(controller)
        address_of(stack.enter_context(Command("ps", "--controller", where)))
        async with ParameterStore.open(where, ZEROS, name="model", rule=Sgd(rate=1.0)) as store:
            controller.signal(signal.SIGKILL)
            controller.process.wait()
            for _ in range(100):
                await store.push(ONES)
            assert (await store.pull())["w"].tolist() == [-100, -100, -100]
            stack.enter_context(Command(*words))
            async with ParameterStore.open(where, name="model", waits=Waits(dial_s=30.0)) as late:
                await late.push(ONES)
            await store.push(ONES)
            assert (await store.pull())["w"].tolist() == [-102, -102, -102]


@pytest.mark.parametrize(("servers", "copies", "consistency"), [(1, 1, "asp"), (3, 2, "asp"), (3, 2, "bsp")])
async def test_a_killed_controller_without_a_folder_is_started_again_and_no_push_is_lost_or_doubled(
    servers: int, copies: int, consistency: Any, unused_tcp_port: int
) -> None:
    where = f"tcp://127.0.0.1:{unused_tcp_port}"
    words, pushed = ("controller", "--bind", where), 0
    with ExitStack() as stack:
        address_of(controller := stack.enter_context(Command(*words)))
        for number in range(servers):
            address_of(stack.enter_context(Command("ps", "--id", f"ps-{number}", "--controller", where)))
        opening = ParameterStore.open(
            where, ZEROS, name="model", rule=Sgd(rate=1.0), copies=copies, consistency=consistency, replicas=1
        )
        async with opening as store:

            async def push(enough: Callable[[], bool]) -> None:
                nonlocal pushed
                while not enough():
                    await store.push(ONES)
                    await store.tick()
                    pushed += 1

            await push(lambda: pushed >= 1)  # waits for the copies, which join through the map
            controller.signal(signal.SIGKILL)
            controller.process.wait()
            await push(lambda: pushed >= 100)  # without a controller
            address_of(stack.enter_context(Command(*words)))
            late = asyncio.ensure_future(
                ParameterStore.open(where, name="model", reader=True, waits=Waits(dial_s=30.0))
            )
            await push(late.done)  # while the controller learns the store
            await push(lambda count=pushed: pushed >= count + 100)  # type: ignore[misc]
            assert (await store.pull())["w"].tolist() == [-pushed] * 3
            reader = late.result()
            try:
                assert (await reader.pull())["w"].tolist() == [-pushed] * 3
            finally:
                await reader.close()


async def test_a_client_ends_by_name_if_the_only_controller_does_not_return() -> None:
    with ExitStack() as stack:
        where = address_of(controller := stack.enter_context(Command("controller", "--bind", LOOPBACK)))
        address_of(stack.enter_context(Command("ps", "--controller", where)))
        store = await ParameterStore.open(where, ZEROS, name="model", waits=Waits(controller_s=1.0))
        controller.signal(signal.SIGKILL)
        with pytest.raises(RoleDied, match="controller"):
            while True:
                await store.push(ONES)
        await store.close()


async def test_a_killed_client_leaves_the_clocks_and_its_push_stays() -> None:
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        start("ps", "--controller")
        opening = ParameterStore.open(
            where, ZEROS, name="clocks", rule=Sgd(rate=1.0), consistency="ssp:1", replicas=2
        )
        async with opening as store:
            with program(STEPS, where) as other:
                assert other.stdout is not None
                assert other.stdout.readline() == "one step\n"
                for _ in range(5):  # four steps ahead, where the bound is one
                    await store.tick()
                waiting = asyncio.create_task(store.pull())
                other.kill()
                values = await asyncio.wait_for(waiting, 20)

            assert values["w"].tolist() == [-1, -1, -1]


async def test_pushes_and_pulls_go_on_without_one_of_three_controllers(
    unused_tcp_port_factory, tmp_path
) -> None:
    ports = [unused_tcp_port_factory() for _ in range(3)]
    peers = ",".join(f"{number}=tcp://127.0.0.1:{port}" for number, port in enumerate(ports, 1))
    where = ",".join(f"tcp://127.0.0.1:{port}" for port in ports)
    with ExitStack() as stack:
        words = ("controller", "--peers", peers, "--id")
        controllers = [
            stack.enter_context(Command(*words, str(number), "--dir", str(tmp_path / str(number))))
            for number in (1, 2, 3)
        ]
        for role in (*controllers, stack.enter_context(Command("ps", "--controller", where))):
            address_of(role)
        async with ParameterStore.open(where, ZEROS, name="model", rule=Sgd(rate=1.0)) as store:
            await store.push(ONES)
            controllers[0].signal(signal.SIGKILL)
            controllers[0].process.wait()
            for _ in range(200):
                await store.push(ONES)
            async with ParameterStore.open(where, name="model") as late:
                assert (await late.pull())["w"].tolist() == [-201, -201, -201]
