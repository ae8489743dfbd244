"""Clients that push from memory which they share with a server are killed, and each push is counted.

    python -m tests.processes.shared_kills [--timer N] [--steps N]

A kill comes after a random time, or after a random number of machine instructions (ptrace single steps) from
a phase of a push on: the first write of a gradient into the region, its check, the frame that names it, the
answer. After each kill the values must have all pushes that the client saw acknowledged, and at most one
more, whole; at the end the server maps no memory of a lost client.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from adam_async import Sgd
from adam_async.run.store_record import SHEETS
from adam_async.sync import ParameterStore
from tests.processes.commands import started_by_hand, until
from tests.processes.single_steps import Tracer

VALUES = 1 << 16
"""Number of values of the array: 256 KiB, which travel in shared memory."""

MOST_S = 0.02
"""Longest time from the first acknowledgement to a kill, in seconds: some ten pushes."""

MOST_STEPS = 60_000
"""Largest number of single steps from the begin of a phase on."""

PHASES = {
    "write": "",
    "check": "adam_async.store.values:PushMessages.messages",
    "place": "transport.regions:Outbox.place",
    "send": "transport.stream:StreamLink._transmit",
    "arrival": "transport.stream:StreamLink.buffer_updated",
    "answer": "adam_async.client.session:PushExchange.arrived",
    "borrow": "transport.regions:Inbox.lend",
    "return": "transport.regions:Inbox.take_returned",
}
"""Method with which each phase of a push and pull begins; none for the write of the program."""

_CLIENTS = """
import asyncio, os, sys
import numpy as np
from adam_async import ParameterStore
from tests.processes.single_steps import stop, stop_at

async def main(phase="", place=""):
    if place:
        stop_at(phase, place)
    async with ParameterStore.open(sys.argv[1], name="kills", link="shared") as store:
        gradients = await store.buffers()
        for number in range(1 << 20):
            stop("write")
            gradients["w"][:] = 1
            values = await store.push_pull(gradients)
            assert (values["w"] == values["w"][0]).all()
            os.write(1, b"acknowledged\\n")

for line in sys.stdin:
    child = os.fork()  # the imports take longer than a push
    if child == 0:
        asyncio.run(main(*line.split()))
    os.write(1, b"%d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"ended\\n")
"""


class Clients:
    """Clients in processes of their own, one after the other."""

    def __init__(self, where: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENTS, where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self._child = 0

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        if self._child:  # a client that waits for its tracer would keep the pipe open
            os.kill(self._child, signal.SIGKILL)
        self._process.communicate()

    def killed(self, kill: Callable[[int], None], phase: str | None = None) -> int:
        """Start a client, let a function kill it after its first push, and return its acknowledged pushes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n" if phase is None else f"{phase} {PHASES[phase]}\n")
        self._process.stdin.flush()
        acknowledged = 0
        for line in self._process.stdout:
            if line == "ended\n":
                self._child = 0
                break
            if line == "acknowledged\n":
                acknowledged += 1
                if acknowledged == 1:
                    kill(self._child)
            else:
                self._child = int(line)
        return acknowledged


def after_a_time(dice: random.Random) -> Callable[[int], None]:
    """Kill a process after a random time."""
    return lambda child: threading.Timer(dice.uniform(0, MOST_S), os.kill, (child, signal.SIGKILL)).start()


def after_steps(tracer: Tracer, phase: str, steps: int) -> Callable[[int], None]:
    """Kill a process some instructions after the begin of the next phase."""
    return lambda _: tracer.kill(phase, steps)


def regions_of(process: int) -> int:
    """Return the number of regions that a process maps, without those for the values of its own stores."""
    return Path(f"/proc/{process}/maps").read_text().count("memfd:adam-async ")


def sheets_of(process: int) -> int:
    """Return the number of regions for values that a process maps."""
    return Path(f"/proc/{process}/maps").read_text().count("memfd:adam-async-values ")


def run(timer: int, steps: int, seed: int = 1) -> Counter[str]:
    """Kill clients, check the values after each, and return the counts of pushes."""
    dice = random.Random(seed)
    counts = Counter[str]()
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        server = start("ps", "--controller")
        arrays = {"w": np.zeros(VALUES, np.float32)}
        store = stack.enter_context(
            ParameterStore.open(where, arrays, name="kills", rule=Sgd(rate=1.0), link="tcp")
        )
        tracer = stack.enter_context(Tracer())
        clients = stack.enter_context(Clients(where, tracer.environment))
        before = 0.0
        for number in range(timer + steps):
            phase = None if number < timer else [*PHASES][number % len(PHASES)]
            steps = dice.randrange(MOST_STEPS)
            kill = after_a_time(dice) if phase is None else after_steps(tracer, phase, steps)
            acknowledged = clients.killed(kill, phase)
            store.pull()  # behind it the server has read what the client has sent
            values = store.pull()["w"]
            applied = before - float(values[0])
            assert (values == values[0]).all(), f"kill {number} cut a push"
            assert applied - acknowledged in (0, 1), (
                f"kill {number}: {acknowledged} pushes, {applied} applied"
            )
            before = float(values[0])
            counts["acknowledged"] += acknowledged
            counts["applied"] += int(applied)
            counts[f"{phase or 'timer'}: kills"] += 1
            counts[f"{phase or 'timer'}: applied without an answer"] += int(applied) - acknowledged
        until(lambda: not regions_of(server.pid), "the server to free the regions of lost clients")

        def is_freed() -> bool:
            store.push(
                {"w": np.zeros(VALUES, np.float32)}
            )  # moves the values away from those of lost clients
            return sheets_of(server.pid) <= SHEETS

        until(is_freed, "the server to free the values that lost clients had")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timer", type=int, default=500)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    for name, count in run(options.timer, options.steps).items():
        sys.stdout.write(f"{name}: {count}\n")
