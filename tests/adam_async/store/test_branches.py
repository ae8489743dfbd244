"""Stores that begin with the values and the rule state of a pin or a file, at another cut of shards."""

import asyncio
import os

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from adam_async import ArraySpec, ParameterStore, sync
from adam_async.checkpoint import saved_shards
from adam_async.checkpoint.model_head import RULE_STATE, SUMS
from adam_async.errors import ConfigError, StoreError
from adam_async.model.rules import Adam, AdamW, Sgd
from adam_async.store import joining, pins
from adam_async.store.saved_file import STORE
from tests.adam_async.rules import Means
from tests.adam_async.runs import until
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
        ({"pin": "a/b/best"}, "pin is 'STORE/PIN', .*, not 'a/b/best'"),
        ({"pin": "best", "reader": True}, "pin and init begin a new store: leave them out for a reader"),
        ({"pin": "best", "create": "never"}, "leave them out for a reader, and with create='never'"),
        ({"pin": "best", "init": "file"}, "begins with a pin or with the file of init: leave one out"),
        ({"init": 3}, "init is the path of a file, not 3"),
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_bytes": 100, "servers": 2},
        {"consistency": "bsp", "replicas": 1, "copies": 2, "min_in_sync": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_given", [True, False], ids=["arrays", "no arrays"])
@pytest.mark.parametrize("consistency", ["asp", "ssp:1", "bsp"])
async def test_a_file_with_rule_state_begins_a_store_on_other_servers_bit_for_bit(
    monkeypatch, tmp_path, options, is_given, consistency
):
    if not is_given:
        options = {k: each for k, each in options.items() if k not in ("shard_bytes", "consistency")}
    first, second, file = steps(5), steps(5, seed=1), tmp_path / "model.safetensors"
    async with fleet(monkeypatch, *NODES, network="local") as running:
        at_first = {"rule": RULES, "shard_bytes": 512, "consistency": consistency, "replicas": 1}
        async with running.open(ARRAYS, **at_first) as store:
            saved = await push_all(store, first)
            assert await store.save(file, rule_state=True) == file
            expected = await push_all(store, second)
            given = {"arrays": ARRAYS, "rule": RULES} if is_given else {"arrays": None}
            async with running.open(name="branch", init=file, **given, **options) as branch:
                assert same(await branch.pull(), saved)
                assert same(await push_all(branch, second), expected)
                assert branch.consistency == (options.get("consistency", "asp") if is_given else consistency)
    found = load_file(file)
    assert same({name: each for name, each in found.items() if not name.startswith(RULE_STATE)}, saved)
    assert {name.split("/")[1] for name in found if name.startswith(RULE_STATE)} == {
        "mean",
        "square",
        "steps",
        "momentum",
    }


async def test_a_saved_step_of_bsp_is_whole_while_other_clients_wait_for_this_one(tmp_path):
    """The others have pushed to the next step; the file has the step that this client has ended."""
    options = {"name": "model", "rule": RULES, "consistency": "bsp", "replicas": 2, "shard_bytes": 256}
    pushes, file = steps(4), tmp_path / "model.safetensors"
    async with (
        ParameterStore.open("local", ARRAYS, **options) as store,
        ParameterStore.open("local", ARRAYS, **options) as other,
    ):
        for each in pushes[:2]:
            await asyncio.gather(store.push(each), other.push(each))
            await asyncio.gather(store.tick(), other.tick())
        values = await store.pull()
        await other.push(pushes[2])
        await other.tick()
        await store.save(file, rule_state=True)
    async with ParameterStore.open("local", init=file, name="branch", replicas=1) as branch:
        assert same(await branch.pull(), values)


@pytest.mark.parametrize("rule", [Adam(rate=0.1), Means(rate=0.1)], ids=["adam", "rule of a user"])
@pytest.mark.parametrize("origin", ["pin", "init"])
async def test_a_store_with_one_rule_for_arrays_of_two_types_begins_another(tmp_path, rule, origin):
    first, second, file = steps(3), steps(3, seed=1), tmp_path / "model.safetensors"
    options = {"rule": rule, "dir": tmp_path, "shard_bytes": 512}
    async with ParameterStore.open("local", ARRAYS, name="model", **options) as store:
        saved = await push_all(store, first)
        await store.pin("best")
        await store.save(file, rule_state=True)
        expected = await push_all(store, second)
        begins = {"pin": "model/best"} if origin == "pin" else {"init": file}
        async with ParameterStore.open("local", dir=tmp_path, name="branch", **begins) as branch:
            assert same(await branch.pull(), saved)
            assert same(await push_all(branch, second), expected)
            assert branch.rules == store.rules


async def test_a_store_whose_load_fails_leaves_no_folder_and_delays_no_later_one(tmp_path, monkeypatch):
    file, folder = tmp_path / "model.safetensors", tmp_path / "disk"
    async with ParameterStore.open("local", {"w": np.zeros(3)}, rule=Adam()) as store:
        await store.save(file, rule_state=True)
    with safe_open(file, framework="numpy") as head:
        about = {STORE: head.metadata()[STORE]}
    save_file({**load_file(file), "rule_state/steps/w": np.array([-1])}, file, metadata=about)
    monkeypatch.setattr(saved_shards, "SEARCH_S", 1e6)
    async with asyncio.timeout(60), ParameterStore.open("local", {"w": np.zeros(3)}, name="m", dir=folder):
        for _ in range(2):
            with pytest.raises(StoreError, match=r"cannot be loaded: .*steps"):
                await ParameterStore.open("local", init=file, name="branch", dir=folder)
        async with ParameterStore.open("local", {"w": np.ones(3)}, name="branch", dir=folder) as branch:
            assert (await branch.pull())["w"].tolist() == [1, 1, 1]
        await until(lambda: len(list(folder.glob("store-*"))) == 2)


async def test_a_file_with_another_bit_in_any_array_begins_no_store(tmp_path):
    file = tmp_path / "model.safetensors"
    async with ParameterStore.open("local", {"w": np.ones(3), "v": np.ones(2)}, rule=Adam()) as store:
        await store.push({"w": np.ones(3)})
        await store.save(file, rule_state=True)
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    for place in range(begin, len(data), 8):
        file.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(StoreError, match=r"the bytes of '.*' are not those that were written"):
            await ParameterStore.open("local", init=file)
    file.write_bytes(data)
    async with ParameterStore.open("local", init=file) as branch:
        assert (await branch.pull())["v"].tolist() == [1, 1]


async def test_a_store_whose_creator_left_while_it_loaded_a_pin_is_begun_anew(tmp_path, monkeypatch):
    """The creator is gone before it can delete the store."""
    loads = asyncio.Event()

    async def never(copies, store, source):
        loads.set()
        await asyncio.Event().wait()

    async def leave(joining, store):
        pass

    async with ParameterStore.open("local", ARRAYS, name="model", rule=RULES, dir=tmp_path) as store:
        values = await push_all(store, steps(2))
        await store.pin("best")
        begins = {"name": "branch", "pin": "model/best", "dir": tmp_path}
        with monkeypatch.context() as patch:
            patch.setattr(joining.ShardCopies, "load", never)
            patch.setattr(joining.Joining, "_delete", leave)
            opening = asyncio.create_task(ParameterStore.open("local", **begins).__aenter__())
            await loads.wait()
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        async with asyncio.timeout(60), ParameterStore.open("local", **begins) as branch:
            assert same(await branch.pull(), values)


async def test_a_file_of_values_alone_begins_a_store_with_new_rule_state(tmp_path):
    file = tmp_path / "model.safetensors"
    async with ParameterStore.open("local", ARRAYS, rule=RULES) as store:
        values = await push_all(store, steps(3))
        await store.save(file)
    assert same(load_file(file), values)
    async with (
        ParameterStore.open("local", init=str(file)) as branch,
        ParameterStore.open("local", values, rule=RULES) as other,
    ):
        assert branch.rules == RULES
        assert same(await push_all(branch, steps(2)), await push_all(other, steps(2)))


def _write(file, content, arrays=None):
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        head = {key: text for key, text in content.items() if key != SUMS}  # as another program writes it
        save_file(arrays or {"w": np.zeros(3, np.float32)}, file, metadata=head)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "No such file"),
        (
            b"no file of tensors",
            "cannot be read as a file of `ParameterStore.save`: Error while deserializing",
        ),
        ({}, "cannot be read as a file of `ParameterStore.save`: its head has no store"),
        ({STORE: "[{"}, "cannot be read as a file of `ParameterStore.save`: Input data was truncated"),
        (
            {STORE: "[{}, []]"},
            "cannot be read as a file of `ParameterStore.save`: Object missing required field",
        ),
    ],
    ids=["absent", "other bytes", "no store", "truncated", "no record"],
)
async def test_a_file_that_no_store_wrote_is_refused_and_leaves_no_store(tmp_path, content, error):
    file = tmp_path / "model.safetensors"
    if content is not None:
        _write(file, content)
    with pytest.raises(StoreError, match=f"{file} .*{error}"):
        await ParameterStore.open("local", init=file)


async def test_a_named_pipe_is_no_file_to_begin_with(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    async with asyncio.timeout(30):
        with pytest.raises(StoreError, match=r"pipe cannot be read as a file of `ParameterStore\.save`"):
            await ParameterStore.open("local", init=tmp_path / "pipe")


async def test_a_file_whose_arrays_or_rules_differ_is_refused_with_the_difference(tmp_path):
    file = tmp_path / "model.safetensors"
    async with ParameterStore.open("local", ARRAYS, rule=RULES) as store:
        await store.save(file, rule_state=True)
    found = load_file(file)
    with safe_open(file, framework="numpy") as opened:
        head = opened.metadata()
    for arrays, rule, error in (
        ({"w": ARRAYS["w"]}, RULES["w"], f"{file} has the further array 'b', which is absent here"),
        (ARRAYS, Sgd(), rf"array 'w' has rule Adam\(\) in {file}, and Sgd\(\) here"),
    ):
        with pytest.raises(StoreError, match=error):
            await ParameterStore.open("local", arrays, rule=rule, init=file)
    for name, array, error in (
        ("w", np.full((40, 30), np.nan, np.float32), f"{file}: the value of 'w'.*nan"),
        ("w", np.zeros((4, 3), np.float32), rf"{file}: the value of 'w' has shape \(4, 3\)"),
        ("rule_state/mean/w", np.zeros((40, 30)), f"{file} has no array 'rule_state/mean/w' of float32"),
        ("rule_state/steps/w", np.array([-1]), "cannot be loaded: .*steps"),
    ):
        _write(file, head, {**found, name: array})
        with pytest.raises(StoreError, match=error):
            await ParameterStore.open("local", init=file)


async def test_names_that_the_file_has_for_rules_are_refused_and_a_reader_has_no_rule_state(tmp_path):
    file = tmp_path / "model.safetensors"
    arrays = {"w": np.zeros(3), "rule_state/momentum/w": np.zeros(3)}
    async with ParameterStore.open("local", arrays, rule=Sgd(momentum=0.5), name="model") as store:
        await store.save(file)
        with pytest.raises(
            StoreError, match="'rule_state/momentum/w' has a name that is that of a rule's state"
        ):
            await store.save(file, rule_state=True)
        async with ParameterStore.open("local", name="model", reader=True) as reader:
            with pytest.raises(StoreError, match=r"this client is a reader: open .* for rule_state"):
                await reader.save(file, rule_state=True)
