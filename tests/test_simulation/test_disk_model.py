"""Content of a disk model, and the possible effects of a crash on unsynced data."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.disk_model import SECTOR_BYTES, DiskModel
from tests.simulation.random_streams import RandomStream

FOLDER, FILE = Path("/data"), Path("/data/file")


def disk_model_with(content=b"old", seed="1", **shares):
    """Make a disk with one durable file."""
    disk_model = DiskModel(RandomStream(seed), **shares)
    disk_model.make_folder(FOLDER)
    disk_model.append(disk_model.create(FILE), content)
    for inode in (disk_model.find(Path("/")), disk_model.find(FOLDER), disk_model.find(FILE)):
        inode.sync()
    return disk_model


def content(disk_model, path=FILE):
    """Bytes of a file; None if it is not there."""
    try:
        return bytes(disk_model.file(path).data)
    except FileNotFoundError:
        return None


def after_crashes(change, *, seeds=60, **shares):
    """Everything that may be in the file after a change and a crash."""
    found = set()
    for seed in range(seeds):
        disk_model = disk_model_with(seed=str(seed), **shares)
        change(disk_model)
        disk_model.crash()
        found.add(content(disk_model))
    return found


def test_synced_data_survives_a_crash_and_other_data_may():
    def append(disk_model):
        disk_model.append(disk_model.file(FILE), b"+new")

    def append_and_sync(disk_model):
        append(disk_model)
        disk_model.file(FILE).sync()

    assert after_crashes(append, torn=0.0) == {b"old", b"old+new"}
    assert after_crashes(append_and_sync) == {b"old+new"}


def test_a_later_write_may_survive_a_lost_earlier_one():
    def two(disk_model):
        disk_model.append(disk_model.file(FILE), b"+1")
        disk_model.append(disk_model.file(FILE), b"+2")

    assert after_crashes(two, torn=0.0) == {b"old", b"old+1", b"old+1+2", b"old\0\0+2"}


def test_a_write_is_torn_at_the_borders_of_sectors():
    def change(disk_model):
        disk_model.truncate(disk_model.file(FILE), 0)
        disk_model.file(FILE).sync()
        disk_model.append(disk_model.file(FILE), b"x" * (3 * SECTOR_BYTES))

    found = after_crashes(change, lost=0.0, torn=1.0, garbage=0.0)
    x, o = b"x" * SECTOR_BYTES, bytes(SECTOR_BYTES)

    assert found == {b"", x, x + x, x + x + x, o + x, o + x + x, x + o + x, o + o + x}
    garbage = after_crashes(change, lost=0.0, torn=1.0, garbage=1.0)
    assert all(len(set(data)) > 100 for data in garbage)


def test_a_name_is_kept_by_its_folder_and_bytes_by_the_file():
    def create(disk_model):
        disk_model.remove(FILE)
        disk_model.find(FOLDER).sync()
        disk_model.append(disk_model.create(FILE), b"new")
        disk_model.file(FILE).sync()

    def create_and_sync_folder(disk_model):
        disk_model.remove(FILE)
        disk_model.append(disk_model.create(FILE), b"new")
        disk_model.find(FOLDER).sync()

    assert after_crashes(create) == {None, b"new"}
    assert after_crashes(create_and_sync_folder, torn=0.0) == {b"", b"new"}


def test_a_rename_lands_whole_or_not_at_all_and_keeps_no_bytes():
    def replace(disk_model, sync):
        aside = FOLDER / "aside"
        disk_model.append(disk_model.create(aside), b"new")
        if sync:
            disk_model.file(aside).sync()
        disk_model.rename(aside, FILE)

    assert after_crashes(lambda disk_model: replace(disk_model, True)) == {b"old", b"new"}
    assert after_crashes(lambda disk_model: replace(disk_model, False), torn=0.0) == {b"old", b"new", b""}


def test_a_folder_that_its_parent_did_not_keep_is_lost_with_all_that_is_in_it():
    found = set()
    for seed in range(30):
        disk_model = DiskModel(RandomStream(str(seed)))
        disk_model.make_folder(FOLDER)
        disk_model.append(disk_model.create(FILE), b"new")
        disk_model.file(FILE).sync()
        disk_model.find(FOLDER).sync()
        disk_model.crash()
        found.add(content(disk_model))

    assert found == {None, b"new"}


def test_a_full_disk_raises_and_has_room_again_after_a_removal():
    disk_model = disk_model_with(b"x" * 90, capacity_bytes=100)
    with pytest.raises(OSError, match="No space left"):
        disk_model.append(disk_model.file(FILE), b"y" * 20)
    assert content(disk_model) == b"x" * 90 + b"y" * 10
    disk_model.truncate(disk_model.file(FILE), 50)
    disk_model.append(disk_model.create(FOLDER / "more"), b"z" * 50)
    disk_model.remove(FILE)
    disk_model.append(disk_model.create(FILE), b"y" * 50)
    disk_model.rename(FILE, FOLDER / "more")

    assert disk_model.used_bytes == 50


def test_errors_are_those_of_the_system():
    disk_model = disk_model_with()
    disk_model.make_folder(FOLDER / "inner")
    with pytest.raises(FileNotFoundError):
        disk_model.find(FOLDER / "none")
    with pytest.raises(NotADirectoryError):
        disk_model.find(FILE / "below")
    with pytest.raises(NotADirectoryError):
        disk_model.make_folder(FILE)
    with pytest.raises(IsADirectoryError):
        disk_model.create(FOLDER)
    with pytest.raises(IsADirectoryError):
        disk_model.rename(FILE, FOLDER / "inner")
    with pytest.raises(NotADirectoryError):
        disk_model.rename(FOLDER / "inner", FILE)
    disk_model.create(FOLDER / "inner" / "x")
    with pytest.raises(OSError, match="not empty"):
        disk_model.rename(FOLDER, FOLDER / "inner")


@given(st.integers(0, 99), st.integers(2, 4))
def test_rot_leaves_a_good_copy_of_every_sector(seed, count):
    whole = bytes(range(256)) * 10
    disk_models = [disk_model_with(whole, seed=f"{seed}/{number}") for number in range(count)]
    damaged = [
        disk_model.rot(lambda path, sector, number=number: (seed + sector) % count != number)
        for number, disk_model in enumerate(disk_models)
    ]

    assert sum(damaged) == (count - 1) * 5
    for start in range(0, len(whole), SECTOR_BYTES):
        stop = start + SECTOR_BYTES
        assert [content(disk_model)[start:stop] == whole[start:stop] for disk_model in disk_models].count(
            True
        ) == 1
