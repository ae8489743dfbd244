"""Pure: the record of a run: its program, and the results and evaluations of its ended epochs.

The cluster map has the program, and the newest results and evaluations only. Each server that keeps shards of
the run on a disk collects them from the versions of the map, and keeps them beside the shards
(`parameter_server/store_disk.py`). So the disks alone tell which run their shards belong to, and a run goes
on from them without any file of its driver.
"""

from collections.abc import Iterable
from typing import Annotated, Self, cast

import msgspec

from adam_async.messages.bounds import MOST_VALUE_BYTES, Count
from adam_async.messages.saved_shards import MOST_RECORD_BYTES
from adam_async.run.cluster_map import ClusterMap, ResultFields
from adam_async.run.training_program import ProgramRecord

MOST_RUNS = 64
"""Maximum number of runs that a run names as continued, without the oldest ones."""

MOST_EPOCHS = 1 << 16
"""Maximum number of results or evaluations in a record. Those of correct epochs reach `MOST_RECORD_BYTES`
first."""

Value = None | bool | int | float | str | list[int | tuple[int, int]]
"""Value of a result or of an evaluation; a peer's nested lists would take 60 times the size of the record."""

Values = Annotated[tuple[dict[str, Value], ...], msgspec.Meta(max_length=MOST_EPOCHS)]


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as the servers keep it on their disks."""

    program: ProgramRecord
    ended: Count = 0
    """Number of ended epochs, including those of the runs that the run continues."""
    results: Values = ()
    """Results of the newest of these epochs, in order, up to the last one."""
    epochs: Values = ()
    """Evaluated epochs in order, as `checkpoint.manifest.epoch_values` gives them."""
    train_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """In a checkpoint, the training time of the epoch in progress, in seconds."""
    is_whole: bool = False
    """Whether the disks have had all shards of the run; shards that are absent now are lost."""

    def bounded(self) -> Self:
        """Return the record without its oldest results and evaluations if it is too long."""
        record = self
        while (record.results or record.epochs) and len(packed_record(record)) > MOST_RECORD_BYTES:
            newer = {
                name: each[(len(each) + 1) // 2 :]
                for name in ("results", "epochs")
                if (each := getattr(record, name))
            }
            record = msgspec.structs.replace(record, **newer)
        return record


_RECORDS = msgspec.msgpack.Decoder(RunRecord)

packed_record = msgspec.msgpack.Encoder().encode
"""Function that returns a record as MessagePack."""


def read_run_record(packed: bytes | memoryview) -> RunRecord:
    """Read a packed record, which a peer may have written. Raises ValueError: it is none."""
    try:
        program = _SIZES.decode(packed).program
        if any(len(part) > MOST_VALUE_BYTES for part in (program.terms, program.result, program.notes)):
            raise ValueError(f"a part of its program is above {MOST_VALUE_BYTES} bytes")
        record = _RECORDS.decode(packed)
        msgspec.convert((record.epochs, record.results), tuple[tuple[_Epoch, ...], tuple[ResultFields, ...]])
        return record
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no record of a run: {error}") from None


class _Parts(msgspec.Struct):
    """Parts of a program of any depth, not decoded."""

    terms: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    notes: msgspec.Raw = msgspec.Raw()


class _Sizes(msgspec.Struct):
    program: _Parts


_SIZES = msgspec.msgpack.Decoder(_Sizes)


class _Epoch(msgspec.Struct):
    epoch: Annotated[int, msgspec.Meta(ge=1)]


class _Notes(msgspec.Struct):
    """The fields of a driver's notes that a record needs; see `checkpoint.manifest.DriverNotes`."""

    runs: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_RUNS)] = ()
    epochs: Values = ()


class _Start(msgspec.Struct):
    epoch: Annotated[int, msgspec.Meta(ge=1)] = 1


class _Terms(msgspec.Struct):
    start: _Start | None = None


def runs_of(program: ProgramRecord) -> tuple[str, ...]:
    """Return the ids of the runs that a run continues, the newest first."""
    return _notes_of(program).runs


def begun(program: ProgramRecord, earlier: Iterable[RunRecord]) -> RunRecord:
    """Return the first record of a run.

    Args:
        earlier: Records of other runs. The run takes the epochs of those that it continues.
    """
    try:
        start = msgspec.convert(program.terms, _Terms).start or _Start()
    except msgspec.ValidationError:
        start = _Start()
    ended = start.epoch - 1
    by_run = {each.program.id: each for each in earlier}
    before = next((by_run[run] for run in runs_of(program) if run in by_run), None)
    if before is None:
        return RunRecord(program=program, ended=ended)
    known = before.results[: max(len(before.results) - max(before.ended - ended, 0), 0)]
    return RunRecord(
        program=program,
        ended=ended,
        results=known if before.ended >= ended else (),
        epochs=tuple(each for each in before.epochs if _number(each) <= ended),
    )


def followed(record: RunRecord, cluster: ClusterMap, *, is_whole: bool) -> RunRecord:
    """Return the record of a run at a version of the map, which may be of another run by now."""
    run, is_whole = cluster.run, record.is_whole or is_whole
    if run is None or run.id != record.program.id:
        run = record.program
    ended, results = max(cluster.ended if run is cluster.run else 0, record.ended), record.results
    if (run.changed, ended, is_whole) == (record.program.changed, record.ended, record.is_whole):
        return record
    if lacking := ended - record.ended:
        found = cluster.results[-lacking:]
        results = (*(results if len(found) == lacking else ()), *found)
    epochs = _joined(record.epochs, _notes_of(run).epochs)
    return RunRecord(program=run, ended=ended, results=results, epochs=epochs, is_whole=is_whole).bounded()


def newest(records: Iterable[RunRecord]) -> RunRecord | None:
    """Return the newest of several records of one run, with the results and evaluations of all; None if there
    is none.

    Args:
        records: Records, the newest first.
    """
    merged: RunRecord | None = None
    for each in records:
        if merged is None:
            merged = each
            continue
        first, begin = each.ended - len(each.results), merged.ended - len(merged.results)
        older = each.results[: begin - first] if first < begin <= each.ended else ()
        merged = msgspec.structs.replace(
            merged,
            results=(*older, *merged.results),
            epochs=_joined(each.epochs, merged.epochs),
            is_whole=merged.is_whole or each.is_whole,
        )
    return merged


def _number(epoch: dict[str, Value]) -> int:
    """Return the number of an evaluated epoch, which was checked when it was read."""
    return cast(int, epoch["epoch"])


def _joined(older: Values, newer: Values) -> Values:
    found = {_number(each): each for each in (*older, *newer)}
    return tuple(found[epoch] for epoch in sorted(found))


def _notes_of(program: ProgramRecord) -> _Notes:
    """Return the notes of a driver; empty notes if they are invalid, because a peer has written them."""
    try:
        notes = msgspec.convert(program.notes, _Notes)
        msgspec.convert(notes.epochs, tuple[_Epoch, ...])
    except msgspec.ValidationError:
        return _Notes()
    return notes
