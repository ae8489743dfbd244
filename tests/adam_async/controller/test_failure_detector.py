"""Nodes that may be lost: how long they may stay away, and which count as away under another leader."""

import msgspec
import pytest

from adam_async.controller.failure_detector import FailureDetector
from adam_async.run.cluster_map import ClusterMap, NodeRecord

GRACE_S, FIND_S = 2.0, 5.0


def cluster_of(*names, incarnation=1):
    """A map in which these nodes are live."""
    nodes = {name: NodeRecord(role="worker", address="a", incarnation=incarnation) for name in names}
    return ClusterMap(nodes=nodes)


def without(cluster, name):
    """The map after the loss of a node."""
    lost = msgspec.structs.replace(cluster.nodes[name], live=False)
    return msgspec.structs.replace(cluster, nodes={**cluster.nodes, name: lost})


@pytest.fixture
def detector():
    return FailureDetector(grace_s=GRACE_S, find_s=FIND_S)


def test_a_broken_link_becomes_a_loss_only_after_the_grace(detector):
    cluster = cluster_of("a", "b")
    detector.link_lost(("worker", "a", 1), now=100.0)
    assert detector.next_deadline() == 102.0
    assert detector.due(cluster, now=101.9) == []
    assert detector.due(cluster, now=102.0) == [("worker", "a", 1)]


def test_a_loss_is_reported_until_the_map_has_it_and_then_no_more(detector):
    cluster = cluster_of("a")
    detector.link_lost(("worker", "a", 1), now=100.0)
    assert detector.due(cluster, now=102.0) == detector.due(cluster, now=103.0) == [("worker", "a", 1)]
    assert detector.due(without(cluster, "a"), now=104.0) == []
    assert detector.next_deadline() is None


def test_a_node_that_comes_back_in_time_is_not_suspected_any_more(detector):
    detector.link_lost(("worker", "a", 1), now=100.0)
    detector.link_back(("worker", "a", 2))  # another life is no sign of this one
    assert detector.next_deadline() == 102.0
    detector.link_back(("worker", "a", 1))
    assert detector.next_deadline() is None
    assert detector.due(cluster_of("a"), now=200.0) == []


def test_ended_and_unknown_incarnations_are_not_reported(detector):
    detector.link_lost(("worker", "a", 99), now=0.0)
    detector.link_lost(("worker", "nobody", 1), now=0.0)
    detector.link_lost(("worker", "b", 1), now=0.0)
    assert detector.due(without(cluster_of("a", "b"), "b"), now=50.0) == []
    assert detector.next_deadline() is None


def test_a_node_whose_join_is_committed_after_its_link_broke_is_suspected_all_the_same(detector):
    detector.link_lost(("worker", "a", 1), now=100.0)
    assert detector.due(cluster_of(), now=100.5) == []
    assert detector.next_deadline() == 102.0
    assert detector.due(cluster_of("a"), now=102.0) == [("worker", "a", 1)]


def test_after_standing_still_everybody_has_the_grace_once_more_and_no_more_than_that(detector):
    cluster = cluster_of("a", "b")
    detector.link_lost(("worker", "a", 1), now=100.0)
    detector.link_lost(("worker", "b", 1), now=399.0)
    detector.stood_still(now=400.0)
    assert detector.due(cluster, now=401.9) == []
    assert detector.due(cluster, now=402.0) == [("worker", "a", 1), ("worker", "b", 1)]


def test_each_node_has_its_own_time(detector):
    cluster = cluster_of("a", "b")
    detector.link_lost(("worker", "b", 1), now=100.0)
    detector.link_lost(("worker", "a", 1), now=101.0)
    assert detector.next_deadline() == 102.0
    assert detector.due(cluster, now=102.5) == [("worker", "b", 1)]
    assert detector.due(cluster, now=103.0) == [("worker", "b", 1), ("worker", "a", 1)]


def test_a_new_leader_gives_all_live_nodes_without_a_link_the_time_to_find_it(detector):
    cluster = without(cluster_of("a", "b", "c", "d"), "d")
    here = (life for life in [("worker", "b", 1), ("worker", "c", 2)])  # of c, another life is here
    detector.led(cluster, here, now=100.0)
    assert detector.next_deadline() == 107.0
    assert detector.due(cluster, now=106.9) == []
    assert detector.due(cluster, now=107.0) == [("worker", "a", 1), ("worker", "c", 1)]


def test_one_that_leaves_a_new_leader_to_look_for_it_elsewhere_has_the_time_to_come_back(detector):
    detector.led(cluster_of("a"), [("worker", "a", 1)], now=100.0)

    detector.link_lost(("worker", "a", 1), now=100.5)
    assert detector.next_deadline() == 107.0
    detector.link_back(("worker", "a", 1))
    detector.link_lost(("worker", "a", 1), now=106.0)
    assert detector.next_deadline() == 108.0


def test_the_first_leader_of_all_has_nobody_who_looks_for_it(detector):
    detector.led(ClusterMap(), [], now=100.0)

    detector.link_lost(("worker", "a", 1), now=100.5)
    assert detector.next_deadline() == 102.5


def test_leading_again_begins_all_waits_anew(detector):
    cluster = cluster_of("a", "b")
    detector.link_lost(("worker", "a", 1), now=100.0)
    detector.led(cluster, [("worker", "b", 1)], now=101.0)
    assert detector.due(cluster, now=107.9) == []
    assert detector.due(cluster, now=108.0) == [("worker", "a", 1)]


def test_a_follower_suspects_no_node(detector):
    cluster = cluster_of("a", "b")
    detector.led(cluster, [], now=100.0)
    detector.resigned()
    assert detector.next_deadline() is None
    assert detector.due(cluster, now=1000.0) == []
