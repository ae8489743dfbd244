"""The folders of stores on the disk of one server: as another program may leave them, removed, superseded."""

import asyncio
import errno
import gc
import os
import shutil
import weakref

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from adam_async.errors import ConfigError, DataError, first_cause
from adam_async.model.rules import Sgd
from adam_async.parameter_server import store_disk
from adam_async.parameter_server.piece_states import (
    CATALOGUE,
    CONTENTS,
    Catalogue,
    catalogue_state,
    read_catalogue,
    read_run,
)
from adam_async.parameter_server.saved_stores import SavedStores
from adam_async.parameter_server.server_disk import SAVED, is_saved, opened_disk
from adam_async.parameter_server.storage import ShardStorage
from adam_async.parameter_server.store_disk import REMOVED, StoreDisk, folder_of
from adam_async.persistence.frames import frame_head
from adam_async.persistence.records import STATES, EntryKey, Identity, StateName, encode_start
from adam_async.run.run_record import RunRecord
from adam_async.run.store_record import ArrayRecord, served_word
from tests.adam_async.cluster_maps import UnknownRule, bundle_map, run_record, store_record
from tests.adam_async.parameter_server.copies import PIECES, Copy
from tests.adam_async.runs import turns, until

FILE = "states-00000001.segment"
ARRAYS = (ArrayRecord("w", (8,)),)


def catalogue_of(*, array=None, began=1.0, **fields):
    record = store_record("store-1", ARRAYS, **{"shard_bytes": 64, "buckets": ("ps-0",) * 64, **fields})
    return Catalogue("a-name", record, (array or ARRAYS[0],), began)


def parts_of(catalogue):
    return [memoryview(part) for part in catalogue_state(catalogue).parts]


def begun(folder, run="store-1"):
    """Write the first frame of a store's first file; returns its folder."""
    path = folder_of(folder, run)
    path.mkdir(parents=True)
    start = encode_start(STATES, 1, Identity(run=run, contents=CONTENTS))
    (path / FILE).write_bytes(frame_head([start], position=0, durable=0) + start)
    return path


async def test_a_folder_whose_only_file_has_a_damaged_start_is_refused_and_not_removed(tmp_path):
    path = begun(tmp_path)
    first = (path / FILE).read_bytes()
    later = frame_head([b"later"], position=len(first), durable=len(first)) + b"later"
    (path / FILE).write_bytes(first[:-1] + b"?" + later)
    with pytest.raises(DataError, match=f"is damaged: {FILE}"):
        async with opened_disk(tmp_path, flush_s=1.0):
            pass
    assert (path / FILE).stat().st_size == len(first) + len(later)


async def test_a_folder_whose_start_a_crash_tore_is_removed(tmp_path):
    path = begun(tmp_path)
    (path / FILE).write_bytes((path / FILE).read_bytes()[:-1])
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        assert list(disk) == []
    assert not path.exists()


async def test_the_removal_of_a_folder_of_empty_files_is_reported_with_its_consequence(tmp_path, caplog):
    path = begun(tmp_path)
    (path / FILE).write_bytes(b"")
    (folder_of(tmp_path, "without-a-file")).mkdir()
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        assert list(disk) == []
    (text,) = caplog.messages
    assert text.startswith(f"{path} is removed: its files are empty; ")
    assert text.endswith("the store of this folder does not exist any more")


@pytest.mark.parametrize("name", ["lock", FILE])
async def test_a_pipe_in_the_place_of_a_file_is_an_error_and_no_wait(tmp_path, name):
    path = begun(tmp_path)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(ConfigError, match=f"{path} cannot be .*: '{name}' is a pipe"):
        async with asyncio.timeout(5), opened_disk(tmp_path, flush_s=1.0):
            pass


async def test_other_folders_beside_those_of_stores_are_left_alone(tmp_path):
    (tmp_path / "store-photos").mkdir()
    (tmp_path / "store-photos" / "a.jpg").write_bytes(b"a picture")
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        assert list(disk) == []
    assert (tmp_path / "store-photos" / "a.jpg").read_bytes() == b"a picture"


async def test_the_folder_of_a_store_under_the_name_of_another_is_refused(tmp_path):
    path = begun(tmp_path)
    shutil.copytree(path, folder_of(tmp_path, "store-2"))
    with pytest.raises(ConfigError, match="has the states of store store-1, whose folder has another name"):
        async with opened_disk(tmp_path, flush_s=1.0):
            pass


async def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    folder_of(tmp_path, "store-1").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        async with opened_disk(tmp_path, flush_s=1.0):
            pass


def test_the_catalogue_of_a_placed_store_is_read():
    assert read_catalogue(parts_of(catalogue_of()), "a test") == catalogue_of()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"began": float("inf")}, "Expected `float`"),
        ({"began": float("nan")}, "Expected `float`"),
        ({"buckets": ("ps-0",)}, "the servers of 1 buckets instead of 64"),
        ({"shard_bytes": 0}, r"Expected `int` >= 8 - at `\$.record.shard_bytes`"),
        ({"shard_bytes": 8, "array": ArrayRecord("w", (1 << 40,))}, "shards; 100000 are the most"),
        ({"array": ArrayRecord("w", (8,), rule=1)}, "no rule 1"),
        ({"rules": (UnknownRule(),)}, "Invalid value 'unknown'"),
    ],
)
def test_a_catalogue_out_of_bounds_is_refused_with_the_reason(options, text):
    parts = [memoryview(msgspec.msgpack.encode(catalogue_of(**options)))]
    with pytest.raises(DataError, match=text):
        read_catalogue(parts, "a test")


def test_an_unreadable_record_of_a_run_is_refused_with_the_remedy():
    with pytest.raises(DataError, match=r"the record of the run in a-folder is not .* move the folder away"):
        read_run([memoryview(b"torn")], "a-folder")


async def test_a_removal_that_a_crash_cuts_short_leaves_no_store(tmp_path, monkeypatch):
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        store = disk.of("store")
        await store.reopen()

        async def fail_midway(folder):
            if folder.exists():
                raise OSError("the power fails")

        monkeypatch.setattr(disk.ports.states, "remove_folder", fail_midway)
        with pytest.raises(OSError, match="the power fails"):
            await store.remove()
        names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        assert names == [REMOVED + store.folder.name]
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        assert list(disk) == []
    assert not any(path.is_dir() for path in tmp_path.iterdir())


async def test_a_folder_that_cannot_be_removed_ends_no_server(tmp_path, monkeypatch):
    async def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    notices = []
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        disk.ports.notice = notices.append
        store = disk.of("store")
        await store.reopen()
        monkeypatch.setattr(disk.ports.states, "remove_folder", refuse)
        await disk.forget(store)
        assert disk.find("store") is None
    (notice,) = notices
    assert notice.startswith(f"{store.folder} is no longer needed and cannot be removed: Permission denied; ")


async def test_a_lock_that_cannot_be_made_is_an_error_with_the_folder(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(
        ConfigError, match=f"{tmp_path} cannot be used: Is a directory; give the server a folder"
    ):
        async with opened_disk(tmp_path, flush_s=1.0):
            pass


async def test_a_store_is_written_once_its_full_disk_has_room(tmp_path, monkeypatch):
    notices = []
    async with opened_disk(tmp_path / "disk", flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        disk.ports.notice = notices.append
        make, tries = disk.ports.states.make_folder, []

        async def make_after_two(folder):
            tries.append(folder)
            if len(tries) < 3:
                raise OSError(errno.ENOSPC, "No space left on device", str(folder))
            await make(folder)

        monkeypatch.setattr(disk.ports.states, "make_folder", make_after_two)
        store = disk.of("store-1")
        store.begin(catalogue_of(), lambda name, work: group.create_task(work, name=name))
        joined(store, "ps-0", ready={"ps-0"})
        await until(lambda: store.is_complete)
        await store.end(for_good=True)
    texts = [text for text in notices if "store-1" in text]
    assert texts == [
        f"{store.folder} cannot be made: the disk is full; store-1 is not written",
        f"{store.folder} is made, and store-1 is written",
    ]


async def test_a_server_that_ends_waits_for_a_disk_that_hangs_up_to_its_deadline(tmp_path, monkeypatch):
    notices, opening = [], asyncio.Event()
    monkeypatch.setattr(store_disk, "FLUSH_END_S", 0.05)

    async def make_never(folder):
        opening.set()
        await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(10), opened_disk(tmp_path / "disk", flush_s=0.01) as disk:
        disk.ports.notice = notices.append
        async with asyncio.TaskGroup() as group:
            monkeypatch.setattr(disk.ports.states, "make_folder", make_never)
            store = disk.of("store-1")
            store.begin(catalogue_of(), lambda name, work: group.create_task(work, name=name))
            await opening.wait()
            await disk.end()
    assert notices == [f"{store.folder} is not open after 0.05 s; store-1 is not written"]


@pytest.mark.parametrize(
    ("phase", "names", "versions", "goes"),
    [
        ("open", {}, 1, True),
        ("open", {}, 5, True),
        ("failed", {}, 1, True),
        # A client has replaced the failed store, whose states may be read.
        ("failed", {"a-name": "store-2"}, 1, False),
        # Another client may have replaced it in between, and left before its own store was open.
        ("failed", {}, 2, False),
        ("placing", {}, 1, False),
        ("loading", {}, 1, True),
        # It may have been open in between, and another client may read its states.
        ("loading", {}, 2, False),
        ("loading", {"a-name": "store-2"}, 1, False),
    ],
)
async def test_the_disk_forgets_stores_that_were_deleted_and_no_others(
    tmp_path, phase, names, versions, goes
):
    record = replace(catalogue_of().record, phase=phase)
    before = replace(bundle_map({"ps-0": ["ps-0"]}), stores={"a-name": record})
    after = replace(
        before,
        version=before.version + versions,
        stores={name: replace(record, id=id, phase="placing") for name, id in names.items()},
    )
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        saved = SavedStores(disk, node="ps-0", membership=None, spawn=None, notice=print)
        found = disk.of("store-1")
        assert saved._deleted(before, after) == ([found] if goes else [])


async def test_a_full_disk_under_files_that_are_there_ends_the_server(tmp_path, monkeypatch):
    async def refuse(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    begun(tmp_path / "disk")
    with pytest.raises(ExceptionGroup) as failure:
        async with opened_disk(tmp_path / "disk", flush_s=0.01) as disk, asyncio.TaskGroup() as group:
            monkeypatch.setattr(disk.ports.states, "make_folder", refuse)
            store = disk.of("store-1")
            store.begin(catalogue_of(), lambda name, work: group.create_task(work, name=name))
            await asyncio.Event().wait()
    assert "No space left on device" in str(first_cause(failure.value))


async def test_a_store_begins_after_the_one_that_it_replaces_although_the_clock_was_set_back(tmp_path):
    _, record = map_with()
    async with opened_disk(tmp_path, flush_s=0.01) as disk, asyncio.TaskGroup() as group:

        def spawn(name, work):
            return group.create_task(work, name=name)

        disk.ports.wall_clock = lambda: 1000.0
        saved = SavedStores(disk, node="ps-0", membership=pytest.fail, spawn=spawn, notice=print)
        earlier = disk.of("an-earlier-store")
        await earlier.reopen()
        earlier.begin(catalogue_of(began=5000.0), spawn)
        assert saved._begins("a-name", record) > 5000.0
        assert saved._begins("another-name", record) == 1000.0
        await earlier.end(for_good=True)


def map_with(*reports):
    """A map with a store of two bundles that some servers have reported to be on their disks."""
    cluster = bundle_map({"ps-0": ["ps-0"], "ps-1": ["ps-1"]}, copies=1)
    (store,) = cluster.stores.values()
    for name in ("ps-0", "ps-1"):
        words = [served_word(store)] if name in reports else []
        node = msgspec.structs.replace(cluster.nodes[name], info={SAVED: words})
        cluster = msgspec.structs.replace(cluster, nodes={**cluster.nodes, name: node})
    return cluster, store


@pytest.mark.parametrize("last", [False, True])
def test_a_store_supersedes_another_one_once_all_primaries_have_reported_it(last):
    assert is_saved(*map_with("ps-0", *["ps-1"] * last)) is last


ENTRY = [[np.ones(4, np.uint8)]]


def joined(store, home, *, ready):
    """Let a bundle join a store; `ready` has the homes whose values are whole."""
    bundle = Copy(Sgd()).bundle
    saver = store.saver(home, PIECES)
    saver.is_ready = lambda: home in ready
    saver.wake = lambda: saver.copy_requested(bundle, lambda piece: (1, 1))
    return saver


async def test_a_primary_appends_no_entry_of_a_bundle_before_its_pieces_are_on_the_disk(tmp_path):
    ready = {"ps-0"}
    async with opened_disk(tmp_path / "disk", flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        store = disk.of("store-1")
        await store.reopen()
        store.begin(catalogue_of(durable=True), lambda name, work: group.create_task(work, name=name))
        joined(store, "ps-0", ready=ready)
        store.whole()
        await store.append(EntryKey("ps-0", 1, 1), ENTRY, of_primary=True)
        joined(store, "ps-1", ready=ready)
        later = group.create_task(store.append(EntryKey("ps-1", 1, 1), ENTRY, of_primary=True), name="later")
        await store.append(EntryKey("ps-0", 2, 1), ENTRY, of_primary=True)
        assert not later.done()
        ready.add("ps-1")
        await later
        crashed = StoreDisk("store-1", folder_of(tmp_path / "crash", "store-1"), disk.ports)
        shutil.copytree(store.folder, crashed.folder)
        segments = crashed._new_segments()  # `reopen` would apply the entry, which is none
        async with segments.opened():
            found = segments.recovery
        await store.end(for_good=True)

    assert {name.shard for name in found.states if name.home == "ps-1"} == set(range(len(PIECES)))
    assert len(found.entries["ps-1"]) == 1


async def test_a_primary_appends_no_entry_while_a_full_disk_lacks_the_record_of_its_run(
    tmp_path, monkeypatch
):
    async with opened_disk(tmp_path, flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        store = disk.of("store-1")
        await store.reopen()
        catalogue = catalogue_of(durable=True, program="run-1")
        store.begin(catalogue, lambda name, work: group.create_task(work, name=name))
        record = RunRecord(program=run_record())
        store.note_run(record, 1)
        joined(store, "ps-0", ready={"ps-0"})
        store.whole()
        await store.append(EntryKey("ps-0", 1, 1), ENTRY, of_primary=True)
        append, room, tries = disk.ports.states.append_made, asyncio.Event(), []

        async def append_if_there_is_room(*arguments):
            if not room.is_set():
                tries.append(arguments)
                raise OSError(errno.ENOSPC, "No space left on device")
            return await append(*arguments)

        monkeypatch.setattr(disk.ports.states, "append_made", append_if_there_is_room)
        store.note_run(replace(record, ended=1), 2)
        entry = group.create_task(store.append(EntryKey("ps-0", 2, 1), ENTRY, of_primary=True), name="entry")
        await until(lambda: len(tries) > 2)
        # An append of the primary would come before this one.
        await store.append(EntryKey("ps-0", 3, 1), ENTRY, of_primary=False)
        assert not entry.done()
        room.set()
        await entry
        await store.end(for_good=True)


async def test_a_primary_appends_no_entry_before_all_primaries_have_the_store_on_their_disks(tmp_path):
    """An earlier store comes back until then."""
    _, record = map_with()
    async with opened_disk(tmp_path, flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        saved = SavedStores(disk, node="ps-0", membership=pytest.fail, spawn=pytest.fail, notice=print)
        store = disk.of(record.id)
        await store.reopen()
        store.begin(catalogue_of(durable=True), lambda name, work: group.create_task(work, name=name))
        joined(store, "ps-0", ready={"ps-0"})
        entry = group.create_task(store.append(EntryKey("ps-0", 1, 1), ENTRY, of_primary=True), name="entry")
        await store._completed.wait()  # the pieces are on this disk
        for position, reports in enumerate([(), ("ps-0",), ("ps-0", "ps-1")], 2):
            saved.follow(map_with(*reports)[0])
            await asyncio.sleep(0)
            # An append of the primary would come before this one.
            await store.append(EntryKey("ps-0", position, 1), ENTRY, of_primary=False)
            assert entry.done() is (len(reports) == 2)
        await store.end(for_good=True)


async def test_a_bundle_may_leave_a_store_whose_full_disk_has_no_folder_yet(tmp_path, monkeypatch):
    async def refuse(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    async with opened_disk(tmp_path / "disk", flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        monkeypatch.setattr(disk.ports.states, "make_folder", refuse)
        store = disk.of("store-1")
        store.begin(catalogue_of(), lambda name, work: group.create_task(work, name=name))
        joined(store, "ps-0", ready={"ps-0"})
        leaves = joined(store, "ps-1", ready={"ps-1"})
        assert not store.left(leaves)
        await store.part(leaves)
        assert set(store._savers) == {"ps-0"}
        await store.end(for_good=True)


async def test_a_bundle_that_leaves_as_the_store_ends_fails_no_server(tmp_path, monkeypatch):
    written, may_write = asyncio.Event(), asyncio.Event()
    async with opened_disk(tmp_path / "disk", flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        store = disk.of("store-1")
        await store.reopen()
        store.begin(catalogue_of(), lambda name, work: group.create_task(work, name=name))
        stays, leaves = (joined(store, home, ready={"ps-0", "ps-1"}) for home in ("ps-0", "ps-1"))
        await until(lambda: store.is_complete)
        append = disk.ports.states.append_made

        async def held(*arguments):
            written.set()
            await may_write.wait()
            return await append(*arguments)

        monkeypatch.setattr(disk.ports.states, "append_made", held)
        stays.all_touched()
        ending = group.create_task(store.end(for_good=True), name="ending")
        await written.wait()
        stays.all_touched()
        store.left(leaves)
        parting = group.create_task(store.part(leaves), name="parting")
        await asyncio.sleep(0)
        may_write.set()
        await ending
        await parting
        assert store._left == set()


@pytest.mark.parametrize("comes_back", [False, True])
async def test_rounds_are_complete_after_one_of_two_bundles_has_left(tmp_path, comes_back):
    ready = {"ps-0", "ps-1"}
    async with opened_disk(tmp_path, flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        store = disk.of("store-1")
        await store.reopen()
        store.begin(catalogue_of(durable=True), lambda name, work: group.create_task(work, name=name))
        stays, leaves = joined(store, "ps-0", ready=ready), joined(store, "ps-1", ready=ready)
        await until(lambda: store.is_complete)
        leaves.all_touched()
        assert not store.left(leaves)
        if comes_back:
            leaves = joined(store, "ps-1", ready=ready)
        else:
            ready.discard("ps-1")  # the values are gone before the disk asks for them
        await store.part(leaves if not comes_back else next(iter(store._left)))
        assert store._left == set()
        assert set(store._savers) == {"ps-0", "ps-1"} if comes_back else {"ps-0"}
        rounds = store.statistics().rounds
        stays.all_touched()
        await until(lambda: store.statistics().rounds > rounds and not store.statistics().dirty)
        assert store.position_of(StateName("ps-1", 0)) is not None
        await store.end(for_good=True)


async def test_the_catalogue_of_the_last_placement_counts(tmp_path):
    async with opened_disk(tmp_path, flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        store = disk.of("store-1")
        await store.reopen()
        for generation in (1, 2):
            placed = catalogue_of(generation=generation)
            store.begin(placed, lambda name, work: group.create_task(work, name=name))
            saver = joined(store, "ps-0", ready={"ps-0"})
            await until(lambda: store.is_complete)
            store.left(saver)
            await store.retire(is_over=True)
            assert store.catalogue.record == placed.record


async def test_damage_that_is_found_when_a_bundle_leaves_costs_its_store_and_not_the_server(tmp_path):
    notices = []
    async with opened_disk(tmp_path / "disk", flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        disk.ports.notice = notices.append
        store = disk.of("store-1")
        await store.reopen()
        store.begin(catalogue_of(), lambda name, work: group.create_task(work, name=name))
        saver = joined(store, "ps-0", ready={"ps-0"})
        await until(lambda: store.is_complete)
        store.catalogue = catalogue_of(buckets=("ps-0",), generation=1)  # no server writes such a record
        store._segments.mark(CATALOGUE, 1, 0)
        assert store.left(saver)
        store.note_run(RunRecord(program=run_record()), 1)
        await store.retire(is_over=False)
        assert not store.is_saved
        store.note_run(RunRecord(program=run_record(), ended=1), 2)
    assert "store store-1 cannot be read from the disk" in [text.split(":")[0] for text in notices]


async def test_a_disk_keeps_no_memory_of_a_run_in_place_after_its_last_write(tmp_path):
    async with opened_disk(tmp_path, flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        store, storage = disk.of("store-1"), ShardStorage((), Sgd(), in_place=True)
        store.begin(catalogue_of(), lambda name, work: group.create_task(work, name=name))
        saver = joined(store, "ps-0", ready={"ps-0"})
        store.still, kept = storage.still, weakref.ref(storage)
        del storage
        await until(lambda: store.is_complete)
        assert kept() is not None
        assert store.left(saver)
        await store.retire(is_over=False)
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize("is_early", [True, False], ids=["during the last write", "during the reading"])
async def test_a_store_may_come_back_before_its_first_write(tmp_path, monkeypatch, is_early):
    """Its disk is full, so the folder has no record of the store when it is read."""
    async with opened_disk(tmp_path, flush_s=0.01) as disk, asyncio.TaskGroup() as group:

        def spawn(name, work):
            return group.create_task(work, name=name)

        states, room, reading, go_on = disk.ports.states, asyncio.Event(), asyncio.Event(), asyncio.Event()
        make, append = states.make_folder, states.append_made

        async def append_if_there_is_room(*arguments):
            if not room.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            return await append(*arguments)

        async def make_later(folder):
            reading.set()
            await go_on.wait()
            await make(folder)

        def come_back():
            store.begin(catalogue_of(began=2.0), spawn)
            joined(store, "ps-0", ready={"ps-0"})

        monkeypatch.setattr(states, "append_made", append_if_there_is_room)
        store = disk.of("store-1")
        store.begin(catalogue_of(), spawn)
        saver = joined(store, "ps-0", ready={"ps-0"})
        await until(lambda: store.is_serving)
        assert store.left(saver)
        monkeypatch.setattr(states, "make_folder", make_later)
        retiring = spawn("retires", store.retire(is_over=False))
        if is_early:
            await turns()
            come_back()
        await reading.wait()
        if not is_early:
            come_back()
        go_on.set()
        room.set()
        await retiring
        await until(lambda: store.is_complete)
        assert store.catalogue.began == (1.0 if is_early else 2.0)
        await store.end(for_good=True)
