"""The scheduler fires every node once per tag, in any order of events, and never shares a context."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow import (
    Abandoned,
    ContextFreed,
    DuplicateToken,
    Effect,
    Finished,
    Firing,
    Graph,
    Node,
    NoRoom,
    Output,
    Scheduler,
    Tag,
    TagInFlight,
    TagSettled,
    TooManyEarlyTokens,
    UnknownPort,
)
from dataflow.tokens import BatchCall, Call
from tests.dataflow.testing import run_calls, take_effects

A, B, C = Tag(1, 0), Tag(1, 1), Tag(1, 2)


def add(firing: Firing, left: int, right: int) -> int:
    return left + right


def double(firing: Firing, value: int) -> int:
    return 2 * value


def ignore(firing: Firing, *values: object) -> None:
    return None


SUM = Graph(
    inputs=("a", "b"),
    nodes=(
        Node("add", add, inputs=("a", "b"), outputs=("sum",), heavy=True),
        Node("double", double, inputs=("sum",), outputs=("result",)),
    ),
    outputs=("result",),
)

ONE = Graph(inputs=("a",), nodes=(Node("one", ignore, inputs=("a",), heavy=True),))


def take_calls(scheduler: Scheduler) -> list[Call]:
    return [effect for effect in take_effects(scheduler) if isinstance(effect, (Firing, BatchCall))]


def news(scheduler: Scheduler) -> list[Effect]:
    return [e for e in take_effects(scheduler) if not isinstance(e, (Firing, BatchCall))]


def test_a_node_fires_when_its_last_input_comes() -> None:
    scheduler = Scheduler(SUM, in_flight=1)
    scheduler.admit(A)

    scheduler.deliver("b", A, 2)
    assert take_effects(scheduler) == []
    scheduler.deliver("a", A, 40)
    [call] = take_effects(scheduler)
    assert isinstance(call, Firing)
    assert (call.node.name, call.args) == ("add", [40, 2])

    scheduler.fired(call, (42,))
    [call] = take_effects(scheduler)
    assert isinstance(call, Firing)
    assert call.args == (42,)
    scheduler.fired(call, (84,))
    assert take_effects(scheduler) == [Output("result", A, 84), Finished(A)]
    assert scheduler.idle


def test_an_output_is_reported_before_the_tag_finishes() -> None:
    graph = Graph(
        inputs=("a",),
        nodes=(Node("d", double, inputs=("a",), outputs=("x",)), Node("send", ignore, inputs=("x",))),
        outputs=("a", "x"),
    )
    scheduler = Scheduler(graph, in_flight=1)
    scheduler.admit(A)
    scheduler.deliver("a", A, 1)

    reported = [effect for effect in run_calls(scheduler) if not isinstance(effect, Firing)]
    assert reported == [Output("a", A, 1), Output("x", A, 2), Finished(A)]


def test_a_node_without_inputs_fires_at_admission() -> None:
    scheduler = Scheduler(Graph(nodes=(Node("source", lambda firing: 7, outputs=("x",)),)), in_flight=1)
    scheduler.admit(A)

    assert [type(effect) for effect in run_calls(scheduler)] == [Firing, Finished]


@pytest.mark.parametrize("comes", ["early", "before the node", "after the node"])
def test_an_input_without_a_reader_only_delays_the_finish(comes: str) -> None:
    graph = Graph(inputs=("a", "done"), nodes=(Node("one", ignore, inputs=("a",)),))
    scheduler = Scheduler(graph, in_flight=1, contexts=[object()])
    if comes == "early":
        scheduler.deliver("done", A, None)
    scheduler.admit(A)
    if comes == "before the node":
        scheduler.deliver("done", A, None)
        assert take_effects(scheduler) == []
    scheduler.deliver("a", A, 1)

    effects = list(run_calls(scheduler))
    if comes == "after the node":
        assert [type(effect) for effect in effects] == [Firing]
        assert "has 0 nodes to fire lacks 'done'" in scheduler.describe()
        scheduler.deliver("done", A, None)
        effects += take_effects(scheduler)
    assert [type(effect) for effect in effects] == [Firing, Finished]
    assert scheduler.idle
    assert scheduler.room == 1


def test_one_port_may_be_read_twice() -> None:
    graph = Graph(inputs=("a",), nodes=(Node("add", add, inputs=("a", "a"), outputs=("s",)),), outputs=("s",))
    scheduler = Scheduler(graph, in_flight=1)
    scheduler.admit(A)
    scheduler.deliver("a", A, 3)

    assert Output("s", A, 6) in list(run_calls(scheduler))


def test_a_second_token_for_a_live_tag_is_an_error() -> None:
    scheduler = Scheduler(SUM, in_flight=1)
    scheduler.admit(A)
    scheduler.deliver("a", A, 1)

    with pytest.raises(DuplicateToken, match=r"port 'a' and Tag\(epoch=1, number=0, attempt=1\)"):
        scheduler.deliver("a", A, 1)
    assert scheduler.num_dropped == 0


def test_early_tokens_are_kept_and_count_as_delivered() -> None:
    scheduler = Scheduler(SUM, in_flight=1)
    scheduler.deliver("b", A, 2)
    scheduler.deliver("a", A, 1)
    assert scheduler.num_early == 2
    with pytest.raises(DuplicateToken):
        scheduler.deliver("a", A, 1)

    scheduler.admit(A)
    assert scheduler.num_early == 0
    assert Output("result", A, 6) in list(run_calls(scheduler))


def test_early_tokens_are_bounded() -> None:
    scheduler = Scheduler(SUM, in_flight=1, early_limit=2)
    scheduler.deliver("a", A, 1)
    scheduler.deliver("a", B, 1)

    with pytest.raises(TooManyEarlyTokens, match="2 tokens already wait") as caught:
        scheduler.deliver("a", C, 1)
    assert (caught.value.tag, caught.value.limit) == (C, 2)
    scheduler.abandon(A)
    scheduler.deliver("a", C, 1)
    scheduler.check_invariants()


def test_tokens_for_tags_that_are_over_are_dropped_and_counted() -> None:
    scheduler = Scheduler(ONE, in_flight=1)
    scheduler.admit(A)
    scheduler.deliver("a", A, 1)
    list(run_calls(scheduler))
    scheduler.deliver("a", A, 1)
    scheduler.abandon(B)
    scheduler.deliver("a", B, 1)

    assert scheduler.num_dropped == 2
    assert take_effects(scheduler) == []


def test_abandoning_an_early_tag_drops_its_tokens_and_bars_it() -> None:
    scheduler = Scheduler(SUM, in_flight=1)
    scheduler.deliver("a", A, 1)

    assert scheduler.abandon(A)
    assert scheduler.num_dropped == 1
    assert not scheduler.abandon(A)
    with pytest.raises(TagSettled):
        scheduler.admit(A)


def test_an_unknown_port_is_named_with_the_known_ones() -> None:
    scheduler = Scheduler(SUM, in_flight=1)
    with pytest.raises(UnknownPort, match="unknown port 'sum': the graph's inputs are 'a', 'b'"):
        scheduler.deliver("sum", A, 1)


def test_admission_is_bounded_and_each_tag_enters_once() -> None:
    scheduler = Scheduler(ONE, in_flight=1)
    scheduler.admit(A)
    with pytest.raises(TagInFlight):
        scheduler.admit(A)
    with pytest.raises(NoRoom, match=r"1 of 1 slots taken.*\(1, 0, 1\) has 1 nodes to fire lacks 'a'"):
        scheduler.admit(B)

    scheduler.deliver("a", A, 1)
    list(run_calls(scheduler))
    with pytest.raises(TagSettled, match="use a higher attempt"):
        scheduler.admit(A)
    scheduler.admit(A._replace(attempt=2))


def test_an_abandoned_tag_frees_its_slot_at_once_and_its_context_when_its_call_ends() -> None:
    first, spare = object(), object()
    scheduler = Scheduler(ONE, in_flight=1, contexts=[first, spare])
    assert scheduler.admit(A) is first
    scheduler.deliver("a", A, 1)
    [call] = take_calls(scheduler)

    scheduler.abandon(A)
    assert scheduler.num_still_running == 1
    assert scheduler.admit(B) is spare
    scheduler.abandon(B)
    assert scheduler.admit(C) is spare
    assert not scheduler.room
    assert news(scheduler) == [Abandoned(A), Abandoned(B), Abandoned(C)][:2]

    scheduler.fired(call, None)
    assert take_effects(scheduler) == [ContextFreed(A)]
    scheduler.abandon(C)
    scheduler.check_invariants()


def test_without_a_spare_context_admission_waits_for_the_call() -> None:
    scheduler = Scheduler(ONE, in_flight=1, contexts=["only"])
    scheduler.admit(A)
    scheduler.deliver("a", A, 1)
    [call] = take_calls(scheduler)
    scheduler.abandon(A)

    assert scheduler.num_live == 0
    assert scheduler.room == 0
    scheduler.fired(call, None)
    assert scheduler.room == 1


def test_the_result_of_an_abandoned_call_is_dropped() -> None:
    scheduler = Scheduler(SUM, in_flight=1)
    scheduler.admit(A)
    scheduler.deliver("a", A, 1)
    scheduler.deliver("b", A, 1)
    [call] = take_calls(scheduler)
    scheduler.abandon(A)
    scheduler.fired(call, (2,))

    assert take_effects(scheduler) == [Abandoned(A), ContextFreed(A)]
    assert scheduler.num_firings == 0


def test_a_call_of_an_abandoned_tag_that_has_not_started_never_runs() -> None:
    ran = []
    graph = Graph(inputs=("a",), nodes=(Node("n", lambda firing, a: ran.append(a), inputs=("a",)),))
    scheduler = Scheduler(graph, in_flight=1)
    scheduler.admit(A)
    scheduler.deliver("a", A, 1)
    [call] = take_calls(scheduler)
    scheduler.abandon(A)

    assert call.execute(None) is None
    assert ran == []


def test_a_failed_call_abandons_its_tag() -> None:
    scheduler = Scheduler(SUM, in_flight=1, contexts=["only"])
    scheduler.admit(A)
    scheduler.deliver("a", A, 1)
    scheduler.deliver("b", A, 1)
    [call] = take_calls(scheduler)

    assert scheduler.failed(call) == [A]
    assert take_effects(scheduler) == [Abandoned(A)]
    assert scheduler.room == 1
    scheduler.check_invariants()


def test_a_failure_of_an_abandoned_call_loses_nothing_more() -> None:
    scheduler = Scheduler(ONE, in_flight=1, contexts=["only"])
    scheduler.admit(A)
    scheduler.deliver("a", A, 1)
    [call] = take_calls(scheduler)
    scheduler.abandon(A)

    assert scheduler.failed(call) == []
    assert scheduler.room == 1
    assert scheduler.num_abandoned == 1


BATCHED = Graph(
    inputs=("a",),
    nodes=(
        Node("n", lambda firings, a: [2 * x for x in a], inputs=("a",), outputs=("y",), batch=2, heavy=True),
    ),
    outputs=("y",),
)


def start_batches(num_tags: int) -> tuple[Scheduler, list[Tag]]:
    tags = [Tag(1, number) for number in range(num_tags)]
    scheduler = Scheduler(BATCHED, in_flight=num_tags, contexts=list(range(num_tags)))
    for tag in tags:
        scheduler.admit(tag)
        scheduler.deliver("a", tag, tag.number)
    return scheduler, tags


def test_ready_tags_form_batches_one_at_a_time() -> None:
    scheduler, _ = start_batches(5)

    sizes = []
    for effect in run_calls(scheduler):
        if isinstance(effect, BatchCall):
            sizes.append(len(effect.firings))
        elif isinstance(effect, Output):
            assert effect.value == 2 * effect.tag.number
    assert sizes == [2, 2, 1]
    assert scheduler.num_finished == 5


def test_abandoned_tags_leave_a_batch_but_not_its_order() -> None:
    scheduler, tags = start_batches(4)
    [call] = take_calls(scheduler)
    scheduler.abandon(tags[0])
    scheduler.abandon(tags[2])
    result = call.execute(None)
    assert result == [None, (2,)]
    scheduler.fired(call, result)

    [call] = take_calls(scheduler)
    assert [firing.tag for firing in call.firings] == [tags[3]]
    scheduler.check_invariants()


def test_a_batch_that_is_all_abandoned_is_not_called() -> None:
    scheduler, _ = start_batches(2)
    [call] = take_calls(scheduler)
    scheduler.abandon_all()
    result = call.execute(None)

    assert result == [None, None]
    scheduler.fired(call, result)
    assert scheduler.idle


def test_a_failed_batch_fails_all_its_live_tags() -> None:
    scheduler, tags = start_batches(3)
    [call] = take_calls(scheduler)
    scheduler.abandon(tags[0])

    assert scheduler.failed(call) == [tags[1]]
    scheduler.check_invariants()
    assert scheduler.num_live == 1


@pytest.mark.parametrize("returned", [[1], 5, "ab" * 3])
def test_a_batch_returns_one_entry_per_tag(returned: object) -> None:
    graph = Graph(
        inputs=("a",), nodes=(Node("n", lambda f, a: returned, inputs=("a",), outputs=("y",), batch=2),)
    )
    scheduler = Scheduler(graph, in_flight=2)
    for tag in (A, B):
        scheduler.admit(tag)
        scheduler.deliver("a", tag, 0)

    with pytest.raises(Exception, match=r"node 'n' returned .*, expected one entry for each of 2 tags"):
        list(run_calls(scheduler))


def test_a_gated_node_makes_no_more_calls_than_allowed() -> None:
    graph = Graph(inputs=("a",), nodes=(Node("n", ignore, inputs=("a",), jobs=2),))
    scheduler = Scheduler(graph, in_flight=5)
    for number in range(5):
        scheduler.admit(Tag(1, number))
        scheduler.deliver("a", Tag(1, number), number)

    calls = take_calls(scheduler)
    assert len(calls) == 2
    assert take_calls(scheduler) == []
    scheduler.fired(calls[1], ())
    assert [call.firings[0].tag.number for call in take_calls(scheduler)] == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_flight": 0}, "in_flight must be at least 1, not 0"),
        ({"in_flight": 2, "contexts": ["a"]}, "1 contexts are too few for in_flight=2"),
        ({"in_flight": 2, "early_limit": -1}, "early_limit must not be negative"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(ONE, **arguments)


# Properties. Nodes build terms of their inputs: a term shows the inputs and the tag that it comes from.


def term_node(name: str, *, num_outputs: int, batch: int) -> Any:
    def shape(values: Sequence[object]) -> object:
        outputs = tuple((name, place, *values) for place in range(num_outputs))
        return outputs[0] if num_outputs == 1 else outputs

    def one(firing: Firing, *values: object) -> object:
        return shape(values)

    def many(firings: Sequence[Firing], *columns: Sequence[object]) -> object:
        return [shape([column[row] for column in columns]) for row in range(len(firings))]

    return one if batch == 1 else many


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    inputs = tuple(f"in{i}" for i in range(draw(st.integers(1, 3))))
    ports = list(inputs)
    nodes = []
    for index in range(draw(st.integers(1, 5))):
        num_outputs = draw(st.integers(0, 2))
        batch = draw(st.sampled_from((1, 1, 2, 3)))
        name = f"n{index}"
        node = Node(
            name,
            term_node(name, num_outputs=num_outputs, batch=batch),
            inputs=tuple(draw(st.lists(st.sampled_from(ports), max_size=3))),
            outputs=tuple(f"{name}.{place}" for place in range(num_outputs)),
            heavy=draw(st.booleans()),
            batch=batch,
            jobs=draw(st.sampled_from((None, 1, 2))),
        )
        nodes.append(node)
        ports += node.outputs
    return Graph(inputs=inputs, nodes=tuple(nodes), outputs=tuple(ports))


def expected(graph: Graph, tag: Tag) -> dict[str, object]:
    """Return the value of every port by direct evaluation."""
    values: dict[str, object] = {port: (port, tag) for port in graph.inputs}
    for node in graph.nodes:
        for place, port in enumerate(node.outputs):
            values[port] = (node.name, place, *(values[name] for name in node.inputs))
    return values


@given(graphs(), st.data())
def test_every_firing_happens_once_or_its_tag_is_abandoned(graph: Graph, data: st.DataObject) -> None:
    tags = [Tag(1, number) for number in range(4)]
    contexts = [object() for _ in range(data.draw(st.integers(2, 4), label="contexts"))]
    scheduler = Scheduler(graph, in_flight=2, contexts=contexts)
    to_deliver = [(port, tag) for tag in tags for port in graph.inputs]
    to_admit = list(tags)
    out: list[Call] = []
    fired: Counter[tuple[str, Tag]] = Counter()
    outputs: dict[tuple[str, Tag], object] = {}
    finished: set[Tag] = set()
    abandoned: set[Tag] = set()

    def take() -> None:
        for effect in take_effects(scheduler):
            if isinstance(effect, (Firing, BatchCall)):
                for firing in effect.firings:
                    for other in (other for call in out for other in call.firings):
                        assert (other.context is firing.context) == (other.tag == firing.tag)
                out.append(effect)
            elif isinstance(effect, Output):
                assert (effect.port, effect.tag) not in outputs
                outputs[effect.port, effect.tag] = effect.value
            elif isinstance(effect, Finished):
                finished.add(effect.tag)
        scheduler.check_invariants()

    def pick(items: list[Any], label: str) -> Any:
        return items.pop(data.draw(st.integers(0, len(items) - 1), label=label))

    while True:
        moves = ["deliver"] * bool(to_deliver) + ["run"] * bool(out)
        if to_admit and scheduler.room:
            moves.append("admit")
        if not moves:
            break
        if len(abandoned) < 2:
            moves.append("abandon")
        move = data.draw(st.sampled_from(moves), label="move")
        if move == "deliver":
            port, tag = pick(to_deliver, "token")
            scheduler.deliver(port, tag, (port, tag))
        elif move == "admit":
            tag = pick(to_admit, "tag")
            if tag not in abandoned:
                scheduler.admit(tag)
        elif move == "abandon":
            tag = data.draw(st.sampled_from(tags), label="abandoned")
            if scheduler.abandon(tag):
                abandoned.add(tag)
        else:
            call = pick(out, "call")
            result = call.execute(None)
            for firing in call.firings:
                fired[call.node.name, firing.tag] += not firing.flight.abandoned
            scheduler.fired(call, result)
        take()

    assert scheduler.idle
    assert finished == set(tags) - abandoned
    for tag in finished:
        assert {port: outputs[port, tag] for port in graph.outputs} == expected(graph, tag)
        assert all(fired[node.name, tag] == 1 for node in graph.nodes)
    assert max(fired.values(), default=0) <= 1
    assert scheduler.room == min(2, len(contexts))
