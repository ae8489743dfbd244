"""Pure: a checkpoint, with its facts, and with its shards as pieces of a store on a disk; a resumed run's
options.

The pieces are those of a server's disk (`parameter_server/piece_states.py`): all shards of a run, as its
servers had them, but without its workers' sessions. The records of the store and of the run are with them. So
a folder of them is all that a run needs to continue, on any number of servers. All facts of a checkpoint, or
of a run on disks, come from the run's record (`run/run_record.py`).
"""

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.checkpoint.tensors import ShardSource, WholeTensors
from adam_async.errors import ConfigError, DataError, counted
from adam_async.messages import ShardState, ShardStates
from adam_async.model.rules import rule_of
from adam_async.model.spec import ModelSpec
from adam_async.option_types import CHANGES
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.piece_states import (
    Catalogue,
    load_tensors,
    new_bundle,
    pieces_by_name,
    tensors_of,
)
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import load_states
from adam_async.persistence.records import StateName
from adam_async.run.config import GROUP_IMAGES, OPTIONS, Config
from adam_async.run.ids import ShardId
from adam_async.run.option_sources import make_config
from adam_async.run.result import EpochResult, epoch_results
from adam_async.run.run_record import RunRecord
from adam_async.run.shard_table import ShardSpec, shard_table
from adam_async.run.store_record import ArrayRecord, is_vector_key
from adam_async.run.train_step import StepSpec
from adam_async.run.training_program import MOST_RUNS, ProgramRecord, ResumeRecord, read_training
from adam_async.run.user_code import NamedStep, check_named, named_functions
from transport import RemoteProtocolError


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, read or resumed."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, or a run on its servers' disks, without the shards."""

    run: str
    config: dict[str, Any]
    """The run's options. A rate of 0 means that each run decides its own rate, because the rate depends on
    the number of replicas."""
    spec: dict[str, Any]
    """Description of the model, from `ModelSpec.to_dict`."""
    plan: dict[str, Any] | None = None
    """The partition plan, as `PartitionPlan.to_dict` returns it; None without partitions."""
    transforms: tuple[dict[str, Any], ...] = ()
    """Transforms of training images; see `TrainingProgram.transforms`."""
    data: dict[str, Any]
    """Description of the data by the data server."""
    epoch: int = 0
    """Epoch in which, or at whose end, the checkpoint was taken; 0 for a run on disks."""
    groups: int = 0
    """Number of groups of `epoch` that all trained shards have; in a checkpoint at its end, of all groups,
    including skipped ones."""
    resume: ResumeRecord
    """Starting point of a run that continues from here; its clock is 0 until the shards are read."""
    epochs: tuple[EpochResult, ...] = ()
    """Results of the ended epochs."""

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return folder_name(self.epoch, self.groups)

    @property
    def title(self) -> str:
        """The checkpoint, or the run on its servers' disks, for messages."""
        return self.name if self.epoch else f"run {self.run}"

    @property
    def training(self) -> tuple[str, ...]:
        """Ids of the run and of the runs that it continues, newest first."""
        return self.resume.runs

    def as_record(self, program: ProgramRecord, *, evaluated: int) -> RunRecord:
        """Return the record of a run that has trained so far, with its evaluations up to an epoch."""
        return RunRecord(
            program=program,
            ended=self.resume.epoch - 1,
            results=self.resume.results,
            evaluated=tuple([each.evaluation for each in self.epochs if each.epoch <= evaluated]),
        )

    def at_clock_of(self, states: Sequence[ShardState]) -> "Manifest":
        """Return the manifest with the clock of the fastest replica in the shards."""
        clock = max([clock for each in states for clock in each.clocks.values()], default=0)
        return msgspec.structs.replace(self, resume=msgspec.structs.replace(self.resume, clock=clock))


def saved_manifest(record: RunRecord, place: tuple[int, int] = (0, 0)) -> Manifest:
    """Return the manifest of a run on disks, which goes on with the epoch after the last ended one.

    Args:
        place: Epoch and groups of a checkpoint.

    Raises:
        ConfigError: The program cannot be read.
    """
    program = read_training(record.program)
    run, epoch, resumed = record.program.id, record.ended + 1, program.resumed
    resume = ResumeRecord(
        epoch=epoch,
        clock=0,
        results=record.results,
        train_s=record.train_s,
        skipped=resumed.skipped_from(epoch) if resumed is not None else (),
        runs=(run, *(resumed.runs if resumed is not None else ()))[:MOST_RUNS],
    )
    return Manifest(
        run=run,
        # Keep the epochs and schedule that the run decided, so that the rate's curve continues.
        config={
            **msgspec.to_builtins(program.config),
            "rate": program.asked_rate,
            "protocol": program.asked_protocol,
        },
        spec=program.spec,
        plan=program.plan,
        transforms=program.transforms,
        data=program.data,
        epoch=place[0],
        groups=place[1],
        resume=resume,
        epochs=epoch_results(record),
    )


# --- names -----------------------------------------------------------------------------------


def folder_name(epoch: int, groups: int) -> str:
    """Return the name of a checkpoint's folder; `age_order` is the key that sorts these names."""
    return f"checkpoint-{epoch:04}-{groups:06}"


# --- resumption ------------------------------------------------------------------------------


def resumed_options(manifest: Manifest) -> dict[str, Any]:
    """Return the options of a checkpoint's run, as defaults for a run that continues it.

    In-place training depends on the processes of the roles, so the new run decides again whether to use it. A
    record and stragglers are not carried over; the caller may request stragglers again. The manifest has the
    transforms themselves, because their file may have changed. The caller names a rule of the user again: see
    `check_kept_rule`.
    """
    options = {**manifest.config, "record": False, "slow": (), "transforms": ""}
    if make_config(manifest.config).has_user_rule:
        options |= {"rule": "auto", "rule_args": "", "rule_record": ""}
    if options.get("weights") == "aliased":
        options["weights"] = "auto"
    return options


def resumed_config(manifest: Manifest, wanted: Config) -> Config:
    """Return the options of a run that continues another one.

    Args:
        wanted: Options of the caller. A rate of 0 means the rate option of the earlier run. 0 epochs and
            schedule ``auto`` mean that run's choice, whose rate curve continues.

    Raises:
        CheckpointError: An option that a resumed run must keep differs, all epochs are trained, or the caller
            requests a record, which only a new run can have.
    """
    if wanted.record:
        raise CheckpointError("a resumed run cannot be recorded: a record begins where its run does")
    kept = make_config(manifest.config)
    wanted = msgspec.structs.replace(
        wanted, rate=wanted.rate or kept.rate, epochs=wanted.epochs or kept.epochs
    )
    check_kept_rule(kept, wanted, manifest.title)
    if wanted.rule == "auto":
        wanted = msgspec.structs.replace(wanted, rule=kept.rule)
        if wanted.images_per_group == GROUP_IMAGES:
            wanted = msgspec.structs.replace(
                wanted, images_per_group=kept.images_per_group, in_flight=wanted.in_flight or kept.in_flight
            )
    if wanted.schedule == "auto":
        warm_up = wanted.warm_up or kept.warm_up
        wanted = msgspec.structs.replace(wanted, schedule=kept.schedule, warm_up=warm_up)
    # `data` is the data's address; `check_data` compares the data. `transforms` is a file's name; the
    # checkpoint has the transforms themselves.
    fixed = [name for name, option in OPTIONS.items() if not option.has(CHANGES)]
    check_kept_options(fixed, wanted, kept, manifest.title)
    check_epochs_left(manifest, wanted.epochs)
    return wanted


def check_epochs_left(manifest: Manifest, epochs: int) -> None:
    """Raise CheckpointError if a run that is to have this number of epochs has trained them all."""
    done = manifest.resume.epoch - 1
    if done >= epochs:
        raise CheckpointError(
            f"the run has trained {counted(done, 'epoch')}, and epochs={epochs} asks for no more; "
            f"to train on, give --epochs {done + 1} or more"
        )


def check_kept_options(names: Iterable[str], wanted: Config, kept: Config, run: str) -> None:
    """Check that a caller has the options that a run keeps.

    Args:
        names: Names of these options.
        run: The run or its checkpoint, for the error.

    Raises:
        CheckpointError: An option differs; the error has each such option with both values.
    """
    differing = [
        f"{name}={getattr(wanted, name)} (there {getattr(kept, name)})"
        for name in names
        if getattr(wanted, name) != getattr(kept, name)
    ]
    if differing:
        raise CheckpointError(
            f"{run} keeps its options, but these differ: {', '.join(differing)}; leave them out, or begin a "
            "new run"
        )


def kept_model(there: Mapping[str, Any], spec: ModelSpec | None, run: str) -> ModelSpec | None:
    """Return the model of a run that continues; None if the run trains a user's step.

    Args:
        there: The model or the step, as in `Manifest.spec`.
        run: The run or its checkpoint, for the error.

    Raises:
        CheckpointError: The caller has another model.
    """
    if StepSpec.from_dict(there) is not None:
        return None
    model = ModelSpec.from_dict(there)
    if spec is not None and spec.to_dict() != model.to_dict():
        raise CheckpointError(
            f"{run} has a model {model.name!r} whose layers are not those of {spec.name!r}: leave the model "
            "out"
        )
    return model


def check_kept_arrays(
    there: Sequence[ArrayRecord], arrays: Sequence[ArrayRecord], manifest: Manifest
) -> None:
    """Check that a run's model has the arrays of the run that it continues.

    Raises:
        CheckpointError: The arrays differ; the error names the first difference.
    """
    kept, wanted = ({each.name: each for each in several} for several in (there, arrays))
    for name in sorted(kept.keys() ^ wanted.keys()):
        lacks = "lacks" if name in wanted else "has a superfluous"
        raise CheckpointError(f"run {manifest.run} {lacks} parameter {name}; it is of another model")
    for name, array in wanted.items():
        if array != kept[name]:
            raise CheckpointError(f"run {manifest.run} has {kept[name]}, and the model {array}")


def check_kept_step(there: Mapping[str, Any], step: NamedStep | None, run: str) -> None:
    """Check that a caller has a run's step, by its name and arguments.

    The caller names the step again, because a checkpoint or record alone must not cause the import of a
    module.

    Args:
        there: The model or the step, as in `Manifest.spec`.
        run: The run or its checkpoint, for the error.

    Raises:
        CheckpointError: The caller lacks the step, has another one, or the run trains a network.
    """
    kept = StepSpec.from_dict(there)
    if kept is None and step is not None:
        raise CheckpointError(f"{run} trains a network, not step {step.name}: leave --step out")
    if kept is not None and (step is None or (step.name, dict(step.args)) != (kept.name, kept.args)):
        words = ["--step", kept.name, *(("--step-args", json.dumps(kept.args)) if kept.args else ())]
        raise CheckpointError(f"{run} trains step {kept.name}: if you trust it, give {shlex.join(words)}")


def check_kept_rule(kept: Config, wanted: Config, run: str) -> None:
    """Check that a caller has the user rule that a run applies, from the same file.

    The caller names the rule again, because a checkpoint or record alone must not cause the import of a
    module.

    Args:
        run: The run or its checkpoint, for the error.

    Raises:
        CheckpointError: The caller lacks the rule, or has another one or another file.
    """
    if not kept.has_user_rule or kept.rule_record == wanted.rule_record:
        return
    if (kept.rule, kept.rule_args) == (wanted.rule, wanted.rule_args):
        raise CheckpointError(
            f"{run} applies {rule_of(kept).text}, and here is {rule_of(wanted).text}: go on with the file of "
            "the run, or begin a new one"
        )
    words = ["--rule", kept.rule, *(("--rule-args", kept.rule_args) if kept.rule_args else ())]
    raise CheckpointError(f"{run} applies rule {kept.rule}: if you trust it, give {shlex.join(words)}")


def resumed_transforms(
    manifest: Manifest, asked: Sequence[Mapping[str, Any]] | None, functions: Collection[str] = ()
) -> tuple[dict[str, Any], ...]:
    """Return the transforms of training images in a resumed run: the same as in the checkpoint's run.

    Args:
        asked: Transforms of the caller, which permit the import of the functions that they name.

    Raises:
        ConfigError: The checkpoint names a function to import that the caller does not name.
    """
    check_named(
        manifest.transforms,
        manifest.title,
        allowed={*named_functions(asked), *functions},
        besides=", or --transforms FILE that names them",
    )
    return manifest.transforms


DATA_IDENTITY = ("name", "shape", "classes", "train_images", "test_images")
"""Properties by which two data sets count as equal."""


def check_data(manifest: Manifest, data: Mapping[str, Any]) -> None:
    """Refuse data that differ from the data of the checkpoint's run.

    Raises:
        CheckpointError: The data differ; the error names the first difference.
    """
    for key in DATA_IDENTITY:
        here, there = data.get(key), manifest.data.get(key)
        if here != there:
            raise CheckpointError(
                f"{manifest.title} was trained on data whose {key} is {there}, but here it is {here}; "
                "give the same data with --data"
            )


class StoredPieces:
    """The pieces of a store, according to its record."""

    def __init__(self, catalogue: Catalogue) -> None:
        record = catalogue.record
        self.catalogue = catalogue
        self.table = shard_table(catalogue.arrays, shard_bytes=record.shard_bytes)
        self.specs = pieces_by_name(record, self.table.shards)
        self._rules = record.rules

    @property
    def arrays(self) -> int:
        """Maximum number of arrays in addition to the values: a rule's state with its counts, and vectors."""
        return self.catalogue.record.arrays_per_value

    def home_of(self, spec: ShardSpec) -> str:
        return self.catalogue.record.buckets[spec.bucket]

    def piece_of(self) -> dict[ShardId, StateName]:
        """Return the name of the piece that has each shard."""
        return {spec.id: name for name, specs in self.specs.items() for spec in specs}

    @property
    def nbytes(self) -> int:
        """Size in bytes of all values and of their rules' elementwise arrays."""
        return sum(
            [each.nbytes * (1 + len(self._rules[each.rule].state_names)) for each in self.catalogue.arrays]
        )

    def new_tensors(self) -> WholeTensors:
        """Allocate all tensors of the store, with its rules' state and its lasting vectors."""
        vectors = self.catalogue.record.lasting_vectors
        return WholeTensors(self.catalogue.arrays, self.table, self._rules, vectors=vectors)

    def bundle(self, specs: Sequence[ShardSpec]) -> Bundle:
        """Return a bundle with some new shards."""
        return new_bundle(self.catalogue.record, specs, self._rules)

    def shards(self, name: StateName, parts: Sequence[memoryview], origin: str) -> list[Shard]:
        """Return the shards of a piece on a disk.

        Args:
            origin: Name of the piece, for errors.

        Raises:
            DataError: The store has no such piece, or the parts do not fit it.
        """
        if name not in self.specs:
            raise DataError(f"{origin} is no piece of store {self.catalogue.record.id}")
        specs = self.specs[name]
        bundle = self.bundle(specs)
        try:
            load_tensors(bundle, specs, self.table.shards, tensors_of(parts, origin))
        except RemoteProtocolError as error:
            raise DataError(f"{origin} does not fit its store: {error}") from None
        return [bundle.shards[spec.id] for spec in specs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCheckpoint:
    """A checkpoint in its folder, or a run on its servers' disks. Its shards are read when needed."""

    manifest: Manifest
    record: RunRecord
    pieces: StoredPieces
    states: tuple[ShardState, ...]
    """Versions, clocks and groups of the shards, by shard number."""
    source: ShardSource
    """The shards. For a checkpoint its disk must be open; for a run its servers must exist."""
    problems: tuple[str, ...] = ()
    """Damage of newer checkpoints in the same folder."""
    remarks: tuple[str, ...] = ()
    """Remarks on the other checkpoints of the folder, and on the chosen checkpoint."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.manifest.name} of run {self.manifest.run}>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Checkpoint(StoredCheckpoint):
    """A checkpoint with its values and its rules' state in memory."""

    tensors: WholeTensors

    @property
    def weights(self) -> Mapping[str, NDArray[Any]]:
        """Values by tensor, each in its shape."""
        return self.tensors.weights

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        """Rule arrays by ``ARRAY/TENSOR``, in the tensor's shape, or with one number per shard."""
        return self.tensors.state


def take_states(
    bundle: Bundle, numbers: Sequence[int], answer: ShardStates, tensors: Sequence[NDArray[Any]]
) -> None:
    """Take the shards of an answer into a bundle with new shards.

    Args:
        numbers: Numbers of the requested shards, which have one rule.
        tensors: Tensors of the answer.

    Raises:
        RemoteProtocolError: The answer has other shards, arrays or shapes, or a malformed table.
    """
    shards = {ShardId(number): bundle.shards[ShardId(number)] for number in numbers}
    names = {name for name in next(iter(shards.values())).rule_state if not is_vector_key(name)}
    if {name for name in answer.arrays if not is_vector_key(name)} != names:
        raise RemoteProtocolError("shards", f"the rule has arrays {sorted(names)}, not {answer.arrays}")
    if load_states(shards, answer, tensors) != shards.keys():
        raise RemoteProtocolError("shards", f"asked for shards {tuple(numbers[:8])}, got others")
