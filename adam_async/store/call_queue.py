"""The calls of one client of a store, in order: a push waits while servers owe too many answers."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from adam_async.parameter_server.client import ParameterClient


class CallQueue:
    """Sends pushes, ticks and pulls in the order of the calls.

    A queued call is independent of its caller, so that a cancelled push keeps its place.

    Args:
        client: Client of the servers.
    """

    def __init__(self, client: ParameterClient) -> None:
        self._client = client
        self._queued: deque[_QueuedCall] = deque()
        self._has_queued = asyncio.Event()

    def put(
        self, send: Callable[[], None], fail: Callable[[Exception], None], *, is_push: bool = False
    ) -> None:
        """Send a call after the earlier ones: at once if none waits, otherwise later.

        Args:
            send: Sends the call.
            fail: Takes the error of `send`.
            is_push: Whether the call is a push, which waits until each server may get another push.
        """
        if self._queued or (is_push and not self._client.may_push):
            self._queued.append(_QueuedCall(send=send, fail=fail, is_push=is_push))
            self._has_queued.set()
        else:
            _run(send, fail)

    async def run(self) -> None:
        """Send the queued calls."""
        while True:
            while self._queued:
                if self._queued[0].is_push:
                    await self._client.admit()
                call = self._queued.popleft()
                _run(call.send, call.fail)
            self._has_queued.clear()
            await self._has_queued.wait()


class _QueuedCall(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A push, a tick or a pull that waits for its turn."""

    send: Callable[[], None]
    fail: Callable[[Exception], None]
    is_push: bool


def _run(send: Callable[[], None], fail: Callable[[Exception], None]) -> None:
    try:
        send()
    except Exception as error:
        # Any error but `StoreError` is a defect, and the caller must not wait for ever.
        fail(error)
