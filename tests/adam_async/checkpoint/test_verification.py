"""A verification reads every byte of a checkpoint, and finds each changed one by its file."""

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint import checkpoint
from adam_async.checkpoint.verification import verify_checkpoint
from adam_async.persistence.frames import MAGIC
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import CONFIG, FILES, CountingDisk, checkpoint_of, name_of
from tests.adam_async.checkpoint.checkpoints import written as folder_of

NAME = name_of(3)


async def written(disk, path, checkpoint):
    """Write a checkpoint; returns its folder."""
    folder = await folder_of(disk, path)
    await folder.write(checkpoint)
    return path / NAME


async def test_a_whole_checkpoint_is_whole_by_all_its_bytes(tmp_path):
    async with CountingDisk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of())
        before = disk.read
        found = await verify_checkpoint(folder, disk)
        assert (found.whole, found.files, found.problems) == (True, 2, ())
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert found.bytes == sum(sizes.values())
        assert disk.read - before == sum(sizes.values())


@pytest.mark.parametrize("stride", [pytest.param(1, marks=[pytest.mark.thorough, pytest.mark.slow]), 37])
async def test_a_flipped_bit_in_any_byte_is_found_and_its_file_is_named(tmp_path, stride):
    flips = 0
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of(rows=1))
        for path in folder.iterdir():
            data = path.read_bytes()
            for place in range(0, len(data), stride):
                path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
                found = await verify_checkpoint(folder, disk)
                assert [problem.file for problem in found.problems] == [path.name]
                assert found.problems[0].offset <= place
                assert not found.whole
                flips += 1
            path.write_bytes(data)
        assert (await verify_checkpoint(folder, disk)).whole
    assert flips > 3000 / stride


async def test_values_that_are_not_finite_are_counted_from_their_piece(tmp_path):
    odd, broad = np.ones(3, np.float32), np.ones((2, 2))
    broad[1, 0], broad[1, 1] = np.nan, -np.inf
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of(weights={"odd": odd, "broad": broad}))
        found = await verify_checkpoint(folder, disk)
    (problem,) = found.problems
    path = folder / FILES[0]
    assert path.read_bytes()[problem.offset :][:4] == MAGIC
    assert problem.text == (
        f"{path}: 2 values are not finite, the first ones in the piece at byte {problem.offset:,}, in broad: "
        "the training diverged"
    )


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
async def test_a_piece_that_is_none_of_its_store_is_a_problem(tmp_path, monkeypatch, consistency):
    config = msgspec.structs.replace(CONFIG, rule="adam", momentum=0.0, consistency=consistency)
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of(config=config))
        monkeypatch.setattr(checkpoint, "tensors_of", lambda parts, origin: [])
        (problem,) = (await verify_checkpoint(folder, disk)).problems
    assert problem.file == FILES[0]
    assert "cannot be read: piece 1 of ps-0 does not fit its store: " in problem.text
