"""Pure: what a checkpoint of a run holds, what its files are called, and how a run is taken up from it.

Theory of operation
-------------------
A checkpoint is a folder ``checkpoint-EEEE-NNNNNN`` (epoch, groups of it that are trained):

    model-00001-of-00002.safetensors    parameters, whole tensors by their names
    model.safetensors.index.json        which file has which parameter, as other libraries expect it
    state-00001-of-00001.safetensors    the rule's arrays, as ``momentum/NAME OF TENSOR``
    manifest.json                       everything else, and size and SHA-256 of every other file

Servers keep shards and a checkpoint keeps whole tensors, so that any number of servers can take it up and
any program can read the weights. A rule's counts, of which a shard has one, are vectors with one entry per
shard of the tensor. Beside the folders lie ``latest``, the name of the newest one that is whole, and
``progress.json``, how far training went on after it: what lies between the two is trained again.

The manifest carries a checksum of itself, so that no changed digit in it goes unnoticed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import isfinite
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError
from adam_async.messages import ShardState, read_number
from adam_async.model.spec import ModelSpec
from adam_async.run.cluster_map import ResumeRecord
from adam_async.run.config import FIELDS, Config
from adam_async.run.option_sources import make_config
from adam_async.run.result import EpochResult
from adam_async.run.user_code import check_named, named_functions

FORMAT = "adam-async/checkpoint/1"
"""Name and version of the format."""

MANIFEST_FILE = "manifest.json"
INDEX_FILE = "model.safetensors.index.json"
LATEST_FILE = "latest"
PROGRESS_FILE = "progress.json"

MODEL, STATE = "model", "state"
"""How the names of the two kinds of tensor files begin."""

FILE_BYTES = 256 << 20
"""Tensors of one file together, unless a single one is larger."""

MAY_CHANGE = frozenset(
    {
        "data",
        "damaged",
        "cache",
        "spill",
        "transforms",
        "epochs",
        "epoch_fraction",
        "epoch_rule",
        "replicas",
        "threads",
        "in_flight",
        "pin_threads",
        "slow",
        "servers",
        "data_servers",
        "controllers",
        "processes",
        "weights",
        "kernels",
        "evaluation",
        "until_accuracy",
        "patience",
        "keep_best",
        "keep_going",
        "checkpoint_every",
        "checkpoint_misses",
        "memory_budget",
        "checksum",
        "record",
        "read_ahead",
        "waits",
    }
)
"""Options that a resumed run may have another value of. `data` says where; what is there is checked. The
transforms of a checkpoint are in it."""

_DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, read or taken up; says which, why and what to do."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


class ProgressNote(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run went on after its newest checkpoint."""

    epoch: int
    groups: int
    """Groups of that epoch that are trained."""
    trained_again: int
    """Groups that the run had trained a second time by then, because earlier ones had ended early."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All of a checkpoint but its tensors."""

    format: str = FORMAT
    run: str
    config: dict[str, Any]
    """The run's options. A rate of 0 was left to the run, and is left to one that continues it: it depends on
    how many replicas there are."""
    rate: float = 0.0
    """The rate that was in force."""
    spec: dict[str, Any]
    """The model, as `ModelSpec.to_dict` gives it."""
    plan: dict[str, Any] | None = None
    """How it is cut over the workers of a replica, as `PartitionPlan.to_dict` gives it; None if it is not."""
    transforms: tuple[dict[str, Any], ...] = ()
    """What data servers do to training images; see `RunRecord.transforms`."""
    data: dict[str, Any]
    """What the data server says of its data."""
    epoch: int
    """The epoch in which it was taken, at its end or before."""
    groups: int
    """Groups of that epoch that were trained; at its end all, those that it skipped included."""
    resume: ResumeRecord
    """Where a run that continues this one takes up."""
    epochs: tuple[dict[str, Any], ...] = ()
    """The epochs that have ended; `EpochResult` field by field."""
    trained_again: int = 0
    """Groups trained a second time because the run ended between two checkpoints and was resumed."""
    arrays: tuple[str, ...] = ()
    """Names of the rule's arrays."""
    shards: tuple[ShardState, ...] = ()
    """Version, clocks and dedup table of each shard."""
    files: tuple[FileRecord, ...] = ()
    checksum: str = ""
    """SHA-256 of this manifest with an empty checksum, as compact JSON."""

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return folder_name(self.epoch, self.groups)

    @property
    def epoch_results(self) -> tuple[EpochResult, ...]:
        """The epochs that have ended."""
        return tuple(
            EpochResult(**{**values, "train_loss": read_number(values["train_loss"])})
            for values in self.epochs
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint in memory. `weights` are those that the model had at that moment."""

    manifest: Manifest
    weights: Mapping[str, NDArray[Any]]
    """Tensor name to its values, in its shape."""
    state: Mapping[str, NDArray[Any]]
    """``ARRAY/TENSOR`` to the rule's array: in the tensor's shape, or one number per shard of it."""
    problems: tuple[str, ...] = ()
    """Why newer checkpoints in the same folder could not be read."""
    trained_again: int = 0
    """Groups that a run which is resumed from here will have trained again, earlier resumes included."""

    def __repr__(self) -> str:
        return f"<Checkpoint {self.manifest.name} of run {self.manifest.run}>"


def epoch_values(epochs: Iterable[EpochResult]) -> tuple[dict[str, Any], ...]:
    """Results of epochs as a manifest holds them."""
    return tuple(
        {**asdict(epoch), "train_loss": epoch.train_loss if isfinite(epoch.train_loss) else None}
        for epoch in epochs
    )


# --- names -----------------------------------------------------------------------------------


def folder_name(epoch: int, groups: int) -> str:
    """The name of a checkpoint's folder; names sort as the checkpoints were taken."""
    return f"checkpoint-{epoch:04}-{groups:06}"


def is_folder_name(name: str) -> bool:
    """Whether a name is that of a checkpoint's folder."""
    head, *numbers = name.split("-")
    return head == "checkpoint" and len(numbers) == 2 and all(n.isascii() and n.isdigit() for n in numbers)


def age_order(name: str) -> tuple[int, ...]:
    """Key that sorts the names of checkpoint folders, older ones first."""
    return tuple(int(number) for number in name.split("-")[1:])


# --- files -----------------------------------------------------------------------------------


def split(stem: str, arrays: Mapping[str, NDArray[Any]], limit: int = FILE_BYTES) -> dict[str, list[str]]:
    """Spread tensors over files, in their order.

    Returns:
        File name to the names of its tensors: at most `limit` bytes of them, or a single one.
    """
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
    """The bytes of a safetensors file, part by part, without copying a tensor.

    Args:
        arrays: C-contiguous, of float32, float64 or int64.
    """
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        end = at + array.nbytes
        header[name] = {
            "dtype": _CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # values begin aligned
    yield len(text).to_bytes(8, "little")
    yield text
    for array in arrays.values():
        yield array.reshape(-1).view(np.uint8).data


def index_file(files: Mapping[str, Sequence[str]], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The index of the parameters' files, in the form that other libraries read."""
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


def manifest_file(manifest: Manifest) -> bytes:
    """The text of a manifest, with its checksum set."""
    sealed = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"


def read_manifest(text: bytes, origin: str) -> Manifest:
    """Read and check the text of a manifest.

    Args:
        text: The whole file.
        origin: What to call it in an error.

    Raises:
        CheckpointError: It is damaged, or of another version.
    """
    try:
        version = msgspec.json.decode(text)["format"]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise CheckpointError(f"{origin} is damaged: it is not the JSON of a manifest") from None
    if version != FORMAT:
        raise CheckpointError(f"{origin} has the format {version!r}; this version reads {FORMAT!r}")
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{origin} is damaged: {error}") from None
    if manifest.checksum != _checksum(manifest):
        raise CheckpointError(f"{origin} is damaged: its checksum is not that of what it says")
    return manifest


def _checksum(manifest: Manifest) -> str:
    return sha256(msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))).hexdigest()


# --- taking up -------------------------------------------------------------------------------


def resumed_options(manifest: Manifest) -> dict[str, Any]:
    """The options of a run, as the lowest layer of those of a run that continues it.

    Training in place was allowed there because of how the roles ran, and is decided anew; a record, and
    stragglers, are asked for anew. The manifest has the transforms themselves; their file may have changed.
    """
    options = {**manifest.config, "record": False, "slow": (), "transforms": ""}
    if options.get("weights") == "aliased":
        options["weights"] = "auto"
    return options


def resumed_config(manifest: Manifest, wanted: Config) -> Config:
    """The options of a run that continues another one.

    Args:
        manifest: Of the checkpoint.
        wanted: Options that the caller asks for. A rate of 0 stands for the rate that the earlier run was
            asked for; 0 epochs and schedule ``auto`` stand for the choice of that run, whose curve goes on.

    Raises:
        CheckpointError: An option differs that may not, all epochs asked for are trained, or a record is
            wanted, which begins where a run does.
    """
    if wanted.record:
        raise CheckpointError("a resumed run cannot be recorded: a record begins where its run does")
    kept = make_config(manifest.config)
    wanted = msgspec.structs.replace(
        wanted, rate=wanted.rate or kept.rate, epochs=wanted.epochs or kept.epochs
    )
    if wanted.schedule == "auto":
        warm_up = wanted.warm_up or kept.warm_up
        wanted = msgspec.structs.replace(wanted, schedule=kept.schedule, warm_up=warm_up)
    differing = [
        f"{name}={getattr(wanted, name)} (there {getattr(kept, name)})"
        for name in FIELDS
        if name not in MAY_CHANGE and getattr(wanted, name) != getattr(kept, name)
    ]
    if differing:
        raise CheckpointError(
            f"a resumed run keeps the options of its checkpoint, but these differ: {', '.join(differing)}; "
            "leave them out, or begin a run of its own"
        )
    if manifest.resume.epoch > wanted.epochs:
        done = manifest.resume.epoch - 1
        raise CheckpointError(
            f"{manifest.name} has all of epochs={wanted.epochs} behind it; "
            f"to train on, give --epochs {done + 1} or more"
        )
    return wanted


def resumed_spec(manifest: Manifest, spec: ModelSpec | None) -> ModelSpec:
    """The model of a checkpoint.

    Args:
        manifest: Of the checkpoint.
        spec: What the caller brings, if it brings one.

    Raises:
        CheckpointError: That is another model.
    """
    there = ModelSpec.from_dict(manifest.spec)
    if spec is not None and spec.to_dict() != there.to_dict():
        raise CheckpointError(
            f"{manifest.name} holds a model {there.name!r} whose layers are not those of {spec.name!r}: "
            "leave the model out, it is in the checkpoint"
        )
    return there


def resumed_transforms(
    manifest: Manifest, asked: Sequence[Mapping[str, Any]] | None, functions: Collection[str] = ()
) -> tuple[dict[str, Any], ...]:
    """Transforms of training images in a resumed run: the same as in the checkpoint's run.

    Args:
        manifest: Manifest of the checkpoint.
        asked: Transforms that the caller asks for; they permit the import of the functions they name.
        functions: Kinds that the caller brings functions for.

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
"""What two data sets have in common that are taken for the same one."""


def check_data(manifest: Manifest, data: Mapping[str, Any]) -> None:
    """Refuse other data than those that the checkpoint's run trained on.

    Raises:
        CheckpointError: Naming what differs.
    """
    for key in DATA_IDENTITY:
        here, there = data.get(key), manifest.data.get(key)
        if here != there:
            raise CheckpointError(
                f"{manifest.name} was trained on data whose {key} is {there}, but here it is {here}; "
                "give the same data with --data"
            )


def trained_again(manifest: Manifest, note: ProgressNote | None) -> int:
    """Groups that a run resumed from a checkpoint will have trained again, those of earlier resumes included.

    A note is written about once a second, so the true number may be larger by what was trained in that time.
    """
    if note is None:
        return manifest.trained_again
    images = int(manifest.data["train_images"]) - int(manifest.config.get("validation", 0))
    size = int(manifest.config["images_per_group"])
    ahead = (note.epoch - manifest.epoch) * -(-images // size) + note.groups - manifest.groups
    return max(manifest.trained_again, note.trained_again + max(ahead, 0))
