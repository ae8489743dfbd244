"""Folders with checkpoints of several runs: a run reads and removes those of its own training."""

import pytest

from adam_async.checkpoint.files import CheckpointFolder, load_checkpoint, newest_manifest
from adam_async.checkpoint.reader import checkpoint_manifest
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import FILES, checkpoint_of, name_of, written


async def moved_in(disk, path, groups):
    """Write a checkpoint of another run, and move it into a folder."""
    folder = CheckpointFolder(path.parent / "elsewhere", disk)
    await folder.write(checkpoint_of(groups, run="another"))
    (folder.path / name_of(groups)).rename(path / name_of(groups))


@pytest.mark.parametrize("other", [1, 9])
async def test_a_checkpoint_of_another_run_that_is_there_at_the_start_stays(tmp_path, other):
    path = tmp_path / "folder"
    async with Disk() as disk:
        await written(disk, path, 2, 3)
        await moved_in(disk, path, other)
        found = await load_checkpoint(path, disk)
        assert found.problems == ()
        assert found.remarks == (
            (f"newer checkpoints in {path} ({name_of(9)}) are of another run or damaged, and stay",)
            if other == 9
            else ()
        )
        folder = CheckpointFolder(path, disk)
        await folder.take_up(found.manifest)
        for groups in (4, 5, 6):
            await folder.write(checkpoint_of(groups, run="run-2"), keep=1)
        names = sorted([name_of(6), name_of(other)])
        assert await disk.names(path) == [*names, "latest"]
        assert (await load_checkpoint(path / name_of(other), disk)).manifest.run == "another"


async def test_a_checkpoint_of_another_run_with_the_name_of_a_new_one_gets_a_name_of_its_own(tmp_path):
    path = tmp_path / "folder"
    async with Disk() as disk:
        folder = await written(disk, path, 1)
        for _ in range(2):
            await disk.remove_folder(path / name_of(3))
            await moved_in(disk, path, 3)
            await folder.take_up(await newest_manifest(path / name_of(1), disk))
            await folder.write(checkpoint_of(3))
        kept = [f"{name_of(3)}.kept", f"{name_of(3)}.kept1"]
        assert await disk.names(path) == [name_of(1), name_of(3), *kept, "latest"]
        assert folder.renamed == kept[1]
        await disk.remove_folder(path / name_of(3))
        for name in kept:
            (path / name).rename(path / name_of(3))
            assert (await checkpoint_manifest(path / name_of(3), disk)).run == "another"
            (path / name_of(3)).rename(path / name)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("other", [1, 9])
async def test_with_a_damaged_latest_one_of_the_same_training_is_read_before_those_of_other_runs(
    tmp_path, file, other
):
    path = tmp_path / "folder"
    async with Disk() as disk:
        folder = await written(disk, path, 2)
        await folder.take_up(await newest_manifest(path, disk))
        await folder.write(checkpoint_of(3, run="run-2", runs=("run-1",)))
        await moved_in(disk, path, other)
        (path / name_of(3) / file).unlink()
        found = await load_checkpoint(path, disk)
        assert (found.manifest.groups, found.manifest.run) == (2, "run-1")
        assert found.problems == (f"{path / name_of(3) / file} is missing",)
        (path / name_of(2) / file).unlink()
        found = await load_checkpoint(path, disk)
        assert found.manifest.run == "another"
        # Without the manifest of the newest one its run is unknown.
        assert file == FILES[-1] or found.remarks[0] == (
            f"{path / name_of(other)} is of another run than the newest one, perhaps of another training"
        )


async def test_an_older_checkpoint_of_another_run_with_the_name_of_a_new_one_stays(tmp_path):
    path = tmp_path / "folder"
    async with Disk() as disk:
        folder = await written(disk, path, 3, 8)
        await moved_in(disk, path, 5)
        await folder.take_up(await newest_manifest(path, disk), runs=("run-1",))
        await folder.write(checkpoint_of(5, run="run-2"))
        kept = f"{name_of(5)}.kept"
        assert await disk.names(path) == [name_of(3), name_of(5), kept, "latest"]
        assert folder.renamed == kept
        await folder.write(checkpoint_of(6, run="run-2"))
        assert folder.renamed == ""


async def test_checkpoints_of_other_runs_do_not_count_as_kept_ones(tmp_path):
    path = tmp_path / "folder"
    async with Disk() as disk:
        folder = await written(disk, path)
        for groups in (2, 3, 5):
            await folder.write(checkpoint_of(groups), keep=3)
        await moved_in(disk, path, 4)
        await folder.take_up(await newest_manifest(path, disk))
        await folder.write(checkpoint_of(6), keep=3)
        assert await disk.names(path) == [*map(name_of, (3, 4, 5, 6)), "latest"]


async def test_a_checkpoint_whose_manifest_cannot_be_read_for_a_while_is_removed_later(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path)
        for groups in (1, 2, 3, 9):
            await folder.write(checkpoint_of(groups), keep=4)
        continued = await newest_manifest(tmp_path / name_of(3), disk)
        away = [tmp_path / name_of(groups) / FILES[-1] for groups in (1, 9)]
        for path in away:
            path.rename(path.with_name("away"))
        await folder.take_up(continued)
        await folder.write(checkpoint_of(4), keep=2)
        assert await disk.names(tmp_path) == [*map(name_of, (1, 3, 4, 9)), "latest"]
        for path in away:
            path.with_name("away").rename(path)
        await folder.write(checkpoint_of(5), keep=2)
        assert await disk.names(tmp_path) == [*map(name_of, (4, 5)), "latest"]


async def test_checkpoints_of_all_runs_that_a_run_continues_are_removed_in_time(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, 1, 2)
        for number in (3, 4):
            await folder.take_up(await newest_manifest(tmp_path, disk))
            runs = tuple(f"run-{earlier}" for earlier in (3, 1) if earlier < number)
            await folder.write(checkpoint_of(number, run=f"run-{number}", runs=runs), keep=9)
        await folder.take_up(await newest_manifest(tmp_path / name_of(2), disk))
        await folder.write(checkpoint_of(5, run="run-5"), keep=2)
        assert await disk.names(tmp_path) == [name_of(2), name_of(5), "latest"]
