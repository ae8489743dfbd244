"""The controller's map as a log of commands: the same commands give the same map."""

import msgspec
import pytest

from adam_async.controller.state import INCARNATIONS_KEPT, CompareAndSet, Conflict, Invalid
from tests.adam_async.cluster_maps import Cluster, node, run_record


def test_of_a_node_that_left_little_stays_however_often_it_comes_back():
    cluster = Cluster()
    for incarnation in range(1, 100):
        cluster.join("data-0", incarnation=incarnation)
        cluster.lose("data-0")
    record = cluster.map.nodes["data-0"]
    assert record.before == tuple(range(99 - INCARNATIONS_KEPT, 99))


def test_a_compare_and_set_that_comes_too_late_changes_nothing():
    cluster = Cluster()
    cluster.join("worker-0")
    version = cluster.map.nodes["worker-0"].changed
    assert cluster.set("nodes/worker-0", node(), expected=0) == [Conflict("nodes/worker-0", version)]
    assert cluster.set("run", run_record(), expected=9) == [Conflict("run", 0)]
    assert cluster.map.run is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "colour",
            {},
            "no key 'colour'; there are nodes/<id>, stores/<name>, run,",
        ),
        ("nodes/", {}, "no key"),
        ("nodes/worker-0", {"role": "worker"}, "nodes/worker-0: Object missing required field `address`"),
        ("nodes/x", {"role": "spy", "address": "", "incarnation": 1}, "there is no role 'spy'"),
        (
            "nodes/x",
            {"role": "ps", "address": "file:///etc/passwd", "incarnation": 1},
            "not of the form tcp://",
        ),
        ("nodes/x", {"role": "ps", "address": "x" * 1025, "incarnation": 1}, "address has 1025 char"),
        (
            "nodes/x",
            {"role": "ps", "address": "local://x", "incarnation": 1, "info": {"x": "x" * 33_000}},
            "33008 bytes",
        ),
    ],
)
def test_a_value_that_the_rules_cannot_work_with_is_refused_with_a_reason(key, value, said):
    cluster = Cluster()
    (event,) = cluster.apply(CompareAndSet(key=key, expected=0, value=value))
    assert isinstance(event, Invalid)
    assert said in event.reason
    assert cluster.map.version == 0


def test_an_incarnation_that_another_one_followed_never_joins_again():
    cluster = Cluster()
    cluster.join("worker-0")
    first = cluster.map.nodes["worker-0"]
    second = msgspec.structs.replace(first, incarnation=77)
    cluster.set("nodes/worker-0", second)
    (event,) = cluster.set("nodes/worker-0", msgspec.structs.replace(first, before=()))
    assert isinstance(event, Invalid)
    assert "a later incarnation of worker-0 has joined" in event.reason
    assert cluster.map.nodes["worker-0"].incarnation == 77
