"""A store's programs: open, join, push, pull, assign, save and delete, in one loop and over sockets."""

import asyncio
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adam_async import Adagrad, Adam, ArraySpec, Factors, ParameterStore, Sgd, StoreError
from adam_async.store.values import RefusedShard
from tests.adam_async.runs import until
from tests.adam_async.store.servers import servers, store_servers

WHERE = ("local", "tcp")


class Servers:
    """Servers of a test, at ``local`` or over sockets."""

    def __init__(self, kind: str, count: int = 2) -> None:
        self._servers = servers(count) if kind == "tcp" else None

    async def __aenter__(self) -> str:
        return await self._servers.__aenter__() if self._servers is not None else "local"

    async def __aexit__(self, *error: object) -> None:
        if self._servers is not None:
            await self._servers.__aexit__(None, None, None)


@pytest.mark.parametrize("kind", WHERE)
async def test_the_program_of_the_contract_runs_as_written(kind: str, tmp_path: Path) -> None:
    arrays = {"w": np.ones((3, 2), np.float32), "b": np.zeros(3)}
    async with (
        Servers(kind) as where,
        ParameterStore.open(where, arrays, name="model-7", rule=Sgd(rate=0.5)) as store,
    ):
        values = await store.pull()
        pushed = await store.push({"w": np.ones((3, 2), np.float32)}, read=values)
        assert (pushed.versions, pushed.refused) == ({"w": 1}, ())
        activations, errors = np.ones((4, 2), np.float32), np.ones((4, 3), np.float32)
        values = await store.push_pull({"w": Factors(activations, errors)}, read=values.read)
        np.testing.assert_array_equal(values["w"], np.full((3, 2), 1 - 0.5 - 0.5 * 4))
        mine = np.zeros((3, 2), np.float32)
        await store.pull(["w"], out={"w": mine})
        np.testing.assert_array_equal(mine, values["w"])
        await store.tick()
        await store.assign({"b": np.arange(3.0)})
        await store.push({"b": np.ones(3)}, rate=0.25)
        await store.settled()
        file = await store.save(tmp_path / "model.safetensors")
        saved = load_file(file)
        np.testing.assert_array_equal(saved["b"], np.arange(3.0) - 0.25)
        np.testing.assert_array_equal(saved["w"], mine)

        joined = await ParameterStore.open(where, name="model-7")
        try:
            assert joined.arrays == {"w": ArraySpec((3, 2)), "b": ArraySpec((3,), "float64")}
            np.testing.assert_array_equal((await joined.pull(["b"]))["b"], saved["b"])
        finally:
            await joined.close()


@pytest.mark.parametrize("kind", WHERE)
async def test_a_store_outlives_its_clients_until_one_deletes_it(kind: str) -> None:
    async with Servers(kind) as where, ParameterStore.open(where, {"x": np.zeros(1)}, name="other"):
        async with ParameterStore.open(where, {"x": np.ones(2)}, name="model", rule=Sgd(rate=1.0)) as store:
            await store.push({"x": np.ones(2)})
        async with ParameterStore.open(where, name="model") as again:
            np.testing.assert_array_equal((await again.pull())["x"], np.zeros(2))
            await again.delete()
            assert again.closed
        with pytest.raises(StoreError, match="store 'model' does not exist; stores of this cluster: 'other'"):
            await ParameterStore.open(where, name="model")


async def test_servers_free_the_shards_of_a_deleted_store() -> None:
    async with store_servers(1) as cluster:
        store = await ParameterStore.open(cluster.address, {"x": np.zeros(4)}, name="model")
        (served,) = cluster.servers[0].served.values()
        is_alive = weakref.ref(served)
        del served
        await store.delete()

        def is_freed() -> bool:
            gc.collect()
            return is_alive() is None

        await until(is_freed)


async def test_values_are_read_only_and_out_arrays_stay_writable() -> None:
    mine = np.zeros(2)
    async with ParameterStore.open("local", {"a": np.ones(2), "b": np.zeros(2)}) as store:
        values = await store.pull(out={"a": mine})
        for name in ("a", "b"):
            with pytest.raises(ValueError, match="read-only"):
                values[name][0] = 5
        mine[0] = 7
        assert mine.flags.writeable
        np.testing.assert_array_equal((await store.pull())["a"], np.ones(2))


async def test_arrays_of_every_layout_keep_their_values() -> None:
    base = np.arange(24.0).reshape(4, 6)
    arrays = {
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(2.5),
        "python scalar": 1.5,
        "strided": base[::2, ::-3],
        "fortran": np.asfortranarray(base),
        "transposed": base.astype(np.float32).T,
    }
    async with ParameterStore.open("local", arrays, rule=Sgd(rate=1.0), shard_bytes=32) as store:
        values = await store.pull()
        for name, array in arrays.items():
            found = values[name]
            assert (found.shape, found.dtype) == (np.shape(array), np.asarray(array).dtype), name
            np.testing.assert_array_equal(found, array)
        await store.push({name: np.asarray(array) for name, array in arrays.items()}, read=values)
        for name, found in (await store.pull()).items():
            np.testing.assert_array_equal(found, np.zeros_like(arrays[name]), err_msg=name)


NAMES = ("", " ", "a/b", "stores/0", "Größe", "数", "a\x00b", "x" * 1024, "\u202e", "__class__")


@pytest.mark.parametrize("kind", WHERE)
async def test_an_array_may_have_any_text_as_its_name(kind: str, tmp_path: Path) -> None:
    arrays = {name: np.full(2, float(number)) for number, name in enumerate(NAMES)}
    async with (
        Servers(kind) as where,
        ParameterStore.open(where, arrays, name="model", rule=Sgd(rate=1.0)) as store,
    ):
        await store.push({name: np.ones(2) for name in NAMES})
        values = await store.pull()
        assert tuple(values) == NAMES
        for number, name in enumerate(NAMES):
            np.testing.assert_array_equal(values[name], np.full(2, number - 1.0))
        saved = load_file(await store.save(tmp_path / "all.safetensors"))
        assert set(saved) == set(NAMES)


async def test_types_and_rules_mix_in_one_store() -> None:
    arrays = {"s": np.ones(3, np.float32), "a": np.ones(3), "m": np.ones((2, 2), np.float32)}
    rules = {"s": Sgd(rate=1.0), "a": Adagrad(rate=1.0), "m": Adam(rate=0.5)}
    async with ParameterStore.open("local", arrays, rule=rules) as store:
        await store.push(
            {"s": np.ones(3, np.float32), "a": np.full(3, 4.0), "m": np.ones((2, 2), np.float32)}
        )
        values = await store.pull()
    np.testing.assert_array_equal(values["s"], np.zeros(3))
    np.testing.assert_allclose(values["a"], np.zeros(3), atol=1e-6)  # the first step of Adagrad is the rate
    np.testing.assert_allclose(values["m"], np.full((2, 2), 0.5), atol=1e-6)


async def test_a_store_of_ten_thousand_arrays_is_pushed_and_pulled_whole() -> None:
    arrays = {f"a{number}": np.full(2, float(number)) for number in range(10_000)}
    async with ParameterStore.open("local", arrays, rule=Sgd(rate=1.0)) as store:
        await store.push(arrays)
        assert all(not array.any() for array in (await store.pull()).values())


@pytest.mark.parametrize("shard_bytes", [16, 48, 1 << 20])
async def test_factors_reach_arrays_whose_rows_are_cut_over_shards(shard_bytes: int) -> None:
    rng = np.arange(60.0)
    activations, errors = rng[:24].reshape(4, 6), rng[24:44].reshape(4, 5)
    async with (
        servers(3) as where,
        ParameterStore.open(
            where, {"w": np.zeros((5, 6))}, name="model", rule=Sgd(rate=1.0), shard_bytes=shard_bytes
        ) as store,
    ):
        await store.push({"w": Factors(activations, errors)})
        np.testing.assert_allclose((await store.pull())["w"], -(errors.T @ activations), rtol=1e-13)


async def test_gradients_whose_squares_overflow_are_pushed_without_a_warning() -> None:
    async with ParameterStore.open("local", {"w": np.zeros(3, np.float32)}, rule=Sgd(rate=1.0)) as store:
        values = await store.push_pull({"w": np.full(3, 1e30, np.float32)})
        np.testing.assert_array_equal(values["w"], np.full(3, -1e30, np.float32))


async def test_a_failure_ends_a_call_that_waits_and_a_cancelled_one_stays_cancelled() -> None:
    async with ParameterStore.open("local", {"w": np.zeros(3)}, rule=Sgd(rate=1.0)) as store:
        waiting = asyncio.create_task(store.push_pull({"w": np.ones(3)}))
        cancelled = asyncio.create_task(store.push({"w": np.ones(3)}))
        await asyncio.sleep(0)
        cancelled.cancel()
        store._link.fail(StoreError("the client failed"))
        with pytest.raises(StoreError, match="the client failed"):
            await waiting
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(StoreError, match="the client failed"):
            await store.settled()


async def test_concurrent_calls_are_ordered_as_called() -> None:
    async with ParameterStore.open("local", {"w": np.zeros(4)}, rule=Sgd(rate=1.0)) as store:
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(store.assign({"w": np.full(4, float(number))}))
                group.create_task(store.push({"w": np.ones(4)}))
            last = group.create_task(store.pull())
        np.testing.assert_array_equal(last.result()["w"], np.full(4, 38.0))


async def test_the_staleness_of_a_push_counts_from_what_it_read_or_else_from_the_newest_version_seen() -> (
    None
):
    async with (
        store_servers(1) as cluster,
        ParameterStore.open(cluster.address, {"w": np.zeros(1)}, name="model", rule=Sgd(rate=1.0)) as one,
        ParameterStore.open(cluster.address, name="model") as two,
    ):
        values = await one.pull()
        for _ in range(3):
            await two.push({"w": np.ones(1)})
        await one.push({"w": np.ones(1)}, read=values)  # behind three pushes
        await one.push({"w": np.ones(1)}, read=values.read)
        assert (await one.push({"w": np.ones(1)})).versions == {"w": 6}
        await two.push({"w": np.ones(1)})  # it has seen version 3
        ((shard,),) = [state.shards.values() for state in cluster.states()]
        assert shard.tables.staleness_of == {0: {3: 1, 4: 1, 0: 1}, 1: {0: 3, 3: 1}}


async def test_shards_whose_product_is_not_finite_are_refused_and_named_and_the_others_change() -> None:
    errors = np.array([[1.0, 1e200, 1.0]])  # of three rows, each a shard
    async with ParameterStore.open(
        "local", {"w": np.zeros((3, 8))}, rule=Sgd(rate=1e-200), shard_bytes=64
    ) as store:
        pushed = await store.push({"w": Factors(np.full((1, 8), 1e200), errors)})
        assert pushed.refused == (RefusedShard(name="w", start=8, stop=16),)
        np.testing.assert_array_equal((await store.pull())["w"], [[-1.0] * 8, [0.0] * 8, [-1.0] * 8])
        pushed = await store.push({"w": np.full((3, 8), 1e300)}, rate=1e12)
        assert [part.start for part in pushed.refused] == [0, 8, 16]


async def test_several_clients_of_one_loop_lose_no_push() -> None:
    async def work(where: str) -> None:
        async with ParameterStore.open(where, {"w": np.zeros(8)}, name="model", rule=Sgd(rate=1.0)) as store:
            for _ in range(25):
                await store.push({"w": np.ones(8)})

    async with (
        servers(2) as where,
        ParameterStore.open(where, {"w": np.zeros(8)}, name="model", rule=Sgd(rate=1.0)) as store,
    ):
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(work(where))
        np.testing.assert_array_equal((await store.pull())["w"], np.full(8, -100.0))


async def test_a_cancelled_push_finishes_behind_and_settled_waits_for_it() -> None:
    async with ParameterStore.open("local", {"w": np.zeros(4)}, rule=Sgd(rate=1.0)) as store:
        async with asyncio.TaskGroup() as group:
            pushes = [group.create_task(store.push({"w": np.ones(4)})) for _ in range(3)]
            await asyncio.sleep(0)
            for push in pushes:
                push.cancel()
        await store.settled()
        pushed = await store.push({"w": np.ones(4)})
        assert pushed.versions["w"] >= 1
        np.testing.assert_array_equal((await store.pull())["w"], np.full(4, -float(pushed.versions["w"])))


async def test_a_cancelled_open_leaves_no_member_and_the_next_one_works() -> None:
    async with servers(1) as where:
        async with asyncio.TaskGroup() as group:
            tries = [group.create_task(_open_and_close(where)) for _ in range(5)]
            for steps, attempt in enumerate(tries):
                for _ in range(steps * 20):
                    await asyncio.sleep(0)
                attempt.cancel()
        async with ParameterStore.open(where, {"w": np.zeros(2)}, name="last") as store:
            assert list(await store.pull()) == ["w"]


async def _open_and_close(where: str) -> None:
    async with ParameterStore.open(where, {"w": np.zeros(2)}, name="model"):
        pass


@pytest.mark.parametrize("call", ["pull", "push", "push_pull", "close"])
async def test_a_call_in_another_event_loop_is_refused_with_the_way_to_call(call: str) -> None:
    async with ParameterStore.open("local", {"w": np.zeros(3)}, rule=Sgd(rate=1.0)) as store:

        async def use() -> None:
            arguments = () if call in ("pull", "close") else ({"w": np.ones(3)},)
            await getattr(store, call)(*arguments)

        def elsewhere() -> None:
            asyncio.run(use())

        with pytest.raises(StoreError, match="was opened in another event loop: call it there"):
            await asyncio.to_thread(elsewhere)
        assert (await store.pull())["w"].tolist() == [0.0, 0.0, 0.0]


def test_a_store_whose_event_loop_has_ended_says_so_and_closes() -> None:
    async def opened() -> ParameterStore:
        return await ParameterStore.open("local", {"w": np.zeros(3)}, rule=Sgd(rate=1.0))

    store = asyncio.run(opened())

    async def use() -> None:
        with pytest.raises(StoreError, match="ended with its event loop, or its task was cancelled: open"):
            await store.pull()
        await store.close()

    asyncio.run(use())


async def test_a_rule_takes_numbers_of_numpy() -> None:
    rule = Sgd(rate=np.linspace(0.5, 1.0, 2)[1], momentum=np.float32(0.5))  # type: ignore[arg-type]
    async with ParameterStore.open("local", {"w": np.zeros(2, np.float32)}, rule=rule) as store:
        await store.push({"w": np.ones(2, np.float32)})
        assert (await store.pull())["w"].tolist() == [-1.0, -1.0]
