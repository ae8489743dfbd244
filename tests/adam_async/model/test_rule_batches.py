"""Batches of gradients equal the rule applied once for each, with any kernels."""

from importlib.util import find_spec

import numpy as np
import pytest

from adam_async.errors import ModelError
from adam_async.model import rule_batches
from adam_async.model.kernels import is_uncompiled, make_batches
from adam_async.model.keyed_random import Dice
from adam_async.model.rule_batches import NumpyBatches
from adam_async.model.rules import Adagrad, Adam, AdamW, Rule, Sgd, new_scratch

RULES = [
    Sgd(),
    Sgd(momentum=0.9),
    Sgd(weight_decay=0.1),
    Sgd(momentum=0.9, weight_decay=0.1),
    Sgd(momentum=0.9, nesterov=True),
    Sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    Adagrad(),
    Adagrad(weight_decay=0.1),
    Adam(),
    Adam(weight_decay=0.1),
    AdamW(weight_decay=0.1),
    AdamW(betas=(0.9, 0.82), eps=1e-15),
    Adam(betas=(0.0, 0.5), eps=0.1),
    Adagrad(eps=1e-3, initial_accumulator_value=0.1),
]
KERNELS = ["numpy", "numba"] if find_spec("numba") is not None else ["numpy"]
SIZES = [(1,), (40, 7, 100), (70_001, 3)]


class Target:
    def __init__(self, rule, size, dtype, number):
        self.values = Dice(number).normal("values", count=size, dtype=dtype)
        self.rule_state = rule.new_state((size,), dtype)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_batch_has_the_bits_of_the_rule_applied_once_for_each_gradient(kernels, rule, dtype, sizes):
    batches = make_batches(rule, np.dtype(dtype), kernels)
    together, apart = ([Target(rule, n, dtype, k) for k, n in enumerate(sizes)] for _ in range(2))
    scratch = new_scratch(dtype)
    for pushes in (1, 3, 4, 9):
        gradients = [Dice(9).normal(f"{pushes} {n}", count=sum(sizes), dtype=dtype) for n in range(pushes)]
        rates = [0.1 * (number + 1) for number in range(pushes)]
        batches.apply(together, gradients, rates)
        for gradient, rate in zip(gradients, rates, strict=True):
            at = 0
            for target in apart:
                part = gradient[at : at + len(target.values)]
                at += len(part)
                rule.apply(target.values, target.rule_state, part, rate=rate, scratch=scratch)
    for one, other in zip(together, apart, strict=True):
        assert one.values.tobytes() == other.values.tobytes()
        for name, array in one.rule_state.items():
            assert array.tobytes() == other.rule_state[name].tobytes()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_blocks_change_no_bit(monkeypatch, rule, block):
    whole, cut = (Target(rule, 20, np.float64, 1) for _ in range(2))
    gradients = [Dice(2).normal(f"{n}", count=20, dtype=np.float64) for n in range(3)]
    NumpyBatches(rule, np.float64).apply([whole], gradients, [0.1, 0.2, 0.3])
    monkeypatch.setattr(rule_batches, "BLOCK", block)
    NumpyBatches(rule, np.float64).apply([cut], gradients, [0.1, 0.2, 0.3])
    assert whole.values.tobytes() == cut.values.tobytes()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 1000, 4096, 4097, 70_001])
def test_values_beside_the_old_ones_have_the_bits_of_a_batch(kernels, dtype, size):
    target, gradient = Target(Sgd(), size, dtype, 1), Dice(2).normal("gradient", count=size, dtype=dtype)
    before, into = target.values.copy(), np.empty(size, dtype)
    batches = make_batches(Sgd(), np.dtype(dtype), kernels)
    assert batches.step(target.values, into, gradient, 0.1)
    assert target.values.tobytes() == before.tobytes()
    batches.apply([target], [gradient], [0.1])
    assert into.tobytes() == target.values.tobytes()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "overflow"])
def test_a_new_value_that_is_not_finite_is_found_at_each_place(kernels, dtype, bad):
    size, largest = 70_001, np.finfo(dtype).max
    batches, values = make_batches(Sgd(), np.dtype(dtype), kernels), np.full(size, largest)
    into = np.empty(size, dtype)
    for place in (0, 4095, 4096, 32_768, 65_535, 65_536, size - 1):
        gradient = np.zeros(size, dtype)
        gradient[place] = -largest if bad == "overflow" else bad
        with np.errstate(over="ignore", invalid="ignore"):
            assert not batches.step(values, into, gradient, 1.0), place
    assert batches.step(values, into, np.zeros(size, dtype), 1.0)


@pytest.mark.skipif("numba" not in KERNELS, reason="needs the extra fast")
def test_compiled_batches_read_no_memory_outside_their_arrays(monkeypatch):
    monkeypatch.setattr("adam_async.model.fast.batches.SMALL", 0)
    rule = Sgd()
    batches = make_batches(rule, np.dtype(np.float32), "numba")
    target = Target(rule, 8, np.float32, 1)
    for wrong in (np.ones(7, np.float32), np.ones(8), np.ones((2, 4), np.float32)):
        with pytest.raises(ModelError, match="a gradient has 8 values"):
            batches.apply([target], [wrong], [0.1])
    before = target.values.copy()
    batches.apply([target], [np.ones(16, np.float32)[::2]], [1.0])  # strides are copied
    np.testing.assert_array_equal(target.values, before - 1)
    target.values = np.zeros(8, np.float32)  # other memory, by the next call
    batches.apply([target], [np.ones(8, np.float32)], [1.0])
    np.testing.assert_array_equal(target.values, -np.ones(8, np.float32))
    target.values = np.zeros(16, np.float32)[::2]
    with pytest.raises(ModelError, match="C-contiguous"):
        batches.apply([target], [np.ones(8, np.float32)], [1.0])


class Plain(Rule, frozen=True, kw_only=True, tag="plain"):
    """A rule without a compiled kernel."""

    def apply(self, values, state, gradient, *, rate, scratch):
        values -= rate * gradient


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_rule_of_this_package_without_a_kernel_is_applied_by_numpy(monkeypatch, kernels):
    monkeypatch.setattr("adam_async.model.kernels.RULES", {"plain": Plain})
    dtype = np.dtype(np.float32)
    assert isinstance(make_batches(Plain(), dtype, kernels), NumpyBatches)
    if kernels == "numba":
        assert not is_uncompiled(Plain(), dtype)
