"""Clipping and layer-wise rate control: pushes keep the limits in either protocol."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from adam_async.run.shard_table import assign_buckets
from adam_async.worker.gradient_clipping import Scaling, gradient_norms, norm_of
from adam_async.worker.push_plan import PushBuffer, plan_pushes

IMAGES = 4


def buffer_of(protocol, *, servers=2, groups=1, dtype="float64", scale=1.0, seed=0):
    """A step's buffer, its tensors' dense gradients in float64, and weights."""
    network = Network(digits(), dtype=dtype)
    table = table_of(network, shard_bytes=8 << 10)
    buckets = assign_buckets(table, [f"ps-{n}" for n in range(servers)])
    plan = plan_pushes(network, table, buckets, images=IMAGES * groups, wanted=protocol)
    dice = np.random.default_rng(seed)
    weights = {p.name: dice.normal(size=p.shape).astype(dtype) for p in network.parameters}
    step = PushBuffer(network, plan, IMAGES * groups)
    step.clear()
    dense = {p.name: np.zeros(p.shape) for p in network.parameters}
    for _ in range(groups):
        context = network.context(IMAGES)
        context.load(dice.normal(size=(IMAGES, 1, 8, 8)), dice.integers(0, 10, IMAGES))
        network.forward(weights, context)
        network.backward(weights, context)
        context.slots(len(network.layers) - 2).error[...] *= scale
        network.backward_layers(weights, context, range(len(network.layers) - 1))
        group = PushBuffer(network, plan, IMAGES)
        group.fill(context)
        step.add(group)
        for name, total in dense.items():
            gradient = np.empty(total.shape, dtype)
            network.deltas(context, {name: gradient})
            total += gradient
    return step, dense, weights


def dense_of(step, dense):
    """The gradients in the buffer, multiplied out and put together."""
    found = {name: [] for name in dense}
    for name, delta in step.deltas():
        found[name].append(delta)
    for name, inputs, errors in step.factors():
        found[name] += [(rows @ inputs.T).reshape(-1) for rows in errors]
    return {name: np.concatenate(parts) for name, parts in found.items()}


CASES = [("delta", 1), ("factors", 1), ("factors", 3), ("delta", 2)]


@pytest.mark.parametrize(("protocol", "groups"), CASES)
def test_norms_are_those_of_the_dense_gradients(protocol, groups):
    step, dense, _ = buffer_of(protocol, groups=groups)
    norms = gradient_norms(step)
    assert norms.keys() == dense.keys()
    for name, gradient in dense.items():
        assert norms[name] == pytest.approx(np.linalg.norm(gradient), rel=1e-12)


@given(
    seed=st.integers(0, 99), scale=st.floats(-6, 6), clip=st.floats(0.01, 10.0), rate=st.floats(0.001, 10.0)
)
@settings(max_examples=30, deadline=None)
def test_limits_in_float32_are_kept_to_its_precision(seed, scale, clip, rate):
    for protocol in ("delta", "factors"):
        step, dense, weights = buffer_of(protocol, dtype="float32", seed=seed, scale=10.0**scale)
        Scaling(clip=clip, layer_rate=0.05).apply(step, weights, rate=rate)
        left = dense_of(step, dense)
        total = math.hypot(*(np.linalg.norm(g) for g in dense.values()))
        clipped = min(1.0, clip / total)
        for name, gradient in dense.items():
            size, norm = np.linalg.norm(weights[name]), clipped * np.linalg.norm(gradient)
            local = min(rate, 0.05 * size / norm) if norm else rate
            assert np.linalg.norm(left[name]) == pytest.approx(norm * local / rate, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("protocol", ["delta", "factors"])
def test_the_direction_stays(protocol):
    step, dense, weights = buffer_of(protocol, groups=2)
    norm = math.hypot(*(np.linalg.norm(g) for g in dense.values()))
    factors = Scaling(clip=norm / 4, layer_rate=0.0).apply(step, weights, rate=1.0)
    assert factors.keys() == dense.keys()
    assert list(factors.values()) == pytest.approx([0.25] * len(factors))
    assert math.hypot(*gradient_norms(step).values()) == pytest.approx(norm / 4)


def test_a_gradient_within_the_limits_is_not_scaled():
    step, dense, weights = buffer_of("delta")
    before = dense_of(step, dense)
    assert Scaling(clip=1e9, layer_rate=1e9).apply(step, weights, rate=1.0) == {}
    for name, values in dense_of(step, dense).items():
        np.testing.assert_array_equal(values, before[name])


def test_a_tensor_of_zeros_keeps_the_rate():
    step, _, weights = buffer_of("delta")
    weights["fc1.bias"][:] = 0.0
    factors = Scaling(clip=0.0, layer_rate=1e-6).factors(step, weights, rate=1.0)
    assert factors.keys() == weights.keys() - {"fc1.bias"}


def test_an_average_over_all_images_is_what_is_limited_where_servers_average():
    step, dense, weights = buffer_of("delta", groups=2)
    norm = math.hypot(*(np.linalg.norm(g) for g in dense.values())) / 2
    assert Scaling(clip=norm * 1.01, layer_rate=0.0).factors(step, weights, rate=1.0, unit=0.5) == {}
    assert Scaling(clip=norm * 0.99, layer_rate=0.0).factors(step, weights, rate=1.0, unit=0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_left_for_the_server_to_refuse(bad):
    step, _, weights = buffer_of("delta")
    name, share = next(step.deltas())
    share[0] = bad
    factors = Scaling(clip=1e-3, layer_rate=1e-9).apply(step, weights, rate=1.0)
    assert name not in factors
    assert not np.isfinite(share[0])


def test_a_norm_that_overflows_only_in_single_precision_is_clipped():
    step, _, weights = buffer_of("delta", dtype="float32")
    _, share = next(step.deltas())
    share[:] = 1e30
    assert norm_of(share) == pytest.approx(1e30 * math.sqrt(share.size))
    Scaling(clip=1.0, layer_rate=0.0).apply(step, weights, rate=1.0)
    assert math.hypot(*gradient_norms(step).values()) == pytest.approx(1.0)


def test_a_run_without_limits_scales_nothing():
    assert Scaling.of(Config()) is None
    assert Scaling.of(Config(clip=1.0)) is not None
    assert Scaling.of(Config(layer_rate=0.002)) is not None
