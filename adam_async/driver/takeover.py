"""Submits a program to the controllers, changes it, and takes over another driver's run.

A driver takes over a run if it waits for a driver in the cluster map, or if all its servers were lost and its
record is on their disks. The record has the program, with the run's model, options and starting point. The
record also has the epochs' results and evaluations: all of them on disks, and the newest in the map. The
weights of the evaluated epochs are lost with the earlier driver.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile
from typing import Self

import msgspec

from adam_async.checkpoint.checkpoint import (
    CheckpointError,
    Manifest,
    check_epochs_left,
    check_kept_options,
    saved_manifest,
)
from adam_async.checkpoint.saved_shards import FoundStore
from adam_async.controller.client import Membership
from adam_async.controller.training_rules import PHASES
from adam_async.errors import RunFailed
from adam_async.messages import ShardState
from adam_async.option_types import DECIDED, OF_DRIVER, OF_ROLES
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import OPTIONS, Config
from adam_async.run.counts import joined_evaluations, newest_and_best, skipped_groups
from adam_async.run.group_ranges import has_groups
from adam_async.run.result import EpochResult
from adam_async.run.run_record import RunRecord, newest
from adam_async.run.training_program import (
    ProgramRecord,
    ResumeRecord,
    TrainingProgram,
    cut_blob,
    read_training,
)


async def submit(membership: Membership, record: ProgramRecord) -> None:
    """As its driver, submit a program; cut the blob into pieces if one value of the map has no room for it.

    Raises:
        RunFailed: The blob is too long even in pieces, or the controller refused the record.
        DeadlineExceeded: No controller led, or answered.
    """
    try:
        whole, pieces = cut_blob(record)
    except ValueError as error:
        raise RunFailed(
            f"program {record.id} cannot be submitted: {error}; use fewer layers or partitions"
        ) from None
    for number, piece in enumerate(pieces):
        await membership.update(f"run/{number}", lambda _, piece=piece: piece)  # type: ignore[misc]
    await membership.update("run", lambda _: whole)


async def update_program(
    membership: Membership, change: Callable[[ProgramRecord], ProgramRecord | None]
) -> None:
    """Change the program, as its driver: `change` returns the new record from the newest, or None to keep it.

    Fields in `training_program.FIXED` keep their submitted values, and another driver's program stays
    unchanged. For errors see `Membership.update`.
    """

    def changed(newest: ClusterMap) -> ProgramRecord | None:
        """Return the changed program, if this member drives it."""
        run = newest.run
        record = change(run) if run is not None and run.driven_by == membership.member else None
        return record.without_fixed() if record is not None else None

    await membership.update("run", changed)


def with_evaluations(record: ProgramRecord, epochs: Iterable[EpochResult], *, ended: int) -> ProgramRecord:
    """Return a program with the evaluations of its ended epochs, the last of which is `ended`."""
    new = [each.evaluation for each in epochs if each.epoch <= ended]
    evaluated = newest_and_best(joined_evaluations(record.evaluated, new))
    return msgspec.structs.replace(record, evaluated=evaluated)


async def take_over(membership: Membership, run: str) -> None:
    """Become the driver of a program that waits for one.

    Raises:
        RunFailed: Another driver was faster, or the program is over, or the map has another program or none.
        DeadlineExceeded: No controller led, or answered.
    """
    node, incarnation = membership.member

    def taken(newest: ClusterMap) -> ProgramRecord | None:
        """Return the program with this driver, if it still waits for one."""
        record = newest.run
        if record is None or record.id != run or record.over or newest.driven:
            return None
        return msgspec.structs.replace(record, driver=node, incarnation=incarnation).without_fixed()

    await membership.update("run", taken)
    now = membership.map.run
    if now is None or now.id != run:
        raise RunFailed(f"run {run} was replaced by {now.id if now is not None else 'none'}")
    if now.driven_by != membership.member:
        raise RunFailed(f"run {run} was taken over by another driver, {now.driver}")
    if now.over:
        raise RunFailed(f"run {run} is over: {now.reason or now.phase}")


REPLACE = "--replace begins a new run in its place, without its weights"
"""Remedy in the errors of a new run while another one waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """A request to continue a run that waits for a driver, or whose servers were all lost.

    Attributes:
        run: Id of the run; empty: the run of the map or of the servers' disks, or a new run if these are
            absent or over.
        given: Names of the options that the caller sets; the run has the others.
    """

    run: str = ""
    given: frozenset[str] = frozenset()


def run_to_take(cluster: ClusterMap, attach: Attach) -> ProgramRecord | None:
    """Return the map's run that a driver takes over; None if it begins a new one.

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
            f"run {run.id} waits for a driver, because {run.driver} was lost: --attach takes it over, "
            f"and {REPLACE}"
        )


def check_has_ended(saved: "SavedRun") -> None:
    """Refuse to begin a new run while the disks have one that no driver has ended. Raises RunFailed."""
    if saved.waits:
        raise RunFailed(
            f"run {saved.manifest.run} waits on the disks of its servers: --attach goes on with it, and "
            f"{REPLACE}"
        )


def check_options(given: Collection[str], asked: Config, config: Config, run: str) -> None:
    """Refuse options that differ from those of the run that a driver takes over.

    Args:
        given: Names of the options that the caller sets.
        asked: Their values.
        config: The options of the run.

    Raises:
        CheckpointError: See `check_kept_options`.
    """
    names = []
    for name in sorted(given):
        option = OPTIONS[name]
        is_open = option.has(DECIDED) and getattr(asked, name) == option.default
        # A role started by hand has its options from its own command; the driver's values have no effect.
        if not (is_open or option.has(OF_ROLES) or option.has(OF_DRIVER)):
            names.append(name)
    check_kept_options(names, asked, config, f"run {run}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRun:
    """A run that a driver goes on with.

    Attributes:
        record: The run's record.
        program: Its program.
        manifest: Options, model and data of the run. The run's starting point counts once the shards are
            read.
        store: The run's shards on disks; None: the run waits in the cluster map, and its servers have them.
    """

    record: RunRecord
    program: TrainingProgram
    manifest: Manifest
    store: FoundStore | None = None

    @classmethod
    def of(cls, record: RunRecord, store: FoundStore | None = None) -> Self:
        """Return the run of a record. Raises ConfigError: the run's program cannot be read."""
        program = read_training(record.program)
        record = with_results_before(record, program.resumed)
        return cls(record=record, program=program, manifest=saved_manifest(record), store=store)

    @property
    def has_finished(self) -> bool:
        """Whether the run has trained all its epochs."""
        return self.record.program.phase == "finished" and self.record.ended >= self.program.config.epochs

    @property
    def waits(self) -> bool:
        """Whether no driver has ended the run, or its values are those of the run that it continues."""
        has_trained = self.program.resumed is None or self.record.ended >= self.start
        return self.record.program.phase != "finished" or not has_trained

    @property
    def start(self) -> int:
        """Number of the first epoch that the run trains."""
        return self.program.resumed.epoch if self.program.resumed is not None else 1

    def __repr__(self) -> str:
        return f"<SavedRun {self.manifest.run} {self.record.ended} epochs>"


def run_in(cluster: ClusterMap, run: ProgramRecord) -> SavedRun:
    """Return the run of the map. Raises ConfigError: the run's program cannot be read."""
    record = RunRecord(program=run, ended=cluster.ended, results=cluster.results, evaluated=run.evaluated)
    return SavedRun.of(record.until(cluster.ended))


def with_results_before(record: RunRecord, resumed: ResumeRecord | None) -> RunRecord:
    """Return the record of a run with the results of the epochs before its starting point that it lacks."""
    if resumed is None:
        return record
    before = RunRecord(program=record.program, ended=resumed.epoch - 1, results=resumed.results)
    return newest((record, before)) or record


def next_epoch(record: RunRecord, start: int) -> int:
    """Return the number of the first epoch that a driver evaluates.

    The driver skips epochs whose results are lost, and those before the run's first epoch, `start`.
    """
    evaluated = [each.epoch for each in record.evaluated]
    return max(*evaluated, record.first - 1, start - 1) + 1


def at_first_gap(
    run: SavedRun, states: Sequence[ShardState], trained: Collection[int], epochs: int
) -> Manifest:
    """Return a run's manifest at its first epoch that is incomplete in some shard, or not evaluated.

    The run goes on with this epoch. Shards that have groups of this epoch or later ones refuse repetitions.

    Args:
        states: States of all shards.
        trained: Numbers of the shards that take groups.
        epochs: Number of epochs that the run is to have.

    Raises:
        CheckpointError: The run has trained all these epochs, or its record lacks the number of its images.
    """
    record, start, config = run.record, run.start, run.program.config
    evaluated = record.evaluated[-1].epoch if record.evaluated else start - 1
    stop = min(record.ended, evaluated) + 1
    sets = {id(each.groups): each.groups for each in states if each.shard in trained}
    train_images = run.manifest.data.get("train_images")
    if not isinstance(train_images, int):
        raise CheckpointError(f"the record of run {run.manifest.run} lacks the number of its images")
    groups = -(-max(train_images - config.validation, 1) // config.images_per_group)
    # Without the results of old epochs, these count as whole: no shard has been behind so far.
    epoch = start if record.first <= max(start - 1, 1) else record.first + 1
    skipped = dict(enumerate(skipped_groups(record.results), start=record.first))
    if run.program.resumed is not None:  # the run before may have ended epochs that this one has not
        skipped = {**dict(enumerate(run.program.resumed.skipped, start=start)), **skipped}
    while epoch < stop:
        lacking = _left((epoch, 0, groups), record.result(epoch).skipped_groups)
        if not all(has_groups(each, named) for each in sets.values() for named in lacking):
            break
        epoch += 1
    found = saved_manifest(record.until(epoch - 1))
    ended = tuple([skipped[each] for each in takewhile(skipped.__contains__, count(epoch))])
    manifest = msgspec.structs.replace(found, resume=msgspec.structs.replace(found.resume, skipped=ended))
    check_epochs_left(manifest, epochs)
    return manifest.at_clock_of(states)


def _left(named: tuple[int, int, int], skipped: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return an epoch's groups without its skipped ranges, as names of one range each."""
    epoch, start, stop = named
    edges = (start, *chain.from_iterable(skipped), stop)
    return [(epoch, first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]
