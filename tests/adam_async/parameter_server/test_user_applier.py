"""A rule of the user changes a shard as a whole or not at all, and the same on every copy."""

import msgspec
import numpy as np
import pytest

from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice
from adam_async.parameter_server import apply, user_applier
from adam_async.parameter_server.apply import PIECE_WORK
from adam_async.parameter_server.gradients import DeltaPart, FactorPart, PushGradients
from adam_async.parameter_server.storage import own_shards
from adam_async.parameter_server.user_applier import LEAST_VALUES, RANGE_VALUES, applier_of
from adam_async.run.ids import BucketId, ShardId
from adam_async.run.shard_table import ShardSpec
from adam_async.run.user_rules import RuleSource, record_of
from tests.adam_async.rules import MISTAKES, SAID, Means, Picky, Wrong, apply_means


def specs_of(*sizes, row=1, dtype="float32"):
    return [
        ShardSpec(
            id=ShardId(number),
            tensor=f"t{number}",
            start=0,
            stop=size,
            row_size=row,
            bucket=BucketId(0),
            dtype=dtype,
        )
        for number, size in enumerate(sizes)
    ]


class Served:
    """Shards with a rule of the user, at random values."""

    def __init__(self, rule, *sizes, row=1):
        self.specs, record = specs_of(*sizes, row=row), record_of(rule)
        self.shards = own_shards(self.specs, [record])
        for shard in self.shards:
            shard.values[:] = Dice(1).normal(shard.spec.tensor, count=shard.spec.size, dtype=np.float32)
        self.said = []
        self.applier = applier_of(
            record, self.specs, "float32", RuleSource([type(rule)]), refused=self.said.append
        )

    def push(self, *gradients, rate=0.5):
        """Apply pushes of one flat gradient each, to all shards. Returns what became of them, by shard."""
        sizes = tuple(spec.size for spec in self.specs)
        pushes = [PushGradients((DeltaPart(each, sizes, rate, finite=False),)) for each in gradients]
        return [list(each) for each in self.applier.apply_pushes(self.shards, pushes)]

    def content(self):
        return [
            (shard.values.copy(), {n: a.copy() for n, a in shard.rule_state.items()}) for shard in self.shards
        ]


def noise(number, size):
    return (Dice(2).normal(f"gradient {number}", count=size, dtype=np.float32) / 8).astype(np.float32)


def test_pushes_equal_a_loop_in_numpy():
    served = Served(Means(), 7)
    ((values, _),) = served.content()
    gradients = [noise(number, 7) for number in range(5)]
    assert served.push(*gradients) == [[True] * 5]
    wanted = apply_means(values, gradients, rate=0.5)
    np.testing.assert_array_equal([served.shards[0].values, served.shards[0].rule_state["mean"]], wanted)


def test_state_begins_at_its_first_value():
    (shard,) = Served(Means(first=3.0), 2).shards
    assert shard.rule_state["mean"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("how", MISTAKES)
def test_a_mistake_changes_nothing_on_its_shard_and_others_take_their_part(how):
    served = Served(Wrong(how=how), 5, 3)
    before = served.content()
    assert served.push(np.array([1, 1, 1, 1, 1, -1, -1, -1], np.float32)) == [[False], [True]]
    (values, state), (other, _) = served.content()
    np.testing.assert_array_equal(values, before[0][0])
    np.testing.assert_array_equal(state["kept"], before[0][1]["kept"])
    np.testing.assert_array_equal(other, before[1][0] + np.float32(0.5))
    assert served.said == [f"rule tests.adam_async.rules:Wrong refused a push on t0: {SAID[how]}"]


def test_a_large_shard_changes_only_once_its_last_range_has_passed(monkeypatch):
    monkeypatch.setattr(user_applier, "RANGE_VALUES", 4)
    served = Served(Picky(), 10)
    before = served.content()
    bad = noise(0, 10)
    bad[9] = 1.5
    assert served.push(bad) == [[False]]
    np.testing.assert_equal(served.content(), before)
    assert served.push(bad, noise(1, 10)) == [[False, True]]
    ((values, _),) = served.content()
    np.testing.assert_array_equal(values, apply_means(before[0][0], [noise(1, 10)], rate=0.5)[0])


def test_a_refused_push_leaves_those_before_and_behind_it():
    served, other = Served(Picky(), 6), Served(Picky(), 6)
    bad = np.full(6, 5.0, np.float32)
    assert served.push(noise(0, 6), bad, noise(1, 6)) == [[True, False, True]]
    assert other.push(noise(0, 6), noise(1, 6)) == [[True, True]]
    np.testing.assert_equal(served.content(), other.content())
    assert "step raised ValueError('too large')" in served.said[0]


def test_a_gradient_that_is_not_finite_does_not_reach_the_rule():
    served = Served(Wrong(how="raises"), 2)
    assert served.push(np.array([np.nan, 1], np.float32)) == [[False]]
    assert served.said == []


def test_factors_and_scaled_rates_reach_the_rule_as_products():
    served, dense = Served(Means(), 6, row=3), Served(Means(), 6, row=3)
    x, errors = noise("x", 6).reshape(3, 2), noise("e", 4).reshape(2, 2)
    part = FactorPart(x, errors, (2,), 0.5, np.inf)
    assert served.applier.apply_pushes(served.shards, [PushGradients((part,))], [(0.25,)]) == [[True]]
    assert dense.push((errors @ x.T).reshape(-1), rate=0.25) == [[True]]
    np.testing.assert_equal(served.content(), dense.content())


def test_a_sum_of_bsp_is_applied_once_or_not_at_all():
    served, dense = Served(Picky(), 4, 2), Served(Picky(), 4, 2)
    pushes = [PushGradients((DeltaPart(noise(n, 6), (4, 2), 0.5, finite=True),)) for n in range(2)]
    assert served.applier.apply_sum(served.shards, pushes, scale=0.5, rate=0.5) == [True, True]
    dense.push((noise(0, 6) + noise(1, 6)) * np.float32(0.5))
    np.testing.assert_equal(served.content(), dense.content())
    large = PushGradients((DeltaPart(np.array([9, 0, 0, 0, 0, 0], np.float32), (4, 2), 0.5, finite=True),))
    assert served.applier.apply_sum(served.shards, [large], scale=1.0, rate=0.5) == [False, True]


def test_the_cuts_depend_on_the_shard_alone_so_work_in_pieces_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(user_applier, "RANGE_VALUES", 3)
    whole, pieces = Served(Means(), 10, 4), Served(Means(), 10, 4)
    gradients = [noise(number, 14) for number in range(3)]
    whole.push(*gradients)
    monkeypatch.setattr(apply, "PIECE_WORK", 5)
    sizes = (10, 4)
    pushes = [PushGradients((DeltaPart(each, sizes, 0.5, finite=True),)) for each in gradients]
    work = pieces.applier.work_on(pieces.shards, pushes)
    while not work.done:
        work.run(1)
    np.testing.assert_equal(pieces.content(), whole.content())


def test_each_call_of_the_rule_counts_as_a_whole_piece_of_the_loop():
    served = Served(Means(), 3 * RANGE_VALUES, 2)
    sizes = tuple(spec.size for spec in served.specs)
    gradient = np.zeros(sum(sizes), np.float32)
    work = served.applier.work_on(
        served.shards, [PushGradients((DeltaPart(gradient, sizes, 0.5, finite=True),))]
    )
    spent = []
    while not work.done:
        spent.append(work.run(1))
    assert spent[:3] == [PIECE_WORK] * 3
    assert LEAST_VALUES * PIECE_WORK // RANGE_VALUES in spent


def test_a_rule_that_is_not_allowed_has_no_applier():
    with pytest.raises(ConfigError, match=r"--allow-rule tests\.adam_async\.rules:Means"):
        applier_of(record_of(Means()), specs_of(2), "float32", RuleSource())
    forged = msgspec.structs.replace(record_of(Means()), digest="0" * 64)
    with pytest.raises(ConfigError, match="instead of 000000000000"):
        applier_of(forged, specs_of(2), "float32", RuleSource([Means]))


def test_assigned_values_need_no_rule():
    served = Served(Wrong(how="raises"), 3)
    values = PushGradients((DeltaPart(np.ones(3, np.float32), (3,), 1.0, finite=True),))
    work = served.applier.work_on_assignment(served.shards, values)
    work.run()
    assert served.shards[0].values.tolist() == [1, 1, 1]
