"""Rotten bytes in segment files: refused or reported, and never returned."""

import asyncio
import random
from collections.abc import Iterable
from itertools import combinations_with_replacement

import pytest

from adam_async.persistence.contents import Contents, Damage, LostState, Recovery
from adam_async.persistence.folder import DamagedState
from adam_async.persistence.records import LEADING, EntryKey, FlushSettings, StateName
from adam_async.persistence.scan import Found
from tests.adam_async.crash_images import disk_model_of
from tests.adam_async.persistence.disks import Running, flip, on_a_node
from tests.adam_async.persistence.owners import (
    HOME,
    Owner,
    check_states,
    content,
    contents_in,
    files_of,
    known_scan,
    store_of,
)
from tests.simulation.disk_model import DiskModel
from tests.worlds import inside

STATES = "states-00000001.segment"
ENTRIES = "entries-00000001.segment"


def small_store(*, rounds: int = 3) -> tuple[DiskModel, Owner]:
    """Return a disk with a store of few states and entries, and their owner."""
    owner = Owner("a", "b")

    async def use(node):
        async with Running(store_of(node.open_disk(), owner)) as store:
            for _ in range(rounds):
                for shard in (1, 2):
                    owner.update(store, "a", shard)
                await store.flush()
            for position in range(2 * rounds + 1, 2 * rounds + 4):
                owner.bundles["a"].history.append((1,))
                await store.append_durably(*owner.bundles["a"].entry(position))
            await asyncio.sleep(0.1)
        return node.disk_model

    return on_a_node(use), owner


def on_a_small_store(use):
    """Run `use(node, owner)` on a machine that has the disk of a small store."""
    disk_model, owner = small_store()
    on_a_node(lambda node: use(node, owner), disk_model=disk_model)


def check_floors(found: Contents, owner: Owner) -> int:
    """Assert that no state below a floor is older than the floor says; return the number of such states."""
    lost = {each.name for each in found.lost}
    below = 0
    for name, (key, _) in found.states.items():
        floor = found.floors.get(name.home, 0)
        if key.position < floor and name not in lost:
            below += 1
            assert key.version == owner.bundles[name.home].version(name.shard, floor)
    return below


def frames_in(files: dict[str, bytes]) -> list[tuple[str, Found]]:
    """Return the frames of all files of states after their starts, with the names of the files."""
    names = [name for name in files if name.startswith("states")]
    return [(name, found) for name in names for found in known_scan(name, files[name]).records]


def with_damage(files: dict[str, bytes], hits: Iterable[tuple[str, Found]]) -> dict[str, bytes]:
    """Return files with a flipped bit in each of some frames."""
    data = {name: bytearray(content) for name, content in files.items()}
    for name, found in hits:
        data[name][found.frame.begin] ^= 1
    return {name: bytes(content) for name, content in data.items()}


def two_sessions(settings: FlushSettings) -> tuple[DiskModel, Owner]:
    """Return the disk of a store that was opened twice, with one changed state in most rounds."""
    disk_model, owner = DiskModel(random.Random(1)), Owner("a", "b")

    async def use(node):
        for rounds in ("a1 a2 b1", "a3", "a1", "b1"), ("a1 b2", "a1", "a2", "b1", "b1"):
            async with Running(store_of(node.open_disk(), owner, settings=settings)) as store:
                for names in rounds:
                    for name in names.split():
                        owner.update(store, name[0], int(name[1]))
                    await store.flush()

    on_a_node(use, disk_model=disk_model)
    return disk_model, owner


@pytest.mark.parametrize("segment_bytes", [1500, 8192])
def test_no_two_damaged_frames_let_an_older_state_count_as_one_at_the_floor(segment_bytes):
    """Every pair of frames, and every run of frames, as rotten sectors hit them."""
    disk_model, owner = two_sessions(FlushSettings(segment_bytes=segment_bytes, batch_bytes=2048))
    files = files_of(disk_model)
    newest = contents_in(files).states
    frames = frames_in(files)
    below = 0
    for first, last in combinations_with_replacement(range(len(frames)), 2):
        for hits in ((frames[first], frames[last]), frames[first : last + 1]):
            found = contents_in(with_damage(files, hits[:1] if first == last else hits))
            below += check_floors(found, owner)
            if first == last:  # one damaged record costs no other state
                whole = {name for name, (key, _) in found.states.items() if key == newest[name][0]}
                assert not whole & {each.name for each in found.lost}
    assert below > 0


@pytest.mark.parametrize("segment_bytes", [1500, 8192])
def test_a_lost_state_does_not_count_at_the_floor_of_a_later_session(segment_bytes):
    settings = FlushSettings(segment_bytes=segment_bytes, batch_bytes=2048)
    disk_model, owner = two_sessions(settings)
    files = files_of(disk_model)
    states = contents_in(files).states
    _, location = states[StateName("a", 1)]
    flip(disk_model, HOME / location.segment, location.content)
    owner.unready = {StateName("a", 1)}

    async def use(node):
        for _ in range(3):
            async with store_of(node.open_disk(), owner, settings=settings).opened() as store:
                assert [each.name for each in store.recovery.lost] == [StateName("a", 1)]
            async with Running(store_of(node.open_disk(), owner, settings=settings)) as store:
                owner.update(store, "b", 1)
                await store.flush()
            check_floors(contents_in(files_of(node.disk_model)), owner)

    on_a_node(use, disk_model=disk_model)


@inside(on_a_small_store, made=2)
async def test_a_full_disk_at_the_beginning_of_a_file_hides_no_lost_state(node, owner):
    location = contents_in(files_of(node.disk_model)).states[StateName("a", 2)][1]
    flip(node.disk_model, HOME / STATES, location.content)
    async with store_of(node.open_disk(), owner).opened() as store:
        assert [each.name for each in store.recovery.lost] == [StateName("a", 2)]
    async with Running(store_of(node.open_disk(), owner)) as store:
        node.disk_model.capacity_bytes = node.disk_model.used_bytes + 130  # the start of a file, and no list
        owner.update(store, "a", 1)
        await store.flush()
        assert store.statistics().is_full
        node.disk_model.capacity_bytes = 1 << 20
        await store.flush()
        assert store.statistics().dirty == 0
    async with store_of(node.open_disk(), owner).opened() as store:
        assert [each.name for each in store.recovery.lost] == [StateName("a", 2)]


def test_a_round_without_room_for_its_record_is_listed_by_the_next_one():
    owner = Owner("a")

    async def use(node):
        async with Running(store_of(node.open_disk(), owner)) as store:
            owner.update(store, "a", 1)
            owner.update(store, "a", 2)
            await store.flush()
            states = contents_in(files_of(node.disk_model)).states.values()
            room = sum([location.nbytes for _, location in states])
            node.disk_model.capacity_bytes = node.disk_model.used_bytes + room + 10
            owner.update(store, "a", 1)
            owner.update(store, "a", 2)
            await store.flush()
            assert store.statistics().is_full
            assert store.statistics().dirty == 0
            node.disk_model.capacity_bytes = 1 << 20
            owner.update(store, "a", 3)
            await store.flush()
        return node.disk_model

    files = files_of(on_a_node(use))
    _, location = contents_in(files).states[StateName("a", 1)]
    damaged = [each for each in frames_in(files) if each[1].frame.position == location.position]
    found = contents_in(with_damage(files, damaged))
    assert StateName("a", 1) in {each.name for each in found.lost}


@pytest.mark.thorough
def test_a_flipped_bit_anywhere_is_reported_or_costs_nothing_and_no_damaged_byte_is_returned():
    """Every byte of every file of a small store."""
    disk_model, owner = small_store()
    files = files_of(disk_model)
    expected = contents_in(files)
    flips = reported = 0
    for name, data in files.items():
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            after = {**files, name: bytes(damaged)}
            found = contents_in(after)
            flips += 1
            check_states(after, found, owner)
            if found.damages:
                reported += 1
                assert [each.segment for each in found.damages] == [name]
                assert found.damages[0].position <= at
            else:
                # Only the last record, which has no content, is taken for a torn tail.
                assert [each.segment for each in found.torn] == [name]
                assert (found.states, found.entries) == (expected.states, expected.entries)
            lost = {each.name for each in found.lost}
            for state, (key, _) in expected.states.items():
                now = found.states.get(state)
                assert (now is not None and now[0] == key) or state in lost
            missing = expected.entries.keys() - found.entries.keys()
            assert not missing or found.damages

    assert flips == sum(map(len, files.values())) > 3000
    assert reported > 0.95 * flips


def test_a_file_cut_short_anywhere_is_reported_once_a_later_round_has_its_size():
    disk_model, owner = small_store()

    async def use(node):
        async with Running(store_of(node.open_disk(), owner)) as store:
            owner.update(store, "b", 1)
            await store.flush()

    on_a_node(use, disk_model=disk_model)
    files = files_of(disk_model)
    assert len(files) == 3
    for name in (STATES, ENTRIES):
        for size in range(0, len(files[name]), 13):
            after = {**files, name: files[name][:size]}
            found = contents_in(after)
            assert [damage.segment for damage in found.damages] == [name]
            check_states(after, found, owner)


def test_a_missing_file_is_reported_with_the_states_that_it_had():
    disk_model, _ = small_store()
    owner = Owner("a")

    async def use(node):
        async with Running(store_of(node.open_disk(), owner, notice=print)) as store:
            owner.bundles["a"].history = [(1,)] * 20
            owner.bundles["a"].applied = 20
            store.mark(StateName("a", 1), 100)
            await store.flush()
        disk_model.remove(HOME / STATES)
        notices = []
        async with store_of(node.open_disk(), owner, notice=notices.append).opened() as store:
            (damage,) = store.recovery.damages
            assert str(damage) == f"{STATES} is missing"
            (lost,) = store.recovery.lost
            assert (lost.name, lost.found) == (StateName("a", 2), None)
            assert StateName("a", 1) in store.recovery.states
        text = "is missing; the newest state of piece 2 of a is lost; other copies have to fill in"
        assert notices == [f"in {HOME}, {STATES} {text}"]
        async with store_of(node.open_disk(), owner).opened() as store:
            assert (store.recovery.damages, store.recovery.lost) == ((), (lost,))

    on_a_node(use, disk_model=disk_model)


@inside(on_a_small_store, made=2)
async def test_damage_names_the_lost_state_quarantines_the_file_and_keeps_all_others(node, owner):
    before = contents_in(files_of(node.disk_model))
    newest = before.states[StateName("a", 2)][1]
    flip(node.disk_model, HOME / STATES, newest.content + 3)
    notices = []
    async with store_of(node.open_disk(), owner, notice=notices.append).opened() as store:
        recovery = store.recovery
        (damage,) = recovery.damages
        assert (damage.segment, damage.position) == (STATES, newest.position)
        assert damage.quarantined_as == "states-00000001.damaged"
        (lost,) = recovery.lost
        assert (lost.name, lost.order) == (StateName("a", 2), (1, 6))
        assert lost.found == recovery.states[StateName("a", 2)]
        assert lost.found.version == 2
        for name, version in ((StateName("a", 1), 3), (StateName("a", 2), 2)):
            key, parts = await store.read_state(name)
            assert key.version == version
            assert tuple(map(bytes, parts)) == content(name, version)
    (notice,) = notices
    assert f"{STATES} is damaged at byte {newest.position}, and is states-00000001.damaged now" in notice
    assert notice.endswith("; the newest state of piece 2 of a is lost; other copies have to fill in")
    names = await node.open_disk().names(HOME)
    assert "states-00000001.damaged" in names
    assert STATES not in names
    async with store_of(node.open_disk(), owner).opened() as store:
        assert store.recovery.states == recovery.states
        assert store.recovery.entries == recovery.entries
        assert (store.recovery.damages, store.recovery.lost) == ((), recovery.lost)


@inside(on_a_small_store, made=2)
async def test_a_lost_state_is_named_until_a_newer_one_is_on_disk(node, owner):
    location = contents_in(files_of(node.disk_model)).states[StateName("a", 2)][1]
    flip(node.disk_model, HOME / STATES, location.content)
    for _ in range(2):
        async with store_of(node.open_disk(), owner).opened() as store:
            assert [each.name for each in store.recovery.lost] == [StateName("a", 2)]
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.update(store, "a", 2)
        await store.flush()
    async with store_of(node.open_disk(), owner).opened() as store:
        assert store.recovery.lost == ()


@inside(on_a_small_store, made=2)
async def test_states_of_a_damaged_file_hide_no_newer_ones(node, owner):
    async with Running(store_of(node.open_disk(), owner)) as store:
        owner.bundles["a"].applied = len(owner.bundles["a"].history)
        owner.update(store, "a", 1)
        await store.flush()
    newest = contents_in(files_of(node.disk_model)).states
    assert newest[StateName("a", 1)][1].segment == "states-00000002.segment"
    flip(node.disk_model, HOME / STATES, 300)
    notices = []
    async with store_of(node.open_disk(), owner, notice=notices.append).opened() as store:
        assert notices[0].endswith("; no state is lost")
        assert [damage.segment for damage in store.recovery.damages] == [STATES]
        assert store.recovery.states == {name: key for name, (key, _) in newest.items()}
        assert store.recovery.lost == ()


@inside(on_a_small_store, made=2)
async def test_whole_entries_behind_damage_are_kept(node, owner):
    first = contents_in(files_of(node.disk_model)).entries[EntryKey("a", 7, 1)]
    flip(node.disk_model, HOME / ENTRIES, first.content)
    notices = []
    async with store_of(node.open_disk(), owner, notice=notices.append).opened() as store:
        assert notices[0].endswith(
            "no state is lost, and log entries may be missing; other copies have to fill in"
        )
        assert [damage.segment for damage in store.recovery.damages] == [ENTRIES]
        assert [key.position for key in store.recovery.entries["a"]] == [8, 9]
        for key in store.recovery.entries["a"]:
            expected = owner.bundles["a"].entry(key.position)[1]
            assert tuple(map(bytes, await store.read_entry(key))) == expected


@inside(on_a_small_store, made=2)
async def test_a_torn_tail_is_reported_and_cut_off(node, owner):
    inode = node.disk_model.file(HOME / STATES)
    size = len(inode.data)
    inode.data += b"\xabCL1" * 40
    inode.kept[:] = inode.data
    async with store_of(node.open_disk(), owner).opened() as store:
        (torn,) = store.recovery.torn
        assert (torn.segment, torn.position, torn.nbytes) == (STATES, size, 160)
        assert store.recovery.damages == ()
    assert len(files_of(node.disk_model)[STATES]) == size


def test_a_frame_in_another_place_or_file_is_not_read():
    """Bytes of one file in the place of another's, as after an error of a file system."""
    disk_model, _ = small_store()
    files = files_of(disk_model)
    contents = contents_in(files)
    older, newer = (
        contents_in({STATES: files[STATES][:end]}).states[StateName("a", 1)][1]
        for end in (len(files[STATES]) // 2, len(files[STATES]))
    )
    assert older.nbytes == newer.nbytes
    data = bytearray(files[STATES])
    data[newer.position : newer.end] = data[older.position : older.end]
    found = contents_in({**files, STATES: bytes(data)})
    assert [damage.position for damage in found.damages] == [newer.position]
    assert StateName("a", 1) in {each.name for each in found.lost}

    moved = contents_in({"states-00000007.segment": files[STATES], ENTRIES: files[ENTRIES]})
    assert moved.states == {}
    assert [damage.segment for damage in moved.damages] == ["states-00000007.segment"]
    assert contents.states.keys() == {StateName("a", 1), StateName("a", 2)}


@inside(on_a_small_store, made=2)
async def test_bytes_that_rot_after_the_opening_are_not_returned(node, owner):
    async with store_of(node.open_disk(), owner).opened() as store:
        location = contents_in(files_of(node.disk_model)).states[StateName("a", 1)][1]
        flip(node.disk_model, HOME / STATES, location.content)
        with pytest.raises(DamagedState, match=f"{STATES} is damaged at byte {location.position}"):
            await store.read_state(StateName("a", 1))
        node.disk_model.remove(HOME / STATES)
        with pytest.raises(DamagedState, match=f"{STATES} cannot be read: No such file"):
            await store.read_state(StateName("a", 2))


def test_a_killed_process_leaves_proof_that_its_last_round_was_on_disk():
    disk_model, _ = small_store(rounds=1)
    location = contents_in(files_of(disk_model)).states[StateName("a", 2)][1]
    files = files_of(disk_model_of(disk_model.find(HOME.parent.parent)))
    data = bytearray(files[STATES])
    data[location.content] ^= 1
    found = contents_in({**files, STATES: bytes(data)})
    assert [each.name for each in found.lost] == [StateName("a", 2)]


def test_a_lost_state_of_the_owner_itself_is_called_a_record():
    lost = [LostState(name=StateName(home, 1), order=(1, 1), found=None) for home in ("a", LEADING)]
    damage = Damage(segment=STATES, quarantined_as="", position=0)
    text = Recovery(damages=(damage,), lost=tuple(lost)).damage_text()
    assert "; the newest state of piece 1 of a and record 1 is lost; " in text
