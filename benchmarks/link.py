"""Round trips on loopback: our links against ours with checksums, bare sockets, uvloop and gRPC.

A client sends N bytes and waits for a short answer. Our round trip is complete: a numpy tensor in a message
in, a reply message out, with prelude, msgpack meta, role table and counting. Each kind has a server process.
The client alternates between the kinds in rounds, so noise affects all of them, and the medians of
all round trips are compared. Client and server share a core or have one each, equally for all kinds: by
default the kernel places pairs differently, which at 1 KiB is a factor of three.

    python -m benchmarks.link --json FILE [--sizes 1024 65536 1048576 16777216] [--rounds 7]
"""

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from msgspec.msgpack import decode, encode

from transport import Identity, Link, LinkConfig, Message, Request, RoleTable, TcpNetwork

ONE_CORE_BYTES = 1 << 16
"""Size in bytes above which a transfer gains from a second core: sending and receiving overlap."""

SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24]
RULES = RoleTable({"push": {("worker", "ps")}, "ack": {("ps", "worker")}})
WORKER = Identity(role="worker", node="worker-1", incarnation=1)
SERVER = Identity(role="ps", node="ps-1", incarnation=1)
TOKEN = b"a token for measuring"

Timer = Callable[[int], list[float]]


def entropy(count: int) -> bytes:
    return hashlib.shake_128(str(os.getpid()).encode()).digest(count)


def make_network(**config: str) -> TcpNetwork:
    overrides = {**json.loads(os.environ.get("ADAM_BENCH_LINK", "{}")), **config}
    return TcpNetwork(token=TOKEN, entropy=entropy, rules=RULES, config=LinkConfig(**overrides))


# Ours


def ours_server(channel: Any, size: int) -> None:
    import uvloop

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
    import uvloop

    tensor = np.frombuffer(data, np.float32)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        link = runner.run(make_network(**config).dial(address, WORKER))

        async def repeat(count: int) -> list[float]:
            times = []
            for number in range(count):
                begin = time.perf_counter()
                meta = encode({"shard": number, "step": 1})
                await link.call(Message(type="push", meta=meta, tensors=(tensor,)), timeout_s=30)
                times.append(time.perf_counter() - begin)
            return times

        yield lambda count: runner.run(repeat(count))
        runner.run(link.aclose())


# Bare sockets


def socket_server(channel: Any, size: int) -> None:
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
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def repeat(count: int) -> list[float]:
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                connection.sendall(data)
                connection.recv(1)
                times.append(time.perf_counter() - begin)
            return times

        yield repeat


# uvloop, received in place, no framing


class CountingServer(asyncio.BufferedProtocol):
    def __init__(self, size: int) -> None:
        self._size = size
        self._view = memoryview(bytearray(size))
        self._got = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._got :]

    def buffer_updated(self, nbytes: int) -> None:
        self._got += nbytes
        if self._got == self._size:
            self._got = 0
            self._transport.write(b"k")


class WaitingClient(asyncio.Protocol):
    waiter: "asyncio.Future[None]"

    def data_received(self, data: bytes) -> None:
        self.waiter.set_result(None)


def unframed_server(channel: Any, size: int) -> None:
    import uvloop

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: CountingServer(size), "127.0.0.1", 0)
        channel.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


@contextmanager
def unframed_client(port: int, data: bytearray) -> Iterator[Timer]:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def connect() -> tuple[Any, WaitingClient]:
            return await asyncio.get_running_loop().create_connection(WaitingClient, "127.0.0.1", port)

        transport, protocol = runner.run(connect())
        view = memoryview(data)

        async def repeat(count: int) -> list[float]:
            loop = asyncio.get_running_loop()
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                protocol.waiter = loop.create_future()
                transport.write(view)
                await protocol.waiter
                times.append(time.perf_counter() - begin)
            return times

        yield lambda count: runner.run(repeat(count))
        transport.close()


# uvloop streams


def streams_server(channel: Any, size: int) -> None:
    import uvloop

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readexactly(size)
                writer.write(b"k")
        except asyncio.IncompleteReadError:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=4 << 20)
        channel.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


@contextmanager
def streams_client(port: int, data: bytearray) -> Iterator[Timer]:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection("127.0.0.1", port)

        reader, writer = runner.run(connect())

        async def repeat(count: int) -> list[float]:
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                writer.write(data)
                await reader.readexactly(1)
                times.append(time.perf_counter() - begin)
            return times

        yield lambda count: runner.run(repeat(count))
        writer.close()


# gRPC


def grpc_server(channel: Any, size: int) -> None:
    from concurrent import futures

    import grpc

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"k")

    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel.send(port)
    server.wait_for_termination()


@contextmanager
def grpc_client(port: int, data: bytearray) -> Iterator[Timer]:
    import grpc

    with grpc.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        call = channel.unary_unary("/bench/echo")
        payload = bytes(data)

        def repeat(count: int) -> list[float]:
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                call(payload, wait_for_ready=True)
                times.append(time.perf_counter() - begin)
            return times

        yield repeat


KINDS: dict[str, tuple[Callable[[Any, int], None], Callable[..., Any]]] = {
    "ours": (ours_server, ours_client),
    "ours with checksums": (ours_server, partial(ours_client, checksum="on")),
    "bare sockets": (socket_server, socket_client),
    "unframed uvloop": (unframed_server, unframed_client),
    "uvloop streams": (streams_server, streams_client),
    "grpc": (grpc_server, grpc_client),
}


def place(cores: list[int]) -> None:
    """Run this process, and the processes that it starts, on these cores, if the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def measure(size: int, kinds: list[str], rounds: int, cores: list[int]) -> dict[str, float]:
    """Return the median seconds of a round trip of ``size`` bytes, by kind.

    The server runs on the first of ``cores``, the client on the last.
    """
    data = bytearray(np.random.default_rng(1).bytes(size))
    count = max(5, min(1000, (1 << 27) // size))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        timers = {}
        for kind in kinds:
            server, client = KINDS[kind]
            ours, theirs = context.Pipe()
            process = context.Process(target=server, args=(theirs, size), daemon=True)
            place(cores[:1])
            process.start()
            place(cores[-1:])
            stack.callback(process.join)
            stack.callback(process.terminate)
            timers[kind] = stack.enter_context(client(ours.recv(), data))
            timers[kind](max(3, count // 10))
        for _ in range(rounds):
            for kind, timer in timers.items():
                times[kind] += timer(count)
    return {kind: statistics.median(values) for kind, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="file for the rows, as JSON")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=None)
    args = parser.parse_args()
    kinds = args.kinds or list(KINDS)
    if args.kinds is None:
        try:
            import grpc  # noqa: F401
        except ImportError:
            kinds.remove("grpc")
    rows = []
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    cases = [(size, cores) for size in args.sizes for cores in (available[:1], available[:2])]
    for size, cores in cases:
        if len(cores) == 1 and size > ONE_CORE_BYTES:
            continue
        medians = measure(size, kinds, args.rounds, cores)
        for kind in kinds[1:]:
            ours_us, peer_us = medians["ours"] * 1e6, medians[kind] * 1e6
            # Times, so a ratio below 1 means that ours is faster; speed relative to the peer is its inverse.
            rows.append(
                {
                    "case": f"round trip {size} B on {len(cores)} core(s) against {kind}",
                    "ours": round(ours_us, 1),
                    "peer": round(peer_us, 1),
                    "ratio": round(ours_us / peer_us, 3),
                    "unit": "us",
                }
            )
            row = rows[-1]
            print(f"{row['case']:60s} ours {row['ours']:9} us  peer {row['peer']:9} us  ratio {row['ratio']}")
    if args.json:
        report = {"python": sys.version.split()[0], "machine": platform.platform(), "rows": rows}
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
