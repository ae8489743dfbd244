"""The file of a controller, on a real disk and on a simulated one: the same promises."""

import asyncio
import errno
import os
import random
from pathlib import Path

import pytest

from adam_async.controller.consensus import DamagedLog, Entry, Saved, bootstrapped
from adam_async.controller.consensus.messages import Snapshot
from adam_async.controller.consensus.records import Ballot, Born, Entries
from adam_async.controller.log_file import NAME, LogFile
from adam_async.errors import ConfigError
from adam_async.persistence.frames import HEAD_BYTES
from adam_async.runtime.disk import Disk
from tests.simulation.scenario import simulate


def entries(*indices, term=2):
    return (Entries(tuple(Entry(index, term, b"command") for index in indices)),)


BORN = (Born("a"),)
FOUNDED = bootstrapped("a", ["a"], b"state")


async def on_real_disk(use, tmp_path):
    async with Disk() as disk:
        await use(disk, tmp_path)


async def on_simulated_disk(use, tmp_path):
    """In a thread: a simulated loop runs where no other does."""

    async def scenario(world):
        node = world.node("a")

        async def program(node):
            async with node.open_disk() as disk:
                await disk.make_folder(Path("/home"))
                await use(disk, Path("/home"))

        node.start(program)
        await node.task

    await asyncio.to_thread(simulate, scenario, seed=1)


both = pytest.mark.parametrize("on_disk", [on_real_disk, on_simulated_disk])


async def found_in(disk, folder):
    """Return the state that a starting controller reads."""
    async with LogFile(disk, folder).opened() as saved:
        return saved


async def written(disk, folder, *batches):
    """Be a controller that begins, writes and ends."""
    file = LogFile(disk, folder)
    async with file.opened():
        await file.append(batches)


def found_after_a_power_cut(write, *, seed, after_s):
    """Return the state after a restart, if the power fails so many seconds after `write` was begun."""
    found = []

    async def scenario(world):
        node = world.node("a")
        folder = Path("/home")

        async def begin(node):
            file = LogFile(node.open_disk(), folder)
            async with file.opened():
                await write(node, file)

        async def look(node):
            found.append(await found_in(node.open_disk(), folder))

        node.start(begin)
        await asyncio.sleep(after_s)
        node.crash()
        node.disk_conditions.sync_s = 0.0
        node.start(look)
        await node.task

    simulate(scenario, seed=seed)
    return found[0]


@both
async def test_appended_records_are_recovered_and_the_file_goes_on(on_disk, tmp_path):
    async def use(disk, home):
        folder = home / "deep" / "folder"
        file = LogFile(disk, folder)
        async with file.opened() as saved:
            assert saved is None
            await file.append([BORN])
            await file.append([(Ballot(1, None), FOUNDED.snapshot), entries(2), entries(3, 4)])
        file = LogFile(disk, folder)
        async with file.opened() as saved:
            assert (saved.me, saved.term, saved.snapshot) == ("a", 1, FOUNDED.snapshot)
            assert [entry.index for entry in saved.entries] == [2, 3, 4]
            await file.append([(Ballot(3, "b"), *entries(4, 5, term=3))])
        again = await found_in(disk, folder)
        assert (again.term, again.vote) == (3, "b")
        assert [(entry.index, entry.term) for entry in again.entries] == [(2, 2), (3, 2), (4, 3), (5, 3)]

    await on_disk(use, tmp_path)


@both
async def test_a_new_file_takes_the_place_of_the_old_one_and_is_appended_to(on_disk, tmp_path):
    async def use(disk, home):
        file = LogFile(disk, home)
        whole = Saved(
            me="a", term=2, vote="a", snapshot=Snapshot(4, 2, FOUNDED.snapshot.members, b"later"), entries=()
        )
        async with file.opened():
            await file.append([FOUNDED.records(), entries(2, 3, 4)])
            before = len(await disk.read_bytes(home / NAME))
            await file.begin_anew(whole.records())
            assert len(await disk.read_bytes(home / NAME)) < before
            await file.append([entries(5)])
        saved = await found_in(disk, home)
        assert saved.snapshot == whole.snapshot
        assert [entry.index for entry in saved.entries] == [5]
        assert await disk.names(home) == [NAME, "lock"]

    await on_disk(use, tmp_path)


@both
async def test_a_second_controller_is_refused_until_the_first_has_ended(on_disk, tmp_path):
    async def use(disk, home):
        async with LogFile(disk, home).opened():
            with pytest.raises(ConfigError, match="is that of a controller that is running; give this one"):
                await found_in(disk, home)
        assert await found_in(disk, home) is None

    await on_disk(use, tmp_path)


@both
async def test_an_error_inside_the_block_is_not_taken_for_a_second_controller(on_disk, tmp_path):
    async def use(disk, home):
        with pytest.raises(BlockingIOError, match="something else"):
            async with LogFile(disk, home).opened():
                raise BlockingIOError(errno.EAGAIN, "something else")

    await on_disk(use, tmp_path)


@both
async def test_a_folder_that_cannot_be_is_refused_by_name(on_disk, tmp_path):
    async def use(disk, home):
        await disk.write_atomic(home / "file", [b"x"])
        with pytest.raises(
            ConfigError,
            match=r"file cannot be used: (File exists|Not a directory); give the controller a folder",
        ):
            await found_in(disk, home / "file")

    await on_disk(use, tmp_path)


@both
@pytest.mark.parametrize("tail", [b"garbage" * 100, bytes(4096), b"\xabCL1" * 20])
async def test_a_torn_end_is_cut_off_and_the_file_goes_on_before_it(on_disk, tmp_path, tail):
    async def use(disk, home):
        await written(disk, home, FOUNDED.records(), entries(2))
        whole = await disk.read_bytes(home / NAME)
        await disk.write_from(home / NAME, len(whole), tail)
        file = LogFile(disk, home)
        async with file.opened() as saved:
            assert [entry.index for entry in saved.entries] == [2]
            assert await disk.read_bytes(home / NAME) == whole
            await file.append([entries(3)])
        assert [entry.index for entry in (await found_in(disk, home)).entries] == [2, 3]

    await on_disk(use, tmp_path)


@both
@pytest.mark.parametrize("size", [1, HEAD_BYTES, HEAD_BYTES + 5, 700, 40_000])
async def test_a_file_that_begins_with_no_whole_record_is_refused_and_left_as_it_is(on_disk, tmp_path, size):
    """A log comes into being with a whole first record: no crash leaves this."""

    async def use(disk, home):
        await written(disk, home, BORN, entries(1), entries(2))
        whole = await disk.read_bytes(home / NAME)
        for strange in (random.Random(size).randbytes(size), bytes(size), whole[: len(whole) // 2][:30]):
            await disk.write_atomic(home / NAME, [strange])
            with pytest.raises(
                DamagedLog, match=f"{NAME} is damaged at byte 0, in record 1: .*empty its folder and start"
            ) as caught:
                await found_in(disk, home)
            assert caught.value.exit_code == 3
            assert await disk.read_bytes(home / NAME) == strange

    await on_disk(use, tmp_path)


def test_a_power_cut_while_the_first_record_is_written_leaves_it_whole_or_nothing():
    seen = set()

    async def write(node, file):
        node.disk_conditions.sync_s = 1.0
        await file.append([FOUNDED.records()])

    for seed in range(60):
        cut_s = 0.5 + seed % 3  # before its bytes are forced down, before its name is, and after that
        seen.add(found_after_a_power_cut(write, seed=seed, after_s=cut_s))
        assert cut_s < 2 or FOUNDED in seen
    assert seen == {None, FOUNDED}


@both
async def test_the_unfinished_files_of_a_killed_process_are_removed_and_nothing_else(on_disk, tmp_path):
    async def use(disk, home):
        await written(disk, home, BORN)
        others = [f"{NAME}.x.aside", f"{NAME}.7.aside.keep", "controller-log.7.aside", "mine.7.aside"]
        for name in (f"{NAME}.7.aside", f"{NAME}.12345.aside", *others):
            await disk.write_atomic(home / name, [b"half"])
        assert await found_in(disk, home) == Saved(me="a")
        assert await disk.names(home) == sorted([NAME, "lock", *others])

    await on_disk(use, tmp_path)


@both
async def test_a_file_has_begun_once_it_has_an_identity(on_disk, tmp_path):
    async def use(disk, home):
        file = LogFile(disk, home)
        async with file.opened():
            assert not file.begun.is_set()
            await file.append([BORN])
            assert file.begun.is_set()
        file = LogFile(disk, home)
        async with file.opened():
            assert file.begun.is_set()
        await disk.write_atomic(home / NAME, [b"strange"])
        file = LogFile(disk, home)
        with pytest.raises(DamagedLog):
            async with file.opened():
                pass
        assert not file.begun.is_set()

    await on_disk(use, tmp_path)


@both
async def test_a_flipped_bit_before_the_end_is_refused_and_the_file_left_as_it_is(on_disk, tmp_path):
    async def use(disk, home):
        file = LogFile(disk, home)
        begins = [0]
        async with file.opened():
            for records in (FOUNDED.records(), entries(2), entries(3), entries(4)):
                await file.append([records])
                begins.append(len(await disk.read_bytes(home / NAME)))
        whole = await disk.read_bytes(home / NAME)
        for begin in begins[:-2]:
            for at in (begin, begin + 4, begin + 8, begin + HEAD_BYTES - 1, begin + HEAD_BYTES + 3):
                damaged = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
                await disk.write_atomic(home / NAME, [damaged])
                with pytest.raises(
                    DamagedLog, match=f"{NAME} is damaged at byte {begin}, in record .*empty disk"
                ):
                    await found_in(disk, home)
                assert await disk.read_bytes(home / NAME) == damaged

    await on_disk(use, tmp_path)


@both
async def test_a_file_that_somebody_else_wrote_to_is_not_written_over(on_disk, tmp_path):
    async def use(disk, home):
        file = LogFile(disk, home)
        async with file.opened():
            await file.append([BORN])
            held = len(await disk.read_bytes(home / NAME))
            await disk.write_from(home / NAME, held, b"strange")
            with pytest.raises(ConfigError, match=r"cannot be written: .*does another program write it"):
                await file.append([entries(2)])

    await on_disk(use, tmp_path)


async def test_a_log_that_others_can_read_is_taken_from_them(tmp_path, caplog):
    async with Disk() as disk:
        await written(disk, tmp_path, BORN)
        (tmp_path / NAME).chmod(0o644)

        assert (await found_in(disk, tmp_path)).me == "a"

    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    assert "its mode was 0644; it is 0600 now" in caplog.text


def test_unsynced_bytes_may_be_lost_or_torn_and_synced_ones_are_there():
    """A power cut while several batches are on their way: the first of them, or none, and never one alone."""
    seen = set()

    async def write(node, file):
        await file.append([FOUNDED.records(), entries(2)])
        node.disk_conditions.sync_s = 1.0
        await file.append([entries(3), entries(4), entries(5)])

    for seed in range(60):
        saved = found_after_a_power_cut(write, seed=seed, after_s=0.5)
        seen.add(tuple(entry.index for entry in saved.entries))
    assert {(2,), (2, 3, 4, 5)} <= seen <= {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5)}


def test_whenever_the_power_goes_the_old_file_is_there_or_the_new_one_and_no_part_of_either():
    whole = Saved(me="a", term=2, vote="a", snapshot=Snapshot(4, 2, FOUNDED.snapshot.members, b"later"))
    seen = set()

    async def write(node, file):
        await file.append([FOUNDED.records(), entries(2, 3, 4)])
        node.disk_conditions.sync_s = 1.0
        await file.begin_anew(whole.records())
        await asyncio.Event().wait()

    for seed in range(20):
        for after_s in (0.5, 1.5, 2.5, 3.5):
            saved = found_after_a_power_cut(write, seed=seed, after_s=after_s)
            seen.add((saved.snapshot.index, len(saved.entries)))
    assert seen == {(1, 3), (4, 0)}


@pytest.mark.parametrize("name", [NAME, "lock"])
async def test_a_pipe_in_the_place_of_a_file_is_an_error_and_no_wait(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    async with asyncio.timeout(5), Disk() as disk:
        with pytest.raises(ConfigError, match=f"{tmp_path} cannot be used: '{name}' is a pipe, a socket"):
            await found_in(disk, tmp_path)
