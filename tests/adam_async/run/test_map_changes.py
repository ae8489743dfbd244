"""Versions of the map: one version and all changes since are together the last version."""

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adam_async.controller import state, training_rules
from adam_async.controller.state import NodeLost
from adam_async.errors import RunFailed
from adam_async.run import map_changes
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.map_changes import CHANGES_KEPT, Change, History, changed, difference
from adam_async.run.training_program import ProgramPiece
from tests.adam_async.cluster_maps import Cluster, run_record, store_record, training

NAMES = ("driver", "data-0", "data-1", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2", "client-0")
STORES = ("a", "b")


class Recorded(Cluster):
    """A cluster that keeps all its maps."""

    def __init__(self):
        super().__init__()
        self.maps = [self.map]

    def apply(self, command):
        events = super().apply(command)
        if self.map is not self.maps[-1]:
            self.maps.append(self.map)
        return events


class Story:
    """A cluster to which things happen at random, and all the maps it had."""

    def __init__(self, seed, steps):
        self.dice = random.Random(seed)
        self.cluster = Recorded()
        self.maps = self.cluster.maps
        self.runs = 0
        for _ in range(steps):
            self.dice.choice(
                (
                    *(self.join, self.join, self.get_ready, self.get_ready, self.die, self.run, self.end),
                    *(self.cut, self.create, self.serve, self.delete),
                )
            )()

    def name(self):
        return self.dice.choice(NAMES)

    def join(self):
        self.cluster.join(self.name(), incarnation=self.dice.randint(1, 2))

    def get_ready(self):
        run, name = self.cluster.map.run, self.name()
        if run is not None and name in self.cluster.map.nodes:
            self.cluster.ready(name, run=run.id)

    def die(self):
        name = self.name()
        if self.dice.random() < 0.3 and name in self.cluster.map.nodes:
            self.cluster.apply(NodeLost(name, self.cluster.map.nodes[name].incarnation))

    def run(self):
        if self.dice.random() < 0.3:
            self.runs += 1
            driver = self.cluster.map.nodes.get("driver")
            incarnation = driver.incarnation if driver is not None else 1
            record = run_record(f"run-{self.runs}", incarnation=incarnation, servers=1, replicas=1)
            self.cluster.submit(record)

    def cut(self):
        piece = ProgramPiece(run=f"run-{self.runs + 1}", data=b"{")
        self.cluster.set(f"run/{self.dice.randrange(3)}", piece)

    def create(self):
        name = self.dice.choice(STORES)
        self.cluster.create(name, store_record(f"{name}-{self.dice.randrange(99)}", slack=1))

    def serve(self):
        for store in self.cluster.map.stores.values():
            for server in sorted(set(store.buckets)):
                self.cluster.serve(server, store.id)

    def delete(self):
        name = self.dice.choice(STORES)
        if name in self.cluster.map.stores:
            store = self.cluster.map.stores[name]
            self.cluster.set(f"stores/{name}", msgspec.structs.replace(store, phase="deleted"))

    def end(self):
        epoch, run = self.cluster.map.epoch, self.cluster.map.run
        if epoch is not None and not epoch.ended:
            self.cluster.end_epoch(images=1)
        elif run is not None and run.phase == "between":
            self.cluster.set("run", msgspec.structs.replace(run, phase="training", epoch=run.epoch + 1))


def text(cluster):
    """A map as it travels, where tuples are lists; the order of records has no meaning."""
    return msgspec.json.encode(cluster, order="sorted")


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch):
    """Nodes and results leave the map early."""
    monkeypatch.setattr(state, "DEPARTED_KEPT", 1)
    for module in (training_rules, map_changes):
        monkeypatch.setattr(module, "RESULTS_KEPT", 2)


stories = st.builds(Story, st.integers(0, 10**9), st.integers(1, 60))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories)
def test_each_version_is_made_of_the_one_before_and_what_became_of_it_also_after_a_journey(story):
    for before, after in zip(story.maps, story.maps[1:], strict=False):
        change = difference(before, after)
        assert changed(before, change) == after
        sent = msgspec.json.decode(msgspec.json.encode(change), type=Change)
        assert text(changed(before, sent)) == text(after)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories, st.integers(0, 100))
def test_a_watcher_with_any_version_gets_all_later_changes_in_order(story, known):
    history = History()
    for before, after in zip(story.maps, story.maps[1:], strict=False):
        history.add(difference(before, after))
    newest = story.maps[-1].version
    map_history = history.since(known)
    if known > newest:
        assert map_history is None
        return
    assert [change.version for change in map_history] == list(range(known + 1, newest + 1))
    cluster = story.maps[known]
    for change in map_history:
        cluster = changed(cluster, change)
    assert cluster == story.maps[-1]


def test_random_histories_reach_every_field_of_the_map():
    told = set()
    for seed in range(30):
        story = Story(seed, 80)
        for before, after in zip(story.maps, story.maps[1:], strict=False):
            told |= set(msgspec.to_builtins(difference(before, after)))
    assert told == {field.encode_name for field in msgspec.structs.fields(Change)}
    assert told - {"gone", "stores_gone", "arrays_gone", "bundles_gone", "same_run", "more_results"} == {
        field.encode_name for field in msgspec.structs.fields(ClusterMap)
    }


def test_a_change_holds_only_changed_records():
    cluster = Cluster()
    cluster.join("driver", "worker-0", "worker-1")
    before = cluster.map
    cluster.set("nodes/worker-1", msgspec.structs.replace(before.nodes["worker-1"], failed="it burns"))
    assert msgspec.to_builtins(difference(before, cluster.map)).keys() == {"version", "nodes"}
    assert list(difference(before, cluster.map).nodes) == ["worker-1"]


def test_the_change_at_the_end_of_an_epoch_does_not_grow_with_the_epochs(monkeypatch):
    for module in (training_rules, map_changes):
        monkeypatch.setattr(module, "RESULTS_KEPT", 32)
    cluster = training(epochs=10_000, replicas=1)
    sizes = []
    for epoch in range(2, 103):
        before = cluster.map
        cluster.end_epoch(images=1, clock=1000 + epoch)
        sizes.append(len(msgspec.json.encode(difference(before, cluster.map))))
        run = msgspec.structs.replace(cluster.map.run, phase="training", epoch=epoch)
        cluster.set("run", run.without_fixed())
    assert max(sizes) < min(sizes) + 20  # the digits of versions and epochs
    assert (cluster.map.ended, len(cluster.map.results)) == (101, 32)
    assert cluster.map.result(101).clock == 1102
    with pytest.raises(RunFailed, match="holds the results of epochs 70 to 101, not of epoch 69"):
        cluster.map.result(69)


def test_that_a_record_is_gone_is_not_that_it_is_as_before():
    cluster = Cluster()
    cluster.join("driver", "data-0")
    cluster.set("run", run_record("run-1"))
    cluster.ready("data-0")
    before = cluster.map
    assert before.dealer is not None
    gone = msgspec.structs.replace(before, version=before.version + 1, dealer=None)
    sent = msgspec.json.decode(msgspec.json.encode(difference(before, gone)), type=Change)
    assert sent.dealer is None
    assert sent.run is msgspec.UNSET
    assert text(changed(before, sent)) == text(gone)


@pytest.mark.parametrize("version", [0, 4, 5, 7])
def test_a_change_that_does_not_follow_is_refused_with_both_versions(version):
    with pytest.raises(ValueError, match=rf"version {version} does not follow version 5"):
        changed(ClusterMap(version=5), Change(version=version))


def test_versions_no_longer_kept_or_never_made_have_no_changes():
    history = History(10, limit=3)
    for version in range(11, 16):
        history.add(Change(version=version))
    assert [change.version for change in history.since(12)] == [13, 14, 15]
    assert history.since(15) == []
    assert history.since(11) is None
    assert history.since(16) is None
    assert history.since(-1) is None


def test_a_history_that_begins_with_a_map_knows_nothing_from_before():
    history = History(7)
    assert history.since(7) == []
    assert history.since(6) is None
    history.add(Change(version=8))
    assert [change.version for change in history.since(7)] == [8]


def test_the_history_keeps_as_many_changes_as_its_limit():
    history = History()
    for version in range(1, CHANGES_KEPT + 2):
        history.add(Change(version=version))
    assert history.since(0) is None
    assert len(history.since(1)) == CHANGES_KEPT
