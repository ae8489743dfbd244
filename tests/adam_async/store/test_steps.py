"""Clocks of clients: ssp and bsp between clients that join late, leave, or are lost."""

import asyncio
import sys

import numpy as np
import pytest

from adam_async import DeadlineExceeded, ParameterStore, Sgd, StoreError, Waits
from tests.adam_async.store.servers import faulty_clients, servers
from tests.transport.testing import Faults

START = {"w": np.zeros(4)}
ONES = {"w": np.ones(4)}


async def test_in_ssp_a_tick_does_not_overtake_pushes_of_its_step() -> None:
    async with (
        ParameterStore.open(
            "local", START, name="model", rule=Sgd(rate=1.0), consistency="ssp:1", replicas=2
        ) as one,
        ParameterStore.open("local", name="model") as two,
    ):
        async with asyncio.TaskGroup() as group:
            for _ in range(30):  # more than a server may owe answers for
                group.create_task(one.push(ONES))
            group.create_task(one.tick())
            group.create_task(two.tick())
            group.create_task(two.tick())
        values = await two.pull()
        assert values.clock >= 1
        np.testing.assert_array_equal(values["w"], np.full(4, -30.0))


@pytest.mark.parametrize("consistency", ["ssp:1", "bsp"])
async def test_the_first_step_waits_for_all_clients_and_the_error_names_their_number(
    consistency: str,
) -> None:
    waits = Waits(prepare_s=0.5)
    async with (
        servers(1) as where,
        ParameterStore.open(
            where, START, name="model", consistency=consistency, replicas=2, waits=waits
        ) as one,
    ):
        claim = "2 clients of store 'model', with which its first step begins"
        for call in (one.push(ONES), one.tick(), one.push_pull(ONES)):
            with pytest.raises(DeadlineExceeded, match=claim):
                await call
        np.testing.assert_array_equal((await one.pull())["w"], np.zeros(4))
        async with ParameterStore.open(where, name="model"):
            await one.push(ONES)
        assert one.clock == 0


@pytest.mark.parametrize("queued", [0, 40])  # more than a server may owe answers for
async def test_in_bsp_a_push_pull_that_is_refused_ends_no_step(queued: int) -> None:
    arrays = {str(number): np.zeros(1) for number in range(queued + 1)}
    opening = ParameterStore.open("local", arrays, rule=Sgd(rate=1.0), consistency="bsp", replicas=1)
    async with opening as store:
        pushes = [asyncio.create_task(store.push({name: np.ones(1)})) for name in arrays]
        await asyncio.sleep(0)
        with pytest.raises(StoreError, match="array '0' was pushed before in this step"):
            await store.push_pull({"0": np.ones(1)})
        await asyncio.gather(*pushes)
        assert store.clock == 0
        await store.tick()
        values = await store.pull()
        assert {values[name][0] for name in arrays} == {-1.0}


async def test_in_bsp_only_the_creator_needs_replicas() -> None:
    with pytest.raises(StoreError, match="'model' does not exist, and with consistency='bsp' its creator"):
        await ParameterStore.open("local", START, name="model", consistency="bsp")
    async with (
        ParameterStore.open("local", START, name="model", consistency="bsp", replicas=1),
        ParameterStore.open("local", START, name="model", consistency="bsp") as joined,
    ):
        assert set(joined.arrays) == set(START)


async def test_in_ssp_without_slack_no_client_needs_replicas() -> None:
    async with ParameterStore.open("local", START, consistency="ssp:0") as store:
        await store.push({name: np.zeros_like(START[name]) for name in START})
        await store.tick()
        assert (await store.pull()).clock == 1


@pytest.mark.parametrize("consistency", ["ssp:2", "bsp"])
async def test_clients_that_join_and_leave_at_any_time_end(consistency: str) -> None:
    async def client(where: str, count: int) -> None:
        async with ParameterStore.open(
            where, START, name="model", rule=Sgd(rate=1.0), consistency=consistency, replicas=2
        ) as store:
            for _ in range(count):
                await store.push_pull(ONES)

    async with servers(2) as where:
        async with asyncio.TaskGroup() as group:
            for count in (40, 40, 5, 1, 17):
                group.create_task(client(where, count))


async def test_a_reader_never_holds_clients_back() -> None:
    async with (
        ParameterStore.open(
            "local", START, name="model", rule=Sgd(rate=1.0), consistency="bsp", replicas=1
        ) as one,
        ParameterStore.open("local", name="model", reader=True) as reader,
    ):
        for _ in range(3):
            await one.push_pull(ONES)
        np.testing.assert_array_equal((await reader.pull())["w"], np.full(4, -3.0))


async def test_a_client_that_the_controllers_lose_for_longer_than_the_grace_has_lost_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    networks = faulty_clients(monkeypatch)
    async with (
        servers(1, waits=Waits(grace_s=0.2)) as where,
        ParameterStore.open(where, START, name="model", rule=Sgd(rate=1.0), consistency="ssp:1") as cut,
        ParameterStore.open(where, name="model") as other,
    ):
        await cut.push(ONES)
        await cut.tick()
        network, node = networks[0], cut._link._identity.node
        network.faults = Faults(cut=1.0)
        network.cut_all()
        await other.link.membership.wait_for(
            lambda cluster: node not in cluster.nodes or not cluster.nodes[node].live, "its loss", 20.0
        )
        network.faults = Faults()
        with pytest.raises(StoreError, match="gave up its place: open the store again"):
            while True:
                await cut.push(ONES)
        for _ in range(3):
            await other.tick()
        assert (await other.pull()).clock >= 2  # it waits for no lost client


@pytest.mark.processes
async def test_a_lost_client_frees_its_place_after_the_grace_and_the_others_go_on() -> None:
    async with (
        servers(1, waits=Waits(grace_s=0.2)) as where,
        ParameterStore.open(
            where, START, name="model", rule=Sgd(rate=1.0), consistency="bsp", replicas=2
        ) as store,
    ):
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, where, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert other.stdout is not None
            await store.push_pull(ONES)
            assert await other.stdout.readline() == b"stepped\n"
        finally:
            other.kill()
            await other.communicate()
        values = await store.push_pull(ONES)  # the servers wait for the lost client for its grace
        assert values.clock == 2
        np.testing.assert_array_equal(values["w"], np.full(4, -3.0))


CLIENT = """
import sys, threading
import numpy as np
from adam_async import sync
store = sync.ParameterStore.open(sys.argv[1], name="model")
store.push_pull({"w": np.full(4, 3.0)})
print("stepped", flush=True)
threading.Event().wait()
"""
"""Program of a client in another process: it takes one step, and stays."""
