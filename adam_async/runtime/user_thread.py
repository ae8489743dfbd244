"""A thread for code of the user, such as the import of a module, which may block or hang.

The event loop stays free, because a role with a blocked loop sends no heartbeat and is reported lost.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from adam_async.errors import DeadlineExceeded

_Made = TypeVar("_Made")


async def on_user_thread(work: Callable[[], _Made], what: str, *, within_s: float) -> _Made:
    """Run a function of the user on a thread of its own, and return its result.

    If the function hangs, or its caller is cancelled, the thread may remain until the process ends.

    Args:
        what: Name of the wait.
        within_s: Deadline, in seconds.

    Raises:
        DeadlineExceeded: The function took longer.
        BaseException: Errors of the function.
    """
    made: Future[_Made] = Future()
    made.set_running_or_notify_cancel()  # a cancelled wait then cannot cancel the future

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:  # user code may raise anything
            made.set_exception(error)

    Thread(target=run, name="user-code", daemon=True).start()
    try:
        async with asyncio.timeout(within_s) as deadline:
            return await asyncio.wrap_future(made)
    except TimeoutError:
        if not deadline.expired():
            raise  # of the function
        raise DeadlineExceeded(what, within_s) from None
