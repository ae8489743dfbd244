"""Whole tensors from shards, and shards from whole tensors, for every rule."""

import numpy as np
import pytest

from adam_async.checkpoint.tensors import WholeTensors
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.rules import Adagrad, Adam, Sgd
from adam_async.parameter_server.storage import own_shards
from adam_async.run.partition import arrays_of, table_of
from adam_async.run.shard_table import shard_table
from adam_async.run.store_record import ArrayRecord

MODEL = Network(digits())
ARRAYS = arrays_of(MODEL, None)
TABLE = table_of(MODEL, shard_bytes=4 << 10)
RULES = {
    "sgd": Sgd(),
    "momentum": Sgd(momentum=0.9),
    "adagrad": Adagrad(),
    "adam": Adam(),
}


@pytest.mark.parametrize("rule", RULES)
def test_tensors_have_each_value_of_their_shards_and_of_the_state_of_their_rule(rule):
    tensors = WholeTensors(ARRAYS, TABLE, [RULES[rule]])
    shards = own_shards(TABLE.shards, [RULES[rule]])
    for start, shard in enumerate(shards):
        for array in (shard.values, *shard.rule_state.values()):
            array[:] = np.arange(len(array)) + 10_000 * start
        tensors.take(shard)
    for shard in shards:
        spec = shard.spec
        part, place = slice(spec.start, spec.stop), TABLE.by_tensor[spec.tensor].index(spec)
        np.testing.assert_array_equal(tensors.values_of(spec), shard.values)
        for name, array in shard.rule_state.items():
            whole = tensors.state[f"{name}/{spec.tensor}"].reshape(-1)
            np.testing.assert_array_equal(whole[place] if name == "steps" else whole[part], array)
    names = [f"{name}/{array.name}" for array in ARRAYS for name in shards[0].rule_state]
    assert [*tensors.state] == names


def test_values_alone_take_no_state_and_arrays_of_several_rules_have_those_of_their_own():
    arrays = (ArrayRecord("a", (3,)), ArrayRecord("b", (2, 2), "float64", rule=1))
    table, rules = shard_table(arrays), [RULES["sgd"], RULES["adam"]]
    assert {name: array.shape for name, array in WholeTensors(arrays, table, rules).state.items()} == {
        "mean/b": (2, 2),
        "square/b": (2, 2),
        "steps/b": (1,),
    }
    values = {"a": np.ones(3, np.float32), "b": np.zeros((2, 2))}
    alone = WholeTensors(arrays, table, values=values)
    assert alone.weights["b"] is values["b"]
    for shard in own_shards(table.shards, rules):
        alone.take(shard)
    assert (alone.state, values["a"].tolist()) == ({}, [0, 0, 0])


async def test_whole_tensors_give_some_of_their_shards_without_state_a_few_at_a_time():
    tensors = WholeTensors(ARRAYS, TABLE)
    wanted = TABLE.shards[1::2]
    shards = [shard async for part in tensors.shards_of(wanted) for shard in part]
    assert [shard.spec for shard in shards] == [*wanted]
    assert all(np.shares_memory(each.values, tensors.weights[each.spec.tensor]) for each in shards)
    assert not any(shard.rule_state or shard.version for shard in shards)
