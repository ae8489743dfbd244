"""Push a gradient, apply SGD, pull the values: one client, one real parameter server in its own process.

    python -m benchmarks.push_pull --json push_pull.json --peer 'ps-lite=PYTHON PEER_SCRIPT --kind kvstore'

Ours is `ParameterStore.push_pull`, on a controller and a parameter server in another process, with one
float32 array of each size in shards of at most 1 MiB. *store* is over TCP, as the peers; *shared* is the same
with shared memory, the default between processes of one host; *buffers* is this with gradients in
`ParameterStore.buffers`.

`--copies` counts instead of measuring: the bytes that the processes and the kernel copy for each byte pushed,
until its value is back (`copied_bytes`, needs gcc).

One row compares `--many` arrays of 1 KiB, pushed and pulled together, with one array of 1 MiB.

The yardstick is the *floor* (`benchmarks/floor.py`): the shortest honest program over our link. `--floor-of
CHECKOUT` adds the floor over the link of another checkout, by its own program if it has one. Machines differ
by a factor of two, the multiples of the floor do not. ``OPENBLAS_CORETYPE=Haswell ADAM_VECTORS=avx2`` forces
the narrower vectors on all sides.

A peer is a command that prints JSON lines with ``peer``, ``bytes`` and ``pair_us``. All sides are measured in
turn. Rows are in microseconds, with the median of each round; beside a floor it also has the multiple
(ours / floor, median of the rounds).
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async import ArraySpec, ParameterStore, Sgd
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.place import Place, listening
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.config import Waits
from adam_async.runtime.clock import system_entropy
from benchmarks.copied_bytes import bytes_in, counted
from benchmarks.harness import ROOT, Option, Row, apart, beside, compared, interleaved, looped, printed, run
from dataflow import ComputePool
from transport import BufferPool
from transport.config import LinkKind

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
RATE = 0.1
MANY = 1000
"""Number of small arrays pushed and pulled together."""

SMALL_BYTES = 1 << 10
"""Size of each small array, in bytes."""

SHARED_FLOOR = "floor in shared memory"

WARM_S = 2.0
"""Seconds before the measurement, in which the server reads its compiled kernels."""

Gradients = Mapping[str, NDArray[np.float32]]

TURNS = 5
"""Turns that two ways on one link take in a round: a way that always came second seemed slower."""

Times = dict[str, float]
"""Medians in microseconds, by side and size, such as ``store 1024``."""


def serve(channel: Connection, at_once: bool = True) -> None:
    """Run a controller and a parameter server in the other process, until it is ended.

    Args:
        channel: Receives the address of the controller.
        at_once: Whether pushes that meet idle shards take the short way.
    """
    looped(_serve(channel, at_once))


async def _serve(channel: Connection, at_once: bool) -> None:
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
            channel.send(leader.address)
            await asyncio.Event().wait()


class Face:
    """Pushes and pulls of arrays through `ParameterStore`."""

    def __init__(
        self, store: ParameterStore, arrays: Mapping[str, ArraySpec], gradients: Gradients | None = None
    ) -> None:
        self._store = store
        self._gradients = gradients or {
            name: np.empty(spec.shape, np.float32) for name, spec in arrays.items()
        }
        for gradient in self._gradients.values():
            gradient[:] = 1

    async def push_pull(self) -> float:
        """Push the gradients, and wait for the new values after their application.

        Returns one of the new values.
        """
        values = await self._store.push_pull(self._gradients)
        return float(values[next(iter(values))][-1])


async def medians(address: str, sizes: list[int], many: int, warm_s: float, link: LinkKind) -> Times:
    """Median microseconds of one push and pull together, for each size."""
    found: Times = {}
    for size in sizes:
        arrays = {"w": ArraySpec((size // 4,))}
        async with opened(address, f"one-{size}", arrays, link) as store:
            await asyncio.sleep(warm_s)
            faces = {"store": Face(store, arrays), "buffers": Face(store, arrays, await store.buffers())}
            found |= {f"{name} {size}": us for name, us in (await time_pairs(faces, size)).items()}
            await store.delete()
    together = {f"w{number}": ArraySpec((SMALL_BYTES // 4,)) for number in range(many)}
    one = {"w": ArraySpec((1 << 18,))}
    async with opened(address, "many", together, link) as small, opened(address, "one", one, link) as large:
        await asyncio.sleep(warm_s)
        found |= await time_pairs({"many": Face(small, together)}, many * SMALL_BYTES)
        found |= await time_pairs({"one": Face(large, one)}, 1 << 20)
    return found


def opened(address: str, name: str, arrays: Mapping[str, ArraySpec], link: LinkKind = "tcp") -> Any:
    """Create a store of zeros."""
    return ParameterStore.open(address, arrays, name=name, rule=Sgd(rate=RATE), create="new", link=link)


async def time_pairs(faces: Mapping[str, Face], size: int) -> Times:
    """Median microseconds of each face, measured in turns after a warm-up, with the results checked."""
    repeats = max(20, min(500, (1 << 28) // size)) // TURNS
    times: dict[str, list[float]] = {name: [] for name in faces}
    for face in faces.values():
        await face.push_pull()
    for _ in range(TURNS):
        for name, face in faces.items():
            before = await face.push_pull()
            for _ in range(repeats):
                begin = time.perf_counter()
                after = await face.push_pull()
                times[name].append(time.perf_counter() - begin)
            np.testing.assert_allclose(after, before - RATE * repeats, rtol=0, atol=1e-3 * repeats)
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


WAYS: dict[str, tuple[LinkKind, bool]] = {
    "TCP": ("tcp", False),
    "shared": ("shared", False),
    "buffers": ("shared", True),
}
"""Ways whose copies count: the kind of the links, and whether gradients are in `ParameterStore.buffers`."""

STEADY = 20
"""Number of pushes before the counting, and of those counted."""


async def copied(address: str, size: int, way: str, counts: Path) -> NDArray[np.float64]:
    """Push and pull; returns the bytes copied by the processes, and by the kernel, for each byte pushed."""
    link, has_buffers = WAYS[way]
    arrays = {"w": ArraySpec((size // 4,))}
    async with opened(address, "copies", arrays, link) as store:
        face = Face(store, arrays, await store.buffers() if has_buffers else None)
        for _ in range(STEADY):
            await face.push_pull()
        before = bytes_in(counts)
        for _ in range(STEADY):
            await face.push_pull()
        return (bytes_in(counts) - before) / (STEADY * size)


def copies(size: int, way: str) -> Row:
    """Return the row of the bytes that are copied for each byte pushed."""
    with tempfile.TemporaryDirectory() as folder, counted(Path(folder)) as counts, beside(serve) as server:
        by_processes, by_kernel = apart(copied, server.recv(), size, way, counts)
    return {
        "case": f"copies of a push and pull of {size} bytes: {way}",
        "processes": round(float(by_processes), 2),
        "kernel": round(float(by_kernel), 2),
    }


def ours(sizes: list[int], many: int, warm_s: float, link: LinkKind) -> Times:
    """One round of ours, with a new server process."""
    with beside(serve) as server:
        return looped(medians(server.recv(), sizes, many, warm_s, link))


def peer_round(
    command: str | Sequence[str], sizes: Sequence[int], environment: Mapping[str, str] = os.environ
) -> Times:
    """One round of a peer."""
    rows = printed(command, "--sizes", *map(str, sizes), environment=environment)
    return {str(row["bytes"]): row["pair_us"] for row in rows}


def floor_round(checkout: Path, sizes: Sequence[int], link: LinkKind = "tcp") -> Times:
    """One round of the floor over the link of a checkout."""
    own = checkout / "benchmarks" / "floor.py"
    program = own if own.exists() else ROOT / "benchmarks" / "floor.py"
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "FLOOR_LINK": link}
    return peer_round([sys.executable, str(program)], sizes, environment)


def measure(options: Namespace) -> Iterator[Row]:
    """Yield the rows of ours beside the floors and each peer, or those of the copies."""
    if options.copies:
        yield from (copies(size, way) for size in options.sizes for way in WAYS)
        return
    peers = dict(peer.split("=", 1) for peer in options.peer)
    floors = {"floor": ROOT, **{f"floor of {path.name}": path for path in options.floor_of}}
    flat = options.many * SMALL_BYTES
    sides: dict[str, Callable[[], Times]] = {
        "ours": partial(ours, options.sizes, options.many, options.warm, "tcp"),
        "shared": partial(ours, options.sizes, options.many, options.warm, "shared"),
        SHARED_FLOOR: partial(floor_round, ROOT, options.sizes, "shared"),
        **{name: partial(floor_round, path, [*options.sizes, flat]) for name, path in floors.items()},
        **{name: partial(peer_round, command, options.sizes) for name, command in peers.items()},
    }
    found = interleaved(sides, options.rounds)

    def row(case: str, key: str, name: str, other: str, *, side: str = "ours") -> Row:
        mine, theirs = ([times[at] for times in found[of]] for of, at in ((side, key), (name, other)))
        multiple = statistics.median(us / short for us, short in zip(mine, theirs, strict=True))
        more = {"multiple": round(multiple, 2)} if name in floors or side == "shared" else {}
        return compared(case, mine, theirs, "us", less_is_better=True, **more)

    for size in options.sizes:
        case = f"push, SGD, pull of {size} bytes: shared against"
        yield row(f"{case} TCP", f"store {size}", "ours", f"store {size}", side="shared")
        with_buffers = f"push, SGD, pull of {size} bytes: buffers against TCP"
        yield row(with_buffers, f"buffers {size}", "ours", f"store {size}", side="shared")
        for name in (SHARED_FLOOR, *peers):
            yield row(f"{case} {name}", f"store {size}", name, str(size), side="shared")
        for name in (*floors, *peers):
            case = f"push, SGD, pull of {size} bytes: store against {name}"
            yield row(case, f"store {size}", name, str(size))
    case = f"{options.many} arrays of {SMALL_BYTES} bytes together against"
    yield row(f"{case} one of 1 MiB", "many", "ours", "one")
    for name in floors:
        yield row(f"{case} one of all in the {name}", "many", name, str(flat))


def checkout(text: str) -> Path:
    """Return the root of a checkout; without its link, the installed one would stand in for it."""
    if not (Path(text) / "transport").is_dir():
        raise ArgumentTypeError(f"--floor-of {text} has no folder transport: name the root of a checkout")
    return Path(text)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        peer=Option([], "NAME=COMMAND", repeated=True),
        floor_of=Option([], "root of another checkout", type=checkout, repeated=True),
        rounds=3,
        sizes=list(SIZES),
        many=Option(MANY, "number of arrays pushed together"),
        warm=Option(WARM_S, "seconds before each measurement"),
        copies=Option(False, "count copies instead of measuring"),
    )
