"""A segment store as its owner uses it: rounds, entries, recovery, and the counts of both."""

import asyncio

import pytest

from adam_async.errors import ConfigError, DiskFailed
from adam_async.persistence.opening import read_identity
from adam_async.persistence.records import (
    LEADING,
    EntryKey,
    FlushSettings,
    Identity,
    OtherContents,
    OtherFormat,
    OtherRun,
    StateName,
)
from adam_async.runtime.disk import Disk
from tests.adam_async.persistence.disks import Running, failing_disk, flip, on_a_node
from tests.adam_async.persistence.owners import (
    HOME,
    IDENTITY,
    SMALL,
    Owner,
    content,
    contents_in,
    files_of,
    store_of,
)
from tests.worlds import inside


async def states_in(store):
    """Return the content of each recovered state."""
    return {name: tuple(map(bytes, (await store.read_state(name))[1])) for name in store.recovery.states}


async def reopened(node):
    """Return the recovery of the folder, and the content of its states."""
    async with store_of(node.open_disk(), Owner("a")).opened() as store:
        return store.recovery, await states_in(store)


@inside(on_a_node)
async def test_a_flushed_state_comes_back_with_its_key_and_parts(node):
    owner = Owner("a", "b")
    async with Running(store_of(node.open_disk(), owner)) as store:
        assert not store.recovery.states
        assert not store.recovery.entries
        for shard in (1, 2, 3):
            owner.update(store, "a", shard, updates=2)
        owner.update(store, "b", 1)
        await store.flush()
    recovery, states = await reopened(node)
    assert states == {
        StateName("a", 1): content(StateName("a", 1), 2),
        StateName("a", 2): content(StateName("a", 2), 2),
        StateName("a", 3): content(StateName("a", 3), 2),
        StateName("b", 1): content(StateName("b", 1), 1),
    }
    key = recovery.states[StateName("a", 2)]
    assert (key.generation, key.position, key.version) == (1, 6, 2)
    assert recovery.as_of >= 1e9
    assert (recovery.torn, recovery.damages, recovery.lost) == ((), (), ())


async def test_a_store_works_on_a_real_disk(tmp_path):
    owner = Owner("a")
    path = tmp_path / "deep" / "folder"
    async with Disk(private=True) as disk, Disk(private=True) as other:
        async with Running(store_of(disk, owner, entries_disk=other, path=path)) as store:
            store = store
            owner.update(store, "a", 1, updates=3)
            await store.append_durably(EntryKey("a", 3, 1), [b"", b"entry"])
            await store.flush()
        assert (path / "states-00000001.segment").stat().st_mode & 0o777 == 0o600
        async with store_of(disk, owner, entries_disk=other, path=path).opened() as store:
            assert await states_in(store) == {StateName("a", 1): content(StateName("a", 1), 3)}
            assert store.recovery.entries == {}
        assert await read_identity(disk, path) == IDENTITY


class Recorder(Owner):
    """An owner with a record of its own, which has a version for each update of a shard so far."""

    store = None
    races = 0

    def update(self, store, home, shard, updates=1):
        for _ in range(updates):
            super().update(store, LEADING, 0)
            super().update(store, home, shard)

    async def take(self, name):
        if name.home != LEADING and self.races:  # an update comes while the round waits for its copy
            self.races -= 1
            self.update(self.store, name.home, name.shard)
        return await super().take(name)


@inside(on_a_node)
async def test_no_state_on_the_disk_is_newer_than_the_record_of_the_owner_wherever_the_file_is_cut(node):
    owner = Recorder(LEADING, "a")
    disk, known = node.open_disk(), []
    async with Running(store_of(disk, owner, settings=FlushSettings())) as store:
        owner.store = store
        for number in range(8):
            owner.races = number % 3
            for shard in (1, 2):
                owner.update(store, "a", shard)
            await store.flush()
    name = "states-00000001.segment"
    data = await disk.read_bytes(HOME / name)
    for cut in range(len(data)):
        newest = [key for key, _ in contents_in({name: data[:cut]}).states.values()]
        known.append(max([key.version for key in newest if key.home == LEADING], default=0))
        assert max([key.position for key in newest if key.home == "a"], default=0) <= known[-1]
    assert known[-1] > 16


@inside(on_a_node)
async def test_updates_between_two_rounds_cost_one_write(node):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        for _ in range(100):
            owner.update(store, "a", 1)
            owner.update(store, "a", 2)
            await asyncio.sleep(0.05)
        await store.flush()
        counts = store.statistics()
    assert counts.updates == 200
    assert counts.rounds <= 7
    assert counts.writes <= 2 * counts.rounds
    assert counts.writes <= min(counts.updates, 2 * (5 + 1))


@inside(on_a_node)
async def test_an_update_is_on_disk_within_one_period_and_the_age_of_the_oldest_one_is_reported(node):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        await asyncio.sleep(5.0)
        assert store.statistics().rounds == 0
        for _ in range(40):
            owner.update(store, "a", 1)
            await asyncio.sleep(0.1)
            counts = store.statistics()
            assert counts.dirty_age_s < 1.2
        assert counts.dirty == 1
        assert counts.on_disk_as_of == pytest.approx(1e9 + asyncio.get_running_loop().time(), abs=1.2)
        await asyncio.sleep(1.5)
        counts = store.statistics()
        assert (counts.dirty, counts.dirty_age_s) == (0, 0.0)
        assert counts.on_disk_as_of == 1e9 + asyncio.get_running_loop().time()


@inside(on_a_node)
async def test_many_dirty_bytes_begin_a_round_after_half_the_time(node):
    owner = Owner("a")
    async with Running(
        store_of(node.open_disk(), owner, settings=FlushSettings(flush_s=1.0, dirty_bytes=2000))
    ) as store:
        owner.update(store, "a", 1)
        await asyncio.sleep(0.4)
        owner.update(store, "a", 2)
        await asyncio.sleep(0.3)
        assert store.statistics().rounds == 1
        owner.update(store, "a", 1)
        owner.update(store, "a", 2)
        await asyncio.sleep(0.1)
        assert store.statistics().rounds == 1
        await asyncio.sleep(0.4)
        assert store.statistics().rounds == 2


@inside(on_a_node)
async def test_one_round_needs_one_sync(node):
    owner = Owner("a")
    disk = failing_disk(node)
    async with Running(store_of(disk, owner, settings=FlushSettings(batch_bytes=100))) as store:
        owner.update(store, "a", 1)
        await store.flush()
        disk.calls.clear()
        for shard in range(6):
            owner.update(store, "a", shard)
        await store.flush()
        assert disk.calls.count("sync_file") == 1
        assert disk.calls.count("append_made") > 3


@inside(on_a_node)
async def test_entries_that_wait_together_share_a_sync_and_none_is_acknowledged_before_it(node):
    disk = failing_disk(node)
    async with Running(store_of(disk, Owner("a"))) as store:
        await store.append_durably(EntryKey("a", 1, 1), [b"first"])
        disk.calls.clear()
        before = []

        async def append(position):
            await store.append_durably(EntryKey("a", position, 1), [b"entry", b"%d" % position])
            before.append((position, disk.calls.count("sync_file")))

        async with asyncio.TaskGroup() as group:
            for position in range(2, 12):
                group.create_task(append(position))
        assert before == [(position, 1) for position in range(2, 12)]
    async with store_of(node.open_disk(), Owner("a")).opened() as store:
        keys = store.recovery.entries["a"]
        assert [key.position for key in keys] == list(range(1, 12))
        assert [bytes(part) for part in await store.read_entry(keys[4])] == [b"entry", b"5"]


@inside(on_a_node)
async def test_a_complete_round_makes_applied_entries_superfluous_and_no_others(node):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        for position in range(1, 6):
            await store.append_durably(EntryKey("a", position, 1), [b"entry"])
        owner.update(store, "a", 1, updates=3)
        await store.flush()
        owner.update(store, "a", 2)
        owner.unready = {StateName("a", 2)}
        await store.flush()
    recovery, _ = await reopened(node)
    assert [key.position for key in recovery.entries["a"]] == [4, 5]


@inside(on_a_node)
async def test_an_entry_of_a_newer_generation_ends_older_ones_behind_it(node):
    async with Running(store_of(node.open_disk(), Owner("a"))) as store:
        for position, generation in ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (3, 3)):
            await store.append_durably(EntryKey("a", position, generation), [b"%d" % generation])
    async with store_of(node.open_disk(), Owner("a")).opened() as store:
        keys = store.recovery.entries["a"]
        assert [(key.position, key.generation) for key in keys] == [(1, 1), (2, 2), (3, 3)]
        assert [bytes((await store.read_entry(key))[0]) for key in keys] == [b"1", b"2", b"3"]
    async with Running(store_of(node.open_disk(), Owner("a"))) as store:
        await store.append_durably(EntryKey("a", 1, 4), [b""])
    recovery, _ = await reopened(node)
    assert recovery.entries["a"] == (EntryKey("a", 1, 4),)


@inside(on_a_node)
async def test_a_newer_generation_is_newer_at_any_position(node):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "a", 1, updates=5)
        await store.flush()
        owner.bundles["a"].generation = 2
        owner.bundles["a"].history = [(1,), (1,)]
        owner.bundles["a"].versions.clear()
        owner.apply(store, "a", 2)
        await store.flush()
    recovery, _ = await reopened(node)
    assert recovery.states[StateName("a", 1)].order == (2, 2)


@inside(on_a_node)
async def test_a_state_that_cannot_be_taken_stays_dirty_and_on_disk(node):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "a", 1)
        await store.flush()
        as_of = store.statistics().on_disk_as_of
        owner.update(store, "a", 1)
        owner.unready = {StateName("a", 1)}
        await asyncio.sleep(5.0)
        counts = store.statistics()
        assert counts.dirty == 1
        assert counts.dirty_age_s > 4.0
        assert counts.on_disk_as_of == pytest.approx(as_of, abs=0.1)
        key, _ = contents_in(files_of(node.disk_model)).states[StateName("a", 1)]
        assert key.version == 1
        owner.unready.clear()
        await asyncio.sleep(1.5)
        assert store.statistics().dirty == 0


@inside(on_a_node)
async def test_a_forgotten_bundle_does_not_come_back_and_needs_no_room(node):
    owner = Owner("a", "b")
    async with Running(store_of(node.open_disk(), owner)) as store:
        for home in "ab":
            await store.append_durably(EntryKey(home, 9, 1), [b"entry"])
            for shard in range(6):
                owner.update(store, home, shard)
        await store.flush()
        live = store.statistics().live_bytes
        store.forget("a")
        assert store.statistics().live_bytes < live
        await store.flush()
    recovery, states = await reopened(node)
    assert {name.home for name in states} == {"b"}
    assert recovery.entries.keys() == {"b"}
    assert (recovery.damages, recovery.lost) == ((), ())


@pytest.mark.parametrize("is_ready", [False, True])
@inside(on_a_node)
async def test_a_bundle_that_is_forgotten_while_a_state_is_copied_stays_forgotten(node, is_ready):
    owner = Owner("a", "b")
    copied, go_on = asyncio.Event(), asyncio.Event()
    take = owner.take

    async def take_slowly(name):
        state = await take(name)
        if name.home == "a":
            copied.set()
            await go_on.wait()
        return state if is_ready else None

    owner.take = take_slowly
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "a", 1)
        flushed = asyncio.ensure_future(store.flush())
        await copied.wait()
        store.forget("a")
        go_on.set()
        await flushed
        assert store.statistics().dirty == 0
    recovery, _ = await reopened(node)
    assert recovery.states == {}


@inside(on_a_node)
async def test_states_of_a_forgotten_bundle_are_not_dirty_after_a_full_disk(node):
    owner = Owner("a", "b")
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "b", 1)
        await store.flush()
        owner.update(store, "a", 1)
        owner.update(store, "b", 1)
        node.disk_model.capacity_bytes = node.disk_model.used_bytes + 20
        node.disk_conditions.step_s = 0.1
        flushed = asyncio.ensure_future(store.flush())
        await asyncio.sleep(0.05)
        store.forget("a")
        await flushed
        assert store.statistics().dirty == 1


@inside(on_a_node)
async def test_a_bundle_that_was_forgotten_may_begin_anew_with_older_positions(node):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "a", 1, updates=9)
        await store.flush()
        store.forget("a")
        owner.bundles = Owner("a").bundles
        owner.update(store, "a", 1)
        await store.append_durably(EntryKey("a", 2, 1), [b"entry"])
        await store.flush()
    recovery, states = await reopened(node)
    assert states == {StateName("a", 1): content(StateName("a", 1), 1)}
    assert recovery.entries["a"] == (EntryKey("a", 2, 1),)
    assert recovery.lost == ()


@inside(on_a_node)
async def test_a_state_older_than_the_one_on_disk_is_refused(node):
    owner = Owner("a")
    running = Running(store_of(node.open_disk(), owner))
    async with running as store:
        owner.update(store, "a", 1, updates=9)
        await store.flush()
        owner.bundles = Owner("a").bundles
        owner.update(store, "a", 1)
        with pytest.raises(ValueError, match=r"is older than .* forget the bundle before it begins"):
            await running.ended


@inside(on_a_node)
async def test_files_stay_within_twice_the_states_and_one_file_more_and_so_do_the_bytes_written(node):
    owner = Owner("a")
    owner.bundles["a"].shards = 40
    async with Running(store_of(node.open_disk(), owner)) as store:
        for shard in range(40):
            owner.update(store, "a", shard)
        await store.flush()
        for turn in range(300):
            # Most updates change few shards, so all others become cold.
            owner.update(store, "a", turn % 3)
            owner.update(store, "a", (turn * 7) % 40 if turn % 10 == 0 else 3)
            await store.flush()
        counts = store.statistics()
    assert counts.compaction_writes > 10
    assert counts.compaction_bytes <= counts.state_bytes
    assert counts.disk_bytes <= 2 * counts.live_bytes + 2 * SMALL.segment_bytes
    assert counts.amplification < 2.5  # with heads and tables, which are large beside states this small
    recovery, states = await reopened(node)
    assert states == {name: content(name, key.version) for name, key in recovery.states.items()}
    assert len(states) == 40


@inside(on_a_node)
async def test_compaction_copies_states_from_disk_if_the_owner_has_none(node):
    owner = Owner("a", "b")
    async with Running(store_of(node.open_disk(), owner)) as store:
        for shard in range(6):
            owner.update(store, "b", shard)
        await store.flush()
        owner.unready = set(owner.bundles["b"].names())
        for _ in range(100):
            owner.update(store, "a", 1)
            owner.update(store, "a", 2)
            await store.flush()
        counts = store.statistics()
    assert counts.compaction_writes >= 6
    assert "states-00000001.segment" not in files_of(node.disk_model)
    _, states = await reopened(node)
    assert len([name for name in states if name.home == "b"]) == 6


@inside(on_a_node)
async def test_rot_found_by_compaction_is_reported_and_not_copied(node):
    owner, notices = Owner("a", "b"), []
    async with Running(store_of(node.open_disk(), owner, notice=notices.append)) as store:
        owner.update(store, "b", 1)
        await store.flush()
        position = files_of(node.disk_model)["states-00000001.segment"].index(b"b/1 v1")
        flip(node.disk_model, HOME / "states-00000001.segment", position)
        owner.unready = {StateName("b", 1)}
        for _ in range(150):
            owner.update(store, "a", 1)
            owner.update(store, "a", 2)
            await store.flush()
    (notice,) = notices
    assert "states-00000001.segment is damaged at byte" in notice
    recovery, states = await reopened(node)
    assert StateName("b", 1) not in states
    assert [each.name for each in recovery.lost] == [StateName("b", 1)]


@pytest.mark.parametrize(
    ("identity", "error", "text"),
    [
        (Identity(run="run-2", contents=3), OtherRun, "has states of 'run-1', not of 'run-2'; go on with"),
        (Identity(run="run-1", contents=2), OtherContents, "encoding 3, and this release reads 2; start the"),
    ],
)
@inside(on_a_node)
async def test_a_folder_of_another_owner_is_refused_and_left_as_it_is(node, identity, error, text):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "a", 1)
        await store.flush()
    before = files_of(node.disk_model)
    with pytest.raises(error, match=text):
        async with store_of(node.open_disk(), owner, identity=identity).opened():
            pass
    assert files_of(node.disk_model) == before
    assert await read_identity(node.open_disk(), HOME) == IDENTITY


@pytest.mark.parametrize("format", [1, 3])
@inside(on_a_node)
async def test_a_folder_of_another_format_is_refused_and_left_as_it_is(node, monkeypatch, format):
    owner = Owner("a")
    with monkeypatch.context() as newer:
        newer.setattr("adam_async.persistence.records.FORMAT", format)
        async with Running(store_of(node.open_disk(), owner)) as store:
            owner.update(store, "a", 1)
            await store.flush()
    before = files_of(node.disk_model)
    with pytest.raises(
        OtherFormat, match=f"another release: its format is {format}, and this release reads 2; start that"
    ):
        async with store_of(node.open_disk(), owner).opened():
            pass
    with pytest.raises(OtherFormat):
        await read_identity(node.open_disk(), HOME)
    assert files_of(node.disk_model) == before


@inside(on_a_node)
async def test_a_second_server_is_refused_until_the_first_has_ended(node):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)):
        with pytest.raises(ConfigError, match="is in use by a running server: end that server"):
            async with store_of(node.open_disk(), owner).opened():
                pass
    async with store_of(node.open_disk(), owner).opened():
        pass


@inside(on_a_node)
async def test_an_empty_folder_has_no_owner_and_other_files_stay(node):
    disk = node.open_disk()
    await disk.write_atomic(HOME / "notes.txt", [b"mine"])
    assert await read_identity(disk, HOME) is None
    owner = Owner("a")
    async with Running(store_of(disk, owner)) as store:
        owner.update(store, "a", 1)
        await store.flush()
    assert await disk.read_bytes(HOME / "notes.txt") == b"mine"


@inside(on_a_node)
async def test_calls_that_wait_when_the_store_ends_fail(node):
    owner = Owner("a")
    running = Running(store_of(node.open_disk(), owner))
    async with running as store:
        node.disk_conditions.stuck = True
        owner.update(store, "a", 1)
        calls = [
            asyncio.ensure_future(store.flush()),
            asyncio.ensure_future(store.append_durably(EntryKey("a", 1, 1), [b"entry"])),
        ]
        await asyncio.sleep(1.0)
        running.ended.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in results] == [DiskFailed, DiskFailed]
        with pytest.raises(DiskFailed, match="was closed before the write was on disk"):
            await store.flush()
        node.disk_conditions.stuck = False
