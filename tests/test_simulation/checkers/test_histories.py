"""Answers without an order, watches with gaps and a group that forgot everything are noticed."""

import pytest

from adam_async.run.cluster_map import ClusterMap
from tests.simulation.checkers.histories import Histories
from tests.simulation.linearizability import CompareAndSet, Done, Get, Read
from tests.simulation.scenario import Violation


class Clock:
    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_a_stale_read_is_reported():
    histories = Histories(Clock())
    operations = histories.operations
    write = operations.begin("a", "k", CompareAndSet(expected=0, value="1"))
    operations.end(write, Done(version=1))
    read = operations.begin("b", "k", Get())
    operations.end(read, Read(version=1, value="1"))
    histories.check()
    read = operations.begin("b", "k", Get())
    operations.end(read, Read(version=0, value=None))
    with pytest.raises(Violation, match="I6: key k"):
        histories.check()


def test_a_version_that_a_watcher_does_not_get_is_reported():
    histories = Histories(Clock())
    for version in (1, 2, 4):
        histories.shown("w", "g", ClusterMap(version=version), whole=False)
    with pytest.raises(Violation, match="I6: w received version 4 instead of 3"):
        histories.check()


def test_two_maps_of_one_version_are_reported():
    histories = Histories(Clock())
    histories.shown("v", "g", ClusterMap(version=1), whole=True)
    histories.shown("w", "g", ClusterMap(version=1, placements=7), whole=True)
    with pytest.raises(Violation, match="I6: version 1 is"):
        histories.check()


def test_a_group_that_was_founded_anew_is_reported():
    histories = Histories(Clock())
    histories.shown("v", "g", ClusterMap(version=1), whole=True)
    with pytest.raises(Violation, match="I6: w found group h in place of g"):
        histories.shown("w", "h", ClusterMap(version=1), whole=True)
