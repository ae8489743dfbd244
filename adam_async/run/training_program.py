"""Pure: a training run as a program: the blob that its roles read, and the terms that its rules read.

The driver makes both (`TrainingProgram.record`). Workers and data servers read the blob with
`read_training`, which checks it: a driver of another release may have written it.
"""

from itertools import chain
from typing import Annotated, Any

import msgspec

from adam_async.errors import ConfigError
from adam_async.run.bundle_record import Member
from adam_async.run.config import FIELDS, MOST, Config
from adam_async.run.option_sources import make_config
from adam_async.run.program_record import ProgramRecord

KIND = "training"
"""Kind of the programs that are training runs."""

MOST_RANGES = 4096
"""Maximum number of ranges of finished groups from which a run may continue."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Replica = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Starting point of a run that continues another one."""

    epoch: int
    """Number of the epoch in progress."""
    finished: tuple[tuple[int, int], ...]
    """Ranges of groups of the epoch in progress that are trained already."""
    clock: int
    """Clock of the fastest replica, in steps."""
    results: tuple[dict[str, Any], ...] = ()
    """Results of the epochs before, in order; the run continues their clocks and counts."""
    images: int = 0
    """Number of images of the groups in `finished`."""
    loss: float = 0.0
    """Mean loss over the images of the groups in `finished`."""
    train_s: float = 0.0
    """Training time of the images of the groups in `finished`, in seconds."""


class StartTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Starting point of a run that continues another one, as far as the rules need it."""

    epoch: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    """Number of the epoch in progress."""
    finished: Annotated[tuple[tuple[_Number, _Number], ...], msgspec.Meta(max_length=MOST_RANGES)] = ()
    """Ranges of groups of the epoch in progress that are trained already."""
    clock: _Number = 0
    """Clock of the fastest replica, in steps."""
    skipped: _Number = 0
    """Number of images that the epoch before skipped."""
    behind: Annotated[tuple[_Replica, ...], msgspec.Meta(max_length=MOST_RANGES)] = ()
    """Replicas whose shares of the epoch before have skipped groups."""


class TrainingTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of a training run that the rules read, within bounds. The driver takes them from the options."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST["replicas"])] = 1
    partitions: Annotated[int, msgspec.Meta(ge=1, le=MOST["partitions"])] = 1
    """Workers of one replica."""
    together: bool = False
    """Whether the workers of a replica share a process, and the first of them trains all parts."""
    epochs: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 1
    images_per_group: Annotated[int, msgspec.Meta(ge=1, le=MOST["images_per_group"])] = 1
    validation: _Number = 0
    """Number of training images held back."""
    round_groups: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    """With ssp and bsp, number of groups in a round, as many as in one step; 0 if shares are ranges."""
    warm_start: _Number = 0
    """Number of groups that one replica trains alone at the beginning of the run."""
    concurrent: bool = False
    """Whether the next epoch begins before the driver has evaluated the last one."""
    start: StartTerms | None = None
    """Starting point of a run that continues another one."""


class TrainingProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A training run, as its roles read it."""

    config: Config
    spec: dict[str, Any]
    """The model, as `ModelSpec.to_dict` gives it, or the step, as `StepSpec.to_dict` does."""
    plan: dict[str, Any] | None = None
    """Partition plan of the model, as `PartitionPlan.to_dict` gives it; None if the model is not cut."""
    transforms: tuple[dict[str, Any], ...] = ()
    """Transforms of training images, as `Recipe.of` takes them; empty for none."""
    resumed: ResumeRecord | None = None
    """Starting point of a run that continues another run, with the results of the last epochs only: at least
    one, unless the run continues its first epoch."""
    carried: bytes = b""
    """Images with which the first epoch of `resumed.results` begins because the epoch before skipped them, as
    in `EpochOrder.carried_images`."""

    def terms(self, *, together: bool = False) -> TrainingTerms:
        """Return the facts that the rules read.

        Args:
            together: Whether the first worker of a replica trains all parts.
        """
        config = self.config
        return TrainingTerms(
            replicas=config.replicas,
            partitions=config.partitions,
            together=together,
            epochs=config.epochs,
            images_per_group=config.images_per_group,
            validation=config.validation,
            round_groups=0 if config.consistency == "asp" else config.push_every,
            warm_start=config.warm_start,
            concurrent=config.evaluation == "concurrent",
            start=_start_of(self.resumed) if self.resumed is not None else None,
        )

    def record(self, id: str, driver: Member, *, together: bool = False) -> ProgramRecord:
        """Return the record of the run for its submission by a driver."""
        return ProgramRecord(
            id=id,
            driver=driver[0],
            incarnation=driver[1],
            kind=KIND,
            blob=msgspec.msgpack.encode(self),
            terms=msgspec.to_builtins(self.terms(together=together)),
        )


def _start_of(resumed: ResumeRecord) -> StartTerms:
    before = resumed.results[-1] if resumed.results else {}
    return StartTerms(
        epoch=resumed.epoch,
        finished=resumed.finished,
        clock=resumed.clock,
        skipped=int(before.get("skipped", 0)),
        behind=tuple(before.get("behind", ())),
    )


class _Blob(msgspec.Struct, frozen=True, kw_only=True):
    """The blob before its options are checked; fields as in `TrainingProgram`."""

    config: dict[str, Any]
    spec: dict[str, Any]
    plan: dict[str, Any] | None = None
    transforms: tuple[dict[str, Any], ...] = ()
    resumed: ResumeRecord | None = None
    carried: bytes = b""


_BLOBS = msgspec.msgpack.Decoder(_Blob)


class _Skipped(msgspec.Struct, frozen=True):
    """The field of an epoch's result from which data servers compute the order of the next epoch."""

    skipped_groups: tuple[tuple[_Number, _Number], ...] = ()


def read_training(run: ProgramRecord) -> TrainingProgram:
    """Read the blob of a training run.

    Raises:
        ConfigError: The program is of another kind, its blob is no training run, or an option is missing or
            out of range, or the blob contradicts the terms of the record.
    """
    if run.kind != KIND:
        raise ConfigError(f"program {run.id} is of kind {run.kind[:80]!r}; this role takes part in {KIND!r}")
    try:
        blob = _BLOBS.decode(run.blob)
        terms = msgspec.convert(run.terms, TrainingTerms)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"run {run.id} cannot be read: {error}; use one release of adam-async in all roles"
        ) from None
    missing = [name for name in FIELDS if name not in blob.config]
    if missing:
        raise ConfigError(f"the config of run {run.id} lacks {', '.join(missing)}")
    resumed = blob.resumed
    if resumed is not None and not min(resumed.epoch - 1, 1) <= len(resumed.results) < resumed.epoch:
        raise ConfigError(
            f"{run.id} resumes epoch {resumed.epoch}, and has the results of {len(resumed.results)} before"
        )
    program = TrainingProgram(
        config=make_config(blob.config),
        spec=blob.spec,
        plan=blob.plan,
        transforms=blob.transforms,
        resumed=resumed,
        carried=blob.carried,
    )
    try:
        expected = program.terms(together=terms.together)
        for result in resumed.results if resumed is not None else ():
            ends = [*chain.from_iterable(msgspec.convert(result, _Skipped).skipped_groups)]
            if ends != sorted(ends):
                raise ValueError("ranges of skipped groups overlap, or are not in order")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the results that run {run.id} resumes cannot be read: {error}") from None
    if terms != expected:
        raise ConfigError(f"the terms of run {run.id} are not those of its options: submit it again")
    return program
