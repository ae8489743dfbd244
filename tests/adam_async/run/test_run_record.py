"""The record of a run, as a server collects it from the versions of the cluster map."""

import math

import msgspec
import pytest

from adam_async.errors import RunFailed
from adam_async.messages.body import MOST_VALUE_BYTES
from adam_async.messages.saved_shards import MOST_RECORD_BYTES
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.counts import RESULTS_KEPT, EpochCounts, Evaluation
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
    return tuple(EpochCounts(images=10 * epoch) for epoch in range(first, last + 1))


def epochs(first, last):
    return tuple(Evaluation(epoch, 0.5) for epoch in range(first, last + 1))


def at(record, ended, *, evaluated=(), changed=1, **fields):
    """The record after a version of the map."""
    run = msgspec.structs.replace(record.program, evaluated=evaluated, changed=changed)
    first = max(ended - RESULTS_KEPT, 0) + 1
    cluster = ClusterMap(run=run, ended=ended, results=results(first, ended), **fields)
    return followed(record, cluster, is_whole=False)


def record_of(ended, *, first=1, id="run-1", **fields):
    known = {"results": results(first, ended), "evaluated": epochs(first, ended), **fields}
    return RunRecord(program=run_record(id), ended=ended, **known)


def test_a_record_has_all_results_and_evaluations_although_the_map_has_the_newest_only():
    record = begun(run_record(), ())
    for ended in range(1, 101):
        record = at(record, ended, evaluated=epochs(max(ended - 2, 1), ended), changed=ended)
    assert (record.ended, record.results, record.evaluated) == (100, results(1, 100), epochs(1, 100))
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
    run = run_record("run-2", resumed=ResumeRecord(epoch=6, clock=0, results=results(5, 5), runs=("run-1",)))
    record = begun(run, [record_of(9, id="another"), record_of(7, is_whole=True)])
    assert (record.ended, record.results, record.evaluated) == (5, results(1, 5), epochs(1, 5))
    assert not record.is_whole
    assert begun(run, []) == RunRecord(program=run, ended=5)


def test_of_several_records_the_newest_counts_with_the_results_of_all():
    newer, older = record_of(8, first=7), record_of(6, is_whole=True)
    assert newest([]) is None
    merged = newest([newer, record_of(3, first=2), older])
    assert merged == record_of(8, is_whole=True)
    assert newest([newer, record_of(5)]).results == newer.results, "a gap"


def test_the_oldest_results_of_a_record_that_is_too_long_go():
    ranges = tuple((2 * number, 2 * number + 1) for number in range(1 << 18))
    long = record_of(4, results=tuple(EpochCounts(epoch, skipped_groups=ranges) for epoch in range(1, 5)))
    record = at(long, 5)
    assert len(packed_record(record)) <= MOST_RECORD_BYTES
    assert record.results[-1] == EpochCounts(images=50)
    assert record.ended == 5


def packed(**fields):
    return msgspec.msgpack.encode({"program": run_record(), "ended": 1, **fields})


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x80",
        b"\xc1" * 9,
        packed_record(3),
        packed(evaluated=[{}]),
        packed(evaluated=[{"epoch": 0, "test_accuracy": 0.5}]),
        packed(evaluated=[{"epoch": 1, "test_accuracy": 1.5}]),
        packed(evaluated=[{"epoch": 1, "test_accuracy": 0.5, "validation_accuracy": -0.5}]),
        packed(results=[{"skipped_groups": 3}]),
        packed(results=[{"skipped": [1]}]),
        packed(results=[{"behind": True}]),
        packed(results=[{"skipped_groups": [[1]]}]),
        packed(results=[{"text": "x"}]),
        packed(results=[{}] * (MOST_EPOCHS + 1)),
        # The JSON text of the cluster map has no such number, so no dealer could end the next epoch.
        packed(train_s=math.inf),
        packed(results=[{"train_s": math.inf}]),
        packed(results=[{"loss": -math.inf}]),
        packed(results=[{"loss": math.nan}]),
    ],
)
def test_bytes_that_are_no_record_are_named(packed):
    with pytest.raises(ValueError, match="it is no record of a run"):
        read_run_record(packed)


def test_a_record_keeps_the_ranges_of_skipped_groups():
    known = (EpochCounts(images=4, skipped_groups=((0, 3), (5, 9)), behind=(0, 2)),)
    record = RunRecord(program=run_record(), ended=1, results=known)
    assert read_run_record(packed_record(record)) == record


def test_a_record_of_an_earlier_epoch_has_its_epochs_only():
    record = record_of(8, first=3)
    assert record.until(5) == record_of(5, first=3)
    assert (record.until(1).results, record.until(1).evaluated) == ((), ())
    assert record.until(9) == record
    assert record.result(8) == EpochCounts(images=80)


def test_a_lost_result_is_an_error_and_not_another_one():
    record = at(at(begun(run_record(), ()), 2), 90)
    with pytest.raises(RunFailed, match=r"epoch 3 ended while .* from epoch 59 on only: resume from"):
        record.result(3)


def test_a_record_with_larger_terms_than_the_map_may_have_is_refused_before_it_is_decoded():
    program = msgspec.structs.replace(run_record(), terms={"x": [[]] * (MOST_VALUE_BYTES + 1)})
    with pytest.raises(ValueError, match=f"the terms of its program are above {MOST_VALUE_BYTES} bytes"):
        read_run_record(packed_record(RunRecord(program=program)))
