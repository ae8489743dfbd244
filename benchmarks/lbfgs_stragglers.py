"""An evaluation of L-BFGS by eight workers, one of them at a fifth of the speed, with backups and without.

    python -m benchmarks.lbfgs_stragglers --json FILE --picture FILE.svg [--pace 0.2] [--rounds 9]

The workers are threads of one process, which rest so that each uses a share of a core (`--pace`), and the
store is in the same process. A worker's equal part of an evaluation is `--work` seconds of processor time,
cut into pieces. The equal workers and the uneven ones take turns. Eight workers at a pace of 0.2 need 1.6
cores, and the uneven ones 1.44. The gradient has 256 values, so servers and coordinator need some
milliseconds of an evaluation; `others` is their processor time as a share of that of the workers.

Rows: seconds of an evaluation with the slow worker (ours) and with eight equal ones, for each number of
pieces for each worker. The goal with backups and 8 pieces is 1 / 1.25. `again` is the share of the pieces
that were computed a second time.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adam_async import ParameterStore
from adam_async.lbfgs.dealer import Dealer
from adam_async.lbfgs.minimiser import GRADIENT, stored_name
from adam_async.lbfgs.worker import GradientWorker
from adam_async.runtime.channel import StackedTaskGroup
from benchmarks import svg
from benchmarks.harness import Option, Row, compared, run, turns
from dataflow import ComputePool

WORKERS, SLOW_BY = 8, 5
DEFAULT_PIECES, GOAL = 8, 1 / 1.25
ARRAYS = {"x": np.zeros(256)}


def work(values: Any, seconds: float) -> tuple[float, Any]:
    """Use processor time, mostly without the interpreter's lock, and return a gradient."""
    end, matrix = time.thread_time() + seconds, np.eye(192)
    while time.thread_time() < end:
        matrix @ matrix
    return 1.0, ARRAYS


class Evaluated(NamedTuple):
    """One evaluation: its seconds, the share of the pieces that were computed again, and `others`."""

    seconds: float
    again: float
    others: float


async def evaluated(arguments: Namespace, pieces: int, *, backups: bool, uneven: bool) -> Evaluated:
    """Evaluate once."""
    count = pieces * WORKERS
    batches = [arguments.work / pieces] * count
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(ParameterStore.open("local", ARRAYS, name="stragglers"))
        await store.add_vector(stored_name(GRADIENT), temporary=True)
        dealer = Dealer(store.link.store.id, count, count, backups=backups, join_s=10.0, turn_s=10.0)
        group = await stack.enter_async_context(StackedTaskGroup())
        for number in range(WORKERS):
            pace = arguments.pace / (SLOW_BY if uneven and not number else 1)
            pool = await stack.enter_async_context(ComputePool(threads=1, name=f"worker-{number}", pace=pace))
            worker = GradientWorker(store, work, batches, partial(dealer.answer, number), pool)
            stack.callback(group.create_task(worker.run(), name=f"worker-{number}").cancel)
        begin, cpu_s = time.perf_counter(), time.process_time()
        await dealer.evaluate(1)
        took_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
        worked_s = dealer.computations * arguments.work / pieces
        return Evaluated(took_s, dealer.computations / count - 1, cpu_s / worked_s - 1)


async def measure(arguments: Namespace) -> AsyncIterator[Row]:
    """Yield the row of each number of pieces, without backups and with them."""
    rows = []
    for pieces in arguments.pieces:
        for backups in (False, True):
            sides: dict[bool, list[Evaluated]] = {True: [], False: []}
            for uneven in turns(sides, arguments.rounds):
                sides[uneven].append(await evaluated(arguments, pieces, backups=backups, uneven=uneven))
            ours, peer = ([each.seconds for each in sides[uneven]] for uneven in (True, False))
            row = compared(
                f"{pieces} pieces for each worker, {'with' if backups else 'without'} backups",
                ours,
                peer,
                "s",
                less_is_better=True,
                goal=GOAL if backups and pieces == DEFAULT_PIECES else None,
                pieces=pieces,
                backups=backups,
                again=round(statistics.median(each.again for each in sides[True]), 3),
                others=round(statistics.median(each.others for each in sides[True]), 3),
            )
            rows.append(row)
            yield row
    if arguments.picture is not None:
        arguments.picture.write_text(picture(rows))


def picture(rows: list[Row]) -> str:
    """Draw the seconds with a slow worker, as a multiple of those of equal ones, as bars."""
    width, left, step = 640, 190, 34
    most = max(1 / row["ratio"] for row in rows)
    scale, parts = (width - left - 80) / most, []
    for number, row in enumerate(rows):
        y, times = 52 + number * step, 1 / row["ratio"]
        colour = "#1f5fa8" if row["backups"] else "#d9732f"
        parts.append(svg.text(left - 10, y + 5, f"{row['pieces']} pieces a worker", anchor="end"))
        parts.append(svg.curve([(left, y), (left + times * scale, y)], 18, colour))
        parts.append(svg.text(left + times * scale + 8, y + 5, f"{times:.2f}", anchor="start"))
    parts += [
        *svg.legend(left, 22, "#d9732f", "without backups"),
        *svg.legend(left + 150, 22, "#1f5fa8", "with"),
    ]
    label = "Seconds of an evaluation by 8 workers, one at a fifth of the speed, beside 8 equal ones"
    return svg.drawing(width, 52 + len(rows) * step, label, parts)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        pieces=[2, 8, 32],
        rounds=20,
        pace=Option(0.2, "share of a core for each worker"),
        work=Option(0.2, "processor time of a worker's equal part of an evaluation, in seconds"),
        picture=Option(None, "file for the picture", type=Path),
    )
