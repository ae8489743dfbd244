"""The servers of one loop for the address ``local``."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from adam_async.store import opening as module
from adam_async.store.opening import local_servers
from tests.adam_async.runs import turns


async def test_a_folder_is_opened_again_once_its_earlier_servers_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()
    real = module.parameter_server

    @asynccontextmanager
    async def slow_to_end(place: Any, **more: Any) -> AsyncIterator[Any]:
        async with real(place, **more) as server:
            yield server
            ending.set()
            await may_end.wait()

    async def first() -> None:
        async with local_servers(tmp_path):
            pass

    async def second() -> dict[str, Any]:
        async with ParameterStore.open(
            "local", {"w": np.zeros(3)}, name="model", rule=Sgd(rate=1.0), dir=tmp_path
        ) as store:
            return dict(await store.pull())

    monkeypatch.setattr(module, "parameter_server", slow_to_end)
    async with asyncio.TaskGroup() as group:
        group.create_task(first())
        await ending.wait()
        opening = group.create_task(second())
        await turns(100)
        assert not opening.done()
        may_end.set()
    assert opening.result()["w"].tolist() == [0.0, 0.0, 0.0]


async def test_a_loop_without_open_stores_has_no_servers(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with local_servers(tmp_path), local_servers():
        assert set(module._OF_LOOP[loop]) == {tmp_path, None}
    assert loop not in module._OF_LOOP


async def test_local_stores_without_a_name_share_nothing_and_end_alone() -> None:
    loop, rule = asyncio.get_running_loop(), Sgd(rate=1.0)
    async with ParameterStore.open("local", {"w": np.zeros(2)}, rule=rule) as one:
        async with ParameterStore.open("local", {"w": np.ones(2)}, rule=rule) as other:
            await one.push({"w": np.ones(2)})
            assert [(await each.pull())["w"].tolist() for each in (one, other)] == [[-1.0] * 2, [1.0] * 2]
            assert (one.clients, other.clients, len(module._OF_LOOP[loop])) == (1, 1, 2)
        assert len(module._OF_LOOP[loop]) == 1


async def test_a_client_joins_a_store_without_a_name_by_the_name_that_it_got() -> None:
    async with (
        ParameterStore.open("local", {"w": np.ones(2)}) as one,
        ParameterStore.open("local", name=one.name) as other,
    ):
        await one.assign({"w": np.full(2, 3.0)})
        assert (await other.pull())["w"].tolist() == [3.0] * 2


async def test_a_deleted_store_does_not_come_back_from_the_store_that_it_was_restored_from(
    tmp_path: Path,
) -> None:
    async with ParameterStore.open("local", {"w": np.ones(3)}, name="model", dir=tmp_path) as store:
        await store.push({"w": np.ones(3)})
    async with ParameterStore.open("local", name="model", dir=tmp_path) as store:
        await store.delete()
    async with ParameterStore.open("local", {"w": np.zeros(3)}, name="model", dir=tmp_path) as store:
        np.testing.assert_array_equal((await store.pull())["w"], np.zeros(3))


async def test_a_deletion_leaves_stores_of_other_names_on_the_disk(tmp_path: Path) -> None:
    for name in ("one", "two"):
        async with ParameterStore.open("local", {"w": np.ones(3)}, name=name, dir=tmp_path):
            pass
    async with ParameterStore.open("local", name="one", dir=tmp_path) as store:
        await store.delete()
    async with ParameterStore.open("local", name="two", dir=tmp_path) as store:
        np.testing.assert_array_equal((await store.pull())["w"], np.ones(3))
