"""Takes the checkpoints of one run: reads its shards, and writes them while training continues.

The writer writes one checkpoint at a time. The next checkpoint waits for the current one, for `checkpoint_s`
at most. A failed checkpoint is a *miss*: the driver keeps the earlier
checkpoint, and logs the first, second, fourth, ... miss in a row as an event of the run. `checkpoint_misses`
in a row end the run, because a crash would lose all training since the newest checkpoint.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

from adam_async.checkpoint.checkpoint import Checkpoint, StoredPieces
from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.manifest import epoch_values, folder_name, saved_manifest
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.checkpoint.tensors import WholeTensors
from adam_async.errors import DeadlineExceeded, RunFailed
from adam_async.messages import ShardState
from adam_async.messages.loss_sums import LossSum
from adam_async.parameter_server.piece_states import Catalogue, catalogue_of
from adam_async.parameter_server.storage import StoragePool
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config
from adam_async.run.group_ranges import common_and_others
from adam_async.run.progress import Progress
from adam_async.run.result import CheckpointResult, EpochResult
from adam_async.run.run_record import RunRecord
from adam_async.run.training_program import ProgramRecord, ResumeRecord
from transport import TransportError

logger = logging.getLogger(__name__)

NOT_FINITE = "no checkpoint was written: the loss is not finite, and the one before is worth more"

Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Function that starts a task of the owner's group under a name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """All shards of a run, read for one checkpoint."""

    program: ProgramRecord
    catalogue: Catalogue
    tensors: WholeTensors
    states: tuple[ShardState, ...]
    read_s: float
    """Duration of the reading in seconds."""


class Checkpointer:
    """Checkpoints of one run.

    Args:
        storage_pool: Memory of the servers of this process, which is kept still while it is read.
    """

    def __init__(
        self,
        *,
        folder: CheckpointFolder,
        copies: ShardCopies,
        storage_pool: StoragePool,
        config: Config,
        spawn: Spawn,
        note: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._folder = folder
        self._copies = copies
        self._storage_pool = storage_pool
        self._spawn = spawn
        self._note = note
        self._progress = progress
        self._misses = 0
        self._config = config
        self._timeout_s = config.waits.checkpoint_s
        self._writing: asyncio.Task[None] | None = None
        self.written: list[CheckpointResult] = []
        self.missed = ""
        """Reason for the failure of the last due checkpoint; empty if it did not fail."""
        progress.takes_checkpoints = True
        if folder.latest:  # the run continues this checkpoint
            progress.written(folder.latest, now=asyncio.get_running_loop().time())

    async def read(
        self, cluster: ClusterMap, clock: int = 0, *, within_s: float | None = None
    ) -> Reading | None:
        """Copy all shards, after the earlier checkpoint is written.

        Args:
            clock: Clock that all trained shards must reach in ssp, and at which they are read in bsp; 0: the
                shards are read as they are.
            within_s: Time within which the shards must reach the clock, in seconds; None: `clock_s`.

        Returns:
            The shards; None if the servers could not be read, which is a miss.

        Raises:
            ClockPassed: In bsp, a shard has passed the clock.
            RunFailed: See `miss`.
        """
        await self.settle()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        program, catalogue = _store_of(cluster)
        tensors = StoredPieces(catalogue).new_tensors()
        within_s = self._config.waits.clock_s if within_s is None else within_s
        try:
            # All shards are read with the same groups: in place a shard cannot refuse a group that it has.
            async with self._storage_pool.still(program.id):
                states = await self._copies.read(cluster, tensors, clock=clock, within_s=within_s)
        except (TransportError, DeadlineExceeded) as error:
            self.miss(f"no checkpoint was taken, the servers could not be read: {error}")
            return None
        read_s = loop.time() - begin
        return Reading(program=program, catalogue=catalogue, tensors=tensors, states=states, read_s=read_s)

    def write_end(
        self,
        reading: Reading,
        cluster: ClusterMap,
        results: tuple[dict[str, Any], ...],
        epochs: Sequence[EpochResult],
    ) -> None:
        """Begin to write the shards of the end of an epoch, unless its training loss is not finite.

        Training continues during the write.
        """
        ended = cluster.epoch
        assert ended is not None
        resume = ResumeRecord(epoch=ended.number + 1, clock=0, results=results)
        # All losses are unknown of an epoch whose set the shards have dropped. So they are after the loss of
        # a dealer if the part of a cut replica that computes the loss pushes no shard.
        if isfinite(epochs[-1].train_loss) or not ended.result.get("loss_images", 1):
            self._begin(reading, (ended.number, ended.groups), resume, epochs)
        else:
            self._note(NOT_FINITE)

    def write_within(
        self, reading: Reading, resume: ResumeRecord, epochs: Sequence[EpochResult], *, groups: int
    ) -> None:
        """Begin to write shards read within an epoch, unless its loss so far is not finite.

        Training continues during the write. If all shards have all groups of the epoch, nothing is written,
        because its end has a checkpoint of its own.

        Args:
            groups: Number of groups of the epoch.
        """
        found = self._groups_on_all(reading, resume.epoch)
        if found >= groups:
            return
        if all(each.losses.get(resume.epoch, LossSum()).units is not None for each in reading.states):
            self._begin(reading, (resume.epoch, found), resume, epochs)
        else:
            self._note(NOT_FINITE)

    @staticmethod
    def _groups_on_all(reading: Reading, epoch: int) -> int:
        """Return the number of groups of an epoch that all trained shards have."""
        trained = zip(reading.tensors.table.shards, reading.states, strict=True)
        several = {state.groups.get(epoch, ()) for spec, state in trained if not spec.frozen}
        every, _ = common_and_others(several)
        return int((every[1::2] - every[::2]).sum())

    def _begin(
        self,
        reading: Reading,
        place: tuple[int, int],
        resume: ResumeRecord,
        epochs: Sequence[EpochResult],
    ) -> None:
        """Begin to write shards that were read for a checkpoint, unless the newest checkpoint has the same
        groups."""
        if folder_name(*place) == self._folder.latest:
            return  # the run is resumed from this checkpoint, and has not trained since
        record = RunRecord(
            program=reading.program,
            ended=resume.epoch - 1,
            results=resume.results,
            epochs=epoch_values(epochs),
            train_s=resume.train_s,
        ).bounded()
        checkpoint = Checkpoint(
            manifest=saved_manifest(record, place).at_clock_of(reading.states),
            catalogue=reading.catalogue,
            record=record,
            tensors=reading.tensors,
            states=reading.states,
        )
        self._writing = self._spawn("checkpoint", self._write(checkpoint, reading.read_s))

    async def _write(self, checkpoint: Checkpoint, read_s: float) -> None:
        """Write a checkpoint, and report it. A full or broken disk costs this checkpoint only."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        name = checkpoint.manifest.name
        try:
            size = await self._folder.write(checkpoint, keep=self._config.keep)
        except OSError as error:
            self.miss(f"{name} could not be written: {error.strerror or error}")
            return
        finally:
            if self._folder.renamed:
                renamed = self._folder.renamed
                self._note(f"a {name} of another run or damaged is renamed to {renamed}")
        self._misses, self.missed = 0, ""
        result = CheckpointResult(
            name=name,
            epoch=checkpoint.manifest.epoch,
            read_s=round(read_s, 6),
            written_s=round(loop.time() - begin, 6),
            bytes=size,
        )
        self.written.append(result)
        self._progress.written(name, now=loop.time())
        logger.info("%s: read in %.3f s, %d bytes in %.3f s", name, read_s, size, result.written_s)

    async def settle(self) -> None:
        """Wait for the checkpoint in progress; after `checkpoint_s` it is a miss.

        Raises:
            RunFailed: See `miss`.
        """
        writing = self._writing
        if writing is None:
            return
        await asyncio.wait([writing], timeout=self._timeout_s)
        self._writing = None
        if not writing.done():
            writing.cancel()
            self.miss(f"a checkpoint was not written within {self._timeout_s:g} s and is given up")

    def miss(self, what: str) -> None:
        """Report a failed checkpoint; the run continues, unless too many in a row have failed.

        Args:
            what: Name of the checkpoint, and reason of the failure.

        Raises:
            RunFailed: `checkpoint_misses` in a row have failed; the error has the newest good one.
        """
        self._misses += 1
        self.missed = what
        if self._misses == self._config.checkpoint_misses:
            newest = self._folder.latest or "none was written"
            failed = "a checkpoint" if self._misses == 1 else f"{self._misses} checkpoints in a row"
            raise RunFailed(
                f"{failed} failed, the last one: {what}; the newest: {newest}; with "
                "--checkpoint-misses 0 a run goes on without checkpoints"
            )
        if self._misses & (self._misses - 1):
            return  # only the first miss in a row and each doubling of the number of misses are events
        often = "" if self._misses == 1 else f", {self._misses} failed in a row"
        self._note(f"{what}; training goes on without it{often}")


def _store_of(cluster: ClusterMap) -> tuple[ProgramRecord, Catalogue]:
    """Return the program of a run, and the record of its store."""
    run = cluster.run
    assert run is not None, "a run is in the map"
    name, store = next((name, store) for name, store in cluster.stores.items() if store.id == run.id)
    # The folder has its name once it is whole, so its pieces may be small in place, too.
    store = msgspec.structs.replace(store, in_place=False)
    return run, catalogue_of(cluster, name, store, began=0.0)
