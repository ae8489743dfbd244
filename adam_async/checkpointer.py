"""Takes the checkpoints of one run: reads all shards while training pauses, writes them while it goes on.

One is written at a time. Whoever wants to take the next one waits until it is written, and no longer than
`checkpoint_s`: a disk that is too slow, full or gone costs checkpoints, never the run. What was there before
stays, and the run's events say what happened.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

from adam_async.checkpoint import Checkpoint, Manifest, ProgressNote, epoch_values
from adam_async.checkpoint_files import CheckpointFolder
from adam_async.cluster_map import ClusterMap, ResumeRecord
from adam_async.errors import DeadlineExceeded
from adam_async.messages import ShardState
from adam_async.placement import ShardTable
from adam_async.run_result import CheckpointResult, EpochResult
from adam_async.run_tensors import RunTensors
from adam_async.shard_copies import ShardCopies
from transport import TransportError

logger = logging.getLogger(__name__)

Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Start a task of the owner's group under a name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """All shards at one moment."""

    tensors: RunTensors
    states: tuple[ShardState, ...]
    read_s: float
    """How long that took."""


class Checkpointer:
    """Checkpoints of one run.

    Args:
        folder: Where they go, opened for this run.
        copies: Reads the shards.
        spawn: Starts what goes on beside training.
        note: Adds an incident to the run's events.
        common: A manifest with what is the same in all of them.
        table: All shards.
        make_tensors: Memory for all of them.
        bound: Shards that must have reached the clock at which they are read.
        timeout_s: How long a write may be waited for.
    """

    def __init__(
        self,
        *,
        folder: CheckpointFolder,
        copies: ShardCopies,
        spawn: Spawn,
        note: Callable[[str], None],
        common: Manifest,
        table: ShardTable,
        make_tensors: Callable[[], RunTensors],
        bound: frozenset[int],
        timeout_s: float,
    ) -> None:
        self._folder = folder
        self._copies = copies
        self._spawn = spawn
        self._note = note
        self._common = common
        self._table = table
        self._make_tensors = make_tensors
        self._bound = bound
        self._timeout_s = timeout_s
        self._writing: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None
        self._noted: ProgressNote | None = None
        self.written: list[CheckpointResult] = []

    async def read(self, cluster: ClusterMap, clock: int) -> Reading | None:
        """Copy all shards, once the checkpoint before is written.

        Args:
            cluster: Where they are.
            clock: What the shards in `bound` must have reached.

        Returns:
            None if they could not be read, which the events then say.
        """
        await self.settle()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        tensors = self._make_tensors()
        try:
            states = await self._copies.read(
                cluster, self._table, tensors, clocks=dict.fromkeys(self._bound, clock)
            )
        except (TransportError, DeadlineExceeded) as error:
            self._note(f"no checkpoint was taken, the servers could not be read: {error}")
            return None
        return Reading(tensors=tensors, states=states, read_s=loop.time() - begin)

    def write(
        self,
        reading: Reading,
        *,
        epoch: int,
        groups: int,
        resume: ResumeRecord,
        epochs: Sequence[EpochResult],
        paused_s: float,
    ) -> None:
        """Begin to write a checkpoint; training goes on meanwhile.

        A state that has no finite loss does not replace one that has.

        Args:
            reading: All shards.
            epoch: The epoch it is taken in.
            groups: Groups of it that are trained.
            resume: Where a run that continues this one takes up; its clock is filled in here.
            epochs: What the epochs that have ended came to.
            paused_s: How long training stood still for it.
        """
        loss = epochs[-1].train_loss if epochs and not resume.finished else resume.loss
        if not isfinite(loss):
            self._note("no checkpoint was written: the loss is not finite")
            return
        clocks = [clock for state in reading.states for clock in state.clocks.values()]
        manifest = msgspec.structs.replace(
            self._common,
            epoch=epoch,
            groups=groups,
            resume=msgspec.structs.replace(resume, clock=max(clocks, default=0)),
            epochs=epoch_values(epochs),
            arrays=reading.tensors.arrays,
            shards=reading.states,
        )
        if manifest.name == self._folder.latest:
            return  # resumed from it, and nothing was trained since
        checkpoint = Checkpoint(
            manifest=manifest, weights=reading.tensors.weights, state=reading.tensors.state
        )
        self._writing = self._spawn("checkpoint", self._write(checkpoint, paused_s))

    async def _write(self, checkpoint: Checkpoint, paused_s: float) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        name = checkpoint.manifest.name
        try:
            size = await self._folder.write(checkpoint)
        except OSError as error:
            self._note(f"{name} could not be written: {error.strerror or error}; training goes on without it")
            return
        result = CheckpointResult(
            name=name,
            paused_s=round(paused_s, 6),
            written_s=round(loop.time() - begin, 6),
            bytes=size,
        )
        self.written.append(result)
        logger.info("%s: paused %.3f s, %d bytes in %.3f s", name, paused_s, size, result.written_s)

    async def settle(self) -> None:
        """Wait until what was begun is written; after `timeout_s` give it up, which the events then say."""
        writing = self._writing
        if writing is None:
            return
        await asyncio.wait([writing], timeout=self._timeout_s)
        self._writing = None
        if not writing.done():
            writing.cancel()
            self._note(
                f"a checkpoint was not written within {self._timeout_s:g} s and is given up; "
                "training goes on without it"
            )

    def look(self, data: Mapping[str, Any]) -> None:
        """Note how far training is, beside the checkpoints. Never waits.

        Args:
            data: What the data server counted.
        """
        note = ProgressNote(
            epoch=int(data["epoch"]),
            groups=int(data["finished"]),
            trained_again=self._common.trained_again,
        )
        busy = any(task is not None and not task.done() for task in (self._writing, self._noting))
        if not busy and note.epoch and note != self._noted:
            self._noted = note
            self._noting = self._spawn("progress", self._note_progress(note))

    async def _note_progress(self, note: ProgressNote) -> None:
        try:
            await self._folder.note_progress(note)
        except OSError as error:
            logger.warning("how far training is could not be noted: %s", error)

    def __repr__(self) -> str:
        return f"<Checkpointer {self._folder!r} {len(self.written)} written>"
