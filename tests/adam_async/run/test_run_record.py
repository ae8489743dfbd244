"""The record of a run, as a server collects it from the versions of the cluster map."""

import msgspec
import pytest

from adam_async.messages.bounds import MOST_VALUE_BYTES
from adam_async.messages.saved_shards import MOST_RECORD_BYTES
from adam_async.run.cluster_map import RESULTS_KEPT, ClusterMap
from adam_async.run.run_record import (
    MOST_EPOCHS,
    RunRecord,
    begun,
    followed,
    newest,
    packed_record,
    read_run_record,
)
from adam_async.run.training_program import ResumeRecord
from tests.adam_async.cluster_maps import run_record


def results(first, last):
    return tuple({"images": 10 * epoch} for epoch in range(first, last + 1))


def epochs(first, last):
    return tuple({"epoch": epoch} for epoch in range(first, last + 1))


def at(record, ended, *, notes=(), changed=1, **fields):
    """The record after a version of the map."""
    run = msgspec.structs.replace(record.program, notes={"epochs": list(notes)}, changed=changed)
    first = max(ended - RESULTS_KEPT, 0) + 1
    cluster = ClusterMap(run=run, ended=ended, results=results(first, ended), **fields)
    return followed(record, cluster, is_whole=False)


def record_of(ended, *, first=1, id="run-1", **fields):
    known = {"results": results(first, ended), "epochs": epochs(first, ended), **fields}
    return RunRecord(program=run_record(id), ended=ended, **known)


def test_a_record_has_all_results_and_evaluations_although_the_map_has_the_newest_only():
    record = begun(run_record(), ())
    for ended in range(1, 101):
        record = at(record, ended, notes=epochs(max(ended - 2, 1), ended), changed=ended)
    assert (record.ended, record.results, record.epochs) == (100, results(1, 100), epochs(1, 100))
    assert read_run_record(packed_record(record)) == record


def test_a_version_of_the_map_without_news_leaves_the_record_as_it_is():
    record = at(begun(run_record(), ()), 3)
    assert at(record, 3) is record
    other = ClusterMap(run=run_record("run-2"), ended=9)
    assert followed(record, other, is_whole=False) is record
    assert followed(record, ClusterMap(), is_whole=True).is_whole


def test_results_without_those_before_them_begin_anew():
    record = at(at(begun(run_record(), ()), 2), 90)
    assert (record.ended, record.results) == (90, results(59, 90))


def test_a_run_takes_the_epochs_of_the_run_that_it_continues():
    resumed = ResumeRecord(epoch=6, clock=0, results=results(5, 5))
    run = msgspec.structs.replace(run_record("run-2", resumed=resumed), notes={"runs": ["run-1"]})
    record = begun(run, [record_of(9, id="another"), record_of(7, is_whole=True)])
    assert (record.ended, record.results, record.epochs) == (5, results(1, 5), epochs(1, 5))
    assert not record.is_whole
    assert begun(run, []) == RunRecord(program=run, ended=5)


def test_of_several_records_the_newest_counts_with_the_results_of_all():
    newer, older = record_of(8, first=7), record_of(6, is_whole=True)
    assert newest([]) is None
    merged = newest([newer, record_of(3, first=2), older])
    assert merged == record_of(8, is_whole=True)
    assert newest([newer, record_of(5)]).results == newer.results, "a gap"


def test_the_oldest_results_of_a_record_that_is_too_long_go():
    long = record_of(4, results=tuple({"images": epoch, "text": "x" * (1 << 20)} for epoch in range(1, 5)))
    record = at(long, 5)
    assert len(packed_record(record)) <= MOST_RECORD_BYTES
    assert record.results[-1] == {"images": 50}
    assert record.ended == 5


@pytest.mark.parametrize(
    "notes", [{"epochs": 3}, {"epochs": [{}]}, {"epochs": [{"epoch": "a"}]}, {"runs": [1]}], ids=str
)
def test_invalid_notes_of_a_driver_count_as_none(notes):
    run = msgspec.structs.replace(run_record(), notes=notes, changed=1)
    record = followed(begun(run, [record_of(3)]), ClusterMap(run=run), is_whole=True)
    assert (record.epochs, record.program.notes) == ((), notes)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x80",
        b"\xc1" * 9,
        packed_record(3),
        packed_record(record_of(1, epochs=({},))),
        packed_record(record_of(1, epochs=({"epoch": 1}, {"epoch": "a"}))),
        packed_record(record_of(1, results=({"skipped_groups": 3},))),
        packed_record(record_of(1, results=({"skipped": [1]},))),
        packed_record(record_of(1, results=({"behind": True},))),
        packed_record(record_of(1, results=({"skipped_groups": ((1,),)},))),
    ],
)
def test_bytes_that_are_no_record_are_named(packed):
    with pytest.raises(ValueError, match="it is no record of a run"):
        read_run_record(packed)


@pytest.mark.parametrize(
    "values",
    [[{}] * (MOST_EPOCHS + 1), [{"x": [[] for _ in range(9)]}], [{"x": [[[1]]]}], [{"x": {"y": 1}}]],
    ids=["many", "lists", "nested", "map"],
)
@pytest.mark.parametrize("field", ["results", "epochs"])
def test_a_record_that_takes_far_more_memory_than_bytes_is_refused(field, values):
    packed = msgspec.msgpack.encode({"program": run_record(), "ended": 1 << 20, field: values})
    with pytest.raises(ValueError, match=rf"no record of a run.*\$\.{field}"):
        read_run_record(packed)


def test_a_record_keeps_the_ranges_of_skipped_groups():
    known = ({"images": 4, "loss": None, "skipped_groups": [(0, 3), (5, 9)], "behind": [0, 2]},)
    record = RunRecord(program=run_record(), ended=1, results=known)
    assert read_run_record(packed_record(record)) == record


@pytest.mark.parametrize("part", ["terms", "result", "notes"])
def test_a_record_with_a_larger_program_than_the_map_may_have_is_refused_before_it_is_decoded(part):
    program = msgspec.structs.replace(run_record(), **{part: {"x": [[]] * (MOST_VALUE_BYTES + 1)}})
    with pytest.raises(ValueError, match=f"a part of its program is above {MOST_VALUE_BYTES} bytes"):
        read_run_record(packed_record(RunRecord(program=program)))
