"""Checkpoints on a real disk: after any stop of the writer, a whole one is read."""

import asyncio
import errno
import fcntl
import os
import random
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint.checkpoint import CheckpointError, StoredPieces
from adam_async.checkpoint.files import (
    CheckpointFolder,
    check_resumes_newest,
    has_checkpoints,
    load_checkpoint,
    newest_manifest,
    open_checkpoint,
    open_checkpoints,
    written_folder,
)
from adam_async.checkpoint.names import is_folder_name
from adam_async.checkpoint.verification import verify_checkpoint
from adam_async.persistence import written_once
from adam_async.persistence.written_once import ShortMemory
from adam_async.run.counts import Evaluation
from adam_async.run.run_record import packed_record
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import (
    FILES,
    Example,
    checkpoint_of,
    manifest_of,
    name_of,
    record_of,
    written,
)

ROOT = Path(__file__).resolve().parents[3]


async def test_a_checkpoint_is_read_back_whole(tmp_path):
    async with Disk() as disk:
        folder = CheckpointFolder(tmp_path / "new" / "folder", disk)
        await folder.take_up(None)
        size = await folder.write(checkpoint_of(3))
        found = await load_checkpoint(folder.path, disk)
        files = await disk.names(folder.path / "checkpoint-0002-000003")
    wanted = checkpoint_of(3)
    assert (found.manifest, found.states) == (wanted.manifest, wanted.states)
    assert packed_record(found.record) == packed_record(wanted.record)
    assert found.pieces.catalogue == wanted.catalogue
    for ours, theirs in ((found.weights, wanted.weights), (found.state, wanted.state)):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            assert ours[name].dtype == array.dtype
            np.testing.assert_array_equal(ours[name], array)
    assert files == FILES
    assert size == sum((folder.path / "checkpoint-0002-000003" / file).stat().st_size for file in files)
    assert (found.problems, found.remarks) == ((), ())


async def test_the_newest_two_are_kept_and_latest_names_the_newest(tmp_path):
    async with Disk() as disk:
        await written(disk, tmp_path, 1, 2, 3, 4)
        assert await disk.names(tmp_path) == ["checkpoint-0002-000003", "checkpoint-0002-000004", "latest"]
        assert await disk.read_bytes(tmp_path / "latest") == b"checkpoint-0002-000004"


@pytest.mark.parametrize("keep", [1, 3, 9])
async def test_the_newest_are_kept_as_many_as_asked(tmp_path, keep):
    async with Disk() as disk:
        folder = await written(disk, tmp_path)
        for number in range(1, 6):
            await folder.write(checkpoint_of(number), keep=keep)
        assert await disk.names(tmp_path) == [*map(name_of, range(max(6 - keep, 1), 6)), "latest"]


async def test_a_named_checkpoint_is_continued_and_newer_ones_stay_until_the_next_is_durable(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path)
        for number in (1, 3, 5, 7):
            await folder.write(checkpoint_of(number), keep=4)
        found = await open_checkpoint(tmp_path / name_of(3), disk, tmp_path)
        assert found.manifest.groups == 3
        names = f"{name_of(5)}, {name_of(7)}"
        assert found.problems == ()
        assert found.remarks == (
            f"newer checkpoints in {tmp_path} ({names}) are removed after the run's first checkpoint",
        )
        await folder.take_up(found.manifest)
        # A run that is killed now has the same checkpoint before it.
        again = await open_checkpoint(tmp_path, disk, tmp_path)
        assert (again.manifest, again.remarks) == (found.manifest, found.remarks)
        assert (await newest_manifest(tmp_path, disk)).groups == 3
        assert sum(map(is_folder_name, await disk.names(tmp_path))) == 4
        await folder.write(checkpoint_of(6), keep=4)
        assert await disk.names(tmp_path) == [*map(name_of, (1, 3, 6)), "latest"]


async def test_no_remark_threatens_newer_checkpoints_if_the_run_writes_to_another_folder(tmp_path):
    async with AsyncExitStack() as stack:
        disk = await stack.enter_async_context(Disk())
        await written(disk, tmp_path / "runs", 1, 2)
        named, link = tmp_path / "runs" / name_of(1), tmp_path / "link"
        _, found = await open_checkpoints(stack, tmp_path / "other", named)
        assert found is not None
        assert found.remarks == ()
        link.symlink_to(tmp_path / "runs")
        _, found = await open_checkpoints(stack, link, named)
        assert found is not None
        assert "are removed" in found.remarks[0]


async def test_a_damaged_checkpoint_that_is_named_is_refused_with_the_way_to_a_whole_one(tmp_path):
    async with Disk() as disk:
        await written(disk, tmp_path, 1, 2)
        (tmp_path / name_of(2) / FILES[0]).unlink()
        with pytest.raises(CheckpointError, match=rf"is missing; --resume {tmp_path} continues"):
            await load_checkpoint(tmp_path / name_of(2), disk)


def test_the_folder_for_checkpoints_is_that_of_a_named_one(tmp_path):
    assert written_folder(None, tmp_path / name_of(3)) == tmp_path
    assert written_folder(tmp_path / "other", tmp_path / name_of(3)) == tmp_path / "other"
    assert written_folder(None, None) is None
    check_resumes_newest(tmp_path, "--attach")
    with pytest.raises(CheckpointError, match="copy it into a folder of its own"):
        check_resumes_newest(tmp_path / name_of(3), "--attach")


async def test_a_folder_for_checkpoints_with_the_name_of_one_is_refused(tmp_path):
    async with AsyncExitStack() as stack:
        with pytest.raises(CheckpointError, match="choose another name"):
            await open_checkpoints(stack, tmp_path / name_of(3), None)


async def test_a_second_run_cannot_write_to_the_folder_of_a_first_one_until_that_ends(tmp_path):
    async with AsyncExitStack() as first:
        await open_checkpoints(first, tmp_path / "runs", None)
        for link in (tmp_path / "runs", tmp_path / "link"):
            if link.name == "link":
                link.symlink_to(tmp_path / "runs")
            async with AsyncExitStack() as second:
                with pytest.raises(CheckpointError, match=rf"another run writes checkpoints to {link}: end"):
                    await open_checkpoints(second, link, None)
    async with AsyncExitStack() as second:
        await open_checkpoints(second, tmp_path / "runs", None)
        with pytest.raises(CheckpointError, match="No such file"):
            await open_checkpoints(second, None, tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


LOCKER = """
import asyncio, sys
from contextlib import AsyncExitStack
from pathlib import Path
from adam_async.checkpoint.files import open_checkpoints

async def main(path):
    async with AsyncExitStack() as stack:
        await open_checkpoints(stack, path, None)
        print("open", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_kill_9_of_a_run_leaves_its_folder_to_the_next_one(tmp_path):
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOCKER, str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert await child.stdout.readline() == b"open\n"
    async with AsyncExitStack() as stack:
        with pytest.raises(CheckpointError, match="another run writes checkpoints"):
            await open_checkpoints(stack, tmp_path, None)
    child.kill()
    await child.communicate()
    async with AsyncExitStack() as stack:
        await open_checkpoints(stack, tmp_path, None)


async def test_a_file_system_without_locks_has_checkpoints_and_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    async with AsyncExitStack() as stack:
        folder, _ = await open_checkpoints(stack, tmp_path, None)
        await folder.take_up(None)
        assert await folder.write(checkpoint_of(1)) > 0
    assert f"{tmp_path} cannot be locked: let no other run write checkpoints there" in caplog.messages


async def test_a_folder_of_another_run_is_refused_and_one_that_is_continued_is_not(tmp_path):
    async with Disk() as disk:
        await written(disk, tmp_path, 1)
        found = await load_checkpoint(tmp_path, disk)
        folder = CheckpointFolder(tmp_path, disk)
        unfinished = tmp_path / f".{name_of(2)}.aside"
        unfinished.mkdir()
        for resumed in (None, manifest_of(1, run="another")):
            with pytest.raises(CheckpointError, match=f"another run: .* --resume {tmp_path}"):
                await folder.take_up(resumed)
        assert unfinished.exists()  # the other run may write it now
        await folder.take_up(found.manifest)
        assert folder.latest == found.manifest.name
        await folder.write(checkpoint_of(2))
        assert (await load_checkpoint(tmp_path, disk)).manifest.groups == 2


async def test_the_next_start_removes_the_leftovers_of_a_killed_writer(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 1)
        for name in (".checkpoint-0002-000002.aside", ".checkpoint-0002-000000.gone.aside"):
            await disk.make_folder(tmp_path / name)
            await disk.write_atomic(tmp_path / name / FILES[0], [b"half of it"])
        for name in ("latest.123.aside", "notes-of-mine.aside"):
            await disk.write_atomic(tmp_path / name, [b"half of it"])
        await folder.take_up(await newest_manifest(tmp_path, disk))
        assert await disk.names(tmp_path) == ["checkpoint-0002-000001", "latest", "notes-of-mine.aside"]


async def test_the_next_write_removes_the_leftovers_of_one_that_took_too_long(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 1)
        await disk.make_folder(tmp_path / ".checkpoint-0002-000002.aside")
        await disk.write_atomic(tmp_path / "latest.123.aside", [b"another task writes this"])
        await folder.write(checkpoint_of(3))
        names = await disk.names(tmp_path)
        assert names == ["checkpoint-0002-000001", "checkpoint-0002-000003", "latest", "latest.123.aside"]


async def test_a_place_without_checkpoints_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    async with Disk() as disk:
        assert not await has_checkpoints(tmp_path / "absent", disk)
        with pytest.raises(CheckpointError, match="file cannot be read: Not a directory"):
            await has_checkpoints(tmp_path / "file", disk)


async def test_a_whole_checkpoint_that_latest_does_not_name_yet_is_overwritten_in_time(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 1, 2)
        await disk.write_atomic(tmp_path / "latest", [b"checkpoint-0002-000001"])
        found = await load_checkpoint(tmp_path, disk)
        assert found.manifest.groups == 1
        await folder.take_up(found.manifest)
        await folder.write(checkpoint_of(2, data={"name": "again"}))
        assert (await load_checkpoint(tmp_path, disk)).manifest.data == {"name": "again"}


DAMAGES = {
    "a bit": (lambda data: data[:150] + bytes([data[150] ^ 1]) + data[151:], r"is damaged at byte \d+"),
    "cut off": (
        lambda data: data[:-7],
        r"it has [\d,]+ bytes, and was written with [\d,]+|is damaged at byte \d+",
    ),
    "gone": (None, "is missing"),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_file_is_named_and_the_checkpoint_before_is_read(tmp_path, file, damage):
    change, words = DAMAGES[damage]
    async with Disk() as disk:
        await written(disk, tmp_path, 1, 2)
        path = tmp_path / name_of(2) / file
        data = path.read_bytes()
        path.unlink()
        if change is not None:
            path.write_bytes(change(data))
        found = await load_checkpoint(tmp_path, disk)
        assert found.manifest.groups == 1
        (problem,) = found.problems
        assert problem.startswith(str(path))
        # Without its head a checkpoint could be one of another run.
        assert len(found.remarks) == (file == FILES[-1])
        assert re.search(words, problem)


async def test_the_error_of_a_folder_without_whole_checkpoints_names_each_damage(tmp_path):
    async with Disk() as disk:
        with pytest.raises(CheckpointError, match="No such file"):
            await load_checkpoint(tmp_path / "absent", disk)
        with pytest.raises(CheckpointError, match="train --checkpoint writes them"):
            await load_checkpoint(tmp_path, disk)
        await written(disk, tmp_path, 1, 2)
        for name in ("checkpoint-0002-000001", "checkpoint-0002-000002"):
            (tmp_path / name / FILES[-1]).write_bytes(b"{}")
        with pytest.raises(CheckpointError) as refused:
            await load_checkpoint(tmp_path, disk)
    for name in ("checkpoint-0002-000001", "checkpoint-0002-000002"):
        assert f"{tmp_path / name / FILES[-1]} is damaged at byte 0" in str(refused.value)


@pytest.mark.parametrize("text", [b"checkpoint-0009-000009", b"../../etc", b"\xff", bytes(5000)])
async def test_a_latest_without_its_checkpoint_is_a_problem_and_the_newest_is_read(tmp_path, text):
    async with Disk() as disk:
        await written(disk, tmp_path, 1, 2)
        (tmp_path / "latest").write_bytes(text)
        found = await load_checkpoint(tmp_path, disk)
    assert found.manifest.groups == 2
    assert re.search("which is not there|has 5000 bytes, expected at most 4096", found.problems[0])


FORGED = {
    "another run": ({"record": lambda it: record_of(run="run-2")}, "its records are of different runs"),
    "another store": (
        {"catalogue": lambda it: checkpoint_of(1, rows=100_000).catalogue},
        "has not the pieces of its run",
    ),
    "another epoch": ({"record": lambda it: record_of(epoch=7)}, "was renamed"),
    "an accuracy above 1": (
        {"record": lambda it: msgspec.structs.replace(it.record, evaluated=(Evaluation(1, 1.5),))},
        "it is no record of a run",
    ),
    "another program": (
        {
            "record": lambda it: msgspec.structs.replace(
                it.record, program=msgspec.structs.replace(it.record.program, blob=b"x")
            )
        },
        "run run-1 cannot be read",
    ),
}


class Forged(Example):
    """A checkpoint whose head is not that of its pieces."""

    honest = checkpoint_of(1)

    def pieces(self):
        return self.honest.pieces()


@pytest.mark.parametrize("kind", FORGED)
async def test_a_head_that_contradicts_its_folder_is_refused(tmp_path, kind):
    changes, words = FORGED[kind]
    honest = checkpoint_of(1)
    names = ("manifest", "catalogue", "record", "tensors", "states")
    fields = {name: getattr(honest, name) for name in names}
    fields |= {name: change(honest) for name, change in changes.items()}
    async with Disk() as disk:
        folder = await written(disk, tmp_path)
        await folder.write(Forged(**fields))
        with pytest.raises(CheckpointError, match=words):
            await load_checkpoint(tmp_path, disk)


async def test_a_checkpoint_of_an_earlier_format_is_named_with_a_cure(tmp_path):
    (tmp_path / name_of(1)).mkdir()
    (tmp_path / name_of(1) / "manifest.json").write_bytes(b"{}")
    async with Disk() as disk:
        with pytest.raises(CheckpointError, match=r"manifest.json has the format of .*: finish the run with"):
            await load_checkpoint(tmp_path, disk)


async def test_a_lack_of_memory_for_the_newest_checkpoint_reads_no_older_one_in_its_place(
    tmp_path, monkeypatch
):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 1, 2)
        sizes = [(tmp_path / name_of(2) / file).stat().st_size for file in FILES]
        need = StoredPieces(checkpoint_of(2).catalogue).nbytes
        for free in (need - 1, sizes[0] - 1, sizes[-1] - 1, 0):
            monkeypatch.setattr(written_once, "available_bytes", lambda free=free: free)
            for path in (tmp_path, tmp_path / name_of(2)):
                with pytest.raises(ShortMemory, match=rf"needs [\d,]+ bytes of memory, and {free:,} are"):
                    await load_checkpoint(path, disk)
        await folder.write(checkpoint_of(3))  # without the heads of the others
        assert len(await disk.names(tmp_path)) == 3


@pytest.mark.parametrize("file", FILES)
async def test_links_and_pipes_are_not_read(tmp_path, file):
    async with Disk() as disk:
        await written(disk, tmp_path, 1)
        path = tmp_path / name_of(1) / file
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=f"{file} cannot be read: it is a link"):
            await load_checkpoint(tmp_path, disk)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match=f"{file} cannot be read: it is a link, a folder, a pipe"):
            await load_checkpoint(tmp_path, disk)


class FullDisk(Disk):
    """A disk on which the write with a given number fails."""

    def __init__(self) -> None:
        super().__init__(name="full")
        self.left = 10**9

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    async def write_from(self, path, offset, data):
        self._count()
        await super().write_from(path, offset, data)

    async def append_made(self, path, offset, make):
        self._count()
        return await super().append_made(path, offset, make)

    async def write_atomic(self, path, parts):
        self._count()
        await super().write_atomic(path, parts)


@pytest.mark.parametrize("writes", range(6))
async def test_a_full_disk_leaves_the_earlier_checkpoints_and_no_others(tmp_path, writes):
    async with FullDisk() as disk:
        folder = await written(disk, tmp_path, 1)
        disk.left = writes
        with pytest.raises(OSError, match="No space left"):
            await folder.write(checkpoint_of(2))
        assert not [name for name in await disk.names(tmp_path) if name.startswith(".")]
        assert (await load_checkpoint(tmp_path, disk)).manifest.groups == 1
        disk.left = 100
        await folder.write(checkpoint_of(3))
        assert (await load_checkpoint(tmp_path, disk)).manifest.groups == 3
        assert await disk.names(tmp_path) == [name_of(2 if writes == 5 else 1), name_of(3), "latest"]


async def test_a_checkpoint_that_is_cancelled_after_its_rename_is_removed_in_time(tmp_path):
    class Cancelled(Disk):
        async def write_atomic(self, path, parts):
            raise asyncio.CancelledError

    async with Disk() as disk, Cancelled() as cancelled:
        folder = await written(disk, tmp_path, 1)
        folder._disk = cancelled
        with pytest.raises(asyncio.CancelledError):
            await folder.write(checkpoint_of(2))
        folder._disk = disk
        await folder.write(checkpoint_of(2))
        assert folder.renamed == ""
        for groups in (3, 4):
            await folder.write(checkpoint_of(groups))
        assert await disk.names(tmp_path) == [name_of(3), name_of(4), "latest"]


async def test_an_old_checkpoint_that_cannot_be_removed_is_removed_another_time(tmp_path, monkeypatch):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 1, 2)

        async def broken(name):
            raise PermissionError(errno.EACCES, "Permission denied", name)

        with monkeypatch.context() as patched:
            patched.setattr(folder, "_put_away", broken)
            assert await folder.write(checkpoint_of(3)) > 0
        assert len(await disk.names(tmp_path)) == 4
        await folder.write(checkpoint_of(4))
        assert await disk.names(tmp_path) == ["checkpoint-0002-000003", "checkpoint-0002-000004", "latest"]


@pytest.mark.parametrize("kind", ["file", "link"])
async def test_a_file_or_link_with_the_name_of_a_checkpoint_stays(tmp_path, kind):
    path, elsewhere = tmp_path / "folder" / name_of(1), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes").write_text("of a user")
    async with Disk() as disk:
        folder = await written(disk, path.parent, 2)
        path.symlink_to(elsewhere) if kind == "link" else path.write_text("of a user")
        for groups in (3, 4, 5):
            await folder.write(checkpoint_of(groups))
        names = [name_of(groups) for groups in (1, 4, 5)]
        assert await disk.names(path.parent) == [*names, "latest"]
        assert (elsewhere / "notes").read_text() == "of a user"
        path.rename(path.parent / f".{name_of(1)}.gone.aside")
        await CheckpointFolder(path.parent, disk).take_up(await newest_manifest(path.parent, disk))
        assert await disk.names(path.parent) == [*names[1:], "latest"]
        assert (elsewhere / "notes").read_text() == "of a user"


async def test_a_checkpoint_that_a_user_moves_into_the_folder_of_a_run_stays(tmp_path):
    async with Disk() as disk:
        await written(disk, tmp_path / "elsewhere", 9)
        folder = await written(disk, tmp_path / "folder", 1)
        (tmp_path / "elsewhere" / name_of(9)).rename(folder.path / name_of(9))
        for groups in (2, 3):
            await folder.write(checkpoint_of(groups), keep=1)
        assert await disk.names(folder.path) == [name_of(3), name_of(9), "latest"]


async def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    async with Disk() as disk:
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to .*file/in"):
            await CheckpointFolder(tmp_path / "file" / "in", disk).take_up(None)


WRITER = """
import asyncio, sys
from pathlib import Path
from adam_async.checkpoint.files import CheckpointFolder, load_checkpoint
from adam_async.run.run_record import packed_record
from adam_async.run.counts import Evaluation
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import checkpoint_of

async def main(path):
    async with Disk() as disk:
        written = list(path.glob("checkpoint-*"))
        found = await load_checkpoint(path, disk) if written else None
        folder = CheckpointFolder(path, disk)
        await folder.take_up(found.manifest if found else None)
        groups = found.manifest.groups if found else 0
        while True:
            print(groups, flush=True)
            groups += 1
            await folder.write(checkpoint_of(groups, rows=10_000), keep=3)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.timeout(280)
async def test_kill_9_at_any_moment_leaves_the_checkpoint_before_or_the_new_one(tmp_path):
    dice = random.Random(5)
    path = tmp_path / "checkpoints"
    strays = 0
    async with Disk() as disk:
        for _ in range(50):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WRITER, str(path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
            )
            begun = int(await child.stdout.readline())
            try:
                async with asyncio.timeout(dice.uniform(0.0, 0.1)):
                    await child.wait()
            except TimeoutError:
                child.kill()
            said = [int(line) for line in (await child.stdout.read()).split()]
            assert await child.wait() == -9
            newest = max([begun, *said])
            strays += any(path.glob(".*"))
            if newest or any(path.glob("checkpoint-*")):
                found = await load_checkpoint(path, disk)
                assert newest <= found.manifest.groups <= newest + 1
                for array in (*found.weights.values(), *found.state.values()):
                    assert np.all(array == found.manifest.groups)
                assert found.problems == ()
                names = [each.name for each in path.glob("checkpoint-*")]
                whole = [(await verify_checkpoint(path / name, disk)).whole for name in names]
                assert sum(whole) >= min(3, newest)
    assert strays > 10, "kills must hit the writing, or they prove nothing"
    assert newest > 20
