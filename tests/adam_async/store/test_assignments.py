"""Assignments replace values once, in the order of a client's pushes, in every mode."""

import asyncio

import numpy as np
import pytest

from adam_async.errors import StoreError
from adam_async.messages import GetStatistics, pack, read_text_tensor
from adam_async.model.rules import Sgd
from adam_async.store.store import ParameterStore


@pytest.mark.parametrize("consistency", ["asp", "ssp:1", "bsp"])
async def test_an_assignment_comes_between_the_pushes_before_it_and_behind_it(consistency):
    async with asyncio.timeout(50):
        opened = {"rule": Sgd(rate=1.0), "consistency": consistency, "replicas": 1}
        async with ParameterStore.open("local", {"w": np.zeros(4)}, **opened) as store:
            await store.push({"w": np.ones(4)})
            await store.tick()
            assigned = await store.assign({"w": np.arange(4.0)})
            assert (assigned.versions, assigned.refused) == ({"w": 2}, ())
            await store.push({"w": np.ones(4)})
            await store.tick()
            np.testing.assert_array_equal((await store.pull())["w"], np.arange(4.0) - 1)


async def test_an_assignment_in_bsp_is_in_front_of_the_sum_and_refused_behind_the_clients_push():
    async with asyncio.timeout(50):
        opened = {"name": "model", "rule": Sgd(rate=1.0), "consistency": "bsp", "replicas": 2}
        async with (
            ParameterStore.open("local", {"w": np.zeros(4)}, **opened) as one,
            ParameterStore.open("local", {"w": np.zeros(4)}, **opened) as other,
        ):
            await other.push({"w": np.full(4, 3.0)})
            assigned = await one.assign({"w": np.full(4, 7.0)})
            assert assigned.versions == {"w": 1}
            await one.push({"w": np.ones(4)})
            with pytest.raises(StoreError, match="'w' was pushed before in this step"):
                await one.assign({"w": np.zeros(4)})
            await one.tick()
            await other.tick()
            np.testing.assert_array_equal((await one.pull())["w"], np.full(4, 5.0))


async def test_a_client_gets_the_statistics_of_the_store_that_it_names():
    async with asyncio.timeout(50):
        async with ParameterStore.open("local", {"w": np.zeros(4)}) as store:
            await store.push({"w": np.ones(4)})
            counts = await statistics_of(store)
            assert counts["versions"] == {"0": 1}
            assert counts["clients"]["0"]["staleness"] == {"0": 1}


async def statistics_of(store):
    link = store._link
    address = link.membership.map.nodes["ps-0"].address
    async with link._network.connect(address, link._identity, timeout_s=10.0) as asked:
        ask = GetStatistics(run=link.store.id)
        return read_text_tensor(await asked.call(pack(ask), timeout_s=10.0), dict, 1 << 20)
