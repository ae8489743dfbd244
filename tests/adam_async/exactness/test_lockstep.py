"""R replicas in lockstep, of B / R images each, are serial SGD on batches of B; with the same bits always."""

from itertools import product

import numpy as np
import pytest

from adam_async.model.named import digits
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.config import Config
from tests.adam_async.exactness.serial import RULES, assert_close, assert_equal_bits, lockstep_sgd
from tests.adam_async.runs import (
    IMPATIENT,
    NETWORKS,
    SHARDED,
    TRAP,
    TRAP_LAYERS,
    TRAPPED,
    Rough,
    tiny_dataset,
    train,
    with_frozen,
)
from tests.transport.testing import Faults

pytestmark = pytest.mark.thorough

LOCKSTEP = {"consistency": "bsp", "seed": 5, "schedule": "constant"}


def designs():
    """Every rule with every number of replicas; the other options rotate."""
    beside = {"push_every": (1, 3), "protocol": ("delta", "factors", "auto"), "threads": (2, 1, 1, 2)}
    made = []
    for number, (rule, replicas) in enumerate(product(RULES, (1, 2, 3, 4))):
        chosen = {name: values[(number + number // 4) % len(values)] for name, values in beside.items()}
        name = "-".join(map(str, [rule, replicas, *chosen.values(), "sharded" if number % 5 else "whole"]))
        sharding = SHARDED if number % 5 else {}
        made.append(pytest.param({**RULES[rule], **chosen, **sharding, "replicas": replicas}, id=name))
    return made


def lockstep(**options):
    """Groups of four images in float64; `options` come first."""
    return Config(**{"epochs": 2, "images_per_group": 4, "dtype": "float64", **LOCKSTEP, **options})


async def assert_serial(config, dataset=None, *, network=None, close=1e-9, **by_hand):
    """A run has the weights of serial SGD; return its result, those weights and the number of steps."""
    options = {name: by_hand[name] for name in ("spec", "layers") if name in by_hand}
    result = await train(config, network, dataset=dataset, **options)
    expected, steps = lockstep_sgd(config, dataset or tiny_dataset(), **by_hand)
    assert_close(result.weights, expected, close)
    return result, expected, steps


@pytest.mark.parametrize("design", designs())
async def test_lockstep_equals_serial_sgd_of_the_whole_batch_in_float64(design):
    # 15 groups, the last of them short, which only 1 and 3 replicas divide among them.
    dataset = tiny_dataset(train=59)
    config = lockstep(**design)
    result, _, steps = await assert_serial(config, dataset)
    assert steps == 2 * -(-15 // (config.replicas * config.push_every))
    assert [epoch.images for epoch in result.epochs] == [59, 59]


@pytest.mark.parametrize(
    ("network", "epochs", "close"),
    [("local", 1, 1e-5), ("tcp", 1, 1e-5), pytest.param("local", 20, 1e-4, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("rule", RULES)
async def test_steps_in_float32_stay_close(rule, network, epochs, close):
    options = {"images_per_group": 2, "replicas": 3, "threads": 2, **RULES[rule], **LOCKSTEP, **SHARDED}
    config = Config(epochs=epochs, **options)
    _, _, steps = await assert_serial(config, network=NETWORKS[network](), close=close)
    assert steps == 10 * epochs


@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("rule", RULES)
async def test_sums_that_lag_are_the_serial_recurrence_of_delayed_gradients(rule, push_every):
    config = lockstep(replicas=3, threads=2, lag=1, push_every=push_every, **RULES[rule], **SHARDED)
    await assert_serial(config, tiny_dataset(train=59))


@pytest.mark.parametrize("lag", [0, 1])
async def test_links_that_fail_change_nothing_of_the_sums(lag):
    options = {"replicas": 2, "threads": 1, "lag": lag, "waits": IMPATIENT}
    config = lockstep(epochs=1, **options, **RULES["momentum"], **SHARDED)
    faults = Faults(cut=0.03, drop_reply=0.03, delay=0.2, delay_s=0.002)
    result, _, _ = await assert_serial(config, network=Rough(NETWORKS["local"](), faults))
    assert sum(result.statistics[f"worker-{n}"].parameters.reconnects for n in (0, 1)) > 0


async def test_more_replicas_than_groups_leave_the_others_nothing_to_add():
    config = lockstep(epochs=3, images_per_group=30, replicas=4, threads=1, **RULES["adam"])
    _, _, steps = await assert_serial(config)
    assert steps == 3


async def test_beside_frozen_layers_the_others_train_as_in_serial_sgd():
    spec = with_frozen(digits(), "conv2d")
    config = lockstep(replicas=2, threads=1, **RULES["momentum"])
    result, _, _ = await assert_serial(config, spec=spec)
    assert result.model.frozen


@pytest.mark.parametrize("push_every", [1, 2])
async def test_a_gradient_that_is_not_finite_counts_no_images_in_its_sum(push_every):
    dataset = tiny_dataset()
    bad = 17
    dataset.train_images[bad].reshape(-1)[0] = TRAP
    options = {"replicas": 3, "threads": 1, "keep_going": True, "push_every": push_every}
    config = lockstep(**options, **RULES["momentum"], **SHARDED)
    result, _, _ = await assert_serial(config, dataset, spec=TRAPPED, layers=TRAP_LAYERS, refused=(bad,))
    assert [epoch.images for epoch in result.epochs] == [60, 60]
    servers = [told for node, told in result.statistics.items() if node.startswith("ps-")]
    assert sum(told.refused for told in servers) == 2 * sum(len(told.versions) for told in servers)


@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("mode", [{"lag": 0}, {"lag": 1}], ids=str)
async def test_a_warm_start_in_lockstep_is_serial_sgd_on_the_images_of_one_replica(mode, push_every):
    options = {"replicas": 3, "threads": 1, "push_every": push_every, "warm_start": 19, **mode}
    # 15 groups in an epoch: the warm start takes all of the first one, and reaches into the second.
    config = lockstep(epochs=3, **options, **RULES["adagrad"], **SHARDED)
    await assert_serial(config, tiny_dataset(train=59))


def clipped(gradients, weights, rate, *, clip=0.5):
    """All tensors together no longer than `clip`."""
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
    for gradient in gradients.values():
        gradient *= min(1.0, clip / norm)


def held_to_layers(gradients, weights, rate, *, share=0.02):
    """No tensor changed by more than `share` of its length; those that are all zeros have none."""
    for name, gradient in gradients.items():
        change, size = rate * np.linalg.norm(gradient), np.linalg.norm(weights[name])
        if size:
            gradient *= min(1.0, share * size / change)


def both(gradients, weights, rate):
    clipped(gradients, weights, rate)
    held_to_layers(gradients, weights, rate)


LIMITS = {
    "clip": (clipped, {"clip": 0.5}),
    "layer-rate": (held_to_layers, {"layer_rate": 0.02}),
    "both": (both, {"clip": 0.5, "layer_rate": 0.02}),
}


@pytest.mark.parametrize("protocol", ["delta", "factors"])
@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("limit", LIMITS)
async def test_limits_of_a_step_are_those_of_its_whole_gradient(limit, push_every, protocol):
    by_hand, options = LIMITS[limit]
    dataset = tiny_dataset(train=59)
    options = {"threads": 1, "push_every": push_every, "protocol": protocol, **options}
    config = lockstep(**options, **RULES["momentum"], **SHARDED)
    _, expected, _ = await assert_serial(config, dataset, limit=by_hand)
    free, _ = lockstep_sgd(config, dataset)
    assert np.linalg.norm(free["fc1.weight"] - expected["fc1.weight"]) > 1e-3, "nothing was limited"


DROPPING = ModelSpec(
    name="dropping",
    input_shape=(1, 8, 8),
    layers=(
        LayerSpec.of("flat", "flatten"),
        LayerSpec.of("fc1", "dense", outputs=64),
        LayerSpec.of("relu", "relu"),
        LayerSpec.of("drop", "dropout", rate=0.3),
        LayerSpec.of("fc2", "dense", outputs=10),
        LayerSpec.of("loss", "softmax_cross_entropy"),
    ),
)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("push_every", [1, 3])
async def test_lockstep_gives_the_same_bits_with_any_threads_and_any_stragglers(push_every, lag):
    shared = {"epochs": 2, "images_per_group": 4, "replicas": 3, "lag": lag, "push_every": push_every}
    dataset = tiny_dataset(train=119)
    flows = [
        (None, {"threads": 1, "in_flight": 1}),
        (None, {"threads": 4, "in_flight": 9, "read_ahead": 1}),
        (Rough(NETWORKS["local"](), Faults(delay=0.5, delay_s=0.002)), {"threads": 2}),
        (NETWORKS["tcp"](), {"threads": 2, "evaluation": "concurrent"}),
    ]
    found = []
    for network, flow in flows:
        config = Config(**shared, **flow, **RULES["momentum"], **LOCKSTEP, **SHARDED)
        found.append(await train(config, network, dataset=dataset, spec=DROPPING))
    for other in found[1:]:
        assert_equal_bits(other.weights, found[0].weights)
        losses = [epoch.train_loss for epoch in found[0].epochs]
        assert [epoch.train_loss for epoch in other.epochs] == pytest.approx(losses, rel=1e-6)
