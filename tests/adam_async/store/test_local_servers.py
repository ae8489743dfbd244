"""The servers of one loop for the address ``local``."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from adam_async.store import local_servers as module
from adam_async.store.local_servers import local_servers
from tests.adam_async.runs import turns


async def test_a_folder_is_opened_again_once_its_earlier_servers_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()
    real = module.parameter_server

    @asynccontextmanager
    async def slow_to_end(place: Any, *, folder: Path) -> AsyncIterator[Any]:
        async with real(place, folder=folder) as server:
            yield server
            ending.set()
            await may_end.wait()

    async def first() -> None:
        async with local_servers(tmp_path):
            pass

    async def second() -> dict[str, Any]:
        async with ParameterStore.open(
            "local", {"w": np.zeros(3)}, rule=Sgd(rate=1.0), dir=tmp_path
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
