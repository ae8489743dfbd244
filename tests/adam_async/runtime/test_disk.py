"""The disk, the clock and the dice, against the real system."""

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from adam_async.runtime import ordinary_files
from adam_async.runtime.disk import Disk, name_beside


async def test_written_bytes_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    async with Disk() as disk:
        await disk.write_atomic(path, [b"head", bytearray(b"er "), memoryview(b"body")])

        assert await disk.read_bytes(path) == b"header body"
        assert await disk.names(path.parent) == ["file"]


async def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def parts() -> Iterator[bytes]:
        yield b"half of the new"
        raise RuntimeError("source broke")

    async with Disk() as disk:
        await disk.write_atomic(path, [b"old"])
        with pytest.raises(RuntimeError, match="source broke"):
            await disk.write_atomic(path, parts())

        assert await disk.names(tmp_path) == ["file"]
        assert await disk.read_bytes(path) == b"old"


async def test_concurrent_writes_of_one_path_leave_one_of_them_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([65 + number]) * 1000 for number in range(8)]
    async with Disk() as disk:
        async with asyncio.TaskGroup() as group:
            for number, content in enumerate(contents):
                group.create_task(disk.write_atomic(path, [content[:500], content[500:]]), name=f"{number}")

        assert await disk.read_bytes(path) == contents[-1]


async def test_a_cancelled_write_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with Disk() as disk:
        await disk.write_atomic(path, [b"old"])
        for turns in range(12):
            async with asyncio.TaskGroup() as group:
                task = group.create_task(disk.write_atomic(path, [b"new"] * 3), name="write")
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
            assert await disk.read_bytes(path) in {b"old", b"newnewnew"}
        assert await disk.names(tmp_path) == ["file"]


async def test_a_folder_written_aside_takes_its_name_as_a_whole(tmp_path: Path) -> None:
    aside, target = tmp_path / "in" / ".aside", tmp_path / "in" / "target"
    async with Disk() as disk:
        await disk.make_folder(aside)
        await disk.write_atomic(aside / "a", [b"one ", memoryview(b"file")])
        await disk.write_atomic(aside / "b", [])
        await disk.sync_folder(aside)
        await disk.rename(aside, target)

        assert await disk.names(tmp_path / "in") == ["target"]
        assert await disk.read_bytes(target / "a") == b"one file"


async def test_a_folder_that_holds_something_is_not_replaced_but_can_be_removed(tmp_path: Path) -> None:
    async with Disk() as disk:
        for name in ("new", "old"):
            await disk.make_folder(tmp_path / name)
            await disk.write_atomic(tmp_path / name / "file", [name.encode()])
        with pytest.raises(OSError, match="old"):
            await disk.rename(tmp_path / "new", tmp_path / "old")
        assert await disk.read_bytes(tmp_path / "old" / "file") == b"old"
        await disk.remove_folder(tmp_path / "old")
        await disk.remove_folder(tmp_path / "old")  # gone already
        await disk.rename(tmp_path / "new", tmp_path / "old")
        assert await disk.read_bytes(tmp_path / "old" / "file") == b"new"
        await disk.remove_file(tmp_path / "old" / "file")
        await disk.remove_file(tmp_path / "old" / "file")  # gone already
        assert await disk.names(tmp_path / "old") == []


async def test_a_file_is_continued_where_it_ends_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "part"
    async with Disk() as disk:
        await disk.write_from(path, 0, b"one ")
        await disk.write_from(path, 4, memoryview(b"two"))
        assert await disk.read_bytes(path) == b"one two"
        for offset in (4, 8):
            with pytest.raises(OSError, match=f"part holds 7 bytes instead of {offset}; does another"):
                await disk.write_from(path, offset, b"!")
        await disk.write_from(path, 0, b"anew")
        assert await disk.read_bytes(path) == b"anew"


async def test_parts_are_made_on_the_disks_thread_and_appended_one_after_the_other(tmp_path: Path) -> None:
    path, threads = tmp_path / "file", []

    def make() -> list[bytes | memoryview]:
        threads.append(threading.current_thread().name)
        return [b"head", np.arange(3, dtype=np.float32).data.cast("B"), b""] * 600

    async with Disk(name="made", private=True) as disk:
        size = await disk.append_made(path, 0, make)
        assert size == 16 * 600
        with pytest.raises(OSError, match="holds 9600 bytes instead of 5"):
            await disk.append_made(path, 5, make)
        await disk.append_made(path, size, lambda: [b"end"])
    assert threads[0].startswith("made")
    content = path.read_bytes()
    assert content == (b"head" + np.arange(3, dtype=np.float32).tobytes()) * 600 + b"end"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_system_that_takes_few_bytes_at_once_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_little(descriptor: int, parts: list[memoryview]) -> int:
        return os.write(descriptor, parts[0][:3])

    monkeypatch.setattr(os, "writev", write_little)
    async with Disk() as disk:
        await disk.append_made(tmp_path / "file", 0, lambda: [b"abcdefg", b"", b"hij", b"k"])
    assert (tmp_path / "file").read_bytes() == b"abcdefghijk"


async def test_new_folders_are_forced_down_and_those_that_are_there_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[int] = []
    fsync = os.fsync

    def forcing(descriptor: int) -> None:
        forced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", forcing)
    monkeypatch.delattr(os, "fdatasync", raising=False)
    deep = tmp_path / "a" / "b"
    (tmp_path / "file").touch()

    def inodes(*paths: Path) -> list[int]:
        return [path.stat().st_ino for path in paths]

    async with Disk() as disk:
        await disk.make_folder(deep)
        assert forced == inodes(tmp_path, deep.parent)
        await disk.make_folder(deep)
        assert len(forced) == 2
        await disk.write_atomic(deep / "c" / "file", [b"x"])
        assert forced[2:] == inodes(deep, deep / "c" / "file", deep / "c")
        for path in (tmp_path / "file", tmp_path / "file" / "under"):
            with pytest.raises((FileExistsError, NotADirectoryError)):
                await disk.make_folder(path)


async def test_a_log_is_appended_to_durably_and_cut_off_where_it_was_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    forced: list[str] = []
    for name in ("fdatasync", "fsync"):
        force = getattr(os, name)

        def forcing(descriptor: int, name: str = name, force: Callable[[int], None] = force) -> None:
            forced.append(name)
            force(descriptor)

        monkeypatch.setattr(os, name, forcing)
    async with Disk() as disk:
        with pytest.raises(FileNotFoundError):
            await disk.append_durably(path, 3, b"nobody began it")
        assert await disk.names(tmp_path) == []
        await disk.append_durably(path, 0, b"one ")
        assert forced == ["fdatasync", "fsync"]
        await disk.append_durably(path, 4, memoryview(b"two"))
        assert forced == ["fdatasync", "fsync", "fdatasync"]
        for offset in (3, 8):
            with pytest.raises(OSError, match=f"holds 7 bytes instead of {offset}"):
                await disk.append_durably(path, offset, b"!")
        assert await disk.read_bytes(path) == b"one two"
        await disk.truncate_durably(path, 4)
        assert len(forced) == 4
        with pytest.raises(OSError, match="holds 4 bytes and cannot be cut off behind 5"):
            await disk.truncate_durably(path, 5)
        await disk.append_durably(path, 4, b"2")
        assert await disk.read_bytes(path) == b"one 2"
        await disk.append_durably(path, 0, b"anew")
        assert await disk.read_bytes(path) == b"anew"


async def test_a_file_is_read_in_pieces_and_from_anywhere_and_what_was_appended_is_forced_down(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    async with Disk() as disk:
        await disk.write_from(path, 0, b"one two three")
        await disk.sync_file(path)
        async with contextlib.aclosing(disk.read_pieces(path, 5)) as pieces:
            assert [piece async for piece in pieces] == [b"one t", b"wo th", b"ree"]
        assert await disk.read_part(path, 4, 7) == b"two"
        assert await disk.read_part(path, 8, 99) == b"three"
        assert await disk.read_part(path, 99, 100) == b""
        with pytest.raises(FileNotFoundError):
            await disk.sync_file(tmp_path / "absent")


async def test_a_lock_is_not_made_through_a_link(tmp_path: Path) -> None:
    lock, elsewhere = tmp_path / "lock", tmp_path / "elsewhere"
    lock.symlink_to(elsewhere)
    async with Disk() as disk:
        with pytest.raises(OSError, match="symbolic links"):
            async with disk.hold(lock):
                pytest.fail("a link was locked")
    assert not elsewhere.exists()


async def test_a_lock_is_held_by_one_block_and_free_again_after_it_however_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with Disk() as disk, Disk() as other:
        with pytest.raises(RuntimeError, match="in the block"):
            async with disk.hold(path):
                with pytest.raises(BlockingIOError):
                    async with other.hold(path):
                        pass
                raise RuntimeError("in the block")
        await disk.names(tmp_path)  # takes its turn behind the lock
        async with other.hold(path):
            assert await other.names(tmp_path) == ["lock"]


async def test_a_missing_file_is_the_systems_own_error(tmp_path: Path) -> None:
    async with Disk() as disk:
        with pytest.raises(FileNotFoundError):
            await disk.read_bytes(tmp_path / "absent")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_files_of_a_private_disk_are_for_their_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = os.umask(0)
    try:
        async with Disk(private=True) as disk:
            await disk.write_atomic(home / "deeper" / "log", [b"1"])
            await disk.append_durably(home / "appended", 0, b"1")
            await disk.write_from(home / "part", 0, b"1")
            async with disk.hold(home / "lock"):
                pass
        async with Disk() as disk:
            await disk.write_atomic(home / "shared", [b"1"])
    finally:
        os.umask(before)

    assert [mode_of(home / name) for name in ("deeper/log", "appended", "part", "lock")] == [0o600] * 4
    assert [mode_of(home), mode_of(home / "deeper")] == [0o700] * 2
    assert mode_of(home / "shared") == 0o666


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
async def test_a_secret_that_others_can_read_or_change_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"secret")
    file.chmod(mode)

    async with Disk() as disk:
        with pytest.raises(PermissionError, match=f"its mode is {mode:04o}: run chmod 600 .*token"):
            await disk.read_secret(file)
        assert await disk.keep_private(file) == f"{mode:04o}"
        assert await disk.read_secret(file) == b"secret"
        assert await disk.keep_private(file) == ""


async def test_a_secret_of_another_user_is_refused_unless_that_is_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"secret")
    file.chmod(0o600)
    owner = file.stat().st_uid
    fstat = os.fstat

    def owned_by(user: int) -> None:
        monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*fstat(fd)[:4], user, *fstat(fd)[5:10])))

    async with Disk() as disk:
        owned_by(owner + 1)
        with pytest.raises(PermissionError, match=f"belongs to user {owner + 1}"):
            await disk.read_secret(file)
        owned_by(0)
        assert await disk.read_secret(file) == b"secret"


async def test_a_secret_may_come_through_a_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"secret")
    os.close(writing)
    try:
        async with Disk() as disk:
            assert await disk.read_secret(Path(f"/dev/fd/{reading}")) == b"secret"
    finally:
        os.close(reading)


async def test_a_pipe_without_a_writer_is_no_secret_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordinary_files, "SECRET_S", 0.05)
    os.mkfifo(tmp_path / "token", 0o600)
    async with Disk() as disk:
        with pytest.raises(TimeoutError, match=r"nothing to read for 0\.05 s"):
            await disk.read_secret(tmp_path / "token")


async def test_a_secret_is_small(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(bytes(65537))
    file.chmod(0o600)
    async with Disk() as disk:
        with pytest.raises(OSError, match="holds more than 65536 bytes"):
            await disk.read_secret(file)


async def test_the_loop_goes_on_while_the_disk_is_busy() -> None:
    async with Disk(name="slow") as disk, asyncio.TaskGroup() as group:
        released = threading.Event()
        waiting = group.create_task(disk.run(released.wait, 5.0), name="busy disk")
        await asyncio.sleep(0)
        released.set()
        assert await waiting


async def test_closing_twice_is_allowed_and_work_asked_for_before_is_done() -> None:
    disk = Disk()
    done: list[int] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(disk.run(done.append, 1), name="work")
        await asyncio.sleep(0)
        await disk.aclose()
    await disk.aclose()

    assert done == [1]
    assert repr(disk) == "<Disk disk>"


async def test_closing_a_disk_that_hangs_ends_in_time_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        async with Disk(name="hung", close_timeout_s=0.05) as disk:
            group.create_task(disk.run(released.wait), name="hangs")
            await asyncio.sleep(0)
        assert "hung: work left after 0.05 s is dropped" in caplog.text
        released.set()


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to a device"])
async def test_no_call_reads_or_writes_what_is_no_ordinary_file_or_waits_for_it(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "lock"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case _:
            path.symlink_to("/dev/zero")

    async def lock() -> None:
        async with disk.hold(path):
            pass

    async def read_pieces() -> None:
        async with contextlib.aclosing(disk.read_pieces(path, 10)) as pieces:
            async for _ in pieces:
                pass

    async with asyncio.timeout(5), Disk() as disk:
        for call in (
            lambda: disk.read_bytes(path),
            lambda: disk.read_part(path, 0, 10),
            read_pieces,
            lock,
            lambda: disk.write_from(path, 0, b"content"),
            lambda: disk.append_made(path, 0, lambda: [b"content"]),
            lambda: disk.append_durably(path, 1, b"content"),
            lambda: disk.append_durably(path, 0, b"content"),
            lambda: disk.truncate_durably(path, 1),
            lambda: disk.sync_file(path),
        ):
            # The lock is the one call that does not follow a link.
            text = "'lock' is a pipe, a socket or a device, and no ordinary file"
            if call is lock and kind == "link to a device":
                text = "symbolic links"
            with pytest.raises(OSError, match=text):
                await call()


async def test_a_file_beyond_the_readers_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    async with Disk() as disk:
        assert await disk.read_bytes(path, 5) == b"12345"
        with pytest.raises(OSError, match="'file' has 5 bytes, expected at most 4"):
            await disk.read_bytes(path, 4)
        os.truncate(path, 1 << 42)  # without a block on the disk
        with pytest.raises(OSError, match="'file' has 4398046511104 bytes"):
            await disk.read_bytes(path)


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u6f22", "\U0001f40c"])
async def test_a_file_may_have_the_longest_name_of_its_file_system(letter: str, tmp_path: Path) -> None:
    name = letter * (255 // len(letter.encode()))
    async with Disk() as disk:
        await disk.write_atomic(tmp_path / name, [b"content"])
        assert await disk.names(tmp_path) == [name]
        assert await disk.read_bytes(tmp_path / name) == b"content"
    first, second = (name_beside(f"{letter * 50}{number:0205d}", ".1.aside") for number in range(2))
    assert first != second
    assert len(os.fsencode(first)) <= 255


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOTSUP])
async def test_a_file_system_that_syncs_no_folder_keeps_files(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def sync_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(refusal, os.strerror(refusal))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files_only)
    async with Disk() as disk:
        await disk.write_atomic(tmp_path / "new" / "file", [b"content"])
        await disk.append_durably(tmp_path / "log", 0, b"content")
        await disk.sync_folder(tmp_path)
        await disk.rename(tmp_path / "log", tmp_path / "new" / "log")
        assert await disk.names(tmp_path / "new") == ["file", "log"]


async def test_any_other_error_of_a_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        raise OSError(errno.EIO if is_folder else errno.EINVAL, "failed")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "fdatasync", fail)
    async with Disk() as disk:
        with pytest.raises(OSError, match="failed"):
            await disk.sync_folder(tmp_path)
        with pytest.raises(OSError, match="failed"):
            await disk.write_atomic(tmp_path / "file", [b"content"])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs the folder /proc of Linux")
async def test_an_error_of_a_write_names_the_file_and_not_the_temporary_one() -> None:
    async with Disk() as disk:
        with pytest.raises(OSError, match=r"'/proc/model'$"):
            await disk.write_atomic(Path("/proc/model"), [b"content"])


async def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    async with Disk() as disk:
        await disk.make_folder(folder)
        with pytest.raises(IsADirectoryError, match=f"this is a folder: '{folder}'"):
            await disk.write_atomic(folder, [b"content"])
        assert await disk.names(tmp_path) == ["folder"]
        assert await disk.names(folder) == []
