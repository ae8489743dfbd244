"""What a drive holds, and what a crash may leave of what was not synced."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.runtime.random_streams import Dice
from adam_async.simulation.disk_model import SECTOR_BYTES, Atlas, Drive

FOLDER, FILE = Path("/data"), Path("/data/file")


def drive_with(content=b"old", seed="1", **shares):
    """A drive with one file that is kept."""
    drive = Drive(Dice(seed), **shares)
    drive.make_folder(FOLDER)
    drive.append(drive.create(FILE), content)
    for inode in (drive.find(Path("/")), drive.find(FOLDER), drive.find(FILE)):
        inode.sync()
    return drive


def content(drive, path=FILE):
    """Bytes of a file; None if it is not there."""
    try:
        return bytes(drive.file(path).data)
    except FileNotFoundError:
        return None


def after_crashes(change, *, seeds=60, **shares):
    """Everything that may be in the file after a change and a crash."""
    found = set()
    for seed in range(seeds):
        drive = drive_with(seed=str(seed), **shares)
        change(drive)
        drive.crash()
        found.add(content(drive))
    return found


def test_what_was_synced_survives_and_what_was_not_is_there_or_not():
    def append(drive):
        drive.append(drive.file(FILE), b"+new")

    def append_and_sync(drive):
        append(drive)
        drive.file(FILE).sync()

    assert after_crashes(append, torn=0.0) == {b"old", b"old+new"}
    assert after_crashes(append_and_sync) == {b"old+new"}


def test_a_later_write_may_survive_an_earlier_one_that_is_lost():
    def two(drive):
        drive.append(drive.file(FILE), b"+1")
        drive.append(drive.file(FILE), b"+2")

    assert after_crashes(two, torn=0.0) == {b"old", b"old+1", b"old+1+2", b"old\0\0+2"}


def test_a_write_is_torn_at_the_borders_of_sectors():
    def change(drive):
        drive.truncate(drive.file(FILE), 0)
        drive.file(FILE).sync()
        drive.append(drive.file(FILE), b"x" * (3 * SECTOR_BYTES))

    found = after_crashes(change, lost=0.0, torn=1.0, garbage=0.0)
    x, o = b"x" * SECTOR_BYTES, bytes(SECTOR_BYTES)

    assert found == {b"", x, x + x, x + x + x, o + x, o + x + x, x + o + x, o + o + x}
    garbage = after_crashes(change, lost=0.0, torn=1.0, garbage=1.0)
    assert all(len(set(data)) > 100 for data in garbage)


def test_a_name_is_kept_by_its_folder_and_bytes_by_the_file():
    def create(drive):
        drive.remove(FILE)
        drive.find(FOLDER).sync()
        drive.append(drive.create(FILE), b"new")
        drive.file(FILE).sync()

    def create_and_sync_folder(drive):
        drive.remove(FILE)
        drive.append(drive.create(FILE), b"new")
        drive.find(FOLDER).sync()

    assert after_crashes(create) == {None, b"new"}
    assert after_crashes(create_and_sync_folder, torn=0.0) == {b"", b"new"}


def test_a_rename_lands_whole_or_not_at_all_and_keeps_no_bytes():
    def replace(drive, sync):
        aside = FOLDER / "aside"
        drive.append(drive.create(aside), b"new")
        if sync:
            drive.file(aside).sync()
        drive.rename(aside, FILE)

    assert after_crashes(lambda drive: replace(drive, True)) == {b"old", b"new"}
    assert after_crashes(lambda drive: replace(drive, False), torn=0.0) == {b"old", b"new", b""}


def test_a_folder_that_its_parent_did_not_keep_is_lost_with_all_that_is_in_it():
    found = set()
    for seed in range(30):
        drive = Drive(Dice(str(seed)))
        drive.make_folder(FOLDER)
        drive.append(drive.create(FILE), b"new")
        drive.file(FILE).sync()
        drive.find(FOLDER).sync()
        drive.crash()
        found.add(content(drive))

    assert found == {None, b"new"}


def test_a_full_drive_says_so_and_has_room_again_when_something_goes():
    drive = drive_with(b"x" * 90, capacity_bytes=100)
    with pytest.raises(OSError, match="No space left"):
        drive.append(drive.file(FILE), b"y" * 20)
    assert content(drive) == b"x" * 90 + b"y" * 10
    drive.truncate(drive.file(FILE), 50)
    drive.append(drive.create(FOLDER / "more"), b"z" * 50)
    drive.remove(FILE)
    drive.append(drive.create(FILE), b"y" * 50)
    drive.rename(FILE, FOLDER / "more")

    assert drive.used_bytes == 50


def test_errors_are_those_of_the_system():
    drive = drive_with()
    drive.make_folder(FOLDER / "inner")
    with pytest.raises(FileNotFoundError):
        drive.find(FOLDER / "none")
    with pytest.raises(NotADirectoryError):
        drive.find(FILE / "below")
    with pytest.raises(NotADirectoryError):
        drive.make_folder(FILE)
    with pytest.raises(IsADirectoryError):
        drive.create(FOLDER)
    with pytest.raises(IsADirectoryError):
        drive.rename(FILE, FOLDER / "inner")
    with pytest.raises(NotADirectoryError):
        drive.rename(FOLDER / "inner", FILE)
    drive.create(FOLDER / "inner" / "x")
    with pytest.raises(OSError, match="not empty"):
        drive.rename(FOLDER, FOLDER / "inner")


@given(st.integers(0, 99), st.integers(2, 4))
def test_rot_leaves_a_good_copy_of_every_sector(seed, count):
    whole = bytes(range(256)) * 10
    atlas = Atlas(seed=str(seed), drives=count)
    drives = [drive_with(whole, seed=f"{seed}/{number}") for number in range(count)]
    damaged = [
        drive.rot(lambda path, sector, number=number: atlas.may_damage(number, path.name, sector))
        for number, drive in enumerate(drives)
    ]

    assert sum(damaged) == (count - 1) * 5
    for start in range(0, len(whole), SECTOR_BYTES):
        stop = start + SECTOR_BYTES
        assert [content(drive)[start:stop] == whole[start:stop] for drive in drives].count(True) == 1
