"""The handshake on a new connection, from its first byte until it has a link."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from transport.budget import Budget
from transport.config import LinkConfig
from transport.decoder import Memory
from transport.errors import HandshakeRejected, LinkBroken, LinkClosed, RemoteProtocolError, TransportError
from transport.handshake import RECORD_BYTES, ClientHandshake, Handshake, reject_record
from transport.messages import Identity, RoleTable
from transport.regions import Allowance, Side
from transport.shared import SharedLink
from transport.sockets import format_tcp_address, tune
from transport.stream import StreamLink


class HandshakeProgress(Protocol):
    """The part of a listener's `Entrance` that its greeters use."""

    def connected(self, greeter: "Greeter", host: str) -> None:
        """Note the connection of a greeter from a remote ``host``."""

    def introduced(self, greeter: "Greeter") -> None:
        """Note that the first record of a greeter's client is complete and valid."""

    def gone(self, greeter: "Greeter") -> None:
        """Note that a greeter's connection is closed, or belongs to a link."""


class Greeter(asyncio.BufferedProtocol):
    """Carries out the handshake on a new connection, then hands the connection to a link; with ``side``, the
    `Side` of a connection within this host, to a `SharedLink`.

    The greeter calls ``done`` once, with the link or with the error that ended the handshake. The greeters of
    a listener report their progress to its ``entrance``, which calls `crowd_out` to make room.
    """

    def __init__(
        self,
        handshake: Handshake,
        *,
        config: LinkConfig,
        rules: RoleTable,
        memory: Memory,
        budget: Budget,
        done: "Callable[[StreamLink | TransportError], None]",
        entrance: HandshakeProgress | None = None,
        side: Side | None = None,
        allowance: Allowance,
    ) -> None:
        self._side = side
        self._allowance = allowance
        self._handshake = handshake
        self._config = config
        self._rules = rules
        self._memory = memory
        self._budget = budget
        self._done: Callable[[StreamLink | TransportError], None] | None = done
        self._entrance = entrance
        self._record = bytearray(RECORD_BYTES)
        self._filled = 0
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._connected_at = 0.0
        self._peername: tuple[str, int] = ("", 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: uvloop's transports do not derive from asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        if self._done is None:  # abandoned after the accept
            transport.close()
            return
        self._connected_at = asyncio.get_running_loop().time()
        if isinstance(self._handshake, ClientHandshake):
            self._wait_for("handshake", self._config.handshake_s)
            transport.write(self._handshake.hello())
        else:
            self._wait_for("first record", min(self._config.first_record_s, self._config.handshake_s))
        if self._entrance is not None:
            if self._side is None:
                # A peer that has already hung up has no peername.
                self._peername = transport.get_extra_info("peername") or ("", 0)
            self._entrance.connected(self, self._peername[0])

    @property
    def address(self) -> str:
        """Address of a listener's peer, ``host:port``; empty if the peer hung up before the first step."""
        host, port, *_ = self._peername
        return format_tcp_address(host, port).removeprefix("tcp://") if host else ""

    def _wait_for(self, goal: str, limit_s: float) -> None:
        """Set the time-out of the handshake: refuse the connection ``limit_s`` after its start."""
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_at(self._connected_at + limit_s, self._late, goal, limit_s)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._record)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < RECORD_BYTES:
            return
        self._filled = 0  # also after the end, because a loop must not get an empty buffer
        if self._done is None:
            return
        assert self._transport is not None
        try:
            answer = self._handshake.receive(bytes(self._record))
        except HandshakeRejected as error:
            self._fail(error, send=True)
            return
        except RemoteProtocolError as error:
            self._fail(error)
            return
        except Exception as error:
            self._defect(error)
            return
        if answer:
            self._transport.write(answer)
        if self._handshake.peer is not None:
            self._hand_over(self._handshake.peer)
        elif self._entrance is not None:
            self._wait_for("handshake", self._config.handshake_s)
            self._entrance.introduced(self)

    def _defect(self, error: Exception) -> None:
        """End the handshake after an unexpected error of this side, and report the error."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a handshake raised", "exception": error, "protocol": self}
        )
        self._fail(LinkBroken(f"the handshake ended by a defect: {type(error).__name__}: {error}"))

    def _hand_over(self, peer: Identity) -> None:
        """Make the link of a peer that has proved its identity; the link takes over the connection."""
        assert self._transport is not None
        assert self._done is not None
        if self._deadline is not None:
            self._deadline.cancel()
        # Set options only now: a connection whose handshake fails then costs no system calls for them.
        try:
            tune(self._transport, self._config)
        except OSError as error:  # the peer reset the connection after its last record
            self._fail(LinkBroken(f"connection lost during the handshake: {error}"))
            return
        make: Callable[..., StreamLink] = StreamLink
        if self._side is not None:
            make = partial(SharedLink, side=self._side, allowance=self._allowance)
        link = make(
            self._handshake.identity, peer, self._transport,
            config=self._config, rules=self._rules, memory=self._memory, budget=self._budget,
        )  # fmt: skip
        self._transport.set_protocol(link)
        done, self._done = self._done, None
        if self._entrance is not None:
            self._entrance.gone(self)
        done(link)

    def eof_received(self) -> None:
        self._fail(LinkBroken("the peer hung up during the handshake"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(LinkBroken(f"connection lost during the handshake: {exc or 'the peer hung up'}"))
        if self._entrance is not None:
            self._entrance.gone(self)

    def _late(self, goal: str, limit_s: float) -> None:
        self._fail(HandshakeRejected("late", f"no {goal} within {limit_s:g} s"), send=True)

    def crowd_out(self) -> None:
        """Refuse the connection to make room for other handshakes."""
        text = "too many connections are in their handshake: try again"
        self._fail(HandshakeRejected("crowded", text), send=True)

    def abandon(self) -> None:
        """End the handshake, because the caller no longer waits for the link."""
        self._fail(LinkClosed("this side gave up during the handshake"))

    def _fail(self, error: TransportError, *, send: bool = False) -> None:
        """End the handshake with an error; with `send` the peer gets the reason, unless it refused first."""
        if self._done is None:
            return
        done, self._done = self._done, None
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            if (
                send
                and isinstance(error, HandshakeRejected)
                and not error.text.startswith("the peer refused")
            ):
                self._transport.write(reject_record(error))
            self._transport.close()
        if self._side is not None:
            self._side.close()
        done(error)
