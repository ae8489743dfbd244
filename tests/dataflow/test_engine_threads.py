"""The engine over real threads: each context stays with one thread, and every job ends."""

import asyncio
import threading

import pytest

from dataflow import ComputePool, DuplicateToken, Engine, EngineClosed, Firing, Graph, Node, NodeFailed, Tag
from tests.dataflow.testing import FiringRecorder

A, B = Tag(1, 0), Tag(1, 1)


class Context:
    """Notices when firings of different tags hold it at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holder: Tag | None = None
        self.clashes = 0

    def enter(self, tag: Tag) -> None:
        with self.lock:
            self.clashes += self.holder is not None
            self.holder = tag

    def leave(self, tag: Tag) -> None:
        with self.lock:
            self.clashes += self.holder != tag
            self.holder = None


async def test_no_context_is_shared_while_tags_are_abandoned_in_mid_flight() -> None:
    loop = asyncio.get_running_loop()
    abandoned: set[Tag] = set()

    def give_up(tag: Tag, until: threading.Event, turns: int) -> None:
        """Abandon the tag, let the loop go on for some turns, then let the thread go on."""
        if engine.abandon(tag):
            abandoned.add(tag)
        if turns:
            loop.call_soon(give_up, tag, until, turns - 1)
        else:
            until.set()

    def step(firing: Firing, value: int) -> int:
        firing.context.enter(firing.tag)
        if value % 3 == 0:
            until = threading.Event()
            loop.call_soon_threadsafe(give_up, firing.tag, until, 20)
            until.wait(10)
        firing.context.leave(firing.tag)
        return value

    # Two nodes of a tag may run at once; only one of them uses the context.
    nodes = (
        Node("uses", step, inputs=("x",), outputs=("y",), heavy=True),
        Node("beside", lambda firing, x: x, inputs=("x",), outputs=("z",), heavy=True),
        Node("join", lambda firing, y, z: y + z, inputs=("y", "z"), outputs=("sum",), heavy=True),
    )
    graph = Graph(inputs=("x",), nodes=nodes, outputs=("sum",))
    contexts = [Context() for _ in range(5)]
    results: dict[Tag, int] = {}
    recorder = FiringRecorder()

    def keep(port: str, tag: Tag, value: int) -> None:
        results[tag] = value

    async with ComputePool(threads=3) as pool:
        async with Engine(
            graph, pool=pool, in_flight=4, contexts=contexts, on_output=keep, trace=recorder
        ) as engine:
            for number in range(100):
                await engine.admit(Tag(1, number))
                engine.deliver("x", Tag(1, number), number)
            await engine.drain()
            statistics = engine.statistics()

    finished = {Tag(1, number) for number in range(100)} - abandoned
    assert [context.clashes for context in contexts] == [0] * 5
    assert {tag.number for tag in abandoned} == set(range(0, 100, 3))
    assert {tag: results[tag] for tag in finished} == {tag: 2 * tag.number for tag in finished}
    assert (statistics.finished, statistics.abandoned) == (len(finished), len(abandoned))
    recorder.check_exactly_once(graph, finished=finished, abandoned=abandoned)


async def test_tokens_may_come_from_threads() -> None:
    graph = Graph(
        inputs=("local", "remote"),
        nodes=(Node("add", lambda f, a, b: a + b, inputs=("local", "remote"), outputs=("sum",), heavy=True),),
        outputs=("sum",),
    )
    sums: list[int] = []
    async with ComputePool(threads=2) as pool:
        async with Engine(graph, pool=pool, in_flight=4, on_output=lambda p, t, v: sums.append(v)) as engine:

            def send() -> None:
                for number in range(100):
                    engine.deliver_threadsafe("remote", Tag(1, number), 1000)

            async with asyncio.TaskGroup() as tg:
                tg.create_task(pool.run(send), name="send")
                for number in range(100):
                    await engine.admit(Tag(1, number))
                    engine.deliver("local", Tag(1, number), number)
            await engine.drain()

    engine.deliver_threadsafe("remote", A, 0)
    assert sorted(sums) == [1000 + number for number in range(100)]


async def test_a_wrong_token_from_a_thread_stops_the_engine() -> None:
    graph = Graph(inputs=("a", "b"), nodes=(Node("n", lambda f, a, b: None, inputs=("a", "b"), heavy=True),))
    async with ComputePool(threads=1) as pool:
        with pytest.raises(DuplicateToken):
            async with Engine(graph, pool=pool, in_flight=1) as engine:
                await engine.admit(A)
                for _ in range(2):
                    await pool.run(engine.deliver_threadsafe, "a", A, 0)
                with pytest.raises(EngineClosed):
                    await engine.drain()


async def test_two_engines_share_a_pool_and_a_failure_stops_only_one() -> None:
    def fail(firing: Firing, value: int) -> None:
        raise ValueError("broken")

    def work(firing: Firing, value: int) -> int:
        return value + firing.scratch

    good = Graph(
        inputs=("x",), nodes=(Node("n", work, inputs=("x",), outputs=("y",), heavy=True),), outputs=("y",)
    )
    bad = Graph(inputs=("x",), nodes=(Node("n", fail, inputs=("x",), heavy=True),))
    values: list[int] = []
    async with ComputePool(threads=1, contexts=[100], intake=3) as pool:
        async with Engine(good, pool=pool, in_flight=8, on_output=lambda p, t, v: values.append(v)) as engine:

            async def feed() -> None:
                for number in range(50):
                    await engine.admit(Tag(1, number))
                    engine.deliver("x", Tag(1, number), number)
                await engine.drain()

            async with asyncio.TaskGroup() as tg:
                tg.create_task(feed(), name="feed")
                with pytest.raises(NodeFailed, match="broken"):
                    async with Engine(bad, pool=pool, in_flight=1) as other:
                        await other.admit(A)
                        other.deliver("x", A, 0)
                        await other.drain()

    assert sorted(values) == [100 + number for number in range(50)]
