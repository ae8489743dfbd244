"""Processes that get fixed shares of a core, by a plan that stops and resumes them.

The plan precedes the run and depends only on shares, so every run gets the same plan. It uses only SIGSTOP
and SIGCONT: no part of the product knows its pace. A thread of the caller carries out the plan and is late by
the machine's delays, so `cpu_seconds` has the processor time that a process got.
"""

import heapq
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, order=True)
class Order:
    """The stop or the resumption of a worker's process, in seconds after the beginning."""

    at_s: float
    worker: int
    stop: bool


def duties(shares: Sequence[float], *, period_s: float = 0.01) -> Iterator[Order]:
    """Let each worker run for its share of every period, without end.

    The periods of all workers begin at the same times, because replicas that wait for each other would
    otherwise wait for the next period, whatever their shares.

    Args:
        shares: Share of a core of each worker, in (0, 1), an upper limit of its use.
        period_s: Length of a period, similar to one step, so that a worker is slow rather than absent at
            times.
    """
    return heapq.merge(*(_duty(worker, share, period_s) for worker, share in enumerate(shares)))


def _duty(worker: int, share: float, period_s: float) -> Iterator[Order]:
    for number in count():
        yield Order(number * period_s, worker, False)
        yield Order((number + share) * period_s, worker, True)


class Pacer:
    """Carries out a plan on processes until its block ends, and then resumes all of them.

    Args:
        orders: Stops and resumptions, in the order of their times.
        pids: Process of each worker. The processes must outlive the block.
    """

    def __init__(self, orders: Iterable[Order], pids: Sequence[int]) -> None:
        self._orders = orders
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play, name="pacer")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)

    def _play(self) -> None:
        begin = time.monotonic()
        for order in self._orders:
            if self._over.wait(max(0.0, begin + order.at_s - time.monotonic())):
                return
            os.kill(self._pids[order.worker], signal.SIGSTOP if order.stop else signal.SIGCONT)


def cpu_seconds(pid: int) -> float:
    """Seconds of processor time that a process has used, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
