"""The error of an invalid graph names the node or port when the graph is built."""

import pytest

from dataflow import Graph, GraphError, Node, WrongOutputs


def identity(firing: object, *values: object) -> object:
    return values


def test_ports_are_numbered_inputs_first() -> None:
    graph = Graph(
        inputs=("a", "b"),
        nodes=(
            Node("late", identity, inputs=("x", "b"), outputs=("y",)),
            Node("early", identity, inputs=("a",), outputs=("x",)),
        ),
        outputs=("y",),
    )

    assert graph.ports == ("a", "b", "y", "x")
    assert graph.compiled[0].outputs == (2,)
    assert [(node.name, slot) for node, slot in graph.readers[1]] == [("late", 1)]


def test_lists_are_taken_for_tuples() -> None:
    node = Node("n", identity, inputs=["a"], outputs=["b"])  # type: ignore[arg-type]
    graph = Graph(inputs=["a"], nodes=[node], outputs=["b"])  # type: ignore[arg-type]

    assert node.inputs == ("a",)
    assert graph.outputs == ("b",)


@pytest.mark.parametrize(
    ("inputs", "nodes", "outputs", "message"),
    [
        ((), (), (), "at least one node"),
        (("a",), (Node("n", identity, inputs=("b",)),), (), "node 'n' reads port 'b', which nothing writes"),
        (("a",), (Node("n", identity, inputs=("a",)),), ("c",), "output 'c' is written by nothing"),
        (("a", "a"), (Node("n", identity, inputs=("a",)),), (), "input 'a' is listed twice"),
        (("a",), (Node("n", identity, inputs=("a",)),), ("a", "a"), "output 'a' is listed twice"),
        ((), (Node("n", identity), Node("n", identity)), (), "two nodes are called 'n'"),
        (
            ("a",),
            (Node("n", identity, inputs=("a",), outputs=("a",)),),
            (),
            "port 'a' of node 'n' is already written by the graph's inputs",
        ),
        (
            (),
            (Node("n", identity, outputs=("p",)), Node("m", identity, outputs=("p",))),
            (),
            "port 'p' of node 'm' is already written by node 'n'",
        ),
    ],
)
def test_the_error_of_a_wrong_graph_names_the_node_or_port(
    inputs: tuple[str, ...], nodes: tuple[Node, ...], outputs: tuple[str, ...], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        Graph(inputs=inputs, nodes=nodes, outputs=outputs)


def test_a_cycle_is_named_without_the_nodes_that_only_follow_it() -> None:
    nodes = (
        Node("after", identity, inputs=("c",)),
        Node("one", identity, inputs=("a", "c"), outputs=("b",)),
        Node("two", identity, inputs=("b",), outputs=("c",)),
    )
    with pytest.raises(GraphError, match=r"in a cycle: (one -> two -> one|two -> one -> two)$"):
        Graph(inputs=("a",), nodes=nodes)


def test_a_node_that_reads_itself_is_a_cycle() -> None:
    with pytest.raises(GraphError, match="in a cycle: n -> n"):
        Graph(nodes=(Node("n", identity, inputs=("x",), outputs=("x",)),))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"inputs": "ab"}, "inputs='ab', it must be a tuple"),
        ({"batch": 0}, "batch=0"),
        ({"jobs": 0}, "jobs=0"),
    ],
)
def test_the_error_of_a_wrong_node_has_the_value(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Node(**{"name": "n", "fn": identity, **arguments})  # type: ignore[arg-type]


def test_a_coroutine_function_is_refused() -> None:
    async def wait(firing: object) -> None: ...

    with pytest.raises(GraphError, match="node 'n' has a coroutine function"):
        Node("n", wait)


def test_a_batching_node_makes_one_call_at_a_time_by_default() -> None:
    assert Node("n", identity).jobs is None
    assert Node("n", identity, batch=4).jobs == 1
    assert Node("n", identity, batch=4, jobs=2).jobs == 2


def test_outputs_are_counted() -> None:
    graph = Graph(
        nodes=(
            Node("none", identity),
            Node("one", identity, outputs=("a",)),
            Node("two", identity, outputs=("b", "c")),
        )
    )
    none, one, two = graph.compiled

    assert none.unpack("ignored") == ()
    assert one.unpack((1, 2)) == ((1, 2),)
    assert two.unpack([1, 2]) == [1, 2]
    with pytest.raises(WrongOutputs, match="node 'two' returned a tuple of 3, expected a tuple of 2"):
        two.unpack((1, 2, 3))
    with pytest.raises(WrongOutputs, match="returned a NoneType"):
        two.unpack(None)
