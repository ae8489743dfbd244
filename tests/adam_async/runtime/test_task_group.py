"""Tests of the task group for exit stacks."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import adam_async
from adam_async.runtime.task_group import StackedTaskGroup


def _contexts(error: BaseException | None) -> list[BaseException]:
    """The error and its contexts; an error that is its own context appears twice."""
    found: list[BaseException] = []
    while error is not None:
        again = any(error is other for other in found)
        found.append(error)
        if again:
            break
        error = error.__context__
    return found


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


async def _wait_cancelled() -> None:
    """Wait, as a role's report does, and meet a cancellation."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await _forever()


class _Role:
    """A block over an exit stack, which holds a task group and waits at its end."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group

    async def __aenter__(self) -> None:
        self.stack = AsyncExitStack()
        await self.stack.enter_async_context(self.group)
        self.stack.callback(self.group.create_task(_forever()).cancel)
        self.stack.push_async_callback(_wait_cancelled)

    async def __aexit__(self, *error: Any) -> bool | None:
        try:
            return await self.stack.__aexit__(*error)
        except asyncio.CancelledError as left:
            self.contexts = _contexts(left)
            raise


async def _contexts_of(group: asyncio.TaskGroup) -> list[BaseException]:
    """Cancel a block in a role with the group, and cancel it again as the role waits; return the contexts."""
    role = _Role(group)

    async def block() -> None:
        async with role:
            await _wait_cancelled()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.get_running_loop().create_task(block())
    return role.contexts


async def test_a_second_cancellation_never_becomes_its_own_context() -> None:
    contexts = await _contexts_of(StackedTaskGroup())
    assert len(contexts) == len(set(map(id, contexts)))


async def test_the_group_of_asyncio_makes_a_second_cancellation_its_own_context() -> None:
    """The reason for this class. If the test fails, then Python is repaired, and the class can go."""
    first, second = await _contexts_of(asyncio.TaskGroup())
    assert first is second


async def test_an_error_of_a_task_still_ends_the_block() -> None:
    async def fail() -> None:
        raise ValueError("of the task")

    with pytest.raises(ExceptionGroup) as group:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(StackedTaskGroup())
            tasks.create_task(fail())
            await asyncio.get_running_loop().create_future()
    assert [str(error) for error in group.value.exceptions] == ["of the task"]


async def test_an_error_of_the_block_is_wrapped_as_asyncio_does() -> None:
    with pytest.raises(ExceptionGroup) as group:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(StackedTaskGroup())
            raise ValueError("of the block")
    assert [str(error) for error in group.value.exceptions] == ["of the block"]


async def test_a_cancelled_block_ends_its_tasks_and_stays_cancelled() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async def block() -> None:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(StackedTaskGroup())
            group.create_task(work())
            await asyncio.sleep(0)
            await _wait_cancelled()

    task = asyncio.get_running_loop().create_task(block())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert task.cancelled()


def test_each_exit_stack_of_the_product_holds_this_group() -> None:
    sources = Path(adam_async.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "context(asyncio.TaskGroup())" in path.read_text()] == []
