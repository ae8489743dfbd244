"""Latency of a client with small pushes beside a second client that pushes as fast as it can.

    python -m benchmarks.second_client --rounds 9 --json FILE

The server, the measured client and the second client are processes of their own, over TCP. The measured
client pushes and pulls 1 KiB, one call at a time; the second client pushes and pulls `--beside` bytes,
`--in-flight` calls at a time. Servers with and without the short way take turns, so a round has both. On
fewer than three cores the processes also share cores, on both sides alike.

Rows: case, p50 and p99 in microseconds with the short way and without it (medians of the rounds), ratio (p99
with / p99 without, median of the rounds), and pushes per second of the second client on both sides.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from adam_async import ArraySpec
from adam_async.runtime.kernel_cache import use_kernel_cache
from benchmarks.push_pull import Face, opened, serve

SMALL_BYTES = 1 << 10
"""Size of the pushes of the measured client, in bytes."""

BESIDE = (1 << 10, 1 << 20)
"""Sizes of the pushes of the second client, in bytes."""

Latencies = dict[str, float]
"""p50 and p99 in microseconds, and pushes per second of the second client."""


@contextmanager
def child(*options: str) -> Iterator["subprocess.Popen[str]"]:
    """Run this program with options until the block ends; yields it after its first line."""
    command = [sys.executable, "-m", "benchmarks.second_client", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def push_all_the_time(address: str, size: int, in_flight: int) -> None:
    """The second client: print a line once it pushes, and its number of pushes when asked."""
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
            print(pushes, flush=True)
            while await asyncio.to_thread(sys.stdin.readline):
                print(pushes, flush=True)


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


def measured(at_once: bool, beside: int, arguments: argparse.Namespace) -> Latencies:
    """Measure one side with a new server; `beside` is 0 without a second client."""
    with child("--serve", *([] if at_once else ["--long-way"])) as server:
        address = line_of(server)
        if not beside:
            return summary(run(latencies(address, arguments.calls)), 0.0)
        with child("--push", address, str(beside), "--in-flight", str(arguments.in_flight)) as second:
            assert second.stdin is not None
            first, begin = int(line_of(second)), time.perf_counter()
            times = run(latencies(address, arguments.calls))
            second.stdin.write("\n")
            second.stdin.flush()
            return summary(times, (int(line_of(second)) - first) / (time.perf_counter() - begin))


def summary(times: list[float], pushes: float) -> Latencies:
    """Return the quantiles of a run in microseconds."""
    p50, p99 = np.quantile(times, (0.5, 0.99)) * 1e6
    return {"p50": float(p50), "p99": float(p99), "pushes": pushes}


def run(work: Any) -> Any:
    """Run a coroutine on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both sides of each case in turns."""
    cases = (0, *arguments.beside)
    found: dict[tuple[int, bool], list[Latencies]] = {
        (case, way): [] for case in cases for way in (True, False)
    }
    for number in range(arguments.rounds):
        for case in cases:
            for way in (True, False) if number % 2 else (False, True):
                found[case, way].append(measured(way, case, arguments))
    rows = []
    for case in cases:
        short, long = found[case, True], found[case, False]
        ratios = [ours["p99"] / other["p99"] for ours, other in zip(short, long, strict=True)]
        rows.append(
            {
                "case": f"1 KiB beside pushes of {case} bytes" if case else "1 KiB alone",
                **{f"{name}_us": round(middle(short, name), 1) for name in ("p50", "p99")},
                **{f"{name}_us_without": round(middle(long, name), 1) for name in ("p50", "p99")},
                "ratio": round(statistics.median(ratios), 2),
                "second_pushes_per_s": round(middle(short, "pushes")),
                "second_pushes_per_s_without": round(middle(long, "pushes")),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def middle(rounds: list[Latencies], name: str) -> float:
    """Return the median of a quantity over the rounds."""
    return statistics.median(each[name] for each in rounds)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--long-way", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--push", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4000, help="measured pushes of each side and round")
    parser.add_argument("--beside", nargs="+", type=int, default=list(BESIDE))
    parser.add_argument("--in-flight", type=int, default=8, help="calls of the second client at a time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    use_kernel_cache()
    if arguments.serve:
        run(serve(at_once=not arguments.long_way))
    elif arguments.push:
        run(push_all_the_time(arguments.push[0], int(arguments.push[1]), arguments.in_flight))
    else:
        rows = compare(arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
