"""Pure: a training run as a program: the blob that its roles read, and the terms that its rules read.

The driver makes both (`TrainingProgram.record`). Workers and data servers read the blob with `read_training`.
`read_training` checks the blob, because a driver of another release may have written it.

A *program* is the work that a driver submits. Each program has a record in the cluster map. The *blob* has
the roles' work. The controllers pass the record on undecoded, so two releases that read it differently still
agree on the map. The *terms* are the facts that the rules read; the driver states them, and the rules check
their bounds.

A blob too long for the record precedes it, in pieces with the keys ``run/0``, ``run/1`` and so on. The
controllers join the pieces into the record that names their number.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Literal, Self

import msgspec

from adam_async.errors import ConfigError
from adam_async.messages.body import MOST_VALUE_BYTES, Seconds
from adam_async.option_types import printable
from adam_async.run.config import FIELDS, MOST, Config
from adam_async.run.counts import RESULTS_KEPT, EpochCounts, Evaluation, SkippedGroups, skipped_groups
from adam_async.run.option_sources import make_config
from adam_async.run.store_record import Member

PROGRAM_PIECES = 24
"""Maximum number of pieces of a blob."""

PIECE_BYTES = 45 << 10
"""Maximum size of one piece in bytes; its JSON text is a third larger, and fits into a value of the map."""

MOST_PROGRAM_ID = 160
"""Maximum length of a program's id, in bytes of UTF-8; its store has the same id."""

OVER = ("finished", "failed")
"""Final phases of a program."""


class ProgramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One program. The program's driver submits, advances and ends it."""

    id: Annotated[str, printable(1, MOST_PROGRAM_ID)]
    driver: str
    """Node id of the driver. After the driver's loss the program waits for another driver or fails, depending
    on the phase."""
    incarnation: int
    """Incarnation of the driver."""
    blob: bytes = b""
    """Work of the roles as MessagePack, which the controllers do not read."""
    pieces: Annotated[int, msgspec.Meta(ge=0, le=PROGRAM_PIECES)] = 0
    """In a submission, the number of pieces with the blob; 0 if the record has the blob."""
    terms: dict[str, Any] = {}
    """Facts that the rules read, with the types of `TrainingTerms`."""
    phase: str = "preparing"
    """State of the program: one of the `PHASES` of the rules, which include `OVER`."""
    epoch: int = 0
    """Current round, from 1; 0 while preparing."""
    reason: str = ""
    """Reason for the failure of the program."""
    lost: str = ""
    """Lost roles that made the program fail, as text; empty if no lost role did."""
    evaluated: Annotated[tuple[Evaluation, ...], msgspec.Meta(max_length=RESULTS_KEPT + 1)] = ()
    """Evaluated epochs, set by the driver: the newest ones, and the best earlier one."""
    changed: int = 0

    def without_fixed(self) -> Self:
        """Return the record without blob, terms and pieces, which do not change after submission."""
        return msgspec.structs.replace(self, blob=b"", terms={}, pieces=0)

    def with_fixed_of(self, program: "ProgramRecord") -> Self:
        """Return the record with the `FIXED` fields of another record of the same program."""
        return msgspec.structs.replace(self, **{name: getattr(program, name) for name in FIXED})

    def has_fixed_of(self, program: "ProgramRecord") -> bool:
        """Return whether another record has the same program and the same `FIXED` fields."""
        pairs = ((getattr(self, name), getattr(program, name)) for name in FIXED)
        return self.id == program.id and all(here is there or here == there for here, there in pairs)

    @property
    def driven_by(self) -> Member:
        """Node id and incarnation of the driver."""
        return self.driver, self.incarnation

    @property
    def over(self) -> bool:
        """Whether the program has finished or failed."""
        return self.phase in OVER


FIXED = ("blob", "pieces", "terms")
"""Names of the `ProgramRecord` fields that never change; later changes of the record may omit them."""


class ProgramPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a program's blob during submission."""

    run: str
    """Id of the program."""
    data: bytes
    changed: int = 0


def cut_blob(record: ProgramRecord) -> tuple[ProgramRecord, list[ProgramPiece]]:
    """Cut the blob of a record for its submission.

    Returns:
        The record to submit, and the pieces to set before it; no pieces if the record keeps the blob.

    Raises:
        ValueError: The blob needs more than `PROGRAM_PIECES` pieces.
    """
    blob = record.blob
    if len(msgspec.json.encode(record)) <= MOST_VALUE_BYTES:
        return record, []
    if len(blob) > PROGRAM_PIECES * PIECE_BYTES:
        raise ValueError(f"its blob has {len(blob)} bytes, {PROGRAM_PIECES * PIECE_BYTES} are the most")
    pieces = [
        ProgramPiece(run=record.id, data=blob[start : start + PIECE_BYTES])
        for start in range(0, len(blob), PIECE_BYTES)
    ]
    return msgspec.structs.replace(record, blob=b"", pieces=len(pieces)), pieces


def joined_blob(record: ProgramRecord, pieces: Mapping[str, ProgramPiece]) -> ProgramRecord | str:
    """Return a submitted record with its blob joined from the map's pieces, or the pieces' fault."""
    if not record.pieces:
        return record
    found = [pieces.get(f"run/{number}") for number in range(record.pieces)]
    lacking = [number for number, piece in enumerate(found) if piece is None or piece.run != record.id]
    if lacking:
        return f"of program {record.id} piece {lacking[0]} of {record.pieces} is not there: submit it again"
    blob = b"".join(piece.data for piece in found if piece is not None)
    return msgspec.structs.replace(record, blob=blob, pieces=0)


def is_piece(key: str) -> bool:
    """Return whether a key of the map names a piece of a program."""
    kind, _, number = key.partition("/")
    return kind == "run" and number in _NUMBERS


_NUMBERS = frozenset(map(str, range(PROGRAM_PIECES)))


def program_prefix(driver: str, incarnation: int) -> str:
    """Return the text that begins the ids of one driver's programs; no client may use it."""
    return f"{driver}-{incarnation:x}-"


MOST_DEPTH = 64
"""Maximum nesting depth of a blob's values, in containers."""

MOST_REPLICAS = 4096
"""Maximum number of replicas that the starting point of a run names."""

MOST_RUNS = 64
"""Maximum number of runs that a run names as continued, without the oldest ones."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Replica = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Runs = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MOST_PROGRAM_ID)], ...], msgspec.Meta(max_length=MOST_RUNS)
]


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Starting point of a run that continues another one."""

    epoch: int
    """Number of the epoch in progress."""
    clock: int
    """Clock of the fastest replica, in steps."""
    results: tuple[EpochCounts, ...] = ()
    """Results of earlier epochs, in order; the run continues their clocks and counts."""
    train_s: Seconds = 0.0
    """Training time of the epoch in progress, in seconds."""
    skipped: tuple[SkippedGroups, ...] = ()
    """Skipped groups of the epochs from `epoch` on that an earlier run has ended. Skipped groups stay
    skipped: shards may have groups of later epochs, whose images depend on these."""
    runs: _Runs = ()
    """Ids of the runs that the run continues, the newest first."""

    def without_old_results(self) -> Self:
        """Return the starting point without the results that no data server needs.

        An epoch begins with the images that the previous epoch skipped. So the results since the last epoch
        without skipped groups suffice: at most `RESULTS_KEPT`, because of `must_train_all`.
        """
        skipped = skipped_groups(self.results)
        first = max(len(skipped) - 1, 0)
        while first > 0 and skipped[first - 1]:
            first -= 1
        return msgspec.structs.replace(self, results=self.results[first:])

    def skipped_from(self, epoch: int) -> tuple[SkippedGroups, ...]:
        """Return `skipped` for a later epoch in progress."""
        return self.skipped[epoch - self.epoch :] if epoch >= self.epoch else ()


class StartTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the rules need about where a run that continues another one starts."""

    epoch: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    """Number of the epoch in progress."""
    clock: _Number = 0
    """Clock of the fastest replica, in steps."""
    skipped: _Number = 0
    """Number of images that the epoch before skipped."""
    behind: Annotated[tuple[_Replica, ...], msgspec.Meta(max_length=MOST_REPLICAS)] = ()
    """Replicas whose shares of the epoch before have skipped groups."""
    runs: _Runs = ()
    """Ids of the runs that the run continues, the newest first."""


class TrainingTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of a training run that the rules read, within bounds. They come from the options."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST["replicas"])] = 1
    partitions: Annotated[int, msgspec.Meta(ge=1, le=MOST["partitions"])] = 1
    """Workers of one replica."""
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
    """The model in the form of `ModelSpec.to_dict`, or the step in the form of `StepSpec.to_dict`."""
    plan: dict[str, Any] | None = None
    """The model's partition plan in the form of `PartitionPlan.to_dict`; None if the model is not cut."""
    transforms: tuple[dict[str, Any], ...] = ()
    """Transforms of training images in the form of `Recipe.of`; empty if there are none."""
    resumed: ResumeRecord | None = None
    """Starting point of a run that continues another run. The starting point has the results of the last
    epochs only: at least one, unless the run continues its first epoch."""
    data: dict[str, Any] = {}
    """A data server's description of the data."""
    asked_rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Rate that the caller asked for; 0: the run decided."""
    asked_protocol: Literal["auto", "delta", "factors"] = "auto"
    """Form of gradients that the caller asked for; auto: the run decided by the links between its roles."""

    def terms(self) -> TrainingTerms:
        """Return the facts that the rules read."""
        config = self.config
        return TrainingTerms(
            replicas=config.replicas,
            partitions=config.partitions,
            epochs=config.epochs,
            images_per_group=config.images_per_group,
            validation=config.validation,
            round_groups=0 if config.consistency == "asp" else config.push_every,
            warm_start=config.warm_start,
            concurrent=config.evaluation == "concurrent",
            start=_start_of(self.resumed) if self.resumed is not None else None,
        )

    def record(self, id: str, driver: Member) -> ProgramRecord:
        """Return the record of the run for its submission by a driver."""
        return ProgramRecord(
            id=id,
            driver=driver[0],
            incarnation=driver[1],
            blob=msgspec.msgpack.encode(self),
            terms=msgspec.to_builtins(self.terms()),
        )


def _start_of(resumed: ResumeRecord) -> StartTerms:
    before = resumed.results[-1] if resumed.results else EpochCounts()
    return StartTerms(
        epoch=resumed.epoch,
        clock=resumed.clock,
        skipped=before.skipped,
        behind=before.behind,
        runs=resumed.runs,
    )


def start_of(run: ProgramRecord) -> StartTerms:
    """Return a run's starting point from its terms, without its blob; epoch 1 for a new run.

    Terms in another form count as those of a new run, because a peer may have written them.
    """
    try:
        return msgspec.convert(run.terms, TrainingTerms).start or StartTerms(epoch=1)
    except msgspec.ValidationError:
        return StartTerms(epoch=1)


class _Blob(TrainingProgram, frozen=True, kw_only=True):
    """The blob before its options are checked."""

    config: dict[str, Any]  # type: ignore[assignment]


def _nests_too_deep(value: Any) -> bool:
    """Return whether values are nested deeper than `MOST_DEPTH`: recursive functions read them."""
    layer = [value]
    for _ in range(MOST_DEPTH + 1):
        several = [each for each in layer if isinstance(each, (list, tuple, dict))]
        layer = [inner for each in several for inner in each]
        layer += [inner for each in several if isinstance(each, dict) for inner in each.values()]
        if not layer:
            return False
    return True


_BLOBS = msgspec.msgpack.Decoder(_Blob)


def read_training(run: ProgramRecord) -> TrainingProgram:
    """Read the blob of a training run.

    Raises:
        ConfigError: The blob is no training run, or an option is missing or
            out of range, or the blob contradicts the terms of the record.
    """
    try:
        blob = _BLOBS.decode(run.blob)
        terms = msgspec.convert(run.terms, TrainingTerms)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"run {run.id} cannot be read: {error}; use one release of adam-async in all roles"
        ) from None
    if _nests_too_deep([blob.config, blob.spec, blob.plan, blob.transforms, blob.data]):
        raise ConfigError(f"run {run.id} cannot be read: its values are nested deeper than {MOST_DEPTH}")
    missing = [name for name in FIELDS if name not in blob.config]
    if missing:
        raise ConfigError(f"the config of run {run.id} lacks {', '.join(missing)}")
    resumed = blob.resumed
    if resumed is not None and not min(resumed.epoch - 1, 1) <= len(resumed.results) < resumed.epoch:
        raise ConfigError(
            f"{run.id} resumes epoch {resumed.epoch}, and has the results of {len(resumed.results)} before"
        )
    program = TrainingProgram(**{**msgspec.structs.asdict(blob), "config": make_config(blob.config)})
    for ranges in (*skipped_groups(resumed.results), *resumed.skipped) if resumed is not None else ():
        ends = [*chain.from_iterable(ranges)]
        if ends != sorted(ends):
            raise ConfigError(
                f"the results that run {run.id} resumes cannot be read: ranges of skipped groups overlap, or "
                "are not in order"
            )
    if terms != program.terms():
        raise ConfigError(f"the terms of run {run.id} are not those of its options: submit it again")
    return program
