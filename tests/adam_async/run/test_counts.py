"""A driver checks the counts that a role reports before it calculates with them."""

import dataclasses
import json

import msgspec
import numpy as np
import pytest

from adam_async.controller.consensus.membership import identity
from adam_async.data_server.epoch import EpochOrders
from adam_async.messages import Statistics, pack, read_text_tensor
from adam_async.messages.body import MOST_STATISTICS_BYTES
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import must_train_all
from adam_async.run.counts import (
    RESULTS_KEPT,
    ROLES,
    EpochCounts,
    Evaluation,
    newest_and_best,
    skipped_groups,
)
from adam_async.run.training_program import ResumeRecord
from dataflow import EngineStatistics
from dataflow import PoolStatistics as ComputePoolStatistics
from tests.adam_async.role_counts import counts_of
from transport import PoolStatistics as BufferPoolStatistics
from transport import RemoteProtocolError
from transport.config import MOST_NODE_BYTES

ROW = {
    "from": "a",
    "to": "b",
    "type": "Push",
    "messages": 1,
    "payload_bytes": 1,
    "frame_bytes": 2,
    "more": "x",
}


DISK = {"updates": 1, "writes": 1, "bytes": 1, "rounds": 1, "syncs": 1, "disk_bytes": 1, "period_s": 1.0}
DISK |= {"amplification": 1.0, "age_s": None, "as_of": None, "full": False}


def of(kind, **values):
    """The counts of a record of numbers, all 1 but some."""
    return {field.name: 1 for field in dataclasses.fields(kind)} | values


def read(role: str, values: dict[str, object]) -> object:
    text = np.frombuffer(json.dumps({"traffic": [ROW], **values}).encode(), np.uint8)
    message = pack(Statistics(node="n", role=role), [text])
    return read_text_tensor(message, ROLES[role], MOST_STATISTICS_BYTES)


@pytest.mark.parametrize(
    ("role", "values"),
    [
        ("ps", {"staleness": {"x": 1}}),
        ("ps", {"staleness": [1]}),
        ("ps", {"refused": 1.5}),
        ("ps", {"shards": -1}),
        ("ps", {"versions": 3}),
        ("ps", {"versions": {"0": -1}}),
        ("ps", {"staleness_by_tensor": []}),
        ("ps", {"staleness_by_tensor": {"w": {"x": 1}}}),
        ("ps", {"clients": {"0": {"staleness": {"9" * 5000: 1}}}}),
        ("ps", {"clocks": {"0": {"0": "much"}}}),
        ("ps", {"clients": {"9" * 5000: {}}}),
        ("ps", {"staleness_by_tensor": {"9" * 5000: {"1": 1}}}),
        ("ps", {"staleness": {"1\n": 1}}),
        ("ps", {"waiting_for": [10**400]}),
        ("ps", {"waiting_for": [-1]}),
        ("ps", {"disk": DISK | {"amplification": -1e308}}),
        ("ps", {"disk": DISK | {"as_of": 1e308}}),
        ("worker", {"pool": of(ComputePoolStatistics, threads=10**400)}),
        ("worker", {"pool": of(ComputePoolStatistics, threads=-1)}),
        ("worker", {"pool": of(ComputePoolStatistics, busy_s=1e308)}),
        ("worker", {"engine": of(EngineStatistics, live=1 << 53)}),
        ("worker", {"buffers": of(BufferPoolStatistics, free_bytes=-1)}),
        ("worker", {"cpus": [-1]}),
        ("worker", {"cpus": [10**30]}),
        ("data", {"transforms": {"late_answers": 1, "pool": of(ComputePoolStatistics, threads=-1)}}),
        ("worker", {"traffic": 5}),
        ("worker", {"traffic": [{"payload_bytes": 1}]}),
        ("worker", {"host": None}),
        ("worker", {"host": "m" * 161}),
        ("worker", {"pid": 1 << 53}),
        ("worker", {"peak_rss_mb": 1e300}),
        ("worker", {"age_s": -1.0}),
        ("worker", {"parameters": {}}),
        ("worker", {"protocols": [1]}),
        ("worker", {"data": {"groups": "many", "blocked_fetches": 1, "blocked_s": 1.0}}),
        ("worker", {"data": {"groups": 1, "blocked_fetches": 1, "blocked_s": None}}),
        ("worker", {"clock_wait_s": "1"}),
        ("worker", {"kernels": "numpy"}),
        ("worker", {"kernels": {}}),
        ("worker", {"kernels": {"set": "numpy", "compiled": "3", "of": 3, "numpy_groups": 0}}),
        ("data", {"term": "1"}),
        ("data", {"images": "1"}),
        ("data", {"cache": 1}),
        ("data", {"cache": {"resident_images": 1, "resident_bytes": 1, "budget_bytes": "all"}}),
        ("controller", {"term": "x"}),
        ("controller", {"voters": 7}),
    ],
)
def test_counts_of_another_type_or_beyond_their_bounds_are_refused(
    role: str, values: dict[str, object]
) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed text beside Statistics"):
        read(role, values)


@pytest.mark.parametrize("role", ROLES)
def test_the_counts_of_every_role_read_back_as_they_were(role: str) -> None:
    counts = counts_of(role)
    assert read(role, msgspec.to_builtins(counts)) == counts


def test_a_controller_with_the_longest_name_reports_its_group() -> None:
    voter = identity("n" * MOST_NODE_BYTES, (1 << 64) - 1)
    counts = counts_of("controller", voters=[voter], learners=[voter])
    assert read("controller", msgspec.to_builtins(counts)) == counts


def test_a_worker_that_never_trained_has_waited_for_nothing() -> None:
    assert counts_of("worker", parameters=None, data=None).waited_s == (0.0, 0.0, 0.0)


def test_all_kinds_of_waits_of_a_worker_are_read() -> None:
    pushes, fetches = {"admission_wait_s": 0.5}, {"blocked_s": 0.25}
    assert counts_of("worker", parameters=pushes, data=fetches, clock_wait_s=1.5).waited_s == (0.5, 0.25, 1.5)


def test_the_map_keeps_the_newest_evaluations_and_the_best_one_before():
    evaluations = tuple(Evaluation(number, 0.5, 0.9 if number == 3 else 0.1) for number in range(1, 101))
    kept = newest_and_best(evaluations)
    assert [each.epoch for each in kept] == [3, *range(101 - RESULTS_KEPT, 101)]
    assert newest_and_best(kept) == kept
    without = tuple(Evaluation(number, 0.5) for number in range(1, 101))
    assert newest_and_best(without) == without[-RESULTS_KEPT:]


def test_runs_that_go_on_with_each_other_find_the_order_of_each_epoch_from_few_results():
    def orders():
        return EpochOrders(Dice(4), num_images=50, images_per_group=4)

    whole, kept, before, in_map = orders(), (), (), ()
    for epoch in range(1, 4 * RESULTS_KEPT):
        resumed = ResumeRecord(epoch=epoch, clock=0, results=kept).without_old_results()
        assert min(epoch - 1, 1) <= len(resumed.results) <= RESULTS_KEPT
        order = whole.order(epoch, skipped_groups(kept))
        first = epoch - len(resumed.results)
        made = orders().order(epoch, skipped_groups(resumed.results), first=first)
        np.testing.assert_array_equal(made.indices, order.indices)
        assert made.carried == order.carried
        if epoch % 20 == 0:  # another run goes on here, and the map begins anew
            before, in_map = resumed.results, ()
        trains_all = must_train_all((*before, *in_map))
        result = EpochCounts(skipped_groups=() if trains_all else ((epoch % 5, epoch % 5 + 2),))
        kept, in_map = (*kept, result), (*in_map, result)[-RESULTS_KEPT:]
    trained_all = [number for number, result in enumerate(kept, 1) if not result.skipped_groups]
    assert trained_all == [RESULTS_KEPT, 2 * RESULTS_KEPT, 3 * RESULTS_KEPT]
