"""Connections for all roles: the links to one peer, one at a time, and the pauses between them.

Theory of operation
-------------------
A `Channel` names one peer and its address. The user connects, uses the link, drops it, and connects again.
For all users the channel has three parts:

*The link.* `dial` returns a link that counts in the node's traffic until `drop` ends it. Connecting retries
within its own deadline, on the schedule of `transport`.

*Patience.* A peer without progress for `patience_s` is lost: `left_s` runs from the last `renew` or
`progressed`, and is the default deadline of a dial. The user raises the error, because each role has a
different one; the channel's text names the peer in it.

*Pauses.* Without pauses, a peer that accepts links and answers nothing is dialled in a busy loop. The user
therefore pauses after each link without progress. Each pause is longer than the last, up to a limit;
`progressed` returns to the shortest. Pauses have no jitter, because a peer has few dialling nodes.

The choice among several peers is the user's. `LeaderConnection` dials the controllers in parallel and pauses
after each round. A data client sets its channel to the next data server's address, a bundle's client to the
new primary's.

`asyncio.TaskGroup` raises its block's `CancelledError` again. Below an `AsyncExitStack` this is harmful.
Suppose that the block fails, and that a cancellation arrives while a later entry of the stack waits, such as
the report of a leaving role. The group then raises this second error twice, and the stack makes the error its
own context. The next outer stack looks for the end of the contexts and finds none. The outer stack loops
without an await, and the process hangs. Two roles of one cluster that fail one after the other are enough.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

from adam_async.runtime.traffic import Traffic
from transport import Identity, Link, Network, RetrySchedule

PAUSES = RetrySchedule(first_s=0.01, longest_s=0.5)
"""Pauses after links without progress, in seconds."""


async def wait_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until an event is set, for `timeout_s` at most. Cancelling it loses nothing."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """A node's end of its links.

    Attributes:
        network: The links' network.
        identity: The node.
        traffic: Counts of the node's links; None to count nothing.
    """

    network: Network
    identity: Identity
    traffic: Traffic | None = None

    @asynccontextmanager
    async def connected(self, address: str, *, timeout_s: float) -> AsyncIterator[Link]:
        """Open a link for one block and count it in the node's traffic. For errors see `Network.connect`."""
        async with self.network.connect(address, self.identity, timeout_s=timeout_s) as link:
            if self.traffic is None:
                yield link
                return
            self.traffic.watch(link)
            try:
                yield link
            finally:
                self.traffic.gone(link)


class Channel:
    """Dials one peer and holds at most one link to it.

    Args:
        endpoint: The dialling node.
        peer: Name of the peer in errors and log lines.
        address: Address of the peer; peer and address may be replaced before the next dial.
        peer_role: Role that the peer must have; None accepts each.
        patience_s: Seconds without progress after which the peer is lost.
        clock: Time in seconds; by default the running loop's.

    Attributes:
        link: The link between `dial` and `drop`, otherwise None. The peer may have ended the link already.
        patience_s: Seconds without progress after which the peer is lost; the next `renew` uses a new value.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        peer: str,
        address: str,
        peer_role: str | None = None,
        patience_s: float = math.inf,
        pauses: RetrySchedule = PAUSES,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.peer = peer
        self.address = address
        self.link: Link | None = None
        self._endpoint = endpoint
        self._peer_role = peer_role
        self.patience_s = patience_s
        self._schedule = pauses
        self._pauses = pauses.waits()
        self._clock = clock
        self._deadline = math.inf

    async def dial(self, timeout_s: float | None = None, *, retry: RetrySchedule | None = None) -> Link:
        """Return a new link, which replaces the last one. Cancelling a dial leaves the last link unchanged.

        Args:
            timeout_s: Deadline in seconds; by default `left_s`.
            retry: Attempts within the deadline; see `Network.dial`.

        Raises:
            DialFailed, HandshakeRejected, RemoteProtocolError, ValueError: See `Network.dial`.
        """
        link = await self._endpoint.network.dial(
            self.address,
            self._endpoint.identity,
            timeout_s=self.left_s if timeout_s is None else timeout_s,
            retry=retry,
            peer_role=self._peer_role,
        )
        self.drop()
        self.link = link
        if self._endpoint.traffic is not None:
            self._endpoint.traffic.watch(link)
        return link

    def drop(self) -> None:
        """End the link, if any; its calls fail."""
        link, self.link = self.link, None
        if link is None:
            return
        link.abort()
        if self._endpoint.traffic is not None:
            self._endpoint.traffic.gone(link)

    async def aclose(self) -> None:
        """End the link, if any, after its last messages are sent."""
        if self.link is not None:
            await self.link.aclose()
            self.drop()

    # --- patience and pauses -----------------------------------------------------------------

    @property
    def left_s(self) -> float:
        """Seconds until the peer is lost; infinite before the first `renew`."""
        return self._deadline - self._now()

    def renew(self) -> None:
        """Grant the peer the full `patience_s`, such as at the start and after a link without requests."""
        self._deadline = self._now() + self.patience_s

    def progressed(self) -> None:
        """Grant the peer the full `patience_s`, and begin again with the shortest pause."""
        self.renew()
        self._pauses = self._schedule.waits()

    async def pause(self, wake: asyncio.Event | None = None) -> None:
        """Wait for the next pause of the schedule, or until `wake` is set. Cancelling it loses nothing."""
        # After the schedule's end, each pause is the longest one.
        pause_s = next(self._pauses, self._schedule.longest_s)
        if wake is None:
            await asyncio.sleep(pause_s)
        else:
            await wait_set(wake, pause_s)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()

    def __str__(self) -> str:
        return f"{self.peer} at {self.address}"

    def __repr__(self) -> str:
        return f"<Channel to {self} {'linked' if self.link is not None else 'away'}>"


class StackedTaskGroup(asyncio.TaskGroup):
    """An `asyncio.TaskGroup` for `AsyncExitStack.enter_async_context`."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseException as raised:
            # Without a raise here the stack goes on with the error that it gave to the group.
            if raised is not error:
                raise
