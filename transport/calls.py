"""Pure: the requests of one side that wait for an answer.

Replies match by id and may come in any order. `next_deadline` is a lower bound that is exact only after
`expire`, so an answer changes no timer and no heap. With the usual few different time-outs, the table is
scanned about once per time-out.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Generic, NamedTuple, TypeVar

W = TypeVar("W")


class Call(NamedTuple, Generic[W]):
    """One request without an answer. ``waiter`` is an object of the table's owner."""

    waiter: W
    message_type: str
    timeout_s: float
    deadline: float


make_call = partial(tuple.__new__, Call)
"""Constructor of a Call from a tuple, which skips the interpreted ``__new__`` of a named tuple."""


class CallTable(Generic[W]):
    """Outstanding calls by request id. Ids count from 1 and are never reused.

    Attributes:
        waiting: The requests without an answer, by id.
        next_id: Compiled function that returns the id of the next request, because every request calls it.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Call[W]] = {}
        self.next_id: Callable[[], int] = count(1).__next__
        self._deadline: float | None = None

    def add(self, request_id: int, call: Call[W]) -> None:
        """Add a request until it is popped or expires."""
        self.waiting[request_id] = call
        if self._deadline is None or call.deadline < self._deadline:
            self._deadline = call.deadline

    def pop(self, request_id: int) -> Call[W] | None:
        """Remove and return an answered request; None if it no longer waits, or never did."""
        return self.waiting.pop(request_id, None)

    def expire(self, *, now: float) -> list[tuple[int, Call[W]]]:
        """Remove and return the requests whose deadline has passed."""
        late = [(request_id, call) for request_id, call in self.waiting.items() if call.deadline <= now]
        for request_id, _ in late:
            del self.waiting[request_id]
        self._deadline = min([call.deadline for call in self.waiting.values()], default=None)
        return late

    def drain(self) -> list[tuple[int, Call[W]]]:
        """Remove and return all requests, oldest first."""
        calls = list(self.waiting.items())
        self.waiting.clear()
        self._deadline = None
        return calls

    def next_deadline(self) -> float | None:
        """Return a time no later than the earliest deadline, or None without requests."""
        return self._deadline

    def __len__(self) -> int:
        return len(self.waiting)
