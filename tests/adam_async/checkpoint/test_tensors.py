"""Whole tensors from shards, and shards from whole tensors, for every rule."""

import numpy as np
import pytest

from adam_async.checkpoint.tensors import WholeTensors
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.rules import Adagrad, Adam, Sgd
from adam_async.run.partition import arrays_of, table_of
from adam_async.run.shard_table import shard_table
from adam_async.run.store_record import ArrayRecord
from transport import RemoteProtocolError

MODEL = Network(digits())
ARRAYS = arrays_of(MODEL, None)
TABLE = table_of(MODEL, shard_bytes=4 << 10)
RULES = {
    "sgd": Sgd(),
    "momentum": Sgd(momentum=0.9),
    "adagrad": Adagrad(),
    "adam": Adam(),
}


def filled(rule):
    """Tensors in which no two numbers are equal."""
    tensors = WholeTensors(ARRAYS, TABLE, [RULES[rule]])
    at = 0
    for array in (*tensors.weights.values(), *tensors.state.values()):
        array[...] = np.arange(at, at + array.size).reshape(array.shape)
        at += array.size
    return tensors


def test_a_count_of_the_rule_has_one_entry_per_shard():
    tensors = filled("adam")
    for name, shards in TABLE.by_tensor.items():
        steps = tensors.state[f"steps/{name}"]
        assert steps.dtype == np.int64
        assert [int(tensors.cut(shard)[3][0]) for shard in shards] == steps.tolist()
    assert tensors.arrays_of(TABLE.shards[0]) == ("mean", "square", "steps")


def test_the_size_of_a_shard_is_that_of_its_weights_and_its_state():
    assert sum(filled("adagrad").bytes_of(shard) for shard in TABLE.shards) == 2 * MODEL.num_parameters * 4


def test_shards_of_another_kind_are_refused_with_the_difference():
    tensors = filled("momentum")
    cut = tensors.cut(TABLE.shards[0])
    for arrays, given, words in (
        (("mean",), cut, "the rule has arrays"),
        (("momentum",), cut[:1], "1 shards need 2 tensors, not 1"),
        (("momentum",), [cut[0][1:], cut[1]], "shard 0: expected"),
        (("momentum",), [cut[0], cut[1].astype(np.float64)], "shard 0: expected"),
    ):
        with pytest.raises(RemoteProtocolError, match=words):
            tensors.put([0], arrays, given)


def test_arrays_of_several_rules_have_those_of_their_own_and_values_alone_have_none():
    arrays = (ArrayRecord("a", (3,)), ArrayRecord("b", (2, 2), "float64", rule=1))
    table = shard_table(arrays)
    tensors = WholeTensors(arrays, table, [RULES["sgd"], RULES["adam"]])
    assert [tensors.arrays_of(shard) for shard in table.shards] == [(), ("mean", "square", "steps")]
    assert [tensors.bytes_of(shard) for shard in table.shards] == [12, 96]
    assert {name: array.shape for name, array in tensors.state.items()} == {
        "mean/b": (2, 2),
        "square/b": (2, 2),
        "steps/b": (1,),
    }
    values = {"a": np.ones(3, np.float32), "b": np.zeros((2, 2))}
    alone = WholeTensors(arrays, table, values=values)
    assert alone.weights["b"] is values["b"]
    assert [len(alone.cut(shard)) for shard in table.shards] == [1, 1]
