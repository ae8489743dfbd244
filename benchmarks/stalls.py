"""The longest stall of a role's event loop per message, each at its largest permitted size.

    python -m benchmarks.stalls [--repeats 5] [--only TEXT] [--json FILE]

A simulated cluster of shipped roles, on virtual time, has a model of 66 MB on one parameter server. A peer
with the keys of a role sends each message at the largest size that the frame's meta, the permitted text and
the message allow. The figure is the longest later step of the receiver's loop in processor time, the median
of the repeats: decoding, validation, handling and the answer. Answers are decoded and validated separately,
because the simulation has no client that requests all of them.

A row per message, the longest stall first: message, receiver, bytes of fields and of tensors, milliseconds,
and the stall as a share of the election time-out. A leader that stalls for longer than that is replaced.
"""

import asyncio
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from typing import Any, Self

import msgspec

from adam_async.controller.consensus_node import SETTINGS
from adam_async.messages import TABLE, replication, unpack_any
from adam_async.model.named import mlp
from benchmarks._largest import Largest, largest_messages, read_ride
from benchmarks.harness import Option, Row, run
from tests.simulation.loop import SimulatedLoop
from tests.simulation.scenario import Ledger, World, simulate
from tests.simulation.scenarios.cluster import network_of
from tests.simulation.scenarios.hostile import request_frame
from tests.simulation.scenarios.hostile_facts import facts_of
from tests.simulation.scenarios.hostile_peers import HOSTILES, ONE_WAY, HostilePeers
from tests.simulation.scenarios.training import TRAINING
from tests.simulation.scenarios.training_cluster import SERVERS, TrainingCluster
from tests.simulation.scenarios.training_setups import setup_of
from tests.simulation.scenarios.valid_messages import Facts
from transport import BufferPool, Identity, LinkConfig, Message, TransportError
from transport.decoder import FrameDecoder

MODEL = mlp((64, 4032, 4032, 10), input_shape=(1, 8, 8))
"""Model of 66 MB in float32, almost the largest that fits into one message."""

RECEIVERS = {"ps": SERVERS[0], "data": "data-0", "worker": "worker-0", "controller": "controller-1"}
"""Machines by role, of all roles that receive messages except the driver."""

ELECTION_S = SETTINGS.election_s
"""Seconds without a message of the leader after which a controller starts an election."""

REST_S = 0.5
"""Simulated seconds for the receiver to handle a message."""


class Stopwatch:
    """Times each step of one machine of a simulation by processor time.

    Attributes:
        longest_s: Longest step since `begin`, in seconds.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._name = ""
        self._run = SimulatedLoop._run

    def begin(self, name: str) -> None:
        """Time the steps of another machine, or the same anew."""
        self._name, self.longest_s = name, 0.0

    def __enter__(self) -> Self:
        run, watch = self._run, self

        def timed(
            self: SimulatedLoop,
            name: str,
            call: Callable[..., object],
            args: tuple[Any, ...],
            context: Context | None,
        ) -> None:
            if name != watch._name:
                run(self, name, call, args, context)
                return
            begin = time.thread_time()
            run(self, name, call, args, context)
            watch.longest_s = max(watch.longest_s, time.thread_time() - begin)

        SimulatedLoop._run = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        SimulatedLoop._run = self._run  # type: ignore[method-assign]


async def _measure_requests(world: World, watch: Stopwatch, repeats: int, only: str) -> list[Row]:
    """Send each message that a role receives, from a peer that may send it."""
    setup = setup_of({}, TRAINING)
    config = msgspec.structs.replace(setup.config, shard_bytes=1 << 20, servers=1, epochs=1000)
    cluster = TrainingCluster(world, replace(setup, spec=MODEL, config=config), Ledger(lambda: world.now))
    peers = HostilePeers(world, cluster, Ledger(lambda: world.now))
    for target in RECEIVERS.values():
        await peers.in_a_run(target)
    for name in ("worker-0", "worker-1", "driver"):
        world.nodes[name].freeze()  # stop training, whose steps would count too
    await asyncio.sleep(1.0)
    rows = []
    for role, target in RECEIVERS.items():
        if role == "worker":
            world.nodes[target].thaw()
        if role == "controller":
            target = cluster.leader
        for largest in largest_messages(_facts(cluster, target), only):
            senders = sorted(of for of, to in TABLE[type(largest.example.body)] if to == role)
            if senders:
                took = [await _send(world, watch, peers, senders[0], target, largest) for _ in range(repeats)]
                rows.append(_row(largest, role, took, "decode and handle"))
    return rows


def _facts(cluster: TrainingCluster, target: str) -> Facts:
    sender = Identity(role="worker", node=HOSTILES[0], incarnation=1)
    facts = facts_of(cluster, target, sender=sender, map_session=1)
    server = cluster.servers[SERVERS[0]].state
    assert server is not None
    shards = list(server.shards.values())
    return replace(
        facts,
        shards=tuple(int(shard.spec.id) for shard in shards),
        sizes=tuple(shard.spec.size for shard in shards),
    )


async def _send(
    world: World, watch: Stopwatch, peers: HostilePeers, role: str, target: str, largest: Largest
) -> float:
    """Send a message once. Returns the longest step of the receiver, in seconds."""
    node = world.nodes[HOSTILES[0]]
    identity = Identity(role=role, node=node.name, incarnation=1)

    async def talk() -> None:
        async with network_of(node).connect(peers.cluster.address(target), identity, timeout_s=10.0) as link:
            with suppress(TransportError):
                if _is_one_way(largest):
                    await link.send(largest.message)
                else:
                    await link.call(largest.message, timeout_s=5.0)

    watch.begin(target)
    await world.loop.spawn(talk(), "stall", node.host.context.copy())
    await asyncio.sleep(REST_S)
    took = watch.longest_s
    watch.begin("")
    return took


def _is_one_way(largest: Largest) -> bool:
    """Whether a message has no answer, such as each message between servers that share copies."""
    kind = type(largest.example.body)
    return kind.__name__ in ONE_WAY or kind in replication.ROWS


def measure_decoding(repeats: int, only: str) -> list[Row]:
    """Decode and validate each message as its receiver does, with its record."""
    rows = []
    for largest in largest_messages(Facts(), only):
        took = [_decode(largest) for _ in range(repeats)]
        to = "/".join(sorted({to for _, to in TABLE[type(largest.example.body)]}))
        rows.append(_row(largest, to, took, "decode"))
    return rows


def _decode(largest: Largest) -> float:
    """Decode a message once, in its form on a socket. Returns the seconds."""
    message = largest.message
    frame = request_frame(1, Message(type=message.type, meta=message.meta))
    decoder = FrameDecoder(LinkConfig(), BufferPool())
    begin = time.thread_time()
    while frame:
        room = decoder.get_buffer()
        count = min(len(room), len(frame))
        room[:count], frame = frame[:count], frame[count:]
        decoder.updated(count)
    unpack_any(message)
    read_ride(largest.example, largest.most_bytes)
    return time.thread_time() - begin


def _row(largest: Largest, to: str, took: list[float], what: str) -> Row:
    message = largest.message
    median_s = statistics.median(took)
    return {
        "case": f"{largest.name} to {to}: {what}",
        "message": largest.name,
        "to": to,
        "what": what,
        "meta_bytes": len(message.meta),
        "payload_bytes": sum(tensor.nbytes for tensor in message.tensors),
        "ms": round(1000 * median_s, 2),
        "election": round(median_s / ELECTION_S, 4),
    }


def measure(options: Namespace) -> Iterator[Row]:
    """Yield the rows, the longest stall first."""
    rows = measure_decoding(options.repeats, options.only)

    async def requests(world: World) -> None:
        rows.extend(await _measure_requests(world, watch, options.repeats, options.only))

    with Stopwatch() as watch:
        simulate(requests, seed="stalls", limit_s=36000.0)
    yield from sorted(rows, key=lambda row: -row["ms"])


if __name__ == "__main__":
    run(__doc__, measure, repeats=5, only=Option("", "only messages whose name contains this text"))
