"""Stores that begin with a pin: the values and the state of the rules of another store, at another cut."""

import asyncio

import numpy as np
import pytest

from adam_async import ArraySpec, ParameterStore, sync
from adam_async.checkpoint import saved_shards
from adam_async.errors import ConfigError, StoreError
from adam_async.model.rules import Adam, AdamW, Sgd
from adam_async.store import joining, pins
from tests.adam_async.store.fleets import fleet

NODES = ("ps-0", "ps-1", "ps-2")
ARRAYS = {"w": np.ones((40, 30), np.float32), "b": np.zeros(7), "none": np.zeros((0, 3)), "s": np.float64(2)}
RULES = {"w": Adam(rate=0.1), "b": Sgd(rate=0.1, momentum=0.9), "none": Sgd(), "s": AdamW()}


def steps(count, seed=0):
    """Gradients of some steps, by array."""
    random = np.random.default_rng(seed)
    return [
        {name: random.standard_normal(np.shape(array)).astype(array.dtype) for name, array in ARRAYS.items()}
        for _ in range(count)
    ]


async def push_all(store, gradients):
    for each in gradients:
        await store.push(each)
        await store.tick()
    return {name: array.copy() for name, array in (await store.pull()).items()}


def same(mine, other):
    return mine.keys() == other.keys() and all(np.array_equal(mine[name], other[name]) for name in mine)


@pytest.fixture(autouse=True)
def _short_search(monkeypatch):
    for module in (saved_shards, pins):
        monkeypatch.setattr(module, "PAUSE_S", 0.05)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_bytes": 100},
        {"shard_bytes": 4096, "servers": 1},
        {"shard_bytes": 1 << 20, "copies": 2},
        {"consistency": "bsp", "replicas": 1, "durable": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_given", [True, False], ids=["arrays", "no arrays"])
async def test_a_branch_goes_on_bit_for_bit_from_the_values_and_rule_state_of_a_pin(
    monkeypatch, tmp_path, options, is_given
):
    """At any cut, and with any number of servers and copies, the next steps have the bits of the store."""
    if not is_given:
        options = {k: each for k, each in options.items() if k not in ("shard_bytes", "consistency")}
    first, second = steps(5), steps(5, seed=1)
    async with fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running:
        async with running.open(ARRAYS, rule=RULES, shard_bytes=512, consistency="ssp:1") as store:
            pinned = await push_all(store, first)
            await store.pin("best")
            expected = await push_all(store, second)
            # A branch takes the arrays in any order.
            arrays = dict(reversed([(name, ArraySpec(np.shape(a), a.dtype)) for name, a in ARRAYS.items()]))
            given = {"arrays": arrays, "rule": RULES} if is_given else {"arrays": None}
            async with running.open(name="branch", pin="model/best", **given, **options) as branch:
                assert same(await branch.pull(), pinned)
                assert same(await push_all(branch, second), expected)
                assert branch.rules == store.rules
                assert branch.consistency == (options.get("consistency", "asp") if is_given else "ssp:1")
            assert same(await store.pull(), expected)


async def test_a_name_begins_again_with_its_pin_after_the_loss_of_all_servers(monkeypatch, tmp_path):
    first, second = steps(3), steps(3, seed=1)
    options = {"rule": RULES, "shard_bytes": 512, "durable": True}
    async with fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running:
        async with running.open(ARRAYS, **options) as store:
            pinned = await push_all(store, first)
            await store.pin("best")
            newest = await push_all(store, second)
        for node in NODES:
            await running.end(node)
        await running.start(*NODES)
        # By default the store goes on; the pin is for a new one only.
        async with running.open(ARRAYS, pin="best", **options) as store:
            assert same(await store.pull(), newest)
            async with running.open(None, name="other", pin="model/best") as other:
                assert same(await other.pull(), pinned)
        for node in NODES:
            await running.end(node)
        await running.start(*NODES)
        async with running.open(None, pin="best", create="new") as store:
            assert same(await store.pull(), pinned)
            assert same(await push_all(store, second), newest)
            assert [each.name for each in await store.pins()] == ["best"]


async def test_a_branch_waits_for_servers_with_the_pin_that_still_start(monkeypatch, tmp_path):
    async with fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running:
        async with running.open(ARRAYS, rule=RULES, shard_bytes=512) as store:
            pinned = await push_all(store, steps(2))
            await store.pin("best")
        for node in NODES:
            await running.end(node)
        await running.start("ps-0")
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(_opened(running, name="branch", pin="model/best"))
            await running.start("ps-1", "ps-2")
            branch = await opening
        assert same(await branch.pull(), pinned)
        await branch.close()
        await running.end("ps-1")
        monkeypatch.setattr(joining, "SEARCH_S", 0.0)
        with pytest.raises(
            StoreError, match="lack the shards of ps-1 of pin 'best' of store 'model': start all"
        ):
            await _opened(running, name="second", pin="model/best")


async def _opened(running, **options):
    return await running.open(None, **options)


async def test_clients_that_open_one_branch_at_once_share_it(monkeypatch, tmp_path):
    async with fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running:
        async with running.open(ARRAYS, rule=RULES) as store:
            pinned = await push_all(store, steps(2))
            await store.pin("best")
        opened = await asyncio.gather(
            *[_opened(running, name="branch", pin="model/best", copies=copies) for copies in (1, 2, 3)]
        )
        await opened[0].push(steps(1)[0])
        for branch in opened:
            assert not same(await branch.pull(), pinned)
            await branch.close()


@pytest.mark.parametrize(
    ("arrays", "options", "error"),
    [
        (None, {"pin": "model/none"}, "store 'model' has no pin 'none' on the disks .*; its pins: 'best'"),
        (
            None,
            {"pin": "best"},
            "store 'branch' has no pin 'best' on the disks of its servers; its pins: none",
        ),
        (
            {**ARRAYS, "w": np.zeros(3)},
            {},
            r"'w' is float32\(40, 30\) in pin 'best' of store 'model', and float64",
        ),
        (
            {**ARRAYS, "more": np.zeros(3)},
            {},
            "pin 'best' of store 'model' has no array 'more'; it has 4 arrays",
        ),
        (
            {"w": ARRAYS["w"]},
            {"rule": RULES["w"]},
            "has the further array 'b', which is absent here: give those",
        ),
        (
            ARRAYS,
            {"rule": {**RULES, "w": Sgd()}},
            "has rule Adam\\(\\) in pin .best. of .*, and Sgd\\(\\) here: .* or leave arrays",
        ),
    ],
    ids=["no pin", "own name", "type", "more arrays", "fewer arrays", "rule"],
)
async def test_a_branch_that_differs_from_its_pin_is_refused_and_leaves_no_store(
    tmp_path, arrays, options, error
):
    async with ParameterStore.open("local", ARRAYS, name="model", rule=RULES, dir=tmp_path) as store:
        await store.pin("best")
        rules = {} if arrays is None else {"rule": {name: RULES.get(name, Sgd()) for name in arrays}}
        options = {"pin": "model/best", **rules, **options}
        with pytest.raises(StoreError, match=error):
            await ParameterStore.open("local", arrays, name="branch", dir=tmp_path, **options)
        with pytest.raises(
            StoreError, match="store 'branch' does not exist; stores of this cluster: 'model'"
        ):
            await ParameterStore.open("local", name="branch", dir=tmp_path)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pin": ""}, "pin is 'STORE/PIN', or 'PIN' of this store's name, not ''"),
        ({"pin": "model/"}, "pin is 'STORE/PIN'"),
        ({"pin": 3}, "pin must be text, not 3"),
        ({"pin": "a/b/best"}, "a store's name has .* no slash, not 'a/b'"),
        ({"pin": "best", "reader": True}, "pin begins a new store: leave it out for a reader"),
        ({"pin": "best", "create": "never"}, "leave it out for a reader, and with create='never'"),
        ({"pin": "best", "rule": Adam()}, "rule=.* without arrays"),
        ({"pin": "best", "name": None, "arrays": ARRAYS}, "name is missing, and pin is 'best'"),
    ],
    ids=str,
)
def test_a_pin_that_no_store_can_begin_with_is_refused_at_the_call(options, error):
    with pytest.raises(ConfigError, match=error):
        ParameterStore.open("local", **{"name": "branch", **options})


def test_the_synchronous_store_begins_with_a_pin(tmp_path):
    with sync.ParameterStore.open("local", ARRAYS, name="model", rule=RULES, dir=tmp_path) as store:
        store.push(steps(1)[0])
        store.pin("best")
        values = store.pull()
        with sync.ParameterStore.open("local", name="branch", pin="model/best", dir=tmp_path) as branch:
            assert same(branch.pull(), values)


async def test_a_store_comes_back_from_the_disks_with_other_shards_and_its_arrays_in_another_order(tmp_path):
    options = {"name": "model", "rule": RULES, "dir": tmp_path, "durable": True}
    async with ParameterStore.open("local", ARRAYS, shard_bytes=512, **options) as store:
        values = await push_all(store, steps(3))
    async with ParameterStore.open(
        "local", dict(reversed(ARRAYS.items())), shard_bytes=64, **options
    ) as store:
        assert same(await store.pull(), values)
        expected = await push_all(store, steps(3, seed=1))
    async with ParameterStore.open("local", ARRAYS, name="other", rule=RULES) as store:
        for each in (*steps(3), *steps(3, seed=1)):
            await store.push(each)
        assert same(await store.pull(), expected)
