"""Pure: the requests of one side that wait for an answer.

Replies are matched by id and may come in any order. Deadlines are watched lazily: `next_deadline` is a
lower bound that is exact only after `expire`, so that answering a call costs no timer and no heap. With
the usual few different timeouts the table is scanned about once per timeout.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Call", "CallTable", "make_call"]

W = TypeVar("W")


class Call(NamedTuple, Generic[W]):
    """One request without an answer. ``waiter`` is whatever the owner wants to be reminded of."""

    waiter: W
    message_type: str
    timeout_s: float
    deadline: float


make_call = partial(tuple.__new__, Call)
"""Makes a Call from a tuple, without running a named tuple's ``__new__`` in the interpreter."""


class CallTable(Generic[W]):
    """Outstanding calls by request id. Ids count from 1 and are never used again.

    Attributes:
        waiting: The requests without an answer, by id.
        next_id: Returns the id of the next request; a compiled function, because every request calls it.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Call[W]] = {}
        self.next_id: Callable[[], int] = count(1).__next__
        self._deadline: float | None = None

    def add(self, request_id: int, call: Call[W]) -> None:
        """Remember a request until it is popped or expires."""
        self.waiting[request_id] = call
        if self._deadline is None or call.deadline < self._deadline:
            self._deadline = call.deadline

    def pop(self, request_id: int) -> Call[W] | None:
        """Forget a request because it was answered; None if it is not (or no longer) waiting."""
        return self.waiting.pop(request_id, None)

    def expire(self, *, now: float) -> list[tuple[int, Call[W]]]:
        """Forget and return the requests whose deadline has come."""
        late = [(request_id, call) for request_id, call in self.waiting.items() if call.deadline <= now]
        for request_id, _ in late:
            del self.waiting[request_id]
        self._deadline = min([call.deadline for call in self.waiting.values()], default=None)
        return late

    def drain(self) -> list[tuple[int, Call[W]]]:
        """Forget and return all requests, oldest first."""
        calls = list(self.waiting.items())
        self.waiting.clear()
        self._deadline = None
        return calls

    def next_deadline(self) -> float | None:
        """When `expire` may next have something; never later than the earliest deadline."""
        return self._deadline

    def __len__(self) -> int:
        return len(self.waiting)
