"""The cuts of a run in bsp on the disk of one server, while its bundles go on."""

import asyncio
import errno
import shutil
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from adam_async.errors import DiskFailed, first_cause
from adam_async.model.rules import Sgd
from adam_async.parameter_server.piece_states import Catalogue, new_bundle
from adam_async.parameter_server.server_disk import opened_disk, read_saved_stores
from adam_async.parameter_server.shard_pieces import pieces_of
from adam_async.parameter_server.store_cuts import (
    CUTS,
    NO_CLOCK,
    CutReport,
    NamedCut,
    complete_clock,
    newest_named,
    report_of,
    reports_in_sync,
)
from adam_async.run.ids import Replica
from adam_async.run.run_record import RunRecord
from adam_async.run.shard_table import shard_table
from adam_async.run.store_record import ArrayRecord, served_word
from adam_async.runtime.disk import Disk
from tests.adam_async.cluster_maps import bundle_map, run_record, store_record
from tests.adam_async.runs import until

ARRAYS = (ArrayRecord("w", (8,)), ArrayRecord("v", (8,)), ArrayRecord("fixed", (4,), frozen=True))
HOMES = ("ps-0", "ps-1")
FLUSH_S = 0.01


def spread(table):
    """Buckets with the shards of both trained arrays, and of the frozen one, on both servers."""
    buckets = {spec.bucket: HOMES[spec.id % 2] for spec in table}
    return tuple(buckets.get(bucket, HOMES[0]) for bucket in range(64))


TABLE = shard_table(ARRAYS, shard_bytes=8).shards
RECORD = store_record(
    "run-1", ARRAYS, program="run-1", slack=0, summed_weight=4, shard_bytes=8, buckets=spread(TABLE)
)


class Store:
    """A store on a disk, with the bundles of both homes here, whose values are their clock."""

    def __init__(self, disk, group, **fields):
        self.record = replace(RECORD, **fields)
        self.disk = disk
        self.store = disk.of("run-1")
        self.bundles, self.notices = {}, []
        disk.ports.notice = self.notices.append
        catalogue = Catalogue("run-1", self.record, ARRAYS, 1.0)
        self.store.begin(catalogue, lambda name, work: group.create_task(work, name=name))
        self.store.note_run(RunRecord(program=run_record("run-1")), 1)
        for home in HOMES:
            specs = [spec for spec in TABLE if self.record.buckets[spec.bucket] == home]
            self.bundles[home] = new_bundle(self.record, specs, (Sgd(),))
            self.join(home, specs)
        self.number, self.complete = 0, NO_CLOCK

    def join(self, home, specs):
        saver = self.store.saver(home, pieces_of(specs, in_place=False))
        saver.is_ready, saver.bundle = lambda: True, lambda: self.bundles[home]

    @property
    def cuts(self):
        return self.store.cuts

    def name(self, clock, complete=None):
        """Name a cut in the map, and let the server follow the map with its own report."""
        self.number += 1
        self.complete = self.complete if complete is None else complete
        named = NamedCut(self.number, clock, self.complete)
        cluster = bundle_map({home: [home] for home in HOMES}, copies=1)
        report = {served_word(self.record): msgspec.to_builtins(CutReport(named=named))}
        nodes = {name: replace(node, info={CUTS: report}) for name, node in cluster.nodes.items()}
        cluster = replace(cluster, nodes=nodes, stores={"run-1": self.record})
        self.cuts.follow(cluster, lambda home: False)

    def step(self, home, clock, *, at_once=True):
        """Apply the sum of a clock to the trained shards of a bundle; return how many had room."""
        bundle = self.bundles[home]
        shards = [shard for shard in bundle.shards.values() if not shard.spec.frozen]
        if bundle.cut is not None and clock > bundle.cut.clock:
            assert at_once is (bundle.cut.room_for(shards) == len(shards))
            bundle.cut.keep(shards)
        for shard in shards:
            shard.values[:] = clock
            shard.clocks = {Replica(0): clock}
            shard.pending.reached = clock
        self.store._savers[home].touched([shard.spec.id for shard in shards], 1)
        self.cuts.moved()

    def steps(self, clock):
        for home in HOMES:
            self.step(home, clock)

    async def handled(self):
        await until(lambda: self.cuts.report.handled == self.number)

    async def cut_at(self, clock, complete=None):
        """Name and take a cut that the bundles have reached."""
        self.name(clock, complete)
        await self.handled()
        return self.on_disk()

    def on_disk(self):
        return {home: clocks for home, clocks in self.cuts.report.on_disk.items() if clocks}


@asynccontextmanager
async def stores(tmp_path, **fields):
    async with opened_disk(tmp_path, flush_s=FLUSH_S) as disk, asyncio.TaskGroup() as group:
        store = Store(disk, group, **fields)
        await store.store._served.wait()
        try:
            yield store
        finally:
            await store.store.end(for_good=True)


async def values_on_disk(folder, clock):
    """The values of all trained shards on a disk at a clock; an error if one is missing."""
    async with opened_disk(folder, flush_s=1.0) as disk:
        (store,) = disk
        found = set()
        for spec in TABLE:
            home = RECORD.buckets[spec.bucket]
            numbers = [each.id for each in TABLE if RECORD.buckets[each.bucket] == home]
            states, tensors = await store.read(home, 1, [int(spec.id)], clock)
            assert int(spec.id) in map(int, numbers)
            assert states.passed == 0
            if not spec.frozen:
                found.update(tensors[2].tolist())
        return found


async def test_each_bundle_is_on_the_disk_at_the_clock_that_was_named_although_one_went_on(tmp_path):
    async with stores(tmp_path / "a") as store:
        store.steps(3)
        store.name(5)
        await until(lambda: all(bundle.cut is not None for bundle in store.bundles.values()))
        for clock in (4, 5, 6, 7):
            store.step("ps-0", clock)
        assert store.bundles["ps-0"].cut.copied_bytes or (5,) == store.on_disk().get("ps-0")
        assert not store.on_disk()
        store.step("ps-1", 4)
        store.step("ps-1", 5)
        await store.handled()
        assert store.on_disk() == {"ps-0": (5,), "ps-1": (5,)}
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert {bundle.cut for bundle in store.bundles.values()} == {None}
    assert await values_on_disk(tmp_path / "b", 5) == {5}
    async with Disk() as disk:
        (saved,) = await read_saved_stores(tmp_path / "b" / "..", disk) or await read_saved(disk, tmp_path)
    assert {(piece.home, piece.position) for piece in saved.pieces} == {("ps-0", 5), ("ps-1", 5)}


async def read_saved(disk, tmp_path):
    return await read_saved_stores(tmp_path / "b", disk)


async def test_the_complete_cut_stays_until_a_naming_has_a_later_one_and_a_disk_has_at_most_two(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        assert await store.cut_at(1) == {"ps-0": (1,), "ps-1": (1,)}
        for clock in (2, 3, 4):
            store.steps(clock)
            assert await store.cut_at(clock, complete=1) == dict.fromkeys(HOMES, (1, clock))
        store.steps(5)
        assert await store.cut_at(5, complete=4) == dict.fromkeys(HOMES, (4, 5))
        folders = [path.name for path in store.store.folder.iterdir() if path.is_dir()]
        assert len(folders) == 4
        assert not [name for name in folders if not name.startswith("cut-")]


async def test_a_disk_that_lacks_the_complete_cut_keeps_its_own_newest(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
        store.steps(2)
        assert await store.cut_at(2, complete=1) == dict.fromkeys(HOMES, (1, 2))
        store.steps(8)
        assert await store.cut_at(8, complete=6) == dict.fromkeys(HOMES, (2, 8))


async def test_a_clock_that_a_bundle_has_passed_is_reported_and_costs_no_cut(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
        store.step("ps-1", 2)
        store.step("ps-1", 3)
        assert await store.cut_at(2, complete=1) == dict.fromkeys(HOMES, (1,))
        assert store.cuts.report.passed == 3
        assert {bundle.cut for bundle in store.bundles.values()} == {None}
        store.step("ps-0", 3)
        assert await store.cut_at(3, complete=1) == dict.fromkeys(HOMES, (1, 3))
        assert store.cuts.report.passed == 0


async def test_a_clock_that_is_named_anew_ends_the_wait_for_the_one_before(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        store.name(90)
        await until(lambda: all(bundle.cut is not None for bundle in store.bundles.values()))
        assert await store.cut_at(1) == dict.fromkeys(HOMES, (1,))


async def test_shards_that_are_replaced_in_a_cut_leave_the_cut_before(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
        store.name(2, complete=1)
        await until(lambda: store.bundles["ps-0"].cut is not None)
        before = store.bundles["ps-0"]
        specs = [shard.spec for shard in before.shards.values()]
        store.bundles["ps-0"] = new_bundle(store.record, specs, (Sgd(),))
        before.end_cut()
        store.cuts.moved()
        store.step("ps-1", 2)
        await store.handled()
        assert store.on_disk() == {"ps-0": (1,), "ps-1": (1, 2)}


async def test_a_full_disk_keeps_the_cut_before_and_takes_the_next_one_once_it_has_room(
    tmp_path, monkeypatch
):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
        with monkeypatch.context() as patch:

            async def refuse(*_, **__):
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(store.disk.ports.states, "make_folder", refuse)
            store.steps(2)
            assert await store.cut_at(2, complete=1) == dict.fromkeys(HOMES, (1,))
        assert store.cuts.statistics(store.store._segments.statistics()).is_full
        assert [text for text in store.notices if "takes no cut: No space left" in text]
        store.steps(3)
        assert await store.cut_at(3, complete=1) == dict.fromkeys(HOMES, (1, 3))
        assert store.notices[-1].endswith("has room again, and takes cuts")
        assert not store.store.statistics().is_full


async def test_a_sum_without_memory_for_its_copy_costs_the_cut_and_no_later_one(tmp_path, monkeypatch):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
        store.name(2, complete=1)
        await until(lambda: all(bundle.cut is not None for bundle in store.bundles.values()))
        with monkeypatch.context() as patch:
            patch.setattr("adam_async.parameter_server.kept_shards.copy_shard", _no_memory)
            bundle = store.bundles["ps-0"]
            bundle.cut.keep(bundle.shards.values())
        store.steps(3)
        await store.handled()
        assert store.on_disk() == {"ps-0": (1,), "ps-1": (1, 2)}
        assert [text for text in store.notices if "takes no cut: no memory is left" in text]
        assert await store.cut_at(3, complete=1) == dict.fromkeys(HOMES, (1, 3))


def _no_memory(shard, **_):
    raise MemoryError


async def test_a_disk_that_fails_ends_the_server(tmp_path, monkeypatch):
    with pytest.raises(ExceptionGroup) as failed:
        async with stores(tmp_path) as store:

            async def fail(*_, **__):
                raise OSError(errno.EIO, "Input/output error")

            monkeypatch.setattr(store.disk.ports.states, "rename", fail)
            store.steps(1)
            store.name(1)
            await asyncio.Event().wait()
    assert isinstance(first_cause(failed.value), DiskFailed)


async def test_a_disk_that_takes_no_piece_gives_the_cut_up_and_sums_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("adam_async.parameter_server.store_cuts.PIECE_S", 0.05)
    monkeypatch.setattr("adam_async.parameter_server.kept_shards.COPIES_BYTES", 1)
    async with stores(tmp_path) as store:
        make, hangs = store.disk.ports.states.append_made, asyncio.Event()

        async def hang(*arguments):
            await hangs.wait()
            return await make(*arguments)

        monkeypatch.setattr(store.disk.ports.states, "append_made", hang)
        store.steps(1)
        store.name(1)
        await store.handled()
        hangs.set()
        assert {bundle.cut for bundle in store.bundles.values()} == {None}
        store.steps(2)
        assert [text for text in store.notices if "takes no cut" in text]


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "renamed"])
async def test_a_damaged_cut_does_not_count_and_the_one_before_does(tmp_path, damage):
    async with stores(tmp_path / "a") as store:
        for clock in (1, 2):
            store.steps(clock)
            await store.cut_at(clock, complete=1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        name = store.store.folder.name
    (newest,) = [
        path
        for path in (tmp_path / "b" / name).glob("cut-*-000000000000002")
        if path.name.startswith(cut_of("ps-1"))
    ]
    file = newest / "states-00000001.segment"
    match damage:
        case "torn":
            file.write_bytes(file.read_bytes()[:-1])
        case "flipped":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        case "missing":
            file.unlink()
        case "renamed":
            newest.rename(newest.with_name(newest.name[:-1] + "9"))
    async with opened_disk(tmp_path / "b", flush_s=1.0) as disk:
        (again,) = disk
        pieces = {(piece.home, piece.position) for piece in again.saved().pieces}
    assert pieces == {("ps-0", 1), ("ps-0", 2), ("ps-1", 1)}
    assert await values_on_disk(tmp_path / "b", 1) == {1}


def cut_of(home):
    from pathlib import Path

    from adam_async.parameter_server.cut_folder import cut_path

    return cut_path(Path(), home, 0).name[:-15]


async def test_an_unfinished_cut_is_removed_at_the_next_opening(tmp_path):
    async with stores(tmp_path / "a") as store:
        store.steps(1)
        await store.cut_at(1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        folder = tmp_path / "b" / store.store.folder.name
    unfinished = folder / "removed-cut-0123"
    shutil.copytree(next(folder.glob("cut-*")), unfinished)
    assert await values_on_disk(tmp_path / "b", 1) == {1}
    assert not unfinished.exists()


async def test_the_cuts_of_another_placement_of_the_store_do_not_count(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
    async with stores(tmp_path, generation=RECORD.generation + 1) as store:
        assert store.on_disk() == {}


async def test_a_server_that_ends_writes_the_present_values_beside_the_complete_cut(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
        store.steps(2)
        await store.cut_at(2, complete=1)
        store.steps(7)
    assert await values_on_disk(tmp_path, 7) == {7}
    assert await values_on_disk(tmp_path, 1) == {1}


async def test_a_server_that_ends_with_bundles_at_several_clocks_keeps_the_cut_before(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
        store.step("ps-0", 2)
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        (again,) = disk
        assert {piece.position for piece in again.saved().pieces} == {1}


async def test_the_record_of_the_run_on_the_disk_is_never_older_than_a_cut(tmp_path):
    """A cut may have groups of an epoch that an older record does not know."""
    async with stores(tmp_path / "a") as store:
        store.steps(1)
        store.name(2)
        await until(lambda: all(bundle.cut is not None for bundle in store.bundles.values()))
        store.store.note_run(replace(RunRecord(program=run_record("run-1")), ended=1), 2)
        store.steps(2)
        await store.handled()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    async with opened_disk(tmp_path / "b", flush_s=1.0) as disk:
        (again,) = disk
        assert again.run.ended == 1


async def test_counts_and_age_are_those_of_the_newest_complete_cut(tmp_path):
    async with stores(tmp_path) as store:
        store.steps(1)
        await store.cut_at(1)
        counts = store.store.statistics()
        assert (counts.rounds, counts.writes, counts.updates) == (1, 2, 2)
        assert counts.on_disk_as_of is None, "no server has reported the cut yet"
        assert np.isclose(counts.state_bytes, counts.written_bytes, rtol=1.0)


COPIES = {"ps-0": ["ps-0", "ps-1"], "ps-1": ["ps-1", "ps-0"]}


def map_with(**reports):
    """A map of two bundles with two copies each; a server reports under its name with an underscore."""
    cluster = bundle_map(COPIES, copies=2)
    (store,) = cluster.stores.values()
    nodes = dict(cluster.nodes)
    for name, report in reports.items():
        node = nodes[name.replace("_", "-")]
        value = msgspec.to_builtins(report) if isinstance(report, CutReport) else report
        nodes[name.replace("_", "-")] = replace(node, info={CUTS: {served_word(store): value}})
    return replace(cluster, nodes=nodes), store


def complete(disks, **reports):
    cluster, store = map_with(**reports)
    return complete_clock(reports_in_sync(cluster, store, COPIES), disks=disks)


def test_a_clock_is_complete_once_enough_disks_have_each_bundle_at_it():
    first = CutReport(on_disk={"ps-0": (5, 9), "ps-1": (5,)})
    assert complete(1, ps_0=first) == 5
    assert complete(2, ps_0=first) == NO_CLOCK
    assert complete(2, ps_0=first, ps_1=CutReport(on_disk={"ps-0": (5,), "ps-1": (5, 9)})) == 5
    assert complete(1, ps_0=first, ps_1=CutReport(on_disk={"ps-0": (5,), "ps-1": (5, 9)})) == 9
    assert complete(1, ps_0=CutReport(on_disk={"ps-0": (5, 9)})) == NO_CLOCK
    assert complete_clock({}, disks=1) == NO_CLOCK


def test_fewer_members_in_sync_than_disks_are_enough():
    reports = {"ps-0": {"ps-0": CutReport(on_disk={"ps-0": (7,)})}}
    assert complete_clock(reports, disks=2) == 7


def test_only_the_present_incarnations_of_members_in_sync_count():
    cluster, store = map_with(ps_0=CutReport(on_disk={"ps-0": (5,), "ps-1": (5,)}))
    assert reports_in_sync(cluster, store, COPIES)["ps-1"].keys() == {"ps-0", "ps-1"}
    again = replace(cluster.nodes["ps-0"], incarnation=99)
    cluster = replace(cluster, nodes={**cluster.nodes, "ps-0": again})
    assert reports_in_sync(cluster, store, COPIES)["ps-1"].keys() == {"ps-1"}


def test_the_naming_with_the_highest_number_counts_also_of_a_server_that_is_lost():
    older, newer = NamedCut(3, 20, 10), NamedCut(4, 30, 20)
    cluster, store = map_with(ps_0=CutReport(named=newer), ps_1=CutReport(named=older))
    lost = replace(cluster.nodes["ps-0"], live=False)
    assert newest_named(replace(cluster, nodes={**cluster.nodes, "ps-0": lost}), store) == newer
    assert newest_named(map_with()[0], store) is None


@pytest.mark.parametrize(
    "value", ["text", {"handled": -1}, {"named": [1, 2]}, {"on_disk": {"ps-0": [-1]}}, {"passed": 1 << 48}]
)
def test_an_invalid_report_counts_as_none(value):
    cluster, store = map_with(ps_0=value)
    assert report_of(cluster.nodes["ps-0"], store) is None
