"""Pure: how a driver goes on with a run of another driver: which run, with which options, results and notes.

The run waits for a driver in the cluster map, or all its servers were lost, and its record is on their disks.
The program has the model, the options and the starting point of the run. The map has the newest results of
its data servers, and the disks have all. The notes of the earlier driver have the accuracies of the epochs
that the earlier driver evaluated. The weights of these epochs are lost with that driver.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile
from typing import Any

import msgspec

from adam_async.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    check_epochs_left,
    check_kept_options,
)
from adam_async.checkpoint.saved_shards import FoundStore
from adam_async.driver.training_rules import PHASES
from adam_async.errors import RunFailed
from adam_async.messages import ShardState
from adam_async.run.cluster_map import ClusterMap, skipped_groups
from adam_async.run.config import Config
from adam_async.run.group_ranges import has_groups
from adam_async.run.run_record import RunRecord
from adam_async.run.training_program import ProgramRecord, ResumeRecord, SkippedGroups, TrainingProgram

OPEN: Mapping[str, Any] = {
    "epochs": 0,
    "rate": 0.0,
    "rule": "auto",
    "schedule": "auto",
    "warm_up": 0.0,
    "weights": "auto",
    "protocol": "auto",
}
"""Options that a run can decide, each with the value that leaves the decision to the run."""

OF_ROLES = frozenset(
    "data damaged cache spill threads in_flight pin_threads controllers processes slow memory".split()
)
"""Options of the roles. A role started by hand gets them from its own command; the values of a driver have no
effect on it."""

OF_DRIVER = frozenset(("waits", "memory_budget", "checksum", "model", "transforms"))
"""Options of the driver alone, and names of files; the program has the content of these files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """A request to go on with a run that waits for a driver, or whose servers were all lost.

    Attributes:
        run: Id of the run; empty: the run of the map or of the disks of the servers, or a new run if these
            are absent or over.
        given: Names of the options that the caller sets; the run has the others.
    """

    run: str = ""
    given: frozenset[str] = frozenset()


def run_to_take(cluster: ClusterMap, attach: Attach) -> ProgramRecord | None:
    """Return the run of the map that a driver takes over; None if it begins a new one.

    Raises:
        RunFailed: The named run is not in the map, or is over; or the run of the map has a live driver.
    """
    run = cluster.run
    if attach.run and (run is None or run.id != attach.run):
        there = f"its run is {run.id}, which {PHASES[run.phase]}" if run is not None else "it has had no run"
        raise RunFailed(f"the cluster has no run {attach.run!r}: {there}")
    if run is None or run.over:
        if attach.run and run is not None:
            raise RunFailed(f"run {run.id} is over, it {PHASES[run.phase]}: it takes no driver")
        return None
    if cluster.driven:
        raise RunFailed(f"run {run.id} has a live driver, {run.driver}: end that one first")
    return run


def check_none_waits(cluster: ClusterMap) -> None:
    """Refuse to begin a new run while another one waits for a driver, because its values would be lost.

    Raises:
        RunFailed: A run waits.
    """
    run = cluster.run
    if run is not None and not run.over and not cluster.driven:
        raise RunFailed(
            f"run {run.id} waits for a driver, because {run.driver} was lost: --attach takes it over, and "
            "--replace begins a new run in its place, without its weights"
        )


def check_options(given: Collection[str], asked: Config, config: Config, run: str) -> None:
    """Refuse options that are not those of the run that a driver takes over.

    Args:
        given: Names of the options that the caller sets.
        asked: Their values.
        config: The options of the run.

    Raises:
        CheckpointError: See `check_kept_options`.
    """
    for_run = set(given) - OF_ROLES - OF_DRIVER
    names = sorted(name for name in for_run if name not in OPEN or getattr(asked, name) != OPEN[name])
    check_kept_options(names, asked, config, f"run {run}")


def joined_results(
    run: ClusterMap | RunRecord, program: TrainingProgram, manifest: Manifest | None
) -> tuple[int, tuple[dict[str, Any], ...]]:
    """Return the results of a run's ended epochs, without a gap, and the number of the first one.

    Args:
        run: The map or the record of the run.
        manifest: Manifest of the run's newest checkpoint, if any.
    """
    resumed, known = program.resumed, dict[int, dict[str, Any]]()
    sources = [(run.ended, run.results)]
    if resumed is not None:
        sources.append((resumed.epoch - 1, resumed.results))
    if manifest is not None:
        sources.append((manifest.resume.epoch - 1, manifest.resume.results))
    for last, results in reversed(sources):
        known.update(zip(range(last - len(results) + 1, last + 1), results, strict=True))
    first = run.ended + 1
    while first - 1 in known:
        first -= 1
    return first, tuple(known[epoch] for epoch in range(first, run.ended + 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRun:
    """A run that can go on from the disks of its servers.

    Attributes:
        record: The run's record.
        store: Its shards.
        program: Its program.
        manifest: Options, model and data of the run. Its starting point counts once the shards are read.
    """

    record: RunRecord
    store: FoundStore
    program: TrainingProgram
    manifest: Manifest

    @property
    def has_finished(self) -> bool:
        """Whether the run has trained all its epochs."""
        return self.record.program.phase == "finished" and self.record.ended >= self.program.config.epochs

    @property
    def waits(self) -> bool:
        """Whether no driver has ended the run, or its values are those of the run that it continues."""
        resumed = self.program.resumed
        has_trained = resumed is None or self.record.ended >= resumed.epoch
        return self.record.program.phase != "finished" or not has_trained

    def __repr__(self) -> str:
        return f"<SavedRun {self.manifest.run} {self.record.ended} epochs>"


def at_first_gap(
    run: SavedRun, states: Sequence[ShardState], trained: Collection[int], epochs: int
) -> Manifest:
    """Return the manifest of a run at its first epoch that is not whole in all shards, or not evaluated.

    The run goes on with this epoch. Shards that have groups of it or of later epochs refuse them.

    Args:
        states: States of all shards.
        trained: Numbers of the shards that take groups.
        epochs: Number of epochs that the run is to have.

    Raises:
        CheckpointError: The run has trained all these epochs, or its record lacks the number of its images.
    """
    first, results = joined_results(run.record, run.program, None)
    start = run.program.resumed.epoch if run.program.resumed is not None else 1
    evaluated = run.manifest.epoch_results
    stop = min(run.record.ended, evaluated[-1].epoch if evaluated else start - 1) + 1
    sets = {id(each.groups): each.groups for each in states if each.shard in trained}
    train_images = run.manifest.data.get("train_images")
    if not isinstance(train_images, int):
        raise CheckpointError(f"the record of run {run.manifest.run} lacks the number of its images")
    images = train_images - run.program.config.validation
    groups = -(-max(images, 1) // run.program.config.images_per_group)
    # Without the results of old epochs, these count as whole: no shard has been behind so far.
    epoch = start if first <= max(start - 1, 1) else first + 1
    skipped: dict[int, SkippedGroups] = dict(enumerate(map(tuple, skipped_groups(results)), start=first))
    if run.program.resumed is not None:  # the run before may have ended epochs that this one has not
        skipped = {**dict(enumerate(run.program.resumed.skipped, start=start)), **skipped}
    while epoch < stop:
        lacking = _left((epoch, 0, groups), skipped_groups([results[epoch - first]])[0])
        if not all(has_groups(each, named) for each in sets.values() for named in lacking):
            break
        epoch += 1
    manifest = msgspec.structs.replace(
        run.manifest,
        resume=ResumeRecord(
            epoch=epoch,
            clock=0,
            results=results[: epoch - first],
            skipped=tuple([skipped[each] for each in takewhile(skipped.__contains__, count(epoch))]),
        ),
        epochs=tuple(each for each in run.manifest.epochs if each["epoch"] < epoch),
    )
    check_epochs_left(manifest, epochs)
    return manifest.at_clock_of(states)


def _left(named: tuple[int, int, int], skipped: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return the groups of an epoch without its skipped ranges, as names of one range each."""
    epoch, start, stop = named
    edges = (start, *chain.from_iterable(skipped), stop)
    return [(epoch, first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]
