"""A thread for blocking calls, run one after the other; it never holds up its process's end.

At its end a process waits for the threads of `concurrent.futures`. A read from a vanished network file system
would then keep a failed role for ever.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock, Thread
from typing import Any, ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")
_Call = tuple[Future[Any], Callable[[], Any]]


class BlockingThread(Executor):
    """One daemon thread, which the first call starts; `end` ends it.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls = SimpleQueue[_Call | None]()
        self._lock = RLock()  # a cancelled call may run a callback that submits
        self._started = self._ended = False

    def submit(
        self, function: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Queue a call.

        Raises:
            RuntimeError: The thread was ended, or the system allows no further thread.
        """
        made = Future[_Result]()
        with self._lock:
            if self._ended:
                raise RuntimeError(f"thread {self._name} was ended")
            if not self._started:
                Thread(target=_run, args=(self._calls,), name=self._name, daemon=True).start()
                self._started = True
            self._calls.put((made, partial(function, *args, **kwargs)))
        return made

    def end(self) -> None:
        """Cancel the queued calls, and end the thread after its current call. Safe to call twice."""
        with self._lock:
            self._ended = True
            with suppress(Empty):
                while True:
                    if call := self._calls.get_nowait():
                        call[0].cancel()
            self._calls.put(None)

    def __repr__(self) -> str:
        return f"<BlockingThread {self._name}>"


def _run(calls: SimpleQueue[_Call | None]) -> None:
    while _ran(calls.get()):
        pass


def _ran(call: _Call | None) -> bool:
    """Run one call; return False for None, which means the end.

    A loop in one function would keep the last result until the next call.
    """
    if call is None:
        return False
    made, function = call
    if made.set_running_or_notify_cancel():
        try:
            made.set_result(function())
        except BaseException as error:  # the waiting task gets it
            made.set_exception(error)
    return True
