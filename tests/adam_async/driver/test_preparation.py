"""A part of the preparation ends with its result, with its error, or with the stop of the run."""

import asyncio

import pytest

from adam_async.driver.preparation import unless_stopped
from adam_async.errors import ConfigError, RunFailed


async def wait_for_ever(cancelled: list[str], begun: asyncio.Event) -> None:
    begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.append("cancelled")


async def test_without_a_stop_the_work_has_its_result() -> None:
    async def work() -> int:
        return 7

    assert await unless_stopped(work(), asyncio.Event()) == 7


async def test_a_stop_cancels_the_work_and_fails_the_run() -> None:
    stopping, cancelled = asyncio.Event(), list[str]()

    with pytest.raises(RunFailed, match="stopped before its first epoch"):
        await unless_stopped(wait_for_ever(cancelled, begun=stopping), stopping)
    assert cancelled == ["cancelled"]


async def test_an_error_of_the_work_leaves_the_caller_uncancelled() -> None:
    async def work() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        await unless_stopped(work(), asyncio.Event())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_cancelling_the_caller_cancels_the_work() -> None:
    cancelled, begun = list[str](), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        caller = group.create_task(unless_stopped(wait_for_ever(cancelled, begun), asyncio.Event()))
        await begun.wait()
        caller.cancel()
    assert caller.cancelled()
    assert cancelled == ["cancelled"]
