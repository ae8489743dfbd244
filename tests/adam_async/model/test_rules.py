"""Rules equal their formulas, in place, at any size."""

import tracemalloc

import msgspec
import numpy as np
import pytest

from adam_async.errors import ConfigError
from adam_async.model import Adagrad, Adam, AdamW, ModelError, Sgd, new_scratch, plain_step
from adam_async.model.keyed_random import Dice
from adam_async.model.rules import BLOCK, RULES, AnyRule, rule_of
from adam_async.run.config import Config


def normal(name, size):
    return Dice(1).normal(name, count=size, dtype=np.float64)


def sgd(rule, p, g, memory, rate, step):
    g = g + rule.weight_decay * p
    memory["momentum"] = rule.momentum * memory.get("momentum", 0.0) + g
    return p - rate * (g + rule.momentum * memory["momentum"] if rule.nesterov else memory["momentum"])


def adagrad(rule, p, g, memory, rate, step):
    g = g + rule.weight_decay * p
    memory["squares"] = memory.get("squares", rule.initial_accumulator_value) + g * g
    return p - rate * g / (np.sqrt(memory["squares"]) + rule.eps)


def adam(rule, p, g, memory, rate, step):
    g = g + rule.weight_decay * p
    beta1, beta2 = rule.betas
    memory["mean"] = beta1 * memory.get("mean", 0.0) + (1 - beta1) * g
    memory["square"] = beta2 * memory.get("square", 0.0) + (1 - beta2) * g * g
    mean = memory["mean"] / (1 - beta1**step)
    square = memory["square"] / (1 - beta2**step)
    return p - rate * mean / (np.sqrt(square) + rule.eps)


def adamw(rule, p, g, memory, rate, step):
    return adam(Adam(betas=rule.betas, eps=rule.eps), p, g, memory, rate, step) - rate * rule.weight_decay * p


CASES = [
    (Sgd(), sgd),
    (Sgd(momentum=0.9), sgd),
    (Sgd(weight_decay=0.01), sgd),
    (Sgd(momentum=0.9, weight_decay=0.01), sgd),
    (Sgd(momentum=0.9, nesterov=True), sgd),
    (Sgd(momentum=0.9, nesterov=True, weight_decay=0.01), sgd),
    (Adagrad(), adagrad),
    (Adagrad(weight_decay=0.01), adagrad),
    (Adagrad(eps=0.1, initial_accumulator_value=0.5), adagrad),
    (Adam(), adam),
    (Adam(weight_decay=0.01), adam),
    (AdamW(weight_decay=0.0), adamw),
    (Adam(betas=(0.5, 0.75), eps=0.01), adam),
    (AdamW(betas=(0.0, 0.0)), adamw),
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
        gradient = np.array([(rule.betas[1] / rule.betas[0]) ** (step - steps)])
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
    # The constants have PyTorch's names.
    options = {name: getattr(rule, name) for name in rule.__struct_fields__ if name != "rate"}
    optimizer = makers[rule.name]([tensor], lr=0.1, **options)
    state = rule.new_state(values.shape, np.float64)
    for step in range(4):
        gradient = normal(f"g{step}", 50)
        rule.apply(values, state, gradient, rate=0.1, scratch=new_scratch(np.float64))
        tensor.grad = torch.tensor(gradient)
        optimizer.step()
    np.testing.assert_allclose(values, tensor.detach().numpy(), rtol=1e-10)


def test_the_options_of_a_run_name_its_rule_and_constants():
    options = {"rule": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    assert rule_of(Config(**options)) == Sgd(momentum=0.9, nesterov=True, weight_decay=0.1)
    assert rule_of(Config()) == Sgd()
    assert rule_of(Config(rule="adamw")) == AdamW(weight_decay=0.0), "a run has its own default"
    options = {"rule": "adam", "betas": (0.9, 0.95), "eps": 1e-6}
    assert rule_of(Config(**options)) == Adam(betas=(0.9, 0.95), eps=1e-6)
    options = {"rule": "adagrad", "initial_accumulator_value": 0.1}
    assert rule_of(Config(**options)) == Adagrad(initial_accumulator_value=0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"rule": "adam", "momentum": 0.9},
            "momentum=0.9 has no effect with rule=adam: set rule to sgd, or leave",
        ),
        ({"rule": "adamw", "nesterov": True}, "nesterov=True has no effect with rule=adamw"),
        ({"betas": (0.9, 0.95)}, "betas=.* has no effect with rule=auto: set rule to adam or adamw, or"),
        ({"rule": "sgd", "eps": 0.1}, "set rule to adagrad or adam or adamw"),
        ({"rule": "adam", "initial_accumulator_value": 0.1}, "set rule to adagrad"),
        ({"momentum": 1.5}, "momentum must be at least 0 and below 1, not 1.5"),
        ({"nesterov": True}, "nesterov needs a momentum above 0"),
        ({"rule": "adam", "betas": (0.9,)}, "betas must be two numbers, each at least 0 and below 1, not"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_rule_of_a_run_are_refused_with_the_cure(options, said):
    with pytest.raises(ConfigError, match=said):
        Config(**options)


def test_a_run_may_name_each_rule_and_the_error_of_another_name_has_them_all():
    for name in RULES:
        assert rule_of(Config(rule=name)).name == name
    with pytest.raises(ConfigError, match=f"rule must be auto, {', '.join(RULES)}, or package"):
        Config(rule="lion")


NUMBERS = ["rate", "weight_decay", "momentum", "eps", "initial_accumulator_value"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 1e13, "1", True, None])
def test_a_constant_that_is_no_number_within_its_bounds_is_refused_by_name(name, value):
    for rule in RULES.values():
        if name in rule.__struct_fields__:
            with pytest.raises(ConfigError, match=f"{rule.__name__}: {name} must be"):
                rule(**{name: value})


def test_numbers_of_numpy_become_those_of_python():
    made = Sgd(rate=np.float32(0.5), momentum=np.float64(0.25), nesterov=np.True_)
    assert (made, type(made.rate), type(made.nesterov)) == (
        Sgd(rate=0.5, momentum=0.25, nesterov=True),
        float,
        bool,
    )


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, float("nan")), 0.9, ("a", 0.9)])
def test_betas_out_of_range_are_refused(betas):
    with pytest.raises(ConfigError, match=r"Adam: betas must be two numbers, each at least 0 and below 1"):
        Adam(betas=betas)


def test_constants_that_would_make_a_step_without_bound_are_refused():
    with pytest.raises(ConfigError, match=r"AdamW: betas \(0.99, 0.9\) put no bound on a step"):
        AdamW(betas=(0.99, 0.9))
    for rule in (Adagrad, Adam):
        with pytest.raises(ConfigError, match=f"{rule.__name__}: eps must be within 1e-15"):
            rule(eps=0.0)
    with pytest.raises(ConfigError, match="Sgd: nesterov needs a momentum above 0"):
        Sgd(nesterov=True)


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_a_constant_that_no_rule_has_is_refused_by_name(name):
    for rule in RULES.values():
        with pytest.raises(TypeError, match=f"Unexpected keyword argument '{name}'"):
            rule(**{name: True})


@pytest.mark.parametrize(("rule", "formula"), CASES)
def test_a_rule_survives_a_message(rule, formula):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=AnyRule) == rule
    assert msgspec.json.decode(msgspec.json.encode(rule), type=AnyRule) == rule


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rule": "lion"}, "Invalid value 'lion'"),
        ({"rule": "sgd", "rate": -1.0}, "Expected `float` >= 0.0"),
        ({"rule": "sgd", "weight_decay": float("nan")}, "Expected `float` >= 0.0"),
        ({"rule": "sgd", "momentum": 1.0}, "Expected `float` < 1.0"),
        ({"rule": "adam", "momentum": 0.5}, "unknown field `momentum`"),
        ({"rule": "sgd", "nesterov": True}, "nesterov needs a momentum above 0"),
        ({"rule": "adam", "betas": [0.99, 0.9]}, "put no bound on a step"),
    ],
    ids=str,
)
def test_a_rule_of_a_message_has_the_same_bounds(fields, said):
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=AnyRule)


def test_arrays_that_do_not_fit_are_refused():
    values = np.zeros((4, 4), np.float32)
    for gradient in (np.zeros((4, 4)), np.zeros((2, 8), np.float32), np.zeros((4, 4), np.float32).T[::-1]):
        with pytest.raises(ModelError, match="a rule needs C-contiguous arrays of one shape and dtype"):
            Sgd().apply(values, {}, gradient, rate=0.1, scratch=new_scratch())
    with pytest.raises(ModelError, match="scratch is float64, but values are float32"):
        Sgd().apply(values, {}, values.copy(), rate=0.1, scratch=new_scratch(np.float64))
