"""A connection without any protocol, for peers that break the protocol."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from transport import HandshakeRejected
from transport.handshake import RECORD_BYTES, ClientHandshake

DIAL_PAUSE_S = 0.2
"""Pause between two attempts to connect, in seconds."""


class RawWire(asyncio.Protocol):
    """One connection, with its received bytes and its end."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.over = self.was_reset = False
        self.news = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.over, self.was_reset = True, exc is not None
        self.news.set()

    def send(self, data: bytes) -> None:
        """Send bytes; does nothing after the end of the connection."""
        assert self.transport is not None
        self.transport.write(data)

    def stop_reading(self) -> None:
        """Stop reading: later bytes stay with the kernel."""
        assert self.transport is not None
        self.transport.pause_reading()

    async def until(self, count: int) -> bytes:
        """Wait for this many bytes or the end; return and drop at most this many bytes."""
        while len(self.received) < count and not self.over:
            self.news.clear()
            await self.news.wait()
        taken, self.received = bytes(self.received[:count]), self.received[count:]
        return taken

    async def record(self) -> bytes:
        """Wait for a record of a handshake.

        Raises:
            ConnectionError: The connection ended first.
        """
        record = await self.until(RECORD_BYTES)
        if len(record) < RECORD_BYTES:
            raise ConnectionError("the server closed the connection")
        return record

    async def prove(self, handshake: ClientHandshake) -> None:
        """Go through a handshake.

        Raises:
            HandshakeRejected: The server refused the client.
            ConnectionError: The server closed the connection.
        """
        self.send(handshake.hello())
        self.send(handshake.receive(await self.record()))
        handshake.receive(await self.record())

    def close(self) -> None:
        """End the connection at once."""
        assert self.transport is not None
        self.transport.abort()


async def dial_authenticated(
    host: str, port: int, make_handshake: Callable[[], ClientHandshake], *, pause_s: float
) -> RawWire:
    """Connect and complete a handshake, with as many attempts as needed and a pause between two."""
    while True:
        wire = await dial_raw(host, port)
        handshake = make_handshake()
        try:
            await wire.prove(handshake)
            return wire
        except (HandshakeRejected, ConnectionError, ValueError):
            wire.close()
            await asyncio.sleep(pause_s)


async def dial_raw(host: str, port: int) -> RawWire:
    """Connect, with as many attempts as needed."""
    while True:
        with suppress(OSError):
            _, wire = await asyncio.get_running_loop().create_connection(RawWire, host, port)
            return wire
        await asyncio.sleep(DIAL_PAUSE_S)
