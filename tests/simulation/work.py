"""Work of the child processes of `simulate`: run seeds, repeat one run, or shrink one.

A simulated run needs an event loop of its own, outside of any other, and the command has a loop already. The
command therefore sends `Work` to children, one JSON line each. The children send an `Answer`, one line, for
each run.

The child processes:

    async with ProcessPool(jobs) as pool:
        answers = await pool.do(work)

Each child runs the same command with `--supervised`, and does one piece of work after another. The children
end when this process ends, for any reason (see `parent_pipe`).

The trace of a run is Trace Event JSON, which Perfetto and chrome://tracing open. Each machine is a process.
One lane shows its incarnations; each kind of event, such as faults, cuts and notes of the scenario, has a
lane of its own. Overlapping events of a kind get further lanes. Times are in microseconds of the simulation.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec

from adam_async.errors import RoleDied
from adam_async.runtime.child_process import COMMAND, child_environment
from adam_async.runtime.role_handle import how_it_ended
from tests.simulation.plan import MOST_TRIES, Case, Plan, shrink
from tests.simulation.runner import Played, SeedResult, draw_case, play, run_case
from tests.simulation.scenario import Scenario, Span

PROCESS = "life"
"""Name of the lane of incarnations."""


def trace_file(played: Played) -> dict[str, Any]:
    """Return the whole file, as builtins."""
    result = played.result
    nodes = list(dict.fromkeys([*played.nodes, *(span.node for span in played.spans)]))
    events: list[dict[str, Any]] = []
    for pid, node in enumerate(nodes, 1):
        spans = [span for span in played.spans if span.node == node]
        spans = [*uptime_spans(node, played.nodes.get(node, ()), result.ended_s), *spans]
        events += _rows(pid, node, spans)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": "adam-async simulation 1",
            "scenario": result.case.scenario,
            "seed": result.case.seed,
            "options": str(result.case.plan.options),
            "outcome": f"{result.invariant}: {result.text}" if result.invariant else "all held",
            "replay_hash": result.replay_hash,
        },
        "traceEvents": events,
    }


def uptime_spans(node: str, times: Sequence[tuple[float, float | None]], ended_s: float) -> Iterator[Span]:
    """Yield a span for each incarnation of a machine."""
    for incarnation, (begun, ended) in enumerate(times, 1):
        yield Span(node, PROCESS, f"life {incarnation}", begun, ended_s if ended is None else ended)


def _rows(pid: int, node: str, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node}}
    lanes: dict[tuple[str, int], float] = {}
    tids: dict[tuple[str, int], int] = {}
    for span in sorted(spans, key=lambda span: (span.kind != PROCESS, span.begun)):
        number = 0
        while lanes.get((span.kind, number), 0.0) > span.begun:
            number += 1
        lane = (span.kind, number)
        lanes[lane] = span.begun if span.ended is None else span.ended
        if lane not in tids:
            # Unique across all machines: some readers require that of thread numbers.
            tids[lane] = 1000 * pid + len(tids)
            name = span.kind if not number else f"{span.kind} {number + 1}"
            row = {"ph": "M", "pid": pid, "tid": tids[lane]}
            yield {**row, "name": "thread_name", "args": {"name": name}}
            yield {**row, "name": "thread_sort_index", "args": {"sort_index": len(tids)}}
        event = {"name": span.text, "cat": span.kind, "pid": pid, "tid": tids[lane], "ts": _us(span.begun)}
        if span.ended is None:
            yield {**event, "ph": "i", "s": "t"}
        else:
            yield {**event, "ph": "X", "dur": _us(span.ended - span.begun)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class Seeds(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run seeds; each has an answer."""

    scenario: str
    seeds: tuple[int, ...]


class Repeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a case; the answer contains its trace."""

    case: Case


class Shrink(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Shrink a failing case."""

    case: Case
    most_tries: int = MOST_TRIES


Work = Seeds | Repeat | Shrink


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run."""

    result: SeedResult
    under_way: bool = False
    """Whether the answer is a progress report of a shrink, with the smallest failing run so far."""
    tries: int = 0
    """Number of runs that the shrink took."""
    trace: dict[str, Any] | None = None


def answers_to(work: Work) -> int:
    """Return the number of answers to work."""
    return len(work.seeds) if isinstance(work, Seeds) else 1


def ignore_progress(answer: Answer) -> None:
    """Ignore a progress report."""


def do(
    work: Work, scenarios: Mapping[str, Scenario], report: Callable[[Answer], None] = ignore_progress
) -> Iterator[Answer]:
    """Do work outside of any event loop; `report` is called after each run of a shrink."""
    match work:
        case Seeds():
            scenario = scenarios[work.scenario]
            for seed in work.seeds:
                yield Answer(result=run_case(scenario, draw_case(scenario, seed)))
        case Repeat():
            played = play(scenarios[work.case.scenario], work.case)
            yield Answer(result=played.result, trace=trace_file(played))
        case Shrink():
            yield shrink_case(scenarios[work.case.scenario], work.case, work.most_tries, report)


def shrink_case(
    scenario: Scenario,
    case: Case,
    most_tries: int = MOST_TRIES,
    report: Callable[[Answer], None] = ignore_progress,
) -> Answer:
    """Shrink a case while it violates the same invariant; return the result of the smallest case."""
    smallest = run_case(scenario, case)
    invariant, tries = smallest.invariant, 0

    def with_plan(plan: Plan) -> Case:
        return msgspec.structs.replace(case, plan=plan)

    def fails(plan: Plan) -> bool:
        """Run a smaller plan; return whether it violates the same invariant."""
        nonlocal smallest, tries
        result = run_case(scenario, with_plan(plan))
        still = result.invariant == invariant != ""
        smallest, tries = result if still else smallest, tries + 1
        report(Answer(result=smallest, tries=tries, under_way=True))
        return still

    shrunk = shrink(case.plan, fails, most_tries=most_tries)
    return Answer(result=run_case(scenario, with_plan(shrunk.plan)), tries=shrunk.tries)


LINE_BYTES = 256 << 20
"""Largest size of an answer in bytes: a trace is one line."""


class ProcessPool:
    """Child processes."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._idle: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "ProcessPool":
        async with AsyncExitStack() as stack:
            for _ in range(self.jobs):
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    "simulate",
                    "--supervised",
                    env=child_environment(os.environ),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=LINE_BYTES,
                    start_new_session=True,
                )
                stack.push_async_callback(_end, process)
                self._idle.put_nowait(process)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def do(self, work: Work, report: Callable[[Answer], None] = ignore_progress) -> list[Answer]:
        """Let the next idle child do the work. After the death of a child, close the pool.

        Raises:
            RoleDied: The child ended before its answer.
        """
        process = await self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        answers: list[Answer] = []
        with suppress(OSError, RuntimeError):  # the child is dead, and its output ends
            process.stdin.write(msgspec.json.encode(work) + b"\n")
        while len(answers) < answers_to(work):
            line = await process.stdout.readline()
            if not line.endswith(b"\n"):
                raise RoleDied("a child process of simulate", how_it_ended(await process.wait()))
            answer = msgspec.json.decode(line, type=Answer)
            if answer.under_way:
                report(answer)
            else:
                answers.append(answer)
        self._idle.put_nowait(process)
        return answers


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a child; its answers have no reader any more."""
    if process.returncode is None:
        with suppress(ProcessLookupError):  # the child ended by itself, before asyncio noticed
            process.kill()
    await process.wait()
    assert process.stdin is not None
    process.stdin.close()
