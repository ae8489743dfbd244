"""The link on which a joining server receives pieces of the state, and the times at which pieces wait.

Theory of operation
-------------------
A client waits until all members in sync have its entry, and a piece on the same interface delays the entry.
Bytes that the kernel has cannot be held back. Three rules limit the number of these bytes:

- The send buffer is small. The limit counts the bytes that the peer's kernel has not confirmed: those on the
  wire and in the queue of the interface.
- The link writes a piece in small chunks, and the loop buffers no more than the kernel.
- While an entry of this server waits for its members, the server sends no further chunk. Under a constant
  stream of entries pieces would never arrive. So after each wait of `YIELD_S` the server sends pieces for
  `GO_S`, a fifth of the time.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from adam_async.runtime.channel import Channel
from transport import Link, LinkConfig, Message, TransportError

PIECES_CONFIG = LinkConfig(socket_buffer_bytes=4 << 10, chunk_bytes=4 << 10, gather_bytes=4 << 10)
"""Settings of the link, with sizes in bytes. Linux doubles the size of the buffer."""

YIELD_S = 0.02
"""Maximum time for which pieces wait for entries, in seconds."""

GO_S = 0.005
"""Time for which pieces are sent beside entries after a wait of `YIELD_S`, in seconds."""


class PieceTurns:
    """Decides when pieces wait.

    Args:
        entries_wait: Returns whether a member in sync lacks an entry of this server.
        hold: Lets all pieces wait (True), or go on (False).
        later: Calls a function after a time in seconds.
    """

    def __init__(
        self,
        entries_wait: Callable[[], bool],
        hold: Callable[[bool], None],
        later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self._entries_wait = entries_wait
        self._hold = hold
        self._later = later
        self._waits = False
        self._timer: asyncio.TimerHandle | None = None
        """Timer that ends the pieces' wait, or their turn beside entries; None if neither runs."""

    def update(self) -> None:
        """Make pieces wait while entries wait, unless it is the pieces' turn."""
        if self._waits:
            if not self._entries_wait():
                self._end_turn()
        elif self._timer is None and self._entries_wait():
            self._waits = True
            self._hold(True)
            self._timer = self._later(YIELD_S, self._give_turn)

    def end(self) -> None:
        """Cancel the timer. Held pieces go on."""
        if self._timer is not None:
            self._end_turn()

    def _give_turn(self) -> None:
        self._end_turn()
        self._timer = self._later(GO_S, self._take_turn)

    def _take_turn(self) -> None:
        self._timer = None
        self.update()

    def _end_turn(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        if self._waits:
            self._waits = False
            self._hold(False)


class PieceLink:
    """Pieces that are being sent to another server, and their link."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.queue: deque[Message] = deque()
        """Waiting parts: at most one piece of each bundle that the other server joins."""
        self.has_queue = asyncio.Event()
        self._waits = False

    def send(self, message: Message) -> None:
        self.queue.append(message)
        self.has_queue.set()

    def hold(self, waits: bool) -> None:
        """Let the pieces wait, or go on."""
        self._waits = waits
        if self.channel.link is not None:
            self.channel.link.hold_large(waits)

    def drop(self) -> None:
        """End the link, and drop the queue."""
        self.queue.clear()
        self.has_queue.clear()
        self.channel.drop()

    async def attend(self, link: Link) -> None:
        """Send the queue, until the link ends."""
        link.hold_large(self._waits)
        async with asyncio.TaskGroup() as group:
            pump = group.create_task(self._pump(link), name=f"pieces to {link.peer.node}")
            try:
                await link.wait_closed()  # the pump may have no more to send
            finally:
                pump.cancel()

    async def _pump(self, link: Link) -> None:
        with suppress(TransportError):
            while True:
                await self.has_queue.wait()
                self.has_queue.clear()
                while self.queue:
                    await link.send(self.queue.popleft(), ordered=True)
