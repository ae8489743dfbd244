"""Round trips on loopback: our links beside ours with checksums, bare sockets and unframed uvloop.

    python -m benchmarks.link --json FILE [--sizes 1024 65536 1048576 16777216] [--rounds 7]

A client sends N bytes and waits for a short answer. Our round trip is complete: a numpy tensor in a message
in, a reply message out, with prelude, msgpack meta, role table and counting. Each kind has a server process,
and the values of a row are medians of a round's round trips. Client and server share a core or have one each,
equally for all kinds: by default the kernel places pairs differently, which at 1 KiB is a factor of three.
"""

import asyncio
import json
import os
import socket
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop
from msgspec.msgpack import decode, encode

from benchmarks.harness import Option, Row, beside, compared, run, turns
from transport import Identity, Link, LinkConfig, Message, Request, RoleTable, TcpNetwork

ONE_CORE_BYTES = 1 << 16
"""Size in bytes above which a transfer gains from a second core: sending and receiving overlap."""

RULES = RoleTable({"push": {("worker", "ps")}, "ack": {("ps", "worker")}})
WORKER = Identity(role="worker", node="worker-1", incarnation=1)
SERVER = Identity(role="ps", node="ps-1", incarnation=1)
TOKEN = b"a token for measuring"

Timer = Callable[[int], list[float]]
"""Makes round trips, and returns the seconds of each."""


def make_network(**config: str) -> TcpNetwork:
    """Return the network of our links, with the options of `ADAM_BENCH_LINK` as JSON."""
    overrides = {**json.loads(os.environ.get("ADAM_BENCH_LINK", "{}")), **config}
    return TcpNetwork(token=TOKEN, entropy=os.urandom, rules=RULES, config=LinkConfig(**overrides))


@contextmanager
def on_loop(connect: Callable[[], Any], close: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Yield a runner of an event loop and a connection on it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        connection = runner.run(connect())
        yield runner, connection
        runner.run(close(connection))


def loop_times(runner: Any, trip: Callable[[int], Any]) -> Timer:
    """Return a function that makes round trips on an event loop, and returns the seconds of each."""

    async def repeat(count: int) -> list[float]:
        times = []
        for number in range(count):
            begin = time.perf_counter()
            await trip(number)
            times.append(time.perf_counter() - begin)
        return times

    return lambda count: runner.run(repeat(count))


def times_of(trip: Callable[[], object], count: int) -> list[float]:
    """Make round trips without an event loop; returns the seconds of each."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        trip()
        times.append(time.perf_counter() - begin)
    return times


# --- ours ----------------------------------------------------------------------------------------


def ours_server(channel: Connection, size: int) -> None:
    """Answer each push with its meta."""

    def handle(request: Request) -> None:
        request.reply(Message(type="ack", meta=encode(decode(request.message.meta))))

    async def on_link(link: Link) -> None:
        link.serve(handle)
        await link.wait_closed()

    async def main() -> None:
        async with make_network().listen("tcp://127.0.0.1:0", SERVER, on_link) as listener:
            channel.send(listener.address)
            await asyncio.Event().wait()

    uvloop.run(main())


@contextmanager
def ours_client(address: str, data: bytearray, **config: str) -> Iterator[Timer]:
    """Send the bytes as a tensor."""
    tensor = np.frombuffer(data, np.float32)
    with on_loop(lambda: make_network(**config).dial(address, WORKER), Link.aclose) as (runner, link):

        async def trip(number: int) -> None:
            meta = encode({"shard": number, "step": 1})
            await link.call(Message(type="push", meta=meta, tensors=(tensor,)), timeout_s=30)

        yield loop_times(runner, trip)


# --- bare sockets --------------------------------------------------------------------------------


def socket_server(channel: Connection, size: int) -> None:
    """Answer each N bytes with one."""
    listener = socket.create_server(("127.0.0.1", 0))
    channel.send(listener.getsockname()[1])
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view = memoryview(bytearray(size))
    while True:
        got = 0
        while got < size:
            count = peer.recv_into(view[got:])
            if not count:
                return
            got += count
        peer.sendall(b"k")


@contextmanager
def socket_client(port: int, data: bytearray) -> Iterator[Timer]:
    """Send the bytes on a blocking socket."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def trip() -> None:
            connection.sendall(data)
            connection.recv(1)

        yield partial(times_of, trip)


# --- uvloop, received in place, no framing -------------------------------------------------------


class CountingServer(asyncio.BufferedProtocol):
    """Answers each N bytes with one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._view = memoryview(bytearray(size))
        self._got = 0

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the room for the rest of the bytes."""
        return self._view[self._got :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count received bytes."""
        self._got += nbytes
        if self._got == self._size:
            self._got = 0
            self._transport.write(b"k")


class WaitingClient(asyncio.Protocol):
    """Ends a wait at each answer."""

    waiter: "asyncio.Future[None]"

    def data_received(self, data: bytes) -> None:
        """End the wait."""
        self.waiter.set_result(None)


def unframed_server(channel: Connection, size: int) -> None:
    """Receive in place."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: CountingServer(size), "127.0.0.1", 0)
        channel.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


@contextmanager
def unframed_client(port: int, data: bytearray) -> Iterator[Timer]:
    """Write the bytes to a transport."""

    async def connect() -> tuple[Any, WaitingClient]:
        return await asyncio.get_running_loop().create_connection(WaitingClient, "127.0.0.1", port)

    async def close(connection: tuple[Any, WaitingClient]) -> None:
        connection[0].close()

    view = memoryview(data)
    with on_loop(connect, close) as (runner, (transport, protocol)):

        async def trip(number: int) -> None:
            protocol.waiter = asyncio.get_running_loop().create_future()
            transport.write(view)
            await protocol.waiter

        yield loop_times(runner, trip)


# --- all of them ---------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[..., None], Callable[..., AbstractContextManager[Timer]]]] = {
    "ours": (ours_server, ours_client),
    "ours with checksums": (ours_server, partial(ours_client, checksum="on")),
    "bare sockets": (socket_server, socket_client),
    "unframed uvloop": (unframed_server, unframed_client),
}


def place(cores: list[int]) -> None:
    """Run this process, and the processes that it starts, on these cores, if the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def medians(size: int, kinds: list[str], rounds: int, cores: list[int]) -> dict[str, list[float]]:
    """Return the median microseconds of each round's round trips of ``size`` bytes, by kind.

    The server runs on the first of ``cores``, the client on the last.
    """
    data = bytearray(np.random.default_rng(1).bytes(size))
    count = max(5, min(1000, (1 << 27) // size))
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        timers: dict[str, Timer] = {}
        for kind, (server, client) in ((kind, KINDS[kind]) for kind in kinds):
            place(cores[:1])
            channel = stack.enter_context(beside(server, size))
            place(cores[-1:])
            timers[kind] = stack.enter_context(client(channel.recv(), data))
            timers[kind](max(3, count // 10))
        for kind in turns(kinds, rounds):
            found[kind].append(1e6 * statistics.median(timers[kind](count)))
    return found


def measure(options: Namespace) -> Iterator[Row]:
    """Yield a row for each size, number of cores and kind."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    for size in options.sizes:
        for cores in (available[:1], available[:2]) if size <= ONE_CORE_BYTES else (available[:2],):
            found = medians(size, options.kinds, options.rounds, cores)
            for kind in options.kinds[1:]:
                case = f"round trip {size} B on {len(cores)} core(s) against {kind}"
                yield compared(case, found["ours"], found[kind], "us", less_is_better=True)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        sizes=[1 << 10, 1 << 16, 1 << 20, 1 << 24],
        rounds=7,
        kinds=Option(list(KINDS), "ours first", choices=list(KINDS)),
    )
