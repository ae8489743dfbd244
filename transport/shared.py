"""Links between two processes of one host: frames over a Unix socket, large payloads in shared memory.

The stream is that of a TCP link, with the same frames, calls and limits. A payload of at least
`LinkConfig.place_bytes` is copied into a block of this side's regions (`regions.py`), unless the program
wrote it into a region of its own, and its frame names the memory. While no block is free, payloads travel in
the stream, so a peer that keeps all blocks slows the link and stops nothing.

A handler gets copies of requests, except of the types for which it has said that it reads in place
(`Link.serve`).

The other side returns a block once it has read it, with its next frame: a write for the numbers alone would
wake the peer for nothing. They wait for the next check of the link's time-outs at most, and not if they are
many or have much memory. A side that sends no payload for `IDLE_S` drops its free blocks at such a check.
"""

import asyncio
import errno
import os
import socket
import struct
from dataclasses import replace
from functools import partial
from typing import Final

from msgspec.structs import replace as replace_fields

from transport.budget import Budget
from transport.config import LinkConfig
from transport.decoder import Memory
from transport.errors import LinkBroken
from transport.frames import DROPPED, FREED, PLACE, Frame, head
from transport.messages import Identity, Message, Placed, RoleTable
from transport.regions import PUBLISHED, Allowance, Inbox, Outbox, Side, has_place, region_of
from transport.stream import StreamLink
from transport.tensors import Tensor

_CREDENTIALS: Final = struct.Struct("iII")

_PEER_PROCESS: Final = 77
"""Socket option of Linux since 6.5, for which Python has no name: a descriptor of the process that made the
socket at the other end."""


def credentials_of(peer: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end of a Unix socket, as the kernel knows them."""
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(packed)
    return process, user, group


def user_of(peer: socket.socket) -> int:
    """Return the number of the user at the other end of a Unix socket."""
    return credentials_of(peer)[1]


class SharedLink(StreamLink):
    """A link over an established, authenticated connection to a process of the same user on this host.

    Args:
        side: Way of the handover of regions; the link closes it.
        allowance: Bytes that the regions of all links may have.
    """

    shares = True
    __slots__ = ("_inbound", "_outbound", "_returned", "_side", "lend_bytes")

    def __init__(
        self,
        identity: Identity,
        peer: Identity,
        transport: asyncio.Transport,
        *,
        config: LinkConfig,
        rules: RoleTable,
        memory: Memory,
        budget: Budget,
        side: Side,
        allowance: Allowance,
    ) -> None:
        if config.checksum == "auto":  # no wire lies between processes of a host
            config = replace(config, checksum="off")
        super().__init__(identity, peer, transport, config=config, rules=rules, memory=memory, budget=budget)
        self._side, self.lend_bytes = side, config.lend_bytes
        self._outbound = Outbox(side, config.shared_bytes, allowance, config.place_bytes)
        self._inbound = Inbox(side, partial(self._loop.call_soon, self._return_blocks))
        self._returned = self._inbound.returned
        self._conversation.place = self._outbound.place
        self._decoder.inbox = self._inbound

    def hand_over(self, memory: Tensor) -> int:
        found = region_of(memory.data)
        number = self._outbound.number_of(found[0]) if found is not None else 0
        if not number:
            raise LinkBroken(f"{memory.nbytes} bytes of memory cannot be handed to {self.peer.node}")
        return number

    def publish(self, nbytes: int) -> Tensor:
        return self._side.publish(nbytes)

    def lends(self, values: Tensor) -> bool:
        found = region_of(values.data)
        if found is None or found[0].kind != PUBLISHED or not has_place(values.data, found[1]):
            return False
        return values.nbytes >= self.lend_bytes and self._outbound.may_lend(found[0])

    def region(self, number: int, *, is_common: bool) -> Tensor:
        return self._inbound.whole(number, is_common=is_common)

    def peer_process(self) -> int:
        sock = self._transport.get_extra_info("socket")
        number = credentials_of(sock)[0]
        if not number:  # this process could not signal it
            raise OSError(f"the process of {self.peer.node} is in another container")
        if number == os.getpid():
            raise OSError(f"{self.peer.node} is in this process")
        try:
            return int(sock.getsockopt(socket.SOL_SOCKET, _PEER_PROCESS))
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise  # it has ended, and another process may have its number
        return os.pidfd_open(number)

    def _freed_frame(self) -> bytes:
        # A program may drop more loans at once than one frame can name.
        most = self._config.max_meta_bytes // PLACE.size
        count = -(-len(self._returned) // most)
        return b"".join([head(FREED, 0, self._inbound.take_returned(most), 0) for _ in range(count)])

    def _return_blocks(self) -> None:
        """Return blocks without another frame: many wait, or have waited for long."""
        if self._returned and self._writing and self._error is None and not self._transport.is_closing():
            self._write_small(self._freed_frame())

    def _received(self, placed: Placed) -> Message:
        inbox, total = self._inbound, len(placed.payload)
        if placed.type in self._in_place:
            tensors = inbox.lend(placed.region, placed.start, placed.specs, total)
            return replace_fields(placed, tensors=tensors)
        message = self._copied(placed)
        inbox.give_back(placed.region, total, placed.start)
        return message

    def _copied(self, placed: Placed) -> Message:
        return self._decoder.copied(placed)

    def _control(self, frame: Frame) -> None:
        if frame.kind == FREED and frame.message is not None:
            self._outbound.freed(frame.message.meta)
        elif frame.kind == DROPPED and frame.message is not None:
            self._inbound.dropped(frame.message.meta)
        else:
            super()._control(frame)

    def _tick(self, now: float) -> float:
        self._return_blocks()
        # Frames in the queue may name regions.
        can_write = self._writing and not self._conversation.queuing and not self._transport.is_closing()
        if can_write and (idle := self._outbound.drop_idle(now)):
            self._write_small(head(DROPPED, 0, idle, 0))
        return super()._tick(now)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            super().connection_lost(exc)
        finally:
            self._outbound.close()
            self._inbound.close()
            self._side.close()
