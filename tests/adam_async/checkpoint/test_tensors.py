"""Whole tensors from shards, and shards from whole tensors, for every rule."""

import numpy as np
import pytest

from adam_async.checkpoint.tensors import RecutShards, WholeTensors
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
RULES = {"sgd": Sgd(), "momentum": Sgd(momentum=0.9), "adagrad": Adagrad(), "adam": Adam()}


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


class Shards:
    """Shards with random values and state of the rule, and the number of each one that was read, in order."""

    def __init__(self, table, rules):
        self.table, self.read = table, []
        self._shards = own_shards(table.shards, rules)
        random = np.random.default_rng(0)
        for shard in self._shards:
            for array in (shard.values, *shard.rule_state.values()):
                array[:] = random.integers(0, 100, len(array))

    async def shards_of(self, specs):
        for spec in specs:
            self.read.append(int(spec.id))
            yield [self._shards[spec.id]]

    def whole(self, arrays, rules):
        tensors = WholeTensors(arrays, self.table, rules)
        for shard in self._shards:
            tensors.take(shard)
        return tensors


CUT_ARRAYS = (
    ArrayRecord("a", (30, 11)),
    ArrayRecord("b", (1, 100), "float64", rule=1),
    ArrayRecord("none", (0, 3)),
    ArrayRecord("c", (50,), rule=1),
    ArrayRecord("d", (), rule=1),
)


@pytest.mark.parametrize("before", [60, 100, 1 << 20])
@pytest.mark.parametrize("after", [60, 100, 1 << 20])
async def test_shards_that_are_cut_anew_have_the_values_and_state_of_those_before(before, after):
    rules = [RULES["momentum"], RULES["adam"]]
    old = Shards(shard_table(CUT_ARRAYS, shard_bytes=before), rules)
    arrays = CUT_ARRAYS[::-1]
    table = shard_table(arrays, shard_bytes=after)
    recut = WholeTensors(arrays, table, rules)
    async for shards in RecutShards(old, table).shards_of(table.shards):
        for shard in shards:
            assert {*shard.rule_state} == {*rules[shard.spec.rule].new_state((1,), np.dtype("f4"))}
            recut.take(shard)
    whole = old.whole(CUT_ARRAYS, rules)
    for mine, theirs in ((recut.weights, whole.weights), (recut.state, whole.state)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if not name.startswith("steps"):
                np.testing.assert_array_equal(mine[name], theirs[name], strict=True)
    for name in "bcd":
        for at, spec in enumerate(table.by_tensor[name]):
            counts = [
                whole.state[f"steps/{name}"][each]
                for each, origin in enumerate(old.table.by_tensor[name])
                if origin.start < spec.stop and spec.start < origin.stop
            ]
            assert recut.state[f"steps/{name}"][at] == min(counts)


async def test_a_large_shard_is_read_once_although_many_pieces_are_cut_from_it():
    arrays = (ArrayRecord("a", (1 << 20,)), ArrayRecord("b", (1 << 10,)))
    old = Shards(shard_table(arrays, shard_bytes=4 << 20), [RULES["sgd"]])
    table = shard_table(arrays, shard_bytes=64 << 10)
    pieces = [piece async for piece in RecutShards(old, table).shards_of(table.shards)]
    assert len(pieces) > 4
    assert old.read == [0, 1]
