"""A network whose links between some nodes are slow on purpose, as if there were a long cable between them.

    async with SlowNetwork(network, delay_s=0.005, dice=Random(7), between=("worker-0", "ps-0")) as slow:
        ...                                                 # listen and dial with `slow`

It stands between a link and what carries it: the asyncio transport of a TCP link, the other end of a local
one. So the link is the one that is in use without it, with all of its promises. Whatever it sends (messages,
requests, replies, signals, pings, its goodbye) is held for a while, in order, and nobody waits for that but
who closes the link. Each side holds what it sends: where one `SlowNetwork` has both ends, both directions are
slow; with one per process, both processes have to have one. Dialling and the handshake take no longer.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from transport.config import LinkConfig
from transport.dial import RetrySchedule
from transport.errors import LinkClosed, TransportError
from transport.frames import Frame
from transport.intake import MESSAGE_COST_BYTES
from transport.link import Link
from transport.local import LocalLink
from transport.messages import Identity
from transport.network import DIAL_S, Listener, Network, OnLink
from transport.path import Dice, Path, PathConditions
from transport.protocol import Buffer
from transport.tcp import TcpLink
from transport.timekeeper import Timekeeper

__all__ = ["SlowNetwork"]

Between = tuple[str, str] | Callable[[str, str], bool]
"""Two node ids, or a function that says of two node ids whether the path between them is slow."""

WINDOW_BYTES = 64 << 20
"""So much may be under way on a path of any width before its senders wait."""

T = TypeVar("T")


class SlowNetwork(Network):
    """A network that delays what is said between some nodes, by ``delay_s`` in each direction.

    An asynchronous context manager: links are made inside its block, and should be closed there. Leaving it
    delivers at once what is still held, and ends its thread.

    Args:
        inner: The network that does the work: a `LocalNetwork`, a `TcpNetwork`, or another `SlowNetwork`
            between other nodes.
        delay_s: Seconds from one side to the other.
        jitter_s: Most seconds on top, drawn for each turn of the loop in which something is sent.
        bytes_per_s: How much passes in a second, in each direction of each link; None for as much as comes.
        dice: For the jitter, seeded.
        between: Two node ids, or a function of two node ids.

    Raises:
        ValueError: A number is out of range.
        TypeError: A link is made that this file does not know how to slow.
        RuntimeError: A link is made outside the block.
    """

    def __init__(
        self,
        inner: Network,
        *,
        delay_s: float,
        jitter_s: float = 0.0,
        bytes_per_s: float | None = None,
        dice: Dice,
        between: Between,
    ) -> None:
        self.inner = inner
        self.conditions = PathConditions(delay_s=delay_s, jitter_s=jitter_s, bytes_per_s=bytes_per_s)
        self._dice = dice
        self._between = between
        self._ledger_replica = Timekeeper("slow-network")

    async def __aenter__(self) -> Self:
        await self._ledger_replica.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._ledger_replica.__aexit__(kind, error, trace)

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

    def _concerns(self, one: str, other: str) -> bool:
        if callable(self._between):
            return self._between(one, other)
        return {one, other} == set(self._between)

    def _slow_down(self, link: Link) -> None:
        if not self._concerns(link.identity.node, link.peer.node):
            return
        if not self._ledger_replica.is_open:
            raise RuntimeError("links of a SlowNetwork are made inside its `async with` block")
        path = Path(self.conditions, self._dice)
        if isinstance(link, TcpLink):
            _SlowTransport(link, path, self._ledger_replica, self.conditions)
        elif isinstance(link, LocalLink):
            _SlowEnd(link, path, self._ledger_replica, self.conditions)
        else:
            raise TypeError(f"{link!r} is neither a TCP nor a local link: wrap the network that makes those")

    def __repr__(self) -> str:
        return f"<SlowNetwork {self.conditions} over {self.inner!r}>"


class _Line(Generic[T]):
    """What one side of a link has sent and the other side has not got yet.

    What is sent in one turn of the loop stays together, unless bytes wait for one another.
    """

    def __init__(
        self, path: Path, ledger_replica: Timekeeper, hand_over: Callable[[T], None], *, together: bool
    ) -> None:
        self.held_bytes = 0
        self.is_cut = False
        self._path = path
        self._ledger_replica = ledger_replica
        self._hand_over = hand_over
        self._together = together
        self._loop = asyncio.get_running_loop()
        self._turn: list[tuple[T, int]] = []
        self._began = 0.0
        self._under_way: deque[list[tuple[T, int]]] = deque()
        self._emptied: asyncio.Future[None] | None = None

    def put(self, item: T, nbytes: int) -> None:
        """Send something; dropped if the line is cut."""
        if self.is_cut:
            return
        if not self._turn:
            self._began = self._ledger_replica.clock()
            self._loop.call_soon(self._depart)
        self._turn.append((item, nbytes))
        self.held_bytes += nbytes

    def _depart(self) -> None:
        """The turn is over: what was sent in it sets out."""
        turn, self._turn = self._turn, []
        for batch in [turn] if self._together and turn else [[sent] for sent in turn]:
            arrival = self._path.arrival(now=self._began, nbytes=sum(nbytes for _, nbytes in batch))
            self._under_way.append(batch)
            self._ledger_replica.call_at(arrival, partial(self._arrive, batch))

    def _arrive(self, batch: list[tuple[T, int]]) -> None:
        if not batch:
            return  # it was hurried along, or dropped
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
        """Hand over all at once."""
        if self._turn:
            self._under_way.append(self._turn)
            self._turn = []
        while self._under_way:
            self._arrive(self._under_way[0])

    def cut(self) -> None:
        """Drop everything, now and later."""
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
        """Wait until nothing is held."""
        if self._turn or self._under_way:
            if self._emptied is None:
                self._emptied = self._loop.create_future()
            await asyncio.shield(self._emptied)


def _line(
    path: Path, ledger_replica: Timekeeper, conditions: PathConditions, hand_over: Callable[[T], None]
) -> _Line[T]:
    return _Line(path, ledger_replica, hand_over, together=conditions.bytes_per_s is None)


def _window(conditions: PathConditions, config: LinkConfig) -> int:
    """How many bytes may be held before senders wait: of a narrow path what is under way, and a queue."""
    if conditions.bytes_per_s is None:
        return WINDOW_BYTES
    return min(int(conditions.bytes_per_s * conditions.delay_s) + config.high_water_bytes, WINDOW_BYTES)


class _SlowTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """Stands between a TCP link and its transport: for each of the two it is the other one."""

    def __init__(
        self, link: TcpLink, path: Path, ledger_replica: Timekeeper, conditions: PathConditions
    ) -> None:
        super().__init__()
        self._link = link
        self._inner = link._transport
        self._line: _Line[tuple[Buffer, ...] | None] = _line(path, ledger_replica, conditions, self._pass_on)
        self._window = _window(conditions, link._config)
        self._closing = False
        self._full = False
        self._pressed = False
        link._transport = self
        self._inner.set_protocol(self)

    # What the link calls

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
        """Close when what was written before has left."""
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

    # What the inner transport calls

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
        self._link._transport = self._inner  # the two let go of each other
        self._link.connection_lost(exc)


class _SlowEnd:
    """Stands where a local link has its other end."""

    def __init__(
        self, link: LocalLink, path: Path, ledger_replica: Timekeeper, conditions: PathConditions
    ) -> None:
        self._link = link
        self._other = link._other
        self._line: _Line[tuple[Frame | LinkClosed, int]] = _line(
            path, ledger_replica, conditions, self._pass_on
        )
        self._window = _window(conditions, link._config)
        link._other = self

    def _arrive(self, frame: Frame | LinkClosed) -> None:
        cost = 0
        if isinstance(frame, Frame) and frame.message is not None:
            cost = frame.payload_bytes + MESSAGE_COST_BYTES
        # The link counts as unsent what the other end has not taken. What is under way is nobody's fault, and
        # is not counted until it arrives, unless there is more of it than the path is wide.
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
            self._line.hurry()  # whoever does not wait any longer has nevertheless said goodbye
        await self._other._reached()
