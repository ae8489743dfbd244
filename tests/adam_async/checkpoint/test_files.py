"""Checkpoints on a real disk: after any stop of the writer, a whole one is read."""

import asyncio
import errno
import random
import re
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint.files import CheckpointFolder, load_checkpoint, newest_manifest
from adam_async.checkpoint.manifest import CheckpointError, ProgressNote
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import checkpoint_of, manifest_of

ROOT = Path(__file__).resolve().parents[3]


async def written(disk, path, *groups):
    """A folder into which checkpoints were written."""
    folder = CheckpointFolder(path, disk)
    await folder.take_up(None)
    for number in groups:
        await folder.write(checkpoint_of(number))
    return folder


async def test_a_checkpoint_is_read_back_whole(tmp_path):
    async with Disk() as disk:
        folder = CheckpointFolder(tmp_path / "new" / "folder", disk)
        await folder.take_up(None)
        size = await folder.write(checkpoint_of(3))
        found = await load_checkpoint(folder.path, disk)
        files = await disk.names(folder.path / "checkpoint-0002-000003")
    wanted = checkpoint_of(3)
    assert msgspec.structs.replace(found.manifest, files=(), checksum="") == wanted.manifest
    for ours, theirs in ((found.weights, wanted.weights), (found.state, wanted.state)):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            assert ours[name].dtype == array.dtype
            np.testing.assert_array_equal(ours[name], array)
    assert files == [
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "state-00001-of-00001.safetensors",
    ]
    assert size == sum((folder.path / "checkpoint-0002-000003" / file).stat().st_size for file in files)
    assert (found.problems, found.trained_again) == ((), 0)


async def test_the_newest_two_are_kept_and_latest_names_the_newest(tmp_path):
    async with Disk() as disk:
        await written(disk, tmp_path, 1, 2, 3, 4)
        assert await disk.names(tmp_path) == ["checkpoint-0002-000003", "checkpoint-0002-000004", "latest"]
        assert await disk.read_bytes(tmp_path / "latest") == b"checkpoint-0002-000004"


async def test_a_folder_of_another_run_is_refused_and_one_that_is_continued_is_not(tmp_path):
    async with Disk() as disk:
        await written(disk, tmp_path, 1)
        found = await load_checkpoint(tmp_path, disk)
        folder = CheckpointFolder(tmp_path, disk)
        for resumed in (None, manifest_of(1, run="another")):
            with pytest.raises(CheckpointError, match=f"another run: .* --resume {tmp_path}"):
                await folder.take_up(resumed)
        await folder.take_up(found.manifest)
        assert folder.latest == found.manifest.name
        await folder.write(checkpoint_of(2))
        assert (await load_checkpoint(tmp_path, disk)).manifest.groups == 2


async def test_the_next_start_removes_the_leftovers_of_a_killed_writer(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 1)
        for name in (".checkpoint-0002-000002.aside", ".checkpoint-0002-000000.gone.aside"):
            await disk.make_folder(tmp_path / name)
            await disk.write_down(tmp_path / name / "model-00001-of-00001.safetensors", [b"half of it"])
        for name in ("latest.123.aside", "progress.json.123.aside", "notes-of-mine.aside"):
            await disk.write_down(tmp_path / name, [b"half of it"])
        await folder.take_up(await newest_manifest(tmp_path, disk))
        assert await disk.names(tmp_path) == ["checkpoint-0002-000001", "latest", "notes-of-mine.aside"]


async def test_a_whole_checkpoint_that_latest_does_not_name_yet_is_overwritten_in_time(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 1, 2)
        await disk.write_atomic(tmp_path / "latest", [b"checkpoint-0002-000001"])
        found = await load_checkpoint(tmp_path, disk)
        assert found.manifest.groups == 1
        await folder.take_up(found.manifest)
        again = checkpoint_of(2, trained_again=1)
        await folder.write(again)
        assert (await load_checkpoint(tmp_path, disk)).manifest.trained_again == 1


DAMAGES = {
    "a bit": (lambda data: data[:150] + bytes([data[150] ^ 1]) + data[151:], "its checksum is wrong"),
    "cut off": (lambda data: data[:-7], r"it has \d+ bytes of \d+"),
    "gone": (None, "is missing"),
}


@pytest.mark.parametrize("file", ["manifest.json", "model-00001-of-00001", "state-00001-of-00001", "index"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_file_is_named_and_the_checkpoint_before_is_read(tmp_path, file, damage):
    change, words = DAMAGES[damage]
    async with Disk() as disk:
        await written(disk, tmp_path, 1, 2)
        (path,) = (tmp_path / "checkpoint-0002-000002").glob(f"*{file}*")
        data = path.read_bytes()
        path.unlink()
        if change is not None:
            path.write_bytes(change(data))
        found = await load_checkpoint(tmp_path, disk)
        assert found.manifest.groups == 1
        (problem,) = found.problems
        assert problem.startswith(str(path))
        if file == "manifest.json" and damage != "gone":
            words = "manifest.json is damaged"
        assert re.search(words, problem)


async def test_the_error_of_a_folder_without_whole_checkpoints_names_each_damage(tmp_path):
    async with Disk() as disk:
        with pytest.raises(CheckpointError, match="No such file"):
            await load_checkpoint(tmp_path / "absent", disk)
        with pytest.raises(CheckpointError, match="train --checkpoint writes them"):
            await load_checkpoint(tmp_path, disk)
        await written(disk, tmp_path, 1, 2)
        for name in ("checkpoint-0002-000001", "checkpoint-0002-000002"):
            (tmp_path / name / "manifest.json").write_bytes(b"{}")
        with pytest.raises(CheckpointError) as refused:
            await load_checkpoint(tmp_path, disk)
    for name in ("checkpoint-0002-000001", "checkpoint-0002-000002"):
        assert f"{tmp_path / name / 'manifest.json'} is damaged" in str(refused.value)


@pytest.mark.parametrize("text", [b"checkpoint-0009-000009", b"../../etc", b"\xff"])
async def test_a_latest_without_its_checkpoint_is_a_problem_and_the_newest_is_read(tmp_path, text):
    async with Disk() as disk:
        await written(disk, tmp_path, 1, 2)
        (tmp_path / "latest").write_bytes(text)
        found = await load_checkpoint(tmp_path, disk)
    assert found.manifest.groups == 2
    assert "which is not there" in found.problems[0]


async def test_a_progress_note_decides_the_number_of_groups_trained_again(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 3)
        await folder.note_progress(ProgressNote(epoch=2, groups=10, trained_again=1))
        assert (await load_checkpoint(tmp_path, disk)).trained_again == 8
        (tmp_path / "progress.json").write_bytes(b"{half")
        assert (await load_checkpoint(tmp_path, disk)).trained_again == 0


class FullDisk(Disk):
    """A disk on which the write with a given number fails."""

    def __init__(self) -> None:
        super().__init__(name="full")
        self.left = 10**9

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    async def write_down(self, path, parts):
        self._count()
        return await super().write_down(path, parts)

    async def write_atomic(self, path, parts):
        self._count()
        await super().write_atomic(path, parts)


@pytest.mark.parametrize("writes", range(5))
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


async def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    async with Disk() as disk:
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to .*file/in"):
            await CheckpointFolder(tmp_path / "file" / "in", disk).take_up(None)


WRITER = """
import asyncio, sys
from pathlib import Path
from adam_async.checkpoint.files import CheckpointFolder, load_checkpoint
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
            await folder.write(checkpoint_of(groups, rows=10_000))

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
    assert strays > 10, "kills must hit the writing, or they prove nothing"
    assert newest > 20
