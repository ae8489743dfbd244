"""Child processes that run simulations.

    async with ProcessPool(jobs) as pool:
        answers = await pool.do(work)

Each child runs the same command with `--supervised`, and does one piece of work after another. The children
end when this process ends, for any reason (see `parent_pipe`).
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

import msgspec

from adam_async.errors import RoleDied
from adam_async.runtime.child_process import COMMAND, child_environment
from adam_async.runtime.role_handle import how_it_ended
from adam_async.simulation.work import Answer, Work, answers_to, ignore_progress

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
