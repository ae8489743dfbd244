"""Rules equal their formulas, in place, at any size."""

import tracemalloc

import numpy as np
import pytest

from adam_async.model import Adagrad, Adam, AdamW, ModelError, Sgd, make_rule, new_scratch, plain_step
from adam_async.model.keyed_random import Dice
from adam_async.model.rules import BLOCK, rule_of
from adam_async.run.config import Config
from adam_async.run.store_record import RuleRecord


def normal(name, size):
    return Dice(1).normal(name, count=size, dtype=np.float64)


def sgd(rule, p, g, memory, rate, step):
    g = g + rule.weight_decay * p
    memory["momentum"] = rule.momentum * memory.get("momentum", 0.0) + g
    return p - rate * (g + rule.momentum * memory["momentum"] if rule.nesterov else memory["momentum"])


def adagrad(rule, p, g, memory, rate, step):
    g = g + rule.weight_decay * p
    memory["squares"] = memory.get("squares", 0.0) + g * g
    return p - rate * g / (np.sqrt(memory["squares"]) + rule.epsilon)


def adam(rule, p, g, memory, rate, step):
    g = g + rule.weight_decay * p
    memory["mean"] = rule.beta1 * memory.get("mean", 0.0) + (1 - rule.beta1) * g
    memory["square"] = rule.beta2 * memory.get("square", 0.0) + (1 - rule.beta2) * g * g
    mean = memory["mean"] / (1 - rule.beta1**step)
    square = memory["square"] / (1 - rule.beta2**step)
    return p - rate * mean / (np.sqrt(square) + rule.epsilon)


def adamw(rule, p, g, memory, rate, step):
    return adam(Adam(), p, g, memory, rate, step) - rate * rule.weight_decay * p


CASES = [
    (Sgd(), sgd),
    (Sgd(momentum=0.9), sgd),
    (Sgd(weight_decay=0.01), sgd),
    (Sgd(momentum=0.9, weight_decay=0.01), sgd),
    (Sgd(momentum=0.9, nesterov=True), sgd),
    (Sgd(momentum=0.9, nesterov=True, weight_decay=0.01), sgd),
    (Adagrad(), adagrad),
    (Adagrad(weight_decay=0.01), adagrad),
    (Adam(), adam),
    (Adam(weight_decay=0.01), adam),
    (AdamW(), adamw),
    (AdamW(weight_decay=0.01), adamw),
]


@pytest.mark.parametrize("size", [1, 7, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize(("rule", "formula"), CASES)
def test_a_rule_equals_its_formula(rule, formula, size):
    values = normal("p", size)
    state, memory, expected = rule.new_state(values.shape, np.float64), {}, values.copy()
    scratch = new_scratch(np.float64)
    for step in range(1, 5):
        gradient = normal(f"g{step}", size)
        kept = gradient.copy()
        rule.apply(values, state, gradient, rate=0.1 / step, scratch=scratch)
        expected = formula(rule, expected, gradient, memory, 0.1 / step, step)
        np.testing.assert_array_equal(gradient, kept)
    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-13)


def test_a_state_that_two_threads_mixed_makes_no_step_without_bound():
    rule, values = Adam(), np.zeros(3, np.float32)
    state = rule.new_state(values.shape, np.float32)
    state["mean"][:] = -1.0, 0.0, 1.0
    for _ in range(5):
        state["square"][:] = 0.0
        before = values.copy()
        rule.apply(values, state, np.zeros_like(values), rate=0.001, scratch=new_scratch())
        assert np.abs(values - before).max() < 0.01
    assert values[0] > 0.0 == values[1] > values[2], "the direction is the mean's"


def test_the_bound_of_a_step_changes_no_step_of_a_history_that_comes_close_to_it():
    """Gradients that grow by beta2 / beta1 have the largest mean for their square."""
    rule, values, steps = Adam(), np.zeros(1), 80
    state, expected, memory = rule.new_state(values.shape, np.float64), values.copy(), {}
    for step in range(1, steps + 1):
        gradient = np.array([(rule.beta2 / rule.beta1) ** (step - steps)])
        rule.apply(values, state, gradient, rate=0.1, scratch=new_scratch(np.float64))
        expected = adam(rule, expected, gradient, memory, 0.1, step)
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    assert state["mean"] / np.sqrt(state["square"]) == pytest.approx(rule.largest_mean / 1.1, rel=1e-3)


@pytest.mark.parametrize(("rule", "formula"), CASES)
def test_a_rule_on_shards_equals_the_rule_on_the_whole(rule, formula):
    whole, parts = normal("p", 1000), normal("p", 1000)
    cuts = (slice(0, 300), slice(300, 1000))
    scratch = new_scratch(np.float64)
    state = rule.new_state(whole.shape, np.float64)
    states = [rule.new_state(parts[cut].shape, np.float64) for cut in cuts]
    for step in range(3):
        gradient = normal(f"g{step}", 1000)
        rule.apply(whole, state, gradient, rate=0.1, scratch=scratch)
        for cut, own in zip(cuts, states, strict=True):
            rule.apply(parts[cut], own, gradient[cut], rate=0.1, scratch=scratch)
    np.testing.assert_array_equal(whole, parts)
    for name in rule.state_names:
        np.testing.assert_array_equal(state[name], np.concatenate([own[name] for own in states]))
    assert set(state) == {*rule.state_names, *rule.scalar_names}
    assert all(state[name].shape == (1,) for name in rule.scalar_names)


@pytest.mark.parametrize(("rule", "formula"), CASES)
def test_float32_stays_float32_and_allocates_nothing(rule, formula):
    values, gradient = np.ones((64, 4096), np.float32), np.ones((64, 4096), np.float32)
    state, scratch = rule.new_state(values.shape, np.float32), new_scratch()
    rule.apply(values, state, gradient, rate=0.1, scratch=scratch)
    tracemalloc.start()
    try:
        rule.apply(values, state, gradient, rate=np.float64(0.1), scratch=scratch)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024
    assert all(state[name].dtype == np.float32 for name in rule.state_names)


def test_the_plain_step_is_sgd_without_memory():
    one, two, gradient = normal("p", 99), normal("p", 99), normal("g", 99)
    plain_step(one, gradient, rate=0.3, scratch=new_scratch(np.float64))
    Sgd().apply(two, {}, gradient, rate=0.3, scratch=new_scratch(np.float64))

    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(one, normal("p", 99) - 0.3 * gradient, rtol=1e-14)


@pytest.mark.parametrize(("rule", "formula"), CASES)
def test_a_rule_equals_that_of_pytorch(rule, formula):
    torch = pytest.importorskip("torch")
    values = normal("p", 50)
    tensor = torch.tensor(values.copy(), requires_grad=True)
    makers = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    options = {"lr": 0.1, "weight_decay": rule.weight_decay}
    if rule.name == "sgd":
        options |= {"momentum": rule.momentum, "nesterov": rule.nesterov}
    optimizer = makers[rule.name]([tensor], **options)
    state = rule.new_state(values.shape, np.float64)
    for step in range(4):
        gradient = normal(f"g{step}", 50)
        rule.apply(values, state, gradient, rate=0.1, scratch=new_scratch(np.float64))
        tensor.grad = torch.tensor(gradient)
        optimizer.step()
    np.testing.assert_allclose(values, tensor.detach().numpy(), rtol=1e-10)


def test_rules_are_made_by_name():
    assert make_rule("sgd", momentum=0.9, weight_decay=0.1) == Sgd(momentum=0.9, weight_decay=0.1)
    assert make_rule("adagrad", weight_decay=0.1) == Adagrad(weight_decay=0.1)
    assert make_rule("adam") == Adam() != make_rule("adamw") == AdamW()
    assert make_rule("sgd", momentum=0.9, nesterov=True) == Sgd(momentum=0.9, nesterov=True)
    with pytest.raises(ModelError, match="unknown rule 'lion'; known rules: sgd, adagrad, adam, adamw"):
        make_rule("lion")
    with pytest.raises(ModelError, match=r"'adam' takes no momentum, but momentum is 0.9"):
        make_rule("adam", momentum=0.9)
    with pytest.raises(ModelError, match="'adamw' takes no nesterov"):
        make_rule("adamw", nesterov=True)


def test_the_options_of_a_run_and_the_record_of_a_store_make_the_same_rule():
    options = {"rule": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    expected = Sgd(momentum=0.9, nesterov=True, weight_decay=0.1)
    assert rule_of(Config(**options)) == rule_of(RuleRecord(**options)) == expected


def test_constants_out_of_range_are_refused():
    with pytest.raises(ModelError, match=r"momentum must be at least 0 and below 1, not 1\.5"):
        Sgd(momentum=1.5)
    with pytest.raises(ModelError, match="nesterov needs a momentum above 0"):
        Sgd(nesterov=True)
    with pytest.raises(ModelError, match="weight_decay must not be negative, not -1"):
        Adagrad(weight_decay=-1.0)
    with pytest.raises(ModelError, match="beta2"):
        Adam(beta2=1.0)


def test_arrays_that_do_not_fit_are_refused():
    values = np.zeros((4, 4), np.float32)
    for gradient in (np.zeros((4, 4)), np.zeros((2, 8), np.float32), np.zeros((4, 4), np.float32).T[::-1]):
        with pytest.raises(ModelError, match="a rule needs C-contiguous arrays of one shape and dtype"):
            Sgd().apply(values, {}, gradient, rate=0.1, scratch=new_scratch())
    with pytest.raises(ModelError, match="scratch is float64, but values are float32"):
        Sgd().apply(values, {}, values.copy(), rate=0.1, scratch=new_scratch(np.float64))
