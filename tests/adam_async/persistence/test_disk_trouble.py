"""A segment store on disks that are full, slow, stuck, read-only, or that fail."""

import asyncio
import errno
from functools import partial

import pytest

from adam_async.errors import ConfigError, DiskFailed
from adam_async.persistence import opening
from adam_async.persistence.records import LEADING, EntryKey, FlushSettings, StateName
from tests.adam_async.persistence.disks import SYNCS, WRITES, Running, failing_disk, on_a_node
from tests.adam_async.persistence.owners import HOME, Owner, check_states, contents_in, files_of, store_of
from tests.simulation.disk import DiskConditions
from tests.worlds import inside


def fill(node, room: int) -> None:
    """Leave so many bytes on the disk of a node."""
    node.disk_model.capacity_bytes = node.disk_model.used_bytes + room


@pytest.mark.parametrize("segment_bytes", [600, 8192])
@pytest.mark.parametrize("room", [0, 10, 120, 700, 1500])
@inside(on_a_node)
async def test_a_full_disk_costs_no_state_on_it_and_rounds_go_on_once_there_is_room(
    node, room, segment_bytes
):
    owner, notices = Owner("a"), []
    settings = FlushSettings(segment_bytes=segment_bytes, batch_bytes=300)
    async with Running(store_of(node.open_disk(), owner, notice=notices.append, settings=settings)) as store:
        for shard in range(6):
            owner.update(store, "a", shard)
        await store.flush()
        before = contents_in(files_of(node.disk_model)).states
        fill(node, room)
        for _ in range(20):
            for shard in range(6):
                owner.update(store, "a", shard)
            await asyncio.sleep(1.0)
        counts = store.statistics()
        assert counts.is_full
        assert counts.dirty
        assert counts.dirty_age_s > 10.0
        (notice,) = notices
        assert "/home/ps-0 is full: on disk as of " in notice
        assert notice.endswith("make room on it")
        found = contents_in(files_of(node.disk_model))
        check_states(files_of(node.disk_model), found, owner)
        assert (found.damages, found.lost) == ((), ())
        for name, (key, _) in before.items():
            assert found.states[name][0].order >= key.order
        node.disk_model.capacity_bytes = 1 << 30
        await asyncio.sleep(3.0)
        assert not store.statistics().is_full
        assert "has room again" in notices[1]
        await store.flush()
        assert store.statistics().dirty == 0
    found = contents_in(files_of(node.disk_model))
    assert {key.version for key, _ in found.states.values()} == {21}


@inside(on_a_node)
async def test_a_round_that_a_full_disk_cuts_short_frees_the_files_that_it_made_superfluous(node):
    owner = Owner("a")
    owner.bundles["a"].shards = 30
    settings = FlushSettings(flush_s=1.0, segment_bytes=3000, batch_bytes=500)
    async with Running(store_of(node.open_disk(), owner, settings=settings)) as store:
        for shard in range(30):
            owner.update(store, "a", shard)
        await store.flush()
        files = set(files_of(node.disk_model))
        assert len(files) > 3
        # Each round writes some states; the room that their old files leave serves the next round.
        fill(node, 11000)
        for _ in range(3):
            for shard in range(30):
                owner.update(store, "a", shard)
            for _ in range(12):
                await store.flush()
            assert store.statistics().dirty == 0
        assert not files & set(files_of(node.disk_model))


@inside(on_a_node)
async def test_entries_wait_for_room_on_a_full_disk_and_are_lost_by_nothing(node):
    owner, notices = Owner("a"), []
    async with Running(store_of(node.open_disk(), owner, notice=notices.append)) as store:
        await store.append_durably(EntryKey("a", 1, 1), [b"first"])
        fill(node, 100)
        waiting = [
            asyncio.ensure_future(store.append_durably(EntryKey("a", position, 1), [b"x" * 400]))
            for position in (2, 3)
        ]
        await asyncio.sleep(5.0)
        assert not any(each.done() for each in waiting)
        assert store.statistics().is_full
        found = contents_in(files_of(node.disk_model))
        assert [key.position for key in found.entries] == [1]
        fill(node, 1 << 20)
        await asyncio.sleep(1.5)
        assert all(each.done() for each in waiting)
        assert len(notices) == 2
    found = contents_in(files_of(node.disk_model))
    assert [key.position for key in found.entries] == [1, 2, 3]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", WRITES)
@inside(on_a_node)
async def test_a_failed_write_ends_the_store_and_fails_all_that_wait(node, call, code):
    owner = Owner("a")
    disk = failing_disk(node)
    running = Running(store_of(disk, owner))
    async with running as store:
        owner.update(store, "a", 1)
        disk.fail_next(call, code)
        with pytest.raises(DiskFailed, match=r"segment cannot be written: .*repair the disk, or give"):
            await store.flush()
        with pytest.raises(DiskFailed):
            await running.ended
        with pytest.raises(DiskFailed):
            await store.append_durably(EntryKey("a", 1, 1), [b"entry"])


@pytest.mark.parametrize("number", range(1, 26))
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@inside(on_a_node)
async def test_no_sync_is_tried_again_and_nothing_is_acknowledged_after_a_failed_one(node, number, code):
    """A failed sync drops bytes that the next one would report as durable (I11)."""

    owner, acknowledged = Owner("a"), 0
    disk = failing_disk(node)
    disk.fails["sync_file"] = number, code
    running = Running(store_of(disk, owner))
    async with running as store:
        try:
            for position in range(1, 100):
                owner.bundles["a"].history.append((1,))
                await store.append_durably(*owner.bundles["a"].entry(position))
                acknowledged = position
                owner.apply(store, "a", position)
                await store.flush()
        except DiskFailed:
            calls = len(disk.calls)
        with pytest.raises(DiskFailed):
            await running.ended
        with pytest.raises(DiskFailed):
            await store.append_durably(EntryKey("a", 100, 1), [b"entry"])
        with pytest.raises(DiskFailed):
            await store.flush()
        assert len(disk.calls) == calls
        assert disk.calls.count("sync_file") == number
    node.disk_model.crash()
    found = contents_in(files_of(node.disk_model))
    check_states(files_of(node.disk_model), found, owner)
    positions = {key.position for key in found.entries}
    state = found.states.get(StateName("a", 1))
    for position in range(1, acknowledged + 1):
        assert position in positions or (state is not None and state[0].position >= position)


@inside(on_a_node)
async def test_a_folder_that_cannot_be_written_is_refused_at_the_opening(node):
    owner = Owner("a")
    disk = failing_disk(node)
    for call in SYNCS[:2]:
        async with Running(store_of(node.open_disk(), owner)) as store:
            owner.update(store, "a", 1)
            await store.flush()
        disk.fail_next(call, errno.EROFS)
        with pytest.raises(ConfigError, match=r"home/ps-0 cannot be used: .*give the server a folder"):
            async with store_of(disk, owner).opened():
                pass


@inside(on_a_node)
async def test_a_file_larger_than_the_free_memory_is_not_read(node, monkeypatch):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "a", 1)
        await store.flush()
    monkeypatch.setattr(opening, "available_bytes", lambda: 10)
    with pytest.raises(ConfigError, match=r"segment needs \d+ bytes of memory, and 10 are available"):
        async with store_of(node.open_disk(), owner).opened():
            pass


@inside(on_a_node)
async def test_a_file_in_the_place_of_the_folder_is_refused(node):
    await node.open_disk().write_atomic(HOME, [b"x"])
    with pytest.raises(ConfigError, match="home/ps-0 cannot be used: "):
        async with store_of(node.open_disk(), Owner("a")).opened():
            pass


@inside(on_a_node)
async def test_a_slow_disk_lengthens_the_time_between_rounds_reports_it_once_and_recovers(node):
    owner, notices = Owner("a"), []
    settings = FlushSettings(flush_s=0.15)
    async with Running(store_of(node.open_disk(), owner, notice=notices.append, settings=settings)) as store:
        owner.update(store, "a", 1)
        await store.flush()
        node.disk_conditions.sync_s = 0.1
        for _ in range(100):
            owner.update(store, "a", 1)
            await asyncio.sleep(0.05)
        counts = store.statistics()
        assert counts.round_s == pytest.approx(0.1, abs=0.02)
        assert counts.period_s == pytest.approx(2 * counts.round_s)
        assert 20 <= counts.rounds <= 26  # in 5 s, instead of 33
        (notice,) = notices
        assert "so rounds come every 0.20 s now instead of 0.15 s, and a crash may lose" in notice
        node.disk_conditions.sync_s = 0.001
        for _ in range(20):
            owner.update(store, "a", 1)
            await asyncio.sleep(0.05)
        assert store.statistics().period_s == 0.15
        assert notices[1:] == ["rounds in /home/ps-0 come every 0.15 s again"]


@inside(on_a_node)
async def test_updates_never_wait_for_a_slow_disk_and_one_copied_batch_is_in_memory(node):
    owner = Owner("a")
    node.disk_conditions = DiskConditions(sync_s=0.05, bytes_per_s=1000.0)
    store = store_of(node.open_disk(), owner, settings=FlushSettings(batch_bytes=1000))
    loop = asyncio.get_running_loop()
    async with Running(store):
        for turn in range(50):
            begin, takes = loop.time(), owner.takes
            for shard in range(6):
                owner.update(store, "a", shard)
            assert loop.time() == begin
            await asyncio.sleep(0.1)
            assert owner.takes - takes <= 4, turn


@inside(on_a_node)
async def test_a_stuck_disk_is_reported_and_the_round_ends_once_it_works_again(node):
    owner, notices = Owner("a"), []
    async with Running(store_of(node.open_disk(), owner, notice=notices.append)) as store:
        owner.update(store, "a", 1)
        node.disk_conditions.step_s, node.disk_conditions.stuck = 0.1, True
        await asyncio.sleep(15.0)
        assert notices == ["a round in /home/ps-0 takes more than 10 s; no round is on it yet"]
        assert store.statistics().in_round
        append = asyncio.ensure_future(store.append_durably(EntryKey("a", 9, 1), [b"entry"]))
        await asyncio.sleep(11.0)
        assert notices[1:] == [
            "a write of log entries in /home/ps-0 takes more than 10 s; no round is on it yet"
        ]
        node.disk_conditions.stuck = False
        await asyncio.sleep(3.0)
        assert append.done()
        assert store.statistics().dirty == 0


@inside(on_a_node)
async def test_a_round_in_progress_is_not_on_disk_at_its_first_instant(node):
    owner = Owner("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "a", 1)
        take, seen = owner.take, []

        async def look(name):
            state = await take(name)
            seen.append(store.statistics())
            return state

        store._rounds._take = look
        await store.flush()
        assert [(each.dirty, each.in_round, each.on_disk_as_of) for each in seen] == [(0, True, None)]
        assert not store.statistics().in_round


class LateRecord(Owner):
    """An owner whose own state changes while the copy of a shard is taken."""

    def __init__(self, *homes):
        super().__init__(LEADING, *homes)
        self.store = None
        self.changes_at: StateName | None = None
        self.then = lambda: None

    async def take(self, name):
        if name == self.changes_at:
            self.changes_at = None
            self.update(self.store, LEADING, 0)
        elif name.home == LEADING:
            self.then()
        return await super().take(name)


@inside(on_a_node)
async def test_a_full_disk_at_the_owners_state_in_front_of_a_shard_loses_no_mark_of_the_shard(node):
    owner = LateRecord("a")
    settings = FlushSettings(batch_bytes=1)  # each state is a batch of its own
    async with Running(store_of(node.open_disk(), owner, settings=settings)) as store:
        owner.store = store
        owner.update(store, LEADING, 0)
        owner.update(store, "a", 1)
        await store.flush()
        owner.update(store, "a", 1)
        owner.changes_at = StateName("a", 1)
        fill(node, 0)
        await store.flush()
        assert store.statistics().dirty == 2
        fill(node, 1 << 20)
        await store.flush()
        assert store.statistics().dirty == 0
    states = contents_in(files_of(node.disk_model)).states
    assert states[StateName("a", 1)][0].version == 2


@inside(on_a_node)
async def test_a_bundle_that_leaves_while_the_owners_state_is_copied_stays_away(node):
    owner = LateRecord("a")
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.store = store
        for leave in (store.release, store.forget):
            owner.update(store, "a", 1)
            owner.changes_at, owner.then = StateName("a", 1), partial(leave, "a")
            await store.flush()
            owner.then = lambda: None
            await store.flush()
            assert store.statistics().dirty == 0
    states = contents_in(files_of(node.disk_model)).states
    assert {name.home for name in states} == {LEADING}
