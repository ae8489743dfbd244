"""A run that goes on from the disks of its servers, after all of them were lost.

The driver waits for the servers, and surveys their disks. The driver takes the newest run whose shards are
whole on these disks. The record of this run has the program and the results. The driver reads all shards for
their sets of groups, a few in memory at a time. The new run loads them from the disks into its servers as any
resumed run does.
"""

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import numpy as np

from adam_async.checkpoint.checkpoint import (
    CheckpointError,
    Manifest,
    StoredCheckpoint,
    StoredPieces,
    saved_manifest,
)
from adam_async.checkpoint.saved_shards import SavedShards, newest_whole, stores_of_runs
from adam_async.controller.client import Membership
from adam_async.driver.takeover import SavedRun, at_first_gap
from adam_async.errors import ConfigError
from adam_async.messages import ShardState
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import state_of
from adam_async.run.cluster_map import DISK, ClusterMap
from adam_async.run.config import Config
from adam_async.run.progress import Progress
from adam_async.runtime.disk import Disk


class SavedRunReader:
    """Finds a run on the disks of the servers, and reads its shards.

    Args:
        note: Adds an event of the run.
    """

    def __init__(
        self, *, membership: Membership, saved: SavedShards, progress: Progress, note: Callable[[str], None]
    ) -> None:
        self._membership = membership
        self._saved = saved
        self._progress = progress
        self._note = note

    async def find(self, *, patient: bool = False) -> SavedRun | None:
        """Return the newest run whose shards are whole on the servers' disks; None without such a run.

        Args:
            patient: See `SavedShards.find`.

        Raises:
            CheckpointError: The disks lack shards of a run that they had, or its record.
            ConfigError, RunFailed: The record cannot be read.
        """
        self._progress.phase = "looking for the shards of a run"
        found = await self._saved.find("", lambda: self._membership.map, patient=patient)
        if found is None:
            return None
        assert found.run is not None, "a store without the record of its run does not count"
        return SavedRun.of(found.run, found)

    async def read(self, run: SavedRun, config: Config) -> StoredCheckpoint:
        """Read a run's shards; the servers are asked again for them when they are loaded.

        Raises:
            CheckpointError: The disks have values that are not finite, or the run has trained all its epochs.
            TransportError: A server did not answer.
        """
        name, store = run.manifest.run, run.store
        assert store is not None, "the shards of the run are on disks"
        self._progress.phase = "reading the shards of the run"
        pieces = StoredPieces(store.catalogue)
        source = self._saved.shards(store, self._membership.map)
        found: dict[int, ShardState] = {}
        async with aclosing(source.shards_of(pieces.table.shards)) as parts:
            async for shards in parts:
                for shard in shards:
                    _check_finite(shard, name)
                    found[int(shard.spec.id)] = state_of(shard)
        states = tuple(found[int(spec.id)] for spec in pieces.table.shards)
        trained = {int(spec.id) for spec in pieces.table.shards if not spec.frozen and spec.nbytes}
        manifest = at_first_gap(run, states, trained, config.epochs)
        self._note(f"run {name} goes on from the disks of its servers, in epoch {manifest.resume.epoch}")
        return StoredCheckpoint(
            manifest=manifest, record=run.record, pieces=pieces, states=states, source=source
        )


def _check_finite(shard: Shard, run: str) -> None:
    for array in (shard.values, *shard.rule_state.values()):
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"{shard.spec.tensor} of run {run} has values on the disks that are not finite: continue "
                "from a checkpoint (--resume), or begin anew with another --store"
            )


def check_disks(cluster: ClusterMap) -> None:
    """Raise ConfigError if a server keeps its shards in memory only."""
    without = [node for node in cluster.live("ps") if not cluster.nodes[node].info.get(DISK)]
    if without:
        raise ConfigError(
            f"{', '.join(without)} {'keeps its' if len(without) == 1 else 'keep their'} shards in memory "
            "only: start each server with --dir DIR, or train without --store"
        )


async def manifest_in(folder: Path, disk: Disk) -> Manifest | None:
    """Return options, model and data of the newest run in a folder that has one folder per server; None
    without a run.

    Raises:
        ConfigError, DataError, RunFailed: The folder or the record of the run cannot be read.
    """
    found, _ = newest_whole(await stores_of_runs(folder, disk), None)
    return saved_manifest(found.run) if found is not None and found.run is not None else None
