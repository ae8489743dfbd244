"""Batches equal pushes applied one after the other, and nothing that is not finite reaches a value.

Letters: K images, I inputs (one row), R rows of the shard.
"""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.model import rule_batches
from adam_async.model.keyed_random import Dice
from adam_async.model.rules import Adagrad, Adam, AdamW, Sgd, new_scratch
from adam_async.parameter_server import apply as module
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.gradients import (
    DeltaPart,
    FactorPart,
    PushGradients,
    is_finite,
    product_bound,
    squares,
)
from adam_async.parameter_server.shard import Shard
from adam_async.run.ids import BucketId, ShardId
from adam_async.run.shard_table import ShardSpec

RULES = [
    Sgd(),
    Sgd(momentum=0.9),
    Sgd(weight_decay=0.1),
    Sgd(momentum=0.5, weight_decay=0.1),
    Adagrad(),
    Adam(),
    AdamW(weight_decay=0.1),
    Sgd(momentum=0.9, nesterov=True),
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


def delta_of(values, rate):
    return DeltaPart(values, (len(values),), rate, finite=False)


def gradient_of(kind, number, rows, row, rate):
    if kind == "delta":
        return delta_of(sixteenths(f"d{number}", rows * row), rate)
    x_IK, errors_RK = sixteenths(f"x{number}", row, 3), sixteenths(f"e{number}", rows, 3)
    bound = product_bound(x_IK, errors_RK) if kind == "bounded" else np.inf
    return FactorPart(x_IK, errors_RK, (rows,), rate, bound)


kinds = st.lists(st.sampled_from(["delta", "factors", "bounded"]), min_size=1, max_size=5)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(kinds=kinds, rows=st.integers(1, 9), row=st.integers(1, 5), block=st.integers(1, 12))
def test_a_batch_is_bit_for_bit_its_pushes_in_order(rule, kinds, rows, row, block):
    size = rows * row
    batched, single = new_shard(rule, size, row), new_shard(rule, size, row)
    gradients = [gradient_of(kind, n, rows, row, 0.5 ** (n + 1)) for n, kind in enumerate(kinds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule_batches, "BLOCK", block)
        patch.setattr(module, "PIECE_WORK", 1 + block % 3)
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
        gradients.append(FactorPart(x_IK, errors_RK, (10,), rate, product_bound(x_IK, errors_RK)))
    applier = Applier(Sgd(), [joined.spec], np.float32)
    assert applier._can_join(gradients, len(rates))
    applier.apply(joined, gradients)
    for gradient in gradients:
        applier.apply(single, [gradient])
    np.testing.assert_allclose(joined.values, single.values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rates", [(0.5, 0.5, 0.5), (0.3, 0.2, 2.0)], ids=["one-rate", "rates"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_factors_of_many_images_are_not_joined_and_have_the_bits_of_sequential_application(rule, rates):
    batched, single = (new_shard(rule, 60, 6, np.float32) for _ in range(2))
    images, gradients = module.JOINED_IMAGES + 1, []
    for number, rate in enumerate(rates):
        x_IK = Dice(1).normal(f"x{number}", count=6 * images, dtype=np.float32).reshape(6, images)
        errors_RK = Dice(1).normal(f"e{number}", count=10 * images, dtype=np.float32).reshape(10, images)
        gradients.append(FactorPart(x_IK, errors_RK, (10,), rate, product_bound(x_IK, errors_RK)))
    applier = Applier(rule, [batched.spec], np.float32)
    applier.apply(batched, gradients)
    for gradient in gradients:
        applier.apply(single, [gradient])
    assert_same_bits(batched, single)


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
    return delta_of(values, 0.5)


def factors_of(x, error, K=1):
    x_IK, errors_RK = np.full((3, K), x, np.float32), np.full((2, K), error, np.float32)
    return FactorPart(x_IK, errors_RK, (2,), 0.5, product_bound(x_IK, errors_RK))


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
def test_a_gradient_that_is_not_finite_is_refused_alone_and_changes_nothing(rule, bad):
    shard, expected = (new_shard(rule, 6, 3, np.float32) for _ in range(2))
    applier = Applier(rule, [shard.spec], np.float32)
    assert applier.apply(shard, [bad]) == [False]
    assert_same_bits(shard, expected)
    good = [delta_of(np.full(6, 0.5, np.float32), 0.5), factors_of(0.5, 0.25)]
    assert applier.apply(shard, [good[0], bad, good[1]]) == [True, False, True]
    applier.apply(expected, good)
    assert_same_bits(shard, expected)


def test_factor_pushes_that_overflow_only_together_are_applied_one_by_one():
    shard, expected = (new_shard(Sgd(), 6, 3, np.float32) for _ in range(2))
    up, down = factors_of(1.2e19, 1.2e19), factors_of(1.2e19, -1.2e19)
    applier = Applier(Sgd(), [shard.spec], np.float32)
    assert not applier._can_join([up, up, down, down], 4)
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
    assert Applier(Sgd(), [shard.spec], np.float32).apply(shard, [delta_of(values, 1e-38)]) == [True]
    assert np.isfinite(shard.values).all()


@pytest.mark.parametrize("block", [1, 3, 7, 1000])
def test_the_step_count_of_adam_advances_once_per_push_whatever_the_blocks(monkeypatch, block):
    monkeypatch.setattr(rule_batches, "BLOCK", block)
    shard = new_shard(Adam(), 20, 4)
    applier = Applier(Adam(), [shard.spec], np.float64)
    gradients = [gradient_of("delta", n, 5, 4, 0.1) for n in range(3)]
    applier.apply(shard, gradients)
    assert shard.rule_state["steps"].tolist() == [3]
    applier.apply(shard, [delta_of(np.full(20, np.nan), 0.1), gradients[0]])
    assert shard.rule_state["steps"].tolist() == [4]


def test_a_shard_that_is_a_piece_of_a_row_takes_deltas():
    piece = ShardSpec(id=ShardId(0), tensor="t", start=10, stop=17, row_size=30, bucket=BucketId(0))
    assert not piece.whole_rows
    shard = Shard(spec=piece, values=np.zeros(7), rule_state={})
    applier = Applier(Sgd(), [piece], np.float64)
    applier.apply(shard, [delta_of(np.ones(7), 1.0), delta_of(np.ones(7), 2.0)])
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


# --- steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Sgd(), Sgd(momentum=0.9)], ids=repr)
@pytest.mark.parametrize("protocol", ["delta", "factors"])
def test_no_step_is_more_work_than_a_piece_or_what_a_shard_needs_at_once(monkeypatch, rule, protocol):
    monkeypatch.setattr(module, "PIECE_WORK", 40)
    monkeypatch.setattr(module, "PRODUCTS_PER_VALUE", 1)
    row, rows, pushes = 10, (3, 1, 2, 1), 4
    batch = [PushGradients((part_of(protocol, n, rows, row),)) for n in range(pushes)]
    shards = [new_shard(rule, count * row, row, number=n) for n, count in enumerate(rows)]
    single = [new_shard(rule, count * row, row, number=n) for n, count in enumerate(rows)]
    applier = Applier(rule, [shard.spec for shard in shards], np.float64)
    work, costs = applier.work_on(shards, batch), []
    while not work.done:
        costs.append(work.run(1))
    assert max(costs) <= max(rows) * row * pushes
    assert len(costs) > len(rows)
    assert [list(each) for each in work.finite] == [[True] * pushes] * len(rows)
    for push in batch:
        applier.apply_pushes(single, [push])
    for one, other in zip(shards, single, strict=True):
        np.testing.assert_allclose(one.values, other.values, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("rule", [Sgd(), Sgd(momentum=0.9), Adam(), AdamW()], ids=repr)
@pytest.mark.parametrize("protocol", ["delta", "factors"])
def test_a_large_shard_is_changed_in_ranges_with_the_bits_and_counts_of_one(monkeypatch, rule, protocol):
    batch = [PushGradients((part_of(protocol, n, (9,), 10),)) for n in range(3)]
    cut, whole = (new_shard(rule, 90, 10) for _ in range(2))
    Applier(rule, [whole.spec], np.float64).apply_pushes([whole], batch)
    monkeypatch.setattr(module, "PIECE_WORK", 40)
    monkeypatch.setattr(module, "PRODUCTS_PER_VALUE", 1)
    applier = Applier(rule, [cut.spec], np.float64)
    applied, real = [], applier.batches.apply

    def apply(targets, gradients, rates):
        applied.append(sum(len(target.values) for target in targets) * len(gradients))
        real(targets, gradients, rates)

    monkeypatch.setattr(applier.batches, "apply", apply)
    applier.apply_pushes([cut], batch)
    assert max(applied, default=0) <= 40
    np.testing.assert_array_equal(cut.values, whole.values)
    for name, array in whole.rule_state.items():
        np.testing.assert_array_equal(cut.rule_state[name], array)


def test_a_product_of_any_number_of_images_is_formed_in_bounded_steps(monkeypatch):
    monkeypatch.setattr(module, "PIECE_WORK", 64)
    monkeypatch.setattr(module, "PRODUCTS_PER_VALUE", 1)
    shard, whole = (new_shard(Sgd(momentum=0.5), 24, 6) for _ in range(2))
    push = PushGradients((part_of("factors", 0, (4,), 6, images=16),))
    applier = Applier(Sgd(momentum=0.5), [shard.spec], np.float64)
    work, costs = applier.work_on([shard], [push]), []
    while not work.done:
        costs.append(work.run(1))
    assert max(costs) <= 64
    gradient = dense(push.parts[0])
    applier.apply_pushes([whole], [PushGradients((DeltaPart(gradient, (24,), 0.5, finite=True),))])
    assert_same_bits(shard, whole)


# --- rates per shard -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("protocol", ["delta", "factors"])
def test_every_shard_of_every_push_has_the_rate_that_is_given_for_it(rule, protocol):
    row, rows, rates = 4, (3, 2), ((0.5, 0.25), (0.125, 1.0), (0.5, 0.5))
    pushes = [PushGradients((part_of(protocol, number, rows, row),)) for number in range(3)]
    together = [new_shard(rule, count * row, row, number=n) for n, count in enumerate(rows)]
    single = [new_shard(rule, count * row, row, number=n) for n, count in enumerate(rows)]
    applier = Applier(rule, [shard.spec for shard in together], np.float64)
    assert applier.apply_pushes(together, pushes, rates) == [[True] * 3] * 2
    for push, mine in zip(pushes, rates, strict=True):
        for shard, gradient, rate in zip(single, push.each(), mine, strict=True):
            applier.apply(shard, [msgspec.structs.replace(gradient, rate=rate)])
    for one, other in zip(together, single, strict=True):
        for a, b in zip(state_of(one), state_of(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-14)  # plain sgd joins factors


def test_a_push_is_sure_if_no_product_of_it_can_overflow():
    x_IK, errors_RK = np.ones((2, 1), np.float32), np.ones((2, 1), np.float32)
    sure = FactorPart(x_IK, errors_RK, (2,), 1.0, 2.0)
    assert PushGradients((sure, DeltaPart(np.ones(2), (2,), 1.0, finite=True))).is_sure
    assert not PushGradients((FactorPart(x_IK, errors_RK, (2,), 1.0, MAX32),)).is_sure
    assert not PushGradients((sure, DeltaPart(np.ones(2), (2,), 1.0, finite=False))).is_sure


def test_a_contribution_is_checked_shard_by_shard():
    applier = Applier(Sgd(), [spec_of(8, 2)], np.float32)
    specs = [spec_of(4, 2), spec_of(4, 2, 1)]
    flat = np.array([1, 2, 3, 4, 5, np.nan, 7, 8], np.float32)
    assert applier.check_finite(specs, PushGradients((DeltaPart(flat, (4, 4), 1.0, finite=False),))) == [
        True,
        False,
    ]
    x_IK = np.ones((2, 1), np.float32)
    errors_RK = np.array([[1], [2], [3], [np.inf]], np.float32)
    push = PushGradients((FactorPart(x_IK, errors_RK, (2, 2), 1.0, np.inf),))
    assert applier.check_finite(specs, push) == [True, False]
    assert applier.check_finite(specs, PushGradients((DeltaPart(flat, (4, 4), 1.0, finite=True),))) == [
        True,
        True,
    ]


# --- sums ------------------------------------------------------------------------------------


def drawn(purpose, *shape, dtype=np.float64):
    """Values whose sums do depend on their order, in the last bits."""
    return Dice(5).normal(purpose, count=int(np.prod(shape)), dtype=dtype).reshape(shape)


def part_of(protocol, number, rows, row, *, dtype=np.float64, images=3, make=sixteenths):
    if protocol == "delta":
        flat = make(f"d{number}", sum(rows) * row, dtype=dtype)
        return DeltaPart(flat, tuple(count * row for count in rows), 0.5, finite=True)
    x_IK = make(f"x{number}", row, images, dtype=dtype)
    errors_RK = make(f"e{number}", sum(rows), images, dtype=dtype)
    return FactorPart(x_IK, errors_RK, rows, 0.5, product_bound(x_IK, errors_RK))


def dense(part):
    return part.flat if isinstance(part, DeltaPart) else (part.errors_RK @ part.x_IK.T).reshape(-1)


MIXES = [("delta",) * 3, ("factors",) * 3, ("delta", "factors", "delta"), ("factors", "factors", "delta")]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("protocols", MIXES)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_sum_equals_the_rule_on_the_scaled_sum_of_the_gradients(rule, protocols, scale):
    row, rows = 4, (3, 2)
    parts = [part_of(p, n, rows, row, make=drawn, images=n + 1) for n, p in enumerate(protocols)]
    shards = [new_shard(rule, count * row, row, number=n) for n, count in enumerate(rows)]
    whole = [new_shard(rule, count * row, row, number=n) for n, count in enumerate(rows)]
    applier = Applier(rule, [shard.spec for shard in shards], np.float64)
    scratch = new_scratch(np.float64)
    for _ in range(2):
        pushes = [PushGradients((part,)) for part in parts]
        assert applier.apply_sum(shards, pushes, scale=scale, rate=0.25) == [True, True]
        mean = scale * sum(dense(part) for part in parts)
        for shard, gradient in zip(whole, (mean[:12], mean[12:]), strict=True):
            rule.apply(shard.values, shard.rule_state, gradient.copy(), rate=0.25, scratch=scratch)
    for one, other in zip(shards, whole, strict=True):
        for a, b in zip(state_of(one), state_of(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("protocols", MIXES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_bits_of_a_sum_depend_on_its_contributions_and_their_order_only(rule, protocols, dtype):
    row, rows = 40, (30, 21)
    options = {"dtype": dtype, "make": drawn, "images": 5}
    pushes = [PushGradients((part_of(p, n, rows, row, **options),)) for n, p in enumerate(protocols)]

    def summed(order, *, apart):
        shards = [new_shard(rule, count * row, row, dtype, number=n) for n, count in enumerate(rows)]
        applier = Applier(rule, [shard.spec for shard in shards], dtype)
        ordered = [pushes[number] for number in order]
        if apart:
            for place, shard in enumerate(shards):
                applier.apply_sum([shard], [push.only([place]) for push in ordered], scale=1 / 3, rate=0.1)
        else:
            applier.apply_sum(shards, ordered, scale=1 / 3, rate=0.1)
        return b"".join(array.tobytes() for shard in shards for array in state_of(shard))

    once = summed((0, 1, 2), apart=False)
    assert summed((0, 1, 2), apart=True) == once
    assert summed((0, 1, 2), apart=False) == once
    assert dtype is np.float64 or summed((2, 0, 1), apart=False) != once


def test_a_sum_that_overflows_is_refused_and_touches_nothing():
    for part in (
        DeltaPart(np.full(4, MAX32, np.float32), (2, 2), 1.0, finite=True),
        FactorPart(
            np.full((1, 1), MAX32, np.float32),
            np.array([[1], [1], [0], [0]], np.float32),
            (2, 2),
            1.0,
            np.inf,
        ),
    ):
        row = 1
        shards = [new_shard(Adam(), 2, row, np.float32, number=n) for n in range(2)]
        before = [shard.values.copy() for shard in shards]
        applier = Applier(Adam(), [shard.spec for shard in shards], np.float32)
        push = PushGradients((part,))
        applied = applier.apply_sum(shards, [push, push], scale=1.0, rate=0.1)
        assert applied == ([False, False] if isinstance(part, DeltaPart) else [False, True])
        for shard, was, ok in zip(shards, before, applied, strict=True):
            assert ok or (shard.values.tobytes() == was.tobytes() and not shard.rule_state["steps"].any())


def test_contributions_are_not_changed_by_the_sum_of_them():
    rows, row = (2, 1), 3
    for protocol in ("delta", "factors"):
        parts = [part_of(protocol, number, rows, row, make=drawn) for number in range(2)]
        before = [dense(part).copy() for part in parts]
        shards = [new_shard(Sgd(momentum=0.9), count * row, row, number=n) for n, count in enumerate(rows)]
        applier = Applier(Sgd(momentum=0.9), [shard.spec for shard in shards], np.float64)
        for scale in (1.0, 0.5):
            applier.apply_sum(shards, [PushGradients((part,)) for part in parts], scale=scale, rate=1.0)
            applier.apply_sum(shards, [PushGradients((parts[0],))], scale=scale, rate=1.0)
        for part, was in zip(parts, before, strict=True):
            np.testing.assert_array_equal(dense(part), was)
