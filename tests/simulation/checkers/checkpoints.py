"""The checkpoints of a simulated run: exact in bsp, complete in every mode."""

from collections.abc import Iterable
from typing import Any

from adam_async.checkpoint.checkpoint import Manifest
from adam_async.checkpoint.files import KEPT, CheckpointFolder
from adam_async.checkpoint.new_checkpoint import NewCheckpoint
from adam_async.messages import ShardState
from adam_async.run.config import Config
from tests.simulation.scenario import Ledger, Violation


class CheckedFolder(CheckpointFolder):
    """A folder of checkpoints that checks each written checkpoint.

    Args:
        path, disk: See `CheckpointFolder`.
        config: The run.
        ledger: Counts the checkpoints within an epoch.
    """

    def __init__(self, path: Any, disk: Any, config: Config, ledger: Ledger) -> None:
        super().__init__(path, disk)
        self._config = config
        self._ledger = ledger

    async def write(self, checkpoint: NewCheckpoint, *, keep: int = KEPT) -> int:
        """Write a checkpoint, and check it.

        Raises:
            Violation: See `check_checkpoint`.
        """
        size = await super().write(checkpoint, keep=keep)
        if (manifest := checkpoint.manifest) is not None:
            check_checkpoint(manifest, checkpoint.states.values(), self._config)
            self._ledger.counts["checkpoints within an epoch"] += manifest.epoch == manifest.resume.epoch
        return size


def check_checkpoint(manifest: Manifest, states: Iterable[ShardState], config: Config) -> None:
    """Check the shards of a checkpoint against its groups, except frozen shards, which have version 0.

    Raises:
        Violation: In bsp the shards are not at one clock; or a shard has fewer updates than its groups need.
    """
    shards = [state for state in states if state.version]
    clocks = {clock for state in shards for clock in state.clocks.values()}
    if config.synchronous and clocks != {manifest.resume.clock}:
        raise Violation("exact checkpoints", f"{manifest.name}: shards at clocks {sorted(clocks)}")
    before = sum(each.images for each in manifest.resume.results) // config.images_per_group
    # A push has the groups of one step. A sum has one push from each replica, and a replica may be added.
    most = config.push_every * (config.replicas + 1 if config.synchronous else 1)
    for state in shards:
        ranges = state.groups.get(manifest.resume.epoch, ())
        groups = before + sum(ranges[1::2]) - sum(ranges[::2])
        if state.version * most < groups:
            text = f"shard {state.shard} has {state.version} updates for {groups} groups"
            raise Violation("complete checkpoints", f"{manifest.name}: {text}")
