"""The price of copies: rates of training, acknowledgements and bytes sent, with one, two and three copies.

    ADAM_DATA_DIR=DIR python -m benchmarks.copies --json FILE [--part latency rate]

All processes of a case run on this machine, and the cases take turns; the peer is one copy.

- `latency`: a cluster of three servers, and for each number of copies a store with the arrays of a model. A
  client pushes the gradients of the model at a fixed rate, with the factors that a worker sends for 16
  images; a latency counts from the time at which its push is due. Then the client keeps 16 pushes under way,
  and counts its pushes per second.
- `rate`: training with three servers, three controllers and two workers. The goal is 0.7 with three copies.
  The row of a server has the megabytes of the pushes that it received from workers, and the megabytes that it
  sent to workers and to servers, in the last round. `per_push_byte` is the number of bytes sent to servers
  per byte of pushes: about C - 1 with C copies.
"""

import asyncio
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from adam_async import ParameterStore, Sgd
from benchmarks.harness import Option, Row, compared, run, trained, turns
from benchmarks.store_disk import (
    EPOCH_S,
    SETTLE_S,
    TRAINING,
    busy,
    gradients_of,
    paced,
    row_of,
    specs_of,
    started,
)

COPIES = (1, 2, 3)
SERVERS = 3
RATE_GOAL = 0.7
"""Goal: minimum ratio of the training rate with three copies to that with one copy."""


async def latency(model: str, options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of acknowledgements, by copies."""
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
        for copies in turns(COPIES, options.rounds + 1):
            await asyncio.sleep(SETTLE_S)
            found[copies].append(await paced(stores[copies], gradients, options.per_s, options.seconds))
            fastest[copies].append((await busy(stores[copies], gradients, options.seconds))[0])
    for copies in COPIES:
        # The first round compiles the kernels of the rule.
        yield compared(
            f"latency: {model}, --copies {copies}",
            fastest[copies][1:],
            fastest[1][1:],
            "pushes/s",
            paced_per_s=options.per_s,
            **row_of([each for one in found[copies][1:] for each in one]),
        )


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


def rates(model: str, options: Namespace) -> Iterator[Row]:
    """Yield the rows of trainings of a model, by copies."""
    found: dict[int, list[Mapping[str, Any]]] = {copies: [] for copies in COPIES}
    for copies in turns(COPIES, options.rounds):
        words = ["--servers", str(SERVERS), "--controllers", "3", "--copies", str(copies)]
        words += [*TRAINING, "--model", model, "--epochs", str(options.epochs)]
        found[copies].append(trained(*words, within_s=options.epochs * EPOCH_S))
    rate = {copies: [each["totals"]["images_per_s"] for each in found[copies]] for copies in COPIES}
    for copies in COPIES:
        yield compared(
            f"rate: {model}, --copies {copies}",
            rate[copies],
            rate[1],
            "images/s",
            goal=RATE_GOAL if copies == max(COPIES) else None,
            servers=list(traffic_of(found[copies][-1])),
        )


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of the wanted parts."""
    for model in options.model:
        if "latency" in options.part:
            async for row in latency(model, options):
                yield row
        if "rate" in options.part:
            for row in await asyncio.to_thread(list, rates(model, options)):
                yield row


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        part=Option(["latency", "rate"], choices=["latency", "rate"]),
        rounds=Option(5, "rounds of each part"),
        seconds=Option(4.0, "length of a window of latency"),
        per_s=Option(50.0, "pushes per second of latency"),
        epochs=Option(1, "epochs of a training of rate"),
        model=["mnist-adam"],
    )
