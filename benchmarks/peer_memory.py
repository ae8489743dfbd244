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

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

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
from transport import BufferPool, Identity, Link, LinkConfig, Message, TcpNetwork, TransportError, WouldBlock
from transport.tcp import TcpLink

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


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command of the package until the block ends."""
    words = (sys.executable, "-m", "adam_async", *words)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"listens on (tcp://[\d.]+:\d+)", line)
        if found:
            return found[1]
    raise SystemExit(f"{process.args!r} ended")


class Target:
    """One role of the cluster, and the questions to it."""

    def __init__(self, role: str, process: subprocess.Popen[str]) -> None:
        self.role, self.pid, self.address = role, process.pid, address_of(process)
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


async def attack(kind: str, link: TcpLink, target: Target, question: Message) -> None:
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


async def measure(
    target: Target, kind: str, cluster: ClusterMap, options: argparse.Namespace
) -> dict[str, Any]:
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
                assert isinstance(link, TcpLink)
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


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        meet = Target("controller", stack.enter_context(command("controller", "--bind", "tcp://127.0.0.1:0")))
        place = ("--controller", meet.address)
        targets = {"controller": meet}
        for role, words in (
            ("ps", place),
            ("data", (*place, "--data", "synthetic")),
            ("worker", ("--join", meet.address)),
        ):
            targets[role] = Target(role, stack.enter_context(command(role, *words)))
        stack.enter_context(command("train", *place, "--model", "mlp", "--epochs", "10000"))
        cluster = await cluster_map(meet.address)
        for kind in options.kinds:
            for role in options.roles:
                row = await measure(targets[role], kind, cluster, options)
                rows.append(row)
                print(
                    " ".join(
                        f"{name}={value if isinstance(value, str) else round(value, 2)}"
                        for name, value in row.items()
                    ),
                    flush=True,
                )
    return rows


def main() -> None:
    """Measure, print a line for each role and kind, and write them to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--deaf", type=int, default=8)
    parser.add_argument("--dead", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--roles", nargs="+", default=ROLES)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
