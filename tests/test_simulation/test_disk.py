"""The disk port on a disk model keeps the promises of the real port under crashes, errors and delays."""

import asyncio
import contextlib
import errno
from functools import partial
from pathlib import Path

import pytest

from adam_async.runtime.disk import Disk
from tests.simulation.disk import SimulatedDisk
from tests.simulation.scenario import simulate

HOME = Path("/home")
FILE = HOME / "state"


def on_a_disk(use, *, seed=1, prepare=None):
    """Run `use(disk, node)` as the program of a machine; `prepare(node)` comes before."""

    async def scenario(world):
        node = world.node("a")
        if prepare is not None:
            prepare(node)

        async def program(node):
            async with node.open_disk() as disk:
                return await use(disk, node)

        node.start(program)
        return await node.task

    return simulate(scenario, seed=seed).result


def test_it_behaves_as_the_real_port(tmp_path):
    async def use(disk, home):
        await disk.make_folder(home / "a" / "b")
        await disk.write_atomic(home / "a" / "whole", [b"one", b"two"])
        await disk.write_atomic(home / "a" / "b" / "down", [bytearray(b"x" * 10)])
        await disk.write_from(home / "part", 0, b"12345")
        await disk.write_from(home / "part", 5, b"678")
        assert await disk.append_made(home / "made", 0, lambda: [b"one", memoryview(b" two")]) == 7
        assert await disk.append_made(home / "made", 7, lambda: [b"", b"."]) == 1
        with pytest.raises(OSError, match="holds 8 bytes instead of 3"):
            await disk.append_made(home / "made", 3, lambda: [b"x"])
        await disk.sync_file(home / "part")
        await disk.sync_folder(home)
        with pytest.raises(OSError, match="holds 8 bytes instead of 3"):
            await disk.write_from(home / "part", 3, b"x")
        await disk.append_durably(home / "log", 0, b"one ")
        await disk.append_durably(home / "log", 4, memoryview(b"two"))
        with pytest.raises(OSError, match="holds 7 bytes instead of 3"):
            await disk.append_durably(home / "log", 3, b"x")
        with pytest.raises(FileNotFoundError):
            await disk.append_durably(home / "none", 3, b"x")
        with pytest.raises(OSError, match="holds 7 bytes and cannot be cut off behind 8"):
            await disk.truncate_durably(home / "log", 8)
        await disk.truncate_durably(home / "log", 5)
        pieces = [piece async for piece in disk.read_pieces(home / "part", 3)]
        await disk.rename(home / "part", home / "a" / "part")
        with pytest.raises(FileNotFoundError):
            await disk.read_bytes(home / "part")
        await disk.remove_folder(home / "a" / "b")
        await disk.remove_folder(home / "nothing")
        await disk.write_atomic(home / "gone", [b"x"])
        await disk.remove_file(home / "gone")
        await disk.remove_file(home / "gone")
        return [
            pieces,
            await disk.names(home),
            await disk.names(home / "a"),
            await disk.read_bytes(home / "a" / "whole"),
            await disk.read_part(home / "a" / "part", 2, 100),
            await disk.read_bytes(home / "made"),
            await disk.read_bytes(home / "log"),
            await disk.run(lambda: 7),
        ]

    async def really():
        async with Disk() as disk:
            return await use(disk, tmp_path)

    async def simulated(disk, node):
        await disk.make_folder(HOME)
        return await use(disk, HOME)

    assert on_a_disk(simulated) == asyncio.run(really())


def test_nothing_of_the_real_port_is_left_to_reach_a_real_disk():
    public = {name for name in vars(Disk) if not name.startswith("_")} - {"statistics"}

    assert public <= vars(SimulatedDisk).keys()


def test_a_lock_has_one_holder_and_a_crashed_holder_releases_it():
    lock = HOME / "lock"

    async def use(disk, node):
        await disk.make_folder(HOME)
        other = node.open_disk()
        async with disk.hold(lock):
            with pytest.raises(BlockingIOError):
                async with other.hold(lock):
                    pass
        async with other.hold(lock):
            pass
        return await disk.names(HOME)

    assert on_a_disk(use) == ["lock"]


def test_closing_a_disk_that_is_stuck_is_given_up():
    async def use(disk, node):
        node.disk_conditions.stuck = True
        await disk.aclose()
        return asyncio.get_running_loop().time()

    assert on_a_disk(use) == pytest.approx(10.0)


async def write_versions(disk, told, write):
    """Write version after version of a file, for ever; `told` receives the last certain one."""
    for version in range(1, 100):
        await write(disk, bytes([version]) * 2000)
        told[0] = version


async def atomically(disk, content):
    await disk.write_atomic(FILE, [content[:700], content[700:]])


async def without_a_sync(disk, content):
    """`write_atomic` without a sync of the file."""
    await disk.write_from(HOME / "aside", 0, content)
    await disk.rename(HOME / "aside", FILE)


def crashed(seed, program, write, *, within_s):
    """Crash a machine that writes; return the content after it, and what `program` knew to be certain."""
    told = [0]

    async def scenario(world):
        node = world.node("a")

        async def run(node):
            async with node.open_disk() as disk:
                if node.incarnation == 1:
                    await disk.make_folder(HOME)
                    await program(disk, told, write)
                with contextlib.suppress(FileNotFoundError):
                    return await disk.read_bytes(FILE)
                return b""

        node.start(run)
        await asyncio.sleep(world.dice.between(0.0, within_s))
        node.crash()
        node.restart()
        return await node.task

    return simulate(scenario, seed=seed).result, told[0]


def test_a_crash_at_any_moment_leaves_an_atomic_write_undone_or_whole_and_none_that_was_done():
    versions = set()
    for seed in range(150):
        found, sure = crashed(seed, write_versions, atomically, within_s=0.1)
        versions.add(sure)
        assert not found or (len(found) == 2000 and len(set(found)) == 1)
        assert (found[0] if found else 0) in (sure, sure + 1)
    assert len(versions) > 8


def test_a_write_that_forgets_to_sync_is_caught():
    found = [crashed(seed, write_versions, without_a_sync, within_s=0.1)[0] for seed in range(30)]

    assert any(data and (len(data) != 2000 or len(set(data)) != 1) for data in found)


async def append_lines(disk, told, append):
    """Append to a file for ever; `told` receives the number of certainly durable bytes."""
    held = 0
    while True:
        await append(disk, held, bytes([1 + held // 700]) * 700)
        held += 700
        told[0] = held


async def durably(disk, offset, line):
    await disk.append_durably(FILE, offset, line)


async def and_hoping(disk, offset, line):
    await disk.write_from(FILE, offset, line)


def intact(data):
    """How many bytes of the lines are as they were written, from the beginning on."""
    return next((at for at, byte in enumerate(data) if byte != 1 + at // 700), len(data))


def test_a_crash_keeps_all_that_was_appended_durably_and_may_tear_the_line_in_hand():
    results = [crashed(seed, append_lines, durably, within_s=0.05) for seed in range(150)]

    assert len({sure for _, sure in results}) > 8
    assert all(sure <= intact(data) and len(data) <= sure + 700 for data, sure in results)
    assert any(intact(data) % 700 for data, _ in results)
    assert any(intact(data) < len(data) for data, _ in results)


def test_made_folders_survive_a_crash_with_their_content():
    deep = HOME / "a" / "b"

    async def scenario(world, write):
        node = world.node("a")

        async def program(node):
            async with node.open_disk() as disk:
                if node.incarnation == 1:
                    return await write(disk)
                return await disk.names(deep)

        node.start(program)
        await node.task
        node.crash()
        node.restart()
        return await node.task

    async def by_itself(disk):
        await disk.make_folder(deep)

    async def for_a_file(disk):
        await disk.write_atomic(deep / "file", [b"x"])

    for seed in range(20):
        assert simulate(partial(scenario, write=by_itself), seed=seed).result == []
        assert simulate(partial(scenario, write=for_a_file), seed=seed).result == ["file"]


def test_a_line_that_is_not_synced_is_lost_for_some():
    results = [crashed(seed, append_lines, and_hoping, within_s=0.05) for seed in range(30)]

    assert any(intact(data) < sure for data, sure in results)


def test_nothing_comes_between_a_line_and_its_sync():
    async def use(disk, node):
        await disk.make_folder(HOME)
        order = []

        async def done(name, work):
            await work
            order.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(done("append", disk.append_durably(FILE, 0, b"x")))
            group.create_task(done("names", disk.names(HOME)))
        return order

    assert on_a_disk(use) == ["append", "names"]


def test_a_line_that_failed_is_cut_off_and_written_again():
    async def use(disk, node):
        await disk.make_folder(HOME)
        await disk.append_durably(FILE, 0, b"")
        held = failed = cut = 0
        while held < 300:
            node.disk_conditions.fail = 0.2
            try:
                await disk.append_durably(FILE, held, b"line")
                held += 4
            except OSError as error:
                failed += error.errno == errno.EIO
                node.disk_conditions.fail = 0.0
                cut += len(await disk.read_bytes(FILE)) > held
                await disk.truncate_durably(FILE, held)
        node.disk_conditions.fail = 0.0
        return failed, cut, await disk.read_bytes(FILE)

    failed, cut, data = on_a_disk(use)

    assert failed > cut > 5
    assert data == b"line" * 75


def test_a_line_that_is_cancelled_still_ends_and_its_failure_is_nobodys():
    async def use(disk, node):
        await disk.make_folder(HOME)
        node.disk_conditions.sync_s = 1.0
        appending = asyncio.ensure_future(disk.append_durably(FILE, 0, b"line"))
        await asyncio.sleep(0.5)
        node.disk_conditions.fail = 1.0
        appending.cancel()
        await asyncio.sleep(2.0)
        node.disk_conditions.fail = 0.0
        return await disk.read_bytes(FILE)

    assert on_a_disk(use) == b"line"


def test_a_full_disk_keeps_the_begin_of_a_line_until_it_is_cut_off():
    def small(node):
        node.disk_model.capacity_bytes = 1000

    async def use(disk, node):
        await disk.make_folder(HOME)
        await disk.append_durably(FILE, 0, b"x" * 600)
        with pytest.raises(OSError, match="No space left"):
            await disk.append_durably(FILE, 600, b"y" * 600)
        with pytest.raises(OSError, match="holds 1000 bytes instead of 600"):
            await disk.append_durably(FILE, 600, b"z")
        await disk.truncate_durably(FILE, 600)
        await disk.append_durably(FILE, 600, b"z")
        return await disk.read_bytes(FILE)

    assert on_a_disk(use, prepare=small) == b"x" * 600 + b"z"


def test_a_step_that_was_begun_ends_whoever_stops_waiting():
    async def use(disk, node):
        await disk.make_folder(HOME)
        task = asyncio.current_task()
        asyncio.get_running_loop().call_later(0.00005, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await disk.write_from(FILE, 0, b"12")
        task.uncancel()
        return await disk.read_bytes(FILE)

    assert on_a_disk(use) == b"12"


def test_a_disk_that_is_stuck_answers_when_it_is_not_any_more():
    async def use(disk, node):
        await disk.make_folder(HOME)
        node.disk_conditions.stuck = True
        asyncio.get_running_loop().call_later(30.0, setattr, node.disk_conditions, "stuck", False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await disk.write_atomic(FILE, [b"x"])
        await disk.write_atomic(FILE, [b"y"])
        return asyncio.get_running_loop().time(), await disk.names(HOME), await disk.read_bytes(FILE)

    took_s, names, data = on_a_disk(use)

    assert 30.0 <= took_s < 30.1
    assert (names, data) == (["state"], b"y")


def test_steps_fail_at_the_given_rate_and_a_failed_write_leaves_the_old_file():
    async def use(disk, node):
        await disk.make_folder(HOME)
        await disk.write_atomic(FILE, [b"old"])
        failed = 0
        for _ in range(50):
            node.disk_conditions.fail = 0.2
            try:
                await disk.write_atomic(FILE, [b"new"])
            except OSError as error:
                failed += error.errno == errno.EIO
            node.disk_conditions.fail = 0.0
            assert await disk.read_bytes(FILE) in (b"old", b"new")
        return failed

    assert 20 < on_a_disk(use) < 45


def test_a_full_disk_fails_a_write_and_leaves_nothing_of_it():
    def small(node):
        node.disk_model.capacity_bytes = 1000

    async def use(disk, node):
        await disk.make_folder(HOME)
        await disk.write_atomic(FILE, [b"x" * 600])
        with pytest.raises(OSError, match="No space left"):
            await disk.write_atomic(FILE, [b"y" * 600])
        return await disk.names(HOME), await disk.read_bytes(FILE)

    assert on_a_disk(use, prepare=small) == (["state"], b"x" * 600)


def test_a_machine_may_return_with_an_empty_disk_and_keeps_it_when_only_its_program_is_killed():
    async def scenario(world):
        node = world.node("a")

        async def program(node):
            async with node.open_disk() as disk:
                if node.incarnation == 1:
                    await disk.write_from(Path("/file"), 0, b"never synced")
                    await asyncio.Event().wait()
                return await disk.names(Path("/"))

        node.start(program)
        await asyncio.sleep(1.0)
        node.kill()
        node.restart()
        kept = await node.task
        node.kill()
        node.restart(empty_disk=True)
        return kept, await node.task

    assert simulate(scenario, seed=1).result == (["file"], [])
