"""Batches equal pushes applied one after the other, and nothing that is not finite reaches a value.

Letters: K images, I inputs (one row), R rows of the shard.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.dice import Dice
from adam_async.ids import BucketId, ShardId
from adam_async.model.rules import Adagrad, Adam, Sgd
from adam_async.parameter_server import apply as module
from adam_async.parameter_server.apply import (
    Applier,
    Delta,
    DeltaPart,
    FactorPart,
    Factors,
    PushGradients,
    is_finite,
    product_bound,
    squares,
)
from adam_async.parameter_server.shard import Shard
from adam_async.placement import ShardSpec

RULES = [
    Sgd(),
    Sgd(momentum=0.9),
    Sgd(weight_decay=0.1),
    Sgd(momentum=0.5, weight_decay=0.1),
    Adagrad(),
    Adam(),
]
MAX32 = float(np.finfo(np.float32).max)


def spec_of(size, row, number=0):
    return ShardSpec(id=ShardId(number), tensor="t", start=0, stop=size, row_size=row, bucket=BucketId(0))


def new_shard(rule, size, row, dtype=np.float64, number=0):
    values = Dice(2).normal("values", count=size, dtype=dtype)
    return Shard(spec=spec_of(size, row, number), values=values, rule_state=rule.new_state((size,), dtype))


def state_of(shard):
    return [shard.values, *(shard.rule_state[name] for name in sorted(shard.rule_state))]


def assert_same_bits(one, other):
    for a, b in zip(state_of(one), state_of(other), strict=True):
        assert a.tobytes() == b.tobytes()


def sixteenths(purpose, *shape, dtype=np.float64):
    """Values whose products and sums are exact in any order, so that bits can be compared."""
    dice = Dice(3).normal(purpose, count=int(np.prod(shape)), dtype=np.float64)
    return (np.round(dice * 4) / 16).reshape(shape).astype(dtype)


def gradient_of(kind, number, rows, row, rate):
    if kind == "delta":
        return Delta(sixteenths(f"d{number}", rows * row), rate)
    x_IK, errors_RK = sixteenths(f"x{number}", row, 3), sixteenths(f"e{number}", rows, 3)
    bound = product_bound(x_IK, errors_RK) if kind == "bounded" else np.inf
    return Factors(x_IK, errors_RK, rate, bound)


kinds = st.lists(st.sampled_from(["delta", "factors", "bounded"]), min_size=1, max_size=5)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(kinds=kinds, rows=st.integers(1, 9), row=st.integers(1, 5), block=st.integers(1, 12))
def test_a_batch_is_bit_for_bit_its_pushes_in_order(rule, kinds, rows, row, block):
    size = rows * row
    batched, single = new_shard(rule, size, row), new_shard(rule, size, row)
    gradients = [gradient_of(kind, n, rows, row, 0.5 ** (n + 1)) for n, kind in enumerate(kinds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        patch.setattr(module, "PRODUCT_ROWS", 1 + block % 3)
        applier = Applier(rule, [batched.spec], np.float64, join=False)
        assert applier.apply(batched, gradients) == [True] * len(kinds)
        for gradient in gradients:
            assert applier.apply(single, [gradient]) == [True]
    assert_same_bits(batched, single)


@pytest.mark.parametrize("rates", [(0.5, 0.5, 0.5), (0.5, 0.25, 2.0)], ids=["one-rate", "rates"])
def test_joined_factors_under_plain_sgd_equal_their_sum(rates):
    joined, single = (new_shard(Sgd(), 60, 6, np.float32) for _ in range(2))
    gradients = []
    for number, rate in enumerate(rates):
        x_IK = Dice(1).normal(f"x{number}", count=12, dtype=np.float32).reshape(6, 2)
        errors_RK = Dice(1).normal(f"e{number}", count=20, dtype=np.float32).reshape(10, 2)
        gradients.append(Factors(x_IK, errors_RK, rate, product_bound(x_IK, errors_RK)))
    applier = Applier(Sgd(), [joined.spec], np.float32)
    assert applier._joined(gradients) is not None
    applier.apply(joined, gradients)
    for gradient in gradients:
        applier.apply(single, [gradient])
    np.testing.assert_allclose(joined.values, single.values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("protocols", [("delta",), ("factors",), ("delta", "factors"), ("factors", "delta")])
def test_whole_pushes_equal_their_shards_one_by_one(rule, protocols):
    row, rows = 4, (3, 2)
    pushes = []
    for number, _ in enumerate(range(3)):
        parts = []
        for place, protocol in enumerate(protocols):
            if protocol == "delta":
                flat = sixteenths(f"d{number}{place}", sum(rows) * row)
                sizes = tuple(count * row for count in rows)
                parts.append(DeltaPart(flat, sizes, 0.5, finite=True))
            else:
                x_IK = sixteenths(f"x{number}{place}", row, 2)
                errors_RK = sixteenths(f"e{number}{place}", sum(rows), 2)
                parts.append(FactorPart(x_IK, errors_RK, rows, 0.5, product_bound(x_IK, errors_RK)))
        pushes.append(PushGradients(tuple(parts)))
    sizes = [count * row for _ in protocols for count in rows]
    together, apart = (
        [new_shard(rule, size, row, number=number) for number, size in enumerate(sizes)] for _ in range(2)
    )
    applier = Applier(rule, [shard.spec for shard in together], np.float64, join=False)
    finite = applier.apply_pushes(together, pushes)
    assert [list(each) for each in finite] == [[True] * 3] * len(sizes)
    for push in pushes:
        for shard, gradient in zip(apart, push.each(), strict=True):
            applier.apply(shard, [gradient])
    for one, other in zip(together, apart, strict=True):
        assert_same_bits(one, other)


def bad_delta(value):
    values = np.ones(6, np.float32)
    values[4] = value
    return Delta(values, 0.5)


def factors_of(x, error, K=1):
    x_IK, errors_RK = np.full((3, K), x, np.float32), np.full((2, K), error, np.float32)
    return Factors(x_IK, errors_RK, 0.5, product_bound(x_IK, errors_RK))


@pytest.mark.parametrize(
    "bad",
    [
        bad_delta(np.nan),
        bad_delta(np.inf),
        bad_delta(-np.inf),
        factors_of(np.nan, 1.0),
        factors_of(1.0, np.inf),
        factors_of(0.0, np.inf),  # inf times nothing is no number
        factors_of(1e30, 1e30),  # each finite, the product is not
        factors_of(1.5e19, 1.5e19, K=2),  # each product finite, the sum of two is not
    ],
    ids=["nan", "inf", "-inf", "nan-factor", "inf-factor", "zero-inf", "product", "jointly"],
)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_what_is_not_finite_is_refused_alone_and_touches_nothing(rule, bad):
    shard, expected = (new_shard(rule, 6, 3, np.float32) for _ in range(2))
    applier = Applier(rule, [shard.spec], np.float32)
    assert applier.apply(shard, [bad]) == [False]
    assert_same_bits(shard, expected)
    good = [Delta(np.full(6, 0.5, np.float32), 0.5), factors_of(0.5, 0.25)]
    assert applier.apply(shard, [good[0], bad, good[1]]) == [True, False, True]
    applier.apply(expected, good)
    assert_same_bits(shard, expected)


def test_factor_pushes_that_overflow_only_together_are_applied_one_by_one():
    shard, expected = (new_shard(Sgd(), 6, 3, np.float32) for _ in range(2))
    up, down = factors_of(1.2e19, 1.2e19), factors_of(1.2e19, -1.2e19)
    applier = Applier(Sgd(), [shard.spec], np.float32)
    assert applier._joined([up, up, down, down]) is None
    assert applier.apply(shard, [up, down, up, down]) == [True] * 4
    for gradient in (up, down, up, down):
        applier.apply(expected, [gradient])
    assert np.isfinite(shard.values).all()
    assert_same_bits(shard, expected)


@pytest.mark.parametrize("value", [MAX32, -MAX32, 1e30])
def test_large_finite_values_are_not_taken_for_infinite_ones(value):
    values = np.full(6, value, np.float32)
    assert squares(values) == np.inf
    assert is_finite(values)
    shard = new_shard(Sgd(), 6, 3, np.float32)
    assert Applier(Sgd(), [shard.spec], np.float32).apply(shard, [Delta(values, 1e-38)]) == [True]
    assert np.isfinite(shard.values).all()


@pytest.mark.parametrize("block", [1, 3, 7, 1000])
def test_the_step_count_of_adam_advances_once_per_push_whatever_the_blocks(monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK", block)
    shard = new_shard(Adam(), 20, 4)
    applier = Applier(Adam(), [shard.spec], np.float64)
    gradients = [gradient_of("delta", n, 5, 4, 0.1) for n in range(3)]
    applier.apply(shard, gradients)
    assert shard.rule_state["steps"].tolist() == [3]
    applier.apply(shard, [Delta(np.full(20, np.nan), 0.1), gradients[0]])
    assert shard.rule_state["steps"].tolist() == [4]


def test_a_shard_that_is_a_piece_of_a_row_takes_deltas():
    piece = ShardSpec(id=ShardId(0), tensor="t", start=10, stop=17, row_size=30, bucket=BucketId(0))
    assert not piece.whole_rows
    shard = Shard(spec=piece, values=np.zeros(7), rule_state={})
    applier = Applier(Sgd(), [piece], np.float64)
    applier.apply(shard, [Delta(np.ones(7), 1.0), Delta(np.ones(7), 2.0)])
    np.testing.assert_array_equal(shard.values, np.full(7, -3.0))


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_the_look_at_finiteness_is_that_of_every_value(values):
    array = np.array(values, np.float32)
    assert is_finite(array) == bool(np.isfinite(array).all())


@given(
    x=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=4, max_size=4),
    e=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=4, max_size=4),
)
def test_no_element_of_a_product_is_beyond_its_bound(x, e):
    x_IK, errors_RK = np.array(x, np.float32).reshape(2, 2), np.array(e, np.float32).reshape(2, 2)
    product = errors_RK.astype(np.float64) @ x_IK.astype(np.float64).T
    bound = product_bound(x_IK, errors_RK)
    # Squares of tiny values vanish in float32: the bound is short by less than the smallest normal there.
    assert np.abs(product).max() <= bound * (1 + 1e-5) + 1e-2 * np.sqrt(np.finfo(np.float32).tiny) * 1e18
