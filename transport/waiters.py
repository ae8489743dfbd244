"""The waiters for the answer to a request: futures, and callbacks in their place."""

import asyncio
from typing import TypeAlias

from transport.errors import TransportError
from transport.link import OnAnswer
from transport.messages import Message


class AnswerCallback:
    """Replacement of a future: passes its result to a function at once, without another iteration."""

    __slots__ = ("_done", "_loop", "_on_answer")

    def __init__(self, on_answer: OnAnswer, loop: asyncio.AbstractEventLoop) -> None:
        self._on_answer = on_answer
        self._loop = loop
        self._done = False

    def done(self) -> bool:
        """Return whether the function was called."""
        return self._done

    def set_result(self, answer: Message) -> None:
        """Pass an answer to the function; its error goes to the handler of the loop."""
        self._call(answer)

    def set_exception(self, error: TransportError) -> None:
        """Pass an error to the function in place of an answer."""
        self._call(error)

    def exception(self) -> None:
        """Do nothing; this method of a future marks the error of the future as retrieved."""

    def _call(self, answer: Message | TransportError) -> None:
        self._done = True
        try:
            self._on_answer(answer)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": "the callback of an answer raised", "exception": error}
            )


Waiter: TypeAlias = "asyncio.Future[Message] | AnswerCallback"


def fail_waiter(waiter: Waiter, error: TransportError) -> None:
    """Fail a waiter, and mark its error as retrieved, because its user may have dropped it."""
    if not waiter.done():
        waiter.set_exception(error)
        waiter.exception()
