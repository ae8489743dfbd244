"""Pure: how a driver takes over a run that waits for one: which run, with which options, results and notes.

The program's record has the model, the options and the starting point of the run. The map has the newest
results of its data servers. The notes of the earlier driver have the accuracies of the epochs that the
earlier driver evaluated. The weights of these epochs are lost with that driver.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from adam_async.checkpoint.manifest import Manifest, epoch_values, epochs_of
from adam_async.driver.training_rules import PHASES
from adam_async.errors import ConfigError, RunFailed
from adam_async.messages.bounds import Count
from adam_async.run.cluster_map import RESULTS_KEPT, ClusterMap
from adam_async.run.config import Config
from adam_async.run.program_record import ProgramRecord
from adam_async.run.result import EpochResult
from adam_async.run.train_step import StepSpec
from adam_async.run.training_program import TrainingProgram
from adam_async.run.user_code import NamedStep

OPEN: Mapping[str, Any] = {
    "epochs": 0,
    "rate": 0.0,
    "rule": "auto",
    "schedule": "auto",
    "warm_up": 0.0,
    "weights": "auto",
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
    """A request to take over a run that waits for a driver.

    Attributes:
        run: Id of the run; empty: the run of the map, or a new run if that one is absent or over.
        given: Names of the options that the caller sets; the run has the others.
    """

    run: str = ""
    given: frozenset[str] = frozenset()


class DriverNotes(msgspec.Struct, frozen=True, kw_only=True):
    """The notes that a driver leaves in the record of its run."""

    asked_rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Rate that the caller asked for, as checkpoints have it; 0: the run decides the rate."""
    trained_again: Count = 0
    """Number of groups that the run trained again because of resumes."""
    epochs: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(max_length=RESULTS_KEPT + 1)] = ()
    """Evaluated epochs, as `epoch_values` gives them: the newest `RESULTS_KEPT` epochs, and the earlier epoch
    with the best validation accuracy, if any."""

    def with_epochs(self, epochs: Sequence[EpochResult]) -> dict[str, Any]:
        """Return the notes with these evaluated epochs, in the form that a record has."""
        noted: dict[str, Any] = msgspec.to_builtins(
            msgspec.structs.replace(self, epochs=epoch_values(_newest_and_best(epochs)))
        )
        return noted


def _newest_and_best(epochs: Sequence[EpochResult]) -> Sequence[EpochResult]:
    older, newest = epochs[:-RESULTS_KEPT], epochs[-RESULTS_KEPT:]
    best = max(older, key=lambda epoch: epoch.validation_accuracy or 0.0, default=None)
    return newest if best is None or best.validation_accuracy is None else (best, *newest)


def _check_epoch(epoch: EpochResult) -> None:
    """Check the numbers of a noted epoch. Raises ValueError: a number is out of bounds."""
    accuracies = {"test_accuracy": epoch.test_accuracy, "validation_accuracy": epoch.validation_accuracy}
    for name, accuracy in accuracies.items():
        if accuracy is not None and not 0 <= accuracy <= 1:
            raise ValueError(f"{name} of epoch {epoch.epoch} is {accuracy:g}, not within 0 and 1")
    for name in ("images", "skipped", "train_s", "trained_again"):
        if not 0 <= getattr(epoch, name) < 1 << 53:
            raise ValueError(f"{name} of epoch {epoch.epoch} is {getattr(epoch, name):g}")


def read_notes(run: ProgramRecord, *, ended: int) -> tuple[DriverNotes, tuple[EpochResult, ...]]:
    """Read the notes of an earlier driver, and its evaluated epochs in order.

    Args:
        ended: Number of the last ended epoch.

    Raises:
        RunFailed: The notes are invalid.
    """
    try:
        notes = msgspec.convert(run.notes, DriverNotes)
        epochs = epochs_of(notes.epochs)
        numbers = [0, *(epoch.epoch for epoch in epochs), ended + 1]
        if any(after <= before for before, after in pairwise(numbers)):
            raise ValueError(f"their epochs are {numbers[1:-1]}, and {ended} have ended")
        for epoch in epochs:
            _check_epoch(epoch)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RunFailed(
            f"the notes of run {run.id} cannot be read: {error}; take it over with the release of adam-async "
            "that began it"
        ) from None
    return notes, epochs


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
        ConfigError: An option differs; the error has each such option with both values.
    """
    differing = [
        f"{name}={getattr(asked, name)} (there {getattr(config, name)})"
        for name in sorted(set(given) - OF_ROLES - OF_DRIVER)
        if getattr(asked, name) not in (getattr(config, name), OPEN.get(name, getattr(config, name)))
    ]
    if differing:
        raise ConfigError(
            f"run {run} keeps its options, but these differ: {', '.join(differing)}; leave them out, or "
            "begin a new run with --replace instead of --attach"
        )


def check_step(there: StepSpec | None, step: NamedStep | None, run: str) -> None:
    """Check that the caller has the step of a run, by its name and arguments.

    Raises:
        ConfigError: The caller lacks the step, has another one, or the run trains a network.
    """
    if there is None and step is not None:
        raise ConfigError(f"run {run} trains a network, not step {step.name}: leave --step out")
    if there is not None and (step is None or (step.name, dict(step.args)) != (there.name, there.args)):
        words = ["--step", there.name]
        words += ["--step-args", msgspec.json.encode(there.args).decode()] if there.args else []
        raise ConfigError(f"run {run} trains step {there.name}: if you trust it, give {shlex.join(words)}")


def joined_results(
    cluster: ClusterMap, program: TrainingProgram, manifest: Manifest | None
) -> tuple[int, tuple[dict[str, Any], ...]]:
    """Return the results of a run's ended epochs, without a gap, and the number of the first one.

    Args:
        manifest: Manifest of the run's newest checkpoint, if any.
    """
    resumed, known = program.resumed, dict[int, dict[str, Any]]()
    sources = [(cluster.ended, cluster.results)]
    if resumed is not None:
        sources.append((resumed.epoch - 1, resumed.results))
    if manifest is not None:
        sources.append((manifest.resume.epoch - 1, manifest.resume.results))
    for last, results in reversed(sources):
        known.update(zip(range(last - len(results) + 1, last + 1), results, strict=True))
    first = cluster.ended + 1
    while first - 1 in known:
        first -= 1
    return first, tuple(known[epoch] for epoch in range(first, cluster.ended + 1))


def is_checkpoint_of(manifest: Manifest, run: str, program: TrainingProgram) -> bool:
    """Return whether a checkpoint belongs to a run, or is the checkpoint that the run continues."""
    resumed = program.resumed
    if manifest.run == run or resumed is None:
        return manifest.run == run
    there = msgspec.structs.replace(manifest.resume, results=())
    return there == msgspec.structs.replace(resumed, results=())
