"""The pool runs every accepted job once, reports it to the loop, and leaves no thread behind."""

import asyncio
import os
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow import ComputePool, Job, PoolClosed, WaitTimedOut
from dataflow.pool import CREDIT_S, Pace


def thread_name() -> str:
    return threading.current_thread().name


async def test_run_returns_the_result_from_a_named_thread() -> None:
    async with ComputePool(threads=1, name="worker-0") as pool:
        assert await pool.run(divmod, 7, 3) == (2, 1)
        assert await pool.run(thread_name) == "worker-0/0"


async def test_run_raises_the_error_of_the_function() -> None:
    def fail(error: BaseException) -> None:
        raise error

    async with ComputePool(threads=1) as pool:
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)
        with pytest.raises(RuntimeError, match="fail raised StopIteration"):
            await pool.run(fail, StopIteration())
        with pytest.raises(KeyboardInterrupt):
            await pool.run(fail, KeyboardInterrupt())
        assert await pool.run(abs, -1) == 1


@pytest.mark.parametrize(
    ("contexts", "made", "given"),
    [
        (["first", "second"], 0, ["first", "second"]),
        (lambda: f"made by {thread_name()}", 2, ["made by p/0", "made by p/1"]),
    ],
    ids=["handed over", "made by its thread at its start"],
)
async def test_each_thread_hands_out_its_own_context(contexts: Any, made: int, given: list[str]) -> None:
    barrier = threading.Barrier(2)

    def both(context: str) -> tuple[str, str]:
        barrier.wait(timeout=10)
        return thread_name(), context

    async with ComputePool(threads=2, name="p", contexts=contexts) as pool:
        assert pool.statistics().finished == made
        results = await asyncio.gather(*(pool.run(both, with_context=True) for _ in range(2)))

    assert sorted(results) == list(zip(["p/0", "p/1"], given, strict=True))


async def test_a_context_that_cannot_be_made_ends_the_threads_and_is_raised() -> None:
    def fail() -> None:
        raise MemoryError("no room for it")

    with pytest.raises(MemoryError, match="no room for it"):
        async with ComputePool(threads=2, name="roomless", contexts=fail):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("roomless")]


async def test_callbacks_run_on_the_loop_in_order_and_one_failing_spares_the_others() -> None:
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    seen: list[tuple[Any, str, str]] = []

    def done(job: Job) -> None:
        seen.append((job.result, job.cost, thread_name()))
        if job.result == 1:
            raise ValueError("callback")

    async with ComputePool(threads=1) as pool:
        assert all(pool.submit(abs, -value, on_done=done, cost="segment") for value in range(3))

    assert seen == [(value, "segment", "MainThread") for value in range(3)]
    assert [str(complaint["exception"]) for complaint in complaints] == ["callback"]


async def test_the_cost_label_is_the_name_of_the_function_unless_given() -> None:
    jobs: list[Job] = []
    async with ComputePool(threads=1) as pool:
        pool.submit(abs, 1, on_done=jobs.append)

    assert jobs[0].cost == "abs"


async def test_the_intake_is_bounded_and_run_waits_for_room() -> None:
    gate = threading.Event()
    refused = object()
    async with ComputePool(threads=1, intake=2) as pool:
        assert pool.submit(gate.wait, 10, on_done=lambda job: None)
        async with asyncio.TaskGroup() as tg:
            runs = [tg.create_task(pool.run(abs, -value), name=f"run-{value}") for value in range(5)]
            await asyncio.sleep(0)
            assert pool.outstanding == 2
            assert not pool.submit(abs, refused, on_done=lambda job: None)
            runs[2].cancel()  # waits for room; those behind it must not wait for ever
            gate.set()

    assert [run.result() for run in runs if not run.cancelled()] == [0, 1, 3, 4]
    assert pool.statistics().accepted == 5


async def test_cancelling_a_run_drops_its_result_but_not_its_job() -> None:
    gate, ran = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(10)
        ran.set()

    async with ComputePool(threads=1) as pool:
        async with asyncio.TaskGroup() as tg:
            run = tg.create_task(pool.run(work), name="run")
            await asyncio.sleep(0)
            run.cancel()
        assert pool.outstanding == 1
        gate.set()

    assert ran.is_set()
    assert pool.outstanding == 0


async def test_leaving_runs_accepted_jobs_and_takes_no_more() -> None:
    done: list[Job] = []
    pool = ComputePool(threads=2)
    with pytest.raises(PoolClosed, match="not open"):
        pool.submit(abs, 1, on_done=done.append)
    async with pool:
        for value in range(50):
            pool.submit(abs, value, on_done=done.append)

    assert len(done) == 50
    with pytest.raises(PoolClosed):
        await pool.run(abs, 1)
    with pytest.raises(PoolClosed, match="only once"):
        await pool.__aenter__()


async def test_a_job_that_does_not_end_is_named_when_closing_times_out() -> None:
    gate = threading.Event()
    running = threading.Event()

    def stuck() -> None:
        running.set()
        gate.wait(10)

    pool = ComputePool(threads=1, name="p", close_timeout_s=0.01)
    with pytest.raises(WaitTimedOut, match=r"closing pool 'p' was not done .* p/0 runs 'stuck'"):
        async with pool:
            pool.submit(stuck, on_done=lambda job: None)
            assert running.wait(10)
    gate.set()


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
async def test_an_error_that_would_end_the_caller_arrives_as_one_that_does_not(
    error: type[BaseException],
) -> None:
    def leave() -> None:
        raise error

    async with ComputePool(threads=1) as pool:
        with pytest.raises(RuntimeError, match=f"raised {error.__name__}") as caught:
            await pool.run(leave)
    assert isinstance(caught.value.__cause__, error)


async def test_a_job_that_does_not_end_is_a_note_of_the_error_of_the_block() -> None:
    gate = threading.Event()
    with pytest.raises(ZeroDivisionError) as caught:
        async with ComputePool(threads=1, name="p", close_timeout_s=0.01) as pool:
            pool.submit(gate.wait, 10, on_done=lambda job: None)
            raise ZeroDivisionError
    gate.set()
    (note,) = caught.value.__notes__
    assert "closing pool 'p' was not done" in note


async def test_cancelling_the_leaving_still_ends_the_threads() -> None:
    gate = threading.Event()
    inside = asyncio.Event()

    async def use() -> None:
        async with ComputePool(threads=1) as pool:
            pool.submit(gate.wait, 10, on_done=lambda job: None)
            inside.set()

    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(use(), name="use")
        await inside.wait()
        await asyncio.sleep(0)
        task.cancel()
    gate.set()
    # A fixture checks for every test that no thread is left.


async def test_statistics_have_busy_time_and_wakes() -> None:
    async with ComputePool(threads=1) as pool:
        assert pool.statistics().queue_wait_s == 0
        for value in range(20):
            pool.submit(abs, value, on_done=lambda job: None)
        await pool.run(threading.Event().wait, 0.01)
        statistics = pool.statistics()

    assert (statistics.accepted, statistics.finished, statistics.outstanding) == (21, 21, 0)
    assert statistics.busy_s >= 0.01
    assert 0 < statistics.busy_share <= 1
    assert 0 < statistics.queue_wait_s < statistics.elapsed_s
    assert 1 <= statistics.wakes <= 21
    assert repr(pool) == "<ComputePool 'pool' 1 threads 0 jobs closed>"


async def test_an_idle_thread_keeps_no_result_alive() -> None:
    class Array:
        ended = threading.Event()

        def __del__(self) -> None:
            self.ended.set()

    async with ComputePool(threads=1) as pool:
        await pool.run(id, Array())
        assert Array.ended.wait(10)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
async def test_a_thread_runs_only_on_its_cpus() -> None:
    cpu = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    async with ComputePool(threads=1, affinity=[[cpu]]) as pool:
        assert await pool.run(os.sched_getaffinity, 0) == {cpu}

    assert os.sched_getaffinity(0) == before
    with pytest.raises(ValueError, match=r"CPUs \[123456\] may not be used"):
        ComputePool(threads=1, affinity=[[123456]])


def burn(cpu_s: float) -> float:
    """Compute until the thread has used that much of a core's time; return the time used."""
    begin = time.thread_time()
    while (used := time.thread_time() - begin) < cpu_s:
        pass
    return used


async def test_a_paced_thread_takes_as_long_as_a_slower_core_would() -> None:
    async with ComputePool(threads=1, pace=0.2) as pool:
        begin = pool.clock()
        used = [await pool.run(burn, 0.002) for _ in range(5)]
        took = pool.clock() - begin
        paced_s = pool.statistics().paced_s

    assert took >= sum(used) / 0.2 - CREDIT_S
    assert 0 < paced_s <= took - sum(used)
    assert pool.statistics().busy_s < took


async def test_each_thread_has_a_pace_of_its_own_and_reports_a_job_after_its_rest() -> None:
    async with ComputePool(threads=2, pace=0.1) as pool:
        jobs: list[Job] = []
        begin = pool.clock()
        for _ in range(2):
            pool.submit(burn, 0.002, on_done=jobs.append)
        assert await pool.run(abs, -1) == 1  # for it, too, a thread has to be done with its rest
        assert jobs
        assert pool.clock() - begin >= min(job.result for job in jobs) / 0.1 - CREDIT_S


async def test_preparation_is_not_paced() -> None:
    async with ComputePool(threads=1, pace=1e-6) as pool:
        await pool.run(burn, 0.001, paced=False)
        assert await pool.run(abs, -1, paced=False) == 1
        assert pool.statistics().paced_s == 0.0


async def test_a_thread_without_a_pace_does_not_rest() -> None:
    async with ComputePool(threads=1) as pool:
        await pool.run(burn, 0.001)
        assert pool.statistics().paced_s == 0.0


async def test_leaving_ends_a_rest_at_once_and_no_job_rests_any_more() -> None:
    worked = threading.Event()
    done: list[Job] = []

    def work() -> None:
        burn(0.001)
        worked.set()

    async with ComputePool(threads=1, pace=1e-6) as pool:  # the first job alone would rest for 1000 s
        for _ in range(3):
            pool.submit(work, on_done=done.append)
        assert worked.wait(10)

    assert len(done) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 1, "pace": 0.0}, "pace is a share of a core's time"),
        ({"threads": 0}, "must be at least 1, they are 0"),
        ({"threads": 1, "intake": 0}, "they are 1 and 0"),
        ({"threads": 2, "contexts": [1]}, "contexts has 1 entries for 2 threads"),
        ({"threads": 2, "affinity": [[0]]}, "affinity has 1 entries for 2 threads"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ComputePool(**arguments)


PACED_JOBS = st.lists(
    st.tuples(
        st.floats(0, 1),  # CPU time of a job
        st.floats(0, 1),  # time that it waited
        st.floats(0, 0.1),  # excess of the rest
    ),
    min_size=1,
    max_size=50,
)
SHARES = st.floats(0.01, 1)


@given(SHARES, PACED_JOBS)
def test_a_paced_thread_exceeds_its_share_by_a_bounded_credit_only(share, jobs):
    pace, cpu_s, wall_s = Pace(share), 0.0, 0.0
    for worked_s, waited_s, late_s in jobs:
        rest_s = pace.worked(cpu_s=worked_s, wall_s=worked_s + waited_s)
        if rest_s:
            pace.rested(rest_s + late_s)
            rest_s += late_s
        cpu_s += worked_s
        wall_s += worked_s + waited_s + rest_s
        assert wall_s >= cpu_s / share - CREDIT_S - 1e-9


@given(SHARES, PACED_JOBS)
def test_a_paced_thread_that_computes_all_the_time_has_its_share(share, jobs):
    pace, cpu_s, wall_s = Pace(share), 0.0, 0.0
    for worked_s, _, late_s in jobs:
        rest_s = pace.worked(cpu_s=worked_s, wall_s=worked_s)
        if rest_s:
            late_s = min(late_s, CREDIT_S)
            pace.rested(rest_s + late_s)
            rest_s += late_s
        cpu_s += worked_s
        wall_s += worked_s + rest_s
        assert wall_s <= cpu_s / share + CREDIT_S + 1e-9


def test_a_rest_that_was_cut_short_is_added_to_the_next():
    pace = Pace(0.25)
    assert pace.worked(cpu_s=1.0, wall_s=1.0) == 3.0
    pace.rested(1.0)
    assert pace.worked(cpu_s=1.0, wall_s=1.0) == 5.0


def test_a_job_that_waited_long_enough_needs_no_rest_and_saves_nothing_up():
    pace = Pace(0.5)
    assert pace.worked(cpu_s=1.0, wall_s=100.0) == 0.0
    assert pace.worked(cpu_s=1.0, wall_s=1.0) == 1.0


@pytest.mark.parametrize("share", [0, -1, 1.1, float("nan")])
def test_a_pace_is_a_share(share):
    with pytest.raises(ValueError, match="a share of a core's time, above 0 and up to 1, not"):
        Pace(share)
