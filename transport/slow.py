"""A network with simulated latency on the links between two nodes.

    async with SlowNetwork(network, delay_s=0.005, dice=Random(7), between=("worker-0", "ps-0")) as slow:
        ...                                                 # listen and dial with `slow`

The slow layer replaces the layer below a link: a TCP link's asyncio transport, or a local link's other end.
So the link itself is unchanged and keeps all its promises. All that the link sends (messages, requests,
replies, signals, pings, CLOSE) is delayed in order, and only a closing side waits for it. Each side delays
the bytes that it sends. A `SlowNetwork` with both ends slows both directions; if the ends are in two
processes, each process needs a `SlowNetwork`. Dialling and the handshake are not delayed.

Event loops wait in whole milliseconds: asyncio rounds the time-out of `epoll` up, as does libuv. A thread can
sleep for shorter times. The thread sleeps until the next timer, and wakes the loop once for all timers due
then. docs/how-to/stragglers.md has the measured lateness; if other threads hold the interpreter's lock, it
grows by up to `sys.getswitchinterval`. No timer fires early, except at the end of the block.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from transport.errors import LinkClosed, TransportError
from transport.frames import Frame
from transport.intake import MESSAGE_COST_BYTES
from transport.link import Link
from transport.local import LocalLink
from transport.messages import Identity
from transport.network import Listener, Network, OnLink
from transport.protocol import Buffer
from transport.stream import StreamLink


class RandomSource(Protocol):
    """Source of random numbers for jitter and faults, such as a seeded ``random.Random``."""

    def random(self) -> float:
        """Return a number in [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathConditions:
    """Delay and bandwidth of one direction of a path.

    Attributes:
        delay_s: Seconds from one end to the other.
        jitter_s: Maximum additional seconds, drawn uniformly for each transfer.
        bytes_per_s: Bandwidth in bytes per second; None for no limit.

    Raises:
        ValueError: A number is negative, or the bandwidth is not positive.
    """

    delay_s: float
    jitter_s: float = 0.0
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not (self.delay_s >= 0 and self.jitter_s >= 0):
            raise ValueError(
                f"delay_s and jitter_s must not be negative, they are {self.delay_s} and {self.jitter_s}"
            )
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive or None, not {self.bytes_per_s}")


class Path:
    """One direction of a path. Arrivals keep the order of sending.

    Args:
        conditions: Delay and bandwidth of the direction.
        dice: Source of the jitter; unused without jitter.
    """

    __slots__ = ("_conditions", "_dice", "_free_at", "_last")

    def __init__(self, conditions: PathConditions, dice: RandomSource) -> None:
        self._conditions = conditions
        self._dice = dice
        self._free_at = float("-inf")
        self._last = float("-inf")

    def arrival(self, *, now: float, nbytes: int) -> float:
        """Send ``nbytes`` and return when the last of them arrives, on the clock of ``now``.

        With a bandwidth, bytes wait until all earlier bytes have passed.
        """
        conditions = self._conditions
        left = now
        if conditions.bytes_per_s is not None:
            left = self._free_at = max(now, self._free_at) + nbytes / conditions.bytes_per_s
        late_s = conditions.jitter_s * self._dice.random() if conditions.jitter_s else 0.0
        arrives = left + conditions.delay_s + late_s
        if arrives > self._last:
            self._last = arrives
        return self._last


class Timekeeper:
    """Calls functions on the loop at given times; functions for one time run in the order of `call_at` calls.

    An asynchronous context manager. The end of the block calls all waiting functions at once, in order, and
    ends the thread; later functions are called at once.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        # Under the condition's lock, which both threads hold for only a few instructions:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0
        self.is_open = False
        # Shared by thread and loop without a lock:
        self._due: deque[tuple[float, int, Callable[[], None]]] = deque()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.is_open = True
        # A daemon, because the thread must not prevent a second Ctrl-C from ending the process.
        self._thread = Thread(target=self._watch, name=self._name, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self.is_open = False
            self._changed.notify()
        self._thread.join()  # short, because the thread only waits for this notification
        while self._waiting:
            self._due.append(heappop(self._waiting))
        self._call_due()

    def clock(self) -> float:
        """Return the time on the clock of `call_at`, in seconds."""
        return time.monotonic()

    def call_at(self, due: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop at ``due``; callable on the loop only."""
        with self._changed:
            if self.is_open:
                self._asked += 1
                heappush(self._waiting, (due, self._asked, callback))
                if self._waiting[0][1] == self._asked:  # due before the end of the thread's sleep
                    self._changed.notify()
                return
        callback()

    def _watch(self) -> None:
        """Sleep until a timer is due, repeatedly. Body of the thread."""
        while True:
            with self._changed:
                while self.is_open and (left_s := self._left_s()) > 0:
                    self._changed.wait(left_s - NAP_S if left_s > 2 * NAP_S else left_s)
                if not self.is_open:
                    return
                while self._waiting and self._left_s() <= 0:
                    self._due.append(heappop(self._waiting))
            try:
                self._loop.call_soon_threadsafe(self._call_due)
            except RuntimeError:  # the loop was closed
                return

    def _left_s(self) -> float:
        if not self._waiting:
            return MOST_SLEEP_S
        return min(self._waiting[0][0] - WAKE_UP_S - self.clock(), MOST_SLEEP_S)

    def _call_due(self) -> None:
        while self._due:
            if self.is_open and self._due[0][0] > self.clock():
                self._loop.call_soon(self._call_due)  # due in a few iterations
                return
            callback = self._due.popleft()[2]
            try:
                callback()
            except Exception as error:  # an error of one callback must not lose the other callbacks
                self._loop.call_exception_handler(
                    {"message": f"a callback of {self._name} raised", "exception": error}
                )


MOST_SLEEP_S = 3600.0
"""Length of the thread's sleep without a timer, and maximum length of any sleep, in seconds."""

WAKE_UP_S = 0.00015
"""Time in seconds for waking the loop; the thread wakes the loop this much before a timer is due. A loop that
wakes too early iterates until the timer is due."""

NAP_S = 0.0005
"""Length of a sleep's last part, in seconds. A long sleep has two parts, because a core that slept longer
wakes up more slowly."""


WINDOW_BYTES = 64 << 20
"""Maximum bytes in transit on a path before its senders wait."""

T = TypeVar("T")


class SlowNetwork(Network):
    """A network that delays messages between two nodes, by ``delay_s`` in each direction.

    An asynchronous context manager: make and close links inside its block. The end of the block delivers all
    delayed messages at once, and ends the thread.

    Args:
        inner: The network that makes the links: a `LocalNetwork`, a `TcpNetwork`, or another `SlowNetwork`
            between other nodes.
        delay_s: Seconds from one side to the other.
        jitter_s: Maximum additional seconds, drawn for each iteration of the loop that sends.
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
        dice: RandomSource,
        between: tuple[str, str],
    ) -> None:
        self.inner = inner
        self.conditions = PathConditions(delay_s=delay_s, jitter_s=jitter_s)
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

    async def dial_once(self, address: str, identity: Identity, peer_role: str | None) -> Link:
        link = await self.inner.dial_once(address, identity, peer_role)
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
        if isinstance(link, StreamLink):
            _SlowTransport(link, path, self._timekeeper)
        elif isinstance(link, LocalLink):
            _SlowEnd(link, path, self._timekeeper)
        else:
            raise TypeError(f"{link!r} is neither a TCP nor a local link: wrap a network that makes those")

    def __repr__(self) -> str:
        return f"<SlowNetwork {self.conditions} over {self.inner!r}>"


class _Line(Generic[T]):
    """Items that one side of a link has sent and the other side has not received.

    The items of one iteration of the loop arrive together.
    """

    def __init__(self, path: Path, timekeeper: Timekeeper, hand_over: Callable[[T], None]) -> None:
        self.held_bytes = 0
        self.is_cut = False
        self._path = path
        self._timekeeper = timekeeper
        self._hand_over = hand_over
        self._loop = asyncio.get_running_loop()
        self._turn: list[tuple[T, int]] = []
        self._began = 0.0
        self._under_way: deque[list[tuple[T, int]]] = deque()
        self._emptied: asyncio.Future[None] | None = None

    def put(self, item: T, nbytes: int) -> None:
        """Send an item; a cut line drops the item."""
        if self.is_cut:
            return
        if not self._turn:
            self._began = self._timekeeper.clock()
            self._loop.call_soon(self._depart)
        self._turn.append((item, nbytes))
        self.held_bytes += nbytes

    def _depart(self) -> None:
        """Begin the transit of the items that were sent in one iteration of the loop."""
        batch, self._turn = self._turn, []
        if batch:
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


class _SlowTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """A layer between a TCP link and its transport: the link's transport, and the transport's protocol."""

    def __init__(self, link: StreamLink, path: Path, timekeeper: Timekeeper) -> None:
        super().__init__()
        self._link = link
        self._inner = link._transport
        self._line: _Line[tuple[Buffer, ...] | None] = _Line(path, timekeeper, self._pass_on)
        self._closing = False
        self._full = False
        self._pressed = False
        link._transport, link._descriptor = self, -1
        self._inner.set_protocol(self)

    # Called by the link

    def write(self, data: Any) -> None:
        self._put((data,), len(data))

    def writelines(self, list_of_data: Any) -> None:
        buffers = tuple(list_of_data)
        self._put(buffers, sum(map(len, buffers)))

    def _put(self, buffers: tuple[Buffer, ...], nbytes: int) -> None:
        self._line.put(buffers, nbytes)
        if not self._full and self._line.held_bytes >= WINDOW_BYTES:
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
        if self._full and self._line.held_bytes <= WINDOW_BYTES // 2:
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

    def __init__(self, link: LocalLink, path: Path, timekeeper: Timekeeper) -> None:
        self._link = link
        self._other = link._other
        self._line: _Line[tuple[Frame | LinkClosed, int]] = _Line(path, timekeeper, self._pass_on)
        link._other = self

    def _arrive(self, frame: Frame | LinkClosed) -> None:
        cost = 0
        if isinstance(frame, Frame) and frame.message is not None:
            cost = frame.payload_bytes + MESSAGE_COST_BYTES
        # The link counts bytes as unsent until the other end takes them. Bytes in transit are not a backlog
        # of the peer: they count only on arrival, or if they exceed the window.
        under_way = cost if self._line.held_bytes + cost <= WINDOW_BYTES else 0
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
