"""Nodes set some fields of an epoch; the controllers set the others, and name the dealer."""

import msgspec
import pytest

from adam_async.controller.state import Invalid
from tests.adam_async.cluster_maps import Cluster, run_record, training

SKIPPED = {"skipped": 12, "skipped_groups": [[3, 5]]}
"""Two skipped groups of the ten images each that `training` has in a group."""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": "x"}, "only drain, ended and result of epoch 1"),
        ({"number": 1 << 63}, "only drain, ended and result of epoch 1"),
        ({"shares": {"0": (0, 1 << 63)}}, "only drain, ended and result of epoch 1"),
        ({"ended": True, "result": {"clock": "x"}}, "Expected `int`, got `str`"),
        ({"ended": True, "result": {"x": {}}}, "Object contains unknown field `x`"),
        ({"ended": True, "result": {"skipped": -1}}, "Expected `int` >= 0"),
        ({"ended": True, "result": {"behind": 5}}, "Expected `array`, got `int`"),
        ({"ended": True, "result": {"loss": "x"}}, "Expected `float | null`, got `str`"),
        ({"ended": True, "result": {"skipped_groups": [[3, 1]]}}, "skipped_groups are not ranges"),
        ({"ended": True, "result": {"skipped_groups": [[0, 99]]}}, "skipped_groups are not ranges"),
        ({"ended": True, "result": {"skipped_groups": [[2, 2]]}}, "skipped_groups are not ranges"),
        ({"ended": True, "result": SKIPPED | {"skipped": 21}}, "the skipped groups have at most 20"),
        ({"ended": True, "result": {"skipped": 1}}, "the skipped groups have at most 0 images"),
        ({"ended": True, "result": SKIPPED | {"behind": [0, 1, 2]}}, "behind has 3 replicas"),
        ({"ended": True, "result": SKIPPED | {"behind": [1, 1]}}, "behind has 2 replicas"),
        ({"ended": True, "result": {"behind": [1 << 20]}}, "Expected `int` <= 1048575"),
        ({"ended": True, "result": {"behind": [0] * 65537}}, "Expected `array` of length <="),
        ({"ended": True, "result": {"clock": 1 << 48}}, "Expected `int` <= 281474976710655"),
    ],
    ids=lambda each: str(each)[:80],
)
def test_nodes_change_no_field_of_an_epoch_that_the_controllers_set(change, said):
    cluster = training()
    before = cluster.map.epoch
    (event,) = cluster.set("epoch", msgspec.structs.replace(before, **change))
    assert isinstance(event, Invalid)
    assert said in event.reason
    assert cluster.map.epoch is before


def test_nodes_begin_no_epoch_of_a_run():
    cluster, record = Cluster(), training().map.epoch
    cluster.join("driver", "ps-0")
    cluster.set("run", run_record())
    (event,) = cluster.set("epoch", record)
    assert isinstance(event, Invalid)
    assert cluster.map.epoch is None


def test_no_node_names_the_dealer():
    cluster = training()
    before = cluster.map.dealer
    (event,) = cluster.set("dealer", msgspec.structs.replace(before, node="data-7"))
    assert isinstance(event, Invalid)
    assert "no key" in event.reason
    assert cluster.map.dealer is before
