"""The harness of all benchmarks: arguments, sides in turn, rows with the machine, and processes that end.

A benchmark is a function that yields rows, and a call of `run` with its arguments. `run` prints each row, and
writes the file of `--json` again after each, so that an interrupted benchmark keeps its rows:

    {"benchmark": NAME, "arguments": {...}, "machine": {...}, "rows": [{"case": ..., ...}, ...]}

Rows of `compared` are pairs: `ours` and `peer` are medians over the rounds, `ratio` is the median of the
rounds' ratios (above 1 ours is better), and `interval` its 95 % bootstrap interval. A goal is met if at least
`LEAST_PAIRS` pairs have a ratio of the goal, and an interval that begins at most `BELOW` under it.
"""

import argparse
import asyncio
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import uvloop

from adam_async.runtime.kernel_cache import VECTORS, use_kernel_cache
from adam_async.runtime.machine import processor_name, usable_cores
from adam_async.runtime.role_handle import address_in

T = TypeVar("T")
Row = dict[str, Any]
Rows = Iterable[Row] | AsyncIterable[Row]

ROOT = Path(__file__).resolve().parents[1]
LEAST_PAIRS, BELOW = 20, 0.03
DRAWS = 10_000
"""Number of samples of a bootstrap."""
LIMIT_S = 600.0
"""Deadline of a process that measures one side once, in seconds."""

# --- arguments and rows --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a benchmark; its type is that of the default, or of the first of several defaults."""

    default: Any
    help: str = ""
    choices: Sequence[Any] | None = None
    type: Callable[[str], Any] | None = None
    repeated: bool = False
    """Whether each value has the name of the argument in front."""

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the argument to a parser."""
        default, more = self.default, {"help": self.help or None, "dest": name}
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction if default else "store_true"
            parser.add_argument(flag, action=action, default=default, **more)  # type: ignore[arg-type]
            return
        if isinstance(default, list):
            more |= {"action": "append"} if self.repeated else {"nargs": "+"}
        first = next(iter(default), "") if isinstance(default, list) else default
        kind = self.type or (str if first is None else type(first))
        parser.add_argument(flag, type=kind, default=default, choices=self.choices, **more)  # type: ignore[arg-type]


def parsed(document: str | None, **options: Any) -> argparse.Namespace:
    """Read the command line.

    Args:
        document: Docstring of the benchmark.
        options: `Option` or default of each argument, by name.
    """
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in options.items():
        (option if isinstance(option, Option) else Option(option)).add_to(parser, name)
    return parser.parse_args()


def run(document: str | None, measure: Callable[[argparse.Namespace], Rows], **options: Any) -> list[Row]:
    """Run a benchmark from the command line: print its rows, and write them; returns them.

    Args:
        document: Docstring of the benchmark.
        measure: Yields the rows, also asynchronously.
        options: As in `parsed`.
    """
    arguments = parsed(document, json=Option(None, "file for the rows, as JSON", type=Path), **options)
    use_kernel_cache()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # or processes would outlive this one
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report_of(measure, arguments, rows), indent=1) + "\n")

    async def add_all(found: AsyncIterable[Row]) -> None:
        async for row in found:
            add(row)

    found = measure(arguments)
    if isinstance(found, AsyncIterable):
        looped(add_all(found))
    else:
        for row in found:
            add(row)
    return rows


def report_of(measure: object, arguments: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the content of the file of `--json`."""
    name = Path(sys.modules[getattr(measure, "__module__", "__main__")].__file__ or "").stem
    words = {key: value for key, value in vars(arguments).items() if key != "json"}
    words = json.loads(json.dumps(words, default=str))
    return {"benchmark": name, "arguments": words, "machine": machine(), "rows": rows}


def machine() -> dict[str, Any]:
    """Return the facts of this machine and checkout that rates depend on."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "vectors": os.environ.get(VECTORS) or widest_vectors(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": git.stdout.strip() or None,
    }


def widest_vectors() -> str:
    """Return the widest vector registers of the processor; empty if the system does not name them."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ""
    return next((name for name in ("avx512f", "avx2", "asimd") if name in flags), "")


# --- sides in turn -------------------------------------------------------------------------------


def turns(sides: Iterable[T], rounds: int) -> Iterator[T]:
    """Yield every side once in each round; each side is the first of a round in turn."""
    order = list(sides)
    for number in range(rounds):
        at = number % len(order)
        yield from order[at:] + order[:at]


def interleaved(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measure all sides in turn; returns the values of each."""
    found: dict[str, list[T]] = {side: [] for side in sides}
    for side in turns(sides, rounds):
        found[side].append(sides[side]())
    return found


def rounded(value: float) -> float:
    """Return a value with five digits."""
    return float(f"{value:.5g}")


def measured(case: str, values: Sequence[float], unit: str, **more: Any) -> Row:
    """Return the row of a side without a peer."""
    ends = [rounded(min(values)), rounded(max(values))]
    return {"case": case, "ours": rounded(statistics.median(values)), "unit": unit, "spread": ends, **more}


def compared(
    case: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    *,
    less_is_better: bool = False,
    goal: float | None = None,
    **more: Any,
) -> Row:
    """Return the row of two sides that were measured in the same rounds.

    Args:
        case: Names of both sides.
        ours: Value of each round.
        peer: Value of each round.
        unit: Unit of the values.
        less_is_better: Whether a ratio is peer / ours.
        goal: Least ratio.
        more: Further fields.
    """
    pairs = [(a, b) if less_is_better else (b, a) for a, b in zip(ours, peer, strict=True)]
    ratios = [above / below for below, above in pairs]
    ratio, interval = statistics.median(ratios), median_interval(ratios)
    row: Row = {
        "case": case,
        "ours": rounded(statistics.median(ours)),
        "peer": rounded(statistics.median(peer)),
        "ratio": round(ratio, 3),
        "interval": interval,
        "unit": unit,
        "ratios": [round(each, 3) for each in ratios],
    }
    if goal is not None:
        is_met = ratio >= goal and interval[0] >= goal - BELOW
        row |= {"goal": goal, "met": is_met if len(ratios) >= LEAST_PAIRS else None}
    return row | more


def median_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a 95 % interval of the median of some ratios, by bootstrap; equal in each call."""
    draws = np.random.default_rng(1).choice(np.asarray(ratios), (DRAWS, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return round(float(low), 3), round(float(high), 3)


# --- processes -----------------------------------------------------------------------------------


def looped(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop; SIGTERM cancels it.

    Raises:
        SystemExit: The process was terminated.
    """
    before = signal.getsignal(signal.SIGTERM)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_until_terminated(work))
        except asyncio.CancelledError:
            sys.exit("terminated")
        finally:
            runner.get_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before)


async def _until_terminated(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    # uvloop takes an exception of a signal's handler for one of the protocol that it interrupts.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


@contextmanager
def beside(work: Callable[..., object], *arguments: Any) -> Iterator[Connection]:
    """Run `work(channel, *arguments)` in a process of its own until the block ends.

    The process has a session of its own, which ends with the block, and with this process however that ends.

    Yields:
        The other end of the channel.
    """
    spawning = get_context("spawn")  # a forked process would share cached pages
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_work, args=(work, theirs, arguments))
    process.start()
    theirs.close()  # so that a read ends with the process
    try:
        yield ours
    finally:
        process.kill()
        kill_group(process.pid)
        process.join()
        process.close()
        ours.close()


def _work(work: Callable[..., object], channel: Connection, arguments: Sequence[Any]) -> None:
    os.setsid()
    use_kernel_cache()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work(channel, *arguments)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    kill_group(os.getpid())


def kill_group(leader: int | None) -> None:
    """Kill the processes of a group, if there are any."""
    if leader is not None:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


@overload
def apart(work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T: ...
@overload
def apart(work: Callable[..., T], *arguments: Any) -> T: ...
def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, which may be asynchronous, in a process of its own; returns its result.

    Raises:
        SystemExit: The process failed, or took longer than `LIMIT_S`.
    """
    name = getattr(work, "__name__", work)
    with beside(_send_result, work, arguments) as channel:
        if not channel.poll(LIMIT_S):
            raise SystemExit(f"{name} took longer than {LIMIT_S:g} s")
        try:
            return channel.recv()
        except EOFError:
            raise SystemExit(f"{name} failed: see the error above") from None


def _send_result(channel: Connection, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    found = work(*arguments)
    channel.send(looped(found) if asyncio.iscoroutine(found) else found)


@contextmanager
def program(*words: str, **more: Any) -> Iterator["subprocess.Popen[str]"]:
    """Run a program in a session of its own, which ends with the block.

    Args:
        words: The command.
        more: Arguments of `subprocess.Popen`; by default the output is read from a pipe.
    """
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, **more}
    with subprocess.Popen(words, text=True, start_new_session=True, **more) as process:
        try:
            yield process
        finally:
            kill_group(process.pid)


@dataclass(frozen=True, slots=True)
class Role:
    """A role of a cluster as a process."""

    address: str
    pid: int


@contextmanager
def role(*words: str) -> Iterator[Role]:
    """Run `adam-async ROLE ...` until the block ends; waits for its address.

    Raises:
        SystemExit: The role ended without an address.
    """
    with program(*ADAM, *words) as process:
        assert process.stdout is not None
        address = next(filter(None, map(address_in, process.stdout)), None)
        if address is None:
            raise SystemExit(f"{' '.join(words)} ended with {process.wait()}")
        yield Role(address, process.pid)


ADAM = (sys.executable, "-m", "adam_async")
"""Command line of this package."""


def trained(*words: str, within_s: float = LIMIT_S) -> dict[str, Any]:
    """Run `adam-async train` to its end; returns its report.

    Raises:
        SystemExit: The training failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [*ADAM, "train", *words, "--report", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        report: dict[str, Any] = json.loads(file.read_text())
        return report


def printed(
    command: str | Sequence[str], *words: str, environment: Mapping[str, str] = os.environ
) -> list[Row]:
    """Run a peer to its end; returns the rows that it prints, one a line.

    Raises:
        SystemExit: The peer printed no row.
    """
    parts = shlex.split(command) if isinstance(command, str) else command
    done = subprocess.run([*parts, *words], capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise SystemExit(f"{shlex.join(parts)} printed no rows: {done.stderr[-500:]}")
    return rows
