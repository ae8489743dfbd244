"""kill -9 of all processes of a store on disks, again and again: recovered values, lost pushes, seconds.

    python -m benchmarks.store_kills --kills 200 --seed 1 --json FILE [--case durable] [--folder DIR]

A controller and parameter servers with `ps --dir`, each a process, serve a store, and two clients in this
process push to it, each one push after the other. A seed draws the moment of a kill, within 3 s after the
store is open; one in seven may come earlier, while the store comes back. All processes get SIGKILL, start
again without the records of the controller, and the clients open the store by its name. This goes on with the
same folders until the last kill; the cases alternate.

A push changes its client's row of a large and of a small array by random whole numbers. For each row this
process keeps a digest after each push, and the time of the push's acknowledgement. So a recovered row has one
of these digests, or is wrong: torn, older than at the last return, with a push twice, or without an earlier
one. The rows of one piece have to agree, too: a push is in all of them if a later push of its client is in
any.

Rows, one per case: kills, and those before the store was open; acknowledged pushes, and those lost; for the
kills with losses the seconds from the acknowledgement of the oldest lost push to the kill; seconds from the
start of the processes to the recovered values; wrong rows; `met`, if nothing is wrong, and no lost push was
acknowledged more than 2 x `--flush-s` before the kill, or none is lost at all in mode `durable`. The page
cache outlives kill -9; tests/adam_async/persistence/test_cut_image.py cuts images of a disk.
"""

import asyncio
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async import ParameterStore, Sgd
from adam_async.errors import AdamError
from adam_async.parameter_server.shard_pieces import pieces_of
from adam_async.runtime.role_handle import address_in
from adam_async.store.opening import Opening
from benchmarks.harness import Option, Row, run
from tests.drill.judging import percentile
from transport import TransportError

CLIENTS = 2
LARGE, SMALL = 8, 16
"""Numbers of arrays."""
LARGE_SIZE, SMALL_SIZE = 1 << 15, 1 << 9
"""Number of values in a client's row of an array: with two clients 256 KiB and 4 KiB per array."""
PAUSE_S = 0.004
"""Pause of a client after each push, in seconds."""
LATEST_S = 3.0
"""Latest moment of a kill, in seconds after the store was open."""
EARLY, EARLY_S = 0.15, 1.0
"""Share of kills that may come before the store is open, and the latest moment of such a kill, in seconds
after all processes have started."""
START_S = 60.0
"""Deadline of the start of all processes, and of the return of a store, in seconds."""
LATE_S = 0.1
"""Time for acknowledgements that were sent before the kill, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A number of servers and copies, and the moment of an acknowledgement."""

    name: str
    servers: int
    copies: int
    durable: bool = False


CASES = (
    Case(name="single", servers=2, copies=1),
    Case(name="replicated", servers=3, copies=3),
    Case(name="durable, 1 copy", servers=2, copies=1, durable=True),
    Case(name="durable, 3 copies", servers=3, copies=3, durable=True),
)


def shapes() -> dict[str, tuple[int, int]]:
    """Return the shapes of all arrays: a row for each client."""
    large = {f"large-{number}": (CLIENTS, LARGE_SIZE) for number in range(LARGE)}
    return large | {f"small-{number:02d}": (CLIENTS, SMALL_SIZE) for number in range(SMALL)}


def digest_of(row: NDArray[np.float32]) -> bytes:
    return blake2b(row.tobytes(), digest_size=16).digest()


class ArrayRow:
    """The pushes of one client to one array since the last return of the store.

    Attributes:
        values: Values after all pushes.
    """

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values.copy()
        self._known = {digest_of(self.values): 0}
        self.numbers: list[int] = []
        """Number of each push to this array, in the count of all pushes of its client."""

    def push(self, number: int, gradient: NDArray[np.float32]) -> None:
        """Add a push, whose acknowledgement may follow."""
        self.values -= gradient
        self.numbers.append(number)
        self._known[digest_of(self.values)] = len(self.numbers)

    def found(self, values: NDArray[np.float32]) -> int | None:
        """Return the number of pushes in recovered values; None if they are wrong."""
        return self._known.get(digest_of(values))


@dataclass(kw_only=True)
class Result:
    """Results of the kills of one case."""

    kills: int = 0
    unopened: int = 0
    acknowledged: int = 0
    lost: int = 0
    losses_s: list[float] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    error: str = ""
    """Reason why the store did not come back, which ends the case; empty otherwise."""


class Journal:
    """All pushes since the last return of the store, and the judgement of the next one."""

    def __init__(self, seed: int, result: Result) -> None:
        self._draws = np.random.default_rng(seed)
        self._result = result
        self._numbers = [0] * CLIENTS
        self._acknowledged: dict[tuple[int, int], float] = {}
        """Time of the acknowledgement of a push, by client and number."""
        self.rows: dict[tuple[str, int], ArrayRow] = {}
        self.pieces: Sequence[Sequence[str]] = ()
        """The arrays of each piece of the store that the pushes went to."""
        self.begin({name: np.zeros(shape, np.float32) for name, shape in shapes().items()})

    def begin(self, values: Mapping[str, NDArray[np.float32]]) -> None:
        """Begin with the values of a store that has come back."""
        self.rows = {
            (name, client): ArrayRow(values[name][client]) for name in shapes() for client in range(CLIENTS)
        }
        self._acknowledged.clear()

    def push(self, client: int) -> tuple[int, dict[str, NDArray[np.float32]]]:
        """Return the number of the next push of a client, and its gradients."""
        number = self._numbers[client] = self._numbers[client] + 1
        gradients = {}
        for name in (f"large-{number % LARGE}", f"small-{number % SMALL:02d}"):
            gradient = np.zeros(shapes()[name], np.float32)
            gradient[client] = self._draws.integers(-8, 9, gradient.shape[1])
            self.rows[name, client].push(number, gradient[client])
            gradients[name] = gradient
        return number, gradients

    def acknowledged(self, client: int, number: int) -> None:
        self._acknowledged[client, number] = time.monotonic()
        self._result.acknowledged += 1

    def judge(self, values: Mapping[str, NDArray[np.float32]], killed_at: float, *, durable: bool) -> None:
        """Compare recovered values with the pushes, and begin again with them."""
        result, lost, found = self._result, set[tuple[int, int]](), dict[tuple[str, int], int]()
        for (name, client), row in self.rows.items():
            count = row.found(values[name][client])
            if count is None:
                result.wrong.append(f"kill {result.kills}: row {client} of {name} is no state of its own")
                continue
            found[name, client] = count
            lost |= {(client, n) for n in row.numbers[count:] if (client, n) in self._acknowledged}
        self._compare_pieces(found)
        result.lost += len(lost)
        if lost:
            result.losses_s.append(max(0.0, killed_at - min(self._acknowledged[each] for each in lost)))
        if lost and durable:
            result.wrong.append(f"kill {result.kills}: {len(lost)} durable pushes are lost")
        self.begin(values)

    def _compare_pieces(self, found: Mapping[tuple[str, int], int]) -> None:
        """Report arrays of a piece that were copied at different moments."""
        for names in self.pieces:
            for client in range(CLIENTS):
                rows = {name: self.rows[name, client].numbers for name in names if (name, client) in found}
                split = {name: found[name, client] for name in rows}
                last = max((rows[name][at - 1] for name, at in split.items() if at), default=0)
                late = [name for name, at in split.items() if at < len(rows[name]) and rows[name][at] < last]
                if late:
                    self._result.wrong.append(
                        f"kill {self._result.kills}: {', '.join(late)} lack pushes of client {client} before "
                        f"push {last}, which is in the same piece"
                    )


class Cluster:
    """A controller and servers, each a process.

    Args:
        folder: Folder for the folders of the servers; None: stores are in memory only.
        within: Words in front of the command of a server.

    Attributes:
        controller: Address of the controller, from `start` on.
        pids: Process ids of the servers.
    """

    def __init__(
        self, folder: Path | None, *, servers: int, flush_s: float, within: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._servers = servers
        self._flush_s = flush_s
        self._within = within
        self._processes: list[asyncio.subprocess.Process] = []
        self.controller = ""
        self.pids: list[int] = []

    async def start(self) -> None:
        """Start all processes, and wait for their addresses."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.controller = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        async with asyncio.timeout(START_S):
            _, *self.pids = await asyncio.gather(
                self._start("controller", "--bind", self.controller),
                *[self._start_server(f"ps-{number}") for number in range(self._servers)],
            )

    async def _start_server(self, node: str) -> int:
        words = ["ps", "--id", node, "--controller", self.controller]
        if self._folder is not None:
            words += ["--dir", str(self._folder / node), "--flush-s", str(self._flush_s)]
        return await self._start(*words, within=self._within)

    async def _start(self, *words: str, within: Sequence[str] = ()) -> int:
        with (self._folder / "log" if self._folder is not None else Path(os.devnull)).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *within,
                sys.executable,
                "-m",
                "adam_async",
                *words,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        self._processes.append(process)
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not address_in(line):
            raise AdamError(f"{' '.join(words)} did not start: see {log.name}")
        return process.pid

    def kill(self) -> None:
        """Send SIGKILL to all processes."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()

    async def ended(self) -> list[int]:
        """Wait for the end of all processes; returns their exit codes."""
        codes = [await process.wait() for process in self._processes]
        self._processes.clear()
        return codes


class CaseRunner:
    """The kills of one case."""

    def __init__(self, case: Case, folder: Path, options: Namespace) -> None:
        self.case = case
        self.result = Result()
        self._flush_s = options.flush_s
        self._cluster = Cluster(folder, servers=case.servers, flush_s=options.flush_s)
        self._journal = Journal(options.seed, self.result)
        self._dice = random.Random(f"{options.seed} {case.name}")
        self._killed_at = 0.0
        self._is_new = True
        self._ending: set[asyncio.Task[Any]] = set()

    def _client(self) -> "Opening[ParameterStore]":
        case = self.case
        return ParameterStore.open(
            self._cluster.controller,
            {name: np.zeros(shape, np.float32) for name, shape in shapes().items()},
            name="killed",
            rule=Sgd(rate=1.0),
            copies=case.copies,
            servers=case.servers,
            durable=case.durable,
        )

    async def _open(self) -> list[ParameterStore]:
        """Open the store by its name, and judge its values; each client opens it."""
        stores: list[ParameterStore] = []
        try:
            while len(stores) < CLIENTS:
                stores.append(await self._client())
            values = await stores[0].pull()
        except BaseException:
            self._close(stores)
            raise
        if self._is_new:
            self._is_new = False
        else:
            self._journal.judge(values, self._killed_at, durable=self.case.durable)
        link = stores[0]._link
        specs, buckets = link.calls.layout.table.shards, link.store.buckets
        self._journal.pieces = [
            [spec.tensor for spec in piece]
            for home in set(buckets)
            for piece in pieces_of([spec for spec in specs if buckets[spec.bucket] == home], in_place=False)
        ]
        return stores

    def _later(self, task: "asyncio.Task[Any]") -> None:
        """Let a task end during other work: its servers are gone, and its last messages have deadlines."""
        self._ending.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: "asyncio.Task[Any]") -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # expected: a push or an opening without servers

    def _close(self, stores: Sequence[ParameterStore]) -> None:
        for store in stores:
            self._later(asyncio.create_task(store.close(), name="close"))

    async def _push(self, client: int, store: ParameterStore) -> None:
        """Push until cancelled, or without servers."""
        while True:
            number, gradients = self._journal.push(client)
            await store.push(gradients)
            self._journal.acknowledged(client, number)
            await asyncio.sleep(PAUSE_S)

    async def kill(self) -> None:
        """Start the processes, push, and kill them at the next moment.

        Raises:
            AdamError, TransportError: The store did not come back.
        """
        begin = time.monotonic()
        await self._cluster.start()
        is_early = self._dice.random() < EARLY
        opening = asyncio.create_task(self._open(), name="open")
        early_s = self._dice.uniform(0.0, EARLY_S)
        await asyncio.wait([opening], timeout=early_s if is_early else START_S)
        stores: list[ParameterStore] = []
        pushing: list[asyncio.Task[None]] = []
        if opening.done():
            stores = opening.result()
            self.result.recoveries_s.append(time.monotonic() - begin)
            pushing = [asyncio.create_task(self._push(n, store)) for n, store in enumerate(stores)]
            await asyncio.wait(
                pushing, timeout=self._dice.uniform(0.0, LATEST_S), return_when=asyncio.FIRST_EXCEPTION
            )
            self._killed_at = time.monotonic()
        elif is_early:
            self.result.unopened += 1
        else:
            opening.cancel()
            raise AdamError(f"the store was not open after {START_S:g} s")
        self.result.wrong += [f"kill {self.result.kills}: {task!r}" for task in pushing if task.done()]
        self._cluster.kill()
        self.result.kills += 1
        codes = await self._cluster.ended()
        if set(codes) != {-9}:
            self.result.wrong.append(f"kill {self.result.kills}: exit codes {codes}")
        await asyncio.sleep(LATE_S)
        for task in (opening, *pushing):
            task.cancel()
            self._later(task)
        self._close(stores)

    async def recover(self) -> None:
        """Judge the last kill, and end the processes."""
        begin = time.monotonic()
        await self._cluster.start()
        async with asyncio.timeout(START_S):
            stores = await self._open()
        self.result.recoveries_s.append(time.monotonic() - begin)
        self.abandon()
        await self._cluster.ended()
        self._close(stores)
        await asyncio.wait(self._ending, timeout=START_S)

    async def attempt(self, work: Coroutine[Any, Any, None]) -> None:
        """Await a step of the case; an error of the store ends the case."""
        try:
            await work
        except (AdamError, TransportError, TimeoutError) as error:
            self.result.error = f"after kill {self.result.kills}: {error!r}"
            self.abandon()
            await self._cluster.ended()

    def abandon(self) -> None:
        """End the processes at once."""
        self._cluster.kill()

    def row(self) -> Row:
        """Return the row of the case."""
        result = self.result
        losses = sorted(result.losses_s)
        bound = 0.0 if self.case.durable else 2 * self._flush_s
        return {
            "case": f"{self.case.name} ({self.case.servers} servers)",
            "flush_s": self._flush_s,
            "kills": result.kills,
            "before_the_store_was_open": result.unopened,
            "acknowledged": result.acknowledged,
            "lost": result.lost,
            "kills_with_losses": len(losses),
            **{
                f"loss_{name}_s": round(percentile(losses, share) or 0.0, 3)
                for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            },
            "permitted_s": bound,
            "recovery_p50_s": round(percentile(result.recoveries_s, 0.5) or 0.0, 2),
            "recovery_max_s": round(max(result.recoveries_s, default=0.0), 2),
            "wrong": result.wrong,
            "error": result.error,
            "met": not result.wrong and not result.error and not any(loss > bound for loss in losses),
            "loss_s_of_each": [round(loss, 3) for loss in losses],
        }


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of all cases, and remove the folders of the servers if all are met."""
    logging.disable(logging.WARNING)  # each client reports each loss of its servers
    folder = Path(tempfile.mkdtemp(prefix="adam-async-kills-", dir=options.folder))
    rows = await killed(options, folder)
    for row in rows:
        yield row
    if all(row["met"] for row in rows):
        shutil.rmtree(folder)
    else:
        print(f"the folders of the servers are in {folder}")


async def killed(options: Namespace, folder: Path) -> list[Row]:
    """Return the rows of all cases."""
    runners = []
    for number, case in enumerate(case for case in CASES if case.name.startswith(options.case)):
        (folder / str(number)).mkdir()
        runners.append(CaseRunner(case, folder / str(number), options))
    begin = time.monotonic()
    try:
        for number in range(options.kills):
            runner = runners[number % len(runners)]
            result = runner.result
            if not result.error:
                await runner.attempt(runner.kill())
            seconds = time.monotonic() - begin
            print(
                f"{number + 1} of {options.kills} kills in {seconds:.0f} s: {runner.case.name}, "
                f"{result.acknowledged} acknowledged, {result.lost} lost, {len(result.wrong)} wrong",
                flush=True,
            )
        for runner in runners:
            if runner.result.kills and not runner.result.error:
                await runner.attempt(runner.recover())
    finally:
        for runner in runners:
            runner.abandon()
    return [runner.row() for runner in runners]


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        kills=Option(200, "number of kills of all cases together"),
        seed=1,
        case=Option("", "begin of the names of the cases; by default all"),
        flush_s=1.0,
        folder=Option(None, "folder on the disk; by default that of temporary files", type=Path),
    )
