"""Push a gradient, apply SGD, pull the values: one client, one real parameter server in its own process.

    python -m benchmarks.push_pull --json push_pull.json --peer 'ps-lite=PYTHON PEER_SCRIPT --kind kvstore'

Ours is `ParameterStore.push_pull`, on a controller and a parameter server in another process, over TCP, with
one float32 array of each size in shards of at most 1 MiB.

One row compares `--many` arrays of 1 KiB, pushed and pulled together, with one array of 1 MiB.

The yardstick is the *floor* (`benchmarks/floor.py`): the shortest honest program over our link. `--floor-of
CHECKOUT` adds the floor over the link of another checkout, by its own program if it has one. Machines differ
by a factor of two, the multiples of the floor do not. ``OPENBLAS_CORETYPE=Haswell ADAM_VECTORS=avx2`` forces
the narrower vectors on all sides.

A peer is a command that prints JSON lines with ``peer``, ``bytes`` and ``pair_us``; it alternates with ours
for `--rounds` rounds, and medians are compared. Rows: case, ours and peer in microseconds, ratio (peer /
ours, above 1 we are faster), unit; beside a floor also multiple (ours / floor, median of the rounds).
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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from adam_async import ArraySpec, ParameterStore, Sgd
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.place import Place, listening
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.config import Waits
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.kernel_cache import use_kernel_cache
from dataflow import ComputePool
from transport import BufferPool

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
ROOT = Path(__file__).resolve().parents[1]
RATE = 0.1
MANY = 1000
"""Number of small arrays pushed and pulled together."""

SMALL_BYTES = 1 << 10
"""Size of each small array, in bytes."""

WARM_S = 2.0
"""Seconds before the measurement, in which the server reads its compiled kernels."""

Times = dict[str, float]
"""Medians in microseconds, by side and size, such as ``store 1024``."""


async def serve(*, at_once: bool = True) -> None:
    """The other process: a controller and a parameter server, until it is ended.

    Args:
        at_once: Whether pushes that meet idle shards take the short way.
    """
    buffers = BufferPool()
    place = Place(
        node="controller",
        bind=LOOPBACK,
        network=cluster_network(None, entropy=system_entropy, buffers=buffers),
        buffers=buffers,
        waits=Waits(),
        entropy=system_entropy,
    )
    async with controller(place) as leader:
        place = replace(place, node="ps-0", controller=leader.address)
        role = ParameterServer(place.settings("ps"), buffers=buffers, make_pool=ComputePool, at_once=at_once)
        async with listening(role, place) as server:
            await server.joined()
            print(leader.address, flush=True)
            await asyncio.Event().wait()


class Face:
    """Pushes and pulls of arrays through `ParameterStore`."""

    def __init__(self, store: ParameterStore, arrays: Mapping[str, ArraySpec]) -> None:
        self._store = store
        self._gradients = {name: np.ones(spec.shape, np.float32) for name, spec in arrays.items()}

    async def push_pull(self) -> float:
        """Push the gradients, and wait for the new values after their application.

        Returns one of the new values.
        """
        values = await self._store.push_pull(self._gradients)
        return float(values[next(iter(values))][-1])


async def measure(address: str, sizes: list[int], many: int, warm_s: float) -> Times:
    """Median microseconds of one push and pull together, on each side, for each size."""
    found: Times = {}
    for size in sizes:
        arrays = {"w": ArraySpec((size // 4,))}
        async with opened(address, f"one-{size}", arrays) as store:
            await asyncio.sleep(warm_s)
            found[f"store {size}"] = await time_pairs(Face(store, arrays).push_pull, size)
            await store.delete()
    together = {f"w{number}": ArraySpec((SMALL_BYTES // 4,)) for number in range(many)}
    one = {"w": ArraySpec((1 << 18,))}
    async with opened(address, "many", together) as small, opened(address, "one", one) as large:
        await asyncio.sleep(warm_s)
        found["many"] = await time_pairs(Face(small, together).push_pull, many * SMALL_BYTES)
        found["one"] = await time_pairs(Face(large, one).push_pull, 1 << 20)
    return found


def opened(address: str, name: str, arrays: Mapping[str, ArraySpec]) -> Any:
    """Create a store of zeros."""
    return ParameterStore.open(address, arrays, name=name, rule=Sgd(rate=RATE), create="new")


async def time_pairs(push_pull: Callable[[], Awaitable[float]], size: int) -> float:
    """Median microseconds, after a warm-up, with the result checked."""
    repeats = max(20, min(500, (1 << 28) // size))
    for _ in range(2):
        await push_pull()
    before = await push_pull()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        after = await push_pull()
        times.append(time.perf_counter() - begin)
    np.testing.assert_allclose(after, before - RATE * repeats, rtol=0, atol=1e-3 * repeats)
    return statistics.median(times) * 1e6


def ours(sizes: list[int], many: int, warm_s: float) -> Times:
    """One round of ours, with a new server process."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.push_pull", "--serve"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(measure(address, sizes, many, warm_s))
        finally:
            server.kill()


def peer_round(
    command: Sequence[str], sizes: Sequence[int], environment: Mapping[str, str] = os.environ
) -> Times:
    """One round of a peer."""
    done = subprocess.run(
        [*command, "--sizes", *map(str, sizes)], capture_output=True, text=True, timeout=600, env=environment
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise SystemExit(f"the peer printed no rows: {done.stderr[-500:]}")
    return {str(row["bytes"]): row["pair_us"] for row in rows}


def floor_round(checkout: Path, sizes: Sequence[int]) -> Times:
    """One round of the floor over the link of a checkout."""
    own = checkout / "benchmarks" / "floor.py"
    program = own if own.exists() else ROOT / "benchmarks" / "floor.py"
    return peer_round(
        [sys.executable, str(program)], sizes, {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    )


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Interleave ours with the floors and each peer; medians over the rounds."""
    peers = dict(peer.split("=", 1) for peer in arguments.peer)
    floors = {"floor": ROOT, **{f"floor of {path.name}": path for path in arguments.floor_of}}
    flat = arguments.many * SMALL_BYTES
    mine: list[Times] = []
    theirs: dict[str, list[Times]] = {name: [] for name in (*floors, *peers)}
    for _ in range(arguments.rounds):
        mine.append(ours(arguments.sizes, arguments.many, arguments.warm))
        for name, checkout in floors.items():
            theirs[name].append(floor_round(checkout, [*arguments.sizes, flat]))
        for name, command in peers.items():
            theirs[name].append(peer_round(shlex.split(command), arguments.sizes))
    rows = []
    for size in arguments.sizes:
        case, key = f"push, SGD, pull of {size} bytes: store against", f"store {size}"
        rows += [floor_row(f"{case} {n}", mine, key, theirs[n], size) for n in floors]
        for name in peers:
            rows.append(row(f"{case} {name}", median_of(mine, key), median_of(theirs[name], str(size))))
    case = f"{arguments.many} arrays of {SMALL_BYTES} bytes together against"
    rows.append(row(f"{case} one of 1 MiB", median_of(mine, "many"), median_of(mine, "one")))
    rows += [floor_row(f"{case} one of all in the {n}", mine, "many", theirs[n], flat) for n in floors]
    return rows


def floor_row(case: str, mine: list[Times], key: str, floor: list[Times], size: int) -> dict[str, Any]:
    """Row of ours beside a floor, round by round: the machine changes between the rounds."""
    found = row(case, median_of(mine, key), median_of(floor, str(size)))
    multiples = [ours[key] / short[str(size)] for ours, short in zip(mine, floor, strict=True)]
    return {**found, "multiple": round(statistics.median(multiples), 2)}


def median_of(rounds: list[Times], key: str) -> float:
    return statistics.median(times[key] for times in rounds)


def row(case: str, us: float, peer: float) -> dict[str, Any]:
    return {
        "case": case,
        "ours": round(us, 1),
        "peer": round(peer, 1),
        "ratio": round(peer / us, 2),
        "unit": "us",
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument(
        "--floor-of", action="append", default=[], type=Path, metavar="CHECKOUT", help="may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--many", type=int, default=MANY, help="number of arrays pushed together")
    parser.add_argument("--warm", type=float, default=WARM_S, help="seconds before each measurement")
    arguments = parser.parse_args()
    for checkout in arguments.floor_of:
        if not (checkout / "transport").is_dir():  # the installed one would stand in for it
            parser.error(f"--floor-of {checkout} has no folder transport: name the root of a checkout")
    use_kernel_cache()
    if arguments.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
        return
    rows = compare(arguments)
    for each in rows:
        print(json.dumps(each))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
