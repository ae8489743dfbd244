"""Cost of a firing of an empty node, with 8 tags in flight and 2 pool threads, against a bare queue.

    python -m benchmarks.engine --json engine.json [--firings 20000] [--rounds 7]

The peer does the minimum of any engine: it passes each job to two threads through a `SimpleQueue` and returns
results to the loop in batches, one wake-up for many. Light firings have no peer. Rows: case, ours and peer in
microseconds per firing (medians over interleaved rounds), ratio (ours / peer), unit.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import deque
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import uvloop

from dataflow import ComputePool, Engine, Firing, Graph, Node, Tag

IN_FLIGHT = 8
THREADS = 2


def nothing(firing: Firing, value: object) -> None:
    """An empty node."""


def graph(*, heavy: bool) -> Graph:
    """Return a graph of one empty node."""
    return Graph(inputs=("x",), nodes=(Node("nothing", nothing, inputs=("x",), heavy=heavy),))


async def time_engine(count: int, *, heavy: bool) -> float:
    """Seconds per firing, admission and delivery included."""
    async with ComputePool(threads=THREADS) as pool:
        async with Engine(graph(heavy=heavy), pool=pool, in_flight=IN_FLIGHT) as engine:
            begin = time.perf_counter()
            for number in range(count):
                tag = Tag(1, number)
                await engine.admit(tag)
                engine.deliver("x", tag, None)
            await engine.drain()
            return (time.perf_counter() - begin) / count


async def time_light_chain(count: int, length: int = 50) -> float:
    """Seconds per light firing within a chain: one admission per `length` firings."""
    ports = [f"p{index}" for index in range(length + 1)]
    nodes = tuple(
        Node(f"n{index}", lambda firing, value: value, inputs=(ports[index],), outputs=(ports[index + 1],))
        for index in range(length)
    )
    async with ComputePool(threads=1) as pool:
        async with Engine(Graph(inputs=(ports[0],), nodes=nodes), pool=pool, in_flight=1) as engine:
            begin = time.perf_counter()
            for number in range(count // length):
                tag = Tag(1, number)
                await engine.admit(tag)
                engine.deliver(ports[0], tag, None)
            await engine.drain()
            return (time.perf_counter() - begin) / (count // length * length)


async def time_queue(count: int) -> float:
    """The peer: seconds per job of a bare queue with batched wake-ups."""
    loop = asyncio.get_running_loop()
    queue: SimpleQueue[int | None] = SimpleQueue()
    done: deque[int] = deque()
    finished = loop.create_future()
    state = {"asked": 0, "back": 0, "waking": False}

    def collect() -> None:
        state["waking"] = False
        while done:
            done.popleft()
            state["back"] += 1
            if state["asked"] < count:
                state["asked"] += 1
                queue.put(state["asked"])
        if state["back"] == count and not finished.done():
            finished.set_result(None)

    def work() -> None:
        while (job := queue.get()) is not None:
            done.append(job)
            if not state["waking"]:
                state["waking"] = True
                loop.call_soon_threadsafe(collect)

    threads = [Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    begin = time.perf_counter()
    for _ in range(IN_FLIGHT):
        state["asked"] += 1
        queue.put(state["asked"])
    await finished
    seconds = (time.perf_counter() - begin) / count
    for _ in threads:
        queue.put(None)
    for thread in threads:
        thread.join()
    return seconds


def run(work: Any) -> float:
    """One measurement on its own loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return float(runner.run(work))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--firings", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"heavy": [], "queue": [], "light": [], "chain": []}
    for _ in range(arguments.rounds):
        times["heavy"].append(run(time_engine(arguments.firings, heavy=True)))
        times["queue"].append(run(time_queue(arguments.firings)))
        times["light"].append(run(time_engine(arguments.firings, heavy=False)))
        times["chain"].append(run(time_light_chain(arguments.firings)))
    us = {name: statistics.median(found) * 1e6 for name, found in times.items()}
    rows = [
        ("heavy firing, 8 tags in flight, 2 threads, admission included", us["heavy"], us["queue"]),
        ("light firing, a tag of its own each, admission included", us["light"], None),
        ("light firing in a chain of 50", us["chain"], None),
    ]
    found = [
        {
            "case": case,
            "ours": round(ours, 2),
            "peer": peer and round(peer, 2),
            "ratio": peer and round(ours / peer, 2),
            "unit": "us",
        }
        for case, ours, peer in rows
    ]
    for row in found:
        print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
