"""One end of a simulated TCP connection: an asyncio transport on a simulated kernel.

The transport keeps written bytes until the connection has room: as with real sockets' buffers, the bytes in
flight or unread at the other side are limited. A writer beyond the limit is paused. Bytes arrive in the order
of the writes, or not at all. The kernel keeps bytes that a frozen program does not read, so the sender stops
at the limit.

A closing end sends an end of the stream or, if it has unread bytes, a reset, as kernels do. A closed end
answers data with a reset. A crashed machine sends no answer. A restarted machine has none of its old
connections, and answers data on them with a reset.
"""

import asyncio
import errno
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial
from typing import Any, Protocol, cast

from tests.simulation.host import Host
from tests.simulation.loop import SimulatedLoop
from tests.simulation.random_streams import RandomStream
from tests.simulation.wire import Wire
from transport.slow import Path, PathConditions

HIGH_WATER_BYTES = 64 << 10
"""Size of the write buffer above which a protocol is paused, in bytes, as in asyncio."""

LOW_WATER_BYTES = 16 << 10
"""Size of the write buffer below which a paused protocol continues, in bytes, as in asyncio."""

RECEIVE_BYTES = 256 << 10
"""Largest number of bytes in one `data_received`, as in asyncio."""

RAGGED = 0.5
"""Share of the pieces cut at random on a ragged wire. A larger share finds no more faults and takes
longer."""

Address = tuple[str, int]


class EndNetwork(Protocol):
    """The part of `SimulatedNetwork` that an end uses."""

    @property
    def loop(self) -> SimulatedLoop:
        """The loop of the run."""

    @property
    def dice(self) -> RandomStream:
        """The network's random stream."""

    def is_up(self, name: str) -> bool:
        """Return whether a machine of that name has power."""

    def send(self, wire: Wire, path: Path, count: int, arrive: Callable[..., object], *args: Any) -> None:
        """Deliver a piece at the other side of a wire."""

    def acknowledge(self, wire: Wire, arrive: Callable[[int], object], count: int) -> None:
        """Report a number of read bytes to the sender, without delay unless the wire to the sender is cut."""

    def damaged(self, end: "End", wire: Wire, payload: bytes) -> bytes:
        """Return a piece for an end; flip one bit if the piece is large."""

    def break_off(self, end: "End") -> None:
        """Reset a connection at both ends."""

    def forget(self, end: "End") -> None:
        """Drop a closed end."""

    def miss(self, end: "End") -> None:
        """Note a piece that arrived at a machine without power."""


class OrdersMemory(Protocol):
    """The part of a `SimulatedSide` that an end uses."""

    def departs(self) -> Callable[[], None]:
        """Return the effect of a piece that leaves now on its receiver's memory."""


def _arrive_behind(effect: Callable[[], None], arrive: Callable[..., object], payload: bytes) -> None:
    effect()
    arrive(payload)


class End(asyncio.Transport):
    """One end.

    Args:
        wire: The direction from here to the other end.
        context: Context for the calls of the protocol.
    """

    def __init__(
        self, network: EndNetwork, host: Host, wire: Wire, address: Address, *, number: int, context: Context
    ) -> None:
        super().__init__()
        self.host = host
        self.address = address
        self.label = f"{number}/{address[0]}"
        self.shut = False
        self.peer = self  # until `join`
        self.side: OrdersMemory | None = None
        """Shared memory of a connection within a host: no wire damages its bytes."""
        self._network = network
        self._loop = network.loop
        self._wire = wire
        conditions = wire.conditions
        self._path = Path(
            PathConditions(
                delay_s=conditions.delay_s, jitter_s=conditions.jitter_s, bytes_per_s=conditions.bytes_per_s
            ),
            network.dice,
        )
        self._context = context
        self._protocol: asyncio.BaseProtocol | None = None
        self._buffered = False
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._out_bytes = 0  # in flight, or unread by the other side
        self._sent_bytes = 0
        self._inbox: deque[bytes] = deque()
        self._hung_up = False
        self._error: OSError | None = None
        self._reading = True
        self._read_asked = self._write_asked = False
        self._writing = True
        self._closing = self._losing = False
        self._high, self._low = HIGH_WATER_BYTES, LOW_WATER_BYTES

    def join(self, peer: "End") -> None:
        """Connect two ends."""
        self.peer, peer.peer = peer, self

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Connect the protocol, on the host of this end."""
        if not self._closing:
            self.set_protocol(protocol)
            protocol.connection_made(self)
            self._ask_to_read()

    # --- the transport, called by code -------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the address of this end or of the other; there is no socket."""
        return {"sockname": self.address, "peername": self.peer.address}.get(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._ask_to_read()

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def write(self, data: bytes | bytearray | memoryview) -> None:
        conditions, count = self._wire.conditions, len(data)
        if (
            type(data) is bytes
            and 0 < count <= conditions.segment_bytes
            and self._out_bytes + count <= conditions.window_bytes
            and not (self._unsent or self._closing or conditions.ragged)
            and self._error is None
        ):
            self._depart(data, count)  # fast path of the usual case
        else:
            self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        if self._closing:
            return
        for data in list_of_data:
            size = len(data) if type(data) is bytes else memoryview(data).nbytes
            if size:
                self._unsent.append(data if type(data) is bytes else memoryview(data).cast("B"))
                self._unsent_bytes += size
        self._transmit()
        if self._unsent_bytes > self._high and self._writing:
            self._writing = False
            self.get_protocol().pause_writing()

    def close(self) -> None:
        """Close the socket after sending the written bytes."""
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._lose(None)

    def abort(self) -> None:
        """Drop unsent bytes and close the socket."""
        self._closing = True
        self._drop_unsent()
        self._lose(None)

    # --- between code and kernel -------------------------------------------------------------

    def _call(self, callback: Callable[..., object], *args: object) -> None:
        self._loop.call_soon(callback, *args, context=self._context)

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _lose(self, error: OSError | None) -> None:
        if not self._losing:
            self._losing = True
            self._call(self._lost, error)

    def _lost(self, error: OSError | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(error)
        self.close_socket()

    def _fail(self, error: OSError) -> None:
        self._closing = True
        self._drop_unsent()
        self._lose(error)

    def _ask_to_read(self) -> None:
        if (self._inbox or self._hung_up or self._error is not None) and self._may_read():
            self._read_asked = True
            self._call(self._read)

    def _may_read(self) -> bool:
        return not (self._read_asked or self._closing) and self._reading and self._protocol is not None

    def _read(self) -> None:
        """Deliver the bytes that one read of a socket would return."""
        self._read_asked = False
        if not self._reading or self._closing:
            return
        if self._error is not None:
            self._fail(self._error)
        elif self._inbox:
            self._deliver()
            self._ask_to_read()
        elif self._hung_up:
            self._hung_up = False
            if not cast(asyncio.Protocol, self.get_protocol()).eof_received():
                self.close()

    def _deliver(self) -> None:
        if not self._buffered:
            data = self._take(RECEIVE_BYTES)
            self.peer.was_read(len(data))
            cast(asyncio.Protocol, self.get_protocol()).data_received(data)
            return
        protocol = cast(asyncio.BufferedProtocol, self._protocol)
        buffer = protocol.get_buffer(-1)
        if type(buffer) is not memoryview or buffer.format != "B":
            buffer = memoryview(buffer).cast("B")
        data = self._take(len(buffer))
        count = len(data)
        buffer[:count] = data
        self.peer.was_read(count)
        protocol.buffer_updated(count)

    def _take(self, limit: int) -> bytes:
        """Take at most `limit` bytes from the inbox."""
        inbox = self._inbox
        if len(inbox) == 1 and len(inbox[0]) <= limit:
            return inbox.popleft()
        taken: list[bytes] = []
        while inbox and limit:
            head = inbox.popleft()
            if len(head) > limit:
                inbox.appendleft(head[limit:])
                head = head[:limit]
            taken.append(head)
            limit -= len(head)
        return b"".join(taken)

    def _transmit(self) -> None:
        """Send as many bytes as the window permits."""
        if self._error is not None:
            self._fail(self._error)
            return
        conditions = self._wire.conditions
        while self._unsent and (room := conditions.window_bytes - self._out_bytes) > 0:
            head = self._unsent.popleft()
            count = min(len(head), room, conditions.segment_bytes)
            if conditions.ragged and count > 1 and self._network.dice.chance(RAGGED):
                count = 1 + self._network.dice.below(count)
            if count < len(head):
                self._unsent.appendleft(memoryview(head)[count:])
                head = head[:count]
            self._unsent_bytes -= count
            # Copy at the last moment: code that changes a written buffer sends the change, as with real
            # sockets.
            if not self._depart(bytes(head), count):
                return

    def _depart(self, payload: bytes, count: int) -> bool:
        """Send a piece. Returns whether the connection is still open."""
        self._out_bytes += count
        self._sent_bytes += count
        if self._wire.damages and self.side is None:
            payload = self._network.damaged(self.peer, self._wire, payload)
        self._send(self.peer.arrive, payload, count)
        limit = self._wire.conditions.reset_after_bytes
        if limit is None or self._sent_bytes < limit:
            return True
        self._network.break_off(self)
        return False

    def _send(self, arrive: Callable[..., object], payload: bytes, count: int) -> None:
        if self.side is not None:
            arrive = partial(_arrive_behind, self.side.departs(), arrive)
        self._network.send(self._wire, self._path, count, arrive, payload)

    def _room(self) -> None:
        self._write_asked = False
        if self._losing:
            return
        self._transmit()
        if self._closing:
            if not self._unsent:
                self._lose(None)
        elif not self._writing and self._unsent_bytes <= self._low:
            self._writing = True
            self.get_protocol().resume_writing()

    # --- the kernel, called by the world -----------------------------------------------------

    def close_socket(self) -> None:
        """Close the socket."""
        if not self.shut:
            self.shut = True
            self._network.forget(self)
            if self._error is None:
                self._send(self.peer.reset if self._inbox else self.peer.finish, b"", 0)
            self._inbox.clear()

    def arrive(self, payload: bytes) -> None:
        """Receive bytes."""
        self._loop.note(f"{self.label} {len(payload)} {zlib.crc32(payload)}")
        if self._is_open():
            self._inbox.append(payload)
            if self._may_read():
                self._read_asked = True
                self._loop.call_next(self.host, self._read, self._context)

    def finish(self, _: bytes = b"") -> None:
        """Receive the end of the stream."""
        if not self.shut and self._is_open():
            self._hung_up = True
            self._ask_to_read()

    def reset(self, _: bytes = b"") -> None:
        """Receive a reset."""
        if self.host.up and not self.shut and self._error is None:
            self._loop.note(f"{self.label} reset")
            self._error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            self._inbox.clear()
            self._ask_to_read()
            self._ask_to_write()

    def reset_peer(self) -> None:
        """Answer data for an unknown connection with a reset."""
        self._send(self.peer.reset, b"", 0)

    def drop(self) -> None:
        """Forget this connection, and reset it at the other side."""
        self.shut = True
        self._network.forget(self)
        self.reset_peer()

    def _is_open(self) -> bool:
        """Return whether this end receives data. If not, answer the data as a kernel would."""
        if not self.shut and self.host.up:
            return self._error is None
        if self._network.is_up(self.host.name):
            self.reset_peer()
        else:
            self._network.miss(self)
        return False

    def was_read(self, count: int) -> None:
        """Record that the other side has read bytes; a cut of the reverse wire delays this."""
        if self.peer._wire.cut:
            self._network.acknowledge(self.peer._wire, self._was_read, count)
        else:
            self._was_read(count)

    def _was_read(self, count: int) -> None:
        self._out_bytes -= count
        self._ask_to_write()

    def _ask_to_write(self) -> None:
        if (self._unsent or not self._writing) and not self._write_asked:
            self._write_asked = True
            self._call(self._room)

    def __repr__(self) -> str:
        return f"<End {self.label} to {self.peer.address[0]}>"
