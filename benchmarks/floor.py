"""The shortest honest push and pull over our link: the yardstick of `ParameterStore.push_pull`.

    PYTHONPATH=CHECKOUT FLOOR_LINK=tcp|shared python benchmarks/floor.py [--kind once] [--sizes 1024 65536]

The server, in its own process, validates each message, advances the session's number, refuses a gradient
that is not finite, applies SGD, and answers with the values, which arrive in the client's array. *push*
writes fields as the link takes them; *once* packs them, and decodes them straight into their type, also on a
link that takes builtins; *echo* has an answer without work and values. Prints the rows of a peer.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import argparse
import asyncio
import json
import time
from math import isfinite
from multiprocessing import get_context
from typing import Any

import msgspec
import numpy as np
import uvloop

from transport import BufferPool, Identity, Link, LinkConfig, Message, Request, RoleTable, TcpNetwork

KINDS, RATE = ("push", "once", "echo"), 0.1
BLOCK = 32_768  # values that SGD changes at a time, so that they stay in a cache of the processor
RULES = RoleTable({**{kind: {("client", "ps")} for kind in KINDS}, "pushed": {("ps", "client")}})
CLIENT, SERVER = (Identity(role=role, node=role, incarnation=1) for role in ("client", "ps"))
LINK: Any = {"config": LinkConfig(link="shared")} if os.environ.get("FLOOR_LINK") == "shared" else {}
NETWORK = TcpNetwork(token=b"a token for measuring", entropy=os.urandom, rules=RULES, **LINK)
TAKES_BYTES = isinstance(Message(type="push").meta, bytes)
Push: Any = msgspec.defstruct("Push", [("shard", int), ("session", int), ("number", int), ("rate", float)])
Pushed: Any = msgspec.defstruct("Pushed", [("number", int), ("version", int)])
DECODE = {type_: msgspec.msgpack.Decoder(type_).decode for type_ in (Push, Pushed)}


def write(kind: str, body: Any) -> Any:
    packed = msgspec.msgpack.encode(body) if TAKES_BYTES or kind == "once" else msgspec.to_builtins(body)
    return {"": packed} if kind == "once" and not TAKES_BYTES else packed


def read(kind: str, meta: Any, type_: Any) -> Any:
    packed = meta[""] if kind == "once" and not TAKES_BYTES else meta
    return DECODE[type_](packed) if type(packed) is bytes else msgspec.convert(packed, type_)


def serve(channel: Any, sizes: list[int]) -> None:
    shards = [np.zeros(size // 4, np.float32) for size in sizes]
    numbers: dict[tuple[int, int], int] = {}
    scratch, pool = np.empty(BLOCK, np.float32), BufferPool()

    def handle(request: Request) -> None:
        kind, (gradient,) = request.message.type, request.message.tensors
        push = read(kind, request.message.meta, Push)
        if kind == "echo":
            return request.reply(Message(type="pushed", meta=write(kind, Pushed(push.number, 0))))
        values, key = shards[push.shard], (push.session, push.shard)
        last = numbers.get(key, 0)
        fits = gradient.shape == values.shape and gradient.dtype == values.dtype
        if not fits or push.number - last not in (0, 1):
            return request.fail("refused", f"push {push.number} after {last}, {gradient.shape} values")
        square = push.rate * float(gradient @ gradient)
        if not isfinite(square) and not np.isfinite(push.rate * gradient).all():
            return request.fail("refused", f"push {push.number} is not finite")
        if push.number > last:  # a repeated push is only answered
            numbers[key] = push.number
            for start in range(0, len(values), BLOCK):
                step = gradient[start : start + BLOCK]
                values[start : start + BLOCK] -= np.multiply(step, push.rate, out=scratch[: len(step)])
        # New pages would cost more than the copy of large values.
        copy = pool.acquire(values.nbytes).view(np.float32) if len(values) > BLOCK else np.empty_like(values)
        np.copyto(copy, values)
        meta = write(kind, Pushed(push.number, numbers[key]))
        request.reply(Message(type="pushed", meta=meta, tensors=(copy,)))

    async def on_link(link: Link) -> None:
        link.serve(handle)
        await link.wait_closed()

    async def listen() -> None:
        async with NETWORK.listen("tcp://127.0.0.1:0", SERVER, on_link) as listener:
            channel.send(listener.address)
            await asyncio.Event().wait()

    uvloop.run(listen())


async def measure(address: str, kind: str, sizes: list[int]) -> None:
    async with NETWORK.connect(address, CLIENT) as link:
        for shard, size in enumerate(sizes):
            gradient, values, times = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32), []
            for number in range(1, max(20, min(500, (1 << 28) // size)) + 1):
                begin = time.perf_counter()
                push = Message(type=kind, meta=write(kind, Push(shard, 1, number, RATE)), tensors=(gradient,))
                reply = await link.call(push, timeout_s=30, into=None if kind == "echo" else (values,))
                assert read(kind, reply.meta, Pushed).number == number
                times.append(time.perf_counter() - begin)
            np.testing.assert_allclose(values, -RATE * len(times) * (kind != "echo"), rtol=1e-3)
            us = float(np.median(times)) * 1e6
            print(json.dumps({"peer": kind, "bytes": size, "pair_us": round(us, 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="push")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1 << 10, 64 << 10, 1 << 20, 16 << 20])
    arguments = parser.parse_args()
    ours, theirs = get_context("spawn").Pipe()  # a forked server would share cached pages
    server = get_context("spawn").Process(target=serve, args=(theirs, arguments.sizes), daemon=True)
    server.start()
    uvloop.run(measure(ours.recv(), arguments.kind, arguments.sizes))
    server.terminate()


if __name__ == "__main__":
    main()
