"""A network with simulated latency and bandwidth on the links between two nodes.

    async with SlowNetwork(network, delay_s=0.005, dice=Random(7), between=("worker-0", "ps-0")) as slow:
        ...                                                 # listen and dial with `slow`

The slow layer replaces the layer below a link: the asyncio transport of a TCP link, or the other end of a
local link. The link itself is therefore unchanged and keeps all its promises. All items that the link sends
(messages, requests, replies, signals, pings, CLOSE) are delayed in order, and only a closing side waits for
them. Each side delays the bytes that it sends: a `SlowNetwork` with both ends slows both directions; if the
ends are in two processes, each process needs a `SlowNetwork`. Dialling and the handshake are not delayed.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from transport.config import LinkConfig
from transport.errors import LinkClosed, TransportError
from transport.frames import Frame
from transport.intake import MESSAGE_COST_BYTES
from transport.link import Link
from transport.local import LocalLink
from transport.messages import Identity
from transport.network import DIAL_S, Listener, Network, OnLink, RetrySchedule
from transport.path import Path, PathConditions, RandomSource
from transport.protocol import Buffer
from transport.tcp import TcpLink
from transport.timekeeper import Timekeeper

WINDOW_BYTES = 64 << 20
"""Maximum bytes in transit on a path of any bandwidth before its senders wait."""

T = TypeVar("T")


class SlowNetwork(Network):
    """A network that delays messages between two nodes, by ``delay_s`` in each direction.

    An asynchronous context manager: make and close links inside its block. The end of the block delivers all
    delayed messages at once, and ends the thread.

    Args:
        inner: The network that makes the links: a `LocalNetwork`, a `TcpNetwork`, or another `SlowNetwork`
            between other nodes.
        delay_s: Seconds from one side to the other.
        jitter_s: Maximum additional seconds, drawn for each iteration of the loop that sends, or with a
            bandwidth for each item.
        bytes_per_s: Bandwidth in each direction of each link, in bytes per second; None for no limit.
        dice: Seeded source of the jitter.
        between: Two node ids.

    Raises:
        ValueError: A number is out of range.
        TypeError: A new link is neither a TCP nor a local link.
        RuntimeError: A link is made outside the block.
    """

    def __init__(
        self,
        inner: Network,
        *,
        delay_s: float,
        jitter_s: float = 0.0,
        bytes_per_s: float | None = None,
        dice: RandomSource,
        between: tuple[str, str],
    ) -> None:
        self.inner = inner
        self.conditions = PathConditions(delay_s=delay_s, jitter_s=jitter_s, bytes_per_s=bytes_per_s)
        self._dice = dice
        self._between = set(between)
        self._timekeeper = Timekeeper("slow-network")

    async def __aenter__(self) -> Self:
        await self._timekeeper.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timekeeper.__aexit__(kind, error, trace)

    def listen(
        self, address: str, identity: Identity, on_link: OnLink
    ) -> AbstractAsyncContextManager[Listener]:
        async def on_slow_link(link: Link) -> None:
            self._slow_down(link)
            await on_link(link)

        return self.inner.listen(address, identity, on_slow_link)

    async def dial(
        self,
        address: str,
        identity: Identity,
        *,
        timeout_s: float = DIAL_S,
        retry: RetrySchedule | None = None,
        peer_role: str | None = None,
    ) -> Link:
        link = await self.inner.dial(address, identity, timeout_s=timeout_s, retry=retry, peer_role=peer_role)
        try:
            self._slow_down(link)
        except BaseException:
            link.abort()
            raise
        return link

    def _slow_down(self, link: Link) -> None:
        if {link.identity.node, link.peer.node} != self._between:
            return
        if not self._timekeeper.is_open:
            raise RuntimeError("links of a SlowNetwork are made inside its `async with` block")
        path = Path(self.conditions, self._dice)
        if isinstance(link, TcpLink):
            _SlowTransport(link, path, self._timekeeper, self.conditions)
        elif isinstance(link, LocalLink):
            _SlowEnd(link, path, self._timekeeper, self.conditions)
        else:
            raise TypeError(f"{link!r} is neither a TCP nor a local link: wrap a network that makes those")

    def __repr__(self) -> str:
        return f"<SlowNetwork {self.conditions} over {self.inner!r}>"


class _Line(Generic[T]):
    """Items that one side of a link has sent and the other side has not received.

    The items of one iteration of the loop arrive together, unless the path has a bandwidth.
    """

    def __init__(
        self,
        path: Path,
        timekeeper: Timekeeper,
        conditions: PathConditions,
        hand_over: Callable[[T], None],
    ) -> None:
        self.held_bytes = 0
        self.is_cut = False
        self._path = path
        self._timekeeper = timekeeper
        self._hand_over = hand_over
        self._together = conditions.bytes_per_s is None
        self._loop = asyncio.get_running_loop()
        self._turn: list[tuple[T, int]] = []
        self._began = 0.0
        self._under_way: deque[list[tuple[T, int]]] = deque()
        self._emptied: asyncio.Future[None] | None = None

    def put(self, item: T, nbytes: int) -> None:
        """Send an item; a cut line drops it."""
        if self.is_cut:
            return
        if not self._turn:
            self._began = self._timekeeper.clock()
            self._loop.call_soon(self._depart)
        self._turn.append((item, nbytes))
        self.held_bytes += nbytes

    def _depart(self) -> None:
        """Begin the transit of the items that were sent in one iteration of the loop."""
        turn, self._turn = self._turn, []
        for batch in [turn] if self._together and turn else [[sent] for sent in turn]:
            arrival = self._path.arrival(now=self._began, nbytes=sum(nbytes for _, nbytes in batch))
            self._under_way.append(batch)
            self._timekeeper.call_at(arrival, partial(self._arrive, batch))

    def _arrive(self, batch: list[tuple[T, int]]) -> None:
        if not batch:
            return  # delivered early, or dropped
        self._under_way.popleft()
        sent = batch[:]
        batch.clear()
        for item, nbytes in sent:
            if self.is_cut:
                return
            self.held_bytes -= nbytes
            self._hand_over(item)
        self._look_empty()

    def hurry(self) -> None:
        """Hand over all items at once."""
        if self._turn:
            self._under_way.append(self._turn)
            self._turn = []
        while self._under_way:
            self._arrive(self._under_way[0])

    def cut(self) -> None:
        """Drop all items, and all later ones."""
        self.is_cut = True
        self.held_bytes = 0
        self._turn.clear()
        for batch in self._under_way:
            batch.clear()
        self._under_way.clear()
        self._look_empty()

    def _look_empty(self) -> None:
        if self._emptied is not None and not self._turn and not self._under_way:
            self._emptied.set_result(None)
            self._emptied = None

    async def emptied(self) -> None:
        """Wait until no item is in transit."""
        if self._turn or self._under_way:
            if self._emptied is None:
                self._emptied = self._loop.create_future()
            await asyncio.shield(self._emptied)


def _window(conditions: PathConditions, config: LinkConfig) -> int:
    """Return the number of bytes in transit from which senders wait: the path's capacity plus a queue."""
    if conditions.bytes_per_s is None:
        return WINDOW_BYTES
    return min(int(conditions.bytes_per_s * conditions.delay_s) + config.high_water_bytes, WINDOW_BYTES)


class _SlowTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """A layer between a TCP link and its transport: the link's transport, and the transport's protocol."""

    def __init__(self, link: TcpLink, path: Path, timekeeper: Timekeeper, conditions: PathConditions) -> None:
        super().__init__()
        self._link = link
        self._inner = link._transport
        self._line: _Line[tuple[Buffer, ...] | None] = _Line(path, timekeeper, conditions, self._pass_on)
        self._window = _window(conditions, link._config)
        self._closing = False
        self._full = False
        self._pressed = False
        link._transport = self
        self._inner.set_protocol(self)

    # Called by the link

    def write(self, data: Any) -> None:
        self._put((data,), len(data))

    def writelines(self, list_of_data: Any) -> None:
        buffers = tuple(list_of_data)
        self._put(buffers, sum(map(len, buffers)))

    def _put(self, buffers: tuple[Buffer, ...], nbytes: int) -> None:
        self._line.put(buffers, nbytes)
        if not self._full and self._line.held_bytes >= self._window:
            self._full = True
            if not self._pressed:
                self._link.pause_writing()

    def _pass_on(self, buffers: tuple[Buffer, ...] | None) -> None:
        if buffers is None:
            self._inner.close()
        elif self._inner.is_closing():
            return
        elif len(buffers) == 1:
            self._inner.write(buffers[0])
        else:
            self._inner.writelines(buffers)
        if self._full and self._line.held_bytes <= self._window // 2:
            self._full = False
            if not self._pressed:
                self._link.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self._line.held_bytes + self._inner.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._closing or self._inner.is_closing()

    def close(self) -> None:
        """Close after all written bytes have left."""
        self._closing = True
        if self._line.is_cut:
            self._inner.close()
        else:
            self._line.put(None, 0)

    def abort(self) -> None:
        self._line.cut()
        self._inner.abort()

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    # Called by the inner transport

    def pause_writing(self) -> None:
        self._pressed = True
        if not self._full:
            self._link.pause_writing()

    def resume_writing(self) -> None:
        self._pressed = False
        if not self._full:
            self._link.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._link.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._link.buffer_updated(nbytes)

    def eof_received(self) -> bool:
        return self._link.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._line.cut()
        self._link._transport = self._inner  # ends the reference cycle
        self._link.connection_lost(exc)


class _SlowEnd:
    """A layer between a local link and its other end."""

    def __init__(
        self, link: LocalLink, path: Path, timekeeper: Timekeeper, conditions: PathConditions
    ) -> None:
        self._link = link
        self._other = link._other
        self._line: _Line[tuple[Frame | LinkClosed, int]] = _Line(path, timekeeper, conditions, self._pass_on)
        self._window = _window(conditions, link._config)
        link._other = self

    def _arrive(self, frame: Frame | LinkClosed) -> None:
        cost = 0
        if isinstance(frame, Frame) and frame.message is not None:
            cost = frame.payload_bytes + MESSAGE_COST_BYTES
        # The link counts bytes as unsent until the other end takes them. Bytes in transit are no backlog of
        # the peer: they count only on arrival, or if they exceed the path's window.
        under_way = cost if self._line.held_bytes + cost <= self._window else 0
        self._link._unsent -= under_way
        self._line.put((frame, under_way), cost)

    def _pass_on(self, sent: tuple[Frame | LinkClosed, int]) -> None:
        frame, under_way = sent
        self._link._unsent += under_way
        self._other._arrive(frame)

    def _settle(self, cost: int) -> None:
        self._other._settle(cost)

    def _finish(self, error: TransportError) -> bool:
        self._line.cut()
        return self._other._finish(error)

    async def _reached(self) -> None:
        try:
            async with asyncio.timeout(self._link._config.close_s):
                await self._line.emptied()
        except TimeoutError:
            pass
        finally:
            self._line.hurry()  # also after the time limit, because the CLOSE has been sent
        await self._other._reached()
