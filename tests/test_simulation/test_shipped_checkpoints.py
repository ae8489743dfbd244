"""Shipped checkpoints on simulated disks survive a power loss complete."""

import asyncio
from pathlib import Path

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.files import CheckpointFolder, load_checkpoint
from adam_async.checkpoint.names import is_folder_name
from adam_async.checkpoint.verification import verify_checkpoint
from tests.adam_async.checkpoint.checkpoints import checkpoint_of
from tests.simulation.scenario import simulate

FOLDER = Path("/run/checkpoints")


def lose_power(seed, keep):
    """Crash during the writes of checkpoints 1, 2, ...

    Returns:
        Number of the last finished one, the one read, and the number of whole ones.
    """
    done = whole = 0

    async def scenario(world):
        async def program(node):
            nonlocal done, whole
            async with node.open_disk() as disk:
                if node.incarnation > 1:
                    for name in filter(is_folder_name, await disk.names(FOLDER)):
                        whole += (await verify_checkpoint(FOLDER / name, disk)).whole
                    return await load_checkpoint(FOLDER, disk)
                folder = CheckpointFolder(FOLDER, disk)
                await folder.take_up(None)
                for number in range(1, 9):
                    await folder.write(checkpoint_of(number, rows=20), keep=keep)
                    done = number
                await asyncio.Event().wait()

        node = world.node("a")
        node.start(program, may_fail=True)
        await asyncio.sleep(world.dice.between(0.01, 0.25))
        node.crash()
        node.restart()
        try:
            return await node.task
        except CheckpointError as error:
            return error

    found = simulate(scenario, seed=seed).result
    return done, found, whole


def test_power_lost_at_any_moment_leaves_the_checkpoint_before_or_the_new_one():
    seen = set()
    for seed in range(120):
        keep = 1 + seed % 3
        done, found, whole = lose_power(seed, keep)
        assert min(keep, done) <= whole <= keep + 1
        seen.add(done)
        if isinstance(found, CheckpointError):
            assert done == 0
            continue
        groups = found.manifest.groups
        assert groups in (done, done + 1)
        assert found.problems == ()
        assert all((array == groups).all() for array in found.weights.values())
        assert (found.state["steps/first/weights"] == groups).all()

    assert len(seen) > 5
