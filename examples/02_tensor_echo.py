"""A tensor sent over TCP and back. The send copies no bytes, and the reply arrives in a given array.

The fields of a message are bytes of the program's own choice, here the number of the round in msgpack.
"""

import asyncio
import os
from time import perf_counter

import numpy as np
from msgspec.msgpack import decode, encode

from transport import Identity, Link, Message, Request, RoleTable, TcpNetwork

RULES = RoleTable({"Echo": [("client", "server")], "Echoed": [("server", "client")]})


async def serve(link: Link) -> None:
    def echo(request: Request) -> None:
        question = request.message
        request.reply(Message(type="Echoed", meta=question.meta, tensors=question.tensors))

    link.serve(echo)
    await link.wait_closed()


async def main(*, size: int = 1 << 20, rounds: int = 20) -> float:
    network = TcpNetwork(token=None, entropy=os.urandom, rules=RULES)
    server = Identity(role="server", node="server", incarnation=1)
    client = Identity(role="client", node="client", incarnation=1)
    there = np.arange(size, dtype=np.float32)
    back = np.empty_like(there)
    async with (
        network.listen("tcp://127.0.0.1:0", server, serve) as listener,
        network.connect(listener.address, client) as link,
    ):
        begin = perf_counter()
        for number in range(rounds):
            question = Message(type="Echo", meta=encode(number), tensors=(there,))
            reply = await link.call(question, timeout_s=10.0, into=[back])
            assert decode(reply.meta) == number
            assert reply.tensors[0] is back
        took_s = (perf_counter() - begin) / rounds
    print(f"{there.nbytes} bytes there and back through {listener.address} in {took_s * 1e6:.0f} us")
    return float(np.abs(back - there).max())


if __name__ == "__main__":
    asyncio.run(main())
