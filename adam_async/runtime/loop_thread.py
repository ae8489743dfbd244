"""A thread with an event loop, for programs without one: other threads run coroutines there, and wait.

Ctrl-C cancels the interrupted call. The thread is a daemon, so it does not keep its process alive.

User code, such as a module import, may block or hang, so it has a separate thread. The event loop stays free,
because a role with a blocked loop sends no heartbeat and is reported lost.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from threading import Thread
from typing import Any, TypeVar

import uvloop

from adam_async.errors import DeadlineExceeded
from adam_async.runtime.clock import Within
from adam_async.runtime.standard_streams import hold_descriptors

_T = TypeVar("_T")

CLOSE_S = 30.0
"""Deadline in seconds for the thread's end, and for the end of a cancelled call."""


class LoopThread:
    """A thread with an event loop, from construction until `end`."""

    def __init__(
        self, name: str, loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    ) -> None:
        hold_descriptors()
        self._loop = loop_factory()
        self._group: asyncio.TaskGroup
        self._ending = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            self._started.set()
            await self._ending.wait()

    def begin(
        self, work: Coroutine[Any, Any, _T], refusal: Exception, group: asyncio.TaskGroup | None = None
    ) -> "Call[_T]":
        """Begin to run a coroutine on the thread.

        Args:
            refusal: Error of the call if the thread or the group ends before the coroutine begins.
            group: Group of the coroutine's task; None for the thread's group.
        """
        call = Call(self, work, refusal)
        self._started.wait()
        if not self.call(call.start, self._group if group is None else group):
            call.refuse()
        return call

    def call(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Call a function on the loop, later. Returns False if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # closed
            return False
        return True

    def end(self) -> None:
        """End the thread after its present calls, and wait for it.

        Raises:
            DeadlineExceeded: The thread did not end within `CLOSE_S`.
        """
        self.call(self._ending.set)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"thread {self._thread.name} to end", CLOSE_S)


class Call(Future[_T]):
    """A coroutine on the thread, and the future of its outcome.

    A future of `asyncio.run_coroutine_threadsafe` is done as soon as it is cancelled; a `Call` only when the
    coroutine has ended.
    """

    def __init__(self, thread: LoopThread, work: Coroutine[Any, Any, _T], refusal: Exception) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # so that only the coroutine settles the call
        self._thread = thread
        self._work = work
        self._refusal = refusal
        self._task: asyncio.Task[None] | None = None

    def wait(self) -> _T:
        """Return the result. After an interrupt, cancel the coroutine, and wait up to `CLOSE_S` for it."""
        try:
            return self.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> bool:
        """Cancel the coroutine, and wait up to `CLOSE_S` for its end. Returns whether it has ended."""
        if self.cancel():
            wait([self], CLOSE_S)
        return self.done()

    def cancel(self) -> bool:
        """Cancel the coroutine; the call is done once it has ended. Returns False for an ended call."""
        return not self.done() and self._thread.call(self._cancel)

    # --- on the thread -------------------------------------------------------------------------

    def start(self, group: asyncio.TaskGroup) -> None:
        run = self._run()
        try:
            self._task = group.create_task(run, name=f"{threading.current_thread().name}/call")
        except RuntimeError:  # the group has ended meanwhile
            run.close()
            self.refuse()
            return
        self._task.add_done_callback(self._ended)

    def refuse(self) -> None:
        """End a call that did not begin."""
        self._work.close()
        self.set_exception(self._refusal)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            result = await self._work
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # also an interrupt that the caller's code raises here
            self.set_exception(error)
        else:
            self.set_result(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Settle a cancelled call, even if it had not begun."""
        if not self.done():
            self._work.close()
            self.set_exception(CancelledError())


_Made = TypeVar("_Made")


async def on_user_thread(work: Callable[[], _Made], what: str, *, within_s: float) -> _Made:
    """Run a user's function on a separate thread and return its result.

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
    async with Within(within_s, what):
        return await asyncio.wrap_future(made)
