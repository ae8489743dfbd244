"""Links within one process: they pass messages by reference, without frames.

In all other respects these links behave as links over TCP do. Delivery runs in a later callback of the loop
(one for all messages of an iteration), never inside the sender's call. Unread bytes count against the
sender's water marks. The other side sees a close after all earlier messages, but an abort at once.
"""

import asyncio
from collections import deque
from typing import Protocol

import numpy as np

from transport.budget import Budget
from transport.config import LinkConfig
from transport.errors import LinkBroken, LinkClosed, RemoteProtocolError, TransportError
from transport.frames import ERROR, MESSAGE, REPLY, Frame
from transport.intake import MESSAGE_COST_BYTES, UNCHECKED_BYTES
from transport.link import Link
from transport.messages import Identity, Message, RoleTable
from transport.tensors import LENT, Release, lay_out, watched


class OtherEnd(Protocol):
    """Interface of the other end of a link."""

    def _arrive(self, frame: Frame | LinkClosed) -> None:
        """Queue a frame, or the close of the link, for delivery in a later iteration of the loop."""

    def _settle(self, cost: int) -> None:
        """Note that the caller has taken a message of this end."""

    def _finish(self, error: TransportError) -> bool:
        """End the conversation with an error; return False if it was over."""

    async def _reached(self) -> None:
        """Wait until all messages before a close have arrived."""


class LocalLink(Link):
    """One end of a link within one event loop. Made in pairs by `link_ends`."""

    __slots__ = ("_arrived", "_draining", "_other", "_taken_messages", "_unsent")

    def __init__(
        self,
        identity: Identity,
        peer: Identity,
        *,
        config: LinkConfig,
        rules: RoleTable,
        budget: Budget,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(identity, peer, config=config, rules=rules, budget=budget, loop=loop)
        self._other: OtherEnd
        self._arrived: deque[Frame | LinkClosed] = deque()
        self._draining = False
        self._unsent = 0
        self._taken_messages = 0

    # Sending

    def _transmit(
        self, kind: int, request_id: int, message: Message, release: Release | None, ordered: bool
    ) -> None:
        payload_bytes = 0
        if message.tensors:
            payload_bytes = lay_out(message.tensors, self._config.max_message_bytes).tensor_bytes
        if release is not None:
            lent = release is LENT
            tensors = (
                tuple([each.copy() for each in message.tensors])
                if lent
                else watched(message.tensors, release)
            )
            message = Message(type=message.type, meta=message.meta, tensors=tensors)
        if kind != ERROR:
            self._count_out(message.type, payload_bytes, 0)
        self._unsent += payload_bytes + MESSAGE_COST_BYTES
        self._other._arrive(Frame(kind, request_id, message, payload_bytes, 0))
        if REPLY <= kind <= ERROR and self._unsent > UNCHECKED_BYTES:
            self._note_owed(payload_bytes + MESSAGE_COST_BYTES)

    def _over_water(self, message: Message | None, ordered: bool) -> bool:
        return self._unsent >= self._config.high_water_bytes

    @property
    def unsent_bytes(self) -> int:
        return self._unsent

    async def _wait_room(self) -> None:
        while True:
            before = self._taken_messages
            try:
                async with asyncio.timeout(self._config.stalled_after_s):
                    await super()._wait_room()
                return
            except TimeoutError:
                if self._taken_messages == before:
                    self._give_up(
                        LinkBroken(
                            f"{self.peer} took none of {self._unsent} waiting bytes "
                            f"for {self._config.stalled_after_s:g} s"
                        )
                    )
                    return

    def _settle(self, cost: int) -> None:
        """Note that the other side has taken a message of this side."""
        self._unsent -= cost
        self._taken_messages += 1
        if self._room and self._unsent <= self._config.low_water_bytes:
            self._wake_senders()
        if self._owed and self._error is None:
            self._note_owed()

    # Receiving

    def _arrive(self, frame: Frame | LinkClosed) -> None:
        if self._error is not None:
            return
        self._arrived.append(frame)
        if not self._draining and not self._intake.reason:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._draining = False
        self.turn += 1
        # Frames that arrive because of handlers wait for the next iteration of the loop.
        for _ in range(len(self._arrived)):
            if self._intake.reason or self._error is not None:
                break
            frame = self._arrived.popleft()
            if isinstance(frame, LinkClosed):
                self._finish(frame)
                return
            try:
                self._deliver(frame)
            except RemoteProtocolError as error:
                self._give_up(error)
                return
            except Exception as error:
                self._defect("delivery", error)
                return
            if frame.message is not None and frame.kind != MESSAGE:
                self._other._settle(frame.payload_bytes + MESSAGE_COST_BYTES)
        if self._arrived and not self._intake.reason and not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _taken(self, cost: int) -> None:
        self._other._settle(cost)

    def _on_reply(self, request_id: int, message: Message) -> None:
        registered = self._into.get(request_id)
        if registered is not None:
            if lay_out(message.tensors, self._config.max_message_bytes).packed == registered.described:
                for target, source in zip(registered.tensors, message.tensors, strict=True):
                    np.copyto(target, source)
                message = Message(type=message.type, meta=message.meta, tensors=registered.tensors)
        super()._on_reply(request_id, message)

    def _pause_reading(self) -> None:
        """Do nothing: `_drain` checks whether reading waits."""

    def _arriving_bytes(self) -> int:
        return 0

    def _resume_reading(self) -> None:
        if self._arrived and not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _tick(self, now: float) -> float | None:
        return None

    def _bytes_moved(self) -> int:
        return 0

    # The end

    def _finish(self, error: TransportError) -> bool:
        first = super()._finish(error)
        self._arrived.clear()
        self._account.close()
        return first

    def _give_up(self, error: TransportError) -> None:
        if self._finish(error):
            self._loop.call_soon(self._other._finish, LinkBroken(f"{self.identity} broke the link"))

    def abort(self) -> None:
        self._give_up(LinkClosed("this side aborted the link"))

    async def aclose(self) -> None:
        if self._finish(LinkClosed("this side closed the link")):
            self._other._arrive(LinkClosed(f"{self.identity} closed the link"))
        await self._other._reached()

    async def _reached(self) -> None:
        await asyncio.sleep(0)


def link_ends(
    first: Identity,
    second: Identity,
    *,
    config: LinkConfig,
    rules: RoleTable,
    budget: Budget,
    loop: asyncio.AbstractEventLoop,
) -> tuple[LocalLink, LocalLink]:
    """Make the two ends of a link; the first is the end for ``first``."""
    one = LocalLink(first, second, config=config, rules=rules, budget=budget, loop=loop)
    two = LocalLink(second, first, config=config, rules=rules, budget=budget, loop=loop)
    one._other, two._other = two, one
    return one, two
