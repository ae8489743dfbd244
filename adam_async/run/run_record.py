"""Pure: the record of a run: its program, and the results and evaluations of its ended epochs.

The cluster map has the program, and the newest results and evaluations only. The run's driver, and each
server that keeps shards of the run on a disk, collect them from the versions of the map. The server keeps the
record with the shards (`parameter_server/store_disk.py`), and a checkpoint has it with its pieces. So disks,
or a folder alone, tell which run their shards belong to, and the run can continue from them.
"""

from collections.abc import Iterable
from typing import Annotated, Self

import msgspec

from adam_async.errors import RunFailed
from adam_async.messages.body import MOST_VALUE_BYTES, Count, Seconds
from adam_async.messages.saved_shards import MOST_RECORD_BYTES
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.counts import EpochCounts, Evaluation, joined_evaluations
from adam_async.run.training_program import ProgramRecord, start_of

MOST_EPOCHS = 1 << 16
"""Maximum number of results or evaluations in a record. Correct epochs reach `MOST_RECORD_BYTES` first."""

Results = Annotated[tuple[EpochCounts, ...], msgspec.Meta(max_length=MOST_EPOCHS)]
Evaluations = Annotated[tuple[Evaluation, ...], msgspec.Meta(max_length=MOST_EPOCHS)]


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as remembered by its driver and its servers' disks."""

    program: ProgramRecord
    ended: Count = 0
    """Number of ended epochs, including those of the runs that the run continues."""
    results: Results = ()
    """Results of the newest of these epochs, in order, up to the last."""
    evaluated: Evaluations = ()
    """Evaluations of these epochs, in order."""
    train_s: Seconds = 0.0
    """In a checkpoint, the training time of the epoch in progress, in seconds."""
    is_whole: bool = False
    """Whether the disks have had all shards of the run; shards that are absent now are lost."""

    @property
    def first(self) -> int:
        """Number of the first epoch whose result is known; `ended` + 1 without results."""
        return self.ended - len(self.results) + 1

    def result(self, epoch: int) -> EpochCounts:
        """Return the result of an ended epoch.

        Raises:
            RunFailed: More epochs than the map holds ended while its reader reached no controller.
        """
        if epoch < self.first:
            raise RunFailed(
                f"epoch {epoch} ended while no controller was reachable, and the cluster map holds the "
                f"results from epoch {self.first} on only: resume from the newest checkpoint"
            )
        return self.results[epoch - self.first]

    def until(self, epoch: int) -> Self:
        """Return the record as it was when this epoch had ended."""
        ended = min(epoch, self.ended)
        return msgspec.structs.replace(
            self,
            ended=ended,
            results=self.results[: max(ended - self.first + 1, 0)],
            evaluated=tuple([each for each in self.evaluated if each.epoch <= ended]),
        )

    def bounded(self) -> Self:
        """Return the record without its oldest results and evaluations if it is too long."""
        record = self
        while (record.results or record.evaluated) and len(packed_record(record)) > MOST_RECORD_BYTES:
            newer = {
                name: each[(len(each) + 1) // 2 :]
                for name in ("results", "evaluated")
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
        if len(_SIZES.decode(packed).program.terms) > MOST_VALUE_BYTES:
            raise ValueError(f"the terms of its program are above {MOST_VALUE_BYTES} bytes")
        return _RECORDS.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no record of a run: {error}") from None


class _Parts(msgspec.Struct):
    """The terms of a program, not decoded: a peer may have nested them to any depth."""

    terms: msgspec.Raw = msgspec.Raw()


class _Sizes(msgspec.Struct):
    program: _Parts


_SIZES = msgspec.msgpack.Decoder(_Sizes)


def begun(program: ProgramRecord, earlier: Iterable[RunRecord]) -> RunRecord:
    """Return the first record of a run.

    Args:
        earlier: Records of other runs. The run takes over the epochs of the runs that it continues.
    """
    start = start_of(program)
    by_run = {each.program.id: each for each in earlier}
    before = next((by_run[run] for run in start.runs if run in by_run), None)
    record = RunRecord(program=program, ended=start.epoch - 1)
    if before is None:
        return record
    return msgspec.structs.replace(_joined(record, before.until(record.ended)), is_whole=False)


def followed(record: RunRecord, cluster: ClusterMap, *, is_whole: bool = False) -> RunRecord:
    """Return a run's record at a version of the map, which may have another run by then."""
    run, is_whole = cluster.run, record.is_whole or is_whole
    if run is None or run.id != record.program.id:
        return record if is_whole == record.is_whole else msgspec.structs.replace(record, is_whole=is_whole)
    ended = max(cluster.ended, record.ended)
    if (run.changed, ended, is_whole) == (record.program.changed, record.ended, record.is_whole):
        return record
    found = cluster.results[-(ended - record.ended) :] if ended > record.ended else ()
    newer = RunRecord(program=run, ended=ended, results=found, evaluated=run.evaluated, is_whole=is_whole)
    return _joined(newer, record).bounded()


def newest(records: Iterable[RunRecord]) -> RunRecord | None:
    """Return the newest of several records of one run, with all records' results and evaluations; None if
    there is none.

    Args:
        records: Records, the newest first.
    """
    merged: RunRecord | None = None
    for each in records:
        merged = each if merged is None else _joined(merged, each)
    return merged


def _joined(newer: RunRecord, older: RunRecord) -> RunRecord:
    """Return a record with results and evaluations that only an older one has, if they leave no gap."""
    before = older.until(newer.first - 1)
    return msgspec.structs.replace(
        newer,
        results=(*(before.results if before.ended == newer.first - 1 else ()), *newer.results),
        evaluated=joined_evaluations(older.evaluated, newer.evaluated),
        is_whole=newer.is_whole or older.is_whole,
    )
