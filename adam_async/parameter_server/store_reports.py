"""Reports of the counts of a store on one server, to its clients and readers."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from numpy.typing import NDArray

from adam_async.controller.role import STATISTICS_BYTES, reply_when_room
from adam_async.messages import Statistics, pack, text_tensor
from adam_async.run.counts import StoreCounts
from transport import Message, Request

KEPT_S = 1.0
"""Time for which a report that took several rounds of the loop answers further requests, in seconds."""

Counting = Generator[None, None, StoreCounts]


class StoreReports:
    """Counts a store when a peer asks, in pieces between which the loop runs.

    Args:
        sender: The server.
        now: Returns the time of the loop's clock, in seconds.
        spawn: Starts a task of the server, by name.
    """

    def __init__(
        self,
        sender: Statistics,
        now: Callable[[], float],
        spawn: Callable[[str, Coroutine[Any, Any, None]], Any],
    ) -> None:
        self._sender = sender
        self._now = now
        self._spawn = spawn
        self._kept: NDArray[Any] | None = None
        self._kept_until = 0.0
        self._requests: list[Request] = []
        """Requests that wait for the report in progress."""

    def answer(self, request: Request, counting: Callable[[], Counting]) -> None:
        """Answer a request with the current counts; for a large store, with a report of the last second.

        Args:
            counting: Returns a generator that counts in pieces.
        """
        if self._kept is not None and self._now() < self._kept_until:
            self._reply(request, self._kept)
            return
        if self._requests:
            self._requests.append(request)
            return
        pieces = counting()
        try:
            next(pieces)
        except StopIteration as end:
            self._reply(request, text_tensor(end.value))
            return
        self._requests.append(request)
        self._spawn(f"counts for {request.link.peer.node}", self._go_on(pieces))

    async def _go_on(self, pieces: Counting) -> None:
        while True:
            await asyncio.sleep(0)
            try:
                next(pieces)
            except StopIteration as end:
                self._kept = text_tensor(end.value)
                break
        self._kept_until = self._now() + KEPT_S
        requests, self._requests = self._requests, []
        for request in requests:
            self._reply(request, self._kept)

    def _reply(self, request: Request, text: NDArray[Any]) -> None:
        def make() -> Message:
            return pack(self._sender, [text])

        reply_when_room(request, max(text.nbytes, STATISTICS_BYTES), make)
