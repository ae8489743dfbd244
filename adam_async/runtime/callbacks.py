"""Callbacks of an event loop: an error in a callback ends its block, or its process's command.

Theory of operation
-------------------
The loop calls a callback, so no caller handles its error: the loop passes the error to its exception handler
and continues. A role that missed one callback may wait for ever for the next. Two parts prevent that:

- `Callbacks` runs the callbacks of one block. The block has a task that waits for `failure`. The first error
  ends that task, and the task group ends the block. The loop may belong to a host program.
- `ending_on_errors` installs an exception handler in a loop that this package owns. The handler logs every
  error. A callback's first error cancels the command's task and replaces its result.

A link closes itself after an error in its callbacks (`transport/link.py`); tasks report errors to their
groups. The handler only logs these two kinds of errors.
"""

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

REPORTED = frozenset({"task", "future"})
"""Keys of a loop's report about an error that a task group or an awaiting task reports too."""

CONTAINED = frozenset({"protocol", "transport", "socket"})
"""Keys of a loop's report about an error that ends only one connection."""


class Callbacks:
    """The callbacks of one block. Runs functions as callbacks; an error in one ends the block.

    Args:
        name: Name of the block's owner, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed = asyncio.Event()
        self._error: Exception | None = None

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback in the next iteration of the running loop."""
        asyncio.get_running_loop().call_soon(self.run, callback, *args)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Run a callback after a delay in seconds. Returns the handle that cancels the callback."""
        return asyncio.get_running_loop().call_later(delay_s, self.run, callback, *args)

    def run(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback now. Never raises an `Exception`: see `fail`."""
        try:
            callback(*args)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the block with an error; the first error counts, and each error is logged with its place."""
        logger.error("%s: a callback raised %s", self._name, described(error))
        if self._error is None:
            self._error = error
            self._failed.set()

    async def failure(self) -> NoReturn:
        """Wait for the first error and raise it. Cancelling loses nothing."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    def __repr__(self) -> str:
        return f"<Callbacks of {self._name} {'well' if self._error is None else repr(self._error)}>"


@contextmanager
def ending_on_errors() -> Iterator[None]:
    """Within the block, let an error in a callback of the running loop cancel the current task.

    Raises:
        Exception: The error of the first callback that raised, in place of the cancellation.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    raised: list[BaseException] = []

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error, and let the first one that no role handles cancel the task."""
        error = context.get("exception")
        if error is None or context.keys() & REPORTED:
            logger.info("%s: %s", context["message"], error)
            return
        logger.error("%s: %s", context["message"], described(error))
        if isinstance(error, Exception) and not context.keys() & CONTAINED:
            if not raised:
                task.cancel()
            raised.append(error)

    before = loop.get_exception_handler()
    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(before)
        if raised:
            raise raised[0]


def described(error: BaseException) -> str:
    """Describe an error in one line: its type, its text, and the file, line and function that raised it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else text
