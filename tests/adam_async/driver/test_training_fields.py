"""Nodes set some fields of an epoch and of the leases of a run; the controllers set the others."""

import msgspec
import pytest

from adam_async.controller.state import Invalid
from tests.adam_async.cluster_maps import Cluster, run_record, training

FIELDS = {"epoch": "epoch", "lending": "ledger_record"}
"""Field of the map by the key that sets it."""

SKIPPED = {"skipped": 12, "skipped_groups": [[3, 5]]}
"""Two skipped groups of the ten images each that `training` has in a group."""


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("epoch", {"run": "x"}, "only drain, ended and result of epoch 1"),
        ("epoch", {"number": 1 << 63}, "only drain, ended and result of epoch 1"),
        ("epoch", {"shares": {"0": (0, 1 << 63)}}, "only drain, ended and result of epoch 1"),
        ("epoch", {"ended": True, "result": {"clock": "x"}}, "result: Expected `int`, got `str`"),
        ("epoch", {"ended": True, "result": {"skipped": -1}}, "result: Expected `int` >= 0"),
        ("epoch", {"ended": True, "result": {"behind": 5}}, "result: Expected `array`, got `int`"),
        ("epoch", {"ended": True, "result": {"loss": "x"}}, "result: Expected `float | null`, got `str`"),
        ("epoch", {"ended": True, "result": {"skipped_groups": [[3, 1]]}}, "skipped_groups are not ranges"),
        ("epoch", {"ended": True, "result": {"skipped_groups": [[0, 99]]}}, "skipped_groups are not ranges"),
        ("epoch", {"ended": True, "result": {"skipped_groups": [[2, 2]]}}, "skipped_groups are not ranges"),
        ("epoch", {"ended": True, "result": SKIPPED | {"skipped": 21}}, "the skipped groups have at most 20"),
        ("epoch", {"ended": True, "result": {"skipped": 1}}, "the skipped groups have at most 0 images"),
        ("epoch", {"ended": True, "result": SKIPPED | {"behind": [0, 1, 2]}}, "behind has 3 replicas"),
        ("epoch", {"ended": True, "result": SKIPPED | {"behind": [1, 1]}}, "behind has 2 replicas"),
        ("epoch", {"ended": True, "result": {"behind": [1 << 20]}}, "result: Expected `int` <= 1048575"),
        (
            "epoch",
            {"ended": True, "result": {"behind": [0] * 65537}},
            "result: Expected `array` of length <=",
        ),
        ("epoch", {"ended": True, "result": {"clock": 1 << 48}}, "result: Expected `int` <= 281474976710655"),
        ("lending", {"run": "x"}, "only the ledger replicas of term 1"),
        ("lending", {"term": 1 << 63}, "only the ledger replicas of term 1"),
    ],
    ids=str,
)
def test_nodes_change_no_field_of_an_epoch_or_of_leases_that_the_controllers_set(key, change, said):
    cluster = training()
    before = getattr(cluster.map, FIELDS[key])
    (event,) = cluster.set(key, msgspec.structs.replace(before, **change))
    assert isinstance(event, Invalid)
    assert said in event.reason
    assert getattr(cluster.map, FIELDS[key]) is before


@pytest.mark.parametrize("key", ["epoch", "lending"])
def test_nodes_begin_no_epoch_and_no_leases_of_a_run(key):
    cluster, record = Cluster(), getattr(training().map, FIELDS[key])
    cluster.join("driver", "ps-0")
    cluster.set("run", run_record())
    (event,) = cluster.set(key, record)
    assert isinstance(event, Invalid)
    assert getattr(cluster.map, FIELDS[key]) is None
