"""The search for a store on the disks of servers: the newest whole one, or one whose servers still start."""

import msgspec
import pytest

from adam_async.checkpoint import saved_shards
from adam_async.checkpoint.saved_shards import FoundStore, SavedShards, Survey, newest_whole
from adam_async.errors import StoreError
from adam_async.run.cluster_map import DISK
from adam_async.run.run_record import RunRecord
from adam_async.run.training_program import ResumeRecord
from adam_async.store.joining import find_saved
from tests.adam_async.cluster_maps import ARRAYS, bundle_map, run_record, store_record


class Surveys(SavedShards):
    """The results of successive surveys; the last one repeats."""

    def __init__(self, *surveys):
        self.left = list(surveys)

    async def survey(self, name, cluster):
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


def on_disks(id, began_ms, *, lacks=()):
    """A store over ps-0 and ps-1 of which the disks lack the bundles of some homes."""
    record = store_record(id, buckets=("ps-0", "ps-1") * 32)
    store = FoundStore("a-name", record, ARRAYS, began_ms)
    store.copies = {key: {(1, 1): "ps-0"} for key in store.pieces() if key[0] not in lacks}
    assert store.missing() == tuple(lacks)
    return store


def survey_of(*stores, servers=("ps-0", "ps-1")):
    return Survey(stores=stores, servers=servers)


async def found(monkeypatch, *surveys):
    monkeypatch.setattr(saved_shards, "SEARCH_S", 0.05)
    monkeypatch.setattr(saved_shards, "PAUSE_S", 0.0)
    cluster = bundle_map({"ps-0": ["ps-0"], "ps-1": ["ps-1"]}, copies=1)
    nodes = {name: msgspec.structs.replace(node, info={DISK: True}) for name, node in cluster.nodes.items()}
    cluster = msgspec.structs.replace(cluster, nodes=nodes)
    store = await find_saved(Surveys(*surveys), "a-name", lambda: cluster)
    return store.record.id if store is not None else None


OLD = on_disks("old", 1)
NEW = on_disks("new", 2)
PARTIAL = on_disks("new", 2, lacks=("ps-1",))


@pytest.mark.parametrize(
    ("surveys", "id"),
    [
        ((survey_of(),), None),
        ((survey_of(NEW, OLD),), "new"),
        ((survey_of(PARTIAL, servers=("ps-0",)), survey_of(NEW)), "new"),
        ((survey_of(PARTIAL, OLD, servers=("ps-0",)), survey_of(NEW, OLD)), "new"),
        ((survey_of(PARTIAL, OLD),), "old"),
    ],
    ids=["none", "newest", "partial at first", "partial beside an older one", "never whole"],
)
async def test_the_newest_store_counts_whose_pieces_are_or_may_come(monkeypatch, surveys, id):
    assert await found(monkeypatch, *surveys) == id


async def test_a_patient_search_waits_for_servers_that_start_later(monkeypatch):
    monkeypatch.setattr(saved_shards, "PAUSE_S", 0.0)
    cluster = bundle_map({"ps-0": ["ps-0"]}, copies=1)
    nodes = {name: msgspec.structs.replace(node, info={DISK: True}) for name, node in cluster.nodes.items()}
    cluster = msgspec.structs.replace(cluster, nodes=nodes)
    later = Surveys(survey_of(servers=("ps-0",)), survey_of(NEW))
    assert (await later.find("a-name", lambda: cluster, patient=True)).record.id == "new"
    monkeypatch.setattr(saved_shards, "SEARCH_S", 0.0)
    assert await Surveys(survey_of()).find("a-name", lambda: cluster, patient=True) is None


async def test_an_older_store_does_not_count_while_servers_of_a_newer_one_are_missing(monkeypatch):
    with pytest.raises(
        StoreError,
        match="the shards of ps-1 of store 'a-name' are not on the disks of ps-0: start all servers",
    ):
        await found(monkeypatch, survey_of(PARTIAL, OLD, servers=("ps-0",)))


def test_a_run_that_a_whole_one_continues_does_not_count_whenever_it_began():
    """The clock of a server that the second run has no longer may be ahead."""

    def of_run(id, began_ms, *, runs=(), lacks=()):
        record = store_record(id, program=id, buckets=("ps-0", "ps-1") * 32)
        store = FoundStore(id, record, ARRAYS, began_ms)
        store.copies = {key: {(1, 1): "ps-0"} for key in store.pieces() if key[0] not in lacks}
        resumed = ResumeRecord(epoch=1, clock=0, runs=tuple(runs)) if runs else None
        program = run_record(id, resumed=resumed)
        store.records["ps-0"] = (1, 1), RunRecord(program=program, is_whole=True)
        return store

    first, second = of_run("run-1", 2, lacks=("ps-1",)), of_run("run-2", 1, runs=("run-1",))
    assert newest_whole([first, second], ("ps-0", "ps-1")) == (second, True)
    other = of_run("run-2", 1)
    assert newest_whole([first, other], ("ps-0", "ps-1")) == (first, False)
