"""The requests of one side that wait for an answer.

Replies match by id and may come in any order. An answer changes no timer and no heap: with the usual few
different time-outs, the table is scanned about once per time-out.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

from transport.errors import TransportError
from transport.messages import Message

OnAnswer = Callable[[Message | TransportError], None]
"""Callback for the reply to a request, or for the error in its place."""


class Call(NamedTuple):
    """One request without an answer, and the callback for its answer or for an error."""

    on_answer: OnAnswer
    message_type: str
    timeout_s: float
    deadline: float


make_call = partial(tuple.__new__, Call)
"""Constructor of a Call from a tuple, which skips the interpreted ``__new__`` of a named tuple."""


class CallTable:
    """Outstanding calls by request id. Ids count from 1 and are never reused.

    Attributes:
        waiting: The requests without an answer, by id; the owner adds and removes them.
        next_id: Compiled function that returns the id of the next request, because every request calls it.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Call] = {}
        self.next_id: Callable[[], int] = count(1).__next__

    def expire(self, *, now: float) -> list[tuple[int, Call]]:
        """Remove and return the requests whose deadline has passed."""
        late = [(request_id, call) for request_id, call in self.waiting.items() if call.deadline <= now]
        for request_id, _ in late:
            del self.waiting[request_id]
        return late

    def drain(self) -> list[tuple[int, Call]]:
        """Remove and return all requests, oldest first."""
        calls = list(self.waiting.items())
        self.waiting.clear()
        return calls

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None without requests."""
        return min([call.deadline for call in self.waiting.values()], default=None)


def settle(future: "asyncio.Future[Message]", answer: Message | TransportError) -> None:
    """Give a future its answer, unless it is cancelled."""
    if future.done():
        return
    if isinstance(answer, TransportError):
        future.set_exception(answer)
        future.exception()  # marks the error as retrieved, because the caller may have dropped the future
    else:
        future.set_result(answer)
