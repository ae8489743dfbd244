"""Memory of each role during attacks of hostile peers with the rights of a member.

A controller, a parameter server, a data server and a worker run as processes and train. Peers of every kind
below attack each role, one kind after the other, on loopback. A row has the role's own memory (`RssAnon`)
before, at most during, and after the attack, the number of hostile links, and the number of valid questions
answered from the beginning of the attack to `AFTER_S` after it.

    python -m benchmarks.peer_memory --json FILE [--deaf 8] [--dead 100] [--seconds 15]

Kinds: *deaf* peers request large answers and read none; *one-way* peers send messages to a role that receives
none, as many as it accepts; *half* peers send the first half of the largest message, and pings; *silent*
peers send as many requests as fit, then nothing, and are never closed.
"""

import asyncio
import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from subprocess import DEVNULL

import numpy as np

from adam_async.messages import (
    Body,
    GetMap,
    GetStatistics,
    Pull,
    ReadTest,
    pack,
    read_text_tensor,
    role_table,
)
from adam_async.run.cluster_map import ClusterMap
from adam_async.runtime.clock import system_entropy
from benchmarks.harness import ADAM, Option, Role, Row, program, role, run
from transport import BufferPool, Identity, Link, LinkConfig, Message, TcpNetwork, TransportError, WouldBlock
from transport.stream import StreamLink

MB = 1 << 20
ROLES = ("controller", "ps", "data", "worker")
KINDS = ("deaf", "one-way", "half", "silent")
QUESTIONS = 2000
"""Maximum number of requests or messages of a deaf, one-way or silent peer."""
AFTER_S = 15.0
"""Seconds from the end of an attack to the last measurement, during which stalled links end."""


def network() -> TcpNetwork:
    config = LinkConfig(socket_buffer_bytes=64 << 10, high_water_bytes=64 * MB, low_water_bytes=MB)
    return TcpNetwork(
        token=None, entropy=system_entropy, rules=role_table(), config=config, pool=BufferPool(retain_bytes=0)
    )


def who(role: str, name: str) -> Identity:
    return Identity(role=role, node=name, incarnation=int.from_bytes(os.urandom(6), "little"))


def own_bytes(pid: int) -> int:
    """Return the anonymous memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10


class Target:
    """One role of the cluster, and the questions to it."""

    def __init__(self, role: str, process: Role) -> None:
        self.role, self.pid, self.address = role, process.pid, process.address
        self.peer_role = "worker" if role == "ps" else "driver"

    def question(self, cluster: ClusterMap | None) -> Message:
        """A question with a large answer, if the role has one."""
        run = cluster.run.id if cluster is not None and cluster.run is not None else "run"
        generation = cluster.generation if cluster is not None else 0
        body: Body = GetStatistics(run="")
        if self.role == "ps":
            body = Pull(store=run, generation=generation, shards=(0,))
        elif self.role == "data":
            body = ReadTest(start=0, stop=2_000)
        elif self.role == "controller":
            body = GetMap()
        return pack(body)

    def message(self, nbytes: int) -> Message:
        """A message of this many bytes that the role table allows."""
        tensors = (np.zeros(nbytes, np.uint8),) if nbytes else ()
        meta = self.question(None).meta
        return Message(type=self.question(None).type, meta=meta, tensors=tensors)


async def attack(kind: str, link: StreamLink, target: Target, question: Message) -> None:
    """Actions of one peer before it falls silent."""
    link._transport.pause_reading()
    with suppress(WouldBlock, TransportError):
        if kind == "half":
            link.send_nowait(target.message(60 * MB))
            while link.statistics().unsent_bytes > 30 * MB and not link.closed:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            link._conversation.drop_queue()
            return
        for number in range(QUESTIONS):
            if kind == "one-way":
                link.send_nowait(target.message(4096))
            else:
                link.call_nowait(question, timeout_s=600)
            if number % 50 == 0:
                await asyncio.sleep(0)


async def honest(target: Target, answers: list[float]) -> None:
    """Ask small questions in sequence, and record the duration of each."""
    while True:
        try:
            async with network().connect(target.address, who("driver", "honest")) as link:
                while True:
                    began = time.perf_counter()
                    await link.call(pack(GetStatistics(run="")), timeout_s=30)
                    answers.append(time.perf_counter() - began)
                    await asyncio.sleep(0.05)
        except (TransportError, OSError):
            await asyncio.sleep(0.1)


async def attacked(target: Target, kind: str, cluster: ClusterMap, options: Namespace) -> Row:
    """Attack one role in one way; return its row."""
    before = most = own_bytes(target.pid)
    answers: list[float] = []
    question = target.question(cluster)
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        asking = group.create_task(honest(target, answers), name="honest")
        stack.callback(asking.cancel)
        links: list[Link] = []
        for number in range(options.deaf if kind == "deaf" else options.dead):
            with suppress(TransportError):
                link = await network().dial(target.address, who(target.peer_role, f"hostile-{number}"))
                stack.callback(link.abort)
                links.append(link)
                assert isinstance(link, StreamLink)
                await attack(kind, link, target, question)
            most = max(most, own_bytes(target.pid))
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            most = max(most, own_bytes(target.pid))
            await asyncio.sleep(0.02)
        for link in links:
            link.abort()
        await asyncio.sleep(AFTER_S)
    return {
        "role": target.role,
        "peers": kind,
        "links": len(links),
        "before_mb": before / MB,
        "most_mb": most / MB,
        "after_mb": own_bytes(target.pid) / MB,
        "honest_answers": len(answers),
        "longest_answer_s": max(answers, default=0.0),
    }


async def cluster_map(address: str) -> ClusterMap:
    """Wait until a run trains; return the map."""
    async with network().connect(address, who("driver", "looker")) as link:
        while True:
            answer = await link.call(pack(GetMap()), timeout_s=30)
            cluster: ClusterMap = read_text_tensor(answer, ClusterMap, 16 * MB)
            if cluster.epoch is not None:
                return cluster
            await asyncio.sleep(0.1)


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield a row for each role and kind."""
    async with AsyncExitStack() as stack:

        def target(name: str, *words: str) -> Target:
            return Target(name, stack.enter_context(role(name, *words)))

        controller = target("controller", "--bind", "tcp://127.0.0.1:0")
        place = ("--controller", controller.address)
        targets = {
            "controller": controller,
            "ps": target("ps", *place),
            "data": target("data", *place, "--data", "synthetic"),
            "worker": target("worker", "--join", controller.address),
        }
        words = ("train", *place, "--model", "mlp", "--epochs", "10000")
        stack.enter_context(program(*ADAM, *words, stdout=DEVNULL))
        cluster = await cluster_map(controller.address)
        for kind in options.kinds:
            for name in options.roles:
                yield await attacked(targets[name], kind, cluster, options)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        deaf=Option(8, "number of deaf peers"),
        dead=Option(100, "number of other peers"),
        seconds=15.0,
        roles=Option(list(ROLES), choices=ROLES),
        kinds=Option(list(KINDS), choices=KINDS),
    )
