"""A child reads its orders from its stdin, and ends with that pipe or with its silence."""

import asyncio
import os
import select
import sys
from collections.abc import Iterator

import msgspec
import pytest

from adam_async.cluster.parent_pipe import Orders, Parent
from adam_async.errors import ConfigError
from adam_async.run.config import Waits


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The parent's end of the stdin of this process; the test closes it."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        yield writing


async def test_orders_are_the_first_line_and_the_end_of_the_pipe_is_the_end_of_the_parent(stdin: int) -> None:
    orders = Orders(token="", waits=Waits(), silence_s=30.0)
    os.write(stdin, msgspec.json.encode(orders) + b"\n\n\n")
    async with Parent() as parent:
        assert await parent.orders(Orders) == orders
        os.close(stdin)
        await parent.gone(orders.silence_s)


async def test_a_silent_pipe_is_a_lost_parent(stdin: int, caplog: pytest.LogCaptureFixture) -> None:
    async with Parent() as parent:
        await parent.gone(0.02)
    os.close(stdin)

    assert caplog.messages == ["the launching process is lost: it has sent nothing for 0.02 s"]


async def test_a_parent_that_writes_in_time_is_not_lost(stdin: int) -> None:
    loop = asyncio.get_running_loop()
    async with Parent() as parent, asyncio.timeout(20), asyncio.TaskGroup() as group:
        gone = group.create_task(parent.gone(0.8))
        begun_s = loop.time()
        while loop.time() - begun_s < 0.9:
            os.write(stdin, b"\n")
            assert not (await asyncio.wait({gone}, timeout=0.1))[0]
        os.close(stdin)


async def test_a_stall_of_the_child_is_no_silence_of_its_parent(stdin: int) -> None:
    async with Parent() as parent, asyncio.TaskGroup() as group:
        gone = group.create_task(parent.gone(0.2))
        await asyncio.wait({gone}, timeout=0.01)
        asyncio.get_running_loop().call_soon(_stall, 0.15, stdin)
        assert not (await asyncio.wait({gone}, timeout=0.05))[0]
        os.close(stdin)


def _stall(seconds: float, stdin: int) -> None:
    """Block the loop for some time, in which the parent writes."""
    reading, writing = os.pipe()
    select.select([reading], [], [], seconds)
    os.close(reading)
    os.close(writing)
    os.write(stdin, b"\n")


@pytest.mark.parametrize("line", [b"{}\n", b"no orders\n"])
async def test_an_invalid_line_is_no_orders(stdin: int, line: bytes) -> None:
    os.write(stdin, line)
    os.close(stdin)
    async with Parent() as parent:
        with pytest.raises(ConfigError, match="--supervised is for child processes: no orders on stdin"):
            await parent.orders(Orders)


async def test_a_closed_pipe_has_no_orders(stdin: int) -> None:
    os.close(stdin)
    async with Parent() as parent:
        assert await parent.orders(Orders) is None
