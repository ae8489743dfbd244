"""Latency of a client with small pushes beside a second client that pushes as fast as it can.

    python -m benchmarks.second_client --rounds 9 --json FILE

The server, the measured client and the second client are processes of their own, over TCP. The measured
client pushes and pulls 1 KiB, one call at a time; the second client pushes and pulls `--beside` bytes,
`--in-flight` calls at a time. Servers with and without the short way take turns, so a round has both. On
fewer than three cores the processes also share cores, on both sides alike.

Rows: case, p50 and p99 in microseconds with the short way and without it (medians of the rounds), ratio (p99
with / p99 without, median of the rounds), and pushes per second of the second client on both sides.
"""

import asyncio
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from multiprocessing.connection import Connection

import numpy as np

from adam_async import ArraySpec
from benchmarks.harness import Option, Row, beside, looped, run, turns
from benchmarks.push_pull import Face, opened, serve

SMALL_BYTES = 1 << 10
"""Size of the pushes of the measured client, in bytes."""

BESIDE = (1 << 10, 1 << 20)
"""Sizes of the pushes of the second client, in bytes."""

Latencies = dict[str, float]
"""p50 and p99 in microseconds, and pushes per second of the second client."""


def push_all_the_time(channel: Connection, address: str, size: int, in_flight: int) -> None:
    """The second client: send a message once it pushes, and its number of pushes when asked."""
    looped(_push_all_the_time(channel, address, size, in_flight))


async def _push_all_the_time(channel: Connection, address: str, size: int, in_flight: int) -> None:
    arrays = {"w": ArraySpec((size // 4,))}
    async with opened(address, f"beside-{size}", arrays) as store:
        face, pushes, is_warm = Face(store, arrays), 0, asyncio.Event()

        async def push() -> None:
            nonlocal pushes
            while True:
                await face.push_pull()
                pushes += 1
                if pushes == 10 * in_flight:
                    is_warm.set()

        async with asyncio.TaskGroup() as group:
            for number in range(in_flight):
                group.create_task(push(), name=f"pushes {number}")
            await is_warm.wait()
            channel.send(pushes)
            while await asyncio.to_thread(channel.recv):
                channel.send(pushes)


async def latencies(address: str, calls: int) -> list[float]:
    """Seconds of each push and pull of the measured client, one at a time."""
    arrays = {"w": ArraySpec((SMALL_BYTES // 4,))}
    async with opened(address, "measured", arrays) as store:
        face = Face(store, arrays)
        for _ in range(200):
            await face.push_pull()
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            await face.push_pull()
            times.append(time.perf_counter() - begin)
        await store.delete()
        return times


def side(at_once: bool, beside_bytes: int, options: Namespace) -> Latencies:
    """Measure one side with a new server; `beside_bytes` is 0 without a second client."""
    with beside(serve, at_once) as server:
        address = server.recv()
        if not beside_bytes:
            return summary(looped(latencies(address, options.calls)), 0.0)
        with beside(push_all_the_time, address, beside_bytes, options.in_flight) as second:
            first, begin = second.recv(), time.perf_counter()
            times = looped(latencies(address, options.calls))
            second.send(True)
            return summary(times, (second.recv() - first) / (time.perf_counter() - begin))


def summary(times: list[float], pushes: float) -> Latencies:
    """Return the quantiles of a run in microseconds."""
    p50, p99 = np.quantile(times, (0.5, 0.99)) * 1e6
    return {"p50": float(p50), "p99": float(p99), "pushes": pushes}


def measure(options: Namespace) -> Iterator[Row]:
    """Yield the row of each case."""
    cases = (0, *options.beside)
    found: dict[tuple[int, bool], list[Latencies]] = {key: [] for key in product(cases, (True, False))}
    for case, at_once in turns(found, options.rounds):
        found[case, at_once].append(side(at_once, case, options))
    for case in cases:
        short, long = found[case, True], found[case, False]
        ratios = [ours["p99"] / other["p99"] for ours, other in zip(short, long, strict=True)]
        yield {
            "case": f"1 KiB beside pushes of {case} bytes" if case else "1 KiB alone",
            **{f"{name}_us": round(middle(short, name), 1) for name in ("p50", "p99")},
            **{f"{name}_us_without": round(middle(long, name), 1) for name in ("p50", "p99")},
            "ratio": round(statistics.median(ratios), 2),
            "second_pushes_per_s": round(middle(short, "pushes")),
            "second_pushes_per_s_without": round(middle(long, "pushes")),
        }


def middle(rounds: list[Latencies], name: str) -> float:
    """Return the median of a quantity over the rounds."""
    return statistics.median(each[name] for each in rounds)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        rounds=5,
        calls=Option(4000, "measured pushes of each side and round"),
        beside=Option(list(BESIDE), "bytes of the pushes of the second client"),
        in_flight=Option(8, "calls of the second client at a time"),
    )
