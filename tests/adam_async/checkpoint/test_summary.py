"""Summaries of checkpoints have the facts that an operator needs, without reading tensors."""

import os

import pytest

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.verification import checkpoints_in, summary_of
from adam_async.persistence import written_once
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import FILES, CountingDisk, checkpoint_of, written

NAMES = ["checkpoint-0002-000004", "checkpoint-0002-000003"]


async def test_a_summary_has_the_facts_of_the_manifest_and_of_the_files(tmp_path):
    async with CountingDisk() as disk:
        folder = CheckpointFolder(tmp_path, disk)
        await folder.take_up(None)
        await folder.write(checkpoint_of(3))
        size = await folder.write(checkpoint_of(4))
        os.utime(tmp_path / NAMES[0] / FILES[-1], (0, 86_400))
        (tmp_path / NAMES[1] / FILES[0]).unlink()
        before = disk.read
        assert await checkpoints_in(tmp_path, disk) == (tmp_path, NAMES, [])
        new, old = [await summary_of(tmp_path / name, disk, latest=name == NAMES[0]) for name in NAMES]
        assert disk.read - before < size
    assert (new.name, new.epoch, new.groups, new.run, new.mode, new.model) == (
        NAMES[0],
        2,
        4,
        "run-1",
        "asp",
        "a model",
    )
    assert (new.whole, new.latest, new.written, new.bytes, new.problem) == (
        True,
        True,
        "1970-01-02T00:00:00Z",
        size,
        "",
    )
    assert (old.whole, old.latest) == (False, False)
    assert old.problem.endswith(f"{FILES[0]} is missing")


async def test_a_summary_needs_no_memory_for_shards(tmp_path, monkeypatch):
    async with Disk() as disk:
        await written(disk, tmp_path, 4)
        head = (tmp_path / NAMES[0] / FILES[-1]).stat().st_size
        monkeypatch.setattr(written_once, "available_bytes", lambda: head)
        found = await summary_of(tmp_path / NAMES[0], disk, latest=True)
    assert (found.whole, found.problem) == (True, "")


async def test_a_checkpoint_with_a_damaged_head_has_the_place_of_its_name(tmp_path):
    (tmp_path / NAMES[0]).mkdir()
    (tmp_path / NAMES[0] / FILES[-1]).write_bytes(b"{}")
    async with Disk() as disk:
        found = await summary_of(tmp_path / NAMES[0], disk, latest=True)
    assert (found.epoch, found.groups, found.whole, found.bytes) == (2, 4, False, 0)
    assert f"{FILES[-1]} is damaged" in found.problem


async def test_a_folder_without_checkpoints_is_refused_with_the_command_for_it(tmp_path):
    empty, run, server = (tmp_path / name for name in ("empty", "run", "run/ps-0"))
    store = server / "store-0123"
    for folder in (empty, store):
        folder.mkdir(parents=True)
    (store / "states-00000001.segment").write_bytes(b"")
    async with Disk() as disk:
        with pytest.raises(CheckpointError, match=r"empty can be read: train --checkpoint writes them"):
            await checkpoints_in(empty, disk)
        for folder in (run, server, store):
            with pytest.raises(CheckpointError, match=r"shards of a store, .* train --store"):
                await checkpoints_in(folder, disk)
        for path in (tmp_path / "absent", tmp_path / NAMES[0]):
            with pytest.raises(CheckpointError, match="No such file"):
                await checkpoints_in(path, disk)


async def test_a_checkpoint_with_another_name_is_no_store(tmp_path):
    async with Disk() as disk:
        await written(disk, tmp_path, 4)
        renamed = (tmp_path / NAMES[0]).rename(tmp_path / f"{NAMES[0]}.kept")
        with pytest.raises(CheckpointError, match=r"kept has the files of one checkpoint, and not its name:"):
            await checkpoints_in(renamed, disk)
        with pytest.raises(CheckpointError, match="train --checkpoint writes them"):
            (tmp_path / "latest").unlink()
            await checkpoints_in(tmp_path, disk)


async def test_a_list_of_many_checkpoints_has_the_newest_ones_and_the_latest(tmp_path):
    for epoch in range(1, 8):
        (tmp_path / f"checkpoint-{epoch:04d}-000000").mkdir()
    (tmp_path / "latest").write_text("checkpoint-0002-000000")
    async with Disk() as disk:
        _, names, problems = await checkpoints_in(tmp_path, disk, most=3)
    assert [int(name[11:15]) for name in names] == [2, 7, 6, 5]
    assert problems == [f"4 older checkpoints in {tmp_path} are not listed"]
