"""Seconds until a member joins a listener during a flood of connections without the token.

A listener runs in one process, attackers in another: 500 connections that send nothing, 500 that send one
byte at a time, 500 that send noise, 500 that send a valid first record and no second; each connects again as
soon as it closes. During the flood a member with the token dials repeatedly, and its longest join counts. The
attackers have the member's address, or 127.0.0.2. The first row is a listener without attackers.

    python -m benchmarks.flood --json FILE [--attackers 500] [--joins 10] [--loop uvloop] [--limit 256]
"""

import asyncio
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.harness import Option, Row, beside, run
from transport import Identity, LinkConfig, RoleTable, TcpNetwork, TransportError
from transport.handshake import RECORD_BYTES, ClientHandshake
from transport.sockets import parse_tcp_address

RULES = RoleTable({"push": {("worker", "ps")}})
WORKER = Identity(role="worker", node="worker-1", incarnation=1)
SERVER = Identity(role="ps", node="ps-1", incarnation=1)
TOKEN = b"a token for measuring"

OWN, OTHER = "127.0.0.1", "127.0.0.2"
"""Address of the member, and another address of this machine."""

FLOODS: dict[str, tuple[str, ...]] = {
    "none": (),
    "silent": ("silent",),
    "slow": ("slow",),
    "noise": ("noise",),
    "first records": ("hello",),
    "all kinds": ("silent", "slow", "noise", "hello"),
}

BYTE_EVERY_S = 0.02
"""Seconds between two bytes of a slow attacker: its first record would take 5 s."""

MOST = 1_000_000
"""Maximum number of successive connections of an attacker."""

SETTLE_S = 1.0
"""Seconds from the first connection of an attacker to the first join."""

JOIN_LIMIT_S = 10.0
"""Time-out of a join, in seconds."""


def hello() -> bytes:
    """Return a valid first record, which needs no token."""
    return ClientHandshake(WORKER, token=b"x" * 16, entropy=os.urandom, rules=RULES).hello()


class Attacker(asyncio.Protocol):
    """One connection of an attacker; ``again`` is set when the connection closes."""

    def __init__(self, kind: str, again: "asyncio.Future[None]") -> None:
        self._kind = kind
        self._again = again
        self._record = hello()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._kind == "slow":
            self._drip(0)
        elif self._kind == "noise":
            transport.write(os.urandom(RECORD_BYTES))
        elif self._kind == "hello":
            transport.write(self._record)

    def _drip(self, number: int) -> None:
        if self._transport is not None and number < RECORD_BYTES - 1:
            self._transport.write(self._record[number : number + 1])
            asyncio.get_running_loop().call_later(BYTE_EVERY_S, self._drip, number + 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._again.done():
            self._again.set_result(None)


async def attack(address: str, source: str, kind: str, most: int, made: Callable[[], object]) -> None:
    """Connect, and connect again at once when closed, ``most`` times; call ``made`` for each connection."""
    loop = asyncio.get_running_loop()
    host, port = parse_tcp_address(address)
    for _ in range(most):
        again = loop.create_future()
        with suppress(OSError):
            transport, _ = await loop.create_connection(
                partial(Attacker, kind, again), host, port, local_addr=(source, 0)
            )
            made()
            try:
                await again
            finally:
                transport.abort()


async def flood(
    address: str,
    source: str,
    kinds: tuple[str, ...],
    *,
    attackers: int,
    most: int,
    made: Callable[[], object] = lambda: None,
) -> None:
    """Run this many attackers of each kind, until all have connected ``most`` times or a cancellation."""
    async with asyncio.TaskGroup() as group:
        for number in range(attackers):
            for kind in kinds:
                group.create_task(attack(address, source, kind, most, made), name=f"{kind}-{number}")


def flood_process(channel: Connection, address: str, source: str, kinds: tuple[str, ...], n: int) -> None:
    """Flood with `n` attackers of each kind; answer each message with the number of connections so far."""
    made = 0

    def count() -> None:
        nonlocal made
        made += 1

    async def main() -> None:
        asyncio.get_running_loop().add_reader(channel.fileno(), lambda: channel.send((channel.recv(), made)))
        await flood(address, source, kinds, attackers=n, most=MOST, made=count)
        await asyncio.Event().wait()

    uvloop.run(main())


def listener_process(channel: Connection, loop: str, config: LinkConfig) -> None:
    """Listen until a message, and answer it with the longest stall of the loop, in seconds."""

    async def main() -> None:
        network = TcpNetwork(token=TOKEN, entropy=os.urandom, rules=RULES, config=config)
        async with network.listen(f"tcp://{OWN}:0", SERVER, lambda link: link.wait_closed()) as listener:
            channel.send(listener.address)
            longest_s = 0.0
            while not channel.poll():
                begun = time.perf_counter()
                await asyncio.sleep(0.001)
                longest_s = max(longest_s, time.perf_counter() - begun)
            channel.send(longest_s)

    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


async def join(address: str, joins: int) -> list[float]:
    """Dial this many times in sequence; return the seconds of each dial, infinite for a failed one."""
    network = TcpNetwork(token=TOKEN, entropy=os.urandom, rules=RULES)
    times = []
    for _ in range(joins):
        begun = time.perf_counter()
        try:
            link = await network.dial(address, WORKER, timeout_s=JOIN_LIMIT_S)
        except TransportError:
            times.append(float("inf"))
            continue
        times.append(time.perf_counter() - begun)
        await link.aclose()
        await asyncio.sleep(0.1)
    return times


def joined(kinds: tuple[str, ...], source: str, options: Namespace) -> tuple[list[float], float, float]:
    """Return the seconds of each join, the listener's longest stall, and attackers' connections per s."""
    config = LinkConfig(max_unauthenticated=options.limit)

    def connections() -> int:
        attackers.send(None)
        return int(attackers.recv()[1])

    with beside(listener_process, options.loop, config) as listener:
        address = listener.recv()
        with beside(flood_process, address, source, kinds, options.attackers) as attackers:
            while kinds and not connections():
                time.sleep(0.01)
            time.sleep(SETTLE_S)
            before, begun = connections(), time.perf_counter()
            times = asyncio.run(join(address, options.joins))
            rate = (connections() - before) / (time.perf_counter() - begun)
        listener.send("end")
        return times, listener.recv(), rate


def measure(options: Namespace) -> Iterator[Row]:
    """Yield a row for each flood and address."""
    for name in options.floods:
        kinds = FLOODS[name]
        for source in (OWN, OTHER) if kinds else (OWN,):
            times, stall_s, rate = joined(kinds, source, options)
            whose = "the member's address" if source == OWN else "another address"
            yield {
                "case": f"join beside {options.attackers} x {name} from {whose}",
                "median_ms": round(statistics.median(times) * 1e3, 1),
                "longest_ms": round(max(times) * 1e3, 1),
                "failed": times.count(float("inf")),
                "joins": len(times),
                "longest_stall_ms": round(stall_s * 1e3, 1),
                "connections_per_s": round(rate),
            }


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        attackers=Option(500, "connections of each kind"),
        joins=10,
        loop=Option("uvloop", choices=["asyncio", "uvloop"]),
        limit=Option(LinkConfig().max_unauthenticated, "unauthenticated connections of the listener"),
        floods=Option(list(FLOODS), choices=list(FLOODS)),
    )
