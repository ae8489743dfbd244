"""Push a gradient, apply SGD, pull the values: one client, one real parameter server in its own process.

    python -m benchmarks.push_pull --json push_pull.json --peer 'ps-lite=PYTHON PEER_SCRIPT --kind kvstore'

Ours goes through everything that training uses: controller, placement, session numbers, finite check, the
SGD rule, a copy of the values, TCP links. A vector is one weight matrix, cut into shards of at most 1 MiB;
each shard is pushed with one message whose answer brings its new values into place.

A peer is a command that prints JSON lines with ``peer``, ``bytes`` and ``pair_us``; it is run in turn with
ours, `--rounds` times, and medians are compared. Rows: case, ours and peer in microseconds, ratio (peer /
ours, above 1 we are faster), unit.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.messages import Part, role_table
from adam_async.model import Network, mlp
from adam_async.parameter_server.client import ParameterClient, SessionIdentity, StepPush
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.cluster_map import ClusterMap, NodeRecord, RunRecord
from adam_async.run.config import Config, Waits
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, shard_table
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.traffic import Traffic
from dataflow import ComputePool
from transport import BufferPool, Identity, TcpNetwork

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
RATE = 0.1


def network() -> TcpNetwork:
    """Loopback links without a token."""
    return TcpNetwork(token=None, entropy=system_entropy, rules=role_table(), pool=BufferPool())


async def serve() -> None:
    """The other process: a controller and a parameter server, until it is ended."""
    net, waits = network(), Waits()
    async with AsyncExitStack() as stack:
        controller = await stack.enter_async_context(
            Controller(
                RoleSettings(
                    network=net,
                    address="tcp://127.0.0.1:0",
                    identity=Identity(role="controller", node="controller", incarnation=1),
                    waits=waits,
                )
            )
        )
        await stack.enter_async_context(
            ParameterServer(
                RoleSettings(
                    network=net,
                    address="tcp://127.0.0.1:0",
                    identity=Identity(role="ps", node="ps-0", incarnation=1),
                    waits=waits,
                    controller=controller.address,
                ),
                make_pool=ComputePool,
                buffers=net.pool,
            )
        )
        print(controller.address, flush=True)
        await asyncio.Event().wait()


class Vector:
    """One vector on the server, and this client's copy of it."""

    def __init__(self, client: ParameterClient, shards: tuple[ShardSpec, ...]) -> None:
        self._client = client
        self._shards = shards
        size = shards[-1].stop
        self.gradient = np.ones(size, np.float32)
        self.values = np.zeros(size, np.float32)
        self._clock = 0

    async def push_pull(self) -> None:
        """Push the gradient, have it applied, and have the new values in place."""
        self._clock += 1
        missing = 2 * len(self._shards)
        done = asyncio.get_running_loop().create_future()

        def arrived(*_: object) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                done.set_result(None)

        for shard in self._shards:
            await self._client.admit()
            part = slice(shard.start, shard.stop)
            step = StepPush(
                parts=(Part(False, 1),),
                shards=(ShardId(shard.id),),
                tensors=(self.gradient[part],),
                versions=(self._clock - 1,),
                own_applied=(0,),
                clock=self._clock,
                weight=1,
                rate=RATE,
                pull=True,
            )
            self._client.push("ps-0", step, on_free=arrived, on_values=arrived, into=self.values[part])
        await done


async def placed(member: Membership, run: str) -> ClusterMap:
    """Wait until the server has taken up the run."""
    return await member.wait_for(
        lambda m: "ps-0" in m.nodes and m.nodes["ps-0"].ready == run, "the server to take up the run", 30
    )


async def measure(controller: str, sizes: list[int]) -> dict[int, float]:
    """Microseconds of one push and pull together, by size: medians."""
    net, waits = network(), Waits()
    identity = Identity(role="worker", node="bench", incarnation=1)
    driver = Identity(role="driver", node="driver", incarnation=1)
    found = {}
    async with asyncio.TaskGroup() as group:
        member = Membership(
            network=net,
            controller=controller,
            identity=driver,
            record=NodeRecord(role="driver", address="", incarnation=1),
            waits=waits,
            traffic=Traffic("driver"),
        )
        tasks = [group.create_task(member.run(), name="membership")]
        await member.wait_for(lambda m: "driver" in m.nodes, "our seat", 10)
        for size in sizes:
            side = round((size // 4) ** 0.5)
            spec = mlp((side, side), input_shape=(1, 1, side))
            run = f"bench-{size}"
            config = msgspec.to_builtins(Config(rate=RATE))
            await member.submit_run(RunRecord(id=run, driver="driver", config=config, spec=spec.to_dict()))
            cluster = await placed(member, run)
            table = shard_table(Network(spec).parameters)
            client = ParameterClient(
                Endpoint(net, identity, Traffic("bench")),
                SessionIdentity(
                    store=run, session=1, incarnation=1, replica=0, generation=cluster.generation
                ),
                addresses={"ps-0": cluster.nodes["ps-0"].address},
                waits=waits,
            )
            task = group.create_task(client.run(), name="client")
            weight = next(p.name for p in Network(spec).parameters if p.kind == "weight")
            found[size] = await time_pairs(Vector(client, table.by_tensor[weight]), size)
            task.cancel()
        for task in tasks:
            task.cancel()
    return found


WARM_S = 2.0
"""Seconds before the measurement, in which the server reads its compiled kernels."""


async def time_pairs(vector: Vector, size: int) -> float:
    """Median microseconds, after a warm-up, with the result checked."""
    repeats = max(20, min(500, (1 << 28) // size))
    await asyncio.sleep(WARM_S)
    for _ in range(3):
        await vector.push_pull()
    before = vector.values.copy()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        await vector.push_pull()
        times.append(time.perf_counter() - begin)
    np.testing.assert_allclose(vector.values, before - RATE * repeats, rtol=0, atol=1e-3 * repeats)
    return statistics.median(times) * 1e6


def ours(sizes: list[int]) -> dict[int, float]:
    """One round of ours, with a server process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.push_pull", "--serve"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            controller = server.stdout.readline().strip()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(measure(controller, sizes))
        finally:
            server.kill()


def peer_round(command: str, sizes: list[int]) -> dict[int, float]:
    """One round of a peer."""
    done = subprocess.run(
        [*shlex.split(command), "--sizes", *map(str, sizes)], capture_output=True, text=True, timeout=600
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise SystemExit(f"the peer printed no rows: {done.stderr[-500:]}")
    return {row["bytes"]: row["pair_us"] for row in rows}


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Interleave ours with each peer; medians over the rounds."""
    peers = dict(peer.split("=", 1) for peer in arguments.peer)
    mine: list[dict[int, float]] = []
    theirs: dict[str, list[dict[int, float]]] = {name: [] for name in peers}
    for _ in range(arguments.rounds):
        mine.append(ours(arguments.sizes))
        for name, command in peers.items():
            theirs[name].append(peer_round(command, arguments.sizes))
    rows = []
    for size in arguments.sizes:
        us = statistics.median(round_[size] for round_ in mine)
        for name in peers or {"none": ""}:
            peer = statistics.median(r[size] for r in theirs[name]) if name in theirs else None
            rows.append(
                {
                    "case": f"push, SGD, pull of {size} bytes against {name}",
                    "ours": round(us, 1),
                    "peer": peer,
                    "ratio": round(peer / us, 2) if peer else None,
                    "unit": "us",
                }
            )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    arguments = parser.parse_args()
    if arguments.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
        return
    rows = compare(arguments)
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
