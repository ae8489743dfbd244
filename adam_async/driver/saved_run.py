"""A run that goes on from the disks of its servers, after all of them were lost.

The driver waits for the servers, finds the newest note whose shards are whole on the disks of the servers,
and reads all shards into a checkpoint in memory. The new run loads this checkpoint into its servers as any
resumed run does.
"""

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np

from adam_async.checkpoint.manifest import Checkpoint, CheckpointError
from adam_async.checkpoint.run_notes import RunNote, SavedRun
from adam_async.checkpoint.saved_shards import FoundStore, SavedShards, Survey
from adam_async.checkpoint.writer import common_manifest, make_tensors
from adam_async.controller.client import Membership
from adam_async.driver.preparation import PreparedRun
from adam_async.driver.run_noting import note_begin
from adam_async.driver.settings import RunInputs
from adam_async.errors import ConfigError, counted
from adam_async.run.cluster_map import DISK, ClusterMap
from adam_async.run.config import Config
from adam_async.run.partition import arrays_of
from adam_async.run.progress import Progress
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.clock import time_of_day, wall_clock

SEARCH_S = 10.0
"""Maximum time of the search for shards that no server has, in seconds. The search begins with as many
servers as the run wants; further servers may start meanwhile."""

PAUSE_S = 0.5
"""Pause between two surveys of the disks, in seconds."""


class SavedRunReader:
    """Reads the shards of a run from the disks of the servers.

    Args:
        note: Adds an event of the run.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        saved: SavedShards,
        progress: Progress,
        note: Callable[[str], None],
    ) -> None:
        self._membership = membership
        self._saved = saved
        self._progress = progress
        self._note = note

    async def resumed(self, inputs: RunInputs, prepared: PreparedRun, config: Config) -> Checkpoint | None:
        """Return the checkpoint that a run continues, from a file or from the disks; None for a new run.

        For errors see `read`.
        """
        resumed = inputs.resume
        if isinstance(resumed, SavedRun):
            return await self.read(resumed, prepared, config)
        if inputs.notes is not None:
            await self.wait_for_servers(config)
        if resumed is not None:
            for problem in resumed.problems:
                self._note(f"an older checkpoint is resumed: {problem}")
            for remark in resumed.remarks:
                self._note(remark)
            again = resumed.trained_again - resumed.manifest.trained_again
            self._note(
                f"resumed from {resumed.manifest.name}; {counted(again, 'group')} or a few more are trained "
                "again"
            )
        return resumed

    async def begin(
        self,
        inputs: RunInputs,
        run: str,
        program: TrainingProgram,
        prepared: PreparedRun,
        asked_rate: float,
    ) -> None:
        """Write the first note of a run that is to be kept on disks, before its submission.

        Args:
            inputs: Inputs of the run, with the checkpoint that it continues, if any.
            asked_rate: Rate that the caller asked for; 0 if the run decided it.

        Raises:
            CheckpointError: The note could not be written.
        """
        if inputs.notes is None:
            return
        start = common_manifest(
            run, program, prepared.data, asked_rate=asked_rate, trained_again=prepared.trained_again
        )
        start = msgspec.structs.replace(start, epoch=start.resume.epoch)
        if isinstance(inputs.resume, Checkpoint):
            before = inputs.resume.manifest
            start = msgspec.structs.replace(
                start,
                epoch=before.resume.epoch,
                groups=sum(stop - first for first, stop in before.resume.finished),
                resume=before.resume,
                epochs=before.epochs,
            )
        await note_begin(inputs.notes, start, wall_clock)

    async def wait_for_servers(self, config: Config) -> ClusterMap:
        """Wait until as many servers are there as a run wants, all with a disk.

        Raises:
            ConfigError: A server keeps its shards in memory only.
            DeadlineExceeded: Too few servers joined within `prepare_s`.
        """
        cluster = await self._membership.wait_for(
            lambda cluster: len(cluster.live("ps")) >= config.servers,
            f"{config.servers} parameter servers",
            config.waits.prepare_s,
        )
        without = [node for node in cluster.live("ps") if not cluster.nodes[node].info.get(DISK)]
        if without:
            raise ConfigError(
                f"{', '.join(without)} {'keeps its' if len(without) == 1 else 'keep their'} shards in memory "
                "only: start each server with --dir DIR, or train without --store"
            )
        return cluster

    async def read(self, run: SavedRun, prepared: PreparedRun, config: Config) -> Checkpoint | None:
        """Return the newest point of a run whose shards are on the disks; None if no point was on the disks.

        Raises:
            CheckpointError: The disks lack shards, have shards of another model, or have values that are not
                finite.
            ConfigError, DeadlineExceeded: See `wait_for_servers`.
            TransportError: A server did not answer.
        """
        cluster = await self.wait_for_servers(config)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + SEARCH_S
        notes = run.notes.notes
        while True:
            surveys = [await self._saved.survey(note.manifest.run, cluster) for note in notes]
            for note, survey in zip(notes, surveys, strict=True):
                store = next((store for store in survey.stores if not store.missing()), None)
                if store is not None:
                    return await self._load(run, note, store, prepared, config, cluster)
                if note.is_on_disk:
                    break  # other servers with its shards may still start, so no older note counts yet
            if not any(note.is_on_disk for note in notes):
                self._note(f"run {notes[0].manifest.run} had not reached the disks: a new run begins")
                return None
            if loop.time() > ends_at:
                raise CheckpointError(_what_is_missing(notes[0], surveys[0]))
            self._progress.phase = "looking for the shards of the run"
            await asyncio.sleep(PAUSE_S)
            cluster = self._membership.map

    async def _load(
        self,
        run: SavedRun,
        note: RunNote,
        store: FoundStore,
        prepared: PreparedRun,
        config: Config,
        cluster: ClusterMap,
    ) -> Checkpoint:
        manifest = note.manifest
        if store.arrays != tuple(arrays_of(prepared.model, prepared.plan)):
            raise CheckpointError(f"the disks have the shards of another model than run {manifest.run}")
        self._progress.phase = "reading the shards of the run"
        tensors = make_tensors(prepared.model, config, prepared.plan)
        states = await self._saved.read(store, tensors, cluster)
        for name, values in (*tensors.weights.items(), *tensors.state.items()):
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"{name} of run {manifest.run} has values on the disks that are not finite: continue "
                    "from a checkpoint (--resume), or begin anew with another --store"
                )
        clocks = [clock for state in states for clock in state.clocks.values()]
        again = run.trained_again_from(note)
        lost_s = max(run.notes.seen_at - note.at, 0.0)
        self._note(
            f"run {manifest.run} goes on from the disks of its servers, as of {time_of_day(note.at)}: the "
            f"updates of its last {lost_s:.1f} s are lost, and "
            f"{again - manifest.trained_again} groups or a few more are trained again"
        )
        return Checkpoint(
            manifest=msgspec.structs.replace(
                manifest,
                resume=msgspec.structs.replace(manifest.resume, clock=max(clocks, default=0)),
                arrays=tensors.arrays,
                shards=states,
            ),
            weights=tensors.weights,
            state=tensors.state,
            trained_again=again,
        )


def _what_is_missing(note: RunNote, survey: Survey) -> str:
    run, servers = note.manifest.run, ", ".join(survey.servers) or "no server"
    remedy = f"start all servers of the run with their folders, as many as before{survey.faults_text}"
    if not survey.stores:
        return f"no shards of run {run} are on the disks of {servers}: {remedy}"
    missing = ", ".join(survey.stores[0].missing())
    return f"the shards of {missing} of run {run} are not on the disks of {servers}: {remedy}"
