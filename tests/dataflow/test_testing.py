"""The recorder of firings finds wrong counts."""

import pytest

from dataflow import Graph, Node, Tag, TraceRecord
from tests.dataflow.testing import FiringRecorder

A, B = Tag(1, 0), Tag(1, 1)

GRAPH = Graph(
    inputs=("x",),
    nodes=(Node("double", lambda firing, x: 2 * x, inputs=("x",), outputs=("y",), heavy=True),),
    outputs=("y",),
)


def record(node: str, tag: Tag) -> TraceRecord:
    return TraceRecord(node=node, tag=tag, queued=0.0, started=0.0, finished=0.0, thread="t")


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
