"""The fakes behave like the scheduler and the pool that they replace."""

import asyncio

import pytest

from dataflow import Engine, Finished, Firing, Graph, Job, Node, Output, Scheduler, Tag, TraceRecord
from tests.dataflow.testing import FiringRecorder, ManualPool, run_calls

A, B = Tag(1, 0), Tag(1, 1)

GRAPH = Graph(
    inputs=("x",),
    nodes=(Node("double", lambda firing, x: 2 * x, inputs=("x",), outputs=("y",), heavy=True),),
    outputs=("y",),
)


class Work(Job):
    """Returns the context of its thread, or fails."""

    __slots__ = ("came_back", "fails")

    def __init__(self, *, fails: bool = False) -> None:
        self.cost = "work"
        self.error = None
        self.fails = fails
        self.came_back = False
        self.sink = self.back

    def execute(self, context: object) -> object:
        if self.fails:
            raise ValueError("work failed")
        return context

    def back(self, jobs: list[Job]) -> None:
        assert jobs == [self]
        self.came_back = True


def record(node: str, tag: Tag) -> TraceRecord:
    return TraceRecord(node=node, tag=tag, queued=0.0, started=0.0, finished=0.0, thread="t")


def test_run_calls_makes_one_step_at_a_time() -> None:
    scheduler = Scheduler(GRAPH, in_flight=2)
    scheduler.admit(A)
    scheduler.deliver("x", A, 1)
    steps = run_calls(scheduler)

    assert isinstance(next(steps), Firing)
    scheduler.admit(B)
    scheduler.deliver("x", B, 2)
    assert next(steps) == Output("y", A, 2)
    assert next(steps) == Finished(A)
    assert isinstance(next(steps), Firing)
    assert list(steps) == [Output("y", B, 4), Finished(B)]


def test_the_order_of_calls_can_be_chosen() -> None:
    scheduler = Scheduler(GRAPH, in_flight=2)
    for tag in (A, B):
        scheduler.admit(tag)
        scheduler.deliver("x", tag, 1)

    steps = run_calls(scheduler, choose=lambda calls: len(calls) - 1)
    assert [effect.tag for effect in steps if isinstance(effect, Finished)] == [B, A]


def test_run_calls_raises_the_error_of_a_node_and_fails_its_tag() -> None:
    node = Node("n", lambda firing: 1 / 0)
    scheduler = Scheduler(Graph(nodes=(node,)), in_flight=1)
    scheduler.admit(A)

    with pytest.raises(ZeroDivisionError):
        list(run_calls(scheduler))
    assert scheduler.is_settled(A)


def test_a_job_of_a_manual_pool_is_queued_then_executed_then_delivered() -> None:
    pool = ManualPool(context="scratch")
    work, failing = Work(), Work(fails=True)
    pool.now = 1.0
    assert pool.submit_jobs([work, failing]) == 2
    pool.now = 2.0

    assert pool.execute(1) is failing
    assert isinstance(failing.error, ValueError)
    assert not failing.came_back
    assert repr(pool) == "<ManualPool 1 queued 1 executed>"
    pool.deliver()
    assert failing.came_back
    pool.step()
    assert (work.result, work.came_back) == ("scratch", True)
    assert (work.queued, work.started, work.finished, work.thread) == (1.0, 2.0, 2.0, "manual")


def test_a_manual_pool_is_full_until_a_job_is_delivered() -> None:
    pool = ManualPool(intake=1)
    calls: list[str] = []
    assert pool.submit_jobs([Work(), Work()]) == 1
    pool.call_when_room(lambda: calls.append("room"))
    pool.execute()
    assert pool.submit_jobs([Work()]) == 0
    assert calls == []
    pool.deliver()

    assert calls == ["room"]
    assert pool.submit_jobs([Work()]) == 1


async def test_run_all_also_runs_the_jobs_that_it_causes() -> None:
    chain = Graph(
        inputs=("x",),
        nodes=(
            Node("one", lambda firing, x: x, inputs=("x",), outputs=("y",), heavy=True),
            Node("two", lambda firing, y: None, inputs=("y",), heavy=True),
        ),
    )
    pool, recorder = ManualPool(), FiringRecorder()
    async with asyncio.timeout(10), Engine(chain, pool=pool, in_flight=1, trace=recorder) as engine:
        await engine.admit(A)
        engine.deliver("x", A, 0)
        pool.run_all()

    assert recorder.nodes(A) == ["one", "two"]
    assert recorder.nodes(B) == []


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "'double' fired 0 times"),
        ([record("double", A)] * 2, "'double' fired 2 times"),
        ([record("double", A), record("double", B), record("double", B)], "'double' fired 2 times"),
        ([record("double", A), record("double", Tag(9, 9))], "fired for the unexpected"),
    ],
)
def test_the_recorder_finds_wrong_counts(records: list[TraceRecord], message: str) -> None:
    recorder = FiringRecorder()
    for one in records:
        recorder(one)

    with pytest.raises(AssertionError, match=message):
        recorder.check_exactly_once(GRAPH, finished=[A], abandoned=[B])


def test_an_abandoned_tag_may_have_fired_or_not() -> None:
    recorder = FiringRecorder()
    recorder(record("double", A))
    recorder.check_exactly_once(GRAPH, finished=[A], abandoned=[B])
    recorder(record("double", B))
    recorder.check_exactly_once(GRAPH, finished=[A], abandoned=[B])
