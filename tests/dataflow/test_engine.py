"""The engine under a manual pool: order, back-pressure, abandonment, failures, leaving; step by step."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow import (
    ComputePool,
    DuplicateToken,
    Engine,
    EngineClosed,
    EngineSettings,
    Firing,
    Graph,
    GraphError,
    Node,
    NodeFailed,
    NoRoom,
    PoolClosed,
    Tag,
    TagInFlight,
    TagSettled,
    UnknownPort,
    WaitTimedOut,
    WrongOutputs,
)
from tests.dataflow.testing import FiringRecorder, ManualPool

A, B, C = Tag(1, 0), Tag(1, 1), Tag(1, 2)


def double(firing: Firing, value: int) -> int:
    return 2 * value


def increment(firing: Firing, value: int) -> int:
    return value + 1


def fail(firing: Firing, value: object) -> object:
    raise ZeroDivisionError(f"no {value}")


HEAVY = Graph(
    inputs=("x",), nodes=(Node("double", double, inputs=("x",), outputs=("y",), heavy=True),), outputs=("y",)
)
MIXED = Graph(
    inputs=("x",),
    nodes=(
        Node("double", double, inputs=("x",), outputs=("y",), heavy=True, cost="segment"),
        Node("increment", increment, inputs=("y",), outputs=("z",)),
    ),
    outputs=("z",),
)
FAILING = Graph(inputs=("x",), nodes=(Node("fails", fail, inputs=("x",), heavy=True),))


class Outputs(list[tuple[str, Tag, Any]]):
    def __call__(self, port: str, tag: Tag, value: Any) -> None:
        self.append((port, tag, value))


async def test_light_nodes_fire_in_the_turn_in_which_the_heavy_one_completes() -> None:
    pool, outputs = ManualPool(), Outputs()
    async with Engine(MIXED, pool=pool, in_flight=1, on_output=outputs) as engine:
        await engine.admit(A)
        engine.deliver("x", A, 20)
        assert [job.cost for job in pool.queued] == ["segment"]
        pool.step()
        assert outputs == [("z", A, 41)]
        await engine.drain()


async def test_a_firing_knows_its_tag_its_contexts_and_its_scratch() -> None:
    seen = []

    def look(firing: Firing, value: int) -> None:
        seen.append((firing.tag, firing.context, firing.scratch, value, repr(firing)))

    graph = Graph(
        inputs=("x",),
        nodes=(Node("heavy", look, inputs=("x",), heavy=True), Node("light", look, inputs=("x",))),
    )
    pool = ManualPool(context="thread's")
    async with Engine(graph, pool=pool, in_flight=1, contexts=["tag's"]) as engine:
        assert await engine.admit(A) == "tag's"
        engine.deliver("x", A, 5)
        pool.run_all()

    light, heavy = seen
    assert light[:4] == (A, "tag's", None, 5)
    assert heavy == (A, "tag's", "thread's", 5, f"<firing of 'heavy' for {A}>")


async def test_tokens_before_admission_start_work_at_admission() -> None:
    pool, outputs = ManualPool(), Outputs()
    async with Engine(HEAVY, pool=pool, in_flight=1, on_output=outputs) as engine:
        engine.deliver("x", A, 1)
        engine.deliver("x", B, 2)
        assert pool.queued == []
        await engine.admit(A)
        async with asyncio.TaskGroup() as tg:
            tg.create_task(engine.admit(B), name="admit-b")
            await asyncio.sleep(0)
            pool.step()
        pool.step()
        assert outputs == [("y", A, 2), ("y", B, 4)]


async def test_admissions_wait_in_line() -> None:
    pool, order = ManualPool(), []
    async with Engine(HEAVY, pool=pool, in_flight=1) as engine, asyncio.TaskGroup() as tg:

        async def enter(tag: Tag) -> None:
            await engine.admit(tag)
            order.append(tag)
            engine.deliver("x", tag, 0)

        for number in range(5):
            tg.create_task(enter(Tag(1, number)), name=f"enter-{number}")
        await asyncio.sleep(0)
        assert engine.statistics().waiting == 4
        with pytest.raises(NoRoom):
            engine.admit_nowait(Tag(1, 9))
        for _ in range(5):
            pool.step()
            # The slot is reserved for the first waiter: no other caller takes it.
            with pytest.raises((NoRoom, TagSettled)):
                engine.admit_nowait(Tag(1, len(order) - 1 if len(order) == 5 else 9))
            await asyncio.sleep(0)

    assert order == [Tag(1, number) for number in range(5)]


async def test_a_cancelled_admission_admits_nothing_and_passes_its_place_on() -> None:
    pool = ManualPool()
    async with Engine(HEAVY, pool=pool, in_flight=1) as engine, asyncio.TaskGroup() as tg:
        await engine.admit(A)
        engine.deliver("x", A, 0)
        second = tg.create_task(engine.admit(B), name="second")
        third = tg.create_task(engine.admit(C), name="third")
        await asyncio.sleep(0)
        pool.step()  # the slot now belongs to the second, which is cancelled before it runs
        second.cancel()
        await third
        assert second.cancelled()
        assert engine.statistics().admitted == 2
        engine.abandon(C)
        await engine.admit(B)


async def test_a_tag_abandoned_in_line_is_not_admitted() -> None:
    async with Engine(HEAVY, pool=ManualPool(), in_flight=1) as engine:
        await engine.admit(A)
        async with asyncio.TaskGroup() as tg:

            async def enter() -> None:
                with pytest.raises(TagSettled):
                    await engine.admit(B)

            tg.create_task(enter(), name="enter-b")
            third = tg.create_task(engine.admit(C), name="enter-c")
            await asyncio.sleep(0)
            engine.abandon(B)
            engine.abandon(A)
            await third


async def test_room_is_filled_within_the_turn_that_makes_it() -> None:
    pool, rest = ManualPool(), [Tag(1, number) for number in range(5)]

    def fill() -> None:
        while rest and engine.has_room:
            tag = rest.pop(0)
            engine.admit_nowait(tag)
            engine.deliver("x", tag, tag.number)

    async with Engine(HEAVY, pool=pool, in_flight=2, on_room=fill) as engine:
        fill()
        outstanding = []
        for _ in range(5):
            outstanding.append(len(pool.queued))
            pool.step()
        assert outstanding == [2, 2, 2, 2, 1]
        assert engine.statistics().finished == 5


async def test_a_waiter_for_room_wakes_only_if_the_filling_leaves_some() -> None:
    pool, rest = ManualPool(), [B]

    def fill() -> None:
        if rest:
            tag = rest.pop()
            engine.admit_nowait(tag)
            engine.deliver("x", tag, 1)

    engine = Engine(HEAVY, pool=pool, in_flight=1, on_room=fill)
    async with engine, asyncio.TaskGroup() as tg:
        tg.create_task(engine.wait_room(), name="no wait")  # there is room
        await asyncio.sleep(0)
        engine.admit_nowait(A)
        engine.deliver("x", A, 1)
        wait = tg.create_task(engine.wait_room(), name="wait")
        await asyncio.sleep(0)
        pool.step()
        await asyncio.sleep(0)
        assert not wait.done()
        pool.step()
        await wait
        assert engine.has_room


async def test_a_filling_that_fails_stops_the_engine_with_its_own_error() -> None:
    def fill() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with Engine(HEAVY, pool=ManualPool(), in_flight=2, on_room=fill) as engine:
            await engine.admit(A)
            await engine.drain()


async def test_a_tag_cannot_be_admitted_twice() -> None:
    async with Engine(HEAVY, pool=ManualPool(), in_flight=1) as engine, asyncio.TaskGroup() as tg:
        await engine.admit(A)
        with pytest.raises(TagInFlight):
            await engine.admit(A)
        waiting = tg.create_task(engine.admit(B), name="enter-b")
        await asyncio.sleep(0)
        with pytest.raises(TagInFlight):
            await engine.admit(B)
        engine.abandon(A)
        await waiting


async def test_waits_have_names_and_deadlines() -> None:
    async with Engine(
        HEAVY, pool=ManualPool(), in_flight=1, settings=EngineSettings(wait_timeout_s=0.0)
    ) as engine:
        await engine.admit(A)
        with pytest.raises(WaitTimedOut, match=r"admission of .*number=1.* 1 of 1 slots taken.* lacks 'x'"):
            await engine.admit(B)
        with pytest.raises(WaitTimedOut, match=r"draining the engine was not done after 0\.001 s"):
            await engine.drain(timeout_s=0.001)
        engine.abandon(A)
        await engine.drain()
        await engine.admit(B)


async def test_an_abandoned_context_is_not_given_out_until_its_job_has_come_back() -> None:
    pool, outputs = ManualPool(), Outputs()
    contexts = ["first", "second"]
    async with Engine(HEAVY, pool=pool, in_flight=2, contexts=contexts, on_output=outputs) as engine:
        assert await engine.admit(A) == "first"
        engine.deliver("x", A, 1)
        pool.execute()  # in a thread: done or not, the loop does not know
        engine.abandon(A)
        assert engine.statistics().live == 0
        assert engine.statistics().still_running == 1
        assert await engine.admit(B) == "second"
        async with asyncio.TaskGroup() as tg:
            third = tg.create_task(engine.admit(C), name="third")
            await asyncio.sleep(0)
            assert not third.done()
            pool.deliver()
        assert third.result() == "first"
        assert outputs == []


async def test_deliveries_are_checked() -> None:
    pool = ManualPool()
    async with Engine(HEAVY, pool=pool, in_flight=1) as engine:
        await engine.admit(A)
        engine.deliver("x", A, 1)
        with pytest.raises(DuplicateToken):
            engine.deliver("x", A, 1)
        with pytest.raises(UnknownPort):
            engine.deliver("y", A, 1)
        engine.abandon(A)
        engine.deliver("x", A, 1)
        assert engine.statistics().dropped_tokens == 1
        pool.run_all()


async def test_a_failing_node_stops_the_engine() -> None:
    pool = ManualPool()
    with pytest.raises(NodeFailed, match=r"node 'fails' failed for .*: ZeroDivisionError: no 7") as caught:
        async with Engine(FAILING, pool=pool, in_flight=1) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 7)
            asyncio.get_running_loop().call_soon(pool.step)
            await asyncio.Event().wait()

    assert (caught.value.node, caught.value.tag) == ("fails", A)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineClosed, match="the engine is stopped"):
        engine.deliver("x", B, 1)


@pytest.mark.parametrize("name", ["on_output", "on_room", "trace"])
def test_a_coroutine_function_is_no_callback(name: str) -> None:
    async def callback(*arguments: object) -> None:
        raise AssertionError("no engine calls this")

    with pytest.raises(GraphError, match=f"{name} is a coroutine function"):
        Engine(FAILING, pool=ManualPool(), in_flight=1, **{name: callback})


async def test_an_engine_passes_the_cancellation_of_its_block_on_without_a_raise() -> None:
    engine = Engine(FAILING, pool=ManualPool(), in_flight=1)
    await engine.__aenter__()
    cancelled = asyncio.CancelledError()
    try:
        raise cancelled
    except asyncio.CancelledError:
        await engine.__aexit__(asyncio.CancelledError, cancelled, None)
    assert cancelled.__context__ is None


@pytest.mark.parametrize("wait", ["admit", "drain", "wait_room"])
async def test_a_body_that_waits_when_the_engine_stops_raises_the_failure(wait: str) -> None:
    pool = ManualPool()
    with pytest.raises(NodeFailed):
        async with Engine(FAILING, pool=pool, in_flight=1) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 7)
            asyncio.get_running_loop().call_soon(pool.step)
            await {"admit": lambda: engine.admit(B), "drain": engine.drain, "wait_room": engine.wait_room}[
                wait
            ]()


async def test_other_waits_are_refused_when_the_engine_stops() -> None:
    pool = ManualPool()
    async with asyncio.TaskGroup() as tg:
        with pytest.raises(NodeFailed):
            async with Engine(FAILING, pool=pool, in_flight=1) as engine:
                await engine.admit(A)

                async def enter() -> None:
                    with pytest.raises(EngineClosed, match="stopped during the wait"):
                        await engine.admit(B)

                tg.create_task(enter(), name="enter")
                await asyncio.sleep(0)
                engine.deliver("x", A, 7)
                pool.step()


@pytest.mark.parametrize("uses_the_engine", [False, True])
async def test_a_failure_is_raised_alone_even_if_the_body_never_waits_again(uses_the_engine: bool) -> None:
    pool = ManualPool()
    with pytest.raises(NodeFailed):
        async with Engine(FAILING, pool=pool, in_flight=1) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 7)
            pool.step()
            if uses_the_engine:
                engine.deliver("x", B, 7)


@pytest.mark.parametrize("has_waited", [False, True])
async def test_an_error_of_the_body_passes_as_it_is(has_waited: bool) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with Engine(HEAVY, pool=ManualPool(), in_flight=1):
            if has_waited:
                await asyncio.sleep(0)  # the task that watches for failures has run
            raise LookupError("mine")


async def test_two_errors_are_raised_together() -> None:
    pool = ManualPool()
    with pytest.raises(ExceptionGroup) as caught:
        async with Engine(FAILING, pool=pool, in_flight=1) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 7)
            pool.step()
            raise LookupError("mine")

    assert {type(error) for error in caught.value.exceptions} == {LookupError, NodeFailed}


async def test_a_failure_of_an_abandoned_tag_stops_nothing() -> None:
    pool = ManualPool()
    async with Engine(FAILING, pool=pool, in_flight=1) as engine:
        await engine.admit(A)
        engine.deliver("x", A, 7)
        pool.execute()
        engine.abandon(A)
        pool.deliver()
        assert engine.statistics().failed == 0


@pytest.mark.parametrize("heavy", [True, False])
async def test_wrong_outputs_fail_the_node(heavy: bool) -> None:
    node = Node("double", double, inputs=("x",), outputs=("y", "z"), heavy=heavy)
    pool = ManualPool()
    with pytest.raises(NodeFailed, match="returned a int, expected a tuple of 2") as caught:
        async with Engine(Graph(inputs=("x",), nodes=(node,)), pool=pool, in_flight=1) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 7)
            pool.run_all()

    assert isinstance(caught.value.__cause__, WrongOutputs)


async def test_a_failing_callback_stops_the_engine_with_its_own_error() -> None:
    def refuse(*arguments: object) -> None:
        raise LookupError("mine")

    for hooks in ({"on_output": refuse}, {"trace": refuse}):
        with pytest.raises(LookupError, match="mine"):
            async with Engine(MIXED, pool=ManualPool(), in_flight=1, **hooks) as engine:  # type: ignore[arg-type]
                await engine.admit(A)
                engine.deliver("x", A, 7)
                engine._pool.run_all()  # type: ignore[attr-defined]


async def test_callbacks_may_use_the_engine() -> None:
    pool, outputs = ManualPool(), Outputs()

    def feed_next(port: str, tag: Tag, value: int) -> None:
        outputs(port, tag, value)
        if tag.number < 3:
            following = Tag(1, tag.number + 1)
            engine.admit_nowait(following)
            engine.deliver("x", following, value)
        else:
            engine.abandon(tag)

    async with Engine(MIXED, pool=pool, in_flight=2, on_output=feed_next) as engine:
        await engine.admit(A)
        engine.deliver("x", A, 0)
        pool.run_all()
        await engine.drain()

    assert [value for _, _, value in outputs] == [1, 3, 7, 15]


async def test_a_full_pool_holds_calls_back_and_loses_none() -> None:
    pool, outputs = ManualPool(intake=1), Outputs()
    async with Engine(HEAVY, pool=pool, in_flight=4, on_output=outputs) as engine:
        for number in range(4):
            await engine.admit(Tag(1, number))
            engine.deliver("x", Tag(1, number), number)
        assert (len(pool.queued), engine.statistics().backlog) == (1, 3)
        pool.run_all()
        await engine.drain()

    assert sorted(value for _, _, value in outputs) == [0, 2, 4, 6]


async def test_a_closed_pool_stops_the_engine() -> None:
    pool = ComputePool(threads=1)
    with pytest.raises(PoolClosed):
        async with Engine(HEAVY, pool=pool, in_flight=1) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 1)


async def test_leaving_abandons_live_tags_and_skips_calls_that_have_not_started() -> None:
    ran = []
    node = Node("n", lambda firing, x: ran.append(x), inputs=("x",), heavy=True)
    pool = ManualPool()
    async with Engine(Graph(inputs=("x",), nodes=(node,)), pool=pool, in_flight=1) as engine:
        await engine.admit(A)
        engine.deliver("x", A, 1)
        asyncio.get_running_loop().call_soon(pool.step)

    assert ran == []
    assert engine.statistics().abandoned == 1
    with pytest.raises(EngineClosed, match="only once"):
        await engine.__aenter__()


async def test_leaving_reports_a_job_that_does_not_end() -> None:
    pool = ManualPool()
    with pytest.raises(WaitTimedOut, match=r"closing the engine was not done after .*1 abandoned and still"):
        async with Engine(
            HEAVY, pool=pool, in_flight=1, settings=EngineSettings(close_timeout_s=0.0)
        ) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 1)


async def test_a_job_that_does_not_end_is_a_note_of_the_error_that_ends_the_block() -> None:
    pool = ManualPool()
    with pytest.raises(ZeroDivisionError) as caught:
        async with Engine(
            HEAVY, pool=pool, in_flight=1, settings=EngineSettings(close_timeout_s=0.0)
        ) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 1)
            raise ZeroDivisionError
    (note,) = caught.value.__notes__
    assert "closing the engine was not done" in note


async def test_cancelling_the_leaving_waits_for_the_job_all_the_same() -> None:
    pool, left = ManualPool(), False

    async def use() -> None:
        nonlocal left
        try:
            async with Engine(HEAVY, pool=pool, in_flight=1) as engine:
                await engine.admit(A)
                engine.deliver("x", A, 1)
        finally:
            left = True

    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(use(), name="use")
        for _ in range(5):
            await asyncio.sleep(0)
            task.cancel()
        assert not left
        pool.step()
        await asyncio.wait([task])
    assert left
    assert task.cancelled()


async def test_batches_form_while_a_call_is_out() -> None:
    sizes = []

    def double_all(firings: Sequence[Firing], values: Sequence[int]) -> list[int]:
        assert [firing.scratch for firing in firings] == ["thread's"] * len(values)
        sizes.append(len(values))
        return [2 * value for value in values]

    node = Node("double", double_all, inputs=("x",), outputs=("y",), heavy=True, batch=4)
    pool, outputs, recorder = ManualPool(context="thread's"), Outputs(), FiringRecorder()
    graph = Graph(inputs=("x",), nodes=(node,), outputs=("y",))
    async with Engine(graph, pool=pool, in_flight=8, on_output=outputs, trace=recorder) as engine:
        for number in range(8):
            await engine.admit(Tag(1, number))
            engine.deliver("x", Tag(1, number), number)
        engine.abandon(Tag(1, 7))
        pool.run_all()

    assert sizes == [1, 4, 2]
    assert outputs == [("y", Tag(1, number), 2 * number) for number in range(7)]
    recorder.check_exactly_once(graph, finished=[Tag(1, n) for n in range(7)], abandoned=[Tag(1, 7)])


async def test_a_failed_batch_names_all_its_tags() -> None:
    def refuse(firings: Sequence[Firing], values: Sequence[int]) -> None:
        if len(values) > 1:
            raise ValueError("too many")

    node = Node("n", refuse, inputs=("x",), heavy=True, batch=4)
    pool = ManualPool()
    with pytest.raises(NodeFailed) as caught:
        async with Engine(Graph(inputs=("x",), nodes=(node,)), pool=pool, in_flight=3) as engine:
            for tag in (A, B, C):
                await engine.admit(tag)
                engine.deliver("x", tag, 0)
            pool.run_all()

    assert caught.value.tags == (B, C)


async def test_every_firing_that_ran_is_traced() -> None:
    pool, recorder = ManualPool(), FiringRecorder()
    async with Engine(MIXED, pool=pool, in_flight=2, trace=recorder) as engine:
        pool.now = 1.0
        for tag in (A, B):
            await engine.admit(tag)
            engine.deliver("x", tag, 1)
        pool.now = 2.0
        engine.abandon(B)
        pool.run_all()

    heavy, light = recorder.records
    assert heavy == ("double", A, 1.0, 2.0, 2.0, "manual")
    assert light == ("increment", A, 2.0, 2.0, 2.0, "loop")


async def test_a_batch_may_set_the_times_of_each_of_its_firings() -> None:
    def both(firings: list[Firing], values: list[int]) -> list[int]:
        for place, firing in enumerate(firings):
            firing.started, firing.finished = 2.0 + place, 2.5 + place
        return values

    node = Node("both", both, inputs=("x",), outputs=("y",), heavy=True, batch=2)
    pool, recorder = ManualPool(), FiringRecorder()
    async with Engine(Graph(inputs=("x",), nodes=(node,)), pool=pool, in_flight=3, trace=recorder) as engine:
        for tag in (A, B, C):
            await engine.admit(tag)
            engine.deliver("x", tag, 1)
        pool.run_all()

    times = {record.tag: (record.started, record.finished) for record in recorder.records}
    assert times == {A: (2.0, 2.5), B: (2.0, 2.5), C: (3.0, 3.5)}


async def test_an_engine_describes_its_state() -> None:
    engine = Engine(HEAVY, pool=ManualPool(), in_flight=2)
    assert repr(engine) == "<Engine new 0/2 tags in flight 0 finished>"
    with pytest.raises(EngineClosed, match="the engine is new"):
        await engine.admit(A)
    with pytest.raises(EngineClosed):
        engine.deliver_threadsafe("x", A, 1)
    async with engine:
        await engine.admit(A)
        assert repr(engine) == "<Engine running 1/2 tags in flight 0 finished>"


DIAMOND = Graph(
    inputs=("x", "remote"),
    nodes=(
        Node("first", lambda f, x: (x + 1, x + 2), inputs=("x",), outputs=("a", "b"), heavy=True),
        Node("light", increment, inputs=("a",), outputs=("c",)),
        Node("heavy", lambda f, b, remote: b * remote, inputs=("b", "remote"), outputs=("d",), heavy=True),
        Node("join", lambda f, c, d: (f.tag, c, d), inputs=("c", "d"), outputs=("e",), jobs=1),
    ),
    outputs=("e",),
)


@settings(max_examples=50)
@given(st.data())
async def test_in_any_order_every_tag_finishes_once_or_is_abandoned(data: st.DataObject) -> None:
    tags = [Tag(1, number) for number in range(5)]
    pool, outputs, recorder = ManualPool(), Outputs(), FiringRecorder()
    tokens = [(port, tag) for tag in tags for port in DIAMOND.inputs]
    to_admit, abandoned = list(tags), set[Tag]()
    async with Engine(
        DIAMOND, pool=pool, in_flight=2, contexts=range(3), on_output=outputs, trace=recorder
    ) as engine:
        try:
            while tokens or to_admit or pool.queued or pool.executed:
                moves = [("token", tokens), ("execute", pool.queued), ("deliver", pool.executed)]
                moves += [("admit", to_admit)] * (engine._scheduler.room > 0)
                moves = [move for move in moves if move[1]] + [("abandon", tags)] * (len(abandoned) < 2)
                name, items = data.draw(st.sampled_from(moves))
                index = data.draw(st.integers(0, len(items) - 1))
                match name:
                    case "token":
                        port, tag = tokens.pop(index)
                        engine.deliver(port, tag, tag.number)
                    case "execute":
                        pool.execute(index)
                    case "deliver":
                        pool.deliver(index)
                    case "admit":
                        tag = to_admit.pop(index)
                        if tag not in abandoned:
                            await engine.admit(tag)
                    case _:
                        if engine.abandon(tags[index]):
                            abandoned.add(tags[index])
                engine._scheduler.check_invariants()
            await engine.drain(timeout_s=0)
        finally:
            pool.run_all()  # leaving waits for jobs, and a refuted example leaves some behind

    finished = set(tags) - abandoned
    recorder.check_exactly_once(DIAMOND, finished=finished, abandoned=abandoned)
    results = {tag: value for _, tag, value in outputs if tag in finished}
    assert results == {tag: (tag, tag.number + 2, (tag.number + 2) * tag.number) for tag in finished}
    assert len({tag for _, tag, _ in outputs}) == len(outputs)


async def test_an_error_in_a_callback_of_the_pool_stops_the_engine_and_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turn() -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("no 7")

    pool = ManualPool()
    with pytest.raises(ZeroDivisionError, match="no 7"):
        async with asyncio.timeout(60), Engine(HEAVY, pool=pool, in_flight=1) as engine:
            await engine.admit(A)
            engine.deliver("x", A, 7)
            monkeypatch.setattr(engine, "_turn", turn)
            pool.step()
            await asyncio.Event().wait()
