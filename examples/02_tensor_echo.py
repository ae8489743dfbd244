"""A tensor sent over TCP and back. The send copies no bytes, and the reply arrives in a given array."""

import asyncio
import os
from time import perf_counter

import numpy as np

from transport import Identity, Link, Message, Request, RoleTable, TcpNetwork

RULES = RoleTable({"Echo": [("client", "server")], "Echoed": [("server", "client")]})


async def serve(link: Link) -> None:
    def echo(request: Request) -> None:
        request.reply(Message(type="Echoed", tensors=request.message.tensors))

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
        for _ in range(rounds):
            question = Message(type="Echo", tensors=(there,))
            reply = await link.call(question, timeout_s=10.0, into=[back])
            assert reply.tensors[0] is back
        took_s = (perf_counter() - begin) / rounds
    print(f"{there.nbytes} bytes there and back through {listener.address} in {took_s * 1e6:.0f} us")
    return float(np.abs(back - there).max())


if __name__ == "__main__":
    asyncio.run(main())
