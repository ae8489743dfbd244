"""A task group for an exit stack: it returns the error that it gets, and does not raise it again.

`asyncio.TaskGroup` raises the `CancelledError` of its block anew. Below an `AsyncExitStack` this is harmful.
Suppose that the block fails, and a cancellation arrives while a later entry of the stack waits, such as the
report of a role that leaves. The group then raises this second error twice, and the stack makes the error the
context of itself. The next stack outside looks for the end of the contexts and finds none: it runs in a loop
without an await, and the process hangs. Two roles of one cluster that fail one after the other are enough.
"""

import asyncio
from types import TracebackType


class StackedTaskGroup(asyncio.TaskGroup):
    """An `asyncio.TaskGroup` for `AsyncExitStack.enter_async_context`."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseException as raised:
            # Without a raise here the stack goes on with the error that it gave to the group.
            if raised is not error:
                raise
