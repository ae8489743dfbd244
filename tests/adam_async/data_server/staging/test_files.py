"""The folder of a copy: who may use it, and what is believed of what lies in it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from adam_async.data_server.staging.files import Copy, find
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk

CONTENT = bytes(range(256))

HOLDS = """
import asyncio, sys
from pathlib import Path
from adam_async.data_server.staging.files import Copy, find
from adam_async.runtime.disk import Disk

async def main(source, folder):
    async with Disk() as disk:
        copy = Copy(folder, await find(source, disk), disk, start=1)
        async with copy.hold():
            print("held", flush=True)
            await asyncio.Event().wait()

asyncio.run(main(*map(Path, sys.argv[1:])))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    for name in ("a", "b"):
        (tmp_path / "source" / name).write_bytes(CONTENT)
    return tmp_path / "source"


async def copy_of(source: Path, disk: Disk, *, start: int = 1) -> Copy:
    return Copy(source.parent / "copy", await find(source, disk), disk, start=start)


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for piece in content:
        yield piece


async def test_a_folder_is_held_by_one_server_at_a_time(source: Path) -> None:
    async with Disk(name="one") as disk, Disk(name="other") as other_disk:
        one, other = await copy_of(source, disk), await copy_of(source, other_disk, start=2)
        async with one.hold():
            with pytest.raises(DataError, match="/copy is in use: another data server stages into it"):
                async with other.hold():
                    pass
        await disk.names(source)  # takes its turn behind the lock
        async with other.hold():
            pass


@asynccontextmanager
async def holder(source: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that holds the folder."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDS, str(source), str(source.parent / "copy"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"held\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_process_that_hangs_keeps_the_folder_and_one_that_is_killed_does_not(source: Path) -> None:
    async with Disk() as disk, holder(source) as process:
        copy = await copy_of(source, disk)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(DataError, match="/copy is in use"):
            async with copy.hold():
                pass
        process.kill()
        await process.wait()
        async with copy.hold():
            assert await copy.take_up() == {}


async def test_two_writers_of_one_file_do_not_write_into_each_other(source: Path) -> None:
    async with Disk() as disk:
        one, other = await copy_of(source, disk), await copy_of(source, disk, start=2)
        async with one.hold():
            await one.take_up()
            first = await one.write(0, pieces(CONTENT[:100], CONTENT[100:]))
            assert await other.write(0, pieces(CONTENT)) == first
            await one.keep(0, first)
            await other.keep(0, first)
            assert await one.read(0, 0) == CONTENT


async def test_incomplete_files_of_an_earlier_start_are_removed(source: Path) -> None:
    async with Disk() as disk:
        killed, later = await copy_of(source, disk), await copy_of(source, disk, start=2)
        async with killed.hold():
            await killed.take_up()
            await killed.keep(1, await killed.write(1, pieces(CONTENT)))
            await killed.write(0, pieces(CONTENT))
        async with later.hold():
            assert list(await later.take_up()) == [1]
        assert await disk.names(later.folder / ".staging") == ["lock", "notes"]


async def test_a_damaged_note_costs_a_copy_of_its_file_only(source: Path) -> None:
    async with Disk() as disk:
        before, later = await copy_of(source, disk), await copy_of(source, disk, start=2)
        async with before.hold():
            await before.take_up()
            for number in (0, 1):
                await before.keep(number, await before.write(number, pieces(CONTENT)))
        notes = later.folder / ".staging" / "notes"
        first, second = (await disk.read_bytes(notes)).splitlines(keepends=True)
        await disk.write_atomic(notes, [first.replace(b'"path":"', b'"path":"\xff'), second])
        async with later.hold():
            assert list(await later.take_up()) == [1]


class LosingDisk(Disk):
    """Forces down less than was written, as a file system does that somebody else writes to."""

    async def sync_file(self, path: Path) -> None:
        await super().sync_file(path)
        os.truncate(path, 3)


async def test_a_file_that_lost_bytes_while_it_was_forced_down_gets_no_name(source: Path) -> None:
    async with LosingDisk() as disk:
        copy = await copy_of(source, disk)
        async with copy.hold():
            await copy.take_up()
            checksum = await copy.write(0, pieces(CONTENT))
            with pytest.raises(OSError, match="holds 3 bytes instead of 256; does another program write it"):
                await copy.keep(0, checksum)
        assert await disk.names(copy.folder) == [".staging"]
