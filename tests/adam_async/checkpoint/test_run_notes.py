"""The file of a run's notes: whole or refused, and one driver at a time."""

import msgspec
import pytest

from adam_async.checkpoint.manifest import CheckpointError, Manifest, ProgressNote
from adam_async.checkpoint.run_notes import NAME, RunNote, RunNotesFile, SavedRun, read_run_notes
from adam_async.run.training_program import ResumeRecord
from adam_async.runtime.disk import Disk

MANIFEST = Manifest(
    run="run-1",
    config={"images_per_group": 4},
    spec={},
    data={"train_images": 40},
    epoch=2,
    groups=3,
    resume=ResumeRecord(epoch=2, finished=((0, 3),), clock=0),
)
NOTE = RunNote(manifest=MANIFEST, at=100.0, is_on_disk=True, runs=("run-1",))
SEEN = ProgressNote(epoch=2, groups=7, trained_again=0)


async def written(folder):
    async with Disk() as disk, RunNotesFile(folder, disk).opened() as file:
        await file.write([NOTE], SEEN, 101.5)


async def read(folder):
    async with Disk() as disk:
        return await read_run_notes(folder, disk)


async def test_notes_come_back(tmp_path):
    assert await read(tmp_path) is None
    await written(tmp_path)
    found = await read(tmp_path)
    assert (found.notes, found.seen, found.seen_at) == ((NOTE,), SEEN, 101.5)
    assert SavedRun(notes=found).trained_again == 4


async def test_any_change_of_a_byte_is_refused_or_changes_nothing(tmp_path):
    """The name of a field that has its default anyway changes nothing."""
    await written(tmp_path)
    whole, refused = await read(tmp_path), 0
    file = tmp_path / NAME
    text = file.read_bytes()
    for at in range(0, len(text), 7):
        file.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        try:
            assert await read(tmp_path) == whole
        except CheckpointError:
            refused += 1
    assert refused > len(text) // 10


@pytest.mark.parametrize(
    "content", [{"format": "adam-async/run/0", "notes": 3}, {"format": "adam-async/run/9"}]
)
async def test_another_format_is_named_with_a_cure(tmp_path, content):
    await written(tmp_path)
    file = tmp_path / NAME
    file.write_bytes(msgspec.json.encode({**msgspec.json.decode(file.read_bytes()), **content}))
    with pytest.raises(
        CheckpointError, match=r"has the format 'adam-async/run/.'; .*: finish the run with the"
    ):
        await read(tmp_path)


@pytest.mark.parametrize("at", [-1.0, 1e300])
async def test_a_time_that_is_none_is_refused(tmp_path, at):
    async with Disk() as disk, RunNotesFile(tmp_path, disk).opened() as file:
        await file.write([msgspec.structs.replace(NOTE, at=at)], SEEN, 101.5)
    with pytest.raises(CheckpointError, match="is damaged: Expected `float`"):
        await read(tmp_path)


async def test_a_second_driver_is_refused(tmp_path):
    async with Disk() as disk, Disk() as other, RunNotesFile(tmp_path, disk).opened():
        with pytest.raises(CheckpointError, match="in progress"):
            async with RunNotesFile(tmp_path, other).opened():
                pass


async def test_an_error_of_the_block_is_no_error_of_the_folder(tmp_path):
    async with Disk() as disk:
        with pytest.raises(PermissionError, match="of another folder"):
            async with RunNotesFile(tmp_path, disk).opened():
                raise PermissionError("of another folder")
