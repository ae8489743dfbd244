"""Pure: content and files of a checkpoint, and the options of a run that continues from it.

Theory of operation
-------------------
A checkpoint is a folder ``checkpoint-EEEE-NNNNNN`` (epoch, number of its trained groups):

    model-00001-of-00002.safetensors    parameters, whole tensors by their names
    model.safetensors.index.json        the file of each parameter, as other libraries expect it
    state-00001-of-00001.safetensors    the rule's arrays, as ``momentum/NAME OF TENSOR``
    manifest.json                       everything else, and size and SHA-256 of every other file

Servers have shards and a checkpoint has whole tensors, so any number of servers can load it and any program
can read the weights. A rule's counts, one for each shard, are vectors with one entry per shard of the tensor.
The folder above the checkpoints has one more file: ``latest``, the name of the newest whole checkpoint.

The manifest has the sets of groups that each shard has counted, and their losses, so a resumed run trains no
group twice in any shard, even if the shards were read while training went on. It also has a checksum of
itself, so that a reader detects any change in it. A checksum is no signature: a forged manifest has a right
one. A reader therefore opens only files with the names above, and reads no more bytes than the manifest and
the disk agree on.
"""

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import isfinite
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError, counted
from adam_async.messages import ShardState, read_number
from adam_async.messages.loss_sums import LossSum
from adam_async.messages.shard_states import different
from adam_async.model.spec import ModelSpec
from adam_async.run.config import FIELDS, GROUP_IMAGES, Config
from adam_async.run.group_ranges import groups_fault
from adam_async.run.option_sources import make_config
from adam_async.run.result import EpochResult
from adam_async.run.train_step import StepSpec
from adam_async.run.training_program import ResumeRecord
from adam_async.run.user_code import NamedStep, check_named, named_functions

FORMAT = "adam-async/checkpoint/2"
"""Name and version of the format."""

MANIFEST_FILE = "manifest.json"
INDEX_FILE = "model.safetensors.index.json"
LATEST_FILE = "latest"

MODEL, STATE = "model", "state"
"""Prefixes of the names of the two kinds of tensor files."""

FILE_BYTES = 256 << 20
"""Maximum size of the tensors of one file in bytes, unless a single tensor is larger."""

MANIFEST_BYTES = 256 << 20
"""Maximum size of a manifest in bytes; the clocks and dedup tables of 10,000 shards need a tenth of it."""

BLOCK_BYTES = 1 << 20
"""Number of bytes of a tensor that share a CRC-32, by which a reader finds the place of damage."""

CRC_KEY = "crc32/"
"""Prefix of a tensor's name in the metadata of its file; the value has 8 hexadecimal digits per block."""

TENSOR_FILE = re.compile(rf"({MODEL}|{STATE})-\d{{5,9}}-of-\d{{5,9}}\.safetensors")
"""Pattern of the name of a file of tensors; its first group is the kind of the file."""

MAY_CHANGE = frozenset(
    (
        "data damaged cache spill transforms epochs epoch_fraction epoch_rule replicas threads in_flight "
        "pin_threads slow servers data_servers controllers processes weights kernels evaluation "
        "until_accuracy patience keep_best keep_going keep checkpoint_every checkpoint_misses memory "
        "memory_budget checksum record read_ahead ack flush_s waits"
    ).split()
)
"""Options that a resumed run may change. `data` is the address of the data; `check_data` compares the data.
`transforms` is the name of a file; the checkpoint has the transforms themselves."""

_DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, read or resumed."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


class ShardRecord(msgspec.Struct, frozen=True, array_like=True):
    """Tables of a shard."""

    shard: int
    version: int
    clocks: dict[str, int]
    """Last finished step by replica (as text)."""
    sets: int
    """Index of its sets of groups in `Manifest.sets`."""
    losses: int
    """Index of its sums of losses in `Manifest.losses`."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint without its tensors."""

    format: str = FORMAT
    run: str
    config: dict[str, Any]
    """The run's options. A rate of 0 means that each run decides its own rate, because the rate depends on
    the number of replicas."""
    rate: float = 0.0
    spec: dict[str, Any]
    """Description of the model, from `ModelSpec.to_dict`."""
    plan: dict[str, Any] | None = None
    """The partition plan, as `PartitionPlan.to_dict` returns it; None without partitions."""
    transforms: tuple[dict[str, Any], ...] = ()
    """Transforms of training images; see `TrainingProgram.transforms`."""
    data: dict[str, Any]
    """Description of the data by the data server."""
    epoch: int
    """Epoch of the checkpoint, taken within the epoch or at its end."""
    groups: int
    """Number of groups of `epoch` that all trained shards have; in a checkpoint at its end, the number of all
    groups, including skipped ones."""
    resume: ResumeRecord
    """Starting point of a run that continues from this checkpoint."""
    epochs: tuple[dict[str, Any], ...] = ()
    """The ended epochs, as the fields of `EpochResult`."""
    runs: tuple[str, ...] = ()
    """Ids of the runs that this one continues in the same folder, the newest first."""
    arrays: tuple[str, ...] = ()
    shards: tuple[ShardRecord, ...] = ()
    sets: tuple[dict[int, tuple[int, ...]], ...] = ()
    """Groups that shards have counted, as ranges by epoch; shards with equal ones share an entry."""
    losses: tuple[dict[int, LossSum], ...] = ()
    """Losses of these groups, by epoch; shards with equal ones share an entry."""
    files: tuple[FileRecord, ...] = ()
    checksum: str = ""
    """SHA-256 of this manifest with an empty checksum, as compact JSON."""

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return folder_name(self.epoch, self.groups)

    @property
    def epoch_results(self) -> tuple[EpochResult, ...]:
        """Results of the ended epochs."""
        return epochs_of(self.epochs)

    @property
    def states(self) -> tuple[ShardState, ...]:
        """States of the shards, in the order of their numbers."""
        return tuple(
            [
                ShardState(
                    each.shard, each.version, each.clocks, self.sets[each.sets], self.losses[each.losses]
                )
                for each in self.shards
            ]
        )

    def with_states(self, states: Sequence[ShardState]) -> "Manifest":
        """Return the manifest with the states of all shards, and the clock of the fastest replica in them."""
        sets, set_numbers = different([each.groups for each in states])
        sums, sum_numbers = different([each.losses for each in states])
        clock = max([clock for each in states for clock in each.clocks.values()], default=0)
        return msgspec.structs.replace(
            self,
            resume=msgspec.structs.replace(self.resume, clock=clock),
            sets=tuple(sets),
            losses=tuple(sums),
            shards=tuple(
                [
                    ShardRecord(each.shard, each.version, dict(each.clocks), *numbers)
                    for each, *numbers in zip(states, set_numbers, sum_numbers, strict=True)
                ]
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint in memory."""

    manifest: Manifest
    weights: Mapping[str, NDArray[Any]]
    """Values by tensor, each in its shape."""
    state: Mapping[str, NDArray[Any]]
    """Rule arrays by ``ARRAY/TENSOR``, in the tensor's shape, or one number per shard of it."""
    problems: tuple[str, ...] = ()
    """Damage of newer checkpoints in the same folder."""
    remarks: tuple[str, ...] = ()
    """Remarks on the other checkpoints of the folder, and on the choice of this one."""

    def __repr__(self) -> str:
        return f"<Checkpoint {self.manifest.name} of run {self.manifest.run}>"


def epoch_values(epochs: Iterable[EpochResult]) -> tuple[dict[str, Any], ...]:
    """Return the results of epochs in the form of a manifest."""
    return tuple(
        {**asdict(epoch), "train_loss": epoch.train_loss if isfinite(epoch.train_loss) else None}
        for epoch in epochs
    )


class EpochValues:
    """The values of `epoch_values` for a run in progress, each epoch converted once.

    A run with many epochs takes many points, and each point has the results of all epochs.
    """

    def __init__(self) -> None:
        self._values: list[dict[str, Any]] = []
        self._last: EpochResult | None = None

    def of(self, epochs: Sequence[EpochResult]) -> tuple[dict[str, Any], ...]:
        """Return the values of epochs, the earlier of which are those of the last call."""
        known = len(self._values)
        if len(epochs) < known or (known and epochs[known - 1] is not self._last):
            self._values, known = [], 0
        self._values += epoch_values(epochs[known:])
        self._last = epochs[-1] if epochs else None
        return tuple(self._values)


def epochs_of(values: Iterable[Mapping[str, Any]]) -> tuple[EpochResult, ...]:
    """Return the results of epochs from their form in a manifest.

    Raises:
        ValidationError: A field has another type, or is missing.
        KeyError: An epoch has no training loss.
    """
    return tuple(
        msgspec.convert({**epoch, "train_loss": read_number(epoch["train_loss"])}, EpochResult)
        for epoch in values
    )


# --- names -----------------------------------------------------------------------------------


def folder_name(epoch: int, groups: int) -> str:
    """Return the name of a checkpoint's folder; `age_order` is the key that sorts these names."""
    return f"checkpoint-{epoch:04}-{groups:06}"


# --- files -----------------------------------------------------------------------------------


def split(stem: str, arrays: Mapping[str, NDArray[Any]], limit: int = FILE_BYTES) -> dict[str, list[str]]:
    """Return the names of the tensors of each file, in order. A file has at most `limit` bytes, or a single
    tensor."""
    groups: list[list[str]] = []
    room = 0
    for name, array in arrays.items():
        if not groups or array.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= array.nbytes
    return {
        f"{stem}-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def tensor_file(arrays: Mapping[str, NDArray[Any]]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, part by part, without copies of tensors.

    Its metadata have the CRC-32 of each block of a tensor. Other programs ignore them.

    Args:
        arrays: C-contiguous arrays of float32, float64 or int64.
    """
    crcs: dict[str, str] = {}
    header: dict[str, Any] = {"__metadata__": crcs}
    at = 0
    for name, array in arrays.items():
        end = at + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [at, end]}
        values = array.reshape(-1).view(np.uint8).data
        blocks = range(0, array.nbytes, BLOCK_BYTES)
        crcs[CRC_KEY + name] = "".join(f"{crc32(values[i : i + BLOCK_BYTES]):08x}" for i in blocks)
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # values begin aligned
    yield len(text).to_bytes(8, "little")
    yield text
    for array in arrays.values():
        yield array.reshape(-1).view(np.uint8).data


def index_file(files: Mapping[str, Sequence[str]], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the index of the parameters' files, in the form that other libraries read."""
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


def manifest_file(manifest: Manifest) -> bytes:
    """Return the text of a manifest, with its checksum."""
    sealed = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"


def read_manifest(text: bytes, origin: str) -> Manifest:
    """Read and check the text of a manifest.

    Raises:
        CheckpointError: The manifest is damaged, or has another version.
    """
    try:
        version = msgspec.json.decode(text)["format"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise CheckpointError(f"{origin} is damaged: it is not the JSON of a manifest") from None
    except RecursionError:
        raise CheckpointError(f"{origin} is damaged: its JSON nests too deeply") from None
    if version != FORMAT:
        shown = repr(version)[:80]
        raise CheckpointError(
            f"{origin} has the format {shown}; this version reads {FORMAT!r}: finish the run with the "
            "version that wrote it, or begin a new run from its model with --init"
        )
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{origin} is damaged: {error}") from None
    if manifest.checksum != _checksum(manifest):
        raise CheckpointError(f"{origin} is damaged: its checksum is wrong")
    # A changed name of a field with its default value leaves the checksum right.
    if text != manifest_file(manifest):
        raise CheckpointError(f"{origin} is damaged: its text is not the one that was written")
    _check_files(manifest.files, origin)
    _check_sets(manifest, origin)
    try:
        epochs_of(manifest.epochs)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{origin} is damaged: the results of its epochs: {error!r}") from None
    return manifest


def _check_files(files: Sequence[FileRecord], origin: str) -> None:
    """Check that a manifest names files of a checkpoint, each once.

    Raises:
        CheckpointError: A name is repeated, or could be that of another file, such as ``../x``; or a size is
            negative.
    """
    seen = set[str]()
    for record in files:
        if record.name != INDEX_FILE and TENSOR_FILE.fullmatch(record.name) is None:
            raise CheckpointError(f"{origin} names the file {record.name[:80]!r}, which no checkpoint has")
        if record.name in seen:
            raise CheckpointError(f"{origin} names {record.name} twice")
        if record.bytes < 0:
            raise CheckpointError(f"{origin} gives {record.name} a size of {record.bytes} bytes")
        seen.add(record.name)


def _check_sets(manifest: Manifest, origin: str) -> None:
    """Raise CheckpointError if sets of groups are no ranges in order, a sum of losses is out of bounds, or a
    shard has sets or sums that are not there."""
    named = [(epoch, *ranges) for sets in manifest.sets for epoch, ranges in sets.items()]
    fault = next((text for groups in named if (text := groups_fault(groups))), "")
    fault = fault or next(
        (each.fault for sums in manifest.losses for each in sums.values() if each.fault), ""
    )
    sets, losses = range(len(manifest.sets)), range(len(manifest.losses))
    if fault or any(each.sets not in sets or each.losses not in losses for each in manifest.shards):
        raise CheckpointError(f"{origin} is damaged: its sets of groups: {fault or 'some are missing'}")


def _checksum(manifest: Manifest) -> str:
    return sha256(msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))).hexdigest()


# --- resumption ------------------------------------------------------------------------------


def resumed_options(manifest: Manifest) -> dict[str, Any]:
    """Return the options of a checkpoint's run, as the defaults of a run that continues it.

    In-place training depends on the processes of the roles, so the new run decides again whether to use it. A
    record and stragglers are not carried over; the caller may request stragglers again. The manifest has the
    transforms themselves, because their file may have changed.
    """
    options = {**manifest.config, "record": False, "slow": (), "transforms": ""}
    if options.get("weights") == "aliased":
        options["weights"] = "auto"
    return options


def resumed_config(manifest: Manifest, wanted: Config) -> Config:
    """Return the options of a run that continues another one.

    Args:
        wanted: Options of the caller. A rate of 0 means the rate option of the earlier run; 0 epochs and
            schedule ``auto`` mean the choice of that run, whose rate curve continues.

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
    if wanted.rule == "auto":
        wanted = msgspec.structs.replace(wanted, rule=kept.rule)
        if wanted.images_per_group == GROUP_IMAGES:
            wanted = msgspec.structs.replace(
                wanted,
                images_per_group=kept.images_per_group,
                in_flight=wanted.in_flight or kept.in_flight,
            )
    if wanted.schedule == "auto":
        warm_up = wanted.warm_up or kept.warm_up
        wanted = msgspec.structs.replace(wanted, schedule=kept.schedule, warm_up=warm_up)
    check_kept_options([name for name in FIELDS if name not in MAY_CHANGE], wanted, kept, manifest.name)
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
    """Return the model of a run that goes on; None if the run trains a user's step.

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


def check_kept_step(there: Mapping[str, Any], step: NamedStep | None, run: str) -> None:
    """Check that a caller has the step of a run, by its name and arguments.

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
        manifest.name,
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
                f"{manifest.name} was trained on data whose {key} is {there}, but here it is {here}; "
                "give the same data with --data"
            )
