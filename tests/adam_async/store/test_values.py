"""Messages of a push have the values in the order of their shards, and factors if these have fewer bytes."""

import asyncio
import gc
import os
import tracemalloc
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from adam_async import Adam, ParameterStore, Sgd, StoreError
from adam_async.model.kernels import make_batches
from adam_async.model.rules import AnyRule
from adam_async.parameter_server import sheets
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.shard import MOST_LOST, FamilyMemory
from adam_async.run.arrays import Factors
from adam_async.run.shard_table import assign_buckets, shard_table
from adam_async.run.store_record import NUM_BUCKETS, PARAMETERS, SHEETS, ArrayRecord
from adam_async.store.layout import FactorMessage, StoreLayout
from adam_async.store.values import MOST_BUFFERS, PushBuffers, PushMessages
from adam_async.store.vectors import Combine
from tests.adam_async.runs import until
from tests.adam_async.store.servers import StoreServers, servers, store_servers
from transport import Region
from transport.config import LinkKind
from transport.shared import SharedLink

SHAPES = {"scalar": (), "row": (7,), "wide": (3, 5), "split": (9, 4), "deep": (2, 3, 2)}
ARRAYS = [ArrayRecord(name, shape, "float32", 0) for name, shape in SHAPES.items()]
TABLE = shard_table(ARRAYS, shard_bytes=64)


def values_of(name: str, order: str) -> np.ndarray:
    first = 100 * list(SHAPES).index(name)
    values = np.arange(first, first + int(np.prod(SHAPES[name])), dtype=np.float32).reshape(SHAPES[name])
    return {"C": values, "F": np.asfortranarray(values), "strided": np.repeat(values, 2, -1)[..., ::2]}[
        order if values.ndim else "C"
    ]


@settings(deadline=None)
@given(
    names=st.lists(st.sampled_from(list(SHAPES)), unique=True, min_size=1),
    orders=st.lists(st.sampled_from(["C", "F", "strided"]), min_size=5, max_size=5),
    rates=st.dictionaries(st.sampled_from(list(SHAPES)), st.sampled_from([0.5, 2.0])),
    servers=st.integers(1, 2),
    is_subclass=st.booleans(),
)
def test_each_shard_of_a_push_has_its_values_and_its_rate(names, orders, rates, servers, is_subclass):
    layout = StoreLayout(ARRAYS, TABLE, [f"ps-{number % servers}" for number in range(NUM_BUCKETS)])
    gradients = {name: values_of(name, order) for name, order in zip(names, orders, strict=False)}
    if is_subclass:
        gradients[names[0]] = np.ma.getdata(gradients[names[0]]).view(type("Own", (np.ndarray,), {}))
    rates = {name: rate for name, rate in rates.items() if name in gradients}
    plan, messages = PushMessages(layout, (0.1,), is_summed=False).messages(
        gradients, rates or None, 1, False
    )
    assert plan.messages == tuple(message.shards for message in messages)
    found = {}
    for message in messages:
        (flat,) = message.tensors
        at = 0
        for shard in message.shards.shards:
            spec = TABLE.shards[shard]
            found[shard] = spec.tensor, flat[at : at + spec.size].tolist(), message.rate
            at += spec.size
        assert at == flat.size
    assert found == {
        spec.id: (
            name,
            values_of(name, "C").reshape(-1)[spec.start : spec.stop].tolist(),
            rates.get(name, 0.1),
        )
        for name in names
        for spec in TABLE.by_tensor[name]
    }


def test_memory_of_messages_is_reused_after_their_last_view_and_never_before():
    layout = StoreLayout(ARRAYS, TABLE, ["ps-0"] * NUM_BUCKETS)
    maker = PushMessages(layout, (0.1,), is_summed=False)

    def gathered(value):
        gradients = {name: np.full(SHAPES[name], value, np.float32) for name in ("row", "deep", "scalar")}
        (message,) = maker.messages(gradients, None, 1, False)[1]
        return message.tensors[0]

    open_pushes = [gathered(number) for number in range(MOST_BUFFERS + 2)]
    for number, values in enumerate(open_pushes):
        assert (values == number).all()
    memory = {values.ctypes.data for values in open_pushes[:MOST_BUFFERS]}
    open_pushes.clear()
    again = [gathered(number) for number in range(MOST_BUFFERS)]
    assert {values.ctypes.data for values in again} == memory


@pytest.mark.parametrize("weight", [1, 3])
def test_the_weight_of_a_push_scales_summed_gradients_and_leaves_the_callers_alone(weight):
    layout = StoreLayout(ARRAYS, TABLE, ["ps-0"] * NUM_BUCKETS)
    gradients = {name: values_of(name, "C") for name in SHAPES}
    _, messages = PushMessages(layout, (0.1,), is_summed=True).messages(gradients, None, weight, False)
    sums = sum(float(message.tensors[0].sum()) for message in messages)
    assert sums == weight * sum(float(values_of(name, "C").sum()) for name in SHAPES)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, values_of(name, "C"))


@pytest.mark.parametrize(("servers", "most"), [(1, 10), (2, 8), (4, 5)])
def test_factors_travel_up_to_the_number_of_rows_with_the_bytes_of_the_product(servers, most):
    # Shards of two rows, and all activations to each server: K * (servers * 16 + 32) values against 512.
    arrays = [ArrayRecord("w", (32, 16), "float64", 0, "auto")]
    table = shard_table(arrays, shard_bytes=256)
    layout = StoreLayout(arrays, table, assign_buckets(table, [f"ps-{n}" for n in range(servers)]))
    random = np.random.default_rng(0)
    for count in (most, most + 1):
        factors = Factors(random.normal(size=(count, 16)), random.normal(size=(count, 32)))
        _, found = PushMessages(layout, (0.1,), is_summed=False).messages({"w": factors}, None, 1, False)
        assert len({message.shards.server for message in found}) == servers
        is_factors = {isinstance(message.shards, FactorMessage) for message in found}
        assert is_factors == {count == most}
        assert sum(tensor.nbytes for message in found for tensor in message.tensors) <= 32 * 16 * 8


KINDS = ("local", "tcp", "shared")
MIB = 1 << 20
PUSHED = {
    "large": np.zeros((3, 300_000), np.float32),
    "b": np.ones(5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "c": np.ones((7, 3), np.float32),
    "double": np.zeros(100_003),
}
"""Arrays of one message, of several, of none, and of another type."""


def link_of(store: ParameterStore, server: str = "") -> SharedLink:
    connections = store._calls.connections
    link = connections[server or next(iter(connections))].channel.link
    assert isinstance(link, SharedLink)
    return link


@asynccontextmanager
async def opened(
    where: StoreServers,
    nbytes: int = MIB,
    *,
    name: str = "s",
    rule: AnyRule = Sgd(rate=0.5),  # noqa: B008
) -> AsyncIterator[ParameterStore]:
    arrays = {"w": np.zeros(nbytes // 4, np.float32)}
    async with ParameterStore.open(where.address, arrays, name=name, rule=rule, link="shared") as store:
        yield store


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [Sgd(rate=0.5), Adam(rate=0.5)], ids=repr)
@pytest.mark.parametrize("count", [1, 3])
async def test_values_are_those_of_ordinary_arrays(kind: str, rule: AnyRule, count: int) -> None:
    link: LinkKind = "shared" if kind == "shared" else "tcp"
    async with servers(count) as where:
        at = "local" if kind == "local" else where
        async with (
            ParameterStore.open(at, PUSHED, name="one", rule=rule, link=link) as one,
            ParameterStore.open(at, PUSHED, name="two", rule=rule, link=link) as two,
        ):
            gradients = await one.buffers()
            dice = np.random.default_rng(1)
            for step in range(6):
                for array in gradients.values():
                    array[...] = dice.standard_normal(array.shape)
                copies = {name: array.copy() for name, array in gradients.items()}
                rate = {"b": 0.25} if step == 4 else None
                found = await one.push_pull(gradients, rate=rate)
                expected = await two.push_pull(copies, rate=rate)
                for name in PUSHED:
                    np.testing.assert_array_equal(found[name], expected[name])
                assert gradients["c"][0, 0] == copies["c"][0, 0]


async def test_the_arrays_are_those_of_the_store_and_writable() -> None:
    async with ParameterStore.open("local", PUSHED, rule=Sgd()) as store:
        gradients = await store.buffers()
        assert list(gradients) == list(PUSHED)
        for name, array in gradients.items():
            assert (array.shape, array.dtype) == (PUSHED[name].shape, PUSHED[name].dtype)
            assert not array.any()
            assert array.flags.c_contiguous
            assert array.flags.writeable
            array[...] = 1
        assert all((array == 1).all() for array in gradients.values())
        some = await store.buffers(["c", "b"])
        assert list(some) == ["c", "b"]
        with pytest.raises(StoreError, match="no array 'q'"):
            await store.buffers(["q"])
        with pytest.raises(StoreError, match="sequence of names"):
            await store.buffers("b")
        gradients["b"][0] = np.nan
        with pytest.raises(StoreError, match="the value nan at index 0"):
            await store.push(gradients)
    with pytest.raises(StoreError, match="closed"):
        await store.buffers()


async def test_small_arrays_of_a_message_lie_in_a_row() -> None:
    small = {f"w{number}": np.zeros(number, np.float32) for number in range(1, 40)}
    async with ParameterStore.open("local", small, rule=Sgd()) as store:
        gradients = await store.buffers()
        assert isinstance(gradients, PushBuffers)
        for number, name in enumerate(small):
            gradients[name][:] = number
        (flat,) = gradients.flats
        assert flat is not None
        np.testing.assert_array_equal(flat, np.concatenate([gradients[name] for name in small]))


def resident_bytes() -> int:
    """The resident memory of this process, without that of files and shared memory."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("nbytes", "steps"),
    [
        (MIB, 50),
        (16 * MIB, 50),
        pytest.param(MIB, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
@pytest.mark.parametrize("fills", [True, False])
async def test_a_steady_push_copies_nothing_and_allocates_no_memory_for_payloads(
    nbytes: int, steps: int, fills: bool
) -> None:
    make_batches(Sgd(), np.dtype(np.float32), "auto")  # a server imports the kernels later, on a thread
    async with store_servers(1) as where, opened(where, nbytes) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        out = {"w": np.zeros(nbytes // 4, np.float32)} if fills else None
        for _ in range(5):
            await store.push_pull(gradients, out=out)
        (server,) = where.servers
        far = [link for link in server._traffic.links if isinstance(link, SharedLink)]
        blocks = sum(link._outbound.held_bytes for link in far)
        moved = sum(link.statistics().bytes_moved for link in far)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(10):
                await store.push_pull(gradients, out=out)
            gc.collect()
            before, resident = tracemalloc.get_traced_memory()[0], resident_bytes()
            tracemalloc.reset_peak()
            for _ in range(steps):
                await store.push_pull(gradients, out=out)
            gc.collect()
            after, peak = tracemalloc.get_traced_memory()
            grown = resident_bytes() - resident
        finally:
            tracemalloc.stop()
        assert after - before <= 64 << 10
        assert peak - before <= 256 << 10, "a payload was allocated in a step"
        assert grown <= MIB, "resident memory grows"
        assert link_of(store)._outbound.held_bytes == 0
        assert sum(link._outbound.held_bytes for link in far) <= blocks
        assert sum(link.statistics().bytes_moved for link in far) - moved < 64 << 10


async def test_memory_outlives_its_store_and_goes_with_the_last_array() -> None:
    async with store_servers(1) as where:
        async with opened(where) as store:
            array = (await store.buffers())["w"]
            array[:] = 1
            await store.push({"w": array})
            region = weakref.ref(array.base.base)  # type: ignore[union-attr]
        array += 1
        assert (array == 2).all()
        del array
        gc.collect()
        assert region() is None


async def test_without_descriptors_the_arrays_are_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    async with store_servers(1) as where, opened(where) as store:
        monkeypatch.setattr(os, "memfd_create", refuse)
        gradients = await store.buffers()
        monkeypatch.undo()
        gradients["w"][:] = 1
        values = await store.push_pull(gradients)
        assert (values["w"] == -0.5).all()


async def test_two_clients_push_the_same_memory() -> None:
    async with store_servers(1) as where, opened(where) as one, opened(where, name="t") as two:
        gradients = await one.buffers()
        gradients["w"][:] = 1
        for store in (one, two):
            values = await store.push_pull(dict(gradients))
            assert (values["w"] == -0.5).all()
            assert link_of(store)._outbound.held_bytes == 0


async def test_a_client_that_changes_its_gradient_during_the_push_is_counted_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with store_servers(1) as where, opened(where) as store:
        gradients = await store.buffers()
        array = gradients["w"]
        array[:] = 1
        await store.push(gradients)
        apply = Applier.apply_changing

        def changed(*arguments: object) -> bool:
            array[40_000] = np.inf  # in the second block: the first one is applied
            return apply(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Applier, "apply_changing", changed)
        outcome = await store.push(gradients)  # sent again over the next link, and acknowledged as applied
        assert outcome.versions == {"w": 2}
        monkeypatch.undo()
        values = (await store.pull())["w"]
        assert np.isfinite(values).all()
        assert (values[: 1 << 15] == -1.0).all()
        assert (values[1 << 15 :] == -0.5).all()
        assert sum(state.bundle.cut_pushes for state in where.states()) == 1
        array[:] = 1
        assert (await store.push_pull(gradients))["w"][0] == -1.5


async def test_a_gradient_that_is_not_finite_on_its_arrival_is_refused_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with store_servers(1) as where, opened(where) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        await store.push(gradients)
        monkeypatch.setattr(
            "adam_async.store.values.isfinite", lambda _: True
        )  # a client that does not check
        gradients["w"][7] = np.nan
        outcome = await store.push(gradients)
        assert [each.name for each in outcome.refused] == ["w"]
        assert ((await store.pull())["w"] == -0.5).all()
        assert sum(state.bundle.cut_pushes for state in where.states()) == 0


@pytest.mark.parametrize(
    ("values", "clients", "options"),
    [
        (MIB // 4, 2, {"consistency": "bsp", "replicas": 2}),
        (MIB // 4, 1, {"copies": 3, "servers": 1}),
        (2 * MIB, 1, {"shard_bytes": 16 * MIB}),
    ],
    ids=["a sum", "copies", "one shard of 8 MiB"],
)
async def test_a_gradient_that_a_server_still_needs_is_copied_before_the_push_returns(
    values: int, clients: int, options: dict[str, Any]
) -> None:
    arrays = {"w": np.zeros(values, np.float32)}
    async with store_servers(3) as where, AsyncExitStack() as stack:
        stores, gradients = [], []
        for _ in range(clients):
            opening = ParameterStore.open(
                where.address, arrays, name="s", rule=Sgd(rate=1.0), link="shared", **options
            )
            stores.append(await stack.enter_async_context(opening))
            gradients.append(await stores[-1].buffers())
        for step in range(1, 4):
            for store, mine in zip(stores, gradients, strict=True):
                mine["w"][:] = step
                await store.push(mine)
                mine["w"][:] = np.nan  # as a program may do once the push has returned
            for store in stores:
                await store.tick()
        assert ((await stores[0].pull())["w"] == -6).all()


async def published(where: StoreServers, store: ParameterStore, gradients: PushBuffers) -> FamilyMemory:
    """Push and pull until the server has both sheets, and return the memory of the store."""
    while True:
        await store.push_pull(gradients)
        (state,) = [each for each in where.states() if each.store == store._calls.store.id]
        memory = next(iter(state.shards.values())).memory
        assert memory is not None
        if len(memory.sheets) == SHEETS:
            return memory
        await asyncio.sleep(0)


def address_of(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("rule", [Sgd(rate=0.5), Adam(rate=0.5)], ids=repr)
@pytest.mark.parametrize("nbytes", [64 << 10, MIB, 5 * MIB])
async def test_values_are_read_where_the_server_wrote_them(nbytes: int, rule: AnyRule) -> None:
    async with store_servers(1) as where, opened(where, nbytes, rule=rule) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        memory = await published(where, store, gradients)
        await store.push_pull(gradients)
        values = await store.push_pull(gradients)
        link = link_of(store)
        moved, blocks = link.statistics().bytes_moved, len(link._inbound._regions)
        places = set()
        for _ in range(6):
            before, copy = values["w"], values["w"].copy()
            values = await store.push_pull(gradients)
            places.add(address_of(values["w"]))
            assert not values["w"].flags.writeable
            assert (before == copy).all(), "values changed under their reader"
            assert not (before == values["w"]).any()
        assert len(places) == SHEETS
        assert link.statistics().bytes_moved - moved < 16 << 10
        assert len(link._inbound._regions) == blocks
        (server,) = where.servers
        far = [each for each in server._traffic.links if isinstance(each, SharedLink)]
        assert any(sheet.region is not None and sheet.region.loans for sheet in memory.sheets)
        assert sum(each._outbound.held_bytes for each in far) <= 2 * max(nbytes, 4 * MIB)
        again = await store.pull()
        assert address_of(again["w"]) == address_of(values["w"])
        np.testing.assert_array_equal(again["w"], values["w"])


async def test_a_reader_that_keeps_values_gets_copies_until_it_lets_go() -> None:
    async with store_servers(1) as where, opened(where, 5 * MIB) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        memory = await published(where, store, gradients)
        begin = float((await store.pull())["w"][0])
        kept = [(await store.push_pull(gradients))["w"] for _ in range(6)]
        for number, array in enumerate(kept, 1):
            assert (array == begin - 0.5 * number).all()
        assert memory.private.shards, "no values went on in private memory while both sheets were lent"
        del array
        kept.clear()
        for _ in range(3):
            values = await store.push_pull(gradients)
        assert (values["w"] == begin - 0.5 * 9).all()
        assert memory.private.shards == 0


async def with_a_lane(where: StoreServers, store: ParameterStore) -> tuple[PushBuffers, np.ndarray]:
    """Publish the values, make the lane of pushes without answers, and return the gradients and values."""
    gradients = await store.buffers()
    gradients["w"][:] = 1
    await published(where, store, gradients)
    await store.push(gradients)
    return gradients, (await store.pull())["w"]


async def test_values_outlive_their_store_and_later_pushes() -> None:
    async with store_servers(1) as where, opened(where, 5 * MIB) as other:
        async with ParameterStore.open(where.address, name="s", link="shared") as store:
            gradients = await other.buffers()
            gradients["w"][:] = 1
            await published(where, other, gradients)
            values = (await store.pull())["w"]
            copy = values.copy()
        for _ in range(6):
            await other.push_pull(gradients)
        assert (values == copy).all()
        memory = await published(where, other, gradients)
        assert all(sheet.region is not None and not sheet.region.is_lost for sheet in memory.sheets)


async def test_a_push_of_a_value_that_is_not_finite_leaves_published_values() -> None:
    async with store_servers(1) as where, opened(where) as store:
        gradients, before = await with_a_lane(where, store)
        with pytest.MonkeyPatch.context() as patch:  # a client that does not check
            patch.setattr("adam_async.store.values.isfinite", lambda _: True)
            gradients["w"][-1] = np.inf
            outcome = await store.push(gradients)
        assert [each.name for each in outcome.refused] == ["w"]
        np.testing.assert_array_equal((await store.pull())["w"], before)


async def test_a_gradient_that_changes_while_new_values_are_written_is_refused_whole_or_applied_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with store_servers(1) as where, opened(where) as store:
        gradients, before = await with_a_lane(where, store)
        (served,) = where.servers[0].served.values()
        (kind,) = {type(applier.batches) for applier in served._appliers.values()}
        step, bad = kind.step, np.inf

        def changed(*arguments: object) -> bool:
            gradients["w"][40_000:] = bad  # in the second block
            return step(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(kind, "step", changed)
        outcome = await store.push(gradients)
        assert [each.name for each in outcome.refused] == ["w"]
        np.testing.assert_array_equal((await store.pull())["w"], before)
        gradients["w"][:], bad = 1, 3.0
        await store.push(gradients)
        values = (await store.pull())["w"]
        assert (values[:40_000] == before[0] - 0.5).all()
        assert (values[40_000:] == before[0] - 1.5).all()
        assert sum(state.bundle.cut_pushes for state in where.states()) == 0


async def test_arrays_of_another_type_stay_where_they_are_as_values_move() -> None:
    arrays = {"w": np.zeros(MIB // 4, np.float32), "small": np.zeros(64, np.float64)}
    async with (
        store_servers(1) as where,
        ParameterStore.open(where.address, arrays, name="s", rule=Sgd(rate=0.5), link="shared") as store,
    ):
        gradients = {name: np.ones_like(array) for name, array in arrays.items()}
        (served,) = where.servers[0].served.values()
        number = since = 0
        while since < 4:  # pushes after the first move
            number, since = number + 1, since + any(memory.moves for memory in served._memories)
            values = await store.push_pull(gradients)
            assert all((values[name] == -0.5 * number).all() for name in arrays)
        assert sorted(memory.moves > 0 for memory in served._memories) == [False, True]


async def test_without_memory_for_sheets_values_are_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with store_servers(1) as where, opened(where) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1

        def refuse(*_: object, **__: object) -> NDArray[Any]:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(sheets, "AGAIN_S", 0.05)
        with monkeypatch.context() as patch:
            patch.setattr(Region, "allocate", refuse)
            while "copies the values of store" not in caplog.text:
                values = await store.push_pull(gradients)
            values = await store.push_pull(gradients)
        assert (values["w"] == values["w"][0]).all()
        await published(where, store, gradients)  # it tries again


# --- values while they are lent --------------------------------------------------------------


def memory_of(where: StoreServers, store: ParameterStore) -> FamilyMemory:
    (state,) = [each for each in where.states() if each.store == store._calls.store.id]
    memory = next(iter(state.shards.values())).memory
    assert memory is not None
    return memory


@pytest.mark.parametrize("rule", [Sgd(rate=0.5), Adam(rate=0.5)], ids=repr)
async def test_pins_and_saved_files_of_lent_values_are_those_of_their_moment(
    rule: AnyRule, tmp_path: Path
) -> None:
    async with store_servers(1, disks=tmp_path) as where, opened(where, rule=rule) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        await published(where, store, gradients)
        kept = []
        for number in range(3):
            kept += [(values := (await store.push_pull(gradients))["w"], values.copy())]
            before = (await store.pull())["w"].copy()
            async with asyncio.TaskGroup() as group:
                group.create_task(store.pin(f"pin-{number}"))
                group.create_task(store.save(tmp_path / f"file-{number}.safetensors"))
                pushes = [group.create_task(store.push_pull(gradients)) for _ in range(4)]
            after = pushes[-1].result()["w"]
            for found in (
                (await store.read_pin(f"pin-{number}"))["w"],
                load_file(tmp_path / f"file-{number}.safetensors")["w"],
            ):
                assert (found == found[0]).all(), "it has a part of a push"
                assert after[0] <= found[0] <= before[0]
        for values, copy in kept:
            np.testing.assert_array_equal(values, copy)


@pytest.mark.parametrize("count", [1, 2])
async def test_assigned_and_combined_values_leave_those_that_readers_have(count: int) -> None:
    async with store_servers(count) as where, opened(where, 5 * MIB) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        if count == 1:
            await published(where, store, gradients)
        else:
            for _ in range(20):
                await store.push_pull(gradients)
        await store.add_vector("v", like="w")
        kept = []
        for number in range(4):
            kept += [(values := (await store.pull())["w"], values.copy())]
            await store.assign({"w": np.full(len(values), float(number), np.float32)})
            kept += [(values := (await store.pull())["w"], values.copy())]
            await store.step([Combine("v", ((2.0, PARAMETERS),)), Combine(PARAMETERS, ((3.0, "v"),))])
            values = (await store.push_pull(gradients))["w"]
            assert (values == 6.0 * number - 0.5).all()
            kept.append((values, values.copy()))
        for values, copy in kept:
            np.testing.assert_array_equal(values, copy)


async def test_values_outlive_the_deletion_of_their_store_which_frees_all_others() -> None:
    async with store_servers(1) as where:
        async with opened(where) as store:
            gradients = await store.buffers()
            gradients["w"][:] = 1
            memory = await published(where, store, gradients)
            regions = [weakref.ref(sheet.region) for sheet in memory.sheets]
            values = (await store.push_pull(gradients))["w"]
            copy = values.copy()
            await store.delete()
            del memory
            await until(lambda: not where.states())
            assert (values == copy).all()
        gc.collect()
        assert (values == copy).all()
        assert [each() for each in regions] == [None, None]


async def test_a_lost_reader_keeps_its_values_and_its_sheet_is_replaced() -> None:
    async with store_servers(1) as where, opened(where) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        memory = await published(where, store, gradients)
        regions = {id(sheet.region): weakref.ref(sheet.region) for sheet in memory.sheets}
        for _ in range(3):
            async with ParameterStore.open(where.address, name="s", link="shared") as reader:
                values = (await reader.pull())["w"]
                copy = values.copy()
                link_of(reader).abort()
                await until(lambda: any(each.region.is_lost for each in memory.sheets))  # type: ignore[union-attr]
            while any(each.region.is_lost for each in memory.sheets) or len(memory.sheets) < SHEETS:  # type: ignore[union-attr]
                await store.push_pull(gradients)
                regions |= {id(sheet.region): weakref.ref(sheet.region) for sheet in memory.sheets}
            for _ in range(4):
                await store.push_pull(gradients)
            np.testing.assert_array_equal(values, copy)
        gc.collect()
        assert sum(each() is not None for each in regions.values()) == SHEETS
        assert len(memory._lost) <= MOST_LOST + 1


async def test_sheets_that_are_lost_while_others_are_allocated_are_replaced_once() -> None:
    async with store_servers(1) as where, opened(where) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        await store.push_pull(gradients)
        memory, (served,) = memory_of(where, store), where.servers[0].served.values()
        (group,) = served.state.bundle._groups.values()
        link = next(each for each in where.servers[0]._traffic.links if isinstance(each, SharedLink))
        for _ in range(4):
            memory.lacks_sheets = True
            served.sheets.publish(group, link)
        await until(lambda: not memory.allocates)
        assert len(memory.sheets) == SHEETS


@pytest.mark.parametrize("options", [{"consistency": "bsp", "replicas": 1}, {"copies": 2}])
async def test_a_store_whose_pushes_have_no_short_way_gets_no_sheets(options: dict[str, Any]) -> None:
    async with store_servers(2) as where:
        arrays = {"w": np.zeros(MIB // 4, np.float32)}
        opening = ParameterStore.open(where.address, arrays, name="s", link="shared", **options)
        async with opening as store:
            for _ in range(4):
                await store.push_pull({"w": np.ones(MIB // 4, np.float32)})
            for state in where.states():
                for shard in state.shards.values():
                    assert shard.memory is not None
                    assert not shard.memory.sheets
                    assert not shard.memory.allocates


PROGRAM = {
    "a": (300, 70),
    "b": (5000,),
    "c": (17,),
    "d": (40, 33, 5),
    "e": (1 << 19,),
    "f": (4097,),
    "g": (3000,),
}


@pytest.mark.parametrize("rule", [Sgd(rate=0.5), Sgd(rate=0.5, momentum=0.5), Adam(rate=0.1)], ids=repr)
@pytest.mark.parametrize(
    ("count", "seed"),
    [(1, 0), *(pytest.param(count, seed, marks=pytest.mark.thorough) for count in (1, 3) for seed in (1, 2))],
)
async def test_a_program_that_keeps_values_has_the_bits_of_one_over_tcp(
    rule: AnyRule, count: int, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    arrays = {name: dice.normal(size=shape).astype(np.float32) for name, shape in PROGRAM.items()}
    arrays["g"] = arrays["g"].astype(np.float64)
    async with AsyncExitStack() as stack:
        where = await stack.enter_async_context(store_servers(count))
        kinds: list[LinkKind] = ["shared", "tcp"]
        stores = [
            await stack.enter_async_context(
                ParameterStore.open(
                    where.address, arrays, name=kind, rule=rule, link=kind, shard_bytes=1 << 15
                )
            )
            for kind in kinds
        ]
        kept: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for _ in range(40):
            names = [name for name in arrays if dice.random() < 0.5] or ["a"]
            pushed: dict[str, Any] = {
                name: dice.normal(size=arrays[name].shape).astype(arrays[name].dtype) for name in names
            }
            kind = int(dice.integers(5))
            if kind == 1 and "a" in names:
                errors, inputs = dice.normal(size=(2, 300)), dice.normal(size=(2, 70))
                pushed["a"] = Factors(inputs.astype(np.float32), errors.astype(np.float32))
            found = []
            for store in stores:
                if kind == 0:
                    await store.assign(pushed)
                found.append(await (store.pull(names) if kind == 0 else store.push_pull(pushed)))
            for name in names:
                np.testing.assert_array_equal(found[0][name], found[1][name])
            kept += [(found[0][name], found[0][name].copy()) for name in names]
            while len(kept) > 20 or (kept and dice.random() < 0.3):
                kept.pop(int(dice.integers(len(kept))))
            assert all(np.array_equal(values, copy) for values, copy in kept), "values changed"


@pytest.mark.parametrize("call", ["pull", "push", "push_pull"])
async def test_cancelled_calls_leave_no_loan(call: str) -> None:
    dice = np.random.default_rng(1)
    async with store_servers(1) as where, opened(where, 5 * MIB) as store:
        gradients = await store.buffers()
        gradients["w"][:] = 1
        memory = await published(where, store, gradients)
        for _ in range(30):
            work = store.pull() if call == "pull" else getattr(store, call)(gradients)
            task = asyncio.create_task(work)
            for _ in range(int(dice.integers(12))):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        del task, work
        values = (await store.push_pull(gradients))["w"]
        assert (values == values[0]).all()
        del values
        gc.collect()
        await store.push(gradients)
        await until(
            lambda: not any(sheet.region.loans for sheet in memory.sheets if sheet.region is not None)
        )
