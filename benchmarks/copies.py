"""The price of copies: rates of training, acknowledgements and bytes sent, with one, two and three copies.

    ADAM_DATA_DIR=DIR python -m benchmarks.copies --json FILE [--part latency rate]

All processes of a case run on this machine, and the cases take turns; ratios are medians of the ratios to one
copy within a round.

- `latency`: a cluster of three servers, and for each number of copies a store with the arrays of a model. A
  client pushes the gradients of the model at a fixed rate, with the factors that a worker sends for 16
  images; a latency counts from the time at which its push is due. Then the client keeps 16 pushes under way,
  and counts its pushes per second.
- `rate`: training with three servers, three controllers and two workers. The goal is 0.7 with three copies.
  The row of a server has the megabytes of the pushes that it received from workers, and the megabytes that it
  sent to workers and to servers, in the last round. `per_push_byte` is the number of bytes sent to servers
  per byte of pushes: about C - 1 with C copies.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from adam_async import ParameterStore, Sgd
from benchmarks.store_disk import (
    SETTLE_S,
    busy,
    gradients_of,
    median_interval,
    paced,
    row_of,
    specs_of,
    started,
    train,
)

COPIES = (1, 2, 3)
SERVERS = 3
RATE_GOAL = 0.7
"""Goal: minimum ratio of the training rate with three copies to that with one copy."""


async def latency(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of acknowledgements, by copies."""
    gradients = gradients_of(model)
    found: dict[int, list[list[float]]] = {copies: [] for copies in COPIES}
    fastest: dict[int, list[float]] = {copies: [] for copies in COPIES}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(started(None, servers=SERVERS, flush_s=1.0))
        stores = {
            copies: await stack.enter_async_context(
                ParameterStore.open(
                    cluster.controller,
                    specs_of(model),
                    name=f"{copies} copies",
                    rule=Sgd(),
                    copies=copies,
                    servers=SERVERS,
                )
            )
            for copies in COPIES
        }
        for number in range(-1, options.rounds):
            for copies in in_turn(number):
                store = stores[copies]
                await asyncio.sleep(SETTLE_S)
                latencies = await paced(store, gradients, options.per_s, options.seconds)
                rate, _ = await busy(store, gradients, options.seconds)
                if number >= 0:  # the first round compiles the kernels of the rule
                    found[copies].append(latencies)
                    fastest[copies].append(rate)
    return [
        {
            "case": f"latency: {model}, --copies {copies}",
            "paced_per_s": options.per_s,
            **row_of([each for one in found[copies] for each in one]),
            "pushes_per_s": round(statistics.median(fastest[copies]), 1),
            **_ratio_of(fastest[copies], fastest[1]),
        }
        for copies in COPIES
    ]


def in_turn(number: int) -> tuple[int, ...]:
    """Return the numbers of copies in the order of a round, so that each comes first in turn."""
    turn = number % len(COPIES)
    return COPIES[turn:] + COPIES[:turn]


def _ratio_of(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    ratios = [each / other for each, other in zip(mine, theirs, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        "interval": median_interval(ratios),
    }


def traffic_of(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the megabytes of each server of a run with copies, from the traffic in its report."""
    for number in range(SERVERS):
        node = f"ps-{number}"
        sent, pushes, entries = Counter[str](), 0, 0
        for row in report["traffic"]:
            payload = row["payload_bytes"]
            if row["from"] == node:
                sent[row["to"].split("-")[0]] += payload + row["frame_bytes"]
                if row["to"].startswith("ps-"):
                    entries += payload
            elif row["to"] == node and row["from"].startswith("worker-"):
                pushes += payload
        yield {
            "node": node,
            "pushes_mb": round(pushes / 1e6, 2),
            "to_workers_mb": round(sent["worker"] / 1e6, 2),
            "to_servers_mb": round(sent["ps"] / 1e6, 2),
            "all_sent_mb": round(sent.total() / 1e6, 2),
            "per_push_byte": round(entries / pushes, 3) if pushes else None,
        }


def rates(model: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of trainings of a model, by copies."""
    found: dict[int, list[float]] = {copies: [] for copies in COPIES}
    servers: dict[int, list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        for copies in in_turn(number):
            words = ["--servers", str(SERVERS), "--controllers", "3", "--copies", str(copies)]
            report = train(model, options.epochs, words, folder)
            found[copies].append(report["totals"]["images_per_s"])
            servers[copies] = list(traffic_of(report))
            print(f"{model}, {copies} copies: {found[copies][-1]:.0f} images/s", flush=True)
    rows = []
    for copies in COPIES:
        ratio = _ratio_of(found[copies], found[1])
        row = {"case": f"rate: {model}, --copies {copies}", "ours": round(statistics.median(found[copies]))}
        row |= {"unit": "images/s", "rates": [round(each) for each in found[copies]], **ratio}
        row |= {"epochs": options.epochs, "servers": servers[copies]}
        if copies == max(COPIES):
            row |= {"goal": RATE_GOAL, "met": ratio["ratio"] >= RATE_GOAL}
        rows.append(row)
    return rows


async def run(folder: Path, options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for model in options.model:
        for part in options.part:
            if part == "latency":
                new = await latency(model, options)
            else:
                new = await asyncio.to_thread(rates, model, folder, options)
            for row in new:
                print(json.dumps(row), flush=True)
            rows += new
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--part", nargs="+", choices=("latency", "rate"), default=["latency", "rate"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each part")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window of latency")
    parser.add_argument("--per-s", type=float, default=50.0, help="pushes per second of latency")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of a training of rate")
    parser.add_argument("--model", nargs="+", default=["mnist-adam"])
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="adam-async-copies-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(run(Path(folder), options))


if __name__ == "__main__":
    main()
