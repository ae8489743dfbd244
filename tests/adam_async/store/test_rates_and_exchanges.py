"""Rates by name, other arrays and given memory in `push_pull`, own pushes in `read`, and facts of a store."""

from dataclasses import replace

import numpy as np
import pytest

from adam_async import AdamW, Factors, ParameterStore, Sgd, StoreError, sync
from tests.adam_async.store.servers import store_servers

ARRAYS = {"a": np.zeros((4, 3)), "b": np.zeros(5), "c": np.zeros(2, np.float32)}
ONES = {name: np.ones_like(array) for name, array in ARRAYS.items()}


def firsts(values):
    return {name: float(array.reshape(-1)[0]) for name, array in values.items()}


def opened(consistency, shard_bytes, rate):
    replicas = 0 if consistency == "asp" else 1
    options = {"consistency": consistency, "replicas": replicas, "shard_bytes": shard_bytes}
    return ParameterStore.open("local", ARRAYS, rule=Sgd(rate=rate), **options)


@pytest.mark.parametrize("shard_bytes", [16, 1 << 20])
@pytest.mark.parametrize("consistency", ["asp", "ssp:1", "bsp"])
async def test_a_push_has_rates_by_name_and_the_rate_of_the_rule_for_others(consistency, shard_bytes):
    async with opened(consistency, shard_bytes, rate=0.5) as store:
        await store.push(ONES, rate={"a": 1.0, "c": 2.0})
        await store.tick()
        assert firsts(await store.pull()) == {"a": -1.0, "b": -0.5, "c": -2.0}
        values = await store.push_pull(ONES, rate={"b": 0.25, "a": 0.25})
        assert firsts(values) == {"a": -1.25, "b": -0.75, "c": -2.5}
        factors = {**ONES, "a": Factors(np.ones((1, 3)), np.ones((1, 4)))}
        values = await store.push_pull(factors, rate={"a": 1.0, "b": 1.0})
        assert firsts(values) == {"a": -2.25, "b": -1.75, "c": -3.0}


async def test_rates_of_unknown_arrays_and_invalid_rates_are_refused():
    async with ParameterStore.open("local", ARRAYS) as store:
        with pytest.raises(StoreError, match="no array 'd'"):
            await store.push(ONES, rate={"d": 1.0})
        with pytest.raises(StoreError, match="rate is a number from 0 to 1e\\+12, not -1"):
            await store.push(ONES, rate={"a": -1})
        assert firsts(await store.pull()) == {"a": 0.0, "b": 0.0, "c": 0.0}


@pytest.mark.parametrize("shard_bytes", [16, 1 << 20])
@pytest.mark.parametrize("consistency", ["asp", "ssp:1", "bsp"])
async def test_push_pull_fills_given_memory_and_pulls_other_arrays_on_request(consistency, shard_bytes):
    async with opened(consistency, shard_bytes, rate=1.0) as store:
        out = {name: np.full_like(array, 7) for name, array in ARRAYS.items()}
        await store.push_pull(ONES, out=out)
        assert all((array == -1).all() for array in out.values())
        out["b"][...] = 7
        values = await store.push_pull({"a": ONES["a"]}, ["c", "a"], out={"a": out["a"]})
        assert list(values) == ["c", "a"]
        assert (out["a"] == -2).all()
        assert (out["b"] == 7).all()
        with pytest.raises(StoreError, match="out names array 'b', which is not pulled"):
            await store.push_pull({"a": ONES["a"]}, out={"b": out["b"]})
        with pytest.raises(StoreError, match="no array 'd'"):
            await store.push_pull({"a": ONES["a"]}, ["d"])
        assert (await store.pull(["a"]))["a"][0, 0] == -2


async def test_own_pushes_in_the_callers_copy_are_no_staleness():
    async with (
        store_servers(1) as cluster,
        ParameterStore.open(cluster.address, {"w": np.zeros(2)}, name="model", rule=Sgd(rate=1.0)) as store,
        ParameterStore.open(cluster.address, name="model") as other,
    ):
        (state,) = [state for state in cluster.states() if state.shards]
        (shard,) = state.shards.values()
        read = (await store.pull()).read
        for own in range(3):
            await store.push({"w": np.ones(2)}, read=replace(read, own={"w": own}))
        await other.push({"w": np.ones(2)}, read=(await other.pull()).read)
        await store.push({"w": np.ones(2)}, read=replace(read, own={"w": 3}))
        await store.push({"w": np.ones(2)}, read=read)
        place = store._link.session.replica
        assert shard.tables.staleness_of[place] == {0: 3, 1: 1, 5: 1}


async def test_a_store_tells_its_rules_its_consistency_and_its_clients():
    rules = {"a": Sgd(rate=0.5, momentum=0.9), "b": AdamW(rate=0.1), "c": Sgd(rate=0.5, momentum=0.9)}
    mine = {**rules, "b": AdamW(rate=0.2)}
    async with (
        ParameterStore.open(
            "local", ARRAYS, name="model", rule=rules, consistency="ssp:2", replicas=1
        ) as store,
        ParameterStore.open("local", ARRAYS, name="model", rule=mine, consistency="ssp:2") as other,
    ):
        assert (store.rules, other.rules) == (rules, mine)
        assert (store.consistency, other.consistency) == ("ssp:2", "ssp:2")
        assert other.clients == 2


def test_work_begins_on_the_thread_of_the_store_in_the_order_of_the_calls():
    with sync.ParameterStore.open("local", ARRAYS, rule=Sgd(rate=1.0)) as store:
        calls = [store.begin(lambda twin: twin.push(ONES)) for _ in range(5)]
        calls.append(store.begin(lambda twin: twin.pull()))
        assert firsts(calls[-1].wait()) == {"a": -5.0, "b": -5.0, "c": -5.0}
        assert all(call.done() for call in calls)
        failing = store.begin(lambda twin: twin.pull(["d"]))
        with pytest.raises(StoreError, match="no array 'd'"):
            failing.wait()
    with pytest.raises(StoreError, match="is closed"):
        store.begin(lambda twin: twin.pull())
