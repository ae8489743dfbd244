"""Folders that are written once: read back whole, and refused with the file that is not as it was written."""

import os
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from adam_async.persistence import written_once
from adam_async.persistence.records import FlushSettings, Identity, State, StateKey, StateName
from adam_async.persistence.store import SegmentStore
from adam_async.persistence.written_once import (
    DamagedFile,
    ShortMemory,
    check_sizes,
    read_head,
    read_state,
    read_states,
    write_once,
)
from adam_async.runtime.disk import Disk

OWNER = Identity(run="a run", contents=7)
HEAD = State(StateKey("", 0, 1, 1, 0), [b"the", b"head"])
NAMES = [f"states-0000000{number}.segment" for number in (1, 2, 3)]


def state_of(shard):
    values = np.full(100, shard, np.uint8)
    return State(StateKey("ps-0", shard, 0, shard, shard), [b"shard", values.data, b""])


async def arriving(states):
    for state in states:
        yield state


@pytest.fixture
async def folder(tmp_path, monkeypatch):
    """A folder of two files of states and a head."""
    monkeypatch.setattr(written_once, "FlushSettings", lambda: FlushSettings(segment_bytes=300))
    async with Disk() as disk:
        size = await write_once(disk, tmp_path, OWNER, arriving(map(state_of, range(3))), lambda: [HEAD])
        assert await disk.names(tmp_path) == NAMES
        assert size == sum((tmp_path / name).stat().st_size for name in NAMES)
    return tmp_path


async def read(folder):
    """Return the head of a folder, and its states by name."""
    async with Disk() as disk:
        head = await read_head(disk, folder, contents=OWNER.contents)
        await check_sizes(disk, folder, head)
        found = [each for name in head.files for each in await read_states(disk, folder, head, name)]
    return head, {each.key.name: each for each in found}


async def test_all_states_come_back_and_the_head_knows_the_others(folder):
    head, states = await read(folder)
    assert (head.identity, head.file, list(head.files)) == (OWNER, NAMES[2], NAMES[:2])
    assert head.states[StateName("", 0)].parts == HEAD.parts
    assert head.keys == {HEAD.key, *(state_of(shard).key for shard in range(3))}
    for shard in range(3):
        assert states[StateName("ps-0", shard)].parts == state_of(shard).parts


async def test_a_server_reads_such_a_folder(folder):
    async with Disk() as disk:
        store = SegmentStore(
            disk, disk, folder, OWNER, take=None, clock=float, wall_clock=float, notice=pytest.fail
        )
        async with store.opened():
            assert set(store.recovery.states) == {StateName("", 0), *(("ps-0", shard) for shard in range(3))}
            assert not store.recovery.damages
            _, parts = await store.read_state(StateName("ps-0", 2))
    assert parts == state_of(2).parts


async def test_a_state_is_read_again_alone_and_a_change_since_is_named_by_file_and_position(folder):
    async with Disk() as disk:
        head = await read_head(disk, folder, contents=OWNER.contents)
        for name in head.files:
            for state in await read_states(disk, folder, head, name):
                place = replace(state, content=memoryview(b""))
                again = await read_state(disk, folder, head, name, place)
                assert (again.key, again.parts) == (state.key, state.parts)
                data = bytearray((folder / name).read_bytes())
                data[state.end - 1] ^= 1
                (folder / name).write_bytes(data)
                with pytest.raises(DamagedFile, match=f"is damaged at byte {state.position}") as refused:
                    await read_state(disk, folder, head, name, place)
                assert (refused.value.file, refused.value.offset) == (name, state.position)
        (folder / name).unlink()
        with pytest.raises(DamagedFile, match="is missing"):
            await read_state(disk, folder, head, name, place)


@pytest.mark.parametrize("name", NAMES)
async def test_a_file_that_is_not_as_it_was_written_is_named(folder, name):
    whole = (folder / name).read_bytes()
    for data, words in (
        (None, "is missing"),
        (b"", "is damaged"),
        (whole[:-1], "is damaged"),
        (whole + b"\0", "is damaged"),
        (whole[:70] + bytes([whole[70] ^ 1]) + whole[71:], "is damaged at byte"),
    ):
        (folder / name).unlink(missing_ok=True)
        if data is not None:
            (folder / name).write_bytes(data)
        with pytest.raises(DamagedFile, match=words) as refused:
            await read(folder)
        assert refused.value.file == name


async def test_a_head_beyond_its_bound_is_not_read(folder):
    os.truncate(folder / NAMES[2], written_once.HEAD_BYTES + 1)  # sparse
    with pytest.raises(DamagedFile, match=r"is no head: .*; the file after it is missing, or it is damaged"):
        await read(folder)


async def test_a_file_beyond_the_memory_is_not_read_and_its_folder_is_not_damaged(folder, monkeypatch):
    head, _ = await read(folder)
    async with Disk() as disk:
        await check_sizes(disk, folder, head)
        monkeypatch.setattr(written_once, "available_bytes", lambda: 9)
        with pytest.raises(ShortMemory, match=rf"{NAMES[0]} needs [\d,]+ bytes of memory, and 9 are"):
            await read_states(disk, folder, head, NAMES[0])


async def test_a_folder_without_files_and_one_of_another_encoding_are_refused(folder, tmp_path):
    async with Disk() as disk:
        with pytest.raises(DamagedFile, match="has states in encoding 7, and this release reads 8"):
            await read_head(disk, folder, contents=8)
        (tmp_path / "empty").mkdir()
        with pytest.raises(DamagedFile, match="has no files of shards"):
            await read_head(disk, tmp_path / "empty", contents=7)


@pytest.mark.parametrize(("most", "file"), [(1, NAMES[2]), (2, NAMES[0])])
async def test_a_state_of_too_many_parts_is_refused(folder, monkeypatch, most, file):
    monkeypatch.setattr(written_once, "MOST_PARTS", most)  # the head has a state of two, the others of three
    with pytest.raises(DamagedFile, match=f"{file} has a state of {most + 1} parts"):
        await read(folder)


async def test_a_head_that_names_other_files_is_refused(tmp_path, monkeypatch):
    record = written_once.RoundRecord

    def forged(number, as_of, states, floors, forgotten, files, **others):
        return record(number, as_of, states, floors, forgotten, {"../secret": 1}, **others)

    async with Disk() as disk:
        with monkeypatch.context() as patched:
            patched.setattr(written_once, "RoundRecord", forged)
            await write_once(disk, tmp_path, OWNER, arriving([state_of(1)]), lambda: [HEAD])
        with pytest.raises(DamagedFile, match=r"names the file '\.\./secret', which is none of its folder"):
            await read_head(disk, tmp_path, contents=7)


async def test_a_file_of_another_folder_is_refused(folder, tmp_path):
    other = msgspec.structs.replace(state_of(0).key, version=9)
    async with Disk() as disk:
        (tmp_path / "other").mkdir()
        states = [State(other, state_of(0).parts), state_of(1), state_of(2)]
        await write_once(disk, tmp_path / "other", OWNER, arriving(states), lambda: [HEAD])
    (tmp_path / "other" / NAMES[0]).replace(folder / NAMES[0])
    with pytest.raises(DamagedFile, match=f"{NAMES[0]} is a file of another folder than {NAMES[2]}"):
        await read(folder)
