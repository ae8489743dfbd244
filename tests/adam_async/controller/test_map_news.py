"""What a controller reports of its cluster."""

from itertools import pairwise

from msgspec.structs import replace

from adam_async.controller.map_news import news_of
from adam_async.run.cluster_map import ClusterMap, NodeRecord, RunRecord

WORKER = NodeRecord(role="worker", address="tcp://a:1", incarnation=1)
DRIVER = NodeRecord(role="driver", address="", incarnation=2)
RUN = RunRecord(id="r", driver="driver", config={}, spec={})


def test_who_comes_goes_or_is_lost_is_a_line():
    here = ClusterMap(nodes={"worker-0": WORKER})
    assert list(news_of(ClusterMap(), here)) == ["worker-0 joined"]
    for fields, line in ({"live": False}, "is lost"), ({"live": False, "left": True}, "left"):
        gone = ClusterMap(nodes={"worker-0": replace(WORKER, **fields)})
        assert list(news_of(here, gone)) == [f"worker-0 {line}"]


def test_what_a_driver_reports_is_a_line_once():
    before = ClusterMap(nodes={"driver": DRIVER})
    after = ClusterMap(nodes={"driver": replace(DRIVER, info={"notice": "a checkpoint failed"})})
    assert list(news_of(before, after)) == ["driver reports: a checkpoint failed"]
    assert list(news_of(after, after)) == []


def test_a_run_that_begins_ends_or_fails_is_a_line_and_its_epochs_are_none():
    phases = ("preparing", 0), ("training", 1), ("between", 1), ("training", 2), ("failed", 2)
    maps = [ClusterMap()]
    maps += [ClusterMap(run=replace(RUN, phase=phase, epoch=epoch, reason="why")) for phase, epoch in phases]
    lines = [line for before, after in pairwise(maps) for line in news_of(before, after)]
    assert lines == ["run r is preparing", "run r is training", "run r failed: why"]
