"""Takes one run's checkpoints: reads its shards, and writes each piece on arrival.

Training continues meanwhile. Pieces that are read but not written take at most `MOST_BYTES`. So a disk that
is slower than the servers slows the reading, and does not fill the driver's memory. A run in place keeps its
threads still for the reading, so there all pieces may wait for the disk. In bsp the servers keep a clock only
for a few seconds, so a piece waits no longer for room.

The writer writes one checkpoint at a time. The next checkpoint waits for the current one for at most
`checkpoint_s`. A failed checkpoint is a *miss*: the driver keeps the earlier checkpoint, and logs the first,
second, fourth, ... miss in a row as an event of the run. `checkpoint_misses` in a row end the run, because a
crash would lose all training since the newest checkpoint.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.checkpoint.checkpoint import StoredPieces, folder_name, saved_manifest
from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.new_checkpoint import MOST_BYTES, NewCheckpoint
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.checkpoint.tensors import WholeTensors
from adam_async.errors import DeadlineExceeded, RunFailed
from adam_async.messages import ShardState
from adam_async.messages.group_sets import LossSum
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.piece_states import Catalogue, catalogue_of
from adam_async.parameter_server.storage import StoragePool
from adam_async.persistence.records import StateName
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config
from adam_async.run.counts import EpochCounts
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
    pieces: StoredPieces
    checkpoint: NewCheckpoint
    """The checkpoint without its records. The caller passes the reading to `write_end` or `write_within`."""
    weights: Mapping[str, NDArray[Any]]
    """Values by tensor, in its shape each; empty unless the caller asked for them."""

    @property
    def states(self) -> tuple[ShardState, ...]:
        """Tables of the shards, by shard number."""
        return tuple(self.checkpoint.states[int(spec.id)] for spec in self.pieces.table.shards)


class Checkpointer:
    """Checkpoints of one run.

    Args:
        storage_pool: Memory of this process's servers, which is kept still while it is read.
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
        """Why the last due checkpoint failed; empty if it did not fail."""
        progress.takes_checkpoints = True
        if folder.latest:  # the run continues this checkpoint
            progress.written(folder.latest, now=asyncio.get_running_loop().time())

    async def read(
        self, cluster: ClusterMap, clock: int = 0, *, within_s: float | None = None, has_weights: bool = False
    ) -> Reading | None:
        """Read all shards into a new checkpoint, after the earlier checkpoint is written.

        Args:
            clock: Clock that all trained shards must reach in ssp, and at which they are read in bsp; 0: read
                the shards as they are.
            within_s: Time in seconds within which the shards must reach the clock; None: `clock_s`.
            has_weights: Whether the caller needs the values, too.

        Returns:
            The shards; None if the servers could not be read, which counts as a miss.

        Raises:
            ClockPassed: In bsp, a shard has passed the clock.
            RunFailed: See `miss`.
        """
        await self.settle()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        program, in_place, catalogue = _store_of(cluster)
        pieces = StoredPieces(catalogue)
        checkpoint = NewCheckpoint(catalogue, inf if in_place else MOST_BYTES)
        values = WholeTensors(catalogue.arrays, pieces.table) if has_weights else None
        # In bsp the servers keep the clock for `answer_s` from one question of this reader to the next.
        is_kept = bool(clock) and self._config.synchronous
        room_s = self._config.waits.answer_s / 2 if is_kept else None

        async def put(name: StateName, bundle: Bundle) -> None:
            """Pass a piece to the disk, and its values to the evaluation; give up on a disk that is stuck."""
            if values is not None:
                for shard in bundle.shards.values():
                    values.take(shard)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await checkpoint.put(name, bundle, within_s=room_s)
            except TimeoutError:
                if checkpoint.drop():  # only one of several waiting pieces counts as a miss
                    self._give_up(writing)

        writing = self._writing = self._spawn("checkpoint", self._write(checkpoint))
        within_s = self._config.waits.clock_s if within_s is None else within_s
        try:
            # All shards are read with the same groups: in place a shard cannot refuse a group that it has.
            async with self._still(cluster, program.id, in_place=in_place):
                await self._copies.read(cluster, pieces, put, clock=clock, within_s=within_s)
        except BaseException as error:
            checkpoint.drop()
            if not isinstance(error, TransportError | DeadlineExceeded):
                raise
            self.miss(f"no checkpoint was taken, the servers could not be read: {error}")
            return None
        checkpoint.read_s = loop.time() - begin
        return Reading(
            program=program,
            pieces=pieces,
            checkpoint=checkpoint,
            weights=values.weights if values is not None else {},
        )

    def _still(self, cluster: ClusterMap, run: str, *, in_place: bool) -> AbstractAsyncContextManager[object]:
        """Keep the memory of the servers still for a block, if workers train in place."""
        if in_place and self._storage_pool.find(run) is None:
            return self._copies.still(cluster)
        return self._storage_pool.still(run)

    def write_end(
        self,
        reading: Reading,
        cluster: ClusterMap,
        results: tuple[EpochCounts, ...],
        epochs: Sequence[EpochResult],
    ) -> None:
        """Complete the checkpoint at an epoch's end, or drop it if the training loss is not finite.

        Training continues during the write.
        """
        ended = cluster.epoch
        assert ended is not None
        resume = ResumeRecord(epoch=ended.number + 1, clock=0, results=results)
        # If the shards have dropped an epoch's set, all its losses are unknown. Losses are also unknown after
        # a dealer's loss, if the part of a cut replica that computes the loss pushes no shard.
        if isfinite(epochs[-1].train_loss) or not ended.result.loss_images:
            self._complete(reading, (ended.number, ended.groups), resume, epochs)
        else:
            self._note(NOT_FINITE)
            reading.checkpoint.drop()

    def write_within(
        self, reading: Reading, resume: ResumeRecord, epochs: Sequence[EpochResult], *, groups: int
    ) -> None:
        """Complete a checkpoint within an epoch, or drop it if the loss so far is not finite.

        Training continues during the write. If all shards have all groups of the epoch, the checkpoint is
        dropped, because the epoch's end has a separate checkpoint.

        Args:
            groups: Number of groups in the epoch.
        """
        found, states = self._groups_on_all(reading, resume.epoch), reading.checkpoint.states.values()
        if found >= groups:
            reading.checkpoint.drop()
        elif all(each.losses.get(resume.epoch, LossSum()).units is not None for each in states):
            self._complete(reading, (resume.epoch, found), resume, epochs)
        else:
            self._note(NOT_FINITE)
            reading.checkpoint.drop()

    @staticmethod
    def _groups_on_all(reading: Reading, epoch: int) -> int:
        """Return the number of an epoch's groups that all trained shards have."""
        trained = zip(reading.pieces.table.shards, reading.states, strict=True)
        several = {state.groups.get(epoch, ()) for spec, state in trained if not spec.frozen}
        every, _ = common_and_others(several)
        return int((every[1::2] - every[::2]).sum())

    def _complete(
        self, reading: Reading, place: tuple[int, int], resume: ResumeRecord, epochs: Sequence[EpochResult]
    ) -> None:
        """Complete a checkpoint, unless the newest checkpoint has the same groups."""
        if folder_name(*place) == self._folder.latest:
            reading.checkpoint.drop()  # the run is resumed from this checkpoint, and has not trained since
            return
        record = RunRecord(
            program=reading.program,
            ended=resume.epoch - 1,
            results=resume.results,
            evaluated=tuple([each.evaluation for each in epochs]),
            train_s=resume.train_s,
        ).bounded()
        manifest = saved_manifest(record, place).at_clock_of(reading.states)
        reading.checkpoint.complete(manifest, record)

    async def _write(self, checkpoint: NewCheckpoint) -> None:
        """Write a checkpoint as it arrives, and report it.

        A full or broken disk costs this checkpoint only.
        """
        if not await checkpoint.has_pieces() and checkpoint.manifest is None:
            return
        loop = asyncio.get_running_loop()
        try:
            size = await self._folder.write(checkpoint, keep=self._config.keep)
        except OSError as error:
            checkpoint.drop()
            name = checkpoint.manifest.name if checkpoint.manifest is not None else "a checkpoint"
            self.miss(f"{name} could not be written: {error.strerror or error}")
            return
        finally:
            if (renamed := self._folder.renamed) and checkpoint.manifest is not None:
                name = checkpoint.manifest.name
                self._note(f"a {name} of another run or damaged is renamed to {renamed}")
        if (manifest := checkpoint.manifest) is None:
            return
        self._misses, self.missed = 0, ""
        result = CheckpointResult(
            name=manifest.name,
            epoch=manifest.epoch,
            read_s=round(checkpoint.read_s, 6),
            written_s=round(checkpoint.busy_s + loop.time() - checkpoint.read_out_at, 6),
            bytes=size,
        )
        self.written.append(result)
        self._progress.written(manifest.name, now=loop.time())
        text = "%s: read in %.3f s, %d bytes in %.3f s"
        logger.info(text, manifest.name, checkpoint.read_s, size, result.written_s)

    async def settle(self) -> None:
        """Wait for the current checkpoint; after `checkpoint_s` the checkpoint counts as missed.

        Raises:
            RunFailed: See `miss`.
        """
        writing = self._writing
        if writing is None:
            return
        await asyncio.wait([writing], timeout=self._timeout_s)
        self._writing = None
        if not writing.done():
            self._give_up(writing)

    def _give_up(self, writing: asyncio.Task[None]) -> None:
        writing.cancel()
        self.miss(f"a checkpoint was not written within {self._timeout_s:g} s and is given up")

    def miss(self, what: str) -> None:
        """Report a failed checkpoint; the run continues, unless too many in a row have failed.

        Args:
            what: Name of the checkpoint, and reason of the failure.

        Raises:
            RunFailed: `checkpoint_misses` in a row have failed; the error names the newest good one.
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
            return  # only the first miss in a row, and each doubling of the number, is an event
        often = "" if self._misses == 1 else f", {self._misses} failed in a row"
        self._note(f"{what}; training goes on without it{often}")


def _store_of(cluster: ClusterMap) -> tuple[ProgramRecord, bool, Catalogue]:
    """Return a run's program, whether it trains in place, and its store's record."""
    run = cluster.run
    assert run is not None, "a run is in the map"
    name, store = next((name, store) for name, store in cluster.stores.items() if store.id == run.id)
    # The folder has its name once it is whole, so its pieces may be small in place, too.
    small = msgspec.structs.replace(store, in_place=False)
    return run, store.in_place, catalogue_of(cluster, name, small, began=0.0)
