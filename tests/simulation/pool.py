"""A compute pool without threads: a job takes virtual time and runs in one piece at its end.

So the seed decides the order in which jobs end, and a job reads the memory as the loop leaves it. Races of
two threads on the same memory do not occur here; tests with real threads cover them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from dataflow.errors import PoolClosed
from dataflow.jobs import Job, Mailbox
from dataflow.pool import ComputePool
from tests.simulation.loop import SimulatedLoop
from tests.simulation.random_streams import RandomStream

JOB_S = 0.001
"""Mean duration of a job at full pace, in seconds of the host's clock."""


class SimulatedPool(ComputePool):
    """A compute pool of a simulated host, with the arguments of `ComputePool`; it ignores CPUs.

    Args:
        on_result: Called with the result of each job.
    """

    def __init__(
        self,
        *,
        affinity: Sequence[Sequence[int]] | None = None,
        pace: float = 1.0,
        on_result: Callable[[object], None] = lambda _: None,
        **options: Any,
    ) -> None:
        super().__init__(pace=pace, **options)
        self._on_result = on_result
        self._job_s = JOB_S / pace
        self._idle = deque(self._workers)
        self._jobs: deque[Job] = deque()
        self._dice: RandomStream | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop), "a simulated pool needs a simulated loop"
        if self._dice is not None:
            raise PoolClosed(f"pool {self.name!r} can be entered only once")
        self._dice = loop.dice(f"compute/{self.name}")
        self._mailbox = Mailbox(loop, self._completed)
        if self._make_context is not None:
            for worker in self._workers:
                worker.context = self._make_context()
        self._opened_at = self.clock()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._drain(error)

    def clock(self) -> float:
        """Time of the host's clock, in seconds."""
        return asyncio.get_running_loop().time()

    def submit_jobs(self, jobs: Sequence[Job]) -> int:
        if not self._open:
            raise PoolClosed(f"pool {self.name!r} is not open: submit jobs inside its `async with`")
        taken = jobs[: max(0, self._intake - self.outstanding)]
        for job in taken:
            job.queued = self.clock()
        self._accepted += len(taken)
        self._jobs += taken
        self._begin()
        return len(taken)

    def _begin(self) -> None:
        """Assign jobs to idle threads."""
        assert self._dice is not None
        while self._jobs and self._idle:
            worker, job = self._idle.popleft(), self._jobs.popleft()
            job.thread, job.started, worker.current = worker.name, self.clock(), job.cost
            takes_s = self._dice.around(self._job_s)
            asyncio.get_running_loop().call_later(takes_s, self._end, worker, job)

    def _end(self, worker: Any, job: Job) -> None:
        try:
            job.result = job.execute(worker.context)
            self._on_result(job.result)
        except BaseException as error:  # as on a thread, which has no caller
            job.error = error
        job.finished = self.clock()
        worker.busy_s += job.finished - job.started
        worker.wait_s += job.started - job.queued
        worker.jobs += 1
        worker.current = None
        self._idle.append(worker)
        self._completed([job])
        self._begin()
