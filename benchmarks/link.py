"""Round trips within a host: our links over TCP beside ours in shared memory, and links of others.

    python -m benchmarks.link --json FILE [--sizes 1024 65536 1048576 16777216] [--rounds 7]
    python -m benchmarks.link --copies --sizes 4096 65536 1048576 16777216 67108864

A client sends N bytes and waits for a short answer. Our round trip is complete: a numpy tensor in a message
in, a reply message out, with prelude, msgpack meta, role table and counting. Each kind has a server process,
and the values of a row are medians of a round's round trips. Client and server share a core or have one each,
equally for all kinds: by default the kernel places pairs differently, which at 1 KiB is a factor of three.

*in shared memory* sends an array of the program, *from a region* one in memory that the server maps.
A *memory copy* has no server: one process copies the bytes, within its memory. *grpc.aio* needs `grpcio`.

`--copies` counts instead of measuring: the bytes that both processes and the kernel copy for each byte sent
(`copied_bytes`). It is the table of "RPC Considered Harmful": messages, and memory without messages.
"""

import asyncio
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from msgspec.msgpack import decode, encode
from numpy.typing import NDArray

from benchmarks.copied_bytes import bytes_in, counted
from benchmarks.harness import Option, Row, apart, beside, compared, run, turns
from transport import Identity, Link, LinkConfig, Message, Request, RoleTable, TcpNetwork
from transport.config import MOST_SHARED_BYTES
from transport.regions import Region

ONE_CORE_BYTES = 1 << 16
"""Size in bytes above which a transfer gains from a second core: sending and receiving overlap."""

RULES = RoleTable({"push": {("worker", "ps")}, "ack": {("ps", "worker")}})
WORKER = Identity(role="worker", node="worker-1", incarnation=1)
SERVER = Identity(role="ps", node="ps-1", incarnation=1)
TOKEN = b"a token for measuring"

Timer = Callable[[int], list[float]]
"""Makes round trips, and returns the seconds of each."""


def make_network(**config: Any) -> TcpNetwork:
    """Return the network of our links, with the options of `ADAM_BENCH_LINK` as JSON."""
    overrides = {**json.loads(os.environ.get("ADAM_BENCH_LINK", "{}")), **config}
    return TcpNetwork(token=TOKEN, entropy=os.urandom, rules=RULES, config=LinkConfig(**overrides))


@contextmanager
def on_loop(
    connect: Callable[[], Any],
    close: Callable[[Any], Any],
    make_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> Iterator[tuple[Any, Any]]:
    """Yield a runner of an event loop and a connection on it."""
    with asyncio.Runner(loop_factory=make_loop) as runner:
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
        link.serve(handle, in_place={"push"})  # as parameter servers read gradients
        await link.wait_closed()

    async def main() -> None:
        async with make_network(link="auto").listen("tcp://127.0.0.1:0", SERVER, on_link) as listener:
            channel.send(listener.address)
            await asyncio.Event().wait()

    uvloop.run(main())


@contextmanager
def ours_client(address: str, data: bytearray, in_region: bool = False, **config: Any) -> Iterator[Timer]:
    """Send the bytes as a tensor."""
    tensor = np.frombuffer(data, np.float32)
    if in_region:
        region = Region.allocate(len(data)).view(np.float32)
        region[:] = tensor
        tensor = region
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


# --- grpc.aio ------------------------------------------------------------------------------------

GRPC = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def grpc_server(channel: Connection, size: int) -> None:
    """Answer each N bytes with one."""
    import grpc

    async def answer(request: bytes, context: object) -> bytes:
        return b"k"

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        """Answers every method, without serialising."""

        def service(self, details: object) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    async def main() -> None:
        server = grpc.aio.server(options=GRPC)
        server.add_generic_rpc_handlers((Handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel.send(port)
        await server.wait_for_termination()

    asyncio.run(main())


@contextmanager
def grpc_client(port: int, data: bytearray) -> Iterator[Timer]:
    """Send the bytes as the whole message, so that nothing is serialised."""
    import grpc

    async def connect() -> Any:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=GRPC)

    payload = bytes(data)
    with on_loop(connect, lambda channel: channel.close(), asyncio.new_event_loop) as (runner, channel):
        call = channel.unary_unary("/benchmarks/link")
        yield loop_times(runner, lambda number: call(payload, wait_for_ready=True))


# --- no link: the bytes are copied once --------------------------------------------------------------


def no_server(channel: Connection, size: int) -> None:
    """Wait."""
    channel.send(None)
    threading.Event().wait()


@contextmanager
def memory_client(server: None, data: bytearray) -> Iterator[Timer]:
    """Copy the bytes within this process."""
    values, copy = np.frombuffer(data, np.uint8), np.zeros(len(data), np.uint8)
    yield partial(times_of, lambda: np.copyto(copy, values))


# --- all of them ---------------------------------------------------------------------------------

in_shared_memory = partial(ours_client, link="shared", shared_bytes=MOST_SHARED_BYTES)

KINDS: dict[str, tuple[Callable[..., None], Callable[..., AbstractContextManager[Timer]]]] = {
    "ours": (ours_server, ours_client),
    "ours with checksums": (ours_server, partial(ours_client, checksum="on")),
    "ours in shared memory": (ours_server, in_shared_memory),
    "ours from a region": (ours_server, partial(ours_client, in_region=True, link="shared")),
    "bare sockets": (socket_server, socket_client),
    "unframed uvloop": (unframed_server, unframed_client),
    "grpc.aio": (grpc_server, grpc_client),
    "memory copy": (no_server, memory_client),
}

COPIED = ["grpc.aio", "ours", "ours in shared memory", "ours from a region", "memory copy"]
"""Kinds whose copies are counted."""


def place(cores: list[int]) -> None:
    """Run this process, and the processes that it starts, on these cores, if the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def medians(size: int, kinds: list[str], rounds: int, cores: list[int]) -> dict[str, list[float]]:
    """Return the median microseconds of each round's round trips of ``size`` bytes, by kind.

    The server runs on the first of ``cores``, the client on the last.
    """
    data = bytearray(np.random.default_rng(1).bytes(size))
    count = trips(size)
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


def trips(size: int) -> int:
    """Return the number of round trips of a median."""
    return max(5, min(1000, (1 << 27) // size))


def make_trips(kind: str, address: Any, size: int, counts: Path, count: int) -> NDArray[np.float64]:
    """Make round trips; returns the bytes copied by the processes, and by the kernel, for each byte."""
    data = bytearray(np.random.default_rng(1).bytes(size))
    with KINDS[kind][1](address, data) as timer:
        timer(max(3, count // 10))
        before = bytes_in(counts)
        timer(count)
        return (bytes_in(counts) - before) / (count * size)


def copies(size: int, kind: str) -> Row:
    """Return the row of the bytes that are copied for each byte."""
    with tempfile.TemporaryDirectory() as folder, counted(Path(folder)) as counts:
        with beside(KINDS[kind][0], size) as channel:
            found = apart(make_trips, kind, channel.recv(), size, counts, trips(size))
    by_processes, by_kernel = (round(float(each), 2) for each in found)
    return {"case": f"copies of {size} B by {kind}", "processes": by_processes, "kernel": by_kernel}


def measure(options: Namespace) -> Iterator[Row]:
    """Yield a row for each size, number of cores and kind, or for each size and kind whose copies count."""
    if options.copies:
        yield from (copies(size, kind) for size in options.sizes for kind in COPIED)
        return
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
        copies=Option(False, "count copies instead of measuring"),
    )
